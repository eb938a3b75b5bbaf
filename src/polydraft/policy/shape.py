"""The shape of a draft that pays: chain, chain with spare siblings, or tree, each token of it worth its price."""

from collections.abc import Sequence
from dataclasses import dataclass

from polydraft.core import Budget, Drafter, DraftSampling, Method, SamplingParams, TreeShape
from polydraft.core import geometry as tree
from polydraft.core.budget import NOTHING, Stop
from polydraft.core.confidence import BINS
from polydraft.policy.acceptance import FIRST, NEXT, SPARE, Acceptance
from polydraft.policy.marginal import Beside, depth_of, min_branch_chances, min_reaches, min_spare_chances

TREE_WIDTH = 4
TREE_NODES = 24
FORETOLD_NODES = 48
"""Nodes of a depth that are expanded, and all nodes, of a most probable tree, at most; and all nodes where one forward pass foretells every depth.
Beside a token of a chain as many spare siblings are drawn there as TREE_WIDTH at most."""
CHEAP_ROW = 0.05
"""Forward passes of one row that a further row may cost, on the mean of 16, where a greedy request is drafted a tree. Where the fifth row cost .09, .12
and .17 (SmolLM2 and its head, the Qwen pair, the embedded pair; timed on an AMD EPYC) chains were 2, 4 to 20 and 12% faster; at .03 and .012 trees were 5
and 16% faster (the Qwen pair, by prices). By the fifth row alone noise grew trees of the Qwen pair on two threads: .84 of a chain of three."""
LEAST_NEXT = 0.05
"""Acceptance of a next token that is reckoned with, at least."""


def takes_spares(verifier: Method) -> bool:
    """Whether a verifier is exact for chains with spare siblings, see `budget.Stop`."""
    return DraftSampling.WITHOUT_REPLACEMENT in verifier.draft_sampling and TreeShape.GROWN in verifier.shapes


def most_nodes(most: int, depth: int, beside: Beside, longest: float) -> int:
    """Nodes of a draft of such a depth, at most, with which a step takes no longer than so many seconds."""
    for nodes in range(most, 0, -1):
        if beside.costs.step(beside.rows + nodes, min(nodes, depth), beside.drafting) <= longest:
            return nodes
    return 0


def has_cheap_rows(beside: Beside) -> bool:
    """Whether further rows of the forward pass cost little, see CHEAP_ROW."""
    costs = beside.costs
    sixteen_rows = costs.rows(beside.rows + 16) - costs.rows(beside.rows)
    return sixteen_rows < 16 * CHEAP_ROW * costs.rows(1)


def _likeliest_spare(rates: Sequence[float]) -> float:
    """Chance of acceptance of the best spare sibling that there may be: beside the least likely token."""
    return (1.0 - min(rates[:BINS])) * rates[SPARE]


@dataclass(frozen=True)
class Shaper:
    """Shapes that a drafter draws and a verifier is exact for.

    ranked: only trees that grow best first.  greedy_trees, spares: trees at temperature 0, and chains with spare siblings above it.
    confident: whether a chain may end at a token that is unlikely.  foretells: whether one forward pass foretells all depths.
    """

    ranked: bool = False
    greedy_trees: bool = False
    spares: bool = False
    confident: bool = True
    foretells: bool = False

    @classmethod
    def of(cls, drafter: Drafter, verifier: Method) -> "Shaper":
        """Of a pair."""
        draws = drafter.offers.draws
        return cls(
            ranked=drafter.info.ranked,
            greedy_trees=draws.branches and verifier.lossless,
            spares=draws.branches and takes_spares(verifier),
            confident=draws.confident,
            foretells=draws.foretells,
        )

    def draft(
        self,
        params: SamplingParams,
        acceptance: Acceptance,
        beside: Beside,
        longest: float,
        *,
        costs_missing: bool = False,
    ) -> Budget:
        """The draft of a request whose tokens are each worth their price. longest: seconds of the step, to which it is cut, as if all were rejected.

        costs_missing: costs are assumed, by which no greedy tree grows.
        """
        rates = acceptance.rates
        reaches = min_reaches(next_acceptance=max(rates[NEXT], LEAST_NEXT), **beside._asdict())
        depth = most_nodes(len(reaches), len(reaches), beside, longest)
        if not depth:
            return NOTHING
        stop = Stop(reaches[:depth], tuple(rates[:BINS]))
        wants_tree = self.greedy_trees and params.greedy
        # a seed repeats its text whatever runs beside it, and spare siblings are left out beside several paths
        wants_spares = self.spares and not params.greedy and params.seed is None
        if self.foretells and (wants_spares or wants_tree):
            return _foretold(acceptance, stop, beside, longest, greedy=params.greedy)
        if self.ranked or (wants_tree and not costs_missing and has_cheap_rows(beside)):
            return _grown(acceptance, stop, beside, longest)
        if wants_spares:
            stop = _with_spares(stop, rates, beside, longest)
        if self.confident:
            return Budget.fixed(tree.chain(depth)).ending(stop)
        return Budget.fixed(tree.chain(depth_of(stop.min_reach, rates[FIRST], rates[NEXT])))


def _with_spares(stop: Stop, rates: Sequence[float], beside: Beside, longest: float) -> Stop:
    """The stop of a chain beside which spare siblings are drawn where they are worth their rows."""
    depth = len(stop.min_reach)
    chances = min_spare_chances(beside.speed, _likeliest_spare(rates), beside.rows, depth, beside.costs)
    nodes = most_nodes(len(chances) + 1, depth, beside, longest)
    return stop._replace(min_spare_chance=chances[: max(nodes - 1, 0)], spare_acceptance=rates[SPARE])


def _grown(acceptance: Acceptance, stop: Stop, beside: Beside, longest: float) -> Budget:
    """A tree that grows while a node is worth its row. stop: as deep as it may get.  longest: seconds of the step."""
    depth = len(stop.min_reach)
    row = beside.speed * beside.costs.row(beside.rows + acceptance.expected.nodes)
    nodes = most_nodes(TREE_NODES, depth, beside, longest)
    return Budget.grown(nodes, depth, TREE_WIDTH, min(row, 1.0)).ending(stop)


def _foretold(acceptance: Acceptance, stop: Stop, beside: Beside, longest: float, *, greedy: bool) -> Budget:
    """A tree of a head that foretells all depths in one forward pass: a branch costs a row, as a deeper token does. At temperature 0 nodes join best
    first up to the one that is not worth its row; above, spare siblings do, and chains behind them are priced as the last row that is expected.
    """
    rates = acceptance.rates
    depth = len(stop.min_reach)
    most = most_nodes(FORETOLD_NODES, depth, beside, longest)
    likeliest = 1.0 if greedy else _likeliest_spare(rates)
    chances = min_branch_chances(beside.speed, likeliest, beside.rows, most, beside.costs)
    if not chances:
        return Budget.fixed(tree.chain(depth)).ending(stop)
    nodes = 0.0 if greedy else acceptance.expected.nodes
    next_acceptance = max(rates[NEXT], LEAST_NEXT)
    reaches = min_reaches(next_acceptance=next_acceptance, nodes=nodes, **beside._asdict())[:depth]
    stop = stop._replace(min_reach=reaches, min_spare_chance=chances, spare_acceptance=rates[SPARE])
    width = FORETOLD_NODES if greedy else TREE_WIDTH
    return Budget.grown(len(chances) + 1, len(reaches), width).ending(stop)
