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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from polydraft.core import Budget, Draft, Method, Needs, Outcome, Request, Scores, SiblingLaw, TreeShape
from polydraft.drafters.base import Parts, Snapshot, emitted
from polydraft.drafters.grown_tree import GrownTree, add_ranked, end_ids, limits, new_cells, plant, point_mass
from polydraft.drafters.text import index_file
from polydraft.drafters.text.suffix_tree import SuffixTree, Tokens, ends_of, last_of, tail_of
from polydraft.errors import InvalidInputError

__all__ = ["SuffixDrafter", "SuffixState", "SuffixStore"]


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
        found = index_file.load(path, "suffix-store")
        tokens, lengths, most = found.arrays["tokens"], found.arrays["lengths"], found.facts["max_tokens"]
        if lengths.sum() != len(tokens) or len(tokens) > most:
            raise InvalidInputError(
                f"{Path(path).name!r} was given as a suffix-store index, but it says {lengths.sum()} tokens in {len(lengths)} texts "
                f"and at most {most}, and holds {len(tokens)}. Save the store again with `SuffixStore.save`."
            )
        store = cls(most, found.facts["depth"])
        for text in np.split(tokens, np.cumsum(lengths)[:-1]):
            store.add(text)
        store.made_with = found.vocab_size, found.tokens_of
        return store


@dataclass
class SuffixState:
    """One request: its tree, which holds its text."""

    tree: SuffixTree


class SuffixDrafter:
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

    info = Method(
        name="suffix",
        title="SuffixDecoding",
        authors="Oliaro et al.",
        year=2024,
        arxiv="2411.04975",
        laws=frozenset({SiblingLaw.POINT_MASS}),
        shapes=frozenset({TreeShape.GROWN}),
    )
    methods = (info,)
    needs: Needs = Needs()

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
        self.store, self.depth = store, depth
        self.factor, self.offset, self.min_prob = float(factor), float(offset), float(min_prob)
        self._eos = end_ids(eos_token_ids)

    @classmethod
    def build(cls, parts: Parts, **options: Any) -> "SuffixDrafter":
        """For the engine: end drafts at its end-of-sequence ids; options as the constructor.

        Raises:
            IncompatibleError: a store that was saved with another tokenizer.
        """
        index_file.check_store("the suffix store", options.get("store"), parts.target.vocab_size, parts.tokenizer)
        return cls(eos_token_ids=parts.eos_token_ids, **options)

    def start(self, requests: Sequence[Request]) -> list[SuffixState]:
        """Grow the trees of the prompts."""
        states = []
        for request in requests:
            state = SuffixState(SuffixTree(self.depth))
            state.tree.extend(request.prompt_token_ids)
            states.append(state)
        return states

    def release(self, states: Sequence[SuffixState]) -> None:
        """Nothing to give back."""

    def learn_output(self, token_ids: Sequence[int]) -> None:
        """Put a finished output in the shared store, if there is one."""
        if self.store is not None:
            self.store.add(token_ids)

    def grow(self, state: SuffixState, budget: Budget) -> GrownTree:
        """The better of both trees' drafts, with the estimates n(sc)/n(s) * |s|/(|s| + 1) as scores; empty if nothing matches."""
        tree, own, store = (new_cells(budget), self._eos), state.tree.arrays, self.store
        given = self.factor, self.offset, self.min_prob, *limits(budget)
        if store is None:
            return GrownTree.grown(tree, _grow(tree, own, own, False, *given))
        with store.lock:
            return GrownTree.grown(tree, _grow(tree, own, store.tree.arrays, True, *given))

    def propose(self, states: Sequence[SuffixState], budgets: Sequence[Budget]) -> Draft:
        """The best-scored tree for each row; see the module."""
        return point_mass([self.grow(state, budget) for state, budget in zip(states, budgets, strict=True)])

    def observe(self, states: Sequence[SuffixState], outcome: Outcome, scores: Scores) -> list[SuffixState]:
        """Append what was emitted."""
        for state, tokens in zip(states, emitted(outcome, scores.tree), strict=True):
            state.tree.extend(tokens)
        return list(states)

    def snapshot(self, state: SuffixState) -> Snapshot:
        """The text; its tree is grown again."""
        return {"tokens": state.tree.tokens()}

    def restore(self, request: Request, snapshot: Snapshot) -> SuffixState:
        """The state that drafts as the one of the snapshot; see `base.Resumable`."""
        state = SuffixState(SuffixTree(self.depth))
        state.tree.extend(snapshot["tokens"])
        return state


@njit(cache=True)
def _grow(grown, own, store, shared, factor, offset, min_prob, max_nodes, max_depth, width):
    """Grow the better draft: that of the request's own tree, or (shared) of the store's. Returns its size."""
    plant(grown, last_of(own), max_nodes, max_depth, width)
    if max_nodes == 0 or max_depth == 0:
        return 1
    best = _speculate(own, ends_of(own), True, factor, offset, min_prob, max_nodes, max_depth, width)
    if shared:
        places = tail_of(own, store)
        other = _speculate(store, places, False, factor, offset, min_prob, max_nodes, max_depth, width)
        if other[0] > best[0]:
            best = other
    return add_ranked(grown, best[1], best[2], best[3])


