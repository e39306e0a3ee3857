"""Layer table, scale granularities, perturbation and outlier rescaling against brute force on tiny models."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tiny_moe import tiny_model

from quads.config import Model, Outliers
from quads.diagnostics import drift, scales
from quads.diagnostics.ladder import Tokens, prepare_model, score
from quads.diagnostics.layers import layer_table, observed
from quads.diagnostics.outliers import rescale
from quads.layers.setup import Precision
from quads.layers.surgery import apply_surgery
from quads.numerics.qdq import fake_quantize_activation
from quads.numerics.rac import RacSpec
from quads.toy.model import make_model
from quads.toy.outliers import inject
from quads.trainer.calibration import calibrate

SPEC = RacSpec(0.5)
IDS = torch.randint(2, 43, (6, 10), generator=torch.Generator().manual_seed(0))
KEYS = [
    f"model.layers.{i}.{name}"
    for i in (0, 1)
    for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.experts.w13", "mlp.experts.w2")
]


@pytest.fixture(scope="module")
def t1():
    return prepare_model(tiny_model(1), Precision("nvfp4"))


@pytest.fixture(scope="module")
def masks(t1):
    return calibrate(t1, IDS, torch.ones_like(IDS), SPEC)


def inputs(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    with observed(model, lambda key, x: found.__setitem__(key, x.clone())), torch.no_grad():
        model(IDS, use_cache=False)
    return found


def test_layer_table_against_brute_force(t1, masks) -> None:
    xs, rows = inputs(t1), layer_table(t1, IDS, SPEC, masks)
    assert [row["layer"] for row in rows] == KEYS
    for row in rows:
        x, mask = xs[row["layer"]], masks[row["layer"]]
        q, c = fake_quantize_activation(x, "nvfp4"), fake_quantize_activation(x, "nvfp4", SPEC, mask)
        energy = (x - q).double().square().sum(0)
        dead, nonzero = int(((x != 0) & (q == 0)).sum()), int((x != 0).sum())
        assert row["dead_zone_share_of_nonzero"] == dead / nonzero
        for name, value in (("nvfp4", q), ("nvfp4_rac", c)):
            want = 10 * math.log10(float(x.double().square().sum() / (x - value).double().square().sum()))
            assert row[f"activation_qsnr_db_{name}"] == pytest.approx(want, abs=1e-3)
        assert row["rac_energy_share_static"] == pytest.approx(float(energy[mask].sum() / energy.sum()), rel=1e-5)
        # calibrated on these very tokens: the best mask
        assert row["rac_energy_share_static"] == pytest.approx(row["rac_energy_share_oracle"], rel=1e-9)
        assert row["mask_overlap_share"] == 1.0 and row["rac_energy_share_uniform"] == 0.5
        assert row["rac_error2_ratio_measured"] == pytest.approx(row["rac_error2_ratio_predicted"], abs=0.02)
        assert 15 < row["weight_qsnr_db_nvfp4"] < 25


def test_a_wrong_mask_captures_less(t1, masks) -> None:
    good = layer_table(t1, IDS, SPEC, masks)
    bad = layer_table(t1, IDS, SPEC, {key: ~mask for key, mask in masks.items()})
    for a, b in zip(good, bad, strict=True):
        assert b["rac_energy_share_static"] == pytest.approx(1 - a["rac_energy_share_static"], abs=1e-9)
        assert b["mask_overlap_share"] == 0.0 and b["activation_qsnr_db_nvfp4_rac"] < a["activation_qsnr_db_nvfp4_rac"]


def test_scale_per_token_is_the_numerics_own_path(masks) -> None:
    """The study's own quantizer at granularity `token` gives T2's log-probs, with and without RAC."""
    tokens = Tokens(IDS, torch.full((6,), 5), torch.full((6,), 10))
    for rac in (None, SPEC):
        t2 = prepare_model(tiny_model(1), Precision("nvfp4", "nvfp4", rac=rac), masks=masks)
        own = prepare_model(tiny_model(1), Precision("nvfp4"))
        scales.with_scale(own, "token", masks=masks if rac else None)
        difference = (score(own, tokens).logp - score(t2, tokens).logp).abs()
        # decoding q s / gs in another order moves last bits, which can flip a code further down: most tokens agree
        assert float((difference < 1e-5).double().mean()) > 0.9


def test_forward_scale_depends_on_the_batch_and_constant_clips(t1) -> None:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(3))
    loud = torch.cat([x, 100 * x[:1]])
    gs = scales.global_scale
    alone, among = (scales.fake_quantize(v, gs(scales.amax_of(v, "forward")))[:4] for v in (x, loud))
    assert not torch.equal(alone, among)
    alone, among = (scales.fake_quantize(v, gs(scales.amax_of(v, "token")))[:4] for v in (x, loud))
    assert torch.equal(alone, among)
    constant = scales.calibrated_amax(t1, IDS[:1, :3])
    counter = scales.with_scale(
        prepared := prepare_model(tiny_model(1), Precision("nvfp4")), "constant", constant=constant
    )
    with torch.no_grad():
        prepared(IDS)
    assert 0 < counter.share < 1
    with pytest.raises(ValueError, match="needs calibrated_amax"):
        scales.with_scale(t1, "constant")


def test_perturbation_without_quantizer_is_one_and_nvfp4_amplifies(t1, masks) -> None:
    rows = drift.amplification_table(t1, IDS, SPEC, masks, (2.0**-12, 2.0**-3), (0, 1))
    assert len(rows) == len(KEYS) * 2 * 2 * len(drift.QUANTIZERS)

    def mean(quantizer: str, noise: float) -> float:
        own = [r for r in rows if r["quantizer"] == quantizer and r["noise_over_rms"] == noise]
        return sum(r["amplification_change_over_noise"] for r in own) / len(own)

    assert mean("none", 2.0**-12) == pytest.approx(1, abs=1e-9)
    assert mean("nvfp4", 2.0**-12) > mean("nvfp4_rac", 2.0**-12) > 1
    assert mean("nvfp4", 2.0**-12) > 3 * mean("nvfp4", 2.0**-3)


def test_outliers_off_undoes_the_injection() -> None:
    """Strength 12 scaled back to 1 is the model before the injection, channel for channel."""
    plain = make_model(Model(), 0)
    outliers = Outliers(strength=12.0)
    loud = copy.deepcopy(plain)
    inject(loud, outliers)
    restored = rescale(copy.deepcopy(loud), outliers, 1.0)
    for (name, a), b, c in zip(plain.named_parameters(), restored.parameters(), loud.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=0), name
        assert ("norm.weight" not in name or "layernorm" not in name) or not torch.equal(a, c), name
    four = rescale(copy.deepcopy(loud), outliers, 4.0)
    direct = copy.deepcopy(plain)
    inject(direct, Outliers(strength=4.0))
    for a, b in zip(direct.parameters(), four.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=0)


def test_observer_sees_fused_inputs_once(t1) -> None:
    seen: list[str] = []
    with observed(t1, lambda key, x: seen.append(key)), torch.no_grad():
        t1(IDS)
        assert seen == KEYS
    with torch.no_grad():
        t1(IDS)
    assert seen == KEYS
    apply_surgery(tiny_model(2), Precision())  # a second model is not touched by the first one's observers
