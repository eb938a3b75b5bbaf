"""Acceptance at one node by number of drafts, temperature and distribution of the draws, and the optimum for each distribution.

In closed form where there is one, else with draws sampled and the verification integrated.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from polydraft.core import Draft, DraftSampling, NoiseKey, TokenTree, TreeShape
from polydraft.core import geometry as trees
from polydraft.methods import registry
from polydraft.sampling import noise
from polydraft.theory import acceptance, optimum
from polydraft.verifiers import recursive
from studies.limits.contexts import Pair
from studies.theory import efficiency

DRAWS = 16
"""Sampled draws a context, for rules without a closed form."""


def nodes(pair: Pair, progress: Callable[[], object]) -> list[dict[str, Any]]:
    """Acceptance of each rule by distribution of the draws, number of drafts and temperature."""
    s = pair.settings
    values = dict[tuple[str, str, int, float], list[float]]()
    for index, context in enumerate(pair.contexts(s.node_contexts) if s.node_contexts else ()):
        for T, (p, q) in pair.last_distributions(context, sorted({*s.temperatures, s.temperature})).items():
            counts = s.num_drafts if s.temperature == T else (s.drafts_by_temperature,)
            for (rule, distribution, n), value in _at_node(p, q, counts, s.seed, index):
                values.setdefault((rule, distribution, n, T), []).append(value)
        progress()
    names = ("rule", "distribution", "drafts", "temperature")
    return [
        dict(zip(names, key, strict=True)) | efficiency.estimate(np.array(v)).to_dict("acceptance")
        for key, v in values.items()
    ]


def _at_node(
    p: np.ndarray, q: np.ndarray, counts: Sequence[int], seed: int, index: int
) -> Iterator[tuple[tuple[str, str, int], float]]:
    """((rule, distribution of the draws, n), acceptance) at one context."""
    most = max(counts)
    V = len(p)
    key = NoiseKey.of([seed + i for i in range(DRAWS)], [1] * DRAWS, [index] * DRAWS)
    clocks = noise.clocks(key, most * V).reshape(DRAWS, most, V)
    with np.errstate(divide="ignore"):
        arrivals = clocks / q
        target_arrivals = clocks / p
    order = np.argsort(arrivals[:, 0], axis=1)[
        :, :most
    ]  # first arrivals of one race: draws without replacement
    lists = arrivals.argmin(2)
    rows = np.tile(p, (DRAWS, 1)), np.tile(q, (DRAWS, 1))
    for n in counts:
        yield ("optimum", "IID", n), optimum.with_replacement(p, q, n).alpha
        yield ("optimum", "WITHOUT_REPLACEMENT", n), optimum.without_replacement(p, q, n).alpha
        yield ("greedy_plus_one", "GREEDY_PLUS_ONE", n), optimum.greedy_plus_one(p, q, n).alpha
        yield ("match", "POINT_MASS", n), optimum.point_mass(p, optimum.top(q, n)).alpha
        yield ("match", "IID", n), acceptance.target_sample(p, q, n)
        yield ("speculative", "IID", n), acceptance.single(p, q)
        yield ("single_with_spares", "IID", n), acceptance.single_with_spares(p, q, n)
        yield ("recursive", "IID", n), acceptance.recursive(p, q, n)
        yield ("kseq", "IID", n), acceptance.kseq(p, q, n)[1]
        yield ("max_ratio", "IID", n), acceptance.max_ratio(p, q, n)
        yield ("transport", "IID", n), acceptance.transport(p, q, n)
        yield ("importance", "IID", n), acceptance.importance(p, q, n)
        emitted = recursive.recursive_wor.emitted_probs(*rows, order[:, :n])
        drafted = np.take_along_axis(emitted, order[:, :n], 1).sum(1)
        yield ("recursive_wor", "WITHOUT_REPLACEMENT", n), float(drafted.mean())
        yield (
            ("race", "COUPLED", n),
            float((order[:, :n] == target_arrivals[:, 0].argmin(1)[:, None]).any(1).mean()),
        )
        first = target_arrivals[:, :n].min(1).argmin(1)
        yield ("list_race", "LISTED", n), float((lists[:, :n] == first[:, None]).any(1).mean())
        yield ("greedy_traversal", "IID", n), accepted("greedy_traversal", p, q, lists[:, :n])


def accepted(rule: str, p: np.ndarray, q: np.ndarray, draws: np.ndarray) -> float:
    """Mean acceptance of a path rule at one node. draws: [B, n] iid from q."""
    B, n = draws.shape
    tokens = np.concatenate([np.zeros((B, 1), draws.dtype), draws], axis=1)
    parents = np.tile(trees.product(n), (B, 1))
    rows = np.tile([-1, *[0] * n], (B, 1))
    draft_probs = np.tile(q, (B, 1, 1))
    draft = Draft(TokenTree(tokens, parents), DraftSampling.IID, TreeShape.PRODUCT, draft_probs, rows)
    target_probs = np.tile(p, (B, n + 1, 1))
    stop = registry.verifier(rule)(draft, target_probs).stop
    return float(1 - stop[:, 0].mean())
