"""verl's own engine code over the chunked head: what it looks up is replaced, its outputs and gradients stay."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tolerances import TOLERANCES

from quads.trainer import head

engine = pytest.importorskip("verl.workers.engine.fsdp.transformer_impl")
LENGTHS, WORDS = [5, 3, 9], 31


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts verl's functions back when the test ends."""
    monkeypatch.setattr(engine, "logprobs_from_logits", engine.logprobs_from_logits)
    monkeypatch.setattr(engine.verl_F, "entropy_from_logits", engine.verl_F.entropy_from_logits)


def outputs(packed: bool) -> dict[str, torch.Tensor]:
    """log_probs and entropy [tokens] of random logits as verl computes them now, and the logits' gradient."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(0)
    parts = [torch.randint(WORDS, (n,), generator=generator) for n in LENGTHS]
    ids = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    batch = TensorDict({"input_ids": ids}, batch_size=[len(LENGTHS)])
    tu.assign_non_tensor(batch, use_remove_padding=packed, calculate_entropy=True)
    shape = (1, sum(LENGTHS)) if packed else (len(LENGTHS), max(LENGTHS))
    logits = (3 * torch.randn(*shape, WORDS, generator=generator)).bfloat16().requires_grad_()
    said = {"input_ids_rmpad_rolled": torch.cat(parts).roll(-1), "pad_size": 0, "temperature": torch.ones(len(LENGTHS)),
            "temperature_rmpad": torch.ones(sum(LENGTHS)), "temperature_is_one": True}  # fmt: skip
    asked = SimpleNamespace(
        engine_config=SimpleNamespace(entropy_checkpointing=False, entropy_from_logits_with_chunking=False),
        compute_entropy_from_logits=engine.verl_F.entropy_from_logits,
        _gather_and_unpad_packed=lambda x, pad: x,
    )
    # The CUDA autocast of a run computes softmax in float32; on a CPU the same by widening first.
    found = engine.FSDPEngineWithLMHead.prepare_model_outputs(
        asked, SimpleNamespace(logits=logits.float()), said, batch, None
    )
    values = {name: found[name].values() for name in ("log_probs", "entropy")}
    (values["log_probs"].sum() + 0.5 * values["entropy"].square().sum()).backward()
    return values | {"gradient": logits.grad}


@pytest.mark.parametrize("packed", [True, False])
def test_the_engine_takes_it_in_both_layouts_with_the_same_result(restored: None, packed: bool) -> None:
    from quads.integrations.verl.compat import use_chunked_head

    before = outputs(packed)
    use_chunked_head()
    assert engine.logprobs_from_logits is head.log_probs and engine.verl_F.entropy_from_logits is head.entropy
    after = outputs(packed)
    limit = TOLERANCES["chunked_head"].limit
    for name, value in before.items():
        unit = torch.finfo(value.dtype).eps * value.abs() + limit
        assert ((after[name] - value).abs() <= unit).all(), name


def test_another_verl_is_named(restored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from quads.integrations.verl.compat import use_chunked_head

    monkeypatch.delattr(engine, "logprobs_from_logits")
    with pytest.raises(RuntimeError, match=r"has no logprobs_from_logits: written for verl 0\.9\.1"):
        use_chunked_head()
