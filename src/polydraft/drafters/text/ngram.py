"""Prompt lookup: copy what followed the same words earlier in the text.

Saxena 2023 (prompt lookup decoding, no paper); Yang et al. 2023 (LLMA, arXiv 2304.04487).

The n-grams that end the text (n from `max_ngram` down to `min_ngram`) are looked up in an index that grows with the text: each
token adds one place to each n. The longest known suffix wins, then the latest place; further places open further paths, up to
the width, or lengthen a path that ended with the text, and all are merged into one tree by prefix.
Deterministic: there is no q, so drafts are POINT_MASS. A continuation may run into the suffix itself, never past the end.
"""

from collections.abc import Sequence

import numpy as np
from numba import njit

from polydraft.core import Budget, Draft, Method, Needs, Outcome, Request, Scores, SiblingLaw, TreeShape
from polydraft.drafters.base import Parts, Snapshot, emitted
from polydraft.drafters.grown_tree import GrownTree, add_node, end_ids, is_full, limits, new_cells, plant, point_mass, size_of
from polydraft.errors import InvalidInputError

__all__ = ["NgramDrafter", "NgramState"]

MOST_PLACES = 8
"""Places of an n-gram that are looked at."""
ROOM = 256
"""Tokens of a new index."""
KNOWN, SHORTEST, LONGEST = range(3)


