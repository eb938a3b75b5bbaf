"""The arithmetic of the study of several drafts, on the embedded pair."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polydraft.core import TreeShape
from polydraft.methods import registry
from polydraft.models import load, pair
from studies.several_drafts import verified
from studies.several_drafts.__main__ import main
from studies.several_drafts.costs import NUM_ROWS, TARGET, StepCosts
from studies.several_drafts.draws import MAX_DEPTH, draw_trees
from studies.several_drafts.measure import Group
from studies.several_drafts.rows import RowStore
from studies.theory import efficiency

OPTIONS: dict[str, Any] = {"max_model_len": 160, "max_num_seqs": 2, "threads": 1, "cache_dtype": "float32"}


@pytest.fixture(scope="module")
def stores():
    """The embedded pair's rows behind one context."""
    context = tuple(load.encode(load.load_tokenizer(str(pair.target_folder())), pair.prompts()[0].text))[:64]
    both = [RowStore(load.load_model(str(f), **OPTIONS), 2048) for f in (pair.target_folder(), pair.draft_folder())]
    for rows in both:
        rows.open(context)
    return context, *both


@pytest.fixture(scope="module")
def trees(stores):
    return draw_trees(stores[2], "draft", (1.0,), seed=3, depth=4)


def test_trees_are_drawn_as_their_kind_says(stores, trees):
    q = stores[2].probs((), 1.0)
    roots = {key[1:]: [t for t, d in zip(tree.tokens, tree.depths, strict=True) if d == 1] for key, tree in trees.items()}
    assert len(set(roots["without_replacement", 4])) == 4
    assert roots["greedy_plus_one", 3][:2] == np.argsort(-q, kind="stable")[:2].tolist()
    assert roots["greedy_plus_one", 3][2] not in roots["greedy_plus_one", 3][:2]
    counts = np.bincount(roots["systematic", 4], minlength=len(q))
    assert ((counts == np.floor(4 * q)) | (counts == np.ceil(4 * q))).all()
    assert all(len(tree.tokens) == 1 + key[2] * 4 for key, tree in trees.items())


def test_a_chain_is_accepted_token_by_token_with_min_p_over_q(stores):
    _, target, draft = stores
    group = Group(target, [draft], 1.0)
    group.trees = {("iid", 4): draw_trees(draft, "draft", (1.0,), seed=5)[1.0, "iid", 4]}
    for rows in (target, draft):
        rows.fill(group.trees["iid", 4].prefixes)
    arrays = group.arrays()
    stored = arrays["iid/4"]
    chain = stored[:, (stored[verified.PATH] == 2) | (stored[verified.DEPTH] == 0)]
    p, q = arrays["rows"][chain[verified.AT, :-1], :, chain[0, 1:]].astype(float).T
    chain[verified.PARENT] = np.arange(-1, MAX_DEPTH)
    draft_tree, target_probs = verified.drafted([chain], [arrays["rows"]], *(verified.RULES["chain"][0], TreeShape.CHAIN))
    verdict = registry.verifier("speculative")(draft_tree, target_probs)
    by_hand = 1 + np.minimum(1.0, p / q).cumprod().sum()
    assert efficiency.expected_tokens(draft_tree, verdict)[0] == pytest.approx(by_hand)


def test_the_bound_of_one_path_is_what_block_verification_accepts_on_the_mean():
    """Two tokens: all chains are enumerated."""
    p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
    rows, bounds, accepted = np.stack([[p, q]] * 3), 0.0, 0.0
    for x in (0, 1):
        for y in (0, 1):
            tree = np.array([[0, x, y], [-1, 0, 1], [0, 0, 0], [0, 1, 2], [0, 1, 2], [0, 0, 0]])
            draft_tree, target_probs = verified.drafted([tree], [rows], *(verified.RULES["chain"][0], TreeShape.CHAIN))
            tokens = efficiency.expected_tokens(draft_tree, registry.verifier("block")(draft_tree, target_probs))[0]
            bounds += q[x] * q[y] * verified.bound(tree, rows, 1)[1]
            accepted += q[x] * q[y] * tokens
    assert bounds == pytest.approx(accepted) == pytest.approx(1 + 11 / 9)


def test_seconds_of_a_step_are_draft_passes_and_one_pass_of_all_rows():
    passes = {TARGET: [float(n) for n in NUM_ROWS], "small": [0.1 * n for n in NUM_ROWS]}
    costs = StepCosts(passes)
    assert costs.seconds("small", "iid", [1, 2, 3], 2) == pytest.approx(0.1 + 0.2 + 6.0)
    assert costs.seconds("small", "iid spares", [1, 2, 3], 2) == pytest.approx(0.1 + 0.1 + 6.0)
    assert costs.seconds("small + n-gram", "independent", [1, 2, 1], 2) == pytest.approx(0.2 + 4.0)
    assert StepCosts(passes, free_rows=True).seconds("small", "iid", [1, 2, 3], 2) == pytest.approx(0.2 + 1.0)


def test_a_quick_run_writes_page_and_plot(tmp_path: Path):
    main(out=tmp_path, quick=True)
    assert len(sorted((tmp_path / "rows").glob("*.npz"))) == 8
    page = (tmp_path / "several-drafts.md").read_text()
    assert "| two bits |" in page and "Where does the second path pay?" in page
    tokens = list(csv.DictReader((tmp_path / "several-drafts-tokens.csv").open()))
    assert {"flow", "block", "traversal"} <= {row["verifier"] for row in tokens} and all(
        float(row["tokens"]) >= 1 for row in tokens
    )
    speeds = list(csv.DictReader((tmp_path / "several-drafts-speed.csv").open()))
    assert {row["rows"] for row in speeds} == {"measured", "free"} and all(float(row["speed"]) > 0 for row in speeds)
    assert (tmp_path / "several-drafts.png").stat().st_size > 10_000
