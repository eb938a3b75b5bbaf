"""Options that contradict each other, or say nothing, are refused from one table, before anything is loaded."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from polydraft.cli.commands import EXIT_STATUS
from polydraft.cli.main import app
from polydraft.cli.option_rules import RULES, SHARED_NOISE, Given, check_options
from polydraft.methods import registry
from tests.support.commands import commands

X = ["generate", "x", "--model", "embedded"]
SERVE = ["serve", "--model", "embedded"]


def refusal(*given: str) -> str:
    """The one line that is said."""
    done = CliRunner().invoke(app, list(given))
    assert done.exit_code == EXIT_STATUS and "Traceback" not in done.output, done.output
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return said


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch):
    monkeypatch.setattr(
        "polydraft.models.load.load_model", lambda *_, **__: pytest.fail("a model was loaded")
    )
    monkeypatch.setattr(
        "polydraft.models.torch.module.load_module", lambda *_, **__: pytest.fail("a model was loaded")
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            [*X, "--drafter", "none", "--verifier", "block"],
            "--drafter none and --verifier block were given; without drafts --verifier",
        ),
        (
            [*X, "--drafter", "none", "--draft-quantization", "int4"],
            "without drafts --draft-quantization says nothing",
        ),
        (
            [*X, "--drafter", "ngram", "--draft-model", "X"],
            "--drafter ngram and --draft-model X were given; this drafter reads no",
        ),
        (
            [*X, "--head", "h", "--draft-model", "X"],
            "--head h and --draft-model X were given; the head drafts",
        ),
        ([*X, "--exact", "--quantization", "int4"], "--exact and --quantization int4 were given"),
        ([*X, "--stream", "--json"], "--json and --stream were given; JSON comes when the text is whole"),
        ([*X, "--show", "-n", "2"], "--show and --n 2 were given; one text alone is streamed"),
        (
            [*X, "--backend", "transformers", "--cache-dtype", "q8_0"],
            "only the compiled backend has --cache-dtype",
        ),
        ([*X, "--amateur", "Y"], "--amateur Y was given without --decoding"),
        ([*X, "--alpha", "0.2"], "--alpha 0.2 was given without --decoding, whose option it is"),
        ([*X, "--decoding-option", "alpha=0.1"], "--decoding-option alpha=0.1 was given without --decoding"),
        (
            [*X, "--decoding", "contrastive", "--decoding-option", "alpha=0.1", "--alpha", "0.2"],
            "--alpha 0.2 was given beside alpha among --decoding-option; expected it once",
        ),
        ([*X, "--index", "i"], "--index i was given without --drafter, which reads it"),
        ([*X, "--trace", "t"], "--trace t was given without --asynchronous"),
        ([*X, "--draft-model", ""], "--draft-model '' was given; expected some text"),
        (
            [*X, "--draft-vocabulary", "99999999"],
            "--draft-vocabulary 99999999 was given; the draft model has 2048 tokens",
        ),
        ([*X, "--device", "meta"], "--device meta was given, which this machine does not have"),
        ([*SERVE, "--served-model-name", ""], "--served-model-name '' was given; expected some text"),
        ([*SERVE, "--api-key-file", "/nonexistent"], "'/nonexistent' could not be used: No such file"),
        (
            [*SERVE, "--host", "999.1.1.1"],
            "--host 999.1.1.1 --port 8000 were given, which cannot be listened on",
        ),
        ([*SERVE, "--host", "a" * 70], "which cannot be listened on"),
        ([*SERVE, "--max-replicas", "3"], "--max-replicas 3 was given without --replicas"),
        (["chat", "--model", "embedded"], "has no chat template: the model was not trained to converse"),
        ([*X, "--chat"], "has no chat template: the model was not trained to converse"),
        (
            ["index", "build", "c", "-o", "i", "--kind", "passages", "--tokenizer", "T"],
            "--kind passages and --tokenizer T were given",
        ),
        (
            ["index", "build", "c", "-o", "i", "--model", "M"],
            "--kind text and --model M were given; --model is for passages",
        ),
        (["check", "--url", "http://x"], "--url http://x was given without --model"),
        (
            ["check", "--url", "http://x", "--model", "M", "--top-k", "3"],
            "--url http://x and --top-k 3 were given; the server drafts",
        ),
        (["check", "--name", "N"], "--name N was given without --url, whose model it names"),
        (
            ["tune", "--model", "embedded", "--quick", "--repetitions", "9"],
            "--quick and --repetitions 9 were given",
        ),
        (
            ["tune", "--model", "embedded", "--prompts", "/no.txt"],
            "--prompts '/no.txt' was given and cannot be read: No such file",
        ),
        (
            ["check", "--model", "embedded", "--prompts", "/no.txt"],
            "--prompts '/no.txt' was given and cannot be read: No such file",
        ),
        (
            ["bench", "--model", "embedded", "--prompts", "/no.txt"],
            "--prompts '/no.txt' was given and cannot be read: No such file",
        ),
        (["doctor", "--warm", "--json"], "--warm and --json were given"),
        (["doctor", "--warm", "--model", "embedded"], "--warm and --model embedded were given"),
        (
            ["bench", "--model", "embedded", "--way", "model+blok"],
            "--way 'model+blok' was given: unknown verifier 'blok'; did you mean",
        ),
        (["bench", "--model", "embedded", "--way", "ngram+block"], "--way 'ngram+block' was given: "),
        (
            ["bench", "--model", "embedded", "--way", "modle"],
            "--way 'modle' was given: unknown drafter 'modle'; did you mean 'model'",
        ),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_what_says_nothing_is_refused_with_its_reason(given, said, monkeypatch):
    if "meta" in given:
        monkeypatch.undo()  # a device is asked for where a model is loaded
    assert said in refusal(*given)


@pytest.mark.parametrize(
    "given",
    [
        ("--drafter none", "--verifier race", "--seed 1"),
        ("--drafter none", "--draft-model X", "--decoding contrastive"),
        ("--drafter ngram", "--draft-model X", "--offer model"),
        ("--show", "--n 1"),
        ("--drafter mixture:ngram,trigram", "--index i"),
        ("--decoding contrastive", "--alpha 0.2"),
        ("--drafter none", "--depth 3", "--offer ngram"),
    ],
    ids=" ".join,
)
def test_what_means_something_together_is_taken(given):
    values = dict(option.partition(" ")[::2] for option in given)
    check_options("generate", Given(values, tuple(values)))


def test_verifiers_that_mean_something_without_drafts_are_those_that_share_their_noise():
    names = registry.names("verifier")
    assert set(SHARED_NOISE) == {
        f"--verifier {name}" for name in names if registry.verifier(name).info.shared_noise
    }


def test_every_row_of_the_table_is_about_options_of_some_command():
    known = {
        name: {o for p in c.params for o in (*p.opts, *p.secondary_opts)} for name, c in commands().items()
    }
    for rule in RULES:
        for option in rule.first:
            first = option.partition(" ")[0]
            others = {other.partition(" ")[0] for other in rule.others}
            of = [options for name, options in known.items() if rule.of in ("", name.rpartition(" ")[2])]
            assert any(first in options and others & options for options in of), rule


def test_the_table_is_asked_before_anything_heavy_is_imported():
    asked = "import atexit, sys; from polydraft.cli.main import app; atexit.register(lambda: print('|', *sys.modules)); app(sys.argv[1:])"
    given = [*X, "--drafter", "none", "--verifier", "block"]
    done = subprocess.run([sys.executable, "-c", asked, *given], capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_STATUS and not {"torch", "numba", "numpy", "rich"} & set(
        done.stdout.partition("|")[2].split()
    )
