"""What scripts of the docs make: the pictures of how-it-works.md show what the pages say of them."""

import importlib.util
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from matplotlib import image

from polydraft import TokenTree
from polydraft.core import geometry as tree
from polydraft.theory.speed import best_depth

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
    return script.one_step()


def test_script_draws_a_picture_of_the_size_of_the_one_shown(script, shown, tmp_path):
    script.draw(shown, tmp_path / "tree.png")
    drawn = image.imread(tmp_path / "tree.png")
    kept = image.imread(PICTURES / "tree.png")
    assert drawn.shape == kept.shape
    assert (drawn[..., :3] < 0.9).any(-1).mean() > 0.01  # not a blank page


def test_two_of_three_paths_begin_alike(script, shown):
    draws = script.Contexts.of(shown.draft.tree).draws
    assert sum(draws.values()) == 10
    assert sorted(count for n, count in draws.items() if n) == [1, 1, 1, 1, 1, 2, 2]


def test_chances_of_acceptance_fall_along_a_path_from_one(script, shown):
    contexts = script.Contexts.of(shown.draft.tree)
    reach = contexts.reached(shown.verdict.stop[0].tolist())
    assert reach[0] == pytest.approx(1)
    assert all(reach[n] <= reach[parent] + 1e-12 for n, parent in contexts.parents.items() if n)


def test_nothing_is_left_for_the_token_that_the_draft_proposes_too_often(script, shown):
    contexts = script.Contexts.of(shown.draft.tree)
    n = shown.words.index("len")
    token = int(shown.draft.tree.tokens[0, n])
    assert shown.draft.probs[0, shown.draft.rows[0, n], token] > shown.target_probs[0, 0, token]
    assert contexts.reached(shown.verdict.stop[0].tolist())[n] == pytest.approx(0, abs=1e-12)


@pytest.fixture(scope="module")
def step():
    return module_of(PICTURES / "step.py")


STEP_PICTURES = [
    "step-draft-tree",
    "step-tree-attention",
    "step-accepted-path",
    "step-kv-cache",
    "acceptance",
    "speed",
]


@pytest.mark.parametrize("name", STEP_PICTURES)
def test_a_picture_of_the_introduction_is_what_its_script_draws(step, name):
    drawing = step.PICTURES[name]()
    assert (PICTURES / f"{name}.svg").read_text(encoding="utf-8") == drawing, (
        "run `python docs/pictures/step.py`"
    )
    assert f"pictures/{name}.svg" in (DOCS / "how-it-works.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", STEP_PICTURES)
def test_words_of_the_introduction_s_pictures_are_readable_on_a_phone_and_inside_the_picture(step, name):
    root = ET.fromstring(step.PICTURES[name]())
    words = root.findall("{http://www.w3.org/2000/svg}text")
    assert words and all(int(word.attrib["font-size"]) >= 20 for word in words)
    for word in words:
        width = len(word.text or "") * int(word.attrib["font-size"]) * 0.55
        x = (
            float(word.attrib["x"])
            - {"start": 0, "middle": 0.5, "end": 1}[word.attrib["text-anchor"]] * width
        )
        assert x > 0 and x + width < step.WIDTH, word.text


def test_the_tree_attention_of_the_picture_is_that_of_the_library(step):
    shape = TokenTree(torch.arange(len(step.WORDS))[None], torch.tensor([step.PARENTS]))
    expected = tree.ancestors(shape)[0].tolist()
    assert [
        [column in step.ancestors(row) for column in range(len(step.WORDS))] for row in range(len(step.WORDS))
    ] == expected
    assert list(step.ACCEPTED) == sorted(step.ancestors(step.ACCEPTED[-1]))
    assert step.tree_attention().count(f'fill="{step.BLUE}" stroke="none"') == sum(map(sum, expected))


def test_the_best_speculation_lengths_are_those_that_the_page_names(step):
    lengths = [best_depth(rate, draft_cost=step.DRAFT_COST) for rate in step.RATES]
    assert lengths == [10, 4, 2] and "At 50% it is two tokens here, at 90% it is ten." in re.sub(
        r"\s+", " ", (DOCS / "how-it-works.md").read_text(encoding="utf-8")
    )
