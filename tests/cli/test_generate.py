import json
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner, Result

from polydraft.cli.main import app
from polydraft.engine.loop import Loop
from polydraft.policy import profile
from polydraft.policy.profile import Profile

RUNNER = CliRunner()
SHORT = [
    "--model",
    "embedded",
    "--max-tokens",
    "16",
    "--seed",
    "5",
    "--depth",
    "4",
    "--ignore-eos",
]  # a fixed size: a policy that learns looks at the clock


def run(*given: str, stdin: str | bytes | None = None) -> Result:
    found = RUNNER.invoke(app, list(given), input=stdin)
    assert found.exit_code == 0, found.output
    return found


def generate(*given: str, stdin: str | bytes | None = None) -> Result:
    return run("generate", *given, *SHORT, stdin=stdin)


@pytest.fixture(scope="module")
def text() -> str:
    return generate("def quicksort(").stdout


def test_json_holds_text_and_statistics():
    whole = json.loads(generate("def quicksort(", "--json", "--depth", "4").stdout)
    assert whole["text"] == whole["samples"][0]["text"]
    assert whole["statistics"]["generated_tokens"] == 16
    assert whole["statistics"]["tokens_per_step"] > 1
    assert whole["engine"]["lossless"] is True


def test_details_of_the_banner_are_for_those_who_ask():
    brief, whole = (generate("def quicksort(", *more).stderr.splitlines()[0] for more in ((), ("--verbose",)))
    assert (
        brief.startswith("embedded in bfloat16; drafter model, verifier ")
        and "," not in brief.partition("verifier")[2]
    )
    assert whole.startswith(f"{brief}; context of 1024 tokens, batch of 1, KV cache of ")


def test_what_a_person_waited_is_counted_from_the_start_of_the_process():
    given = [sys.executable, "-m", "polydraft", "generate", "def f(", *SHORT, "--drafter", "ngram", "--json"]
    start = time.monotonic()
    waited = json.loads(
        subprocess.run(given, capture_output=True, text=True, check=True, timeout=120).stdout
    )["waited"]
    elapsed = time.monotonic() - start
    assert (
        0 < waited["load"] <= waited["prefill"] <= waited["first_token"] <= waited["total"] <= elapsed + 0.1
    )
    assert waited["compile"] < waited["total"] and waited["tokens_per_second"] > 0


def test_text_goes_to_stdout_and_the_rest_to_stderr():
    found = generate("def quicksort(", "--verbose")
    assert "tokens/s" not in found.stdout
    assert "16 tokens, " in found.stderr
    assert "context of 1024 tokens" in found.stderr
    assert "seed 5" in found.stderr
    assert "from the start: loaded " in found.stderr and ", first token " in found.stderr.splitlines()[-1]


def test_streamed_text_equals_whole_text(text):
    assert generate("def quicksort(", "--no-stream").stdout == text


@pytest.mark.parametrize("source", ["-", None])
def test_prompt_comes_from_standard_input(source, text):
    given = [] if source is None else [source]
    assert generate(*given, stdin="def quicksort(").stdout == text


def test_prompt_comes_from_a_file(tmp_path, text):
    (tmp_path / "prompt.py").write_text("def quicksort(", encoding="utf-8")
    assert generate("--file", str(tmp_path / "prompt.py")).stdout == text


def test_show_adds_the_prompt_and_a_legend_and_no_control_codes_without_a_terminal(text):
    found = generate("def quicksort(", "--show")
    assert found.stdout == "def quicksort(" + text
    assert "drafted by model" in found.stderr
    assert "\x1b" not in found.output


def test_race_gives_the_same_text_with_and_without_drafts():
    plain = [option for option in SHORT if option not in ("--depth", "4")]
    without = run("generate", "import os\n", "--verifier", "race", "--drafter", "none", *plain).stdout
    assert generate("import os\n", "--verifier", "race", "--drafter", "model:coupled").stdout == without
    assert generate("import os\n", "--verifier", "race", "--drafter", "ngram").stdout == without


def test_several_samples_differ():
    samples = json.loads(generate("class ", "-n", "3", "--json").stdout)["samples"]
    assert len({sample["text"] for sample in samples}) == 3


def test_json_has_null_for_the_log_probability_of_a_banned_token():
    whole = generate("class ", "--top-k", "1", "--logprobs", "2", "--json").stdout
    tokens = json.loads(whole)["samples"][0]["logprobs"]
    assert len(tokens) == 16
    assert all(len(token["top"]) == 2 for token in tokens)


def test_stop_text_ends_the_output():
    whole = json.loads(
        run(
            "generate",
            "import os\nimport ",
            "--model",
            "embedded",
            "--stop",
            "\n",
            "--temperature",
            "0",
            "--json",
        ).stdout
    )
    assert whole["samples"][0]["finish_reason"] == "stop"
    assert "\n" not in whole["text"]


def test_asynchronous_drafting_gives_the_same_race_and_a_trace(tmp_path):
    given = (
        "generate",
        "def quicksort(",
        "--model",
        "embedded",
        "--max-tokens",
        "16",
        "--seed",
        "5",
        "--verifier",
        "race",
        "--ignore-eos",
    )
    plain = run(*given, "--drafter", "none")
    found = run(*given, "--asynchronous", "--lead-cap", "6", "--trace", str(tmp_path / "trace.json"))
    assert found.stdout == plain.stdout
    assert "rollbacks" in found.stderr
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"draft", "verify"} <= names


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--lead-cap", "3"], "without --asynchronous"),
        (["--asynchronous", "--lead-cap", "0"], "--lead-cap 0"),
        (["--asynchronous", "--trace", "nowhere/trace.json"], "no folder"),
        (["--asynchronous", "--drafter", "ngram"], "--drafter ngram"),
    ],
)
def test_asynchronous_options_that_do_not_fit_are_refused(options, said):
    found = RUNNER.invoke(app, ["generate", "def", "--model", "embedded", *options])
    assert found.exit_code != 0
    assert said in str(found.exception) + found.output


def test_costs_that_are_missing_are_measured_after_the_answer_and_ctrl_c_ends_that(monkeypatch, tmp_path):
    given = [
        "generate",
        "def f(",
        "--model",
        "embedded",
        "--max-tokens",
        "8",
        "--ignore-eos",
        "--temperature",
        "0",
    ]
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path))
    for name, nothing in (("_known", {}), ("_tried", set())):
        monkeypatch.setattr(profile, name, nothing)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(Loop, "measure", lambda _: signal.raise_signal(signal.SIGINT))
        answer = run(*given).stdout
    assert answer.strip() and not [*tmp_path.glob("*.json")]
    assert run(*given).stdout == answer
    assert [Profile.load(file).about["spread"] < profile.UNMEASURED for file in tmp_path.glob("*.json")] == [
        True
    ]
