import json

from typer.testing import CliRunner

from polydraft.cli.main import app


def test_json_has_every_test_and_says_that_few_rounds_show_little():
    """That the pair passes by enough steps is the command of the README, which `tests/docs/test_pages.py` runs."""
    done = CliRunner().invoke(
        app, ["check", "--model", "embedded", "--steps", "60", "--max-tokens", "8", "--depth", "2", "--json"]
    )
    assert done.exit_code == 3, done.output
    report = json.loads(done.stdout)
    assert not report["passed"] and report["steps"] >= 60 and report["detectable"] > 0.1
    assert {"what", "count", "effect", "detectable", "p_value"} <= report["tests"][0].keys()


def test_the_table_names_verdict_rounds_and_rule(tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("import os\n\ndef add(a, b):\n", encoding="utf-8")
    options = [
        "--steps",
        "40",
        "--max-tokens",
        "8",
        "--drafter",
        "model:chain",
        "--depth",
        "2",
        "--prompts",
        str(prompts),
    ]
    done = CliRunner().invoke(app, ["check", "--model", "embedded", *options])
    assert done.exit_code == 3, done.output
    said = " ".join(done.stdout.split())
    assert "INCONCLUSIVE" in said and "with probability 0.9" in said and "fails at 0.0001" in said
    assert "verifier block" in said


def test_a_self_test_without_a_draft_model_is_refused():
    done = CliRunner().invoke(app, ["check", "--model", "embedded", "--self-test", "--drafter", "ngram"])
    assert done.exit_code == 2
    assert "--draft-model" in done.stderr


def test_rounds_below_what_a_test_needs_are_refused():
    done = CliRunner().invoke(app, ["check", "--model", "embedded", "--steps", "-4"])
    assert done.exit_code == 2
    assert "--steps " in done.stderr and "30" in done.stderr
