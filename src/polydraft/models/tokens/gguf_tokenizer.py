"""The tokenizer of a GGUF file, built by the `tokenizers` library from the file's own lists; transformers is not imported.

Byte-level BPE (`tokenizer.ggml.model` = "gpt2") has its merges in the file, and the name of its pre-tokenizer. A SentencePiece
vocabulary ("llama") has scores: of two neighbours the pair merges first whose union has the highest one, which gives the merges' order. Gemma 4's
("gemma4") is spelt like that, with merges.

A pre-tokenizer's name (`tokenizer.ggml.pre`) stands for regular expressions, each applied to the pieces that the one before left; a match and what
lies between two matches are pieces of their own. Names and groups are those of llama.cpp (`src/llama-vocab.cpp`), the expressions those of the models'
own tokenizers where llama.cpp writes them differently for its engine.
"""

from copy import copy
from hashlib import sha256
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from polydraft.errors import check_installed
from polydraft.models.store.gguf import GgufStore
from polydraft.models.store.gguf_roles import CONTROL, TEMPLATE, TOKENS, USER_DEFINED, special_id
from polydraft.models.tokens.tokenizer import ROLES, BackendTokenizer, Tokenizer

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


def gguf_tokenizer(file: GgufStore) -> Tokenizer:
    """The tokenizer of a file; transformers makes that of a Unigram vocabulary. Files that hold the same one share its backend.

    Raises:
        ModelLoadError: the file has none, or splits text in a way that is not known here.
    """
    if TOKENS not in file.metadata:
        raise file.refusal(
            f"it has no tokenizer ({TOKENS})", "Give a whole file, or token ids instead of text"
        )
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama", "gemma4"):
        return _of_transformers(file)
    digest = _digest(file)
    if (cached := _in_use.get(digest)) is not None:
        same = copy(cached)
        same.chat_template = _templates(file)
        return same
    tokens = file.strings(TOKENS)
    backend, add_bos = _byte_level(file, tokens) if kind == "gpt2" else _sentencepiece(file, tokens)
    add_bos = bool(file.metadata.get("tokenizer.ggml.add_bos_token", add_bos))
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    roles = {
        role: tokens[i]
        for role in ROLES
        if (i := special_id(file, keys[role])) is not None and i < len(tokens)
    }
    _add_whole_tokens(backend, tokens, file.metadata.get("tokenizer.ggml.token_type") or (), roles)
    _surround(backend, roles, add_bos, bool(file.metadata.get("tokenizer.ggml.add_eos_token", False)))
    tokenizer = BackendTokenizer(
        backend, roles, chat_template=_templates(file), add_bos_token=add_bos and "bos_token" in roles
    )
    _in_use[digest] = tokenizer
    return tokenizer


def _of_transformers(file: GgufStore) -> Any:
    """As transformers makes it, with the chat template where it has one."""
    check_installed(f"{str(file.path)!r} has a Unigram vocabulary", "transformers", extra="torch")
    from transformers import PreTrainedTokenizerFast

    place = {"name_or_path": str(file.path.parent), "vocab_file": str(file.path)}
    return PreTrainedTokenizerFast(gguf_file=file.path.name, **place)


_in_use: WeakValueDictionary[str, BackendTokenizer] = WeakValueDictionary()
"""Tokenizers that somebody holds, by what their files say of them."""


def _digest(file: GgufStore) -> str:
    """Of all that a file says of its tokenizer, but for the chat template."""
    digest = sha256(file.architecture.encode())
    for key in sorted(
        key for key in file.metadata if key.startswith("tokenizer.") and not key.startswith(TEMPLATE)
    ):
        digest.update(key.encode())
        digest.update(file.raw_strings(key) or repr(file.metadata[key]).encode())
    return digest.hexdigest()


def _templates(file: GgufStore) -> str | dict[str, str] | None:
    """The chat template of a file, or those that it has, by name."""
    default = file.metadata.get(TEMPLATE)
    named = {
        key.removeprefix(f"{TEMPLATE}."): text
        for key, text in file.metadata.items()
        if key.startswith(f"{TEMPLATE}.")
    }
    if not named:
        return default
    return named if default is None else {"default": default, **named}