class NgramState:
    """The text of one request and, for each n-gram, the places of the tokens that followed it.

    arrays: text [T] and, for the i-th length of n-grams, latest[i]: a table from an n-gram to its latest place (it is known by the
    text before that place), and before[i, place]: the place of the same n-gram before this one; 0 where there is none.
    Memory: for four lengths 52 to 104 bytes a token, as room is doubled.
    """

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._about = np.array([0, min_ngram, max_ngram], np.int64)
        self._text, self._before, self._latest = np.empty(0, np.int32), np.empty((0, 0), np.int32), np.empty((0, 0), np.int32)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self._text, self._before, self._latest, self._about

    @property
    def num_tokens(self) -> int:
        return int(self._about[KNOWN])

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in self.arrays)

    @property
    def tokens(self) -> list[int]:
        return self._text[: self.num_tokens].tolist()

    def extend(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append to the text and index it."""
        known = self.num_tokens
        if known + len(tokens) > len(self._text):
            room = max(ROOM, 1 << (known + len(tokens) - 1).bit_length())
            _, low, high = self._about.tolist()
            text = self._text[:known]
            self._text, self._before = np.empty(room, np.int32), np.empty((high - low + 1, room), np.int32)
            self._latest = np.zeros((high - low + 1, 2 * room), np.int32)
            self._about[KNOWN] = 0
            _extend(self.arrays, text)
        _extend(self.arrays, np.array(tokens, np.int32))

    def places(self) -> list[tuple[int, int]]:
        """(length, place) where a suffix of the text was followed before: longest suffix first, then the latest place."""
        _, low, high = self._about.tolist()
        found = np.empty((MOST_PLACES * (high - low + 1), 2), np.int64)
        return [(n, at) for n, at in found[: _places(self.arrays, found)].tolist()]


@njit(cache=True)
def _slot(text, latest, end, n):
    """Where the n-gram before `end` is in the table, or would be."""
    mixed = np.uint64(n)
    for k in range(end - n, end):
        mixed = (mixed ^ np.uint64(text[k])) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    slot = np.int64(mixed >> np.uint64(20)) & (len(latest) - 1)
    while latest[slot]:
        at, same = latest[slot], True
        for k in range(1, n + 1):
            if text[at - k] != text[end - k]:
                same = False
                break
        if same:
            break
        slot = (slot + 1) & (len(latest) - 1)
    return slot


@njit(cache=True)
def _extend(index, tokens):
    text, before, latest, about = index
    for token in tokens:
        at = about[KNOWN]
        for n in range(about[SHORTEST], min(about[LONGEST], at) + 1):
            i = n - about[SHORTEST]
            slot = _slot(text, latest[i], at, n)
            before[i, at], latest[i, slot] = latest[i, slot], at
        text[at] = token
        about[KNOWN] += 1


@njit(cache=True)
def _places(index, found):
    """Fill in (length, place); returns how many."""
    text, before, latest, about = index
    num, end = 0, about[KNOWN]
    for n in range(min(about[LONGEST], end), about[SHORTEST] - 1, -1):
        i = n - about[SHORTEST]
        at = latest[i, _slot(text, latest[i], end, n)]
        for _ in range(MOST_PLACES):
            if not at:
                break
            found[num, 0], found[num, 1] = n, at
            num += 1
            at = before[i, at]
    return num


@njit(cache=True)
def _grow(tree, index, max_nodes, max_depth, width):
    text, about = index[0], index[3]
    plant(tree, text[about[KNOWN] - 1], max_nodes, max_depth, width)
    found = np.empty((MOST_PLACES * (about[LONGEST] - about[SHORTEST] + 1), 2), np.int64)
    for f in range(_places(index, found)):
        if is_full(tree):
            break
        score, node = 1 - 0.6 ** found[f, 0], 0
        for at in range(found[f, 1], min(found[f, 1] + max_depth, about[KNOWN])):
            node = add_node(tree, node, np.int64(text[at]), score)
            if node < 0:
                break
    return size_of(tree)


class NgramDrafter:
    """Prompt lookup over prompt and output of each request alone.

    max_ngram, min_ngram: longest and shortest suffix to look up.  eos_token_ids: a draft ends at one.

    Raises:
        InvalidInputError: unless 1 <= min_ngram <= max_ngram.

    Example:
        >>> from polydraft.core import SamplingParams
        >>> drafter = NgramDrafter()
        >>> states = drafter.start([Request("r", (5, 6, 7, 8, 5, 6), SamplingParams(), seed=0)])
        >>> drafter.propose(states, [Budget.grown(3, 3)]).tree.tokens.tolist()
        [[6, 7, 8, 5]]
    """

    info = Method(
        name="ngram",
        title="Prompt lookup",
        authors="Saxena; Yang et al.",
        year=2023,
        arxiv="2304.04487",
        laws=frozenset({SiblingLaw.POINT_MASS}),
        shapes=frozenset({TreeShape.GROWN}),
    )
    methods = (info,)
    needs: Needs = Needs()

    def __init__(self, max_ngram: int = 4, min_ngram: int = 1, eos_token_ids: Sequence[int] = ()) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise InvalidInputError(
                f"min_ngram={min_ngram} and max_ngram={max_ngram} were given; expected 1 <= min_ngram <= max_ngram."
            )
        self.max_ngram, self.min_ngram, self._eos = max_ngram, min_ngram, end_ids(eos_token_ids)

    @classmethod
    def build(cls, parts: Parts, *, max_ngram: int = 4, min_ngram: int = 1) -> "NgramDrafter":
        """For the engine: end drafts at its end-of-sequence ids."""
        return cls(max_ngram, min_ngram, parts.eos_token_ids)

    def start(self, requests: Sequence[Request]) -> list[NgramState]:
        """Index the prompts."""
        return [self._started(request.prompt_token_ids) for request in requests]

    def _started(self, tokens: Sequence[int] | np.ndarray) -> NgramState:
        state = NgramState(self.min_ngram, self.max_ngram)
        state.extend(tokens)
        return state

    def release(self, states: Sequence[NgramState]) -> None:
        """Nothing to give back."""

    def grow(self, state: NgramState, budget: Budget) -> GrownTree:
        """Continuations merged by prefix; the first ones make the paths, later ones may lengthen them; scores grow with the match."""
        tree = new_cells(budget), self._eos
        return GrownTree.grown(tree, _grow(tree, state.arrays, *limits(budget)))

    def propose(self, states: Sequence[NgramState], budgets: Sequence[Budget]) -> Draft:
        """Continuations of the known suffixes, within each budget; an unknown suffix gives an empty row."""
        return point_mass([self.grow(state, budget) for state, budget in zip(states, budgets, strict=True)])

    def observe(self, states: Sequence[NgramState], outcome: Outcome, scores: Scores) -> list[NgramState]:
        """Index what was emitted."""
        for state, tokens in zip(states, emitted(outcome, scores.tree), strict=True):
            state.extend(tokens)
        return list(states)

    def snapshot(self, state: NgramState) -> Snapshot:
        """The text; its index is made again."""
        return {"tokens": np.array(state.tokens)}

    def restore(self, request: Request, snapshot: Snapshot) -> NgramState:
        """The state that drafts as the one of the snapshot; see `base.Resumable`."""
        return self._started(snapshot["tokens"])
