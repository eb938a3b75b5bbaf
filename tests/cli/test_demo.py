import json
import re

import pytest
from typer.testing import CliRunner

from polydraft.cli.main import app

QUICK = ["--prompts", "1", "--max-tokens", "12", "--repetitions", "1"]


@pytest.fixture(scope="module")
def shown() -> str:
    found = CliRunner().invoke(app, ["demo", *QUICK])
    assert found.exit_code == 0, found.output
    return found.stdout


@pytest.fixture(scope="module")
def whole() -> dict:
    found = CliRunner().invoke(app, ["demo", "--json", *QUICK])
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


def test_json_has_the_documented_keys(whole):
    assert set(whole) == {"target", "draft", "prompts", "contenders", "equal_greedy", "equal_seed_exact"}
    measured = {"tokens_per_second", "tokens_per_step", "speedup", "speedup_transformers"}
    for row in whole["contenders"]:
        assert set(row) == {"name", "drafter", "verifier", "temperature"} | measured


def test_plain_and_transformers_run_at_both_temperatures(whole):
    ran = {(row["name"], row["temperature"]) for row in whole["contenders"]}
    assert {(name, t) for name in ("plain", "transformers") for t in (0, 1)} <= ran


def test_outputs_are_equal_greedy_and_seed_exact(whole):
    assert whole["equal_greedy"] is True
    assert whole["equal_seed_exact"] is True


def test_plain_is_its_own_baseline(whole):
    plain = [row for row in whole["contenders"] if row["name"] == "plain"]
    assert [(row["speedup"], row["tokens_per_step"]) for row in plain] == [(1.0, 1.0)] * 2


def test_drafts_give_more_than_one_token_a_call(whole):
    calls = {row["name"]: row["tokens_per_step"] for row in whole["contenders"] if row["temperature"] == 1}
    assert calls["chain + block"] > 1.3


def test_without_a_terminal_there_are_no_control_codes(shown):
    assert "\x1b" not in shown
    assert "\r" not in shown


def test_the_last_line_can_be_pasted(shown):
    assert (
        shown.rstrip()
        .splitlines()[-1]
        .endswith('generate "Once upon a time" --model PATH --draft-model PATH')
    )


def test_both_ways_of_one_prompt_show_the_same_text(shown):
    texts = re.findall(r"temperature [01], with(?:out)? drafts .*?\n(.*?)\n12 tokens", shown, re.DOTALL)
    assert len(texts) == 4
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
