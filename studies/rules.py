"""`python -m studies.rules`: every lossless verifier by draft quality, number of paths and draft sampling, at equal lengths and at equal nodes.

pairs     rows by the last token, V tokens: p_x = softmax(SHARP g), q_x = softmax(log p_x + s h) with g, h normal and s such that target and draft
          overlap by .3, .5, .7 or .9 on average over the rows;  on a real pair `python -m studies.limits` measures the same quantities
shapes    K paths of LENGTH tokens, and K paths of NODES / K tokens: the same forward pass for all
cost      a step costs 1 + ROW_COST nodes + STEP_COST draft steps; speed is tokens over that, in units of plain decoding
bound     of iid paths: 1 + sum of T over what the target writes, estimated on texts of its own (`bounds.sampled_block_efficiency_of_paths`)
stated    what SpecTr-GBV says of itself (`bounds.stated_by_spectr_gbv`), estimated likewise: its rule is not built
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import typer

from polydraft.bench.record import csv_table, markdown_table, write_texts
from polydraft.cli.files import say_written
from polydraft.cli.progress import bars
from polydraft.core import DraftSampling
from polydraft.core import geometry as trees
from polydraft.methods import registry
from polydraft.theory import acceptance, bounds, compare, optimum, speed
from polydraft.theory.comparison import COMPARED, Comparison
from studies.options import Out, Quick

V = 32
SHARP = 2.0
OVERLAPS = (0.3, 0.5, 0.7, 0.9)
NUM_PATHS = (1, 2, 4, 8)
LENGTH = 4
NODES = 16
ROOTS = 8
"""Last tokens before the draft, each with an equal share of the drafts."""
DRAFTS = 100
"""Of each root, for each draft sampling; four times as many of one path for block verification, which others are compared with."""
ROW_COST = 0.02
STEP_COST = 0.05
STATED = "stated by SpecTr-GBV"
SHOWN = OVERLAPS[1:]
"""Overlaps of the page's pairs."""
HEAD = (
    "overlap",
    "shape",
    "paths",
    "depth",
    "year",
    "verifier",
    "draft_sampling",
    "tokens",
    "standard_error",
    "bound",
    "over_block_percent",
    "speed",
)


@dataclass(frozen=True)
class Pair:
    """Rows by the last token, [V, V] each, that overlap by so much on average."""

    overlap: float
    target: np.ndarray
    draft: np.ndarray

    @classmethod
    def of(cls, overlap: float, seed: int = 0) -> "Pair":
        """With noise in the draft's logits until the overlap is met."""
        rng = np.random.default_rng(seed)
        logits = SHARP * rng.standard_normal((V, V))
        noise = rng.standard_normal((V, V))
        target = _softmax(logits)
        least = 0.0
        most = 64.0
        for _ in range(60):
            scale = (least + most) / 2
            draft = _softmax(logits + scale * noise)
            if np.minimum(target, draft).sum(1).mean() > overlap:
                least = scale
            else:
                most = scale
        return cls(overlap, target, _softmax(logits + most * noise))

    def rows(self, root: int) -> tuple[Any, Any]:
        """Target and draft rows behind a token, as functions of a path."""
        return (
            lambda path: self.target[path[-1] if path else root],
            lambda path: self.draft[path[-1] if path else root],
        )


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def shapes() -> Iterator[tuple[str, int, int]]:
    """(name, number of paths, depth)."""
    for K in NUM_PATHS:
        yield f"length {LENGTH}", K, LENGTH
    for K in NUM_PATHS:
        yield f"{NODES} nodes", K, NODES // K


@dataclass(frozen=True)
class Measured:
    """Means over roots. rows: (verifier, draft sampling) -> tokens, standard error.  bound: of iid paths, with its error."""

    rows: dict[tuple[str, DraftSampling], tuple[float, float]]
    bound: tuple[float, float]


