"""ADED: a sparse table of what follows each pair of tokens, updated while it is used and searched as a game tree.

"Adaptive draft-verification for efficient large language model decoding", 2024 (arXiv 2407.12021, AAAI 2025).

    M[(a, b)][c]  weight of c after the pair (a, b): relative frequency in a corpus, plus the bumps of online updates
    W, n          summed reward and visits of a node        N  visits of its parent
    c1, c2        exploration: c1 + ln((N + c2 + 1) / c2)   L  levels of the search below the root

1. The table counts the triples inside each document, divides by the pair's total and keeps the heaviest successors of a pair.
2. After each round, and once for the prompt, every triple of the last tokens is bumped, up to a cap. Windows overlap.
3. Each iteration descends to the child with the largest W/n + (c1 + ln((N + c2 + 1)/c2)) M sqrt(N)/(1 + n), an unvisited one
   first; expands a leaf into all its successors; rolls out to level L, drawing in proportion to M; adds 1 + the sum of M
   along the path to every node above.
4. The most visited nodes, then one greedy successor of each, make the draft, in this order, as far as the budget goes.

Lossless: the tree is a function of earlier rounds, the committed text and the DRAFT stream, none of which the match rule's
draws depend on; the table never hears of the round that it drafts for. Weights are scores, never a q: drafts are POINT_MASS.
Trap: drawing again from p after a failed match, as the released code does at temperature > 0, is biased.
Beyond the paper: the prompt is read whole when a request starts (`read_prompt`), and updates live in a bounded table of their
own on top of the corpus's, least recently bumped pairs leaving first, so that requests do not see each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from polydraft.core import Budget, Draft, Method, Outcome, Request, Scores, SiblingLaw, TreeShape
from polydraft.drafters import index_file
from polydraft.drafters.growth import GrownTree, add_ranked, end_ids, limits, new_cells, plant, point_mass
from polydraft.drafters.parts import Parts, Snapshot
from polydraft.drafters.recent import find
from polydraft.drafters.trigram_store import TrigramStore, bump_all
from polydraft.drafters.trigram_table import WIDTH, TrigramTable, find_pair
from polydraft.errors import InvalidInputError
from polydraft.noise import uniform_at

__all__ = ["TrigramDrafter", "TrigramState", "TrigramStore", "TrigramTable"]


# The search


@njit(cache=True)
def _row(table, store, a, b):
    """(learnt, begin, count) of what follows a pair: a row of the store, or else entries of the table."""
    at = find(store[0], (a << 32) | b)
    if at >= 0:
        return True, at, np.int64(store[1][at])
    pair = find_pair(table[0], table[1], a, b)
    if pair < 0:
        return False, np.int64(0), np.int64(0)
    begin = table[2][pair]
    return False, begin, min(table[2][pair + 1] - begin, np.int64(WIDTH))


@njit(cache=True)
def _entry(table, store, learnt, begin, j):
    """(token, weight) of the j-th successor of a row."""
    if learnt:
        return np.int64(store[2][begin, j]), np.float64(store[3][begin, j])
    return np.int64(table[3][begin + j]), np.float64(table[4][begin + j])


@njit(cache=True)
def _explore(iterations, c1, c2):
    """The exploration factor at a node, by its visits."""
    factor = np.empty(iterations + 1)
    for n in range(iterations + 1):
        factor[n] = (c1 + np.log((n + c2 + 1) / c2)) * np.sqrt(n)
    return factor


@njit(cache=True, error_model="numpy")
def _search(table, store, a, b, levels, iterations, explore, num_paths, seed, sample, position):
    """(tokens, parents, visits) of the draft's candidates, best first; parents index candidates, -1 is the root.

    A node is made when it is first visited; successors are tried in their order, so those that have been are the first ones.
    """
    most = 2 * iterations + 1
    token, before = np.empty(most, np.int64), np.empty(most, np.int64)  # before: the token above, the other half of the state
    parent, age = np.empty(most, np.int32), np.empty(most, np.int32)  # age: the order in which expansions meet the nodes
    child, last, after = np.empty(most, np.int32), np.empty(most, np.int32), np.empty(most, np.int32)  # children as a list
    learnt, begin = np.empty(most, np.bool_), np.empty(most, np.int64)  # the row of the successors
    count, tried, met = np.empty(most, np.int32), np.empty(most, np.int32), np.empty(most, np.int32)  # count: -1 not expanded
    visits, reward, total = np.empty(most, np.int32), np.empty(most), np.empty(most)  # total: weights from the root down
    prior, mean, urge = np.empty(most), np.empty(most), np.empty(most)  # mean: W/n; urge: M/(1 + n)
    token[0], before[0], parent[0], age[0], child[0], last[0], after[0] = b, a, -1, 0, -1, -1, -1
    count[0], tried[0], visits[0], reward[0], total[0], prior[0] = -1, 0, 0, 0.0, 0.0, 0.0
    size, all_met, draws = 1, 1, 0
    for _ in range(iterations):
        n, level = 0, 0
        while True:
            if count[n] < 0 and level < levels:
                learnt[n], begin[n], count[n] = _row(table, store, before[n], token[n])
                met[n] = all_met
                all_met += count[n]
                expanded = True
            else:
                expanded = False
            if count[n] <= 0:
                break
            if tried[n] < count[n]:
                m, up = size, n
                size += 1
                t, w = _entry(table, store, learnt[up], begin[up], tried[up])
                token[m], before[m], parent[m], age[m] = t, token[up], up, met[up] + tried[up]
                child[m], last[m], after[m], count[m], tried[m] = -1, -1, -1, -1, 0
                visits[m], reward[m], total[m], prior[m] = 0, 0.0, total[up] + w, w
                if last[up] < 0:
                    child[up] = m
                else:
                    after[last[up]] = m
                last[up] = m
                tried[up] += 1
                n = m
            else:
                factor, best_score, m = explore[visits[n]], -np.inf, child[n]
                while m >= 0:
                    score = mean[m] + factor * urge[m]
                    if score > best_score:
                        n, best_score = m, score
                    m = after[m]
            level += 1
            if expanded:
                break
        x, y, gained = before[n], token[n], total[n]
        while level < levels:
            known, at, num = _row(table, store, x, y)
            mass = 0.0
            for j in range(num):
                mass += _entry(table, store, known, at, j)[1]
            if mass <= 0:
                break
            left = uniform_at(seed, sample, position, 0, draws) * mass
            draws += 1
            j = 0
            t, w = _entry(table, store, known, at, 0)
            while j < num - 1 and left >= w:
                left -= w
                j += 1
                t, w = _entry(table, store, known, at, j)
            x, y, gained, level = y, t, gained + w, level + 1
        while n >= 0:
            visits[n] += 1
            reward[n] += 1 + gained
            mean[n], urge[n] = reward[n] / visits[n], prior[n] / (1 + visits[n])
            n = parent[n]
    # the most visited nodes, those met first among equals; a node is no more visited than its parent, which was met earlier
    kept = min(num_paths, size - 1)
    order = np.arange(1, size)
    for i in range(kept):
        best = i
        for j in range(i + 1, size - 1):
            m, n = order[j], order[best]
            if visits[m] > visits[n] or (visits[m] == visits[n] and age[m] < age[n]):
                best = j
        order[i], order[best] = order[best], order[i]
    tokens, parents, ranks = np.empty(2 * kept, np.int64), np.empty(2 * kept, np.int64), np.zeros(2 * kept, np.int64)
    num = kept
    for i in range(kept):
        n, up = order[i], parent[order[i]]
        tokens[i], parents[i], ranks[i] = token[n], -1, visits[n]
        for j in range(i):
            if up and order[j] == up:
                parents[i] = j
        known, at, found = _row(table, store, before[n], token[n])
        if found:
            tokens[num], parents[num] = _entry(table, store, known, at, 0)[0], i
            num += 1
    return tokens[:num], parents[:num], ranks[:num]


@njit(cache=True)
def _shares(parents, visits, iterations):
    """Each candidate's part of its parent's visits; one half for what was not searched."""
    shares = np.empty(len(parents))
    for i in range(len(parents)):
        above = iterations if parents[i] < 0 else max(visits[parents[i]], 1)
        shares[i] = min(1.0, visits[i] / above) if visits[i] else 0.5
    return shares


@njit(cache=True)
def _grow(tree, table, store, unread, bump, cap, a, b, levels, iterations, explore, num_paths, seed, sample, position, *limits):
    """Bump what is unread, then plant and grow a tree of the search's candidates; returns its size."""
    bump_all(table, store, unread, bump, cap)
    max_nodes, max_depth, width = limits
    plant(tree, b, max_nodes, max_depth, width)
    if max_nodes == 0 or max_depth == 0 or a < 0:
        return 1
    levels = min(levels, max_depth)
    tokens, parents, visits = _search(table, store, a, b, levels, iterations, explore, num_paths, seed, sample, position)
    return add_ranked(tree, tokens, parents, _shares(parents, visits, iterations))


