"""The tokenizer of a GGUF file gives the ids that transformers gives, is of its interface, and needs no import of it."""

import json
import re
import subprocess
import sys
import sysconfig
from functools import cache
from itertools import pairwise
from pathlib import Path

import gguf
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GemmaTokenizer, PreTrainedTokenizerFast

from polydraft.core.params import StructuredOutputs
from polydraft.engine.structured import Grammars
from polydraft.errors import ModelLoadError
from polydraft.models.load import check_same_vocabulary, encode, load_tokenizer
from polydraft.models.tokens.gguf_tokenizer import PRE_TOKENIZERS

ODD = [
    "",
    " ",
    "  ",
    "\n\n\n  x",
    "a  12 34567 890",
    "\t\tif x:\n\n\r\n",
    "naïve café ÀÉ 中文字符 日本語 한국어 🙂👍🏽 e\u0301 ſ",
    "don't I'LL we'Ve",
    "\u00a0x\u3000y",
    "٣٤٥ ½ ² Ⅷ",
    "<turn>user\nhi<end>\n",
    "x<mark>y <mark> z",
]
TEMPLATE = "{% for m in messages %}<turn>{{ m['role'] }}: {{ m['content'] | trim }}<end>{% endfor %}{% if add_generation_prompt %}<turn>{% endif %}"
CONTROL = ["<|endoftext|>", "<end>", "<turn>"]
DEFINED = ["<mark>"]


@cache
def lines() -> list[str]:
    """10,000 lines of the standard library's sources, and odd ones."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = "\n".join(
        path.read_text(encoding="utf-8", errors="ignore") for path in sorted(folder.glob("*.py"))
    )
    written = [line for line in dict.fromkeys(text.splitlines()) if line.strip()]
    return [
        *written[:: len(written) // 9_950][:9_950],
        *("\n".join(written[i : i + 4]) for i in range(0, 400, 4)),
        *ODD,
    ]


@cache
def byte_level() -> tuple[list[str], list[str]]:
    """Tokens and merges that were learnt from some of the lines, in which runs of digits and capitals are tokens, too."""
    tokenizer: Tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=alphabet, special_tokens=["<unk>", *CONTROL, *DEFINED]
    )
    tokenizer.train_from_iterator(["1234 56 789 " * 9, "HTTPError JSONDecoder " * 9, *lines()[::5]], trainer)
    pairs = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    return sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__), pairs


def write(path: Path, architecture: str, fill) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def types(tokens: list[str]) -> list[int]:
    return [
        3
        if t in CONTROL
        else 4
        if t in DEFINED
        else 2
        if t == "<unk>"
        else 6
        if re.fullmatch("<0x..>", t)
        else 1
        for t in tokens
    ]


def add_roles(writer, tokens: list[str], template=TEMPLATE) -> None:
    writer.add_token_list(tokens)
    writer.add_token_types(types(tokens))
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<end>"))
    writer.add_unk_token_id(tokens.index("<unk>"))
    writer.add_chat_template(template)


def byte_level_file(path: Path, pre: str | None, *, add_bos: bool | None = None, template=TEMPLATE) -> Path:
    tokens, merges = byte_level()

    def fill(writer):
        writer.add_tokenizer_model("gpt2")
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        add_roles(writer, tokens, template)
        writer.add_token_merges(merges)
        if add_bos is not None:
            writer.add_add_bos_token(add_bos)

    return write(path, "llama", fill)


def by_transformers(path: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(gguf_file=path.name, name_or_path=str(path.parent), vocab_file=str(path))


def same(ours, theirs) -> None:
    for text in lines():
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours(text, add_special_tokens=False)["input_ids"] == ids, text
        assert ours.decode(ids) == theirs.decode(ids), text


def test_a_merge_of_one_part_is_named(tmp_path, monkeypatch):
    tokens, merges = byte_level()
    monkeypatch.setattr(
        sys.modules[__name__],
        "byte_level",
        lambda: (tokens, [*merges[:2], merges[2].replace(" ", ""), *merges[3:]]),
    )
    with pytest.raises(
        ModelLoadError, match=r"its merge 2 is '\S+'; expected two parts with a blank between them"
    ):
        load_tokenizer(str(byte_level_file(tmp_path / "m.gguf", "qwen2")))


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "gpt-4o", "dbrx"])
def test_ids_of_a_byte_level_file_are_those_of_transformers(tmp_path, pre):
    path = byte_level_file(tmp_path / "m.gguf", pre)
    ours = load_tokenizer(str(path))
    theirs = by_transformers(path)
    same(ours, theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.get_added_vocab() == theirs.get_added_vocab()
    assert len(ours) == len(theirs)
    for role in ("bos", "eos", "unk", "pad"):
        assert getattr(ours, f"{role}_token") == getattr(theirs, f"{role}_token")
        assert getattr(ours, f"{role}_token_id") == getattr(theirs, f"{role}_token_id")
    assert check_same_vocabulary(ours, theirs, len(ours), len(ours)) == len(ours)


PUBLISHED = {
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
    "falcon": [
        pre_tokenizers.Split(Regex(r"[\p{P}$+<=>^~|`]"), "contiguous"),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
    ],
    "deepseek-coder": [
        pre_tokenizers.Split(Regex("[\r\n]"), "isolated"),
        pre_tokenizers.Split(Regex(r"\s?\p{L}+"), "isolated"),
        pre_tokenizers.Split(Regex(r"\s?\p{P}+"), "isolated"),
        pre_tokenizers.Split(Regex("[一-龥ࠀ-一가-\ud7ff]+"), "isolated"),
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}
"""As the models' own `tokenizer.json` have them, which transformers does not make of a file."""


