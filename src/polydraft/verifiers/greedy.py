"""Greedy decoding: what every lossless rule comes to at temperature 0.

The target's distribution is a point mass on its largest logit, the lowest id among equals. Whatever was drafted and however, the walk
goes on while the largest logit's token is a child, and ends with the first that is not.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from polydraft import tree
from polydraft.core import Draft, NoiseKey, Outcome
from polydraft.params import SamplingParams
from polydraft.truncation import first_place, highest
from polydraft.verifiers.walks.rounds import arrays, child, outcome
from polydraft.verifiers.walks.rows import compiled


@compiled
def _largest(x: np.ndarray) -> int:
    """argmax, the lowest id among equals; -1 where there is no finite largest number or a NaN."""
    top, faults = highest(x), 0
    for i in range(x.size):
        faults += x[i] != x[i]
    return first_place(x, top) if not faults and -np.inf < top < np.inf else -1


@compiled
def _walk(sync, logits, draft_probs, first, tokens, parents, seed, sample, position, node, token):
    for b in range(len(node)):
        n, following = 0, 0
        while following >= 0:
            n = following
            token[b] = _largest(logits[b, n])
            following = child(first[b], tokens[b], parents[b], n, token[b])
        node[b] = n


@compiled
def _keep_largest(x, rows):
    for b in rows:
        for n in range(x.shape[1]):
            largest = _largest(x[b, n])
            if largest >= 0:
                logit = x[b, n, largest]
                x[b, n] = -np.inf
                x[b, n, largest] = logit


def harden(logits: Float[Tensor, "B N V"], params: Sequence[SamplingParams]) -> Float[Tensor, "B N V"]:
    """Processed logits whose softmax is the distribution at temperature 0 too: only the largest stays. Faulty rows stay faulty.

    logits: float32, on the host.

    Example:
        >>> harden(torch.tensor([[[1.0, 3.0, 2.0]]]), [SamplingParams(temperature=0)]).tolist()
        [[[-inf, 3.0, -inf]]]
    """
    rows = [b for b, row in enumerate(params) if row.greedy]
    hard = logits.clone(memory_format=torch.contiguous_format)
    _keep_largest(hard.numpy(), np.array(rows))
    return hard


def walk(draft: Draft, logits: Float[Tensor, "B N V"], key: NoiseKey) -> Outcome | None:
    """The outcome of any lossless rule at temperature 0, looking at visited nodes alone; None where logits are faulty.

    logits: float32, processed but for the temperature.

    Example:
        >>> from polydraft.core import NoiseKey, TokenTree
        >>> chain = Draft.empty(torch.tensor([5]))
        >>> walk(chain, torch.tensor([[[0.0, 2.0, 1.0]]]), NoiseKey.of([0], [0], [1])).token.tolist()
        [1]
    """
    done = arrays(draft, logits, key)
    _walk(*done._replace(draft_probs=done.logits[:, :0], rows=tree.first_copies(draft.tree).numpy()))
    return outcome(draft, done)
