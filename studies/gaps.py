"""`python -m studies.gaps`: what any lossless verifier could still gain over the published ones, context by context, on rows of a real head.

rows       of a target and its head behind places in texts, at the root and behind each of the head's TOP likeliest tokens
reduction  both distributions are those of a request with `top_k=TOP`, so a step has few enough drafts for all to be looked at; nothing else is left out.
           Target tokens that the head cannot draft are one token, which no verifier can accept
rules      every lossless verifier on K paths of DEPTH tokens, all of the same nodes, over all drafts: exact, nothing is sampled
optimum    of all verifiers that see the whole draft and all rows, by a linear programme (`theory.bounds`), for each draft sampling
left       the optimum of the best draft sampling of each context over the best published verifier and draws: no verifier gains more, even if it knew the draws to take
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from polydraft.bench.record import csv_table, markdown_table, write_texts
from polydraft.cli.files import read_text, say_written
from polydraft.cli.progress import bars
from polydraft.core import DraftSampling, Request, SamplingParams, TreeShape
from polydraft.core import geometry as trees
from polydraft.methods import registry
from polydraft.testing import Grown, as_batch, by_position, enumerate_drafts
from polydraft.theory.bounds import best_block_efficiency
from studies.limits.contexts import LimitSettings, Pair
from studies.limits.paths import Paths
from studies.options import Out, Quick

TOP = 4
"""Tokens of each distribution. With 5 a step of three paths has 15,625 drafts, and a context takes a minute."""
V = TOP + 1
"""With the one for all that the head cannot draft."""
DEPTH = 2
NUM_PATHS = (3,)
TEMPERATURES = (0.6, 1.0)
SAMPLINGS = (
    DraftSampling.IID,
    DraftSampling.WITHOUT_REPLACEMENT,
    DraftSampling.SYSTEMATIC,
    DraftSampling.GREEDY_PLUS_ONE,
)
HEAD = (
    "head",
    "temperature",
    "context",
    "paths",
    "verifier",
    "draft_sampling",
    "published",
    "tokens",
    "optimum",
)
Tokens = tuple[int, ...]


class ContextRows:
    """A `testing.RowSource` of one context: the head's tokens behind a path are 0 .. TOP - 1 by falling probability, all others are TOP."""

    V = V

    def __init__(self, rows: Mapping[Tokens, tuple[np.ndarray, np.ndarray]]) -> None:
        self._rows = rows

    def row(self, name: str, path: Tokens) -> np.ndarray:
        """See `testing.RowSource`. Behind the last tokens, and behind one that is never drafted, nothing is asked but the target's next token."""
        known = self._rows.get(path)
        if known is None:
            return np.eye(self.V)[-1]
        return known[name == "q"]