# The drafter


@dataclass
class TrigramState:
    """One request: its text and the updates that it sees.

    store: its own, or the one shared by the drafter's requests.
    unread: tokens at the end of the text whose triples are to be bumped, when next it drafts or leaves.
    """

    request: Request
    tokens: list[int]
    store: TrigramStore
    unread: int = 0


class TrigramDrafter:
    """ADED over a corpus's table, or over the request's own text alone.

    table: counted from a corpus; None knows nothing at first.
    store: shared by all requests, if they may learn from each other; without it each request has a store of `max_pairs`.
    iterations: of the search, 150 in the release.  levels: of the search below the root; drafts are one level deeper.
    c1, c2: exploration.  num_paths: most visited nodes that are kept, each extended by one.
    window, bump, cap: of the online update; bump=0 makes the table static.  read_prompt: bump every triple of the prompt once.
    eos_token_ids: nothing is drafted behind one.

    Raises:
        InvalidInputError: a parameter out of its range.

    Example:
        >>> from polydraft.core import SamplingParams
        >>> drafter = TrigramDrafter(TrigramTable.build([[1, 2, 3, 4, 5]], vocab_size=9))
        >>> states = drafter.start([Request("r", (7, 1, 2), SamplingParams(), seed=0)])
        >>> drafter.propose(states, [Budget(max_nodes=4, max_depth=4)]).tree.tokens.tolist()
        [[2, 3, 4, 5]]
    """

    info = Method(
        name="trigram",
        title="Adaptive trigram table with tree search",
        authors="Liu et al.",
        year=2024,
        arxiv="2407.12021",
        laws=frozenset({SiblingLaw.POINT_MASS}),
        shapes=frozenset({TreeShape.GROWN}),
    )
    methods = (info,)
    needs: frozenset[str] = frozenset()

    def __init__(
        self,
        table: TrigramTable | None = None,
        *,
        store: TrigramStore | None = None,
        iterations: int = 150,
        levels: int = 3,
        c1: float = 32.0,
        c2: float = 8.0,
        num_paths: int = 24,
        window: int = 16,
        bump: float = 0.04,
        cap: float = 3.0,
        read_prompt: bool = True,
        max_pairs: int = 4096,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        if min(iterations, levels, num_paths, max_pairs) < 1 or window < 3 or c1 < 0 or c2 <= 0 or not 0 <= bump <= cap:
            raise InvalidInputError(
                f"iterations={iterations}, levels={levels}, num_paths={num_paths}, max_pairs={max_pairs}, window={window}, c1={c1}, c2={c2}, "
                f"bump={bump} and cap={cap} were given; expected counts >= 1, window >= 3, c1 >= 0, c2 > 0 and 0 <= bump <= cap."
            )
        self.table = TrigramTable.empty(1) if table is None else table
        self.store, self.max_pairs = store, max_pairs
        self.iterations, self.levels, self.c1, self.c2, self.num_paths = iterations, levels, float(c1), float(c2), num_paths
        self._search = levels, iterations, _explore(iterations, self.c1, self.c2), num_paths
        self.window, self.bump, self.cap, self.read_prompt = window, float(bump), float(cap), read_prompt
        self._eos = end_ids(eos_token_ids)

    @classmethod
    def build(cls, parts: Parts, *, index: str | Path | TrigramTable | None = None, **options: Any) -> "TrigramDrafter":
        """For the engine. index: a table, or a file of `polydraft index build --kind trigram`; other options as the constructor.

        Raises:
            InvalidInputError: a file that is no table.
            IncompatibleError: a table of another tokenizer.
        """
        table = TrigramTable.load(index) if isinstance(index, (str, Path)) else index
        if table is not None:
            index_file.check_vocabulary(
                "the trigram table", table.vocab_size, table.tokens_of, parts.target.vocab_size, parts.tokenizer
            )
        return cls(table, eos_token_ids=parts.eos_token_ids, **options)

    def start(self, requests: Sequence[Request]) -> list[TrigramState]:
        """Read the prompts, or their ends."""
        states = []
        for request in requests:
            tokens = list(request.prompt_token_ids)
            store = TrigramStore(self.max_pairs) if self.store is None else self.store
            state = TrigramState(request, tokens, store, len(tokens) if self.read_prompt else self.window)
            self._read(state)
            states.append(state)
        return states

    def _unread(self, state: TrigramState) -> np.ndarray:
        """What is unread, as it is handed over."""
        unread, state.unread = state.unread if self.bump > 0 else 0, 0
        return np.array(state.tokens[-unread:] if unread else (), np.int64)

    def _read(self, state: TrigramState) -> None:
        unread = self._unread(state)
        with state.store.lock:
            bump_all(self.table.arrays, state.store.arrays, unread, self.bump, self.cap)

    def release(self, states: Sequence[TrigramState]) -> None:
        """Bump what is unread; what a shared store learnt stays in it."""
        for state in states:
            self._read(state)

    def grow(self, state: TrigramState, budget: Budget) -> GrownTree:
        """The search's candidates, most visited first, scored by their share of the parent's visits; empty for a text of one token or a pair that was never seen."""
        tree, request, store, text = (new_cells(budget), self._eos), state.request, state.store, state.tokens
        before, unread = text[-2] if len(text) > 1 else -1, self._unread(state)
        key = request.seed, request.sample, len(text)
        with store.lock:
            size = _grow(
                tree,
                self.table.arrays,
                store.arrays,
                unread,
                self.bump,
                self.cap,
                before,
                text[-1],
                *self._search,
                *key,
                *limits(budget),
            )
        return GrownTree.grown(tree, size)

    def propose(self, states: Sequence[TrigramState], budgets: Sequence[Budget]) -> Draft:
        """A searched tree for each row; see the module."""
        return point_mass([self.grow(state, budget) for state, budget in zip(states, budgets, strict=True)])

    def observe(self, states: Sequence[TrigramState], outcome: Outcome, scores: Scores) -> list[TrigramState]:
        """Append what was emitted; the triples of the last tokens are bumped before the next draft."""
        for state, tokens in zip(states, outcome.emitted(scores.tree), strict=True):
            state.tokens += tokens
            state.unread = self.window
        return list(states)

    def snapshot(self, state: TrigramState) -> Snapshot:
        """The text and the request's own updates; a shared store is saved by its owner."""
        self._read(state)
        own = state.store.to_arrays() if self.store is None else {}
        return {"tokens": np.array(state.tokens), **own}

    def restore(self, request: Request, snapshot: Snapshot) -> TrigramState:
        """The state that drafts as the one of the snapshot; see `parts.Resumable`."""
        store = TrigramStore.from_arrays(snapshot, self.max_pairs) if self.store is None else self.store
        return TrigramState(request, snapshot["tokens"].tolist(), store)