@njit(cache=True)
def _speculate(tree, places, own, factor, offset, min_prob, max_nodes, max_depth, width):
    """(score, tokens, parents, estimates) of the best draft over the matches, filled up; places[m - 1] is the match of m tokens.

    parents index the nodes returned, -1 is the root. own: the matches themselves are counted in the tree.
    """
    room = 11 * max_nodes + 11  # of the frontier; what does not fit is too unlikely to matter
    work, masses, open_ = np.empty((4, room), np.int64), np.empty((2, room)), np.empty(room, np.bool_)
    tokens, parents, estimates = np.empty(max_nodes, np.int64), np.empty(max_nodes, np.int64), np.empty(max_nodes)
    longest, ahead = tree[3].shape[0] - 1, min(max_nodes, max_depth)
    usable = min(len(places), max(longest - ahead, longest // 2))
    best, best_m = 0.0, 0
    for m in range(usable, 0, -1):
        most, bound = min(max_nodes, int(factor * m + offset)), 0.0
        for k in range(1, min(most, max_depth) + 1):
            bound += m / (m + k)  # trust in the match, were all that follows certain
        if best > bound + 1e-9:
            break  # shorter matches promise less
        num, score = _best_first(
            tree, places[m - 1], m, own, min_prob, most, max_depth, width, tokens, parents, estimates, work, masses, open_
        )
        if score > best:
            best, best_m = score, m
    kept_tokens, kept_parents = np.empty(max_nodes, np.int64), np.empty(max_nodes, np.int64)
    kept_estimates, kept, paths = np.empty(max_nodes), 0, 0
    inner, at = np.zeros(max_nodes, np.bool_), np.empty(max_nodes, np.int64)
    m = best_m
    while m > 0 and kept < max_nodes:
        most = min(max_nodes, int(factor * m + offset))
        num, _ = _best_first(
            tree, places[m - 1], m, own, min_prob, most, max_depth, width, tokens, parents, estimates, work, masses, open_
        )
        for i in range(num):
            above = -1 if parents[i] < 0 else at[parents[i]]
            at[i] = -2
            if above == -2:
                continue
            for j in range(above + 1, kept):
                if kept_parents[j] == above and kept_tokens[j] == tokens[i]:
                    at[i] = j
                    break
            opens_path = above < 0 or inner[above]
            if at[i] == -2 and kept < max_nodes and (not opens_path or paths < width):
                kept_tokens[kept], kept_parents[kept], kept_estimates[kept] = tokens[i], above, estimates[i]
                at[i] = kept
                kept += 1
                paths += opens_path
                if above >= 0:
                    inner[above] = True
        if paths == width and m <= best_m // 2:
            break
        m -= 1
    return best, kept_tokens[:kept], kept_parents[:kept], kept_estimates[:kept]


@njit(cache=True)
def _best_first(tree, place, m, own, min_prob, most, max_depth, width, tokens, parents, estimates, work, masses, open_):
    """Fill a draft from one place of the tree; returns the number of nodes and the sum of their path probabilities."""
    pool, nodes, about = tree[0], tree[1], tree[5]
    mask = len(pool) - 1
    at, into, above, depth = work[0], work[1], work[2], work[3]
    prob, ratio, room = masses[0], masses[1], work.shape[1]
    inner = np.zeros(most + 1, np.bool_)
    size, num, paths, score = 0, 0, 0, 0.0
    parent, level, mass = -1, 0, 1.0
    n, o = place
    while True:
        if level < max_depth:
            length = nodes[n, 7] - nodes[nodes[n, 1], 7] if n else 0
            length = min(length, (about[0] - nodes[n, 5]) & mask) if n else 0
            trust = (m + level) / (m + level + 1)
            if o < length:
                if size < room:
                    at[size], into[size], above[size], depth[size] = n, o + 1, parent, level + 1
                    prob[size], ratio[size], open_[size] = mass * trust, trust, True
                    size += 1
            else:
                total = nodes[n, 0] - (1 if own and parent < 0 else 0)
                c = nodes[n, 2]
                while c and total > 0 and size < room and mass * trust * nodes[c, 0] >= min_prob * total:
                    share = trust * min(1.0, nodes[c, 0] / total)
                    at[size], into[size], above[size], depth[size] = c, 1, parent, level + 1
                    prob[size], ratio[size], open_[size] = mass * share, share, True
                    size += 1
                    c = nodes[c, 3]
        if num == most:
            break
        take = -1
        for i in range(size):
            if open_[i] and (take < 0 or prob[i] > prob[take] + 1e-12):
                opens_path = above[i] < 0 or inner[above[i]]
                if not opens_path or paths < width:
                    take = i
        if take < 0:
            break
        open_[take] = False
        paths += above[take] < 0 or inner[above[take]]
        if above[take] >= 0:
            inner[above[take]] = True
        n, o, level, mass = at[take], into[take], depth[take], prob[take]
        tokens[num], parents[num], estimates[num] = pool[(nodes[n, 5] + o - 1) & mask], above[take], ratio[take]
        score += mass
        parent = num
        num += 1
    return num, score
