"""Recursive rejection of merged siblings: equal draws count once, each against q without the tokens before it.

A repeated draw of q, given that it is new, follows q without the tokens drawn before: so distinct tokens in the order of
their first appearance are draws without replacement, whether they came with replacement, without, or until they differ
(specification, section 3: "merged, with the update of draws without replacement"). Acceptance is a little lower than that of
`recursive` for iid draws, which also uses how often a token was drawn.

Lossless for iid draws and for draws without replacement.
Trap: merging with q itself in every test is biased (total variation 0.01 to 0.1).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.core import Method, SiblingLaw, TreeShape
from polydraft.verifiers import recursive
from polydraft.verifiers.lift.per_node import PerNode

__all__ = ["emitted", "recursive_merged", "without_repeats"]


def without_repeats(draws: Int[Tensor, "M n"]) -> Int[Tensor, "M n"]:
    """The draws with every repetition replaced by -1.

    Example:
        >>> without_repeats(torch.tensor([[4, 4, 2, 4]])).tolist()
        [[4, -1, 2, -1]]
    """
    same = draws[:, :, None] == draws[:, None, :]
    return torch.where(same.tril(-1).any(2), -1, draws)


def emitted(p: Float[Tensor, "M V"], q: Float[Tensor, "M V"] | None, draws: Int[Tensor, "M n"]) -> Float[Tensor, "M V"]:
    """Law of the emitted token given the draws; -1 = no draw."""
    return recursive.emitted(p, q, without_repeats(draws), replacement=False)


recursive_merged = PerNode(
    Method(
        name="recursive_merged",
        title="Recursive rejection, equal siblings merged",
        authors="Jeon et al.; Chen et al.",
        year=2024,
        arxiv="2402.14160",
        laws=frozenset({SiblingLaw.IID, SiblingLaw.WITHOUT_REPLACEMENT}),
        shapes=frozenset(TreeShape),
    ),
    emitted,
)
"""The verifier."""
