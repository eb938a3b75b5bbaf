"""How the cost of a round grows: what is said of a curve, and that all of them are measured and drawn."""

import math

import pytest

from studies.scaling import Curve, Point


def curve(*seconds):
    return Curve(
        "rows of a forward pass", "x", tuple(Point(2**i, s, 1.0, 2**20) for i, s in enumerate(seconds))
    )


def test_exponents_and_knee_tell_where_a_curve_turns_linear():
    bent = curve(1.0, 1.1, 1.3, 2.3, 4.6)
    assert bent.exponents == pytest.approx((math.log2(1.1), 1.0))
    assert bent.knee == 4
    assert curve(1.0, 1.1, 1.2).knee is None
