"""The study of the limits writes its tables and draws them."""

import csv
import json

import pytest
from typer.testing import CliRunner

from studies.limits.__main__ import app


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study") / "limits"
    found = CliRunner().invoke(
        app, ["--out", str(folder), "--quick", "--rule", "greedy_traversal", "--node-contexts", "2"]
    )
    assert not found.exception, found.output
    return folder


def test_tables_and_picture_are_written(folder):
    names = {
        "limits.json",
        "limits.md",
        "limits-nodes.csv",
        "limits-paths.csv",
        "limits-relaxed.csv",
        "limits-by_overlap.csv",
        "limits.png",
    }
    assert {file.name for file in folder.iterdir()} == names
    assert (folder / "limits.png").stat().st_size > 10_000
    report = json.loads((folder / "limits.json").read_text())
    rows = list(csv.DictReader((folder / "limits-paths.csv").open()))
    assert [r["tokens_per_step"] for r in rows] == [str(r["tokens_per_step"]) for r in report["paths"]]
    assert (
        "| greedy_traversal | 4 | "
        in (folder / "limits.md").read_text().partition("thirds of the contexts")[2]
    )
