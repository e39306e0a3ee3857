"""Static activation scales: what W4A4 checkpoints of both formats hold and this project's engine does not need.

    amax_i = largest |x| over all rows that input i sees while the model reads the calibration tokens
    gs_i   = 2688 / amax_i      one per input; q, k, v share theirs, and so do all experts of a layer

x is the input of the quantized matrix in a model with NVFP4 weights and unquantized activations, the state in which
QUADS trains. A value beyond amax saturates at serving time: there is no headroom and no percentile.
Differs from the project's own rollouts, where every token has its own dynamic scale: an exported W4A4 checkpoint is
served with other activation numerics than it was trained with (docs/export.md has the measured size of that).
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from quads.layers.setup import Precision
from quads.layers.surgery import apply_surgery, quads_layers


class InputRange:
    """Observer that keeps the largest magnitude and the number of rows per input; fp32 amax by engine name."""

    def __init__(self) -> None:
        self.amax: dict[str, Tensor] = {}
        self.rows: dict[str, int] = {}

    def __call__(self, key: str, x: Tensor, token: Tensor | None) -> None:
        largest = x.abs().amax().to(torch.float32).cpu()
        self.amax[key] = torch.maximum(self.amax[key], largest) if key in self.amax else largest
        self.rows[key] = self.rows.get(key, 0) + len(x)


@torch.no_grad()
def input_amax(
    checkpoint: Path, ids: list[list[int]], skip: tuple[str, ...], scale_group: str = "fused", device: str = "cpu"
) -> dict[str, Tensor]:
    """fp32 [] by engine name of the input. ids: token ids of each sequence. Raises ValueError for an input not seen.

    The whole model is loaded in fp32 on `device`; sequences are read one at a time, so nothing is padded.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    model = model.to(device).eval()
    apply_surgery(model, Precision("nvfp4", "bf16", scale_group=scale_group, skip=skip))
    seen = InputRange()
    for _, module in quads_layers(model):
        module.quads.observer = seen
    for sequence in ids:
        model(input_ids=torch.tensor([sequence], device=device), use_cache=False)
    dead = sorted(key for key, amax in seen.amax.items() if not bool(amax > 0))
    if not ids or dead:
        raise ValueError(f"calibration saw only zeros at {dead or 'every input'}; give more calibration tokens")
    return seen.amax


def read_tokens(path: Path, checkpoint: Path) -> list[list[int]]:
    """Token ids of a calibration parquet: its column input_ids, or its prompts through the chat template."""
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    if "input_ids" in table.column_names:
        return [list(map(int, ids)) for ids in table["input_ids"].to_pylist()]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    how = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    return [list(tokenizer.apply_chat_template(p, **how)["input_ids"]) for p in table["prompt"].to_pylist()]
