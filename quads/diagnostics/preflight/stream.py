"""All streams through decoder layer i, then layer i + 1: one layer in memory, per stream one hidden state per token.

    layer i    weights as nvfp4:  trainer w4a16 on calibration tokens -> RAC scores -> masks of every RAC stream
                                  trainer w4a16 on scored tokens, listened to -> row per quantized input
                                  the other streams with nvfp4 weights
               weights as bf16, fp8: theirs

Memory: one layer in bf16, the same in fp32 for one weight format at a time, and streams x tokens x D hidden values.
Static masks are calibrated as in training (quads.trainer.calibration): residual scores of the NVFP4 activation
quantizer on the W4A16 trainer's inputs; the calibration sequences are never scored.
drift_i = |h_stream - h_ref| / |h_ref| after layer i over all scored tokens; ref is the float32 trainer with NVFP4
weights for streams that have them, else the one with BF16 weights.
Streaming changes no number: a stream's values are those of the whole model after surgery (tested for each). It uses
transformers' own forward of the decoder with a list of one layer, so that masks and rotary embeddings are the family's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quads.config import ConfigError
from quads.diagnostics.layers import Sums, accumulate, layer_row, qsnr
from quads.diagnostics.preflight.checkpoint import Checkpoint
from quads.diagnostics.preflight.engine import as_engine, engine_value
from quads.diagnostics.preflight.sequences import Chunk
from quads.diagnostics.preflight.variants import SAME_WEIGHTS, Stream
from quads.layers.surgery import QuadsLinear, observing, quads_layers
from quads.numerics.qdq import activation_residual
from quads.numerics.rac import RacSpec, channel_scores, select

log = logging.getLogger(__name__)

# Elements of a weight that are quantized at once, which bounds the quantizer's temporaries. On a CPU few enough that
# malloc gives the same memory again: larger temporaries are new mappings each time, which the kernel fills with zeros.
SLAB = {"cpu": 2**22, "cuda": 2**26}
OVERFLOW = (
    "The weights on disk are finite, so activations overflow: check that the checkpoint generates text in bf16, and "
    "that its config.json (class, norms, scales) belongs to its weights"
)
Observer = Callable[[str, Tensor, Tensor | None], None]


@dataclass
class Pass:
    """Result: hidden states before the final norm by stream key, one [b, L, D] per chunk; rows; drift; selected share.

    drift: stream key -> one number per layer. selected: stream key -> share of channels with a second pass.
    """

    hidden: dict[str, list[Tensor]]
    layers: list[dict[str, Any]] = field(default_factory=list)
    drift: dict[str, list[float]] = field(default_factory=dict)
    selected: dict[str, list[tuple[int, int]]] = field(default_factory=dict)


@torch.no_grad()
def run_layers(
    checkpoint: Checkpoint,
    streams: Sequence[Stream],
    scored: Sequence[Chunk],
    calibration: Sequence[Chunk],
    spec: RacSpec,
    device: str,
) -> Pass:
    """See the module docstring; `spec`: the RAC whose masks the rows describe. ConfigError: weights, overflow."""
    result = Pass({stream.key: [] for stream in streams})
    checkpoint.skeleton.model.rotary_emb.to(device)
    with checkpoint.materialised("model.embed_tokens", device) as embed:
        for stream in streams:
            dtype = torch.bfloat16 if stream.engine else torch.float32
            result.hidden[stream.key] = [embed(chunk.ids.to(device)).to(dtype) for chunk in scored]
        calibrating = [embed(chunk.ids.to(device)) for chunk in calibration]
    count, begun = len(checkpoint.skeleton.model.layers), time.monotonic()
    for index in range(count):
        with (
            checkpoint.materialised(f"model.layers.{index}", device) as layer,
            _alone(checkpoint.skeleton, index) as run,
        ):
            try:
                _Layer(layer, run, result, streams, spec, device).advance(scored, calibration, calibrating)
            except ValueError as error:
                raise ConfigError(f"layer {index} of {count} cannot be run: {error}. {OVERFLOW}") from error
        _note_drift(result, streams, scored)
        spent = time.monotonic() - begun
        log.info(
            "layer %d/%d, %.0f s, about %.0f s left", index + 1, count, spent, spent / (index + 1) * (count - index - 1)
        )
    return result


@contextmanager
def _alone(model: torch.nn.Module, index: int) -> Iterator[Callable[[Tensor], Tensor]]:
    """hidden [b, L, D] -> hidden after layer `index`: the decoder's own forward with that layer and no final norm."""
    inner, config = model.model, model.config
    layers, norm, kinds = inner.layers, inner.norm, getattr(config, "layer_types", None)
    inner.layers, inner.norm = torch.nn.ModuleList([layers[index]]), torch.nn.Identity()
    if kinds is not None:
        config.layer_types = [kinds[index]]  # the forward looks a layer's attention mask up by its place in the list
    try:
        yield lambda h: inner(inputs_embeds=h, use_cache=False).last_hidden_state
    finally:
        inner.layers, inner.norm = layers, norm
        if kinds is not None:
            config.layer_types = kinds


