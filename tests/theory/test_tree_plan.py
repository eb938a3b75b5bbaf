"""Tree plans: the programme against brute force and against real verification; growth is lossless unless it looks ahead."""

from itertools import product

import numpy as np
import pytest

from polydraft.core import Budget, Draft, DraftSampling, NoiseKey, TokenTree, TreeShape
from polydraft.core import geometry as trees
from polydraft.errors import InvalidInputError
from polydraft.methods.registry import verifier
from polydraft.sampling import noise
from polydraft.testing import Grown, Tables, measure, sibling_draws
from polydraft.theory.acceptance import race_places
from polydraft.theory.trees import best_by_position, fastest_by_position, grow_by_probability, race_tree
from tests.exactness.harness import by_depth, stopped_inside

P = np.array([0.1, 0.4, 0.3, 0.2])
Q = np.array([0.45, 0.15, 0.25, 0.15])


class Fixed:
    """One row for every context: acceptance then depends on the position alone."""

    V = 4

    def row(self, which, path):
        return P if which == "p" else Q


def value(parents, rates):
    """Expected tokens of a tree by position; None where a node has more children than there are rates."""
    reach = [1.0]
    children = [0] * len(parents)
    for parent in parents[1:]:
        if children[parent] == len(rates):
            return None
        reach.append(reach[parent] * rates[children[parent]])
        children[parent] += 1
    return sum(reach)


def every_tree(num_nodes, depth):
    for parents in product(*(range(n) for n in range(1, num_nodes))):
        deep = [0]
        for parent in parents:
            deep.append(deep[parent] + 1)
        if max(deep) <= depth:
            yield (-1, *parents)


@pytest.mark.parametrize("rates", [(0.8, 0.1), (0.5, 0.4, 0.05), (0.3, 0.3, 0.3), (0.6,), (0.0, 0.0)])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_programme_finds_the_best_of_all_trees(rates, depth):
    for num_nodes in (1, 2, 4, 6):
        trees = [t for n in range(1, num_nodes + 1) for t in every_tree(n, depth)]
        best = max(v for t in trees if (v := value(t, rates)) is not None)
        found = best_by_position(rates, num_nodes, depth)
        assert found.expected_tokens == pytest.approx(best, abs=1e-12)
        assert value(found.parents, rates) == pytest.approx(best, abs=1e-12)
        assert len(found.parents) <= num_nodes and Budget.fixed(found.parents).max_depth <= depth


@pytest.mark.parametrize("price", [0.02, 0.1, 0.5])
def test_the_fastest_tree_is_the_best_over_all_sizes(price):
    def seconds(rows, depth):
        return 1 + price * rows + 0.1 * depth

    found = fastest_by_position([0.6, 0.2, 0.1], seconds, max_nodes=12, max_depth=6)
    speeds = [
        best_by_position([0.6, 0.2, 0.1], n, d).expected_tokens / seconds(n, d)
        for d in range(7)
        for n in range(d + 1, 13)
    ]
    assert found.expected_tokens / seconds(
        len(found.parents), Budget.fixed(found.parents).max_depth
    ) == pytest.approx(max(speeds))


def drafts_of(parents, distribution=DraftSampling.WITHOUT_REPLACEMENT):
    """All drafts of a tree by position, from `Fixed`."""
    found = [Grown(1.0, [0], [-1], [()], [])]
    for node in range(len(parents)):
        count = parents.count(node)
        if count:
            found = [
                Grown(
                    d.probability * probability,
                    [*d.tokens, *draws],
                    [*d.parents, *[node] * count],
                    [*d.paths, *((*d.paths[node], x) for x in draws)],
                    [],
                )
                for d in found
                for probability, draws in sibling_draws(distribution, [Q] * count, count)
            ]
    return found


def efficiency(parents, depth):
    rule = verifier("recursive_wor")
    distribution = DraftSampling.WITHOUT_REPLACEMENT
    found = measure(rule, Fixed(), distribution, TreeShape.PRODUCT, by_depth(), depth, drafts_of(parents))
    assert found.error < 1e-12
    return found.block_efficiency


def test_a_planned_tree_yields_in_verification_what_the_programme_promised():
    stars = [efficiency((-1, *[0] * k), 1) for k in (1, 2, 3)]
    rates = np.diff([1.0, *stars])
    for num_nodes, depth in ((4, 3), (5, 2), (6, 3)):
        planned = best_by_position(rates, num_nodes, depth)
        breadth_first = tuple(planned.parents)
        assert list(breadth_first[1:]) == sorted(breadth_first[1:])
        assert efficiency(breadth_first, depth) == pytest.approx(planned.expected_tokens, abs=1e-10)


