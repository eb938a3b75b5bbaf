"""What verifiers take for granted, checked: a draft that follows its contract, and rows that are distributions.

check_draft   shapes and types, rows that exist, mass at every drawn token: a few microseconds, for every step
check_draft_probs    the rows of q that tokens were drawn from: read once, for what comes from outside and a request's first draft
check_target  the rows of p at every node: likewise

Compiled verifiers index rows unchecked, and a token that its row could not give would be accepted for certain.
"""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from array_api_compat import is_array_api_obj
from jaxtyping import Int

from polydraft.core import Draft, DraftSampling, TreeShape
from polydraft.core import geometry as tree
from polydraft.core.arrays import Array, host, is_on_host, namespace
from polydraft.errors import InvalidInputError
from polydraft.verifiers.walks.rows import compiled

SLACK = 0.01
"""How far a row's sum may be from 1: bfloat16 rounds every probability by up to 0.4%, and verifiers normalise."""

_DISTINCT = frozenset(
    {DraftSampling.WITHOUT_REPLACEMENT, DraftSampling.COUPLED, DraftSampling.GREEDY_PLUS_ONE}
)
_NO_PROBS = np.empty((0, 0, 0), np.float32)


class _DraftFault(IntEnum):
    """What may be wrong with a drafted node."""

    NONE = 0
    ROW = 1
    NO_ROW = 2
    MASS = 3
    TWICE = 4
    BRANCH = 5


@compiled
def _others_have_mass(q, tokens, parents, parent):
    """Whether q has mass outside the children of a node."""
    for x in range(q.size):
        if q[x] > 0.0:
            drawn = False
            for m in range(parent + 1, len(parents)):
                drawn = drawn or (parents[m] == parent and tokens[m] == x)
            if not drawn:
                return True
    return False


@compiled
def _fault(tokens, parents, rows, rowless, num_rows, has_probs, distinct, plus_one, chain, probs):
    """(fault, row, node): of `_DraftFault`, and where in the batch and in the tree."""
    for b in range(len(parents)):
        for n in range(parents.shape[1]):
            r = rows[b, n]
            u = parents[b, n]
            if r < -1 or r >= num_rows:
                return _DraftFault.ROW, b, n
            if u < 0 or rowless[b]:
                continue
            if has_probs and r < 0:
                return _DraftFault.NO_ROW, b, n
            if chain and u != n - 1:
                return _DraftFault.BRANCH, b, n
            if distinct:
                for m in range(u + 1, n):
                    if parents[b, m] == u and tokens[b, m] == tokens[b, n]:
                        return _DraftFault.TWICE, b, n
            if probs.size and not probs[b, r, tokens[b, n]] > 0.0:
                fixed = plus_one and probs[b, r, tokens[b, n]] == 0.0
                if not fixed or _others_have_mass(probs[b, r], tokens[b], parents[b], u):
                    return _DraftFault.MASS, b, n
    return _DraftFault.NONE, -1, -1


@compiled
def _not_a_distribution(x, used):
    """(row, node, token) of the first row in use that is no distribution, and its first faulty token, -1 where it is the sum; row -1 where all are."""
    for b in range(used.shape[0]):
        for n in range(used.shape[1]):
            if used[b, n]:
                s = 0.0
                faults = 0
                for t in range(x.shape[2]):
                    s += x[b, n, t]
                    faults += not x[b, n, t] >= 0.0
                if faults or not abs(s - 1.0) <= SLACK:
                    for t in range(x.shape[2]):
                        if not x[b, n, t] >= 0.0:
                            return b, n, t
                    return b, n, -1
    return -1, -1, -1


def _type_of(x: Array) -> str:
    """Name of the type of an array's numbers; "" of what is no array."""
    return str(getattr(x, "dtype", "")).rpartition(".")[2] if is_array_api_obj(x) else ""


def _said(x: Array) -> str:
    name = _type_of(x)
    return f"{name} of shape {tuple(x.shape)}" if name else type(x).__name__