class _Layer:
    """One materialised layer while all streams pass through it."""

    def __init__(
        self,
        layer: torch.nn.Module,
        run: Callable[[Tensor], Tensor],
        result: Pass,
        streams: Sequence[Stream],
        spec: RacSpec,
        device: str,
    ) -> None:
        self.layer, self.run, self.result, self.streams = layer, run, result, streams
        self.spec, self.device = spec, device
        self.swapped = [module for _, module in quads_layers(layer)]
        weights = {id(p) for m in self.swapped for n, p in m.named_parameters(recurse=False) if n != "bias"}
        # What stays in high precision: float32 in the trainer, rounded to bf16 in an engine.
        self.small = [
            (p, p.data, engine_value(module, p.data))
            for module in layer.modules()
            for p in module.parameters(recurse=False)
            if id(p) not in weights
        ]
        self.scores: dict[str, Tensor] = {}
        self.signal: dict[str, float] = {}
        self.error: dict[tuple[str, str], float] = {}

    def advance(self, scored: Sequence[Chunk], calibration: Sequence[Chunk], calibrating: list[Tensor]) -> None:
        """Move every stream, and `calibrating` in place, through this layer."""
        for fmt in ("nvfp4", "bf16", "fp8"):
            own = [s for s in self.streams if s.precision.weight == fmt]
            if not own and fmt != "fp8":
                raise ValueError(f"no stream with {fmt} weights: the references bf16 and {SAME_WEIGHTS} must run")
            with self._weights(fmt, keep=bool(own)):
                for stream in own:
                    reference = stream.key == f"trainer:{SAME_WEIGHTS}"
                    if reference:
                        self._set(stream)
                        for i, chunk in enumerate(calibration):
                            with observing(self.swapped, self._score(chunk)):
                                calibrating[i] = self.run(calibrating[i])
                    self._move(stream, scored, listen=reference)

    def _move(self, stream: Stream, scored: Sequence[Chunk], listen: bool) -> None:
        self._set(stream)
        sums: dict[str, Sums] = {}
        masks = {key: self._mask(key, self.spec) for key in self.scores}
        hidden = self.result.hidden[stream.key]
        with as_engine(self.layer) if stream.engine else nullcontext():
            for i, chunk in enumerate(scored):
                with observing(self.swapped, self._accumulate(sums, masks, chunk)) if listen else nullcontext():
                    hidden[i] = self.run(hidden[i])
        if listen:
            self.result.layers += [self._row(key, s, masks[key]) for key, s in sums.items()]
        if stream.precision.rac is not None:
            self._note_selected(stream)

    def _set(self, stream: Stream) -> None:
        """Storage of the small parameters, and precision and masks of every swapped layer."""
        for parameter, wide, stored in self.small:
            parameter.data = stored if stream.engine else wide
        rac = stream.precision.rac
        static = {key: self._mask(key, rac) for key in self.scores} if rac is not None and rac.mask == "static" else {}
        for module in self.swapped:
            module.quads.precision, module.quads.masks = stream.precision, static

    def _mask(self, key: str, spec: RacSpec) -> Tensor:
        return select(self.scores[key], spec)

    @contextmanager
    def _weights(self, fmt: str, keep: bool) -> Iterator[None]:
        """Quantize every weight once; the layers multiply with the result while the block runs."""
        precision = next((s.precision for s in self.streams if s.precision.weight == fmt), None)
        if not keep or precision is None:
            yield
            return
        for module in self.swapped:
            module.quads.precision = precision
        # Quantize all before any is hidden: q, k and v read each other's weights for their common scale.
        quantized = [self._quantized(module) for module in self.swapped]
        for module, value in zip(self.swapped, quantized, strict=True):
            _hide(module, value)
        del quantized
        try:
            yield
        finally:
            for module in self.swapped:
                _show(module)

    def _quantized(self, module: torch.nn.Module) -> dict[str, Tensor]:
        """fp32 dequantized weight by parameter name."""
        setup = module.quads
        if isinstance(module, QuadsLinear):
            w = setup.dequantized(module.weight, setup.shared_amax(), "weight")
            self._note_error(setup.key(), setup.precision.weight, module.weight, w)
            return {"weight": w}
        w13, w2 = module.gate_up_proj, module.down_proj
        whole = tuple(torch.empty(w.shape, dtype=torch.float32, device=w.device) for w in (w13, w2))
        size = max(1, SLAB[w13.device.type] // w13[0].numel())
        for part in torch.arange(len(w13)).split(size):
            rows = slice(int(part[0]), int(part[-1]) + 1)
            done = module.quantized(w13[rows], w2[rows], setup.dequantized)
            for target, value, source, name in zip(whole, done, (w13, w2), ("w13", "w2"), strict=True):
                target[rows] = value
                self._note_error(setup.key(name), setup.precision.weight, source[rows], value)
        return {"gate_up_proj": whole[0], "down_proj": whole[1]}

    def _note_error(self, key: str, fmt: str, stored: Tensor, dequantized: Tensor) -> None:
        if fmt == "bf16":
            return
        stored = stored.detach().float()
        self.error[key, fmt] = self.error.get((key, fmt), 0.0) + _sum2(stored - dequantized)
        if fmt == "nvfp4":
            self.signal[key] = self.signal.get(key, 0.0) + _sum2(stored)

    def _row(self, key: str, sums: Sums, mask: Tensor) -> dict[str, Any]:
        weight = {"weight_qsnr_db_nvfp4": qsnr(self.signal[key], self.error[key, "nvfp4"])}
        return layer_row(key, sums, self.spec, mask.cpu()) | weight

    def _note_selected(self, stream: Stream) -> None:
        rac = stream.precision.rac
        assert rac is not None
        for scores in self.scores.values():
            mask = select(scores, rac)
            self.result.selected.setdefault(stream.key, []).append((int(mask.sum()), mask.numel()))

    def _score(self, chunk: Chunk) -> Observer:
        def observe(key: str, x: Tensor, token: Tensor | None) -> None:
            scores = channel_scores(activation_residual(_real(x, token, chunk)), self.spec.score)
            self.scores[key] = self.scores[key] + scores if key in self.scores else scores

        return observe

    def _accumulate(self, sums: dict[str, Sums], masks: dict[str, Tensor], chunk: Chunk) -> Observer:
        def observe(key: str, x: Tensor, token: Tensor | None) -> None:
            accumulate(sums.setdefault(key, Sums()), _real(x, token, chunk), self.spec, masks[key])

        return observe


def _sum2(x: Tensor) -> float:
    """Sum of squares, exact to float64 without a float64 copy of x."""
    return x.square().sum(-1, dtype=torch.float64).sum().item()


def _real(x: Tensor, token: Tensor | None, chunk: Chunk) -> Tensor:
    valid = chunk.valid.flatten().to(x.device)
    return x[valid if token is None else valid[token]]


def _hide(module: torch.nn.Module, values: dict[str, Tensor]) -> None:
    """An instance attribute that stands in front of LayerSetup.weight: the kept weight instead of quantizing again."""
    module.quads.weight = lambda owner, param, quantize: values[param]


def _show(module: torch.nn.Module) -> None:
    module.quads.__dict__.pop("weight", None)


def _note_drift(result: Pass, streams: Sequence[Stream], scored: Sequence[Chunk]) -> None:
    for stream in streams:
        name = SAME_WEIGHTS if stream.precision.weight == "nvfp4" else "bf16"
        reference = result.hidden[f"trainer:{name}"]
        if stream.key == f"trainer:{name}":
            continue
        error = norm = 0.0
        for h, ref, chunk in zip(result.hidden[stream.key], reference, scored, strict=True):
            valid = chunk.valid.to(h.device)
            error += _sum2(h[valid].float() - ref[valid])
            norm += _sum2(ref[valid])
        result.drift.setdefault(stream.key, []).append((error / norm) ** 0.5)