def best_first(tables, distribution, *, budget=4, depth=2):
    """Sampled growth that does not look ahead: the open node of largest q-product, as many draws as the other branches allow."""
    done = []
    growing = [(Grown(1.0, [0], [-1], [()], []), {0: 1.0})]
    while growing:
        d, open_nodes = growing.pop()
        inside = {n: w for n, w in open_nodes.items() if len(d.paths[n]) < depth}
        left = budget - (len(d.tokens) - 1)
        if not inside or left == 0:
            done.append(d)
            continue
        node = max(inside, key=lambda n: (inside[n], -n))
        elsewhere = sum(w for n, w in open_nodes.items() if n != node)
        q = tables.row("q", d.paths[node])
        count = min(left, 2 if elsewhere < 0.25 or d.tokens.count(1) == 1 else 1)
        for probability, draws in sibling_draws(distribution, [q] * count, count):
            new = Grown(
                d.probability * probability,
                [*d.tokens, *draws],
                [*d.parents, *[node] * len(draws)],
                [*d.paths, *((*d.paths[node], x) for x in draws)],
                [],
            )
            weights = {n: w for n, w in open_nodes.items() if n != node}
            weights |= {len(d.tokens) + i: open_nodes[node] * q[x] for i, x in enumerate(draws)}
            growing.append((new, weights))
    return done


RULES = [
    ("recursive", DraftSampling.IID),
    ("greedy_traversal", DraftSampling.IID),
    ("recursive_wor", DraftSampling.WITHOUT_REPLACEMENT),
    ("match", DraftSampling.IID),
]


@pytest.mark.parametrize(("rule", "distribution"), RULES)
@pytest.mark.parametrize("seed", range(6))
def test_growth_by_all_branches_without_looking_ahead_is_lossless(rule, distribution, seed):
    tables = Tables(3, seed)
    drafts = best_first(tables, distribution)
    assert sum(d.probability for d in drafts) == pytest.approx(1)
    assert len({tuple(d.parents) for d in drafts}) > 1
    found = measure(verifier(rule), tables, distribution, TreeShape.GROWN, by_depth(), 2, drafts)
    assert found.error < 1e-12


def reordered(tables):
    """Wrong: siblings are tried in an order that the draws below them decide."""
    found = []
    for d in drafts_below(tables):
        x, y = d.tokens[1:3]
        a, b = d.tokens[3:5]
        if tables.row("p", (y,))[b] > tables.row("p", (x,))[a]:
            x, y, a, b = y, x, b, a
        found.append(Grown(d.probability, [0, x, y, a, b], d.parents, [(), (x,), (y,), (x, a), (y, b)], []))
    return found


def drafts_below(tables):
    """Two draws at the root, one below each."""
    found = []
    for first, (x, y) in sibling_draws(DraftSampling.IID, [tables.row("q", ())] * 2, 2):
        for second, (a,) in sibling_draws(DraftSampling.IID, [tables.row("q", (x,))] * 1, 1):
            for third, (b,) in sibling_draws(DraftSampling.IID, [tables.row("q", (y,))] * 1, 1):
                paths = [(), (x,), (y,), (x, a), (y, b)]
                found.append(Grown(first * second * third, [0, x, y, a, b], [-1, 0, 0, 1, 2], paths, []))
    return found


def bias(rule, drafts, tables, depth):
    return measure(verifier(rule), tables, DraftSampling.IID, TreeShape.GROWN, by_depth(), depth, drafts).tv


def test_growth_that_looks_ahead_is_caught():
    tables = Fixed()
    assert bias("greedy_traversal", stopped_inside(tables, DraftSampling.IID), tables, 1) > 0.01
    assert bias("recursive", drafts_below(tables), tables, 2) < 1e-12
    tables = Tables(3, seed=6)
    assert bias("recursive", drafts_below(tables), tables, 2) < 1e-12
    assert bias("recursive", reordered(tables), tables, 2) > 0.001


def by_hand(tables, num_nodes, depth):
    """Largest sum of path products over all trees of distinct paths, closed under beginnings."""
    paths = [p for d in range(1, depth + 1) for p in product(range(tables.V), repeat=d)]
    weight = {p: float(np.prod([tables.row("q", p[:i])[t] for i, t in enumerate(p)])) for p in paths}
    return sum(sorted(weight.values(), reverse=True)[:num_nodes])