def _check_integers(name: str, x: Array, shape: tuple[int, ...]) -> None:
    if _type_of(x) != "int64" or tuple(x.shape) != tuple(shape):
        raise InvalidInputError(f"{name}: {_said(x)} was given; expected int64 of shape {tuple(shape)}.")


def _check_floats(name: str, x: Array, shape: tuple[int | None, ...]) -> None:
    """None: any length."""
    has_gradients = getattr(x, "requires_grad", False)
    if _type_of(x) not in ("float32", "float64") or has_gradients:
        gradients = " with gradients" if has_gradients else ""
        raise InvalidInputError(
            f"{name}: {_said(x)}{gradients} was given; expected float32 or float64 without gradients. Use .float() and .detach()."
        )
    if len(x.shape) != len(shape) or any(
        n is not None and m != n for m, n in zip(x.shape, shape, strict=True)
    ):
        words = ", ".join("any" if n is None else str(n) for n in shape)
        raise InvalidInputError(f"{name}: {_said(x)} was given; expected shape ({words}).")


def check_draft(
    draft: Draft,
    vocab_size: int,
    roots: Int[Array, " B"] | None = None,
    greedy: Sequence[bool] | None = None,
) -> None:
    """Raise InvalidInputError unless the tree is one, every drawn token has a row and that row gives it mass.

    roots: the tokens that the trees have to hang on.  greedy: trees whose nodes may all be without a row, as a lossless verifier asks for none at
    temperature 0; by default no tree.  Rows on another device are not read: their walks notice a token without mass.

    Example:
        >>> from polydraft.core import TokenTree
        >>> chain = TokenTree.chain(np.array([[0, 1]]))
        >>> wrong = Draft(chain, DraftSampling.IID, TreeShape.CHAIN, np.array([[[0.5, 0.5]]]), np.array([[-1, 3]]))
        >>> check_draft(wrong, vocab_size=2)
        Traceback (most recent call last):
        polydraft.errors.InvalidInputError: draft.rows[0, 1] = 3 was given; ...
    """
    _check_tree(draft, vocab_size, roots)
    probs = draft.probs
    has_probs = draft.sampling is not DraftSampling.POINT_MASS
    num_rows = 0
    q = _NO_PROBS
    if has_probs and probs is not None:
        _check_floats("draft.probs", probs, (draft.tree.tokens.shape[0], None, vocab_size))
        num_rows = probs.shape[1]
        q = host(probs) if is_on_host(probs) else q
    rows = host(draft.rows)
    plus_one = draft.sampling is DraftSampling.GREEDY_PLUS_ONE
    is_distinct = draft.sampling in _DISTINCT
    is_chain = draft.shape is TreeShape.CHAIN
    rowless = np.zeros(len(rows), np.bool_)
    if greedy is not None:
        rowless = np.array(greedy, np.bool_) & (rows < 0).all(1)
    fault, b, n = _fault(
        *draft.tree.host, rows, rowless, num_rows, has_probs, is_distinct, plus_one, is_chain, q
    )
    if fault:
        raise InvalidInputError(_fault_text(draft, fault, b, n))


def _check_tree(draft: Draft, vocab_size: int, roots: Int[Array, " B"] | None) -> None:
    """Raise InvalidInputError unless the trees are some, on these roots, with rows and noise of their shape."""
    drafted = draft.tree
    shape = getattr(drafted.tokens, "shape", ())
    if len(shape) != 2 or 0 in shape:
        raise InvalidInputError(
            f"draft.tree.tokens: {_said(drafted.tokens)} was given; expected shape (B, N), at least the roots."
        )
    _check_integers("draft.tree.tokens", drafted.tokens, shape)
    _check_integers("draft.tree.parents", drafted.parents, shape)
    _check_integers("draft.rows", draft.rows, shape)
    if roots is not None and len(roots) != shape[0]:
        raise InvalidInputError(
            f"a draft of {shape[0]} trees was given; expected {len(roots)}, one for each sequence."
        )
    tree.check(drafted, vocab_size, roots)
    if draft.noise is not None:
        for name in ("seed", "sample", "position"):
            _check_integers(f"draft.noise.{name}", getattr(draft.noise, name), shape[:1])


