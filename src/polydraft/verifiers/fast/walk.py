"""What the fused walks share: a round's verification as one compiled call, from processed logits to an outcome.

A rule with a method `walk(draft, logits, key)` decides just as its verdict for p = softmax(logits) does, on the same noise,
without making the distributions: every row is read once for its normaliser, draws are gathered, and a residual is made only where
the walk stopped. Equal to the verdict up to rounding.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from torch import Tensor

from polydraft import tree
from polydraft.core import Draft, NoiseKey, Outcome
from polydraft.noise import Stream, choose_row, uniform_at
from polydraft.verifiers.fast.rows import compiled

STOP, EXTRA = int(Stream.STOP), int(Stream.EXTRA)


@compiled
def drawn(row: np.ndarray, seed: int, sample: int, position: int, stream: int) -> int:
    """Draw 0 of a stream from a row."""
    return choose_row(row, uniform_at(seed, sample, position, stream, 0))


@compiled
def child(first: np.ndarray, tokens: np.ndarray, parents: np.ndarray, node: int, pick: int) -> int:
    """The first drafted child of a context that holds the pick; -1 if none does."""
    for m in range(node + 1, len(parents)):
        if parents[m] >= 0 and first[parents[m]] == node and tokens[m] == pick:
            return first[m]
    return -1


class Arrays(NamedTuple):
    """A batch in plain arrays, as compiled walks take it; `node` and `token` are theirs to fill, -1 at faulty logits."""

    logits: np.ndarray
    draft_probs: np.ndarray
    rows: np.ndarray
    tokens: np.ndarray
    parents: np.ndarray
    seed: np.ndarray
    sample: np.ndarray
    position: np.ndarray
    node: np.ndarray
    token: np.ndarray


def arrays(draft: Draft, logits: Float[Tensor, "B N V"], key: NoiseKey) -> Arrays:
    """The arrays of a round."""
    x = logits.contiguous().numpy()
    draft_probs = x[:, :0] if draft.probs is None else draft.probs.contiguous().numpy()
    node, token = np.empty((2, len(x)), np.int64)
    return Arrays(x, draft_probs, draft.rows.contiguous().numpy(), *draft.tree.host, *key.host, node, token)


def outcome(draft: Draft, done: Arrays) -> Outcome | None:
    """What the walk found; None where logits were faulty: the readable path then names the fault."""
    if min(done.node.tolist()) < 0 or min(done.token.tolist()) < 0:
        return None
    return Outcome.of(*tree.paths_to(done.parents, done.node), done.token)