@pytest.mark.parametrize("seed", range(6))
def test_growth_by_probability_is_the_largest_sum_and_lossless_as_point_masses(seed):
    tables = Tables(3, seed)
    tokens, parents, total = grow_by_probability(lambda path: tables.row("q", path), max_nodes=5, max_depth=3)
    assert total == pytest.approx(by_hand(tables, 5, 3), abs=1e-9)
    paths = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    drafts = [Grown(1.0, [0, *tokens[1:]], parents, paths, [])]
    found = measure(
        verifier("match"), tables, DraftSampling.POINT_MASS, TreeShape.GROWN, by_depth(), 3, drafts
    )
    reached = sum(float(np.prod([tables.row("p", p[:i])[t] for i, t in enumerate(p)])) for p in paths)
    assert found.error < 1e-12
    assert found.block_efficiency == pytest.approx(reached)


def test_growth_stops_where_a_node_is_worth_less_than_it_costs():
    tables = Tables(3, 0)
    grown = [
        grow_by_probability(lambda path: tables.row("q", path), max_nodes=30, max_depth=3, min_path_prob=x)
        for x in (0.0, 0.05, 0.3, 2.0)
    ]
    sizes = [len(tokens) for tokens, _, _ in grown]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[2] and sizes[-1] == 1


def test_faulty_plans_are_refused():
    for call in (
        lambda: best_by_position([1.2], 3, 2),
        lambda: best_by_position([], 3, 2),
        lambda: best_by_position([0.5], 0, 2),
    ):
        with pytest.raises(InvalidInputError):
            call()
    with pytest.raises(InvalidInputError, match="max_nodes=-1"):
        grow_by_probability(lambda path: P, max_nodes=-1, max_depth=2)


@pytest.mark.parametrize("places", [[0.8, 0.1], [0.5, 0.3, 0.1], [0.4, 0.4], [0.6, 0.0], [1.0]])
@pytest.mark.parametrize("num_nodes", [1, 2, 5, 9])
def test_race_tree_is_the_best_by_position_where_places_fall(places, num_nodes):
    tree = race_tree(places, num_nodes)
    best = best_by_position(places, num_nodes, num_nodes)
    assert tree.expected_tokens == pytest.approx(best.expected_tokens, abs=1e-9)
    assert value(tree.parents, places) == pytest.approx(tree.expected_tokens, abs=1e-9)


@pytest.mark.parametrize("places", [[0.1, 0.8], [0.2, 0.5, 0.2]])
def test_race_tree_is_no_better_where_places_rise(places):
    assert race_tree(places, 6).expected_tokens <= best_by_position(places, 6, 6).expected_tokens + 1e-12
    with pytest.raises(InvalidInputError):
        race_tree([1.2], 3)


def test_race_tree_yields_what_races_of_one_row_accept():
    """The verifier itself on shared noise, against the probabilities of places."""
    places = race_places(P, Q, 3)
    tree = race_tree(places.tolist(), 6)
    budget = Budget.fixed(tree.parents)
    rng = np.random.default_rng(0)
    seeds = rng.integers(1 << 31, size=4000)
    tokens = [1 + depth_of_race(budget, int(seed)) for seed in seeds]
    error = np.std(tokens) / len(tokens) ** 0.5
    assert abs(np.mean(tokens) - tree.expected_tokens) < 4.5 * error


def depth_of_race(budget, seed):
    """Accepted tokens of one draft of this tree, drawn by the clocks of its seed."""
    key = NoiseKey.of([seed], [0], [0])
    parents = budget.parents
    depth = trees.depths(TokenTree(np.zeros((1, len(parents)), np.int64), np.array([parents])))[0]
    tokens = [0] * len(parents)
    for node in range(len(parents)):
        clocks = noise.clocks(NoiseKey.of([seed], [0], [int(depth[node])]), 4).ravel()
        arrived = np.argsort(clocks / Q)
        children = [n for n in range(len(parents)) if parents[n] == node]
        for rank, child in enumerate(children):
            tokens[child] = int(arrived[rank])
    drafted = TokenTree(np.array([tokens]), np.array([parents]))
    rows = np.array([[-1, *[0] * budget.max_nodes]])
    draft = Draft(drafted, DraftSampling.COUPLED, budget.shape, Q[None, None], rows, key)
    stop = verifier("race")(draft, np.tile(P, (1, len(parents), 1))).stop[0]
    return int(depth[stop.argmax()])