def _fault_text(draft: Draft, fault: int, b: int, n: int) -> str:
    name = draft.sampling.name
    probs = draft.probs
    row = int(draft.rows[b, n])
    x = int(draft.tree.tokens[b, n])
    if fault == _DraftFault.TWICE:
        return f"draft.tree.tokens[{b}, {n}] = {x} was given twice below one node; children drawn with {name} are distinct. Draw them so, or say IID."
    if fault == _DraftFault.BRANCH:
        above = int(draft.tree.parents[b, n])
        return f"draft.tree.parents[{b}, {n}] = {above} was given in a draft of shape CHAIN; expected {n - 1}. Say the tree's own shape."
    if fault == _DraftFault.MASS and probs is not None:
        return (
            f"draft.probs[{b}, {row}, {x}] = {float(probs[b, row, x])} was given for token {x}, which node {n} was drawn as; "
            "expected a positive probability. Report the very rows that were sampled."
        )
    if draft.sampling is DraftSampling.POINT_MASS:
        return f"draft.rows[{b}, {n}] = {row} was given; expected -1 in a draft with draft sampling {name}, which has no q."
    if probs is None:
        return f"draft.probs = None was given for a draft with draft sampling {name}; expected the rows that its tokens were drawn from, [B, R, V]."
    first = 0 if int(draft.tree.parents[b, n]) >= 0 else -1
    return f"draft.rows[{b}, {n}] = {row} was given; expected {first} to {probs.shape[1] - 1}, a row of draft.probs."


def _check_rows(name: str, x: Array, used: np.ndarray) -> None:
    if not is_on_host(x):  # a bit for each row is read; the rows only where one is at fault
        xp = namespace(x)
        sums = xp.sum(x, axis=-1, dtype=xp.float64)
        is_row = xp.all(x >= 0, axis=-1) & (xp.abs(sums - 1.0) <= SLACK)
        if not (~host(is_row) & used).any():
            return
    rows = host(x)
    b, n, t = _not_a_distribution(rows, used)
    if b < 0:
        return
    if t >= 0:
        raise InvalidInputError(
            f"{name}[{b}, {n}, {t}] = {rows[b, n, t]} was given; expected a probability. Give softmax(logits), and look for NaN in them."
        )
    raise InvalidInputError(
        f"{name}[{b}, {n}] sums to {rows[b, n].sum(dtype=np.float64):.6g}; expected 1. Give softmax(logits) after sampling parameters."
    )


def check_draft_probs(draft: Draft) -> None:
    """Raise InvalidInputError unless every row of `draft.probs` that is drawn from is a distribution. The draft has passed `check_draft`.

    Example:
        >>> check_draft_probs(Draft.bare(np.array([5])))
    """
    if draft.probs is None or draft.sampling is DraftSampling.POINT_MASS:
        return
    used = np.zeros(draft.probs.shape[:2], np.bool_)
    rows = host(draft.rows)
    b, n = np.nonzero((draft.tree.host.parents >= 0) & (rows >= 0))
    used[b, rows[b, n]] = True
    _check_rows("draft.probs", draft.probs, used)


def check_target(draft: Draft, target_probs: Array) -> None:
    """Raise InvalidInputError unless there is a distribution for every node, [B, N, V]; padding may hold anything. The tree is known to be one.

    Example:
        >>> check_target(Draft.bare(np.array([0])), np.array([[[0.5, -0.5]]]))
        Traceback (most recent call last):
        polydraft.errors.InvalidInputError: target_probs[0, 0, 1] = -0.5 was given; ...
    """
    _check_floats("target_probs", target_probs, (*draft.tree.tokens.shape, None))
    nodes = host(draft.tree.is_node)
    _check_rows("target_probs", target_probs, nodes)


def check(draft: Draft, target_probs: Array) -> None:
    """All of it: what a verifier may be given by hand.

    Raises:
        InvalidInputError: naming the argument, the place and the value.
    """
    _check_floats("target_probs", target_probs, (None, None, None))
    check_draft(draft, target_probs.shape[2])
    check_draft_probs(draft)
    check_target(draft, target_probs)
