"""What the token before a drafted one adds to its logits, where places of one forward pass know none of each other: a product of low rank.

DeepSeek-AI 2026 (DeepSpec's DSpark). At a place with state h behind the norm, w = W1[token before]; W2 has a row for each draft token:

    vanilla    W2 w
    gated      W2 (sigmoid(G [h; w] + g) w)
    rnn        W2 tanh(o), with gate, c, o = J [s; w; h] + j; then s = sigmoid(gate) s + (1 - sigmoid(gate)) tanh(c), from s = 0 at the first place

So a distribution depends on no drafted token, on the one before it, or on all of its path; each is computed from the path of its own node. An `rnn` whose
first place drafts nothing runs through it with the last committed token: at the first drafted place its state is not zero.

The confidence that a drafted token is accepted, if all before it are, is a logit of [h; w], or of h alone: a function of what is before the token.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from polydraft.numerics.compiled_code import njit
from polydraft.numerics.exponential import exp
from polydraft.numerics.floats import as_float32


class Kind(IntEnum):
    """See the module."""

    NONE = 0
    VANILLA = 1
    GATED = 2
    RNN = 3


KINDS = tuple(kind.name.lower() for kind in Kind)
"""As configurations name them."""
COLUMNS = 512
"""Draft tokens whose logits are summed at once."""
W1 = "markov_head.markov_w1.weight"
W2 = "markov_head.markov_w2.weight"


class Markov(NamedTuple):
    """kind: of `Kind`.  words: [V, r] W1.  rows: [r, D] W2 transposed.  by_word, by_state: [m, r] of G or J.  by_place: [m, h] likewise, and
    shift [m].  placed: [slots, K, m] what the places' states say.  begin: [slots, r] the rnn's state at the first drafted place.
    sure_word: [r or 0].  sure_place: [h or 0], and sure_shift.  sure: [slots, K] what the places' states say of confidence.
    """

    kind: int
    words: np.ndarray
    rows: np.ndarray
    by_word: np.ndarray
    by_state: np.ndarray
    by_place: np.ndarray
    shift: np.ndarray
    placed: np.ndarray
    begin: np.ndarray
    sure_word: np.ndarray
    sure_place: np.ndarray
    sure_shift: np.ndarray
    sure: np.ndarray


def markov_shapes(
    kind: str, rank: int, h: int, vocab_size: int, num_drafts: int
) -> dict[str, tuple[int, ...]]:
    """Of the tensors of a head of this kind."""
    if kind == "none":
        return {}
    parts = {"gated": ("gate_proj", rank, h + rank), "rnn": ("joint_proj", 3 * rank, h + 2 * rank)}
    shapes: dict[str, tuple[int, ...]] = {W1: (vocab_size, rank), W2: (num_drafts, rank)}
    if kind in parts:
        name, out, width = parts[kind]
        shapes |= {f"markov_head.{name}.weight": (out, width), f"markov_head.{name}.bias": (out,)}
    return shapes


def markov(
    tensors: Mapping[str, np.ndarray],
    kind: str,
    slots: int,
    places: int,
    num_drafts: int,
    *,
    sure_of_word: bool = False,
) -> Markov:
    """Of a head's tensors; "none" has no bias, and without tensors for it there is no confidence. places: that draft.  sure_of_word: confidence
    reads W1, too."""

    def array(name: str, *shape: int) -> np.ndarray:
        return (
            np.ascontiguousarray(as_float32(tensors[name]))
            if name in tensors
            else np.zeros(shape, np.float32)
        )

    words = array(W1, 0, 0)
    rank = words.shape[1]
    by_word = by_state = by_place = np.zeros((0, rank), np.float32)
    shift = np.zeros(0, np.float32)
    if kind == "gated":  # [h; w]
        by_place, by_word = np.split(array("markov_head.gate_proj.weight"), [-rank], 1)
        shift = array("markov_head.gate_proj.bias")
    if kind == "rnn":  # [s; w; h]
        by_state, by_word, by_place = np.split(array("markov_head.joint_proj.weight"), [rank, 2 * rank], 1)
        shift = array("markov_head.joint_proj.bias")
    sure = array("confidence_head.proj.weight", 1, 0)[0]
    split = len(sure) - rank if sure_of_word and len(sure) else len(sure)
    return Markov(
        kind=KINDS.index(kind),
        words=words,
        rows=array(W2, 0, 0)[:num_drafts].T.copy(),
        by_word=by_word.copy(),
        by_state=by_state.copy(),
        by_place=by_place.copy(),
        shift=shift,
        placed=np.zeros((slots, places, len(shift)), np.float32),
        begin=np.zeros((slots, rank), np.float32),
        sure_word=sure[split:].copy(),
        sure_place=sure[:split].copy(),
        sure_shift=array("confidence_head.proj.bias", 1),
        sure=np.zeros((slots, places), np.float32),
    )


def place(
    arrays: Markov, slots: list[int], states: Float[np.ndarray, "B X h"], roots: Int[np.ndarray, " B"]
) -> None:
    """Take note of the states behind the norm of a block's places. More places than draft: the first drafts nothing."""
    K = arrays.placed.shape[1]
    drafting = states[:, -K:]
    if len(arrays.sure_place):
        arrays.sure[slots] = drafting @ arrays.sure_place + arrays.sure_shift
    if arrays.kind in (Kind.GATED, Kind.RNN):
        arrays.placed[slots] = drafting @ arrays.by_place.T + arrays.shift
    if arrays.kind == Kind.RNN:
        arrays.begin[slots] = 0.0
        if states.shape[1] > K:
            r = arrays.begin.shape[1]
            joint = states[:, 0] @ arrays.by_place.T + arrays.shift + arrays.words[roots] @ arrays.by_word.T
            arrays.begin[slots] = (1.0 - 1.0 / (1.0 + np.exp(-joint[:, :r]))) * np.tanh(joint[:, r : 2 * r])


