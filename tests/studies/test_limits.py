"""The study of the limits writes its tables and draws them."""

import csv
import json

import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.container import ErrorbarContainer
from typer.testing import CliRunner

from polydraft.core import geometry as trees
from studies.limits.__main__ import app
from studies.limits.contexts import LimitSettings, Pair
from studies.limits.nodes import nodes
from studies.limits.picture import draw
from studies.limits.relaxed import nearest, relaxed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study") / "limits"
    found = CliRunner().invoke(app, ["--out", str(folder), "--quick", "--rule", "greedy_traversal", "--node-contexts", "2"])
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
    assert "| greedy_traversal | 4 | " in (folder / "limits.md").read_text().partition("thirds of the contexts")[2]


def test_panels_have_titles_errors_and_legends_that_cover_nothing(folder):
    report = json.loads((folder / "limits.json").read_text())
    figure = draw(report)
    figure.canvas.draw()
    for axis in figure.axes:
        assert axis.get_title() and axis.containers
        assert all(isinstance(c, ErrorbarContainer) and c.has_yerr for c in axis.containers)
        legend = axis.get_legend().get_window_extent()
        assert not any(legend.overlaps(other.get_window_extent()) for other in figure.axes)
    (line,) = (c for c in figure.axes[2].containers if c.get_label() == "traversal")
    row = next(r for r in report["paths"] if (r["rule"], r["drafts"], r["paths"], r["depth"]) == ("traversal", "paths", 4, 6))
    low, high = line.lines[2][0].get_segments()[-1][:, 1]
    assert (high - low) / 4 == pytest.approx(row["standard_error"])
    plt.close(figure)


@pytest.fixture(scope="module")
def pair():
    return Pair(LimitSettings(contexts=6, node_contexts=2, temperatures=(0.7, 1.0), num_drafts=(1,), drafts_by_temperature=1))


def test_relaxed_rules_are_measured_at_every_temperature_and_are_not_lossless(pair):
    rows, at_nodes = relaxed(pair), nodes(pair, lambda: None)
    for T in pair.settings.temperatures:
        here = [r for r in rows if r["temperature"] == T]
        assert [r["rule"] for r in here] == ["typical", "top_beta", "latent, additive", "latent, multiplicative"]
        (lossless,) = (r["acceptance"] for r in at_nodes if (r["rule"], r["temperature"]) == ("speculative", T))
        for r in here:
            assert 0 < r["tv"] <= r["largest"] <= 1
            assert r["kept_lossless"] == pytest.approx(lossless, abs=1e-9)
        assert all(r["kept"] >= lossless - 1e-9 for r in here if r["rule"].startswith("latent"))


def test_nearest_tokens_are_those_of_the_embedding(pair):
    near = nearest(pair)
    table = pair.target.score([1], trees.pad([([0, 7, *near[7].tolist()], [-1] + [0] * 9)]), hidden=(0,)).hidden[0][0, 1:]
    distances = (table[1:] - table[0]).norm(dim=1)
    assert near.shape == (pair.target.vocab_size, 8)
    assert (distances.diff() >= 0).all() and distances[0] > 0
    assert not (near == torch.arange(len(near))[:, None]).any()
