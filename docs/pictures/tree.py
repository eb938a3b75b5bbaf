"""Draw docs/pictures/tree.png: one round of the embedded pair, the drafted tree and the rule's verdict on it.

    PYTHONPATH=src python docs/pictures/tree.py [FILE]

Every number is computed here by the parts that the engine runs: three paths of three tokens from the draft model, one pass of
the target over the tree, then `verify`. The seed is fixed; the picture shows that round and no average.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import torch

from polydraft import Budget, Draft, Engine, Request, SamplingParams, TokenTree, tree, verify
from polydraft.core import Verdict
from polydraft.sampling import laws

PROMPT = "def add(a, b):\n    return"
RULE, PATHS, DEPTH, SEED = "greedy_traversal", 3, 3, 7


@dataclass(frozen=True)
class Round:
    """One drafted tree, the target's law at its nodes [1, N, V], and what the rule says before any randomness."""

    draft: Draft
    target_probs: torch.Tensor
    verdict: Verdict
    words: list[str]
    """The text of each node's token."""


def one_round() -> Round:
    """Draft, score, verify: the first three steps of a round."""
    engine = Engine.embedded(drafter="model", verifier=RULE, depth=DEPTH, num_paths=PATHS)
    ids, params = engine.encode(PROMPT), SamplingParams(seed=SEED)
    drafter, target = engine.drafter, engine.target
    assert drafter is not None
    states = drafter.start([Request("picture", tuple(ids), params, SEED)])
    draft = drafter.propose(states, [Budget(PATHS * DEPTH, DEPTH, PATHS)])
    target.prefill([0], [ids[:-1]])
    unique = tree.dedup(draft.tree)
    logits = unique.expand(target.score([0], unique.tree).logits)
    p = laws(logits, draft.tree, [ids], [len(ids)], [params])
    words = [engine.tokenizer.decode([token]) for token in draft.tree.tokens[0].tolist()]
    return Round(draft, p, verify(RULE, draft, p), words)


def reached(shape: TokenTree, stop: torch.Tensor) -> list[float]:
    """P(node n is kept) = P(the last kept node is n or below it); copies of a context share theirs."""
    first = tree.first_copies(shape)[0].tolist()
    reach, parents = [0.0] * len(first), shape.parents[0].tolist()
    for n in range(len(first) - 1, -1, -1):
        reach[first[n]] += float(stop[0, n])
    for n in range(len(first) - 1, 0, -1):
        if first[n] == n:
            reach[first[parents[n]]] += reach[n]
    return [reach[n] for n in first]


def places(shape: TokenTree) -> list[tuple[float, float]]:
    """(depth, height) of each node; leaves stand in draw order, a parent in the middle of its children."""
    parents = shape.parents[0].tolist()
    kids = [[n for n, parent in enumerate(parents) if parent == m] for m in range(len(parents))]
    leaves = [n for n in _in_order(kids, 0) if not kids[n]]
    height = {n: -float(i) for i, n in enumerate(leaves)}
    for n in range(len(parents) - 1, -1, -1):
        if kids[n]:
            height[n] = sum(height[k] for k in kids[n]) / len(kids[n])
    return [(float(d), height[n]) for n, d in enumerate(tree.depths(shape)[0].tolist())]


def _in_order(kids: list[list[int]], n: int) -> list[int]:
    return [n, *(m for k in kids[n] for m in _in_order(kids, k))]


def draw(shown: Round, path: Path) -> None:
    """The tree from left to right: the wider an edge, the likelier is its node kept; below a token p, q and P(stop)."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shape, stop = shown.draft.tree, shown.verdict.stop
    parents, rows = shape.parents[0].tolist(), shown.draft.rows[0].tolist()
    reach, at = reached(shape, stop), places(shape)
    assert shown.draft.probs is not None
    figure, axes = plt.subplots(figsize=(10, 4.6), layout="constrained")
    for n, (x, y) in enumerate(at):
        told = f"stop {float(stop[0, n]):.2f}"
        if n > 0:
            token = int(shape.tokens[0, n])
            p, q = float(shown.target_probs[0, parents[n], token]), float(shown.draft.probs[0, rows[n], token])
            told = f"p {p:.2f}   q {q:.2f}   {told}"
            axes.plot([at[parents[n]][0], x], [at[parents[n]][1], y], color="tab:blue", lw=0.6 + 7 * reach[n], alpha=0.45, zorder=1)
        colour = "#dbe9f6" if n == 0 else "white"
        box = {"boxstyle": "round,pad=0.35", "facecolor": colour, "edgecolor": "tab:blue"}
        axes.text(x, y, repr(shown.words[n])[1:-1], family="monospace", size=11, ha="center", va="center", bbox=box, zorder=3)
        axes.text(x, y - 0.27, told, size=8, ha="center", va="center", color="0.25", zorder=3)
    tokens = 1 + float((stop * tree.depths(shape)).sum())
    axes.set_title(f"{PATHS} paths drafted after {PROMPT!r}, verified by {RULE}: {tokens:.2f} tokens expected from this pass", size=10)
    axes.set_xlim(-0.5, DEPTH + 0.5)
    axes.set_ylim(min(y for _, y in at) - 0.55, max(y for _, y in at) + 0.4)
    axes.axis("off")
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    draw(one_round(), Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".png"))
