"""The rules for trees that run on a device keep the target's law exactly, by enumeration, as the readable rules do."""

from functools import partial

import pytest
import torch

from polydraft import registry
from polydraft.core import NoiseKey, SiblingLaw, TreeShape
from polydraft.verifiers.fast import device_tree
from polydraft.verifiers.fast.device import Nodes
from polydraft.verifiers.fast.device_tree import GreedyTraversalRule, TraversalRule
from polydraft.verifiers.lift.verdict import TreeVerdict
from tests.laws.harness import SHAPES, Tables, measure

RULES = {
    "greedy_traversal": GreedyTraversalRule(),
    "traversal": TraversalRule(),
    "traversal_merged": TraversalRule(merged=True),
}
CASES = [
    (law, shape, name)
    for name in RULES
    for law in SiblingLaw
    for shape in TreeShape
    if law in registry.verifier(name).info.laws and shape in registry.verifier(name).info.shapes
]


def verdict(rule, draft, p):
    """What a rule decides before any noise, in float64."""
    B = draft.tree.batch_size
    nodes = Nodes.of(draft, NoiseKey.of([0] * B, [0] * B, [0] * B), torch.device("cpu"))
    contexts, sweep, left = rule.swept(p.log(), draft.probs, nodes)
    stop, _ = device_tree.stops(sweep, contexts, nodes)

    def after(node):
        law = device_tree.after(sweep, contexts, left, node)
        return law / law.sum(-1, keepdim=True)

    return TreeVerdict(draft.tree, stop, after)


@pytest.mark.parametrize(("law", "shape", "name"), CASES, ids=lambda x: x if isinstance(x, str) else x.name)
def test_a_rule_on_the_device_keeps_the_target_law_exactly(law, shape, name):
    for label, counts, depth in SHAPES[shape]:
        for seed in range(6):
            found = measure(partial(verdict, RULES[name]), Tables(3, seed), law, shape, counts, depth)
            readable = measure(registry.verifier(name), Tables(3, seed), law, shape, counts, depth)
            assert found.error < 1e-12, f"{label}, seed {seed}: {found}"
            assert found.block_efficiency == pytest.approx(readable.block_efficiency, abs=1e-12)


class RepeatsAreNotRejected(TraversalRule):
    """Wrong: a token that comes again is passed over, and what is left of p is as before."""

    def draws(self, draft):
        draws, single = super().draws(draft)
        tokens = draft.tree.tokens.numpy()
        for b, v in zip(*(draws[..., 0] >= 0).nonzero(), strict=True):
            kept = {int(tokens[b, n]): n for n in draws[b, v][::-1] if n >= 0}
            new = sorted(kept.values())
            draws[b, v] = [*new, *[-1] * (draws.shape[2] - len(new))]
        return draws, single


class UncappedResidual(GreedyTraversalRule):
    """Wrong: after a rejection p is what it was before."""

    def try_several(self, sweep, level, draft):
        before = sweep.normal(sweep.mass, sweep.total, level.context)
        super().try_several(sweep, level, draft)
        return before


WRONG = [
    (RepeatsAreNotRejected(), SiblingLaw.IID, TreeShape.PATHS),
    (UncappedResidual(), SiblingLaw.IID, TreeShape.PATHS),
    (TraversalRule(), SiblingLaw.IID, TreeShape.PATHS),
]


@pytest.mark.parametrize(("rule", "law", "shape"), WRONG, ids=["repeats passed over", "p kept", "stops out of turn"])
def test_a_wrong_rule_on_the_device_is_found(rule, law, shape, monkeypatch):
    if type(rule) is TraversalRule:
        monkeypatch.setattr(device_tree.Sweep, "enter", _without_turns(device_tree.Sweep.enter))
    _, counts, depth = SHAPES[shape][0]
    worst = max(measure(partial(verdict, rule), Tables(3, seed), law, shape, counts, depth).error for seed in range(6))
    assert worst > 1e-3


def _without_turns(enter):
    """Wrong: a child does not know which were tried before it."""
    return lambda self, child, w, turn, entered: enter(self, child, w, 0, entered)
