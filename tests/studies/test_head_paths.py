"""The arithmetic of the study of a head's drafts: rows behind contexts are the head's own, and one verdict serves all depths where it may."""

from collections import Counter

import numpy as np
import pytest
import torch

from polydraft import SamplingParams
from polydraft.core import Budget, Request
from polydraft.core import geometry as tree
from polydraft.heads.block import BlockDrafter
from polydraft.heads.block.network import BlockRecipe
from polydraft.heads.checkpoint import embeddings, output_rows
from polydraft.heads.eagle import EagleDrafter
from polydraft.heads.eagle.network import EagleRecipe
from polydraft.heads.recipe import Material
from polydraft.methods import registry
from polydraft.models import load, pair
from polydraft.testing import Tables, by_position, enumerate_drafts
from polydraft.testing import measure as measure_verifier
from studies.head_paths.bound import bound
from studies.head_paths.contexts import measure
from studies.head_paths.costs import HeadCosts
from studies.head_paths.rows import HeadRows
from studies.head_paths.tables import best, rows_of, small_table, write_csv
from studies.head_paths.values import (
    BELOW_MATTERS,
    BOUND,
    KINDS,
    Case,
    by_depth,
    evaluate,
    read_values,
    verifiers_of,
    write_values,
)
from studies.several_drafts.rows import RowStore
from studies.several_drafts.texts import Context
from studies.several_drafts.verified import drafted, restricted

HEADS = {"eagle": (EagleRecipe, EagleDrafter, {}), "block": (BlockRecipe, BlockDrafter, {"layers": 1, "block": 4})}


@pytest.fixture(scope="module")
def target():
    return load.load_model(str(pair.target_folder()), max_num_seqs=3, max_model_len=160, threads=1)


@pytest.fixture(scope="module")
def text():
    return tuple(load.encode(load.load_tokenizer(str(pair.target_folder())), pair.prompts()[0].text))[:50]


def head_of(target, kind, where):
    """One with random weights."""
    (recipe, drafter, sizes), ids = HEADS[kind], np.arange(target.vocab_size)
    torch.manual_seed(0)
    material = Material(target, (1, 2, 4), ids, embeddings(target), output_rows(target, ids), sizes)
    net = recipe().fresh(material)
    recipe().export(net, material, where)
    checkpoint = drafter.checkpoint.load(where)
    return drafter(drafter.model_of(checkpoint, target), checkpoint.layers_of(target))


@pytest.mark.parametrize("kind", HEADS)
def test_rows_behind_a_context_are_those_that_the_drafter_draws_from(target, text, tmp_path, kind):
    drafter = head_of(target, kind, tmp_path)
    rows = HeadRows(drafter, target, target.vocab_size)
    for context in (text[:20], text[:45]):
        rows.open(context)
        (state,) = drafter.start([Request("r", context, SamplingParams(temperature=1.0), 3)])
        scores = target.prefill([0], [context[:-1]], hidden=drafter.needs.hidden)
        target.release([0])
        (state,) = drafter.read([state], scores)
        draft = drafter.propose([state], [Budget.fixed(tree.chain(3))])
        tokens = draft.tree.lists.tokens[0]
        for prefixes in ([()], [tuple(tokens[1:2]), tuple(tokens[1:3])]):  # in one tree, and grown
            rows.fill(prefixes)
            for prefix in prefixes:
                row = draft.probs[0, draft.rows[0, len(prefix) + 1]].numpy()
                np.testing.assert_allclose(rows.probs(prefix, 1.0), row, atol=1e-5)
        drafter.release([state])


@pytest.fixture(scope="module")
def files(target, text, tmp_path_factory):
    """Two contexts, measured."""
    where = tmp_path_factory.mktemp("rows")
    head, store = (
        HeadRows(head_of(target, "eagle", tmp_path_factory.mktemp("head")), target, target.vocab_size),
        RowStore(target, target.vocab_size),
    )
    for number, end in enumerate((24, 40)):
        measure(Context("code", number, text[:end]), store, head, (1.0,), number, 3, where / f"{number}.npz")
    write_values(files := sorted(where.glob("*.npz")))
    return files


