"""SuffixDecoding: the text of this request, and those of earlier outputs, say what followed the longest match.

"SuffixDecoding: extreme speculative decoding for emerging AI applications", 2024 (arXiv 2411.04975, NeurIPS 2025).

    m      length of a match: the last m tokens of the text, found in texts      D  depth: longest string that is looked up
    n(s)   occurrences of the string s in the texts                              C  score: expected accepted tokens

1. The paper's suffix trees are suffix arrays here: a node is the interval of its string, its count the interval's length.
2. For each m, from the place of the match, nodes are taken best first by the product of n(sc)/n(s) * |s|/(|s| + 1), while it is
   at least `min_prob`, and no more than factor * m + offset of them: long matches earn long drafts. Matches that leave less than
   the budget's depth below D are not used (unless m <= D/2), as drafts end there; nor those that occur where the longer one does.
3. C is the sum of these products. The best C over all m and both sources drafts; the request's own text wins ties. What shorter
   matches would draft fills the nodes that are left.

Appending a token touches only the ends of the text that occurred before (at most D of them): see `suffix_array`. Their intervals
are also the matches of every length, so nothing is searched.
Beyond the paper: the factor |s|/(|s| + 1), s the match and the path, says that short matches often fail; and step 3's filling.
Lossless: a draft is a function of the committed text and of finished requests. n(sc)/n(s) is a score, never a q: POINT_MASS.
Trap: a shared store shows one request's text in another's drafts and so in its timing; there is none unless one is given.
"""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polydraft.core import Budget, Offers, Request
from polydraft.drafters.base import Parts
from polydraft.drafters.grown_tree import (
    GrownTree,
    copy_onto,
    copy_tree,
    is_full,
    limits,
    new_tree,
    new_trial,
    num_paths,
    plant,
)
from polydraft.drafters.text import index_file
from polydraft.drafters.text.base import TextDrafter, text_method
from polydraft.drafters.text.growing_text import GrowingText, Tokens, check_depth
from polydraft.drafters.text.suffix_array import (
    NO_SEPARATOR,
    NO_TABLE,
    count,
    draft,
    matches_in,
    matches_of,
    merge,
    new_candidates,
    occurrences,
    suffixes,
)
from polydraft.drafters.text.text_index import TextIndex
from polydraft.errors import InvalidInputError
from polydraft.numerics.compiled_code import njit


