"""Trees of a head that knows all depths after one pass: what grows, what stays exact, and which decisions would bias the output."""

from itertools import product

import numpy as np
import pytest
from numba import njit

from polydraft import Engine, SamplingParams
from polydraft.core import Draft, DraftSampling, TreeShape
from polydraft.core.budget import Budget, Stop
from polydraft.core.confidence import IDENTITY, acceptance_at, ranked_acceptance_at
from polydraft.heads.block import BlockDrafter
from polydraft.heads.foretold import _largest
from polydraft.heads.markov import KINDS
from polydraft.methods import registry
from polydraft.policy.adaptive import AdaptivePolicy
from polydraft.testing import Grown, measure
from tests.exactness.harness import by_depth
from tests.exactness.test_head_pass import DEPTHS, ROOT, Known, Rows, V, known, path_of
from tests.policy.planning import costs
from tests.policy.planning import known as profile

WARY = tuple(0.9 * a for a in IDENTITY)
BUDGETS = [
    Budget.grown(7, DEPTHS, 2).ending(Stop((0.25, 0.3), WARY, (0.01, 0.02, 0.03, 0.05, 0.08, 0.1), 0.5)),
    Budget.grown(8, DEPTHS, 2).ending(Stop((0.15, 0.12), WARY, (0.02, 0.04, 0.06, 0.08, 0.1, 0.2), 0.6)),
    Budget.grown(4, DEPTHS, 2).ending(
        Stop((0.3, 0.12), WARY, (0.02,), 0.6)
    ),  # one spare, with all nodes that are left behind it
]
EXACT = ["traversal", "recursive_wor", "single_with_spares", "match"]


def sampled(model, budget, seeds=30):
    params = SamplingParams(temperature=1.0)
    for seed in range(seeds):
        yield model.propose_paths(
            [0],
            [[ROOT]],
            ([seed], [0], [2]),
            [budget],
            [params],
            draft_sampling=DraftSampling.WITHOUT_REPLACEMENT,
        )


def grown(row, sure, budget, draw, wrong=""):
    """The tree of the rule, written down once more. row, sure: of a path.  draw: the next token, of weights.  wrong: what biases."""
    stop = budget.stop
    tokens = [ROOT]
    parents = [-1]
    reach = [1.0]
    paths: list[tuple[int, ...]] = [()]

    def likely(path):
        return acceptance_at(
            np.float32(row(path[:-1])[path[-1]]) * sure(path[:-1]), np.array(stop.acceptance)
        )

    def add(parent):
        above = paths[parent]
        if (
            wrong == "row of the chain" and parent > len(above) < length
        ):  # that of the chain's token of this depth
            above = paths[len(above)]
        rest = row(above).copy()
        rest[[tokens[n] for n in range(1, len(tokens)) if parents[n] == parent]] = 0.0
        if not rest.any():
            return False
        tokens.append(draw(rest / rest.sum()))
        parents.append(parent)
        paths.append((*paths[parent], tokens[-1]))
        return True

    def go_on(n, end):
        while len(tokens) < end and len(paths[n]) < budget.max_depth:
            if n and reach[n] < stop.min_reach[min(len(paths[n]), len(stop.min_reach)) - 1]:
                break
            add(n)
            n, above = len(tokens) - 1, n
            reach.append(reach[above] * likely(paths[n]))

    room = budget.max_nodes + 1
    length = 0
    go_on(0, room)
    length = len(tokens)
    chances = [reach[n] * (1.0 - likely(paths[n + 1])) * stop.spare_acceptance for n in range(length - 1)]
    beside = [0] * len(chances)
    while len(tokens) < room and len(tokens) - 2 < len(stop.min_spare_chance):
        parent = int(np.argmax(chances))
        if chances[parent] < stop.min_spare_chance[len(tokens) - 2]:
            break
        if add(parent):
            reach.append(chances[parent])
            if wrong == "dropped" and tokens[-1] == 0:
                for part in (tokens, parents, paths, reach):
                    part.pop()
        beside[parent] += 1
        chances[parent] = (
            chances[parent] * (1.0 - stop.spare_acceptance) if beside[parent] < budget.width else -1.0
        )
    end = len(tokens)
    each = (room - end) // max(end - length, 1)
    for n in range(length, end):
        go_on(n, len(tokens) + each)
    return tokens, parents, paths


