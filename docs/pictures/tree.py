"""Draw docs/pictures/tree.png: one step of the embedded pair, the draft tree and the verifier's verdict on it.

    PYTHONPATH=src python docs/pictures/tree.py [FILE]

Every number is computed here by the parts that the engine runs: three paths of three tokens from the draft model, one pass of
the target over the tree, then `verify`. The seed is fixed; the picture shows that step and no average.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np

from polydraft import Budget, Draft, Engine, Request, SamplingParams, TokenTree, verify
from polydraft.core import Verdict
from polydraft.core import geometry as tree
from polydraft.sampling.processing import distributions

PROMPT = "for i in range("
VERIFIER, PATHS, DEPTH, SEED = "traversal", 3, 3, 32


@dataclass(frozen=True)
class Step:
    """One draft tree, the target distribution at its nodes [1, N, V], and what the verifier says before any randomness."""

    draft: Draft
    target_probs: np.ndarray
    verdict: Verdict
    words: list[str]
    """The text of each node's token."""


def one_step() -> Step:
    """Draft, score, verify: the first three parts of a step."""
    engine = Engine.embedded(drafter="model", verifier=VERIFIER, depth=DEPTH, num_paths=PATHS)
    ids, params = engine.encode(PROMPT), SamplingParams(seed=SEED)
    drafter, target = engine.drafter, engine.target
    assert drafter is not None
    states = drafter.start([Request("picture", tuple(ids), params, SEED)])
    draft = drafter.propose(states, [Budget.fixed(tree.paths(PATHS, DEPTH))])
    target.prefill([0], [ids[:-1]])
    unique = tree.dedup(draft.tree)
    logits = unique.expand(target.score([0], unique.tree).logits)
    p = distributions(logits, draft.tree, [ids], [len(ids)], [params])
    words = [engine.tokenizer.decode([token]) for token in draft.tree.tokens[0].tolist()]
    return Step(draft, p, verify(VERIFIER, draft, p), words)


@dataclass(frozen=True)
class Contexts:
    """The distinct contexts of a tree: equal siblings are two draws and one context.

    parents: context -> the context above it (the root: -1).  draws: how often it was drawn.  Both go by node numbers of first copies.
    """

    parents: dict[int, int]
    draws: dict[int, int]

    @classmethod
    def of(cls, shape: TokenTree) -> "Contexts":
        first, parents = tree.first_copies(shape)[0].tolist(), shape.parents[0].tolist()
        above = {n: first[parents[n]] if n else -1 for n in sorted(set(first))}
        return cls(above, {n: first.count(n) for n in above})

    def children(self, n: int) -> list[int]:
        return [m for m, parent in self.parents.items() if parent == n]

    def reached(self, stop: list[float]) -> dict[int, float]:
        """P(context n is accepted) = P(the last accepted one is n, or lies below it)."""
        reach = {n: stop[n] for n in self.parents}
        for n in sorted(reach, reverse=True):
            if n:
                reach[self.parents[n]] += reach[n]
        return reach

    def heights(self) -> dict[int, float]:
        """Leaves stand one below the other in draw order, a parent in the middle of its children."""
        leaves = [n for n in self._below(0) if not self.children(n)]
        height = {n: -float(i) for i, n in enumerate(leaves)}
        for n in sorted(self.parents, reverse=True):
            kids = self.children(n)
            if kids:
                height[n] = sum(height[k] for k in kids) / len(kids)
        return height

    def _below(self, n: int) -> list[int]:
        return [n, *(m for k in self.children(n) for m in self._below(k))]


def draw(shown: Step, path: Path) -> None:
    """The tree from left to right: the wider an edge, the likelier its node is accepted; p, q and P(stop) away from the edge."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shape, stop = shown.draft.tree, shown.verdict.stop[0].tolist()
    contexts, depths = Contexts.of(shape), tree.depths(shape)[0].tolist()
    reach, height = contexts.reached(stop), contexts.heights()
    figure, axes = plt.subplots(figsize=(6.8, 6.2), layout="constrained")
    for n, parent in contexts.parents.items():
        x, y = depths[n], height[n]
        if n:
            width = 0.6 + 7 * reach[n]
            axes.plot(
                [depths[parent], x], [height[parent], y], color="tab:blue", lw=width, alpha=0.45, zorder=1
            )
        box = {
            "boxstyle": "round,pad=0.35",
            "facecolor": "white" if n else "#dbe9f6",
            "edgecolor": "tab:blue",
        }
        axes.text(
            x,
            y,
            repr(shown.words[n])[1:-1],
            family="monospace",
            size=15,
            ha="center",
            va="center",
            bbox=box,
            zorder=3,
        )
        above = n > 0 and y > height[parent]
        place, side = (y + 0.2, "bottom") if above else (y - 0.2, "top")
        axes.text(
            x,
            place,
            label(shown, n, contexts.draws[n]),
            size=12,
            ha="center",
            va=side,
            color="0.25",
            zorder=2,
        )
    tokens = 1 + sum(chance * depth for chance, depth in zip(stop, depths, strict=True))
    axes.set_title(
        f"{PATHS} paths after {PROMPT!r}, verified by {VERIFIER}:\n{tokens:.2f} tokens expected in this step",
        size=14,
    )
    axes.set_xlim(-0.45, DEPTH + 0.45)
    axes.set_ylim(min(height.values()) - 0.6, max(height.values()) + 0.6)
    axes.axis("off")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def label(shown: Step, n: int, draws: int) -> str:
    """What stands above or below a node."""
    stop = f"stop {float(shown.verdict.stop[0, n]):.2f}"
    if n == 0:
        return stop
    assert shown.draft.probs is not None
    token, parent, row = (
        int(x[0, n]) for x in (shown.draft.tree.tokens, shown.draft.tree.parents, shown.draft.rows)
    )
    p, q = float(shown.target_probs[0, parent, token]), float(shown.draft.probs[0, row, token])
    return f"p {p:.2g}  q {q:.2g}\n{stop}" + (f"\ndrawn {draws} times" if draws > 1 else "")


if __name__ == "__main__":
    draw(one_step(), Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".png"))
