"""The toy's tokenizer: 43 symbols, vocabulary size equal to the model's, no padding row.

    "^3+5*2-7=" -> ["^", "3", "+5", "*2", "-7", "="] -> [42, 3, 15, 32, 27, 40]

End of sequence is ";". Padding and unknown share the start mark "^": padded positions are masked and the 43 symbols
cover every text of the task, so neither needs a row of its own. The chat template is the bare message content, with or
without add_generation_prompt, so that a chat row gives exactly the warm-up's token ids.

Differs from a character tokenizer: an operator with its digit is one token (split rule quads.data.chain.PATTERN).
Traps: decode(..., skip_special_tokens=True), which verl uses, drops ";" AND "^"; a grader that must know whether the
answer was finished needs the token ids (quads.rewards.chain). Unknown text is mapped to "^" silently.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from quads.data import chain

CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def make_tokenizer(size: int | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer, ready for save_pretrained; `size` adds words that no text holds, for a model with that many rows.

    Raises RuntimeError if the vocabulary did not come out as long as asked for.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    wanted = len(chain.SYMBOLS) if size is None else size
    unused = {f"<unused{i}>": i for i in range(len(chain.SYMBOLS), wanted)}
    backend = Tokenizer(models.WordLevel(dict(chain.ID) | unused, unk_token=chain.START))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(chain.PATTERN), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=chain.END, pad_token=chain.START, unk_token=chain.START
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    if len(tokenizer) != wanted:
        raise RuntimeError(f"tokenizer has {len(tokenizer)} entries, the vocabulary {wanted}")
    return tokenizer
