"""Tokenizers with a token for each byte."""

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from polydraft.models.tokens.tokenizer import BackendTokenizer

SPACE = "▁"


@cache
def byte_level():
    """One token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return BackendTokenizer(backend, {})


@cache
def sentencepiece():
    """Bytes, some words, and a special token, as in files of Llama 2."""
    tokens = ["<unk>", "<s>", *(f"<0x{b:02X}>" for b in range(256)), SPACE, "a", "b", SPACE + "a", "中", "é"]
    backend = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [(SPACE, "a")], byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    strip = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    backend.add_special_tokens(["<s>"])
    return BackendTokenizer(backend, {"bos_token": "<s>"})
