"""Reading a checkpoint as stored changes no bit of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_moe import tiny_model
from transformers import AutoModelForCausalLM, GemmaConfig

from quads.trainer.stored import load_widened, stored_dtypes


class Counting:
    """AutoModelForCausalLM, noting the dtypes it was asked for."""

    asked: list[torch.dtype]

    def __init__(self) -> None:
        self.asked = []

    def from_pretrained(self, name: str, *, dtype: torch.dtype, **more: Any) -> Any:
        self.asked.append(dtype)
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **more)


@pytest.mark.parametrize(
    ("stored", "read"), [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), (None, torch.float32)]
)
def test_same_bits_as_asking_for_float32(tmp_path: Path, stored: torch.dtype | None, read: torch.dtype) -> None:
    model = tiny_model()
    model.to(stored or torch.bfloat16)
    if stored is None:  # one file of two dtypes: a float32 router beside bfloat16 experts
        for layer in model.model.layers:
            layer.mlp.gate.weight.data = torch.randn(layer.mlp.gate.weight.shape)
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    auto = Counting()
    found = load_widened(auto, tmp_path, torch.float32)
    assert auto.asked == [read]
    assert found.config.dtype == plain.config.dtype == torch.float32
    for kind in ("named_parameters", "named_buffers"):
        own, theirs = dict(getattr(found, kind)()), dict(getattr(plain, kind)())
        assert own.keys() == theirs.keys() and len(own)
        for name, value in theirs.items():
            assert own[name].dtype == value.dtype and torch.equal(own[name], value), name


def test_other_dtypes_are_read_as_asked(tmp_path: Path) -> None:
    tiny_model().to(torch.bfloat16).save_pretrained(tmp_path)
    auto = Counting()
    assert load_widened(auto, tmp_path, torch.bfloat16).dtype == torch.bfloat16
    assert auto.asked == [torch.bfloat16]


def test_a_buffer_of_the_dtype_that_is_read_is_not_rounded(tmp_path: Path) -> None:
    """Gemma's embed_scale is sqrt(D) in the dtype that is asked for: 6.3246 in float32, 6.3125 in bfloat16."""
    sizes = {"hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = GemmaConfig(**sizes, num_key_value_heads=1, head_dim=16, vocab_size=43)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    auto = Counting()
    found = load_widened(auto, tmp_path, torch.float32)
    assert auto.asked == [torch.bfloat16, torch.float32]
    for one, other in zip(found.buffers(), plain.buffers(), strict=True):
        assert torch.equal(one, other)


def test_files_that_are_not_the_models_are_not_asked(tmp_path: Path) -> None:
    """A float32 checkpoint of another kind beside a bfloat16 adapter must not be rounded."""
    model = tiny_model()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    save_file({"x": torch.zeros(2, dtype=torch.bfloat16)}, tmp_path / "adapter_model.safetensors")
    assert stored_dtypes(tmp_path) == set()
    found = load_widened(AutoModelForCausalLM, tmp_path, torch.float32)
    assert torch.equal(found.lm_head.weight, model.lm_head.weight)


def test_shards_of_an_index(tmp_path: Path) -> None:
    tiny_model().to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    save_file({"x": torch.zeros(2)}, tmp_path / "left_over.safetensors")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1 and stored_dtypes(tmp_path) == {"BF16"}


def test_dtypes_of_a_folder(tmp_path: Path) -> None:
    assert stored_dtypes(tmp_path) == set()
    tiny_model().to(torch.bfloat16).save_pretrained(tmp_path)
    assert stored_dtypes(tmp_path) == {"BF16"}


def test_verl_asks_through_it_once() -> None:
    verl_model = pytest.importorskip("verl.utils.model")
    from transformers import Qwen3MoeConfig

    from quads.integrations.verl.compat import use_stored_dtype

    before = verl_model.get_hf_auto_model_class
    try:
        use_stored_dtype()
        once = verl_model.get_hf_auto_model_class
        use_stored_dtype()
        assert verl_model.get_hf_auto_model_class is once is not before
        asked = once(Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"]))
        assert asked.auto_class is before(Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"]))
    finally:
        verl_model.get_hf_auto_model_class = before