@pytest.mark.parametrize("kind", KINDS)
def test_one_verdict_serves_all_depths_where_what_lies_below_a_node_does_not_matter(files, kind):
    stored, trees = np.load(files[0]), []
    name = "iid" if kind == "chain" else kind
    (key,) = [key for key in stored.files if key.startswith(f"1.0|{name}/") and (kind != "systematic" or key.endswith("/4"))]
    trees = restricted(stored[key], range(1 if kind == "chain" else 4), 3)
    for verifier in (
        set(verifiers_of(kind)) - BELOW_MATTERS - {"importance"}
    ):  # which may choose among selections that are as good
        rule, (draft, p) = registry.verifier(verifier), drafted([trees], [stored["1.0|rows"]], *KINDS[kind])
        together = by_depth(draft, rule(draft, p))[0]
        for depth in (1, 2):
            draft, p = drafted([restricted(trees, range(4), depth)], [stored["1.0|rows"]], *KINDS[kind])
            assert by_depth(draft, rule(draft, p))[0, -1] == pytest.approx(together[depth - 1]), verifier


def test_tables_have_every_case_and_the_fastest_is_chosen(files, tmp_path):
    values = read_values(files[0].parent)
    (first,) = evaluate(files[:1])
    assert values[0].tokens == pytest.approx(first.tokens) and values[0]._replace(tokens={}) == first._replace(tokens={})
    passes = {"target": [1.0 + 0.1 * n for n in range(13)], "head": [0.1] * 13, "start": [0.0]}
    rows = rows_of(values, HeadCosts(passes))
    write_csv(rows, tmp_path / "table.csv")
    lines = (tmp_path / "table.csv").read_text().splitlines()
    assert len(lines) == 1 + len(values[0].tokens) and lines[1].startswith("code,1.0,")
    one = next(row for row in rows if row.case == Case(1.0, "chain", 1, 1, "speculative"))
    overlap = np.mean([value.overlap[1.0] for value in values])
    assert one.tokens.mean() <= 1 + overlap + 0.5 and one.seconds.tolist() == pytest.approx([1.1 + 0.1, 1.1 + 0.1])
    assert best(rows).speed == max(row.speed for row in rows if row.case) and "±" in small_table(rows)
    assert {row.case.kind for row in rows if row.case.verifier == BOUND} == {*KINDS}
    assert {row.case.paths for row in rows if row.case.kind == "systematic"} == {*range(2, 9)}


SMALL = {"chain": by_position(-1, 0, 1), "distinct spares": by_position(-1, 0, 0, 1, 1)}
"""Trees that are enumerated; others are two paths of two tokens."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_no_verifier_exceeds_the_bound_on_the_mean_of_all_drafts(kind, seed):
    tables, (sampling, shape) = Tables(3, seed), KINDS[kind]
    drafts = enumerate_drafts(tables, sampling, SMALL.get(kind, by_position(-1, 0, 0, 1, 2)), 2)
    weights, drawn = np.array([d.probability for d in drafts]), Counter[tuple[int, ...]]()
    for draft in drafts:
        drawn.update(dict.fromkeys(draft.paths, draft.probability))
    reached: dict[tuple[int, ...], float] = {(): 1.0}
    for path in sorted({*drawn} - {()}, key=len):
        reached[path] = min(reached[path[:-1]] * tables.row("p", path[:-1])[path[-1]], drawn[path])
    estimates = weights @ [bound(kind, *stored(tables, draft, kind)) for draft in drafts]
    assert estimates == pytest.approx([sum(T for path, T in reached.items() if len(path) <= depth) for depth in (1, 2)])
    for verifier in verifiers_of(kind):
        most = measure_verifier(registry.verifier(verifier), tables, sampling, shape, by_position(-1), 2, drafts).block_efficiency
        assert most <= estimates[-1] + 1e-9, verifier
        assert verifier != "block" or most == pytest.approx(estimates[-1])


def stored(tables, draft, kind):
    """An enumerated draft as the study stores it, and the rows at its nodes."""
    depths, path = (
        [len(p) for p in draft.paths],
        [max(p[-1:] if kind == "distinct spares" else p[:1], default=0) for p in draft.places],
    )
    tree = np.array([draft.tokens, draft.parents, path, depths, range(len(depths)), [0] * len(depths)])
    return tree, np.array([[tables.row("p", p), tables.row("q", p)] for p in draft.paths])
