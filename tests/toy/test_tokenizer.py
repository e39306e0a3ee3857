"""The tokenizer gives exactly the warm-up's ids, through text, chat template and verl's own row reader."""

import numpy as np
import pytest
from transformers import AutoTokenizer

from quads.config import Data
from quads.data import build, chain
from quads.toy.tokenizer import make_tokenizer


@pytest.fixture(scope="module", params=["made", "reloaded"])
def tokenizer(request, tmp_path_factory):
    made = make_tokenizer()
    if request.param == "made":
        return made
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_vocabulary_is_the_symbols_in_order(tokenizer):
    assert len(tokenizer) == tokenizer.vocab_size == 43
    assert tokenizer.convert_ids_to_tokens(list(range(43))) == list(chain.SYMBOLS)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (41, 42, None)


def test_worked_example(tokenizer):
    assert tokenizer("^3+5*2-7=869;")["input_ids"] == [42, 3, 15, 32, 27, 40, 8, 6, 9, 41]


@pytest.mark.parametrize("generation_prompt", [True, False])
def test_text_chat_template_and_generator_agree(tokenizer, generation_prompt):
    problems = chain.draw(100, 6, "+-*", np.random.default_rng(0))
    for ids in chain.prompt_ids(problems).tolist():
        prompt = chain.text_of(ids)
        assert tokenizer.encode(prompt) == ids
        templated = tokenizer.apply_chat_template(build.message(prompt), add_generation_prompt=generation_prompt)
        assert list(templated["input_ids"]) == ids
        text = tokenizer.apply_chat_template(
            build.message(prompt), add_generation_prompt=generation_prompt, tokenize=False
        )
        assert text == prompt


def test_decoding_drops_marks_only_when_asked(tokenizer):
    assert tokenizer.decode([8, 42, 9, 41]) == "8^9;"
    assert tokenizer.decode([8, 42, 9, 41], skip_special_tokens=True) == "89"
    assert tokenizer.decode([3, 15, 32, 27, 40]) == "3+5*2-7="


@pytest.mark.slow
def test_verl_reads_a_row_as_the_same_ids(tmp_path):
    """verl's data set class and its chat-template helper on the written parquet: the ids the model was warmed up on."""
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset
    from verl.utils.tokenizer import normalize_token_ids
    from verl.utils.tokenizer.chat_template import apply_chat_template

    rows = build.build(Data(train_prompts=20, eval_prompts=5, calibration_prompts=2))
    build.write(rows, tmp_path)
    tokenizer = make_tokenizer()
    config = OmegaConf.create({"max_prompt_length": 16, "cache_dir": str(tmp_path / "cache"), "prompt_key": "prompt"})
    loaded = RLHFDataset(str(tmp_path / "train.parquet"), tokenizer, config)
    assert len(loaded) == 20
    for index in range(20):
        item = loaded[index]
        prompt = rows["train"][index]["prompt"][0]["content"]
        templated = apply_chat_template(tokenizer, list(item["raw_prompt"]), add_generation_prompt=True, tokenize=True)
        assert normalize_token_ids(templated) == chain.ids_of(prompt)
        assert item["reward_model"]["ground_truth"] == rows["train"][index]["reward_model"]["ground_truth"]
