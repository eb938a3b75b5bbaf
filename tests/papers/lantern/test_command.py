import json

import pytest
from typer.testing import CliRunner

from polydraft.cli.main import app


def run(*given):
    return CliRunner().invoke(app, ["images", *map(str, given)])


def test_a_grid_is_drawn_and_its_rules_are_told(tmp_path):
    file = tmp_path / "grid.png"
    done = run("--classes", "1,4", "--delta", 0.3, "--factor", 2, "--out", file)
    assert done.exit_code == 0, done.output
    assert file.read_bytes().startswith(b"\x89PNG")
    assert all(
        said in done.stdout
        for said in ("without drafts", "exact", "mass 0.3", "2 times", "the guided distribution")
    )


def test_json_has_a_row_for_each_rule(tmp_path):
    done = run(
        "--classes", "7", "--drafter", "ngram", "--delta", 0.3, "--json", "--out", tmp_path / "grid.png"
    )
    rows = json.loads(done.stdout)["rows"]
    assert [row["lossless_to"] for row in rows] == [
        "the guided distribution of the target's two prompts"
    ] * 2 + [None]
    assert rows[2]["total_variation"] > 0


def test_without_guidance_the_distribution_is_the_models_own(tmp_path):
    done = run("--classes", "7", "--guidance", 1, "--delta", 0.3, "--json", "--out", tmp_path / "grid.png")
    assert [row["lossless_to"] for row in json.loads(done.stdout)["rows"]] == [
        "the target distribution"
    ] * 2 + [None]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--classes", "1,ten"], "'ten'"),
        (["--delta", 2], "--delta 2.0"),
        (["--factor", -1], "--factor -1.0"),
        (["--drafter", "heads"], "'heads'"),
        (["--model", "nowhere"], "no model of pictures"),
        (["--neighbours", 900], "900 neighbours"),
    ],
)
def test_what_means_nothing_is_refused_in_one_line(tmp_path, given, said):
    done = run(*given, "--out", tmp_path / "grid.png")
    assert done.exit_code == 2 and said in done.stderr and "\n" not in done.stderr.strip()
    assert not (tmp_path / "grid.png").exists()