@pytest.mark.parametrize("pre", PUBLISHED)
def test_ids_of_a_byte_level_file_are_those_of_the_published_tokenizer(tmp_path, pre):
    tokens, merges = byte_level()
    pairs = [tuple(merge.split(" ")) for merge in merges]
    own: Tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    own.pre_tokenizer = pre_tokenizers.Sequence(PUBLISHED[pre])
    own.decoder = decoders.ByteLevel()
    own.add_special_tokens(CONTROL)
    own.add_tokens(DEFINED)
    same(
        load_tokenizer(str(byte_level_file(tmp_path / "m.gguf", pre))),
        PreTrainedTokenizerFast(tokenizer_object=own),
    )


def test_every_pre_tokenizer_keeps_all_of_a_text(tmp_path):
    for pre in PRE_TOKENIZERS:
        ours = load_tokenizer(str(byte_level_file(tmp_path / "m.gguf", pre, add_bos=False)))
        for text in [*lines()[::97], *ODD]:
            assert ours.decode(ours(text)["input_ids"]) == text, pre


def test_llama_3_keeps_a_piece_that_is_a_token_and_begins_with_bos_unless_the_file_says_otherwise(tmp_path):
    def fill(writer, **more):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("llama-bpe")
        add_roles(writer, ["<unk>", *CONTROL, *"abcd", "ab", "cd", "abcd"])
        writer.add_token_merges(["a b", "c d"])  # no merge leads to the last token
        if more:
            writer.add_add_bos_token(False)

    ours = load_tokenizer(str(write(tmp_path / "m.gguf", "llama", fill)))
    begin = ours.get_vocab()["<|endoftext|>"]
    assert ours("abcd")["input_ids"] == encode(ours, "abcd") == [begin, ours.get_vocab()["abcd"]]
    assert encode(ours, "<|endoftext|>abcd") == [begin, ours.get_vocab()["abcd"]]
    plain = load_tokenizer(
        str(write(tmp_path / "n.gguf", "llama", lambda writer: fill(writer, add_bos=False)))
    )
    assert plain("abcd")["input_ids"] == encode(plain, "abcd") == [ours.get_vocab()["abcd"]]


@cache
def sentencepiece() -> tuple[list[str], list[float]]:
    """Tokens and scores of a vocabulary that was learnt from some of the lines, with single bytes for what it lacks."""
    tokenizer: Tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(lines()[:9_950:5], trainers.BpeTrainer(vocab_size=1200, limit_alphabet=80))
    learnt = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    whole = [t for t in learnt if len(t) > 1]
    tokens = [
        "<unk>",
        *CONTROL,
        *DEFINED,
        *(f"<0x{b:02X}>" for b in range(256)),
        *whole,
        *(t for t in learnt if len(t) == 1),
    ]
    return tokens, [0.0] * (len(tokens) - len(learnt)) + [-float(i) for i in range(len(learnt))]


def sentencepiece_file(path: Path, architecture: str = "llama", **more: bool) -> Path:
    def fill(writer):
        writer.add_tokenizer_model("llama")
        add_roles(writer, sentencepiece()[0])
        writer.add_token_scores(sentencepiece()[1])
        for key, value in more.items():
            writer.add_bool(f"tokenizer.ggml.{key}", value)

    return write(path, architecture, fill)


def test_ids_of_a_sentencepiece_file_are_those_of_transformers(tmp_path):
    path = sentencepiece_file(
        tmp_path / "m.gguf", "phi3"
    )  # of other files it makes texts that begin with blanks otherwise than SentencePiece
    ours = load_tokenizer(str(path))
    theirs = by_transformers(path)
    same(ours, theirs)
    assert ours("self is")["input_ids"] == theirs("self is")["input_ids"]
    assert ours("self is")["input_ids"][0] == ours.bos_token_id


