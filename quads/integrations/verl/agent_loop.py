"""Single-turn agent loop that runs in the trainer process: one engine call per sample, one put per batch.

verl hook: `actor_rollout_ref.rollout.agent.agent_loop_manager_class`. Contract, as verl states it: implement
`generate_sequences` and put the outputs into TransferQueue. Serves one replica, synchronous training, rule-based
grading; `runtime.agent_loop: verl` selects verl's own loop for everything else.

Why it exists: verl's AgentLoopWorker spends about 35 ms of Python per sample (a Hydra instantiate, a reward RPC, two
balancer RPCs, one put), which is nearly all of a step when the model is tiny.

A grade whose status is a failure of the grader (not of the answer) gets no reward signal: the sample's score is set to
the mean of its group, which makes its advantage zero, and the status is counted.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import ray
import torch
import transfer_queue as tq
from tensordict.tensorclass import NonTensorStack
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.utils import hf_tokenizer
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from quads.rewards.registry import grader
from quads.rewards.types import FAILURES, STATUSES, Grade

log = logging.getLogger(__name__)

GRADERS_AT_ONCE = 4


@dataclass
class Sample:
    """One response to be generated: its prompt row, prompt ids and index in the group."""

    row: dict[str, Any]
    prompt_ids: list[int]
    session: int


def _row(batch: Any, index: int) -> dict[str, Any]:
    """Row `index` of a verl TensorDict as plain values."""

    def value(v: Any) -> Any:
        if isinstance(v, torch.Tensor):
            return v[index]
        return v[index].data if isinstance(v, NonTensorStack) else v.data

    return {k: value(v) for k, v in batch.items()}


def neutral_scores(grades: list[Grade], groups: list[str]) -> list[float]:
    """Scores in order; a failed grade gets the mean score of the rest of its group (0 if there is none)."""
    sums: dict[str, list[float]] = {}
    for grade, group in zip(grades, groups, strict=True):
        if grade.status not in FAILURES:
            sums.setdefault(group, []).append(grade.score)
    mean = {g: sum(s) / len(s) for g, s in sums.items()}
    return [
        mean.get(group, 0.0) if grade.status in FAILURES else grade.score
        for grade, group in zip(grades, groups, strict=True)
    ]


class InlineAgentLoopManager:
    """See the module docstring. Built by verl through `create`."""

    @classmethod
    def create(cls, config: Any, llm_client: Any, **_: Any) -> InlineAgentLoopManager:
        return cls(config, llm_client)

    def __init__(self, config: Any, llm_client: Any) -> None:
        self.rollout = config.actor_rollout_ref.rollout
        self.tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)
        self.server = llm_client  # the handle itself: see compat.use_direct_server
        self.metrics: dict[str, float] = {}

    def _samples(self, batch: Any, copies: int) -> list[Sample]:
        samples = []
        for index in range(len(batch)):
            row = _row(batch, index)
            encoded = self.tokenizer.apply_chat_template(
                list(row["raw_prompt"]), add_generation_prompt=True, tokenize=True, return_dict=True
            )
            ids = list(encoded["input_ids"])
            samples += [Sample(row, ids, session) for session in range(copies)]
        return samples

    def _generate(self, samples: list[Sample], sampling: dict[str, Any]) -> list[Any]:
        calls = [
            self.server.generate.remote(request_id=uuid4().hex, prompt_ids=s.prompt_ids, sampling_params=dict(sampling))
            for s in samples
        ]
        return ray.get(calls)

    def _grade(self, sample: Sample, ids: list[int]) -> Grade:
        finished = bool(ids) and ids[-1] == self.tokenizer.eos_token_id
        # Special tokens inside a response are part of it: dropping them could turn a malformed answer into a right one.
        text = self.tokenizer.decode(ids[:-1] if finished else ids, skip_special_tokens=False)
        truth = sample.row["reward_model"]["ground_truth"]
        return grader(sample.row["data_source"])(text, truth, finished)

    def _fields(self, sample: Sample, output: Any, grade: Grade, score: float, seconds: float) -> dict[str, Any]:
        ids = list(output.token_ids)[: self.rollout.response_length]
        steps = (output.extra_fields or {}).get("global_steps")
        loop = AgentLoopOutput(
            prompt_ids=sample.prompt_ids,
            response_ids=ids,
            response_mask=[1] * len(ids),
            response_logprobs=list(output.log_probs)[: len(ids)],
            num_turns=2,
            reward_score=score,
            multi_modal_data={},
            metrics=AgentLoopMetrics(
                generate_sequences=seconds, num_preempted=-1 if output.num_preempted is None else output.num_preempted
            ),
            extra_fields={
                **(output.extra_fields or {}),
                "min_global_steps": steps,
                "max_global_steps": steps,
                "reward_extra_info": {"score": score, "acc": grade.score},
                "turn_scores": [],
                "tool_rewards": [],
            },
        )
        fields = loop.as_dict() | sample.row | {"session_id": sample.session}
        fields.pop("multi_modal_data", None)
        fields["loss_mask"] = fields["response_mask"]
        fields["input_ids"] = torch.cat([fields["prompts"], fields["responses"]])
        fields["position_ids"] = torch.arange(len(fields["input_ids"]))
        fields["multi_modal_inputs"] = {}
        return fields

    def generate_sequences(self, batch: Any) -> None:
        """Generate, grade and enqueue every sample of `batch` (a TensorDict of prompts)."""
        start = time.perf_counter()
        validate = "validate" in batch and bool(batch["validate"])
        if "validate" in batch:
            batch.pop("validate")
        how = self.rollout.val_kwargs if validate else self.rollout
        samples = self._samples(batch, how.n)
        sampling = {
            "temperature": how.temperature,
            "top_p": how.top_p,
            "top_k": how.top_k,
            "repetition_penalty": 1.0,
            "logprobs": self.rollout.calculate_log_probs,
        }
        outputs = self._generate(samples, sampling)
        seconds = time.perf_counter() - start
        length = self.rollout.response_length
        # Graders that wait for a worker or a sandbox run side by side; a grader of microseconds loses nothing.
        with ThreadPoolExecutor(GRADERS_AT_ONCE) as pool:
            grades = list(pool.map(self._grade, samples, [list(o.token_ids)[:length] for o in outputs]))
        self.metrics = {
            "quads/seconds_generate": seconds,
            "quads/truncated_share": sum(o.stop_reason == "length" for o in outputs) / len(outputs),
            **{f"quads/status/{s}": sum(g.status == s for g in grades) / len(grades) for s in STATUSES},
        }
        scores = neutral_scores(grades, [s.row["uid"] for s in samples])
        rows = [
            self._fields(s, o, g, score, seconds)
            for s, o, g, score in zip(samples, outputs, grades, scores, strict=True)
        ]
        self._enqueue(samples, rows, "val" if validate else "train")

    def _enqueue(self, samples: list[Sample], rows: list[dict[str, Any]], partition: str) -> None:
        keys = [f"{s.row['uid']}_{s.session}_0" for s in samples]
        tags = [
            {
                "status": "success",
                "prompt_len": len(r["prompts"]),
                "response_len": len(r["responses"]),
                "seq_len": len(r["input_ids"]),
                "global_steps": s.row["global_steps"],
                "min_global_steps": r["extra_fields"]["min_global_steps"],
                "max_global_steps": r["extra_fields"]["max_global_steps"],
            }
            for s, r in zip(samples, rows, strict=True)
        ]
        tq.kv_batch_put(keys=keys, fields=list_of_dict_to_tensordict(rows), tags=tags, partition_id=partition)
        prompts = list(dict.fromkeys(s.row["uid"] for s in samples))
        tq.kv_batch_put(keys=prompts, partition_id=partition, tags=[{"status": "finished"}] * len(prompts))
