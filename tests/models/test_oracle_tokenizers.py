"""Tokenizers of GGUF files that llama.cpp's converter wrote give the ids that transformers and llama.cpp give; see oracle_gguf/README.md."""

import json
from pathlib import Path

import pytest

from polydraft.models.store.gguf import GgufStore
from polydraft.models.tokens.gguf_tokenizer import gguf_tokenizer

FOLDER = Path(__file__).parent / "oracle_gguf"
SAMPLES = {
    path.stem: json.loads(path.read_text(encoding="utf-8")).get("tokenizer")
    for path in sorted(FOLDER.glob("*.json"))
}


@pytest.mark.parametrize("name", [name for name, samples in SAMPLES.items() if samples])
def test_texts_have_the_ids_of_both_programs_and_come_back(name):
    tokenizer = gguf_tokenizer(GgufStore(FOLDER / f"{name}.gguf"))
    assert tokenizer is not None
    for sample in SAMPLES[name]["samples"]:
        assert tokenizer(sample["text"], add_special_tokens=False)["input_ids"] == sample["ids"]
        assert tokenizer.decode(sample["ids"]) == sample["text"]
