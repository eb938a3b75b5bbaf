"""The draws at each context of a tree, in draw order; merged: equal siblings once.

A repeated draw of q, given that it is new, follows q without the tokens drawn before it. So distinct tokens in the order of
their first appearance are draws without replacement, whether they came with replacement, without, or until they differ: a
verifier for draws without replacement is exact for them. It accepts a little less than one that also uses how often a token
was drawn.
Trap: merged draws tried against q itself (total variation 0.01 to 0.1).
"""

import torch
from jaxtyping import Int
from torch import Tensor

from polydraft.core import TokenTree
from polydraft.core import geometry as tree


def without_repeats(tokens: Int[Tensor, "*M n"]) -> Int[Tensor, "*M n"]:
    """The draws with every repetition replaced by -1.

    Example:
        >>> without_repeats(torch.tensor([[4, 4, 2, 4]])).tolist()
        [[4, -1, 2, -1]]
    """
    same = tokens[..., :, None] == tokens[..., None, :]
    return torch.where(same.tril(-1).any(-1), -1, tokens)


def draws_at(drafted: TokenTree, merged: bool = False) -> Int[Tensor, "B N W"]:
    """Nodes drawn at each context, padded with -1; copies of a context pool theirs, which stand at the first copy.

    Example:
        >>> twice = tree.pad([([5, 7, 7, 9], [-1, 0, 0, 0])])
        >>> draws_at(twice)[0, 0].tolist(), draws_at(twice, merged=True)[0, 0].tolist()
        ([1, 2, 3], [1, 3, -1])
    """
    nodes = tree.children(drafted)
    if not merged:
        return nodes
    tokens = drafted.tokens.gather(1, nodes.clamp(min=0).flatten(1)).view_as(nodes)
    nodes = torch.where(without_repeats(tokens.where(nodes >= 0, -1)) >= 0, nodes, -1)
    return nodes.gather(2, (nodes < 0).int().argsort(dim=2, stable=True))
