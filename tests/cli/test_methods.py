import json

from typer.testing import CliRunner

from polydraft.cli.main import app
from polydraft.methods import registry

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
