"""An output's text is what its tokens add to the prompt's text, wherever the prompt ends, and all of it."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from polydraft import Engine, SamplingParams
from polydraft.engine.detokenizer import Detokenizer
from polydraft.models.tokens.spelling import byte_alphabet
from tests.engine.tables import TableModel
from tests.support.byte_tokenizers import SPACE, byte_level, sentencepiece

TEXT = "naïve 🙂👍🏽 中文 \ufffd e\u0301\n  x\ufffd"


class Slow:
    """A tokenizer without a backend: what it decodes alone is known."""

    def __init__(self):
        self.decode = byte_level().decode


TOKENIZERS = {"bytes": byte_level, "sentencepiece": sentencepiece, "slow": Slow}


def spelt(name, token):
    """Bytes of a token."""
    piece = (sentencepiece if name == "sentencepiece" else byte_level)().convert_ids_to_tokens(token)
    if name != "sentencepiece":
        return bytes([byte_alphabet()[piece]])
    return bytes([token - 2]) if 2 <= token < 258 else piece.replace(SPACE, " ").encode()


def pieces(tokenizer, prompt, ids, **options):
    detokenizer = Detokenizer(tokenizer, prompt, **{"skip_special_tokens": True, **options})
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_is_what_its_tokens_add_wherever_the_prompt_ends(name):
    text = "x " + TEXT
    ids = (sentencepiece if name == "sentencepiece" else byte_level)()(text)["input_ids"]
    assert b"".join(spelt(name, i) for i in ids).strip(b" ").decode() == text
    for cut in range(2, len(ids)):  # a character belongs to who begins it
        begun = sum(byte & 0xC0 != 0x80 for byte in b"".join(spelt(name, i) for i in ids[:cut])) - (
            name == "sentencepiece"
        )
        assert "".join(pieces(TOKENIZERS[name](), ids[:cut], ids[cut:])) == text[begun:], cut


def test_bytes_that_are_no_text_are_what_decoding_all_at_once_gives():
    draw = random.Random(0)
    tokenizer = byte_level()
    alphabet = tokenizer("Aéà中🙂\ufffd")["input_ids"]
    for _ in range(1000):
        ids = draw.choices(alphabet, k=9)
        cut = draw.randint(1, 8)
        whole = tokenizer.decode(ids)
        before = tokenizer.decode(ids[:cut])
        assert "".join(pieces(tokenizer, ids[:cut], ids[cut:])) == whole[len(before) :]


def test_a_prompt_that_ends_in_a_replacement_character_is_not_given_again():
    for tokenizer in (byte_level(), sentencepiece(), Slow()):
        encode = sentencepiece() if tokenizer is sentencepiece() else byte_level()
        prompt = encode("say \ufffd")["input_ids"]
        assert "".join(pieces(tokenizer, prompt, [encode.convert_tokens_to_ids("a")])) == "a"


def test_sentencepiece_writes_one_replacement_for_each_byte_of_a_broken_character():
    tokenizer = sentencepiece()
    a = tokenizer.convert_tokens_to_ids("a")
    begun = [tokenizer.convert_tokens_to_ids(f"<0x{b:02X}>") for b in "中".encode()[:2]]
    assert (
        "".join(pieces(tokenizer, [a], [*begun, a]))
        == tokenizer.decode([a, *begun, a])[1:]
        == "\ufffd\ufffda"
    )
    assert "".join(pieces(tokenizer, [a], begun)) == tokenizer.decode([a, *begun])[1:] == "\ufffd\ufffd"


def test_a_broken_character_of_a_prompt_is_not_given_again_with_any_of_its_bytes():
    for tokenizer in (byte_level(), sentencepiece()):
        prompt = tokenizer("b中")["input_ids"][:-1]
        prompt = prompt if tokenizer is byte_level() else [*prompt, *(2 + b for b in "中".encode()[:2])]
        assert "".join(pieces(tokenizer, prompt, [tokenizer.convert_tokens_to_ids("a")])) == "a"


def test_a_replacement_character_is_given_at_once_and_a_broken_one_at_the_end():
    for tokenizer in (byte_level(), sentencepiece()):
        ids = tokenizer("a\ufffdé")["input_ids"][-6:]
        told = pieces(
            tokenizer, tokenizer("b")["input_ids"], [*ids, *tokenizer("\ufffd🙂")["input_ids"][-7:-1]]
        )
        assert "".join(told[:-1]).endswith("a\ufffdé\ufffd") and set(told[-1]) == {"\ufffd"}


def test_special_tokens_are_shown_where_they_are_not_skipped():
    tokenizer = byte_level()
    ids = tokenizer("a<|end|>é")["input_ids"]
    assert "".join(pieces(tokenizer, ids[:1], ids[1:])) == "é"
    assert "".join(pieces(tokenizer, ids[:1], ids[1:], skip_special_tokens=False)) == "<|end|>é"


def test_a_text_behind_hidden_tokens_alone_loses_the_space_that_no_text_begins_with():
    tokenizer = sentencepiece()
    word = tokenizer.convert_tokens_to_ids(SPACE + "a")
    assert "".join(pieces(tokenizer, [tokenizer.bos_token_id], [word, word])) == "a a"
    assert "".join(pieces(tokenizer, [tokenizer.bos_token_id, word], [word, word])) == " a a"


def test_other_decoders_read_two_windows():
    backend = Tokenizer(
        models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2, "##s": 3, "[SEP]": 4}, unk_token="[UNK]")
    )
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken("[SEP]", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    ids = [1, 2, 4, 1, 3, 1]
    assert pieces(tokenizer, [1], ids) == [" play", "ing", "", " play", "s", " play", ""]


def test_random_tokens_of_sentencepiece_never_end_a_request():
    tokenizer = sentencepiece()
    engine = Engine.of(TableModel(len(tokenizer)), tokenizer=tokenizer, drafter="ngram")
    for sample in engine.generate([[1, 7]], SamplingParams(temperature=1.5, max_tokens=60, n=8, seed=1))[
        0
    ].samples:
        text = b"".join(spelt("sentencepiece", i) for i in sample.token_ids if i != 1)
        assert sample.finish_reason == "length"
        assert sample.text.replace("\ufffd", "") == text.decode(errors="ignore").replace("\ufffd", "")