def test_ids_of_a_sentencepiece_file_are_those_of_its_definition(tmp_path):
    ours = load_tokenizer(str(sentencepiece_file(tmp_path / "m.gguf", add_bos_token=False)))
    tokens, scores = sentencepiece()
    ids = {token: i for i, token in enumerate(tokens)}
    for text in [text for text in lines()[::40] if not set(text) & set("<>")]:
        pieces = list(f"▁{text}".replace(" ", "▁"))
        while (
            True
        ):  # of two neighbours those merge first whose union has the highest score, of equal ones the left
            unions = [(scores[ids[a + b]], -i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in ids]
            if not unions:
                break
            at = -max(unions)[1]
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
        spelled = [[ids[p]] if p in ids else [ids[f"<0x{b:02X}>"] for b in p.encode()] for p in pieces]
        assert ours(text)["input_ids"] == [i for each in spelled for i in each], text


def test_a_sentencepiece_file_may_want_no_space_before_its_texts(tmp_path):
    ours = load_tokenizer(
        str(sentencepiece_file(tmp_path / "m.gguf", add_space_prefix=False, add_bos_token=False))
    )
    assert ours.convert_ids_to_tokens(ours("self")["input_ids"][0])[0] == "s"
    assert [ours.decode(ours(text)["input_ids"]) for text in (" self", "self")] == [" self", "self"]


def test_ids_of_a_file_of_gemma_4_are_those_of_its_tokenizer_in_transformers(tmp_path):
    tokens = sentencepiece()[0]
    ids = {token: i for i, token in enumerate(tokens)}
    halves = [(token[:cut], token[cut:]) for token in tokens for cut in range(1, len(token))]
    merges = [pair for pair in halves if {*pair} <= ids.keys() and "<" not in "".join(pair)]

    def fill(writer):
        writer.add_tokenizer_model("gemma4")
        add_roles(writer, tokens)
        writer.add_token_merges([" ".join(pair) for pair in merges])

    ours = load_tokenizer(str(write(tmp_path / "m.gguf", "gemma4", fill)))
    roles = {f"{role}_token": "<end>" for role in ("eos", "pad", "mask")}
    theirs = GemmaTokenizer(
        ids, merges, bos_token="<|endoftext|>", additional_special_tokens=[*CONTROL, *DEFINED], **roles
    )
    for text in lines()[::10]:
        assert (
            ours(text, add_special_tokens=False)["input_ids"]
            == theirs(text, add_special_tokens=False)["input_ids"]
        ), text
    assert ours("self")["input_ids"][0] == ours.bos_token_id


def test_a_template_gives_what_transformers_gives(tmp_path):
    path = byte_level_file(tmp_path / "m.gguf", "qwen2")
    ours = load_tokenizer(str(path))
    theirs = by_transformers(path)
    talk = [{"role": "user", "content": "hi "}, {"role": "assistant", "content": "é"}]
    for more in ({}, {"add_generation_prompt": True}):
        assert ours.apply_chat_template(talk, tokenize=False, **more) == theirs.apply_chat_template(
            talk, tokenize=False, **more
        )
        ids = theirs.apply_chat_template(talk, **more)["input_ids"]
        assert ours.apply_chat_template(talk, **more)["input_ids"] == ids


def test_a_saved_tokenizer_is_the_same_for_transformers(tmp_path):
    ours = load_tokenizer(str(byte_level_file(tmp_path / "m.gguf", "qwen2", add_bos=True)))
    ours.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    same(ours, again)
    assert again("self")["input_ids"] == ours("self")["input_ids"]
    assert (again.bos_token, again.eos_token, again.chat_template) == ("<|endoftext|>", "<end>", TEMPLATE)


def test_grammars_follow_the_tokens_of_a_file(tmp_path):
    ours = load_tokenizer(str(byte_level_file(tmp_path / "m.gguf", "qwen2")))
    grammars = Grammars(ours, len(ours), [ours.eos_token_id])
    allowed = grammars.compiled(StructuredOutputs(regex="self|[tu]")).constraint(1).allowed([5], [5], [-1])[0]
    assert {token for token, i in ours.get_vocab().items() if allowed[i]} >= {"s", "se", "self", "t", "u"}
    assert not allowed[ours.get_vocab()["v"]]


def test_lists_that_are_missing_and_a_split_that_is_not_known_are_named(tmp_path):
    with pytest.raises(
        ModelLoadError, match=r"pre-tokenizer is 'new'; expected one of .*qwen2.*safetensors folder"
    ):
        load_tokenizer(str(byte_level_file(tmp_path / "m.gguf", "new")))

    def unscored(writer):
        writer.add_tokenizer_model("llama")
        add_roles(writer, sentencepiece()[0])

    with pytest.raises(ModelLoadError, match=r"no score of each token \(tokenizer\.ggml\.scores\)"):
        load_tokenizer(str(write(tmp_path / "n.gguf", "llama", unscored)))

    def unmerged(writer):
        writer.add_tokenizer_model("gpt2")
        add_roles(writer, byte_level()[0])

    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.merges is None; expected a list of texts"):
        load_tokenizer(str(write(tmp_path / "o.gguf", "llama", unmerged)))


def test_a_file_is_read_without_transformers(tmp_path):
    path = byte_level_file(tmp_path / "m.gguf", "qwen2")
    program = (
        "import sys; from polydraft.models.load import load_tokenizer\n"
        f"words = load_tokenizer({str(path)!r})\n"
        "ids = words.apply_chat_template([{'role': 'user', 'content': 'self'}])['input_ids']\n"
        "print(words.decode(ids), [name for name in ('transformers', 'gguf') if name in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told == "<turn>user: self<end> []\n"
