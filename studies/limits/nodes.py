"""Acceptance at one node by number of drafts, temperature and distribution of the draws, and the optimum for each distribution.

In closed form where there is one, else with draws sampled and the verification integrated.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from polydraft.core import NoiseKey
from polydraft.sampling import noise
from polydraft.verifiers import importance, recursive, transport
from polydraft.verifiers.selection import highest_probs
from studies.limits.contexts import Pair
from studies.theory import acceptance, closed_forms, efficiency

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
    clocks = noise.clocks(key, most * V).numpy().reshape(DRAWS, most, V)
    with np.errstate(divide="ignore"):
        arrivals = clocks / q
        target_arrivals = clocks / p
    order = np.argsort(arrivals[:, 0], axis=1)[
        :, :most
    ]  # first arrivals of one race: draws without replacement
    lists = arrivals.argmin(2)
    rows = torch.from_numpy(p).expand(DRAWS, -1), torch.from_numpy(q).expand(DRAWS, -1)
    tournaments = _overlaps_of_tournaments(p, q, most)
    for n in counts:
        yield ("optimum", "IID", n), acceptance.with_replacement(p, q, n).alpha
        yield ("optimum", "WITHOUT_REPLACEMENT", n), acceptance.without_replacement(p, q, n).alpha
        yield ("greedy_plus_one", "GREEDY_PLUS_ONE", n), acceptance.greedy_plus_one(p, q, n).alpha
        yield ("match", "POINT_MASS", n), acceptance.point_mass(p, acceptance.top(q, n)).alpha
        yield ("match", "IID", n), closed_forms.target_sample(p, q, n)
        yield ("speculative", "IID", n), closed_forms.single(p, q)
        yield ("single_with_spares", "IID", n), closed_forms.single_with_spares(p, q, n)
        yield ("recursive", "IID", n), closed_forms.recursive(p, q, n)
        yield ("kseq", "IID", n), closed_forms.kseq(p, q, n)[1]
        yield ("max_ratio", "IID", n), max(closed_forms.single(p, q), _overlap_of_highest(p, q, n))
        yield (
            ("transport", "IID", n),
            max(closed_forms.single(p, q), float(np.minimum(p, transport.select(p, q, n)[0]).sum())),
        )
        yield ("importance", "IID", n), tournaments[n - 1]
        emitted = recursive.recursive_wor.emitted_probs(*rows, torch.from_numpy(order[:, :n].copy()))
        drafted = emitted.gather(1, torch.from_numpy(order[:, :n].copy())).sum(1)
        yield ("recursive_wor", "WITHOUT_REPLACEMENT", n), float(drafted.mean())
        yield (
            ("race", "COUPLED", n),
            float((order[:, :n] == target_arrivals[:, 0].argmin(1)[:, None]).any(1).mean()),
        )
        first = target_arrivals[:, :n].min(1).argmin(1)
        yield ("list_race", "LISTED", n), float((lists[:, :n] == first[:, None]).any(1).mean())


def _overlap_of_highest(p: np.ndarray, q: np.ndarray, n: int) -> float:
    chance = torch.zeros(1, n + 1, dtype=torch.float64)
    chance[0, n] = 1.0
    distribution, _, _ = highest_probs(torch.from_numpy(p)[None], torch.from_numpy(q)[None], chance)
    return float(torch.minimum(torch.from_numpy(p), distribution[0]).sum())


def _overlaps_of_tournaments(p: np.ndarray, q: np.ndarray, most: int) -> list[float]:
    """For 1, 2, ..., `most` drafts: each further one plays against the winner of those before."""
    target_probs, drafted = (torch.from_numpy(x)[None] for x in (p, q))
    distributions = [drafted]
    while len(distributions) < most:
        distributions.append(importance.select_pairs(target_probs, distributions[-1], drafted).distribution)
    return [float(torch.minimum(target_probs, distribution).sum()) for distribution in distributions]
