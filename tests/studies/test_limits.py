"""The study of the limits writes its tables and draws them."""

import json

import pytest
from matplotlib import pyplot as plt
from matplotlib.container import ErrorbarContainer

from studies.limits.__main__ import main
from studies.limits.picture import draw


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study") / "limits"
    main(folder, quick=True)
    return folder


def test_tables_and_picture_are_written(folder):
    names = {"limits.json", "limits.md", "limits-nodes.csv", "limits-paths.csv", "limits-relaxed.csv", "limits.png"}
    assert {file.name for file in folder.iterdir()} == names
    assert (folder / "limits.png").stat().st_size > 10_000


def test_panels_have_titles_errors_and_legends_that_cover_nothing(folder):
    report = json.loads((folder / "limits.json").read_text())
    figure = draw(report)
    figure.canvas.draw()
    for axis in figure.axes:
        assert axis.get_title() and axis.containers
        assert all(isinstance(c, ErrorbarContainer) and c.has_yerr for c in axis.containers)
        legend = axis.get_legend().get_window_extent()
        assert not any(legend.overlaps(other.get_window_extent()) for other in figure.axes)
    (bound,) = (c for c in figure.axes[2].containers if c.get_label() == "bound for any rule")
    row = next(r for r in report["paths"] if (r["rule"], r["paths"], r["depth"]) == ("bound", 4, 6))
    low, high = bound.lines[2][0].get_segments()[-1][:, 1]
    assert (high - low) / 4 == pytest.approx(row["standard_error"])
    plt.close(figure)
