"""A GGUF file in both engines, each in a process of its own."""

import pytest

from polydraft.bench.llama_cpp import write_gguf
from polydraft.bench.same_file import FIGURES, as_dicts, compare, markdown
from polydraft.models import pair
from polydraft.models.folder import load_module
from polydraft.models.load import load_tokenizer


def test_a_file_is_measured_in_both_engines(tmp_path):
    pytest.importorskip("xllamacpp")
    folder = str(pair.draft_folder())
    write_gguf(load_module(folder, device="cpu"), load_tokenizer(folder), tmp_path / "draft.gguf", "Q8_0")
    name = str(tmp_path / "draft.gguf")
    (rows,) = comparisons = compare([name], [1], draft=name, repetitions=1, num_tokens=8)
    assert [row.engine for row in rows] == ["polydraft", "polydraft, no drafts", "llama.cpp"]
    assert all(row.figures[name] > 0 for row in rows for name in FIGURES)
    table = markdown(comparisons)
    assert table.count("draft.gguf") == 3 and table.count("x)") == 2 * len(FIGURES)
    assert as_dicts(comparisons)[0]["threads"] == 1
