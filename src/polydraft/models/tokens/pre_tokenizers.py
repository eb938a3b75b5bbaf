r"""How byte-level vocabularies split text before they merge, by the names that GGUF files give (`tokenizer.ggml.pre`).

A name stands for regular expressions, each applied to the pieces that the one before left; a match and what lies between two matches
are pieces of their own. Names and groups are those of llama.cpp (`src/llama-vocab.cpp`), the expressions those of the models' own
tokenizers where llama.cpp writes them differently for its engine.
"""

from typing import Any, NamedTuple

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _BLANKS
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_FIRST = r"[^\r\n\p{L}\p{N}]?"
_MARKS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _BLANKS
_WORDS = r" ?[^(\s|.,!?…。，、।۔،)]+"


class PreTokenizer(NamedTuple):
    """patterns: see the module.  ignore_merges: a piece that is a token stays whole.  add_bos: of files that do not say."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


def _named(names: str, *patterns: str, **more: bool) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names.split(), PreTokenizer(patterns, **more))


PRE_TOKENIZERS = {
    **_named("default", r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    **_named(
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4 roberta-bpe",
        _GPT2,
    ),
    **_named("starcoder refact command-r smollm codeshell exaone minerva-7b", r"\p{N}", _GPT2),
    **_named(
        "qwen2 stablelm2 deepseek-r1-qwen kormo megrez hunyuan grok-2",
        _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _BLANKS,
    ),
    **_named(
        "qwen35",
        _ENDINGS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _BLANKS,
    ),
    **_named(
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        _LLAMA3,
        ignore_merges=True,
        add_bos=True,
    ),
    **_named("dbrx smaug-bpe glm4 glm5 chatglm-bpe", _LLAMA3),
    **_named(
        "tekken",
        f"{_FIRST}{_UPPER}*{_LOWER}+|{_FIRST}{_UPPER}+{_LOWER}*" + r"|\p{N}" + _MARKS,
        ignore_merges=True,
        add_bos=True,
    ),
    **_named(
        "gpt-4o llama4 kanana2 talkie",
        f"{_FIRST}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_FIRST}{_UPPER}+{_LOWER}*{_ENDINGS}?"
        + r"|\p{N}{1,3}"
        + _MARKS,
    ),
    **_named("seed-coder", _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + _BLANKS),
    **_named("falcon", r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    **_named("deepseek-coder", "[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", r"\p{N}"),
    **_named(
        "deepseek-v3 hunyuan-dense",
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
        + _BLANKS,
    ),
    **_named("poro-chat bloom gpt3-finnish", _WORDS),
    **_named("viking", _WORDS, r"\p{N}"),
}


def split_and_spell(patterns: tuple[str, ...]) -> Any:
    """A pre-tokenizer of the `tokenizers` library: splits by the patterns, then spells bytes with the byte-level alphabet."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    splits = [Split(Regex(pattern), "isolated") for pattern in patterns]
    return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
