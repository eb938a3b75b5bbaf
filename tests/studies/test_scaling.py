"""How the cost of a round grows: what is said of a curve, and that all of them are measured and drawn."""

import json
import math

import pytest

from studies.scaling import Curve, Point, main, markdown


def curve(*seconds):
    return Curve(
        "rows of a forward pass", "x", tuple(Point(2**i, s, 1.0, 2**20) for i, s in enumerate(seconds))
    )


def test_exponents_and_knee_tell_where_a_curve_turns_linear():
    bent = curve(1.0, 1.1, 1.3, 2.3, 4.6)
    assert bent.exponents == pytest.approx((math.log2(1.1), 1.0))
    assert bent.knee == 4
    assert curve(1.0, 1.1, 1.2).knee is None


def test_the_table_has_a_row_for_each_curve_with_its_ends():
    assert (
        markdown([curve(1.0, 1.1, 1.3)])
        .splitlines()[2]
        .startswith("| rows of a forward pass | x | 1 to 4 | 1000.00 to 1300.00 |")
    )


@pytest.mark.slow
def test_all_curves_are_measured_and_drawn(tmp_path, capsys):
    main(tmp_path, quick=True)
    found = json.loads((tmp_path / "curves.json").read_text())["curves"]
    assert {c["panel"] for c in found} == {
        "sequences at a time",
        "tokens of context",
        "rows of a forward pass",
        "vocabulary",
        "depth",
    }
    assert all(p["seconds"] > 0 and p["num_bytes"] > 0 for c in found for p in c["points"])
    batch = next(c for c in found if c["panel"] == "sequences at a time" and c["name"] == "plain")["points"]
    assert Point(**batch[-1]).rate > Point(**batch[0]).rate
    assert "| sequences at a time | plain | 1 to 16 |" in capsys.readouterr().out
    assert (tmp_path / "curves.png").stat().st_size > 1000