class SuffixStore:
    """Finished outputs for the drafts of later requests; the oldest leave first. May be used by several threads at a time.

    max_tokens: most tokens held.  depth: longest string that is counted.
    made_with: vocabulary size and tokenizer of the file it was loaded from.  Memory: 8 bytes a token; a new text is read once.

    Raises:
        InvalidInputError: depth outside 2 .. 1024, max_tokens below 1 or above 2^30.

    Example:
        >>> store = SuffixStore(max_tokens=8)
        >>> for text in ([1, 2, 3, 4], [1, 2, 5], [7, 7]):
        ...     store.add(text)
        >>> store.count([1, 2]), store.num_tokens
        (1, 5)
    """

    def __init__(self, max_tokens: int = 1_000_000, depth: int = 64) -> None:
        check_depth(depth)
        if not 1 <= max_tokens <= 1 << 30:
            raise InvalidInputError(f"max_tokens={max_tokens} was given; expected 1 to 2^30.")
        self.max_tokens = max_tokens
        self.depth = depth
        self.lock = threading.RLock()
        self.made_with: tuple[int, str] | None = None
        self._hold(np.empty(0, np.int32), np.empty(0, np.uint32))

    def _hold(self, text: np.ndarray, order: np.ndarray) -> None:
        """Let later drafts read these texts; those that run go on with the arrays that they have."""
        self.arrays = suffixes(text, order, NO_TABLE, self.depth, NO_SEPARATOR)

    def _cut(self, text: np.ndarray) -> int:
        """How much of texts one after the other is to leave, for the others to be no longer than the bound."""
        text_ends = np.append(0, np.flatnonzero(text == NO_SEPARATOR) + 1)
        return text_ends[
            np.argmax(len(text) - text_ends - np.arange(len(text_ends))[::-1] <= self.max_tokens)
        ].item()

    def add(self, tokens: Tokens) -> None:
        """Put in a finished text, and the oldest ones out as far as needed; of a text beyond `max_tokens` the end stays.

        Raises:
            InvalidInputError: negative ids.
        """
        new = GrowingText(self.depth)
        new.extend([*tokens[-self.max_tokens :], NO_SEPARATOR])  # behind which no end is pending
        with self.lock:
            text = self.arrays.text
            order = self.arrays.order
            others = new.arrays.order[: new.num_tokens] + np.uint32(len(text))
            text = np.append(text, new.tokens)
            cut = self._cut(text)
            self._hold(text[cut:], merge(text, order, others, cut, self.depth))

    def texts(self) -> list[np.ndarray]:
        """The finished texts, oldest first."""
        text = self.arrays.text
        return [part[:-1] for part in np.split(text, np.flatnonzero(text == NO_SEPARATOR) + 1)[:-1]]

    def count(self, tokens: Tokens) -> int:
        """Occurrences of a string of at most `depth` tokens."""
        return count(self.arrays, np.asarray(tokens, np.int32))

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.texts()))

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in self.arrays)

    def save(self, path: str | Path, vocab_size: int, tokens_of: str = "") -> None:
        """Write the texts as an index, which the drafters of a corpus read too; see `TextIndex`."""
        TextIndex.of(self.texts(), vocab_size, tokens_of).save(path)

    @classmethod
    def load(cls, path: str | Path, max_tokens: int = 1_000_000, depth: int = 64) -> "SuffixStore":
        """The texts of an index, the last ones as far as they fit.

        Raises:
            InvalidInputError: what `index_file.load` refuses.
        """
        index = TextIndex.load(path)
        store = cls(max_tokens, depth)
        text = index.tokens.astype(np.int32)
        text[text == index.vocab_size] = NO_SEPARATOR
        cut = store._cut(text)
        store._hold(text[cut:], merge(text, index.order, index.order[:0], cut, depth))
        store.made_with = index.vocab_size, index.tokens_of
        return store


class Reach(NamedTuple):
    """How far a match is followed: `factor * m + offset` nodes after m tokens, each with probability `min_prob` or more."""

    factor: float
    offset: float
    min_prob: float