@njit(cache=True, error_model="numpy")
def _tanh(x):
    return np.float32(1.0) - np.float32(2.0) / (exp(np.float32(2.0) * x) + np.float32(1.0))


@njit(cache=True, error_model="numpy")
def _add_product(matrix, x, out):
    """out += matrix x."""
    for i in range(len(matrix)):
        total = np.float32(0.0)
        for j in range(matrix.shape[1]):
            total += matrix[i, j] * x[j]
        out[i] += total


@njit(cache=True, error_model="numpy", nogil=True)
def bias_vectors(markov, slot, tokens, parents, n, depth, out):
    """What W2 is multiplied by behind node n of a tree. tokens, parents: of the tree's nodes, node 0 the last committed token."""
    r = markov.words.shape[1]
    if markov.kind == Kind.VANILLA:
        for i in range(r):
            out[i] = markov.words[tokens[n], i]
        return
    joint = np.empty(markov.placed.shape[2], np.float32)
    state = np.empty(r, np.float32)
    path = np.empty(depth + 1, np.int64)
    m = n
    for d in range(depth, -1, -1):
        path[d], m = tokens[m], parents[m]
    for i in range(r):
        state[i] = markov.begin[slot, i]
    for d in range(depth if markov.kind == Kind.GATED else 0, depth + 1):
        word = markov.words[path[d]]
        for i in range(len(joint)):
            joint[i] = markov.placed[slot, d, i]
        _add_product(markov.by_word, word, joint)
        if markov.kind == Kind.GATED:
            for i in range(r):
                out[i] = word[i] / (np.float32(1.0) + exp(-joint[i]))
            return
        _add_product(markov.by_state, state, joint)
        for i in range(r):
            share = np.float32(1.0) / (np.float32(1.0) + exp(-joint[i]))
            out[i] = _tanh(joint[2 * r + i])
            state[i] = share * state[i] + (np.float32(1.0) - share) * _tanh(joint[r + i])


@njit(cache=True, error_model="numpy", nogil=True)
def add_bias(rows, vectors, logits, count):
    """logits[t] += W2 vectors[t], so many of them, some columns of all at a time."""
    r, D = rows.shape
    for begin in range(0, D, COLUMNS):
        end = min(begin + COLUMNS, D)
        for t in range(count):
            for i in range(r):
                share = vectors[t, i]
                for d in range(begin, end):
                    logits[t, d] += share * rows[i, d]


def confidence_logits(
    arrays: Markov, slots: list[int], tokens: Int[np.ndarray, "B N"], parents: Int[np.ndarray, "B N"]
) -> Float[np.ndarray, "B N"] | None:
    """Logits that each node of a tree is accepted if its parent is, from what is before it; of a root infinity. None without such a head."""
    if not len(arrays.sure_place):
        return None
    depth = np.zeros(parents.shape, np.int64)
    rows = np.arange(len(parents))
    for n in range(1, parents.shape[1]):
        depth[:, n] = depth[rows, np.maximum(parents[:, n], 0)] + 1
    before = np.take_along_axis(tokens, np.maximum(parents, 0), 1)
    logits = arrays.sure[np.array(slots)[:, None], np.clip(depth - 1, 0, arrays.sure.shape[1] - 1)]
    if len(arrays.sure_word):
        logits = logits + arrays.words[before] @ arrays.sure_word
    return np.where(parents >= 0, logits, np.inf)
