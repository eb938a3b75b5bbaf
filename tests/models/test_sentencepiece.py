"""A GGUF file of a SentencePiece vocabulary reads and writes texts as SentencePiece itself; Gemma's own file does, too.

`sentencepiece.json`: a vocabulary that the `sentencepiece` package 0.2 trained (byte-pair encoding with single bytes), its ids of texts, and its
texts of random ids.
"""

import json
from pathlib import Path

import gguf
import pytest

from polydraft.engine.detokenizer import Detokenizer
from polydraft.models.load import encode, load_tokenizer
from polydraft.models.tokens.tokenizer import BackendTokenizer

GIVEN = json.loads((Path(__file__).parent / "sentencepiece.json").read_text(encoding="utf-8"))


@pytest.fixture(params=["llama", "phi3", "gemma3"])
def tokenizer(request, tmp_path):
    """Of a file that names no role."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", request.param)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(GIVEN["tokens"])
    writer.add_token_scores(GIVEN["scores"])
    writer.add_token_types(GIVEN["types"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return load_tokenizer(str(tmp_path / "m.gguf"))


def test_ids_are_those_of_sentencepiece_behind_its_first_token(tokenizer):
    for text, ids in GIVEN["encoded"]:
        assert encode(tokenizer, text) == [1, *ids], text
        assert tokenizer.decode(ids) == text.replace("▁", " ")


def test_a_file_has_no_more_ids_than_tokens(tokenizer):
    assert isinstance(tokenizer, BackendTokenizer) and len(tokenizer) == max(
        tokenizer.get_vocab().values()
    ) + 1 == len(GIVEN["tokens"])
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")


def test_texts_of_random_ids_are_those_of_sentencepiece_token_by_token(tokenizer):
    for ids, text in GIVEN["decoded"]:
        detokenizer = Detokenizer(tokenizer, [1], skip_special_tokens=True)
        assert "".join([*map(detokenizer.push, ids), detokenizer.flush()]) == text


@pytest.mark.parametrize("text", ["a</s>b", "a</s>\n", "</s>", "x<s> y</s>"])
def test_special_tokens_that_are_text_have_no_blank_within(tokenizer, text):
    ids = encode(tokenizer, text, parse_special=False)
    assert tokenizer.decode(ids[1:]) == text and ids[0] == 1 and not {1, 2} & set(ids[1:])


def test_a_blank_is_put_before_each_text_between_special_tokens(tokenizer):
    """As llama.cpp does."""
    words = tokenizer.convert_tokens_to_ids
    assert tokenizer("</s>hi")["input_ids"] == [1, 2, *encode(tokenizer, "hi")[1:]]
    assert tokenizer("</s> hi")["input_ids"] == [1, 2, *encode(tokenizer, " hi")[1:]] and words("</s>") == 2
