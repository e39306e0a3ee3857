"""Child process of test_vllm.py: runs real in-process vLLM engines one after another and stores what they said.

    python engine_runs.py JOB.json      job: {"models": {"A", "B"}, "masks": {"A", "B"}, "prompts": [[int]], "out": DIR}

One import of vLLM serves all engines. For every mode (float32 engine): sampled log-probs and prompt log-probs from A,
then weights B pushed in buckets of 7 tensors, prompt log-probs again, then a fresh engine from B. Output:
OUT/<mode>.json with token ids and log-probs, OUT/<name>.safetensors with engine weights, OUT/misc.json with what the
error cases said.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

from vllm_engines import HIGH_PRECISION, WORKER_EXTENSION, new_engine  # isort: skip  (sets the environment)
from vllm_engines import message, runner_of, score, stop, update, weight_stream  # isort: skip

import torch
from vllm import LLM, SamplingParams

from quads.integrations.vllm.moe import QuadsMoEMethod
from quads.integrations.vllm.quantization import QuadsConfig
from quads.integrations.vllm.reload import LayerwiseReload
from quads.integrations.vllm.state import LayerState
from quads.layers.names import RAC_MASK_PREFIX
from quads.layers.weights import quantize_rows
from quads.numerics.qdq import fake_quantize_activation
from quads.numerics.rac import RacSpec
from quads.rollout.mode import EngineConfig, RolloutMode

NEW_TOKENS = 6
RAC = RacSpec(0.5)
MODES = {
    "bf16": RolloutMode("bf16", "bf16"),
    "fp8": RolloutMode("fp8", "fp8"),
    "w4a16": RolloutMode("nvfp4", "bf16"),
    "w4a4": RolloutMode("nvfp4", "nvfp4"),
    "w4a4+rac": RolloutMode("nvfp4", "nvfp4", RAC),
    "w4a4+rac_token": RolloutMode("nvfp4", "nvfp4", RacSpec(0.5, mask="token")),
}
WEIGHT_RUNS = {
    "fused": RolloutMode("nvfp4", "nvfp4"),
    "shard": RolloutMode("nvfp4", "nvfp4", scale_group="shard"),
    "fp8": RolloutMode("fp8", "fp8"),
    "bf16": RolloutMode("bf16", "bf16"),
}


def start(model: str, mode: RolloutMode, dtype: str, masks: str | None = None, receipt: str | None = None) -> LLM:
    config = mode.to_quantization_config(rac_masks=masks, skip=HIGH_PRECISION, receipt=receipt)
    return new_engine(model, config, dtype=dtype, worker_extension_cls=WORKER_EXTENSION)


def push(llm: LLM, model: str, masks: str | None, drop: str = "") -> None:
    """An update in buckets that cut through layers, masks in the middle of the stream."""
    update(llm, [(n, t) for n, t in weight_stream(model, masks) if not (drop and drop in n)], 7)


def addresses(llm: LLM) -> dict[str, int]:
    model = runner_of(llm).get_model()
    found = {name: p.data_ptr() for name, p in model.named_parameters() if p.numel()}
    for module in model.modules():
        state = getattr(module, "quads_state", None)
        found |= {key: mask.data_ptr() for key, mask in (state.masks if state else {}).items()}
    return found


def sample(llm: LLM, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
    """Sequences (prompt + sampled tokens) and log-probs of the sampled tokens."""
    params = SamplingParams(
        temperature=1.0, max_tokens=NEW_TOKENS, logprobs=0, seed=1, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    tokens = [list(o.prompt_token_ids) + list(o.outputs[0].token_ids) for o in outputs]
    logps = [
        [d[t].logprob for d, t in zip(o.outputs[0].logprobs, o.outputs[0].token_ids, strict=True)] for o in outputs
    ]
    return tokens, logps


def parity_and_reload(job: dict, name: str, mode: RolloutMode, out: Path) -> None:
    masks = job["masks"] if mode.needs_masks else {"A": None, "B": None}
    receipt = out / f"{name}.receipt.json"
    llm = start(job["models"]["A"], mode, "float32", "sync" if mode.needs_masks else None, str(receipt))
    if mode.needs_masks:
        push(llm, job["models"]["A"], masks["A"])
    result: dict = {}
    result["sequences"], result["sampled"] = sample(llm, job["prompts"])
    result["prompt"] = score(llm, result["sequences"])
    before = addresses(llm)
    push(llm, job["models"]["B"], masks["B"])
    result["moved"] = sorted(n for n, address in addresses(llm).items() if before[n] != address)
    result["tensors"] = len(before)
    result["reloaded"] = score(llm, result["sequences"])
    result["receipt"] = json.loads(receipt.read_text())
    stop(llm)
    llm = start(job["models"]["B"], mode, "float32", masks["B"])
    result["fresh"] = score(llm, result["sequences"])
    stop(llm)
    (out / f"{name}.json").write_text(json.dumps(result))


def error_cases(job: dict) -> dict[str, str]:
    llm = start(job["models"]["A"], MODES["w4a4+rac"], "float32", "sync")
    said = {}
    runner = runner_of(llm)
    said["no_mask"] = message(lambda: sample(llm, job["prompts"][:1]))

    def unknown_mask() -> None:
        with LayerwiseReload(runner.get_model(), runner.vllm_config, runner.model_config) as update:
            update.load([(RAC_MASK_PREFIX + "model.layers.7.nowhere", torch.ones(4, dtype=torch.bool))])

    said["unknown_mask"] = message(unknown_mask)
    said["after_failure"] = message(lambda: push(llm, job["models"]["A"], job["masks"]["A"]))
    stop(llm)
    llm = start(job["models"]["A"], MODES["w4a4+rac"], "float32", "sync")
    said["update_without_masks"] = message(lambda: push(llm, job["models"]["A"], None))
    stop(llm)
    llm = start(job["models"]["A"], MODES["w4a4"], "float32")
    said["incomplete"] = message(lambda: push(llm, job["models"]["A"], None, drop="layers.1.self_attn.k_proj"))
    stop(llm)
    said["unknown_key"] = message(
        lambda: LLM(model=job["models"]["A"], skip_tokenizer_init=True, quantization="quads",
                    hf_overrides={"quantization_config": {"quant_method": "quads", "wieght": "nvfp4"}})
    )  # fmt: skip
    return said


def experts_difference(on_input: bool, mapped: bool) -> float:
    """max |difference| of the experts method and a loop over (token, choice): router weight on the input, foreign
    experts.
    """
    generator = torch.Generator().manual_seed(3)
    tokens, slots, local, width, hidden = 9, 2, 3, 32, 16
    mode = RolloutMode("nvfp4", "nvfp4")
    w13 = quantize_rows(
        torch.randn(local, 2 * hidden, width, generator=generator), "nvfp4", [hidden] * 2, "fused", "w13"
    )
    w2 = quantize_rows(torch.randn(local, width, hidden, generator=generator), "nvfp4", [width], "fused", "w2")
    state = LayerState("e", "experts", EngineConfig(mode), {"e.w13": width, "e.w2": hidden}, [hidden] * 2)
    expert_map = torch.tensor([-1, 0, 1, -1, 2]) if mapped else None
    layer = SimpleNamespace(w13_weight=w13.qs, w13_rcp=w13.rcp, w2_weight=w2.qs, w2_rcp=w2.rcp, expert_map=expert_map,
                            apply_router_weight_on_input=on_input, quads_state=state)  # fmt: skip
    method = object.__new__(QuadsMoEMethod)
    method.config, method.name = QuadsConfig(EngineConfig(mode)), "e"
    x = torch.randn(tokens, width, generator=generator)
    ids = torch.randint(0, 5 if mapped else local, (tokens, slots), generator=generator)
    weights = torch.rand(tokens, slots, generator=generator)
    got = method.apply(layer, x, weights, ids)
    want = torch.zeros(tokens, width)
    for t in range(tokens):
        for s in range(slots):
            e = int(expert_map[ids[t, s]]) if mapped else int(ids[t, s])
            if e < 0:
                continue
            row = x[t : t + 1] * weights[t, s] if on_input else x[t : t + 1]
            gate, up = (fake_quantize_activation(row, "nvfp4") @ w13.dequantize()[e].T).chunk(2, -1)
            h = fake_quantize_activation(torch.nn.functional.silu(gate) * up, "nvfp4")
            want[t] += (h @ w2.dequantize()[e].T)[0] * (1 if on_input else weights[t, s])
    return float((got - want).abs().max() / want.abs().max())


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    out = Path(job["out"])
    for name, mode in MODES.items():
        parity_and_reload(job, name, mode, out)
    for name, mode in WEIGHT_RUNS.items():
        llm = start(job["models"]["A"], mode, "bfloat16")
        llm.collective_rpc("quads_dump_weights", args=(str(out / f"weights_{name}.safetensors"),))
        llm.collective_rpc("quads_reload_from_file", args=(job["models"]["B"],))
        llm.collective_rpc("quads_dump_weights", args=(str(out / f"weights_{name}_B.safetensors"),))
        stop(llm)
    cases = {f"{a},{b}": experts_difference(a, b) for a in (False, True) for b in (False, True)}
    (out / "experts.json").write_text(json.dumps(cases))
    (out / "errors.json").write_text(json.dumps(error_cases(job)))


if __name__ == "__main__":
    main()
