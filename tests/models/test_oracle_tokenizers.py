"""Tokenizers of GGUF files that llama.cpp's converter wrote give the ids that transformers and llama.cpp give; see oracle_gguf/README.md."""

import json
from pathlib import Path

import pytest

from polydraft.models.gguf import GgufFile
from polydraft.models.gguf_tokenizer import gguf_tokenizer

FILES = sorted((Path(__file__).parent / "oracle_gguf").glob("*.gguf"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_texts_have_the_ids_of_both_programs_and_come_back(path):
    tokenizer = gguf_tokenizer(GgufFile(path))
    for sample in json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))["tokenizer"]["samples"]:
        assert tokenizer(sample["text"], add_special_tokens=False)["input_ids"] == sample["ids"]
        assert tokenizer.decode(sample["ids"]) == sample["text"]