def measure(pair: Pair, K: int, depth: int, num_roots: int, num_drafts: int) -> Measured:
    """Every lossless verifier on K paths of so many tokens."""
    tree = trees.paths(K, depth)
    compared = list[Comparison]()
    bound = list[float]()
    for number in range(num_roots):
        p, q = pair.rows(number * V // num_roots)
        compared.append(compare(p, q, tree, num_drafts=num_drafts, seed=number))
        texts = bounds.TargetTexts(p, q, depth, 4 * num_drafts, np.random.default_rng(number))
        bound.append(bounds.sampled_block_efficiency_of_paths(texts, K)[0])
    names = [(row.verifier, row.sampling) for row in compared[0].rows]
    values = {name: [c.of(*name).tokens for c in compared] for name in names}
    errors = {name: [c.of(*name).standard_error for c in compared] for name in names}
    rows = {
        name: (float(np.mean(values[name])), float(np.linalg.norm(errors[name]) / num_roots))
        for name in names
    }
    return Measured(rows, (float(np.mean(bound)), 0.0))


def stated_tokens(pair: Pair, K: int, depth: int, num_roots: int, num_drafts: int) -> tuple[float, float]:
    """What SpecTr-GBV states for K paths, and its standard error."""
    every = list[tuple[float, float]]()
    for number in range(num_roots):
        rows = pair.rows(number * V // num_roots)
        texts = bounds.TargetTexts(*rows, depth, 4 * num_drafts, np.random.default_rng(number))
        every.append(bounds.stated_by_spectr_gbv(texts, K))
    means, errors = np.array(every).T
    return float(means.mean()), float(np.linalg.norm(errors) / num_roots)


def block_tokens(pair: Pair, depth: int, num_roots: int, num_drafts: int) -> float:
    """Of block verification of one path."""
    tokens = list[float]()
    for number in range(num_roots):
        rows = pair.rows(number * V // num_roots)
        compared = compare(*rows, trees.chain(depth), verifiers=["block"], num_drafts=num_drafts, seed=number)
        tokens.append(compared.rows[0].tokens)
    return float(np.mean(tokens))


def table(num_roots: int, num_drafts: int, overlaps: tuple[float, ...], step: Any) -> list[list[Any]]:
    """Lines of the CSV file."""
    lines = list[list[Any]]()
    for overlap in overlaps:
        pair = Pair.of(overlap)
        for shape, K, depth in shapes():
            measured = measure(pair, K, depth, num_roots, num_drafts)
            one = block_tokens(pair, depth, num_roots, 4 * num_drafts)
            stated = stated_tokens(pair, K, depth, num_roots, num_drafts)
            figures = [*measured.rows.items(), ((STATED, DraftSampling.IID), stated)]
            for (name, sampling), (tokens, error) in figures:
                bound = f"{measured.bound[0]:.3f}" if sampling is DraftSampling.IID else None
                cells = [f"{tokens:.3f}", f"{error:.3f}", bound, f"{100 * (tokens / one - 1):.1f}"]
                where = [overlap, shape, K, depth, year_of(name), name, sampling.name]
                lines.append([*where, *cells, f"{speed_of(tokens, K, depth):.3f}"])
            step(len(overlaps) * len(list(shapes())))
    return lines


def year_of(name: str) -> int:
    """In which a verifier was published."""
    return 2026 if name == STATED else registry.verifier(name).info.year


def speed_of(tokens: float, K: int, depth: int) -> float:
    """Of K paths, in units of plain decoding."""
    return speed.speed_up(
        tokens, draft_steps=depth, draft_cost=STEP_COST, scoring_cost=1 + ROW_COST * K * depth
    )


def at_one_node(num_roots: int, overlaps: tuple[float, ...]) -> list[list[Any]]:
    """Acceptance of K children against the optimum of their draft sampling, races and lists among them."""
    lines = list[list[Any]]()
    for overlap in overlaps:
        pair = Pair.of(overlap)
        rows = [(pair.target[x], pair.draft[x]) for x in range(0, V, V // num_roots)]
        for K in NUM_PATHS:
            found = dict[tuple[str, str], list[float]]()
            best = dict[str, list[float]]()
            for p, q in rows:
                for row in compare(p, q, K, num_drafts=400).rows:
                    found.setdefault((row.verifier, row.sampling.name), []).append(row.tokens - 1)
                found.setdefault(("race", "COUPLED"), []).append(acceptance.race(p, q, K))
                found.setdefault(("list_race", "LISTED"), []).append(acceptance.list_matching(p, q, K))
                for sampling in (*COMPARED, DraftSampling.COUPLED):
                    if sampling is not DraftSampling.SYSTEMATIC:
                        best.setdefault(sampling.name, []).append(optimum.optimum(p, q, K, sampling).alpha)
            for (name, sampling), values in found.items():
                alpha = float(np.mean(values))
                top = float(np.mean(best[sampling])) if sampling in best else None
                year = registry.verifier(name).info.year
                missing = None if top is None else f"{top - alpha:.4f}"
                lines.append(
                    [overlap, K, year, name, sampling, f"{alpha:.4f}", top and f"{top:.4f}", missing]
                )
    return lines


def main(out: Out = Path("build/rules"), quick: Quick = False) -> None:
    """Write rules.csv, paths by draft quality, and rules-nodes.csv, one node against the optimum, with the page of both, rules.md."""
    overlaps = OVERLAPS[1:3] if quick else OVERLAPS
    sizes = (2, 4) if quick else (ROOTS, DRAFTS)
    with bars("measuring") as step:
        lines = table(*sizes, overlaps, lambda total: step(total))
    nodes = at_one_node(2 if quick else ROOTS, overlaps)
    head = ("overlap", "drafts", "year", "verifier", "draft_sampling", "acceptance", "optimum", "missing")
    out.mkdir(parents=True, exist_ok=True)
    say_written(
        write_texts(
            {
                out / "rules.csv": csv_table(HEAD, lines),
                out / "rules-nodes.csv": csv_table(head, nodes),
                out / "rules.md": page(lines, nodes),
            }
        )
    )


def page(lines: list[list[Any]], nodes: list[list[Any]]) -> str:
    """Every verifier: tokens of K paths of equal length on three pairs, speed at equal nodes, and what it lacks of the optimum at one node.

    lines, nodes: of rules.csv and rules-nodes.csv, as numbers or as read.
    """
    tokens = {(float(line[0]), line[1], int(line[2]), line[5], line[6]): line[7] for line in lines}
    speeds = {(float(line[0]), line[1], int(line[2]), line[5], line[6]): line[11] for line in lines}
    missing = {(float(line[0]), int(line[1]), line[3], line[4]): line[7] for line in nodes}
    years = {(line[5], line[6]): line[4] for line in lines} | {(line[3], line[4]): line[2] for line in nodes}
    verifiers = sorted(years, key=lambda pair: (int(years[pair]), pair))
    length, equal = f"length {LENGTH}", f"{NODES} nodes"

    def cell(values: Mapping[Any, Any], digits: int, *keys: tuple[Any, ...]) -> str:
        found = [values.get(key) for key in keys]
        return "/".join(f"{float(value):.{digits}f}" for value in found if value not in (None, ""))

    body = [
        [
            name if name == STATED else f"`{name}`",
            drawn.lower().replace("_", " "),
            str(years[name, drawn]),
            *(cell(tokens, 2, *((o, length, K, name, drawn) for K in NUM_PATHS)) for o in SHOWN),
            cell(speeds, 2, *((o, equal, 4, name, drawn) for o in SHOWN)),
            cell(missing, 3, *((o, 4, name, drawn) for o in SHOWN)),
        ]
        for name, drawn in verifiers
        if (name, drawn) != ("list_race", "LISTED")
    ]
    head = ["verifier", "draws", "year", *(f"overlap {o:g}" for o in SHOWN), "speed", "missing"]
    return OPENING + "\n" + markdown_table(head, body) + "\n"


OPENING = f"""# Every lossless verifier

`python -m studies.rules`: random Markov pairs of {V} tokens whose rows overlap by .5, .7 and .9. Their columns: expected tokens per step of 1/2/4/8 paths of {LENGTH} tokens (chains: of one), {ROOTS * DRAFTS}
drafts, standard errors of 1 to 3% ([all errors, overlap .3, the bound of iid paths](../results/rules.csv)). *Speed*: four paths of {NODES // 4} tokens over plain decoding on each pair, where a scored node costs {ROW_COST} and a draft step
{STEP_COST} of a plain step. *Missing*: what the acceptance of four children of one node lacks of the optimum for these draws, on each pair ([one to eight children](../results/rules-nodes.csv)).
Races are measured at one node; [their trees](../theory-results.md#branching-trees). [SpecTr-GBV](../papers/spectr-gbv.md) is what its theorem states, no verifier.
"""

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
