"""Typical acceptance (not lossless): keep a drafted token that the target finds likely enough, whatever the draft's law.

Cai et al. 2024 (Medusa, arXiv 2401.10774).

    x is kept iff p(x) > min(eps, delta exp(-H(p)))      H  entropy in nats      usual eps 0.09, delta 0.3
    the longest path of kept tokens is accepted (equal lengths: the largest sum of log p), then one token of p follows

The output follows the draft's law wherever that is accepted: `output_law` says how far from p. A one-hot p gives exact matching.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft import tree
from polydraft.core import Draft, Method, SiblingLaw, TreeShape
from polydraft.verifiers._residual import normalise
from polydraft.verifiers._verdict import TreeVerdict

__all__ = ["Typical", "kept", "output_law", "typical"]

EPS, DELTA = 0.09, 0.3


def kept(p: Float[Tensor, "*M V"], eps: float = EPS, delta: float = DELTA) -> Float[Tensor, "*M V"]:
    """1 for the tokens that are kept, 0 for the others.

    Example:
        >>> kept(torch.tensor([0.9, 0.1, 0.0])).tolist()
        [1.0, 1.0, 0.0]
    """
    entropy = torch.special.entr(p).sum(-1, keepdim=True)
    return (p > (delta * (-entropy).exp()).clamp(max=eps)).to(p.dtype)


def output_law(
    p: Float[Tensor, "*M V"], q: Float[Tensor, "*M V"], eps: float = EPS, delta: float = DELTA
) -> Float[Tensor, "*M V"]:
    """Law of the next token for one draft from q: what is kept of q, and p for the rest.

    Example:
        >>> output_law(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0])).tolist()
        [1.0, 0.0]
    """
    taken = q * kept(p, eps, delta)
    return taken + (1 - taken.sum(-1, keepdim=True)) * p


@dataclass(frozen=True)
class Typical:
    """The verifier, with its two thresholds."""

    info: Method
    eps: float = EPS
    delta: float = DELTA

    def __call__(self, draft: Draft, target_probs: Float[Tensor, "B N V"]) -> TreeVerdict:
        p = normalise(target_probs.double())
        parents, tokens = draft.tree.parents, draft.tree.tokens
        first = tree.first_copies(draft.tree)
        above = first.gather(1, parents.clamp(min=0))
        own = p.gather(1, above[..., None].expand(-1, -1, p.shape[-1])).gather(2, tokens[..., None])[..., 0]
        likely = kept(p, self.eps, self.delta).gather(1, above[..., None].expand(-1, -1, p.shape[-1]))
        good = likely.gather(2, tokens[..., None])[..., 0] > 0
        end = _deepest(parents.cpu().numpy(), first.cpu().numpy(), good.cpu().numpy(), own.clamp(min=1e-300).log().cpu().numpy())
        node = torch.from_numpy(end).to(p.device)
        stop = torch.zeros_like(p[..., 0]).scatter_(1, node[:, None], 1.0)
        rows = torch.arange(len(p), device=p.device)
        return TreeVerdict(draft.tree, stop, lambda at: p[rows, at])


def _deepest(parents: np.ndarray, first: np.ndarray, good: np.ndarray, logs: np.ndarray) -> Int[np.ndarray, "B"]:
    """The node at the end of the longest path of good tokens."""
    ends = np.zeros(len(parents), np.int64)
    for b in range(len(parents)):
        reached = {0: (0, 0.0)}
        for n in range(1, parents.shape[1]):
            parent = first[b, parents[b, n]] if parents[b, n] >= 0 else -1
            if parent in reached and good[b, n] and first[b, n] == n:
                depth, score = reached[parent]
                reached[n] = (depth + 1, score + float(logs[b, n]))
        ends[b] = max(reached, key=lambda n: (*reached[n], -n))
    return ends


typical = Typical(
    Method(
        name="typical",
        title="Typical acceptance",
        authors="Cai et al.",
        year=2024,
        arxiv="2401.10774",
        laws=frozenset(SiblingLaw),
        shapes=frozenset(TreeShape),
        lossless=False,
    )
)
"""The verifier."""
