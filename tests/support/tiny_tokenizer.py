"""A small byte-level tokenizer with whatever special tokens and template a test needs."""

import functools

from tokenizers import processors

from megatrain.data.train_tokenizer import END_TOKEN, train_bpe

TEXT = (
    "the quick brown fox jumps over the lazy dog. what is the capital of france? paris is the capital of france. "
    "hello there, how are you? i am fine, thank you. two and two are four. user assistant system\n\n"
) * 3


@functools.cache
def _state(vocab_size):
    return train_bpe([TEXT], vocab_size).backend_tokenizer.to_str()


def tiny_tokenizer(
    *, specials=(), bos=None, adds_bos=False, eos=END_TOKEN, pad="<|pad|>", template=None, vocab_size=320
):
    """`adds_bos`: the tokenizer itself puts the start token before a text."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_state(vocab_size)))
    wanted = [token for token in (*specials, bos, eos, pad) if token is not None]
    tokenizer.add_special_tokens({"additional_special_tokens": list(dict.fromkeys(wanted))})
    names = {"bos_token": bos, "eos_token": eos, "pad_token": pad}
    tokenizer.add_special_tokens({name: token for name, token in names.items() if token is not None})
    if adds_bos:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.convert_tokens_to_ids(bos))]
        )
    tokenizer.chat_template = template
    return tokenizer
