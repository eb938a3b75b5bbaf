"""What scripts of the docs make: the picture of how-it-works.md shows what the page says of it."""

import importlib.util
from pathlib import Path

import pytest
from matplotlib import image

DOCS = Path(__file__).parents[2] / "docs"
PICTURES = DOCS / "pictures"


def module_of(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script():
    return module_of(PICTURES / "tree.py")


@pytest.fixture(scope="module")
def shown(script):
    return script.one_round()


def test_script_draws_a_picture_of_the_size_of_the_one_shown(script, shown, tmp_path):
    script.draw(shown, tmp_path / "tree.png")
    drawn, kept = image.imread(tmp_path / "tree.png"), image.imread(PICTURES / "tree.png")
    assert drawn.shape == kept.shape
    assert (drawn[..., :3] < 0.9).any(-1).mean() > 0.01  # not a blank page


def test_two_of_three_paths_begin_alike(script, shown):
    draws = script.Contexts.of(shown.draft.tree).draws
    assert sum(draws.values()) == 10
    assert sorted(count for n, count in draws.items() if n) == [1, 1, 1, 1, 1, 2, 2]


def test_chances_of_keeping_fall_along_a_path_from_one(script, shown):
    contexts = script.Contexts.of(shown.draft.tree)
    reach = contexts.reached(shown.verdict.stop[0].tolist())
    assert reach[0] == pytest.approx(1)
    assert all(reach[n] <= reach[parent] + 1e-12 for n, parent in contexts.parents.items() if n)


def test_nothing_is_left_for_the_token_that_the_draft_proposes_too_often(script, shown):
    contexts, n = script.Contexts.of(shown.draft.tree), shown.words.index("len")
    token = int(shown.draft.tree.tokens[0, n])
    assert shown.draft.probs[0, shown.draft.rows[0, n], token] > shown.target_probs[0, 0, token]
    assert contexts.reached(shown.verdict.stop[0].tolist())[n] == pytest.approx(0, abs=1e-12)
