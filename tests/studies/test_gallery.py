"""The gallery: stop masses are those of the verifiers compared, and no curve of iid children is above the optimum."""

import xml.etree.ElementTree as ET

import numpy as np
import pytest

from polydraft.testing import Tables
from polydraft.theory import compare
from studies import gallery


@pytest.mark.parametrize(("verifier", "sampling"), gallery.STOPPED)
def test_stop_mass_is_a_distribution_whose_mean_depth_is_what_is_accepted(verifier, sampling):
    mass = gallery.stop_mass(verifier, sampling)
    tables = Tables(3, seed=0)
    compared = compare(tables.target, tables.draft, gallery.TREE, verifiers=[verifier])
    depth = np.array([0, 1, 1, 2, 2, 2, 2])
    assert mass.sum() == pytest.approx(1, abs=1e-9)
    assert 1 + mass @ depth == pytest.approx(compared.of(verifier, sampling).tokens, abs=1e-9)


def test_no_curve_of_iid_children_is_above_the_optimum():
    for values in (gallery.by_children(1), gallery.by_temperature(1)):
        for name in set(values) - {"race, coupled"}:
            assert np.all(np.array(values[name]) <= np.array(values["optimum, iid"]) + 1e-9), name


def test_the_picture_of_stop_masses_is_svg_with_a_circle_for_each_node():
    root = ET.fromstring(gallery.stopped())
    circles = [element for element in root if element.tag.endswith("circle")]
    assert len(circles) == len(gallery.STOPPED) * len(gallery.TREE)