class SuffixDrafter(TextDrafter[GrowingText]):
    """SuffixDecoding over a request's own text and, if one is given, a store of earlier outputs.

    store: shared by all requests; a request's output enters it when the request is finished.
    depth: of the request's text.  factor, offset: most drafted tokens after a match of m are factor * m + offset.
    min_prob: minimum estimate of a node's path.  eos_token_ids: nothing is drafted behind one.

    Raises:
        InvalidInputError: a parameter out of its range.

    Example:
        >>> from polydraft.core import SamplingParams
        >>> drafter = SuffixDrafter()
        >>> states = drafter.start([Request("r", (5, 6, 7, 8, 5, 6), SamplingParams(), seed=0)])
        >>> drafter.propose(states, [Budget.grown(3, 3)]).tree.tokens.tolist()
        [[6, 7, 8, 5]]
    """

    info = text_method("suffix", "SuffixDecoding", "2411.04975")
    store_class = SuffixStore

    def __init__(
        self,
        store: SuffixStore | None = None,
        *,
        depth: int = 64,
        factor: float = 4.0,
        offset: float = 8.0,
        min_prob: float = 0.05,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        if not 0 < min_prob <= 1 or min(factor, offset) < 0 or factor + offset < 1:
            raise InvalidInputError(
                f"factor={factor}, offset={offset} and min_prob={min_prob} were given; expected factor and offset >= 0, "
                "factor + offset >= 1 and 0 < min_prob <= 1."
            )
        check_depth(depth)
        super().__init__(eos_token_ids)
        self.store = store
        self.depth = depth
        self._reach = Reach(float(factor), float(offset), float(min_prob))

    @classmethod
    def build(cls, parts: Parts, **options: Any) -> "SuffixDrafter":
        """For the engine: end drafts at its end-of-sequence ids; options as the constructor.

        Raises:
            IncompatibleError: a store that was saved with another tokenizer.
        """
        index_file.check_store(
            "the suffix store", options.get("store"), parts.target.vocab_size, parts.tokenizer
        )
        return super().build(parts, **options)

    @property
    def offers(self) -> Offers:
        """See `core.Drafter`."""
        return Offers(learn_output=self.learn_output)

    def begin(self, request: Request, tokens: Tokens) -> GrowingText:
        """Sort the text."""
        text = GrowingText(self.depth)
        text.extend(tokens)
        return text

    def learn_output(self, token_ids: Sequence[int]) -> None:
        """Put a finished output in the shared store, if there is one."""
        if self.store is not None:
            self.store.add(token_ids)

    def continuations(self, state: GrowingText, budget: Budget) -> GrownTree:
        """The better draft of both sources, with the estimates n(sc)/n(s) * |s|/(|s| + 1) as scores."""
        tree = new_tree(budget, self._eos)
        store = None if self.store is None else self.store.arrays
        _grow(tree, state.arrays, store, self._reach, limits(budget))
        return GrownTree(tree)


@njit(cache=True)
def _grow(tree, own, store, reach, limits):
    """Grow the better draft: that of the request's own text, or of the store's, if there is one."""
    plant(tree, own.text[own.about[0].length - 1], limits)
    if is_full(tree):
        return
    best_draft = new_trial(tree)
    trial = new_trial(tree)
    candidates = new_candidates(limits)
    index = own
    matches = matches_of(own)
    best, score = _best_match(best_draft, trial, own, matches, reach, limits, candidates, 0.0)
    if store is not None:
        others = matches_in(store, own)
        m, score = _best_match(best_draft, trial, store, others, reach, limits, candidates, score)
        if m:
            index = store
            matches = others
            best = m
    if best:
        copy_onto(tree, best_draft)
    for m in range(best - 1, 0, -1):
        if is_full(tree) or (num_paths(tree) == limits.width and m < best // 2):
            break
        if _is_new(index, matches, m):
            _draft(trial, index, matches, m, reach, limits, candidates)
            copy_onto(tree, trial)


@njit(cache=True)
def _best_match(best_draft, trial, index, matches, reach, limits, candidates, score):
    """(m, score) of the match that promises most, and more than `score`, and its draft; 0 if there is none."""
    longest = index.about[0].depth
    ahead = min(limits.max_nodes, limits.max_depth)
    best = 0
    most = min(len(matches), max(longest - ahead, longest // 2))
    for m in range(most, 0, -1):
        bound = 0.0
        for k in range(1, min(ahead, _most(m, reach)) + 1):
            bound += m / (m + k)  # trust in the match, were all that follows certain
        if score > bound + 1e-9:
            break  # shorter matches promise less
        if m == most or _is_new(index, matches, m):
            promised = _draft(trial, index, matches, m, reach, limits, candidates)
            if promised > score:
                best = m
                score = promised
                copy_tree(best_draft, trial)
    return best, score


@njit(cache=True)
def _is_new(index, matches, m):
    """Whether a match occurs where the one a token longer does not: else the same follows, in which there is less trust."""
    match = matches[m - 1]
    longer = matches[m]
    return occurrences(index, match.low, match.high, m + 1) > occurrences(
        index, longer.low, longer.high, m + 2
    )


@njit(cache=True)
def _most(m, reach):
    """Most nodes of a draft from a match of m tokens."""
    return int(reach.factor * m + reach.offset)


@njit(cache=True)
def _draft(trial, index, matches, m, reach, limits, candidates):
    """Draft from a match of m tokens; returns the sum of the nodes' path probabilities."""
    match = matches[m - 1]
    return draft(
        trial, index, match.low, match.high, m, (_most(m, reach), 1.0, reach.min_prob), limits, candidates
    )
