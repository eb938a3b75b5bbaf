"""Greedy decoding: what every lossless verifier comes to at temperature 0.

The target's distribution is a point mass on its largest logit, the lowest id among equals. Whatever was drafted and however, the walk
goes on while the largest logit's token is a child, and ends with the first that is not.
"""

import numpy as np
from jaxtyping import Float

from polydraft.core import Draft, NoiseKey, Outcome
from polydraft.core import geometry as tree
from polydraft.core.arrays import Array, host
from polydraft.numerics.threads import ROWS
from polydraft.sampling.truncation import largest
from polydraft.verifiers.walks.rows import compiled
from polydraft.verifiers.walks.steps import arrays, child, outcome


@compiled
def _walk(batch, first):
    node = batch.node
    token = batch.token
    for b in range(len(node)):
        n = 0
        following = 0
        while following >= 0:
            n = following
            token[b] = largest(batch.sync, batch.logits[b, n])
            following = child(first[b], batch.tokens[b], batch.parents[b], n, token[b])
        node[b] = n


def walk(
    draft: Draft, logits: Float[Array, "B N V"], key: NoiseKey, samplings: np.ndarray | None = None
) -> Outcome | None:
    """The outcome of any lossless verifier at temperature 0, whatever the samplings, looking at visited nodes alone; see `core.Walking`.

    Example:
        >>> from polydraft.core import NoiseKey, TokenTree
        >>> chain = Draft.bare(np.array([5]))
        >>> walk(chain, np.array([[[0.0, 2.0, 1.0]]], np.float32), NoiseKey.of([0], [0], [1])).token.tolist()
        [1]
    """
    batch = arrays(draft, logits, key)
    with ROWS:
        _walk(batch, host(tree.first_copies(draft.tree)))
    return outcome(batch)