def enumerated(tables, sure, budget, wrong=""):
    """All drafts of the rule with their probabilities, by every script of draws."""
    scripts = [()]
    drafts = dict[tuple[int, ...], Grown]()
    while scripts:
        script = scripts.pop()
        chance = 1.0
        asked = list[np.ndarray]()

        def draw(weights, script=script, asked=asked):
            asked.append(weights)
            return script[len(asked) - 1] if len(asked) <= len(script) else int(weights.argmax())

        tokens, parents, paths = grown(lambda path: tables.row("q", path), sure, budget, draw, wrong)
        for turn, weights in enumerate(asked):
            taken = script[turn] if turn < len(script) else int(weights.argmax())
            if turn >= len(script):  # other tokens than the likeliest, from here on
                head = tuple(script[t] if t < len(script) else int(asked[t].argmax()) for t in range(turn))
                scripts += [(*head, x) for x in np.flatnonzero(weights) if x != taken]
            chance *= weights[taken]
        key = (*tokens, *parents)
        known_chance = drafts[key].probability if key in drafts else 0.0
        drafts[key] = Grown(chance + known_chance, tokens, parents, paths, [])
    return list(drafts.values())


def test_of_equal_candidates_the_first_are_taken():
    largest = njit(lambda *arguments: _largest(*arguments))
    places = np.zeros(3, np.int64)
    assert largest(np.array([0.2, 0.5, 0.5, 0.5, 0.0]), 2, places) == 2
    assert places[:2].tolist() == [1, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_drawn_is_the_chain_its_spares_and_the_chains_behind_them(kind):
    model = known(kind)
    shapes = set()
    for budget, drawn in [(g, drawn) for g in BUDGETS for drawn in sampled(model, g)]:
        tokens, parents = (x[0] for x in drawn.tree.lists)
        given = iter(tokens[1:])
        expected = grown(model.row, model.sure, budget, lambda _, given=given: next(given))
        assert (tokens, parents) == expected[:2] and next(given, None) is None
        shapes.add(tuple(parents))
        for n, path in enumerate(expected[2][1:], 1):
            row = drawn.probs[0, drawn.rows[0, n]]
            np.testing.assert_allclose(row, model.row(path[:-1]), atol=1e-6)
            assert float(drawn.confidence[0, n]) == pytest.approx(
                row[path[-1]] * model.sure(path[:-1]), abs=1e-6
            )
    assert len(shapes) > 1


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("kind", ["none", "vanilla", "gated"])
def test_trees_of_one_pass_keep_the_target_distribution(name, kind):
    for seed, budget in enumerate(BUDGETS):
        tables = Rows(kind, seed)
        drafts = enumerated(tables, known(kind).sure, budget)
        assert sum(d.probability for d in drafts) == pytest.approx(1.0)
        assert max(len(d.tokens) for d in drafts) > 4 and len({(*d.parents,) for d in drafts}) > 1
        found = measure(
            registry.verifier(name),
            tables,
            DraftSampling.WITHOUT_REPLACEMENT,
            TreeShape.GROWN,
            by_depth(),
            DEPTHS,
            drafts,
        )
        assert found.error < 1e-12


@pytest.mark.parametrize("wrong", ["dropped", "row of the chain"])
def test_spares_that_are_dropped_and_rows_of_another_path_bias_the_output(wrong):
    rule = registry.verifier("traversal")
    worst = 0.0
    for seed in range(4):
        tables = Rows("vanilla", seed)
        drafts = enumerated(tables, known("vanilla").sure, BUDGETS[seed % 2], wrong)
        assert sum(d.probability for d in drafts) == pytest.approx(1.0)
        found = measure(
            rule, tables, DraftSampling.WITHOUT_REPLACEMENT, TreeShape.GROWN, by_depth(), DEPTHS, drafts
        )
        worst = max(worst, found.tv)
    assert worst > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_at_temperature_0_nodes_join_best_first_up_to_the_one_that_is_not_worth_its_row(kind):
    model = known(kind)
    sizes = set()
    paths = [path for d in range(1, DEPTHS + 1) for path in product(range(V), repeat=d)]
    for least in (0.001, 0.03, 0.1, 0.2):
        stop = Stop((0.0,), WARY, tuple(least * n for n in range(1, 30)))
        budget = Budget.grown(30, DEPTHS, 99).ending(stop)
        drawn, confidence, _ = model.propose_tree([0], [[ROOT]], [budget], [SamplingParams(temperature=1.0)])
        sure = {path: model.row(path[:-1])[path[-1]] * model.sure(path[:-1]) for path in paths}
        value = {
            p: np.prod([ranked_acceptance_at(sure[p[:d]], np.array(WARY)) for d in range(1, len(p) + 1)])
            for p in paths
        }
        best = sorted(paths, key=lambda path: -value[path])
        count = next((n for n, path in enumerate(best) if n and value[path] < least * n), 30)
        draft = Draft(drawn, DraftSampling.POINT_MASS, TreeShape.GROWN, None, -np.ones_like(drawn.tokens))
        found = [path_of(draft, n) for n in range(1, drawn.num_nodes)]
        assert found == best[:count]
        np.testing.assert_allclose(confidence[0, 1:], [sure[path] for path in found], atol=1e-6)
        sizes.add(count)
    assert len(sizes) > 2 or kind == "rnn"


@pytest.mark.parametrize("kind", KINDS)
def test_a_greedy_chain_ends_by_what_the_head_is_sure_of_at_temperature_1(kind):
    model = known(kind)
    budget = Budget.fixed((-1, 0, 1, 2)).ending(Stop((0.0,), WARY))
    proposal = model.propose_paths([0], [[ROOT]], ([0], [0], [2]), [budget], [SamplingParams(temperature=0)])
    path = tuple(proposal.tree.lists.tokens[0][1:])
    for depth in range(DEPTHS):
        sure = model.row(path[:depth]).max() * model.sure(path[:depth])
        assert float(proposal.confidence[0, depth + 1]) == pytest.approx(sure, abs=1e-6)


def test_a_tree_without_prices_is_whole_beside_one_that_ends_by_them():
    model = known("none")
    whole, priced = Stop((0.0,), WARY), Stop((0.0,), WARY, (0.3,))
    budgets = [Budget.grown(9, DEPTHS, 9).ending(stop) for stop in (whole, priced)]
    params = [SamplingParams(temperature=1.0)] * 2
    tree, *_ = model.propose_tree([0, 0], [[ROOT]] * 2, budgets, params)
    assert tree.is_node.sum(1).tolist()[0] == 10 and 1 < tree.is_node.sum(1).tolist()[1] <= 3


class Noting(AdaptivePolicy):
    """Remembers the budgets that it gives. Costs stay those of its profile: a step of this model takes what Python takes."""

    def time(self, seconds):
        pass

    def budgets(self, sequences):
        self.budgets_given = [*getattr(self, "budgets_given", []), *super().budgets(sequences)]
        return self.budgets_given[-len(sequences) :]


def engine(kind="vanilla", row=0.02, step=0.0, rate=0.7, **options):
    model = Known(kind)
    policy = Noting(profile(costs(row, step), rate))
    return Engine.of(model.target, drafter=BlockDrafter(model, (0,)), policy=policy, **options), policy


@pytest.mark.parametrize("row", [0.02, 0.12])
def test_the_policy_grows_trees_of_such_heads_and_greedy_texts_are_the_targets(row):
    """At temperature 0 however dear a row is: a branch competes with a deeper token, which costs a row, too."""
    fast, policy = engine(row=row)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [[1, 2], [0], [2, 0, 1]]
    plain = Engine.of(fast.target, drafter=None)
    assert [r.token_ids for r in fast.generate(prompts, params)] == [
        r.token_ids for r in plain.generate(prompts, params)
    ]
    grown_ones = [g for g in policy.budgets_given if g.max_depth]
    assert grown_ones and all(g.shape is TreeShape.GROWN and g.width > 1 for g in grown_ones)


def test_above_temperature_0_trees_are_drawn_where_no_seed_is_named_and_a_seed_repeats_its_text_beside_them():
    fast, policy = engine()
    assert fast.verifier.info.name == "traversal"
    seeded = SamplingParams(temperature=1, max_tokens=24, seed=3, ignore_eos=True)
    free = SamplingParams(max_tokens=24)
    alone = fast.generate([[1, 2]], seeded)[0].token_ids
    assert not any(g.has_spares for g in policy.budgets_given)
    policy.budgets_given.clear()
    together = fast.generate(
        [[1, 2], [0], [2]], [seeded, free.with_(temperature=1.0), free.with_(temperature=0)]
    )
    assert together[0].token_ids == alone and any(g.shape is TreeShape.GROWN for g in policy.budgets_given)
    assert all(r.stats.drafter_error is None and r.stats.drafted_tokens > 0 for r in together)
