"""Expected tokens per step: exactly where a rule goes down token by token, else by sampling drafts and integrating the rule.

tables   children of different tokens, rows by the last one: f_d(x) = sum_y a(y | x) (1 + f_(d+1)(y)),  E[tokens] = 1 + f_0(root)
sampled  E[tokens] = mean over drafts of 1 + sum_n stop(n) depth(n); only drafts are random, so errors are small
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from polydraft.core import Draft, Verdict
from polydraft.core import geometry as tree
from polydraft.core.arrays import host
from polydraft.errors import InvalidInputError


@dataclass(frozen=True)
class Estimate:
    """mean, and its standard error; both in tokens per step, or as a ratio where it says so."""

    mean: float
    standard_error: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.standard_error:.3f}"

    def to_dict(self, name: str, error: str = "standard_error") -> dict[str, float]:
        """Plain data under these names."""
        return {name: self.mean, error: self.standard_error}


def expected_tokens(draft: Draft, verdict: Verdict) -> Float[np.ndarray, " B"]:
    """E[accepted] + 1 of each row of a batch, given its draft.

    Example:
        >>> from polydraft import verify
        >>> p = np.array([[[0.5, 0.5]]])
        >>> draft = Draft.bare(np.array([0]))
        >>> expected_tokens(draft, verify("match", draft, p)).tolist()
        [1.0]
    """
    depth = np.maximum(host(tree.depths(draft.tree)), 0)
    return 1 + (host(verdict.stop) * depth).sum(1)


def estimate(values: np.ndarray) -> Estimate:
    """Mean and standard error of independent values.

    Raises:
        InvalidInputError: fewer than two values.

    Example:
        >>> str(estimate(np.array([1.0, 2.0, 3.0])))
        '2.000 ± 0.577'
    """
    if len(values) < 2:
        raise InvalidInputError(
            f"{len(values)} values were given; expected at least two, for a standard error."
        )
    return Estimate(float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values))))


def paired(ours: np.ndarray, theirs: np.ndarray) -> Estimate:
    """mean(ours) / mean(theirs), values paired by the context that both were measured in; error by linearisation.

    Example:
        >>> paired(np.array([2.0, 4.0]), np.array([1.0, 2.0]))
        Estimate(mean=2.0, standard_error=0.0)
    """
    ratio = float(np.mean(ours) / np.mean(theirs))
    return Estimate(ratio, estimate(ours - ratio * theirs).standard_error / float(np.mean(theirs)))
