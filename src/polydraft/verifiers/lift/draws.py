"""The draws at each context of a tree, in draw order; merged: equal siblings once.

A repeated draw of q, given that it is new, follows q without the tokens drawn before it. So distinct tokens in the order of
their first appearance are draws without replacement, whether they came with replacement, without, or until they differ: a
verifier for draws without replacement is exact for them. It accepts a little less than one that also uses how often a token
was drawn.
Trap: merged draws tried against q itself (total variation 0.01 to 0.1).
"""

import numpy as np
from jaxtyping import Int

from polydraft.core import TokenTree
from polydraft.core import geometry as tree
from polydraft.core.arrays import Array, host, namespace


def without_repeats(tokens: Int[Array, "*M n"]) -> Int[Array, "*M n"]:
    """The draws with every repetition replaced by -1.

    Example:
        >>> without_repeats(np.array([[4, 4, 2, 4]])).tolist()
        [[4, -1, 2, -1]]
    """
    xp = namespace(tokens)
    same = tokens[..., :, None] == tokens[..., None, :]
    is_repeated = xp.any(xp.tril(xp.astype(same, xp.int8), k=-1) > 0, axis=-1)
    return xp.where(is_repeated, -1, tokens)


def draws_at(drafted: TokenTree, merged: bool = False) -> Int[np.ndarray, "B N W"]:
    """Nodes drawn at each context, padded with -1; copies of a context pool theirs, which stand at the first copy.

    Example:
        >>> twice = tree.pad([([5, 7, 7, 9], [-1, 0, 0, 0])])
        >>> draws_at(twice)[0, 0].tolist(), draws_at(twice, merged=True)[0, 0].tolist()
        ([1, 2, 3], [1, 3, -1])
    """
    nodes = host(tree.children(drafted))
    if not merged:
        return nodes
    batch = np.arange(len(nodes))[:, None, None]
    tokens = drafted.host.tokens[batch, np.maximum(nodes, 0)]
    is_new = without_repeats(np.where(nodes >= 0, tokens, -1)) >= 0
    nodes = np.where(is_new, nodes, -1)
    return np.take_along_axis(nodes, np.argsort(nodes < 0, axis=2, kind="stable"), 2)
