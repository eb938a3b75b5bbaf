"""Acceptance of each rule at one node in closed form, or by an exact recursion: the mass that it emits on drafted tokens.

Sources: the file of each rule under `polydraft.verifiers`. p, q: float64 distributions [V]; n draws.
"""

import numpy as np
import torch

from polydraft.verifiers.kseq import solved


def single(p: np.ndarray, q: np.ndarray) -> float:
    """Speculative sampling of one draw: sum min(p, q).

    Example:
        >>> round(single(np.array([0.5, 0.5]), np.array([0.9, 0.1])), 4)
        0.6
    """
    return float(np.minimum(p, q).sum())


def target_sample(p: np.ndarray, q: np.ndarray, n: int) -> float:
    """Sampling the target and looking whether the token was drafted, n iid draws: sum p (1 - (1 - q)^n)."""
    return float((p * (1 - (1 - q) ** n)).sum())


def single_with_spares(p: np.ndarray, q: np.ndarray, n: int) -> float:
    """One test, n - 1 iid spares: sum min(p, q) + sum (p - q)+ (1 - (1 - q)^(n-1))."""
    return single(p, q) + float((np.maximum(p - q, 0) * (1 - (1 - q) ** (n - 1))).sum())


def recursive(p: np.ndarray, q: np.ndarray, n: int) -> float:
    """Recursive rejection of n iid draws: 1 - prod_i (1 - sum min(r_i, q)), r_{i+1} = N((r_i - q)+).

    Example:
        >>> round(recursive(np.array([0.5, 0.5]), np.array([0.9, 0.1]), 2), 4)
        0.64
    """
    r = p
    miss = 1.0
    for _ in range(n):
        miss *= max(0.0, 1 - float(np.minimum(r, q).sum()))
        remaining = np.maximum(r - q, 0)
        if remaining.sum() == 0:
            return 1.0
        r = remaining / remaining.sum()
    return 1 - miss


def kseq(p: np.ndarray, q: np.ndarray, n: int) -> tuple[float, float]:
    """(divisor rho, acceptance) of K-SEQ with n iid draws.

    Example:
        >>> rho, alpha = kseq(np.array([0.5, 0.5]), np.array([0.9, 0.1]), 2)
        >>> round(rho, 4), round(alpha, 4)
        (1.5844, 0.6584)
    """
    rho, _, alpha = solved(
        torch.from_numpy(p)[None].double(), torch.from_numpy(q)[None].double(), torch.tensor([n])
    )[0].tolist()
    return rho, alpha
