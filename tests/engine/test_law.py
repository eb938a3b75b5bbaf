"""The law of what an engine writes, by its own walks: tables in float32, hundreds of sequences in a batch, real noise, several rounds.

Texts of three tokens of three, 27 cells. Power: a bias adds the number of samples times sum (difference^2 / law) to a statistic of mean 26 and
standard deviation 7. Right rules pass with SAMPLES; every known mistake is found with p < 1e-6 in half as many, but for two that take twice as many.
"""

import pytest
from tables import TableModel, p_value

from polydraft import Engine, FixedPlan
from polydraft.bench.wrong_rules import keep_all, mistakes
from polydraft.core import Budget
from polydraft.verifiers.block.block import Block
from polydraft.verifiers.block.greedy_traversal import GreedyTraversal
from polydraft.verifiers.token.match import Match

SAMPLES = 2048
NEAR, FAR = {"seed": 8, "sharp": 2.0, "share": 0.3}, {"seed": 6, "sharp": 1.5, "share": 0.0}
"""Tables, and the target's share in the draft's logits."""


def pair(seed, sharp, share):
    target, small = (TableModel(3, s, sharp, max_num_seqs=512) for s in (seed, seed + 1))
    small.logits = share * target.logits + (1 - share) * small.logits
    target.logits, small.logits = target.logits.float(), small.logits.float()
    return target, small


class OfAllShapes(FixedPlan):
    """Chains, paths and trees in one batch, by the seeds and lengths of its sequences."""

    def budgets(self, sequences):
        given = Budget.of_tree((-1, 0, 1, 0)), Budget.of_tree((-1, 0, 0, 1, 1)), Budget.of_paths(1, 2), Budget.of_paths(2, 2)
        return [given[(s.request.seed + s.request.sample + len(s.token_ids)) % 4] for s in sequences]


RIGHT = [
    ("chain", "block", FixedPlan(2)),
    ("paths", "greedy_traversal", FixedPlan(2, 2)),
    ("paths", "greedy_traversal", FixedPlan(2, 2, trunk=1)),
    ("paths", "greedy_traversal", FixedPlan(2, 2, short=1)),
    ("paths", "greedy_traversal", OfAllShapes(1)),
    ("paths", "match", OfAllShapes(1)),
    ("without_replacement", "traversal", FixedPlan(2, 2)),
    ("top_k", "match", FixedPlan(2, 2)),
    ("coupled", "race", FixedPlan(2, 2)),
    ("listed", "list_race", FixedPlan(2, 2)),
]


@pytest.mark.parametrize(("kind", "verifier", "plan"), RIGHT)
def test_the_output_law_over_rounds_is_the_targets(kind, verifier, plan):
    target, small = pair(**NEAR)
    engine = Engine.of(target, draft_model=small, drafter=f"model:{kind}", verifier=verifier, plan=plan)
    assert p_value(engine, [1, 2], 3, SAMPLES) > 1e-3


@pytest.mark.parametrize("verifier", ["match", "race"])
def test_the_output_law_without_drafts_is_the_targets(verifier):
    assert p_value(Engine.of(pair(**NEAR)[0], drafter=None, verifier=verifier), [1, 2], 3, SAMPLES) > 1e-3


MISTAKES = {mistake.name: mistake for mistake in mistakes()}
WEAK = ("equal draws skipped", "block rule with clamped factors")
ON_FAR = ("one path counted twice", "noise keyed by a token's own position")
"""Those that show where draft and target have nothing in common."""


@pytest.mark.parametrize("name", MISTAKES)
def test_a_known_mistake_is_caught(name):
    mistake, (target, small) = MISTAKES[name], pair(**(FAR if name in ON_FAR else NEAR))
    drafter = mistake.drafter(small)
    engine = Engine.of(target, drafter=drafter, verifier=mistake.rule, depth=mistake.depth, num_paths=mistake.width)
    assert p_value(engine, [1, 2], 3, 2 * SAMPLES if name in WEAK else SAMPLES // 2) < 1e-6


@pytest.mark.parametrize(("walker", "kind", "num_paths"), [(Block, "chain", 1), (GreedyTraversal, "paths", 2), (Match, None, 1)])
def test_a_broken_walk_in_the_place_of_the_right_one_is_caught(walker, kind, num_paths, monkeypatch):
    target, small = pair(**NEAR)
    size = {} if kind is None else {"depth": 2, "num_paths": num_paths}
    engine = Engine.of(target, draft_model=small, drafter=kind and f"model:{kind}", **size)
    monkeypatch.setattr(walker, "walk", lambda self, *given: keep_all(*given))
    assert p_value(engine, [1, 2], 3, SAMPLES // 2) < 1e-6
