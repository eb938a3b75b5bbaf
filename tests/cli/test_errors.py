"""Bad input ends with one line that says what to do, and a status other than 0."""

import shutil

import pytest
from typer.testing import CliRunner, Result

from polydraft.cli import train
from polydraft.cli.commands import EXIT_STATUS
from polydraft.cli.main import app
from polydraft.models import pair


def refuse(*given: str, stdin: bytes | None = None) -> str:
    """What is said on standard error."""
    model = () if "--model" in given else ("--model", "embedded")
    found: Result = CliRunner().invoke(app, ["generate", *given, *model], input=stdin)
    assert found.exit_code == EXIT_STATUS, found.output
    assert found.stdout == ""
    assert "Traceback" not in found.stderr
    return found.stderr


def line(*given: str, stdin: bytes | None = None) -> str:
    """The same where it is one line of ours."""
    (last,) = [x for x in refuse(*given, stdin=stdin).splitlines() if x.startswith("error: ")]
    return last


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--temperature", "-1"], "--temperature -1.0 was given; expected a finite number >= 0"),
        (["--temperature", "nan"], "--temperature nan was given"),
        (["--top-p", "0"], "--top-p 0.0 was given; expected a number in (0, 1]"),
        (["--top-p", "1.5"], "--top-p 1.5 was given"),
        (["--top-k", "-2"], "--top-k -2 was given; expected an integer >= -1"),
        (["--min-p", "2"], "--min-p 2.0 was given"),
        (["--max-tokens", "0"], "--max-tokens 0 was given; expected an integer >= 1"),
        (["--n", "0"], "--n 0 was given"),
        (["--n", "1000000"], "--n 1000000 was given; expected an integer in [1, "),
        (["--stop", ""], "expected non-empty strings"),
        (["--logprobs", "3"], "--logprobs 3 was given without --json"),
        (
            ["--logprobs", "999999", "--json"],
            "--logprobs 999999 was given; expected an integer in [0, 1000]. 0 reports",
        ),
        (["--head", "p.py"], "'p.py' was given as a draft head and has no config.json; expected a folder"),
        (
            ["--head", "p.py", "--drafter", "ngram"],
            "--drafter ngram and --head p.py were given; a head is read by its own drafter. Drop one of them.",
        ),
        (["--model", ""], "--model '' was given; expected some text. Give some, or leave it out."),
        (
            ["--drafter", "none", "--depth", "4"],
            "--drafter none and --depth 4 were given; without drafts --depth says nothing",
        ),
        (["--drafter", "none", "--draft-model", "x"], "--drafter none and --draft-model x were given"),
        (
            ["--profile", "x", "--depth", "4"],
            "--profile x and --depth 4 were given; a profile is for draft shapes that the policy chooses",
        ),
        (["--asynchronous", "--num-paths", "2"], "--asynchronous and --num-paths 2 were given"),
        (["--json", "--show"], "--show and --json were given"),
        (["--no-stream", "--show"], "--show and --no-stream were given"),
        (["--lead-cap", "3"], "--lead-cap 3 was given without --asynchronous, whose option it is"),
        (["--threads", "10000"], "--threads 10000 was given; expected 1 to "),
        (["--depth", "0"], "--depth 0 was given; expected at least 1"),
        (["--num-paths", "0"], "--num-paths 0 was given; expected at least 1"),
        (
            ["--num-paths", "100000", "--depth", "50"],
            "up to 5000000 drafted tokens a step; expected at most 255",
        ),
        (["--drafter", "mixture:"], "'mixture:' was given; expected a kind after the colon"),
        (["--verifier", "blok"], "unknown verifier 'blok'; did you mean 'block'?"),
        (["--drafter", "modle"], "unknown drafter 'modle'; did you mean 'model'?"),
        (["--drafter", "ngram", "--verifier", "block"], "Verifiers that fit: match"),
        (["--max-tokens", "2000"], "the context holds 1024"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_a_bad_option_is_refused(given, expected):
    assert expected in line("def f(", *given)


def test_an_empty_prompt_is_refused():
    assert "an empty prompt was given" in line("")
    assert "an empty prompt was given" in line("-", stdin=b"")


def test_a_prompt_longer_than_the_context_is_told_how_long_it_may_be():
    assert "it may have at most 1023" in line("x = 1\n" * 1000, "--max-tokens", "1")


def test_bytes_that_are_not_utf8_are_refused_with_their_place():
    assert "standard input holds the byte 0xff at offset 4" in line("-", stdin=b"def \xff")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    assert "No such file" in line("--file", str(tmp_path / "nothing.py"))


def test_two_prompts_are_refused(tmp_path):
    assert "a prompt and --file were given" in line("x", "--file", str(tmp_path / "p.py"))


def test_an_unknown_option_is_refused_with_the_nearest():
    assert "--temperature" in refuse("x", "--temprature", "1")


def test_an_unknown_command_is_refused_with_the_nearest():
    found = CliRunner().invoke(app, ["genrate"])
    assert found.exit_code == EXIT_STATUS
    assert "generate" in found.stderr


@pytest.fixture
def folder(tmp_path):
    """A copy of the embedded target that may be damaged."""
    return shutil.copytree(pair.target_folder(), tmp_path / "model")


def test_a_missing_model_folder_is_refused(tmp_path):
    assert "does not exist" in line("x", "--model", str(tmp_path / "nothing"))


def test_a_model_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    assert "has no weights in safetensors format" in line("x", "--model", str(folder))


def test_corrupt_weights_are_refused(folder):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "is corrupt or cut off" in line("x", "--model", str(folder))


def test_a_draft_with_another_vocabulary_is_refused(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        renamed = (folder / name).read_text(encoding="utf-8").replace("<|endoftext|>", "<|the end|>")
        (folder / name).write_text(renamed, encoding="utf-8")
    assert "different vocabularies" in line("x", "--draft-model", str(folder))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--resume"], "--resume was given and --out"),
        (["--minutes", "nan"], "--minutes nan were given; expected at least 1"),
        (["--minutes", "inf"], "--minutes inf were given"),
        (["--unroll", "-2"], "--unroll -2 was given; expected a whole number of at least 1"),
        (["--draft-vocab", "0"], "--draft-vocab 0 was given"),
        (["--size", "layers=0"], "layers=0 was given; expected a whole number of at least 1"),
        (["--data", "rand.bin"], "rand.bin' was given as plain text and is none: byte 0x"),
        (["--data", "empty.jsonl"], "empty.jsonl' has no usable line"),
        (["--data", "cut.npz"], "cut.npz' is no shard of texts"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_what_cannot_be_trained_is_refused_before_a_model_is_loaded(given, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rand.bin").write_bytes(bytes(range(256)))
    (tmp_path / "empty.jsonl").write_text("{}\n[1]\n", encoding="utf-8")
    (tmp_path / "cut.npz").write_bytes(b"PK")
    monkeypatch.setattr(train, "build", lambda *_, **__: pytest.fail("a model was loaded"))
    kind = "block" if "--size" in given else "medusa"
    found = CliRunner().invoke(
        app, ["train", kind, "--model", "embedded", *given, "--out", str(tmp_path / "head")]
    )
    assert found.exit_code == EXIT_STATUS, found.output
    (last,) = [x for x in found.stderr.splitlines() if x.startswith("error: ")]
    assert expected in last
    assert not (tmp_path / "head").exists()
