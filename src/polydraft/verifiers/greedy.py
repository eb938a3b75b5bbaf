"""Greedy decoding: what every lossless rule comes to at temperature 0.

The target's law is a point mass on its largest logit, the lowest id among equals. Whatever was drafted and however, the walk
goes on while the largest logit's token is a child, and ends with the first that is not.
"""

import numpy as np
from jaxtyping import Float
from torch import Tensor

from polydraft import tree
from polydraft.core import Draft, NoiseKey, Outcome
from polydraft.verifiers import _device
from polydraft.verifiers._rows import compiled
from polydraft.verifiers._walk import arrays, highest, outcome

__all__ = ["walk"]

_SPAN = 64


@compiled
def _largest(x: np.ndarray) -> int:
    """argmax, the lowest id among equals; -1 where there is no finite largest number or a NaN."""
    top, faults = highest(x), 0
    for i in range(x.size):
        faults += x[i] != x[i]
    if faults or not -np.inf < top < np.inf:
        return -1
    for start in range(0, x.size, _SPAN):
        found = 0
        for i in range(start, min(start + _SPAN, x.size)):
            found += x[i] == top
        if found:
            for i in range(start, x.size):
                if x[i] == top:
                    return i
    return -1


@compiled
def _walk(logits, laws, first, tokens, parents, seed, sample, position, node, token):
    for b in range(len(node)):
        n, following = 0, 0
        while following >= 0:
            n = following
            token[b] = _largest(logits[b, n])
            following = -1
            for m in range(n + 1, parents.shape[1]):
                if parents[b, m] >= 0 and first[b, parents[b, m]] == n and tokens[b, m] == token[b]:
                    following = first[b, m]
                    break
        node[b] = n


def walk(draft: Draft, logits: Float[Tensor, "B N V"], key: NoiseKey) -> Outcome | None:
    """The outcome of any lossless rule at temperature 0, looking at visited nodes alone; None where logits are faulty.

    logits: float32, processed but for the temperature.

    Example:
        >>> import torch
        >>> from polydraft.core import NoiseKey, TokenTree
        >>> chain = Draft.empty(torch.tensor([5]))
        >>> walk(chain, torch.tensor([[[0.0, 2.0, 1.0]]]), NoiseKey.of([0], [0], [1])).token.tolist()
        [1]
    """
    if logits.device.type != "cpu":
        return _device.walk(_device.greedy, draft, logits, key)
    done = arrays(draft, logits, key)
    _walk(*done._replace(laws=done.logits[:, :0], rows=tree.first_copies(draft.tree).numpy()))
    return outcome(draft, done)
