"""SuffixDecoding: a suffix tree of this request, and one of earlier outputs, say what followed the longest match.

"SuffixDecoding: extreme speculative decoding for emerging AI applications", 2024 (arXiv 2411.04975, NeurIPS 2025).

    m      length of a match: the last m tokens of the text, found in a tree      D  depth of the trees
    n(s)   occurrences of the string s in the tree                               C  score: expected accepted tokens

1. A tree holds every substring of at most D tokens of its texts, paths compressed, with the number of its occurrences.
2. For each m, from the place of the match, nodes are taken best first by the product of n(sc)/n(s) * |s|/(|s| + 1), while it is
   at least `min_prob`, and no more than factor * m + offset of them: long matches earn long drafts. Matches that leave less than
   the budget's depth below D are not used (unless m <= D/2): they are cut by the tree, and shorter ones are in it whole.
3. C is the sum of these products. The best C over all m and both trees drafts; the request's own tree wins ties. What shorter
   matches would draft fills the nodes that are left.

Appending a token touches only the places of the suffixes that occurred before (at most D of them): a suffix that is new becomes
a leaf whose edge grows with the text by itself. These places are also the matches of every length, so nothing is searched.
Beyond the paper: the factor |s|/(|s| + 1), s the match and the path, says that short matches often fail; and step 3's filling.
Lossless: the tree is a function of the committed text and of finished requests. n(sc)/n(s) is a score, never a q: POINT_MASS.
Trap: a shared tree shows one request's text in another's drafts and so in its timing; there is none unless a store is given.
"""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from polydraft.core import Budget, Request
from polydraft.drafters.base import Parts
from polydraft.drafters.grown_tree import (
    DEPTH,
    GrownTree,
    add_node,
    best_candidate,
    copy_onto,
    is_full,
    limits,
    new_cells,
    num_paths,
    plant,
)
from polydraft.drafters.text import index_file
from polydraft.drafters.text.base import TextDrafter, text_method
from polydraft.drafters.text.suffix_nodes import CHILD, COUNT, END, NEXT, START, SuffixArrays, edge, token_at
from polydraft.drafters.text.suffix_tree import SuffixTree, Tokens, ends_of, last_of, tail_of
from polydraft.errors import InvalidInputError


class SuffixStore:
    """Finished outputs for the drafts of later requests; the oldest leave first. May be used by several threads at a time.

    max_tokens: most tokens held.  depth: of the tree.  made_with: vocabulary size and tokenizer of the file it was loaded from.

    Example:
        >>> store = SuffixStore(max_tokens=8)
        >>> for text in ([1, 2, 3, 4], [1, 2, 5], [7, 7]):
        ...     store.add(text)
        >>> store.count([1, 2]), store.num_tokens
        (1, 5)
    """

    def __init__(self, max_tokens: int = 1_000_000, depth: int = 64) -> None:
        self.lock = threading.RLock()
        self.tree = SuffixTree(depth, max_tokens)
        self.made_with: tuple[int, str] | None = None

    def add(self, tokens: Tokens) -> None:
        """Put in a finished text, and the oldest ones out as far as needed; of a text beyond `max_tokens` the end stays."""
        with self.lock:
            self.tree.add(tokens)

    def count(self, tokens: Tokens) -> int:
        """Occurrences of a string of at most `depth` tokens."""
        with self.lock:
            return self.tree.count(tokens)

    @property
    def num_tokens(self) -> int:
        return self.tree.num_tokens

    @property
    def num_bytes(self) -> int:
        return self.tree.num_bytes

    def save(self, path: str | Path, vocab_size: int, tokens_of: str = "") -> None:
        """Write the texts; see `index_file.save`."""
        with self.lock:
            texts = self.tree.texts()
            arrays = {
                "tokens": np.concatenate([np.empty(0, np.int32), *texts]),
                "lengths": np.array(list(map(len, texts)), np.int64),
            }
        depth, most = self.tree.depth, self.tree.max_tokens
        index_file.save(path, "suffix-store", arrays, vocab_size=vocab_size, tokens_of=tokens_of, depth=depth, max_tokens=most)

    @classmethod
    def load(cls, path: str | Path) -> "SuffixStore":
        """Read the texts and grow their tree again.

        Drafts are as before, but where texts had left, equally frequent continuations may change places.

        Raises:
            InvalidInputError: what `index_file.load` refuses, and texts that are not as long as the file says.
        """
        stored = index_file.load(path, "suffix-store")
        tokens, lengths, most = stored.arrays["tokens"], stored.arrays["lengths"], stored.facts["max_tokens"]
        if lengths.sum() != len(tokens) or len(tokens) > most:
            raise InvalidInputError(
                f"{Path(path).name!r} was given as a suffix-store index, but it says {lengths.sum()} tokens in {len(lengths)} texts "
                f"and at most {most}, and holds {len(tokens)}. Save the store again with `SuffixStore.save`."
            )
        store = cls(most, stored.facts["depth"])
        for text in np.split(tokens, np.cumsum(lengths)[:-1]):
            store.add(text)
        store.made_with = stored.vocab_size, stored.tokens_of
        return store


class Reach(NamedTuple):
    """How far a match is followed: `factor * m + offset` nodes after m tokens, each at least as probable as `min_prob`."""

    factor: float
    offset: float
    min_prob: float