def _byte_level(file: GgufStore, tokens: list[str]) -> tuple[Any, bool]:
    """Backend of a byte-level vocabulary, and whether its files begin texts with BOS where they do not say."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel
    from tokenizers.models import BPE

    name = file.metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise file.refusal(
            f"its pre-tokenizer is {name!r}; expected one of {', '.join(PRE_TOKENIZERS)}",
            "Give the model's safetensors folder, or token ids instead of text",
        )
    chosen = PRE_TOKENIZERS[name]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend: Any = Tokenizer(
        BPE(vocab=vocabulary, merges=_read_merges(file), ignore_merges=chosen.ignore_merges)
    )
    backend.pre_tokenizer = split_and_spell(chosen.patterns)
    backend.decoder = ByteLevel()
    return backend, chosen.add_bos


def _read_merges(file: GgufStore) -> list[tuple[str, str]]:
    merges = list[tuple[str, str]]()
    for merge in file.strings("tokenizer.ggml.merges"):
        first, _, right = merge.partition(" ")
        if not (first and right):
            problem = f"its merge {len(merges)} is {merge[:64]!r}; expected two parts with a blank between them (tokenizer.ggml.merges)"
            raise file.refusal(problem, "Give another file of the model")
        merges.append((first, right))
    return merges


def _sentencepiece(file: GgufStore, tokens: list[str]) -> tuple[Any, bool]:
    """Backend of a SentencePiece vocabulary; texts begin with BOS unless the file says otherwise."""
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = special_id(file, "unknown")
    has_merges = file.metadata["tokenizer.ggml.model"] == "gemma4"
    merges = _read_merges(file) if has_merges else _scored_merges(file, vocabulary)
    named = {} if unknown is None or unknown >= len(tokens) else {"unk_token": tokens[unknown]}
    model = BPE(vocab=vocabulary, merges=merges, fuse_unk=True, byte_fallback=True, **named)
    backend: Any = Tokenizer(model)
    space = "▁"
    adds_space = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", not has_merges))
    prepended = (
        [normalizers.Prepend(space)] if adds_space else []
    )  # to blanks, too, and behind each special token
    backend.normalizer = normalizers.Sequence([*prepended, normalizers.Replace(" ", space)])
    stripped = [decoders.Strip(" ", 1, 0)] if adds_space else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
    )
    return backend, True


def _scored_merges(file: GgufStore, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) <= max(vocabulary.values()):
        raise file.refusal(
            "it has no score of each token (tokenizer.ggml.scores)", "Give another file of the model"
        )
    return _merges(vocabulary, scores)


def _merges(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Pairs of tokens whose union is a token, best first: by its score, then with the longer left half."""
    pairs: list[tuple[float, int, int, str, str]] = []
    for token, i in vocabulary.items():
        score = -scores[i]
        for cut in range(1, len(token)):
            prefix = token[:cut]
            if prefix in vocabulary and (right := token[cut:]) in vocabulary:
                pairs.append((score, -cut, cut - len(token), prefix, right))
    pairs.sort(key=lambda pair: pair[:3])
    return [pair[3:] for pair in pairs]


def _add_whole_tokens(backend: Any, tokens: list[str], types: Any, roles: dict[str, str]) -> None:
    """Tokens that are matched before text is split: control tokens and those of roles, and what the file's author defined."""
    from tokenizers import AddedToken

    special = dict.fromkeys(
        [*(token for token, kind in zip(tokens, types, strict=False) if kind == CONTROL), *roles.values()]
    )
    defined = [
        token
        for token, kind in zip(tokens, types, strict=False)
        if kind == USER_DEFINED and token not in special
    ]
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in special if token]
    )
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in defined if token])


def _surround(backend: Any, roles: dict[str, str], add_bos: bool, add_eos: bool) -> None:
    """BOS before and EOS behind each text, where they are wanted and there are such."""
    from tokenizers.processors import TemplateProcessing

    begin = [roles["bos_token"]] if add_bos and "bos_token" in roles else []
    end = [roles["eos_token"]] if add_eos and "eos_token" in roles else []
    if begin or end:
        ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys([*begin, *end])]
        pair = [f"{token}:1" for token in begin] + ["$B:1"] + [f"{token}:1" for token in end]
        backend.post_processor = TemplateProcessing(
            single=[*begin, "$A", *end], pair=[*begin, "$A", *end, *pair], special_tokens=ids
        )
