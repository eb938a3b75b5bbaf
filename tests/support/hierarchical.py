"""Hierarchical speculative decoding as its authors' code does it, and with its last acceptance capped. Exact: every way that it may stop is summed.

Zhou et al. 2026 (arXiv 2601.05724), `transformers/generation/utils.py` of github.com/ZhouYuxuanYX/Hierarchical-Speculative-Decoding. A path's
position j has R_j, the product of p/q of its tokens before, and M_j = max(1, R_0 .. R_j):

    w_j = R_j / M_j      S_j = sum (w_j p_j - q_j)+      looked at from the end, it stops at j with S_j / (S_j + 1 - w_j)

which are block verification's weights: w_j = min(1, w_{j-1} p/q), written as a running maximum. At the end the code takes min(1, R_L), not w_L.
A further path is tried where it shares the accepted tokens: what was left of p there is its first row, and R goes on from before.
"""

import numpy as np
from torch import Tensor

from polydraft.core import Draft, Verdict
from polydraft.verifiers.lift.verdict import TreeVerdict


class _Emission:
    """Probabilities of [node, next token], summed over all ways to stop. paths: nodes of each drafted path, in draw order."""

    def __init__(self, draft: Draft, p: np.ndarray, b: int, capped: bool) -> None:
        parents = draft.tree.parents[b].tolist()
        self.tokens = draft.tree.tokens[b].tolist()
        assert draft.probs is not None
        self.q = draft.probs[b].astype(np.float64)
        self.rows = draft.rows[b].tolist()
        self.p = p
        self.capped = capped
        self.paths = []
        for leaf in (n for n in range(1, len(parents)) if n not in parents and parents[n] >= 0):
            nodes = [leaf]
            while nodes[0] > 0:
                nodes.insert(0, parents[nodes[0]])
            self.paths.append(nodes)
        self.mass = np.zeros_like(p)
        self.verify(0, self.paths[0], 0, p[0], 1.0, 1.0)

    def verify(self, k: int, path: list[int], n: int, rest: np.ndarray, ratio: float, chance: float) -> None:
        """n tokens of a path are accepted, and `rest` follows; path k comes next. ratio: R there."""

        def accepted(nodes: list[int]) -> list[int]:
            return [self.tokens[v] for v in nodes[1 : n + 1]]

        while k < len(self.paths) and accepted(self.paths[k]) != accepted(path):
            k += 1
        if k == len(self.paths) or chance == 0:
            self.mass[path[n]] += chance * rest
            return
        path = self.paths[k]
        length = len(self.paths[k]) - 1
        R = [ratio]
        M = [max(1.0, ratio)]
        stops = []
        left = []
        for j in range(n, length):
            p = rest if j == n else self.p[path[j]]
            q = self.q[self.rows[path[j + 1]]]
            x = self.tokens[path[j + 1]]
            surplus = np.maximum(R[-1] / M[-1] * p - q, 0)
            w = R[-1] / M[-1]
            S = surplus.sum()
            stops.append(S / max(S, S + 1 - w) if S > 0 else 0.0)
            left.append(surplus / S if S > 0 else p)
            R.append(R[-1] * p[x] / q[x])
            M.append(max(M[-1], R[-1]))
        whole = R[-1] / M[-1] if self.capped else min(1.0, R[-1] / ratio if ratio > 0 else 0.0)
        self.mass[path[length]] += chance * whole * self.p[path[length]]
        chance *= 1 - whole
        for j in range(len(stops) - 1, -1, -1):
            here = chance if j == 0 else chance * stops[j]
            self.verify(k + 1, path, n + j, left[j], R[j], here)
            chance -= here


def hierarchical(draft: Draft, target_probs: Tensor, *, capped: bool = False) -> Verdict:
    """capped: the last acceptance is w_L. Of iid paths; a draft without nodes is an empty one."""
    p = target_probs.astype(np.float64)
    if draft.tree.num_nodes == 1 or draft.probs is None:
        return TreeVerdict(draft.tree, np.ones_like(p[..., 0]), lambda node: p[np.arange(len(p)), node])
    mass = np.stack([_Emission(draft, p[b], b, capped).mass for b in range(len(p))])
    stop = mass.sum(-1)
    return TreeVerdict(draft.tree, stop, lambda node: (mass / stop[..., None])[np.arange(len(p)), node])
