"""How far the output of each rule that is not lossless is from the target's distribution: the total variation of one token, exactly.

    tv    sum |output(y) - p(y)| / 2 at each context, output being the distribution that the rule emits for one draft from q
    kept  probability that the draft itself is emitted; of a lossless rule it is at most sum min(p, q)

LANTERN borrows from neighbours of a token; in a text model these are the nearest rows of the target's input embedding.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Int
from scipy.spatial.distance import cdist

from polydraft.bench.record import markdown_table
from polydraft.core import geometry as trees
from polydraft.papers.lantern import latent
from polydraft.papers.relaxed import top_beta, typical
from polydraft.verifiers.selection import overlap
from studies.limits.contexts import Pair
from studies.theory import efficiency

NEIGHBOURS = 8
DELTA = 0.05
FACTOR = 1.0
"""Budgets of LANTERN: as a mass, and relative to the token's own."""
LARGEST_CODEBOOK = 16_384
"""Neighbours are looked for by comparing all tokens; beyond this LANTERN is not measured."""
AT_ONCE = 32

Rule = tuple[Callable[[np.ndarray, np.ndarray], np.ndarray], Callable[[np.ndarray, np.ndarray], np.ndarray]]
"""(p [1, V], q [1, V]) -> distribution of the emitted token [1, V]; and -> probability that each drafted token is kept [1, V]."""


def nearest(pair: Pair) -> Int[np.ndarray, "V m"]:
    """The nearest other tokens of each token by the target's input embedding, nearest first."""
    V = pair.target.vocab_size
    rows = list[np.ndarray]()
    for start in range(0, V, AT_ONCE):
        ids = list(range(start, min(start + AT_ONCE, V)))
        pair.target.release([1])
        star = trees.pad([([0, *ids], [-1] + [0] * len(ids))])
        rows.append(pair.target.score([1], star, hidden=(0,)).hidden[0][0, 1:])
    table = np.concatenate(rows)
    distance = cdist(table, table)
    np.fill_diagonal(distance, np.inf)
    return distance.argsort(1, kind="stable")[:, : min(NEIGHBOURS, V - 1)]


def rules(pair: Pair) -> dict[str, Rule]:
    """The rules with their usual thresholds."""
    found: dict[str, Rule] = {
        "typical": (typical.output_probs, lambda p, q: typical.acceptable(p)),
        "top_beta": (top_beta.output_probs, lambda p, q: top_beta.acceptable(p)),
    }
    if pair.target.vocab_size <= LARGEST_CODEBOOK:
        near = nearest(pair)
        every = np.arange(len(near))[None]
        for name, budget in (
            ("latent, additive", {"delta": DELTA}),
            ("latent, multiplicative", {"factor": FACTOR}),
        ):
            found[name] = (
                partial(latent.output_probs, neighbours=near, **budget),
                partial(latent.accept_probability, x=every, neighbours=near, **budget),
            )
    return found


def relaxed(pair: Pair) -> list[dict[str, Any]]:
    """Total variation, and how often the draft is kept, by rule and temperature."""
    s = pair.settings
    if not s.node_contexts:
        return []
    measured = rules(pair)
    values = dict[tuple[str, float], list[tuple[float, float, float]]]()
    for context in pair.contexts(s.node_contexts):
        for T, distributions in pair.last_distributions(context, s.temperatures).items():
            p, q = (x[None] for x in distributions)
            for name, (output, keep) in measured.items():
                tv = np.abs(output(p, q) - p).sum() / 2
                kept = (q * keep(p, q)).sum()
                values.setdefault((name, T), []).append((float(tv), float(kept), overlap(p, q).item()))
    found: list[dict[str, Any]] = []
    for (name, T), rows in values.items():
        columns = np.array(rows).T
        tv, kept, lossless = map(efficiency.estimate, columns)
        found.append(
            {"rule": name, "temperature": T}
            | {**tv.to_dict("tv"), "largest": float(columns[0].max())}
            | kept.to_dict("kept", "kept_error")
            | lossless.to_dict("kept_lossless", "kept_lossless_error")
        )
    return found


def markdown(report: dict[str, Any]) -> str:
    """Total variation (largest of any context in brackets), then how often the draft is kept."""
    temperatures: Sequence[float] = report["settings"]["temperatures"]
    cell = {(r["rule"], r["temperature"]): r for r in report["relaxed"]}
    lines: list[list[str]] = []
    for rule in dict.fromkeys(r["rule"] for r in report["relaxed"]):
        rows = [cell[rule, T] for T in temperatures]
        tv = [f"{r['tv']:.3f} ± {r['standard_error']:.3f} ({r['largest']:.2f})" for r in rows]
        lines.append([rule, *tv, *(f"{r['kept']:.3f}" for r in rows)])
    lossless = {r["temperature"]: r["kept_lossless"] for r in report["relaxed"]}
    lines.append(["lossless", *["0"] * len(temperatures), *(f"{lossless[T]:.3f}" for T in temperatures)])
    table = markdown_table(
        ["rule", *(f"TV, T = {T:g}" for T in temperatures), *(f"kept, T = {T:g}" for T in temperatures)],
        lines,
    )
    title = (
        "Rules that are not lossless: total variation of the next token from the target's distribution for one draft (largest of any "
        "context in brackets), and how often the draft is kept:"
    )
    return f"\n{title}\n\n{table}\n"
