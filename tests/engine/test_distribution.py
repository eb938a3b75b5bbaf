"""The distribution of what an engine writes, by its own walks: tables in float32, hundreds of sequences in a batch, real noise, several rounds.

Texts of three tokens of three, 27 cells. Power: a bias adds SAMPLES times sum (difference^2 / distribution) to a statistic of mean 26 and standard
deviation 7. Right rules pass; the four known mistakes of block verification and broken walks are found with p < 1e-6. All rules, trees and
other mistakes are in `test_walk_distributions`, which needs no engine, and in `polydraft check --self-test`.
"""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from polydraft import Engine, FixedPolicy, SamplingParams
from polydraft.core import Budget
from polydraft.core.geometry import chain, paths
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.engine import step
from polydraft.sampling import processing as sampling
from polydraft.verifiers.lift.leaf_to_root import LeafToRoot
from polydraft.verifiers.match import Match, match
from tests.engine.tables import TableModel, p_value
from tests.exactness.oracle import lifted
from tests.support.wrong_rules import Wrong, block, keep_all

SAMPLES = 1024
NEAR = 8, 2.0, 0.3
"""Seed of the tables, their sharpness, and the target's share in the draft's logits."""
FAR = 0, 1.5, 0.0
"""The same where clamped factors show."""


def pair(seed, sharp, share):
    target, small = (TableModel(3, s, sharp, max_num_seqs=512) for s in (seed, seed + 1))
    small.logits = share * target.logits + (1 - share) * small.logits
    target.logits = target.logits.astype(np.float32)
    small.logits = small.logits.astype(np.float32)
    return target, small


class OfAllShapes(FixedPolicy):
    """Chains, paths and trees in one batch, by the seeds and lengths of its sequences."""

    def budgets(self, sequences):
        given = (
            Budget.fixed((-1, 0, 1, 0)),
            Budget.fixed((-1, 0, 0, 1, 1)),
            Budget.fixed(paths(1, 2)),
            Budget.fixed(paths(2, 2)),
        )
        return [given[(s.request.seed + s.request.sample + len(s.token_ids)) % 4] for s in sequences]


RIGHT = [
    ("chain", "block", FixedPolicy(Budget.fixed(chain(2)))),
    *(
        (kind, verifier, OfAllShapes(Budget.fixed(paths(2, 2))))
        for kind, verifier in (
            ("paths", "greedy_traversal"),
            ("without_replacement", "greedy_traversal_wor"),
            ("greedy_plus_one", "greedy_plus_one"),
            ("coupled", "race"),
            ("systematic", "flow"),
        )
    ),
]


@pytest.mark.parametrize(("kind", "verifier", "policy"), RIGHT)
def test_the_output_distribution_over_rounds_is_the_targets(kind, verifier, policy):
    target, small = pair(*NEAR)
    engine = Engine.of(target, draft_model=small, drafter=f"model:{kind}", verifier=verifier, policy=policy)
    assert p_value(engine, [1, 2], 3, SAMPLES) > 1e-3


def test_the_output_distribution_without_drafts_is_the_targets():
    assert p_value(Engine.of(pair(*NEAR)[0], drafter=None), [1, 2], 3, SAMPLES) > 1e-3


@pytest.mark.parametrize("mistake", ["clamp_factors", "plain_residual", "uncapped", "first_failure"])
def test_a_known_mistake_is_caught(mistake):
    target, small = pair(*(FAR if mistake == "clamp_factors" else NEAR))
    wrong = Wrong(partial(block, **{mistake: True}))
    engine = Engine.of(target, drafter=ModelDrafter(small, "chain"), verifier=wrong, depth=2)
    assert p_value(engine, [1, 2], 3, SAMPLES) < 1e-6


@pytest.mark.parametrize(
    ("walker", "kind", "num_paths"), [(LeafToRoot, "chain", 1), (LeafToRoot, "paths", 2), (Match, None, 1)]
)
def test_a_broken_walk_in_the_place_of_the_right_one_is_caught(walker, kind, num_paths, monkeypatch):
    target, small = pair(*NEAR)
    size = {} if kind is None else {"depth": 2, "num_paths": num_paths}
    engine = Engine.of(target, draft_model=small, drafter=kind and f"model:{kind}", **size)
    monkeypatch.setattr(walker, "walk", lambda self, *given: keep_all(*given))
    assert p_value(engine, [1, 2], 3, SAMPLES // 8) < 1e-6


def test_target_rows_are_processed_once_a_step_where_the_verifier_has_no_walk(monkeypatch):
    target = pair(*NEAR)[0]
    processed = []
    process = sampling.distributions_of
    monkeypatch.setattr(sampling, "distributions_of", lambda *rows: processed.append(rows) or process(*rows))
    engine = Engine.of(target, drafter="ngram", depth=2, verifier=lifted(match.emitted_probs))
    (result,) = engine.generate([[1, 2, 1, 2, 1]], SamplingParams(seed=3, max_tokens=12, top_k=2))
    assert 1 < len(processed) <= result.stats.steps


@pytest.mark.parametrize("drafter", ["model:chain", "model:without_replacement", "ngram", None])
def test_a_verifier_with_a_walk_makes_the_distributions_of_visited_rows_alone(drafter, monkeypatch):
    target, small = pair(*NEAR)
    draft = {"draft_model": small} if drafter and "model" in drafter else {}
    engine = Engine.of(target, drafter=drafter, **draft)
    monkeypatch.setattr(
        step, "sampling", SimpleNamespace(in_context=sampling.in_context, samplings_of=sampling.samplings_of)
    )
    params = [
        SamplingParams(seed=3, max_tokens=12, top_k=2),
        SamplingParams(seed=3, max_tokens=12, temperature=0),
    ]
    results = engine.generate([[1, 2, 1, 2, 1]] * 2, params)
    assert [len(r.token_ids) for r in results] == [12, 12]