class SuffixDrafter(TextDrafter[SuffixTree]):
    """SuffixDecoding over a request's own text and, if one is given, a store of earlier outputs.

    store: shared by all requests; a request's output enters it when the request is finished.
    depth: of the request's tree.  factor, offset: most drafted tokens after a match of m are factor * m + offset.
    min_prob: least estimate of a node's path.  eos_token_ids: nothing is drafted behind one.

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
        SuffixTree(depth)
        super().__init__(eos_token_ids)
        self.store, self.depth, self._reach = store, depth, Reach(float(factor), float(offset), float(min_prob))

    @classmethod
    def build(cls, parts: Parts, **options: Any) -> "SuffixDrafter":
        """For the engine: end drafts at its end-of-sequence ids; options as the constructor.

        Raises:
            IncompatibleError: a store that was saved with another tokenizer.
        """
        index_file.check_store("the suffix store", options.get("store"), parts.target.vocab_size, parts.tokenizer)
        return super().build(parts, **options)

    def begin(self, request: Request, tokens: Tokens) -> SuffixTree:
        """Grow the tree of the text."""
        tree = SuffixTree(self.depth)
        tree.extend(tokens)
        return tree

    def learn_output(self, token_ids: Sequence[int]) -> None:
        """Put a finished output in the shared store, if there is one."""
        if self.store is not None:
            self.store.add(token_ids)

    def continuations(self, state: SuffixTree, budget: Budget) -> GrownTree:
        """The better of both trees' drafts, with the estimates n(sc)/n(s) * |s|/(|s| + 1) as scores."""
        tree, store = (new_cells(budget), self._eos), self.store
        if store is None:
            _grow(tree, tuple(state.arrays), None, self._reach, limits(budget))
        else:
            with store.lock:
                _grow(tree, tuple(state.arrays), tuple(store.tree.arrays), self._reach, limits(budget))
        return GrownTree(tree)


@njit(cache=True)
def _grow(tree, arrays, store, reach, limits):
    """Grow the better draft: that of the request's own tree, or of the store's, if there is one."""
    arrays = SuffixArrays(*arrays)
    plant(tree, last_of(arrays), limits)
    if is_full(tree):
        return
    trial = np.empty_like(tree[0]), tree[1]
    suffixes, places, own_wins = arrays, ends_of(arrays), True
    best, score = _best_match(trial, arrays, places, True, reach, limits)
    if store is not None:
        others = SuffixArrays(*store)
        elsewhere = tail_of(arrays, others)
        m, promised = _best_match(trial, others, elsewhere, False, reach, limits)
        if promised > score:
            suffixes, places, own_wins, best = others, elsewhere, False, m
    for m in range(best, 0, -1):
        _draft(trial, suffixes, places[m - 1], m, own_wins, reach, limits)
        copy_onto(tree, trial)
        if is_full(tree) or (num_paths(tree) == limits[2] and m <= best // 2):
            break


@njit(cache=True)
def _best_match(trial, suffixes, places, own, reach, limits):
    """(m, score) of the match that promises most; places[m - 1] is the match of m tokens."""
    max_nodes, max_depth, _ = limits
    longest, ahead = len(suffixes.leaves), min(max_nodes, max_depth)
    best, best_score = 0, 0.0
    for m in range(min(len(places), max(longest - ahead, longest // 2)), 0, -1):
        bound = 0.0
        for k in range(1, min(ahead, _most(m, reach)) + 1):
            bound += m / (m + k)  # trust in the match, were all that follows certain
        if best_score > bound + 1e-9:
            break  # shorter matches promise less
        score = _draft(trial, suffixes, places[m - 1], m, own, reach, limits)
        if score > best_score:
            best, best_score = m, score
    return best, best_score


@njit(cache=True)
def _most(m, reach):
    """Most nodes of a draft from a match of m tokens."""
    return int(reach.factor * m + reach.offset)


@njit(cache=True)
def _draft(trial, suffixes, place, m, own, reach, limits):
    """Draft from one place of the suffixes, best first; returns the sum of the nodes' path probabilities.

    own: the match itself is counted in the tree.
    """
    max_nodes, max_depth, width = limits
    most, min_prob, nodes = min(max_nodes, _most(m, reach)), reach.min_prob, suffixes.nodes
    plant(trial, 0, (most, max_depth, width))
    room = 11 * max_nodes + 11  # of the candidates; what does not fit is too unlikely to matter
    at, offset, parents = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int64)
    mass, share = np.empty(room), np.empty(room)
    size, total_mass, node, path_mass = 0, 0.0, 0, 1.0
    n, o = np.int64(place[0]), np.int64(place[1])
    while not is_full(trial):
        level, first = trial[0][DEPTH, node], size
        trust = (m + level) / (m + level + 1)
        if level < max_depth and o < min(edge(nodes, n), (suffixes.about[END] - nodes[n, START]) & (len(suffixes.pool) - 1)):
            if size < room:
                at[size], offset[size], share[size] = n, o + 1, trust
                size += 1
        elif level < max_depth:
            total = nodes[n, COUNT] - (own and node == 0)
            c = np.int64(nodes[n, CHILD])
            while c and total > 0 and size < room and path_mass * trust * nodes[c, COUNT] >= min_prob * total:
                at[size], offset[size], share[size] = c, 1, trust * min(1.0, nodes[c, COUNT] / total)
                size += 1
                c = np.int64(nodes[c, NEXT])
        for i in range(first, size):
            parents[i], mass[i] = node, path_mass * share[i]
        node = -1
        while node < 0:
            candidate = best_candidate(trial, parents, mass, size)
            if candidate < 0:
                return total_mass
            n, o, path_mass = at[candidate], offset[candidate], mass[candidate]
            node = add_node(trial, parents[candidate], token_at(suffixes, nodes[n, START] + o - 1), share[candidate])
            parents[candidate] = -1
        total_mass += path_mass
    return total_mass
