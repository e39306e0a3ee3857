"""Log-probs of an export: does a model with its dequantized weights say what the checkpoint's own quantization says?

    export    stock Hugging Face model in fp32, weights = the export's dequantized values, the rest as stored (bf16)
    trainer   the checkpoint after this project's surgery with NVFP4 weights (rung T1 of the ladder), rest in bf16
    engine    real vLLM with this project's plugin in mode w4a16, fp32, weights quantized by the engine itself

Activations are unquantized in all three, so equal weights leave differences of summation order only. Differences are
|log p - log p| in nats per scored token. W4A4 exports are compared by their weights in the same way: their static
activation scales are a property of the serving engine and have no counterpart here.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from quads.diagnostics.ladder import Tokens, load_model, score
from quads.exporting.checkpoint import Checkpoint, ShardWriter
from quads.exporting.verify import Export
from quads.layers.setup import Precision

# fp32 sums in another order, and one flipped choice of an expert never happens at equal weights
LIMIT_NATS = 1e-4


def dequantized_model(folder: Path, rest: Path | None = None) -> torch.nn.Module:
    """A stock fp32 Hugging Face model that holds the export's dequantized weights, in eval mode.

    rest: checkpoint that the other tensors are taken from (default: the export's own, which are bf16 values).
    """
    from transformers import AutoModelForCausalLM

    export = Export(folder)
    quantized = set(export.modules)
    others = Checkpoint(rest) if rest is not None else export.files
    config = {k: v for k, v in export.files.config.items() if k != "quantization_config"} | {"dtype": "float32"}
    with tempfile.TemporaryDirectory(prefix="quads-export-") as name:
        plain = Path(name)
        writer = ShardWriter(plain)
        for module in sorted(quantized):
            writer.add(f"{module}.weight", export.dequantized(module))
        for tensor in export.files.names():
            if tensor.rpartition(".")[0] not in quantized:
                writer.add(tensor, others.get(tensor).float())
        writer.close()
        (plain / "config.json").write_text(json.dumps(config))
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
            plain, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
        return model.eval()


def tokens_of(sequences: Sequence[Sequence[int]]) -> Tokens:
    """Sequences scored from their second token on."""
    length = torch.tensor([len(s) for s in sequences])
    ids = torch.zeros(len(sequences), int(length.max()), dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(list(sequence))
    return Tokens(ids, torch.ones_like(length), length)


def random_sequences(vocabulary: int, count: int = 16, length: int = 16, seed: int = 0) -> list[list[int]]:
    """Uniform token ids: weights are compared, so any text will do."""
    generator = torch.Generator().manual_seed(seed)
    drawn: list[list[int]] = torch.randint(vocabulary, (count, length), generator=generator).tolist()
    return drawn


def against_trainer(
    folder: Path, checkpoint: Path, skip: tuple[str, ...], sequences: Sequence[Sequence[int]]
) -> dict[str, float]:
    """Largest and mean difference of export and trainer over all tokens, in nats."""
    tokens = tokens_of(sequences)
    trainer = load_model(checkpoint, Precision("nvfp4", "bf16", skip=skip), stored=True)
    ours = score(trainer, tokens).logp[tokens.mask]
    del trainer
    return _difference(score(dequantized_model(folder), tokens).logp[tokens.mask], ours)


def against_engine(
    folder: Path, checkpoint: Path, skip: tuple[str, ...], sequences: Sequence[Sequence[int]], receipt: Path
) -> dict[str, float]:
    """Largest and mean difference of export and the real engine (vLLM with the plugin, w4a16, fp32), in nats."""
    from quads.config import Experiment, Grpo
    from quads.integrations.vllm.score import ScoringEngine
    from quads.rollout.mode import RolloutMode

    tokens = tokens_of(sequences)
    # the engine takes its lengths and batch sizes from an experiment; only the longest sequence matters here
    grpo = Grpo(max_prompt_tokens=int(tokens.length.max()))
    experiment = Experiment(name="verify", title="Log-prob parity of an export", arms=("w4a16",), grpo=grpo)
    mode = RolloutMode("nvfp4", "bf16")
    with ScoringEngine(checkpoint, mode, experiment, masks=None, skip=skip, receipt=receipt, dtype="float32") as engine:
        scored = engine.score([list(s) for s in sequences], [1] * len(sequences))
    theirs = torch.tensor([value for row in scored for value in row])
    # a fp32 engine does not round the other tensors to bf16
    ours = score(dequantized_model(folder, rest=checkpoint), tokens).logp[tokens.mask]
    return _difference(ours, theirs)


def _difference(a: Tensor, b: Tensor) -> dict[str, float]:
    d = (a - b).abs()
    return {"tokens": float(d.numel()), "max_nats": float(d.max()), "mean_nats": float(d.mean())}
