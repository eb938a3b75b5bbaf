import json
import re
import shlex

import pytest
from typer.testing import CliRunner

from polydraft.cli.main import app
from polydraft.config import EngineConfig
from polydraft.engine.plan import Plan
from polydraft.methods import registry
from polydraft.models import pair

KINDS = ("verifier", "drafter", "decoding")


def output(*given: str) -> str:
    found = CliRunner().invoke(app, ["methods", *given])
    assert found.exit_code == 0, found.output
    return found.stdout


def test_json_lists_the_whole_registry():
    rows = json.loads(output("--json"))
    for kind in KINDS:
        listed = {row["name"].partition(":")[0] for row in rows if row["kind"] == kind}
        names = [*registry.names(kind), *(registry.names("made verifier") if kind == "verifier" else ())]
        assert listed == {name.partition(":")[0] for name in names}


def test_every_method_has_a_year_distributions_and_shapes():
    for row in json.loads(output("--json")):
        assert row["year"] > 2000, row["name"]
        assert row["kind"] == "decoding" or (row["draft_sampling"] and row["shapes"]), row["name"]
        assert row["lossless_to"], row["name"]


def test_table_names_every_method():
    shown = output()
    assert all(name in shown for kind in KINDS for name in registry.names(kind))


def rows_that_run() -> list[dict]:
    return [row for row in json.loads(output("--json")) if not row["needs"]]


def options_of(command: str) -> dict[str, str]:
    words = shlex.split(command)[3:]
    return dict(zip(words[::2], words[1::2], strict=True))


def test_every_method_has_a_command_or_says_what_it_needs():
    for row in json.loads(output("--json")):
        capitals = re.findall(r"\b[A-Z]{4,}\b|\b[AB]\b", row["command"])
        assert row["command"].startswith("polydraft ")
        assert all(word in row["needs"] for word in capitals if word != "MODEL"), row
    shown = output()
    assert all(row["command"] in shown and row["needs"] in shown for row in json.loads(output("--json")))


def test_commands_that_need_nothing_name_parts_that_fit():
    rows = rows_that_run()
    assert len(rows) > 30
    for row in rows:
        given = options_of(row["command"])
        fields = {
            name: given[f"--{name}"] for name in ("drafter", "verifier", "decoding") if f"--{name}" in given
        }
        assert fields[row["kind"]] == row["name"]
        Plan.of(
            EngineConfig.of(model=str(pair.target_folder()), draft_model=str(pair.draft_folder()), **fields)
        )


@pytest.mark.parametrize("name", ["flow", "kseq", "race", "model:top_k", "suffix", "contrastive"])
def test_a_command_runs_as_it_is_printed(name):
    (row,) = [row for row in rows_that_run() if row["name"] == name]
    found = CliRunner().invoke(app, shlex.split(row["command"])[1:])
    assert found.exit_code == 0, found.output
    assert found.stdout.strip()
