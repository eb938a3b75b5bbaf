"""Importance selection by linear programme: of two drafts pick the one by optimal weights; more drafts play a tournament.

Khisti et al. 2024 (arXiv 2410.18234), also for drafts of different models.

    w_ij   probability to pick i of {i, j}      m_ij = a_i b_j + a_j b_i      a, b  laws of the two drafts
    q_I(i) = a_i b_i + sum_{j != i} w_ij m_ij
    maximise sum z_i,  z_i <= p_i,  z_i <= q_I(i),  0 <= w_ij = 1 - w_ji <= 1

    truncated    w is free among the first s tokens by p - a b only; elsewhere the earlier one in this order wins
    tournament   the winner of the first two, whose law is q_I, against the third draft, and so on

With s >= V and two drafts it attains the optimum. Lossless whatever the programme returns: its w is used as it is, and q_I is
computed from that w. Each stage picks its first or its second draft always where that overlaps more with p.
Cost: a linear programme with s(s+1)/2 unknowns for each stage and context, a few ms; for offline use.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.optimize import linprog
from scipy.sparse import coo_array
from torch import Tensor

from polydraft.core import Method, SiblingLaw, TreeShape
from polydraft.verifiers.token.selection import emitted_by
from polydraft.verifiers.tree.topdown import TopDown

__all__ = ["Pair", "emitted", "importance", "select_pair"]

FREE_TOKENS = 8


@dataclass(frozen=True)
class Pair:
    """Weights for one pair of drafts.

    law: [V] q_I.  rank: [V] place of each token; the lower place wins.  free: [s, s] w among the first s places.
    """

    law: np.ndarray
    rank: np.ndarray
    free: np.ndarray

    def first_wins(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        """w_ij of tokens i (first draft) and j (second); 1 where they are equal."""
        a, b, s = self.rank[i], self.rank[j], len(self.free)
        among = (a < s) & (b < s)
        return np.where(i == j, 1.0, np.where(among, self.free[np.where(among, a, 0), np.where(among, b, 0)], a < b))


@lru_cache(maxsize=64)
def _programme(s: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(i, j, rows, columns): the pairs i < j, and the places of their entries in  z_i - sum_j w_ij m_ij <= base_i."""
    i, j = np.triu_indices(s, 1)
    rows = np.concatenate([np.arange(s), i, j])
    columns = np.concatenate([np.arange(s), s + np.arange(len(i)), s + np.arange(len(i))])
    return i, j, rows, columns


def select_pair(p: np.ndarray, a: np.ndarray, b: np.ndarray, free_tokens: int = FREE_TOKENS) -> Pair:
    """The best weights for a draft from a and one from b; laws [V].

    Example:
        >>> p, q = np.array([0.5, 0.5]), np.array([0.9, 0.1])
        >>> found = select_pair(p, q, q)  # the optimum for two drafts is 0.69
        >>> round(float(np.minimum(p, found.law).sum()), 6)
        0.69
    """
    order = np.argsort(b * a - p, kind="stable")
    rank = np.argsort(order, kind="stable")
    pa, A, B = p[order], a[order], b[order]
    s = min(free_tokens, len(p))
    later_a, later_b = (np.append(x[::-1].cumsum()[::-1][1:], 0.0) for x in (A, B))
    law = A * B + A * later_b + B * later_a
    outside_a, outside_b = A[s:].sum(), B[s:].sum()
    base = A[:s] * B[:s] + A[:s] * outside_b + B[:s] * outside_a
    i, j, rows, columns = _programme(s)
    m = A[i] * B[j] + A[j] * B[i]
    # w = probability that i wins: z_i <= base_i + sum_j w m, and z_j <= base_j + sum_i (1 - w) m
    bound = base.copy()
    np.add.at(bound, j, m)
    values = np.concatenate([np.ones(s), -m, m])
    entries = coo_array((values, (rows, columns)), shape=(s, s + len(m))).tocsr()
    cost = np.concatenate([-np.ones(s), np.zeros(len(m))])
    limits = [*((0.0, x) for x in pa[:s]), *[(0.0, 1.0)] * len(m)]
    w = np.clip(linprog(cost, A_ub=entries, b_ub=bound, bounds=limits).x[s:], 0.0, 1.0)
    free = np.eye(s)
    free[i, j], free[j, i] = w, 1.0 - w
    law[:s] = base
    np.add.at(law, i, w * m)
    np.add.at(law, j, (1.0 - w) * m)
    found = np.empty_like(law)
    found[order] = law
    always = np.ones((1, 1))
    best = max((np.minimum(p, x).sum(), -k) for k, x in enumerate((found, a, b)))[1]
    if best == 0:
        return Pair(found, rank, free)
    return _Always(a if best == -1 else b, rank, always, first=best == -1)


@dataclass(frozen=True)
class _Always(Pair):
    """One of the two drafts, whatever they are."""

    first: bool = True

    def first_wins(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        return np.full(i.shape, float(self.first))


def _picks(p: np.ndarray, q: np.ndarray, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(q_I [V], pi [D, n]) for equal tables p [V], q [n, V] and several draws [D, n]."""
    law, pi = q[0], np.zeros(draws.shape)
    pi[:, 0] = 1.0
    for k in range(1, draws.shape[1]):
        pair = select_pair(p, law, q[k])
        stays = np.stack([pair.first_wins(draws[:, c], draws[:, k]) for c in range(k)], 1)
        pi[:, k] = (pi[:, :k] * (1 - stays)).sum(1)
        pi[:, :k] *= stays
        law = pair.law
    return law, pi


def emitted(
    p: Float[Tensor, "M V"], q: Float[Tensor, "M V"] | Float[Tensor, "M n V"] | None, draws: Int[Tensor, "M n"]
) -> Float[Tensor, "M V"]:
    """Law of the emitted token given the draws; -1 = no draw. q: one law a context, or one a draw.

    Example:
        >>> p = torch.tensor([[0.25, 0.75]], dtype=torch.float64)
        >>> emitted(p, p, torch.tensor([[0, 1]]))[0].sum().item()
        1.0
    """
    assert q is not None
    every = q if q.ndim == 3 else q[:, None].expand(-1, draws.shape[1], -1)
    count = (draws >= 0).sum(1)
    tables = torch.cat(
        [p[:, None], torch.where((draws >= 0)[..., None], every, 0.0), count[:, None, None].expand_as(p[:, None])], 1
    )
    _, group = tables.flatten(1).unique(dim=0, return_inverse=True)
    picked, pi = torch.zeros_like(p), torch.zeros_like(draws, dtype=p.dtype)
    for g in range(int(group.max()) + 1):
        at = (group == g).nonzero()[:, 0]
        n = int(count[at[0]])
        law, weights = _picks(p[at[0]].cpu().numpy(), every[at[0], :n].cpu().numpy(), draws[at, :n].cpu().numpy())
        picked[at] = torch.from_numpy(law).to(p.device)
        pi[at[:, None], torch.arange(n, device=at.device)] = torch.from_numpy(weights).to(p.device)
    return emitted_by(p, picked, pi, draws)


importance = TopDown(
    Method(
        name="importance",
        title="Importance selection, truncated linear programme",
        authors="Khisti et al.",
        year=2024,
        arxiv="2410.18234",
        laws=frozenset({SiblingLaw.IID, SiblingLaw.INDEPENDENT}),
        shapes=frozenset(TreeShape),
    ),
    emitted,
)
"""The verifier."""