def reduced(p: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Target and head row of TOP + 1 tokens, and which of the vocabulary the first ones are."""
    ids = [int(x) for x in np.argsort(-q, kind="stable")[:TOP] if q[x] > 0]
    spare = TOP - len(ids)
    target = np.concatenate([p[ids], np.zeros(spare), [0.0]])
    target[-1] = max(p.sum() - target.sum(), 0.0)
    draft = np.concatenate([q[ids], np.zeros(spare + 1)])
    return target / target.sum(), draft / draft.sum(), ids


def rows_of(paths: Paths, request: Request) -> ContextRows:
    """Rows at the root and behind each token that the head may draft there: as many distinct children as it has tokens are all of them."""
    drafter = paths.pair.drafter.sibling("without_replacement")
    draft = paths.draw(drafter, request, trees.product(TOP, *[1] * (DEPTH - 1)))
    assert draft.probs is not None
    p = paths.rows_at(paths.pair.target, request, draft.tree)[0].astype(np.float64)
    tokens, parents = (x[0] for x in draft.tree.host)
    q = {int(parents[n]): draft.probs[0, draft.rows[0, n]].astype(np.float64) for n in range(1, len(tokens)) if parents[n] >= 0}  # fmt: skip
    root_p, root_q, ids = reduced(p[0], q[0])
    rows: dict[Tokens, tuple[np.ndarray, np.ndarray]] = {(): (root_p, root_q)}
    for n in range(1, len(tokens)):
        if parents[n] == 0 and n in q and int(tokens[n]) in ids:
            rows[(ids.index(int(tokens[n])),)] = reduced(p[n], q[n])[:2]
    return ContextRows(rows)


@dataclass(frozen=True)
class Value:
    """Expected tokens of one verifier on one way of drafting, and the optimum of that way."""

    verifier: str
    sampling: DraftSampling
    tokens: float
    optimum: float

    @property
    def is_published(self) -> bool:
        """Whether it is another's."""
        return self.verifier not in ("flow", "greedy_traversal", "greedy_traversal_wor")


def values(rows: ContextRows, K: int) -> list[Value]:
    """Every lossless verifier on every way of drafting K paths."""
    found = list[Value]()
    tree = trees.paths(K, DEPTH)
    for sampling in SAMPLINGS:
        drafts = enumerate_drafts(rows, sampling, by_position(*tree), DEPTH)
        best = optimum(rows, drafts)
        for name in registry.names("verifier"):
            info = registry.verifier(name).info
            fits = sampling in info.draft_sampling and TreeShape.PATHS in info.shapes
            if info.lossless and not info.shared_noise and fits:
                found.append(Value(name, sampling, _tokens(rows, sampling, drafts, name), best))
    return found


def _tokens(rows: ContextRows, sampling: DraftSampling, drafts: Sequence[Grown], name: str) -> float:
    draft, p = as_batch(rows, sampling, TreeShape.PATHS, drafts)
    depth = np.maximum(trees.depths(draft.tree), 0)
    tokens = 1 + (registry.verifier(name)(draft, p).stop * depth).sum(1)
    return float(np.array([d.probability for d in drafts]) @ tokens)


def optimum(rows: ContextRows, drafts: Sequence[Grown]) -> float:
    """Of all lossless verifiers. Drafts of the same contexts are one: a verifier gains nothing from their order or copies, which the target does not see."""
    by_contexts = sorted((tuple(sorted(set(d.paths))), d.probability) for d in drafts)
    joined = [
        (sum(probability for _, probability in group), list(contexts))
        for contexts, group in groupby(by_contexts, key=lambda entry: entry[0])
    ]
    return best_block_efficiency(lambda path: rows.row("p", path), joined)


def contexts(pair: Pair, temperature: float, count: int) -> Iterator[ContextRows]:
    """Rows behind places in the texts."""
    paths = Paths(pair)
    params = SamplingParams(temperature=temperature, top_k=TOP)
    paths.params = params
    for index, context in enumerate(pair.contexts(count)):
        yield rows_of(paths, Request(str(index), context, params, 0, index))


def page(lines: Sequence[Sequence[Any]]) -> str:
    """Of each head, temperature and number of paths: the published verifier of most tokens, and what is left above it.

    lines: of gaps.csv, as numbers or as read.
    """
    groups = dict[tuple[str, str, int], list[Sequence[Any]]]()
    for line in lines:
        groups.setdefault((line[0], f"{float(line[1]):g}", int(line[3])), []).append(line)
    head = ["head", "T", "paths", "best published", "tokens", "best of ours", "optimum, same draws"]
    head += ["optimum, best draws of each context", "left, %", "at one context, at most, %"]
    return markdown_table(head, [[*map(str, key), *_cells(group)] for key, group in groups.items()]) + "\n"


def _cells(lines: Sequence[Sequence[Any]]) -> list[str]:
    tokens = dict[tuple[bool, str, str], list[float]]()
    optima = dict[str, dict[int, float]]()
    published = dict[int, float]()
    for _, _, context, _, name, drawn, is_published, value, best in lines:
        others = bool(int(is_published))
        tokens.setdefault((others, name, drawn), []).append(float(value))
        optima.setdefault(drawn, {})[int(context)] = float(best)
        if others:
            published[int(context)] = max(published.get(int(context), 0.0), float(value))
    means = {key: float(np.mean(values)) for key, values in tokens.items()}
    name, drawn = max((key for key in means if key[0]), key=lambda key: means[key])[1:]
    ours = max(value for key, value in means.items() if not key[0])
    best = {context: max(values[context] for values in optima.values()) for context in published}
    top = float(np.mean(list(best.values())))
    left = 100 * (top / means[True, name, drawn] - 1)
    most = max(100 * (best[context] / published[context] - 1) for context in published)
    same = float(np.mean(list(optima[drawn].values())))
    verifier = f"`{name}`, {drawn.lower().replace('_', ' ')}"
    return [
        verifier,
        *(f"{x:.3f}" for x in (means[True, name, drawn], ours, same, top)),
        f"{left:.1f}",
        f"{most:.1f}",
    ]


def main(
    model: Annotated[str, typer.Option(help="Target model.")],
    head: Annotated[list[Path], typer.Option(help="Folder of a head; may be repeated.")],
    text: Annotated[Path | None, typer.Option(help="UTF-8 text file.")] = None,
    num_contexts: Annotated[int, typer.Option("--contexts", min=1, help="Places in the texts.")] = 40,
    out: Out = Path("build/gaps"),
    quick: Quick = False,
) -> None:
    """Write gaps.csv, every verifier at every context, and gaps.md."""
    count = 2 if quick else num_contexts
    lines = list[list[Any]]()
    texts = None if text is None else [read_text("--text", text)]
    with bars("measuring") as step:
        for folder in head:
            pair = Pair(
                LimitSettings(contexts=max(count, 6), node_contexts=0),
                target=model,
                head=str(folder),
                texts=texts,
            )
            for temperature in TEMPERATURES:
                for index, rows in enumerate(contexts(pair, temperature, count)):
                    for K in NUM_PATHS:
                        lines += [_line(folder.name, temperature, index, K, v) for v in values(rows, K)]
                    step(len(head) * len(TEMPERATURES) * count)
    out.mkdir(parents=True, exist_ok=True)
    say_written(write_texts({out / "gaps.csv": csv_table(HEAD, lines), out / "gaps.md": page(lines)}))
    typer.echo(page(lines))


def _line(head: str, temperature: float, index: int, K: int, v: Value) -> list[Any]:
    start = [head, temperature, index, K, v.verifier, v.sampling.name, int(v.is_published)]
    return [*start, f"{v.tokens:.4f}", f"{v.optimum:.4f}"]


app = typer.Typer(pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
