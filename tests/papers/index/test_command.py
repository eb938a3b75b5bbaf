"""`polydraft index build`: what it writes and what it refuses."""

import json

import pytest
from typer.testing import CliRunner

from polydraft.cli.commands import EXIT_STATUS
from polydraft.cli.main import app
from polydraft.drafters.text.index_file import fingerprint
from polydraft.drafters.text.text_index import TextIndex
from polydraft.models import load, pair


def run(*given):
    model = "--model" if "passages" in given else "--tokenizer"
    return CliRunner().invoke(app, ["index", "build", model, "embedded", *map(str, given)])


def line(*given):
    found = run(*given)
    assert found.exit_code == EXIT_STATUS, found.output
    (said,) = [x for x in found.stderr.splitlines() if x.startswith("error: ")]
    return said


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.py").write_text("for i in range(10):\n    print(i)\n" * 5, encoding="utf-8")
    (folder / "inner" / "b.py").write_text("for j in range(20):\n    print(j)\n", encoding="utf-8")
    (folder / "empty.py").write_text("", encoding="utf-8")
    (folder / ".hidden").write_bytes(b"\xff")
    return folder


@pytest.mark.parametrize("drafter", ["trigram", "retrieval"])
def test_an_index_is_built_from_a_folder_and_used_by_generate(drafter, corpus, tmp_path):
    found = run(corpus, "--out", tmp_path / "i")
    assert found.exit_code == 0, found.output
    assert "text index of 3 files" in found.stdout
    made = TextIndex.load(tmp_path / "i")
    assert (made.vocab_size, made.tokens_of) == (
        2048,
        fingerprint(load.load_tokenizer(str(pair.target_folder()))),
    )
    given = [
        "generate",
        "for i in range(",
        "--model",
        "embedded",
        "--drafter",
        drafter,
        "--index",
        str(tmp_path / "i"),
    ]
    given += ["--depth", "4", "--max-tokens", "8", "--json"]
    used = CliRunner().invoke(app, given)
    assert used.exit_code == 0, used.output
    stats = json.loads(used.stdout)["samples"][0]["stats"]
    assert stats["drafter_error"] is None
    assert stats["drafted_tokens"] > 0


@pytest.mark.parametrize("kind", ["text", "passages"])
def test_binary_and_hidden_files_of_a_folder_are_left_out_and_counted(kind, corpus, tmp_path):
    (corpus / "__pycache__").mkdir()
    (corpus / "__pycache__" / "a.pyc").write_bytes(b"\xa7\r\r\n\0\0")
    (corpus / "zeros").write_bytes(b"abc\0")
    (corpus / "latin.py").write_bytes("x = 'caf\u00e9'\n".encode("latin-1"))
    found = run(corpus, "--kind", kind, "--out", tmp_path / "i")
    assert found.exit_code == 0, found.output
    last = found.stdout.splitlines()[-1]
    assert " of 3 files" in last and last.endswith(
        "; left out: 1 hidden files, 3 files that are not UTF-8 text"
    )


@pytest.mark.parametrize(
    ("data", "why"),
    [(b"x = 'caf\xe9'", "byte 0xe9 at offset 8 is not UTF-8"), (b"a\0b", "byte 0x00 at offset 1")],
)
def test_a_named_file_that_is_no_text_is_refused_and_skipped_only_when_asked(corpus, tmp_path, data, why):
    (corpus / "odd").write_bytes(data)
    assert f"odd' in the corpus cannot be read: {why}" in line(
        corpus, corpus / "odd", "--out", tmp_path / "i"
    )
    assert not (tmp_path / "i").exists()
    found = run(corpus, corpus / "odd", "--out", tmp_path / "i", "--skip-unreadable")
    assert found.exit_code == 0, found.output
    assert "odd' was left out" in found.stderr
    assert (tmp_path / "i").exists()


def test_an_empty_corpus_is_refused(tmp_path):
    (tmp_path / "none").mkdir()
    assert "an empty corpus was given" in line(tmp_path / "none", "--out", tmp_path / "i")
    (tmp_path / "none" / "short").write_text("", encoding="utf-8")
    assert "an empty corpus was given" in line(tmp_path / "none", "--out", tmp_path / "i")
    assert "no such file or folder" in line(tmp_path / "nothing", "--out", tmp_path / "i")


def test_an_unknown_kind_is_refused_with_the_nearest(corpus, tmp_path):
    assert "did you mean 'passages'" in line(corpus, "--kind", "pasages", "--out", tmp_path / "i")
    assert "Known: passages, text" in line(corpus, "--kind", "foo", "--out", tmp_path / "i")


def test_a_foreign_file_is_refused_by_generate(tmp_path):
    (tmp_path / "i").write_text("x", encoding="utf-8")
    found = CliRunner().invoke(
        app, ["generate", "x", "--model", "embedded", "--drafter", "trigram", "--index", str(tmp_path / "i")]
    )
    assert found.exit_code == EXIT_STATUS
    assert "was given as a text index" in found.stderr


def test_a_mixture_is_given_its_sources_and_an_index_on_the_command_line(corpus, tmp_path):
    assert run(corpus, "--out", tmp_path / "i").exit_code == 0
    given = [
        "generate",
        "for i in range(",
        "--model",
        "embedded",
        "--drafter",
        "mixture:suffix,trigram,retrieval",
        "--index",
        str(tmp_path / "i"),
        "--depth",
        "4",
        "--num-paths",
        "2",
        "--max-tokens",
        "16",
        "--json",
    ]
    used = CliRunner().invoke(app, given)
    assert used.exit_code == 0, used.output
    stats = json.loads(used.stdout)["samples"][0]["stats"]
    assert stats["drafter_error"] is None
    assert stats["drafted_tokens"] > 0
