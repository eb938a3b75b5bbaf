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

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from polydraft.core import Budget, Draft, Method, Outcome, Request, Scores, SiblingLaw, TreeShape
from polydraft.drafters import index_file
from polydraft.drafters.growth import GrownTree, point_mass
from polydraft.drafters.parts import Parts, Snapshot
from polydraft.errors import InvalidInputError
from polydraft.noise import uniform_at

__all__ = ["TrigramDrafter", "TrigramState", "TrigramStore", "TrigramTable"]

VERSION = 1
ARRAYS: tuple[str, ...] = ("first", "second", "row", "token", "weight")
WIDTH = 16
"""Most successors of a pair in a store; the lightest leaves for a new one."""
CHUNK = 4_000_000
"""Triples sorted at a time while counting."""


# The table of a corpus


@dataclass(frozen=True)
class TrigramTable:
    """Successors of token pairs, heaviest first, as sorted arrays that may be mapped from a file.

    first: [V + 1] int64, pairs that begin with a are first[a] .. first[a + 1].  second: [P] int32, b of each pair, ascending.
    row: [P + 1] int64, entries of each pair.  token: [E] int32.  weight: [E] float32.
    Memory: 8 bytes an entry, 12 bytes a pair and 8 bytes a token of the vocabulary: at most 20 bytes an entry.

    Example:
        >>> table = TrigramTable.build([[1, 2, 3, 1, 2, 4, 1, 2, 3]], vocab_size=5)
        >>> table.successors(1, 2)
        [(3, 0.6666666865348816), (4, 0.3333333432674408)]
    """

    first: np.ndarray
    second: np.ndarray
    row: np.ndarray
    token: np.ndarray
    weight: np.ndarray
    vocab_size: int
    tokens_of: str = ""

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.first, self.second, self.row, self.token, self.weight

    @property
    def num_entries(self) -> int:
        return len(self.token)

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in self.arrays)

    @classmethod
    def empty(cls, vocab_size: int) -> "TrigramTable":
        """A table that knows nothing: all is learnt online."""
        return cls._of(np.empty(0, np.int64), np.empty(0, np.int64), vocab_size, WIDTH, "")

    @classmethod
    def build(cls, documents: Iterable[Sequence[int]], vocab_size: int, *, top: int = 12, tokens_of: str = "") -> "TrigramTable":
        """Count a corpus.

        documents: token ids; no triple crosses from one to the next.  top: successors kept of each pair.
        tokens_of: fingerprint of the tokenizer, see `index_file.fingerprint`.

        Raises:
            InvalidInputError: no document of three tokens, or ids outside the vocabulary.
        """
        if not 1 <= top <= WIDTH or vocab_size >= 1 << 21:
            raise InvalidInputError(
                f"top={top} and vocab_size={vocab_size} were given; expected 1 <= top <= {WIDTH} and a vocabulary below 2^21."
            )
        codes, counts = np.empty(0, np.int64), np.empty(0, np.int64)
        waiting: list[np.ndarray] = []
        for number, document in enumerate(documents):
            t = np.asarray(document, np.int64)
            index_file.check_tokens(t, vocab_size, f"document {number} of the corpus")
            waiting.append((t[:-2] * vocab_size + t[1:-1]) * vocab_size + t[2:])
            if sum(map(len, waiting)) > CHUNK:
                codes, counts = _merge(codes, counts, waiting)
        codes, counts = _merge(codes, counts, waiting)
        if not len(codes):
            raise InvalidInputError("an empty corpus was given; expected a document of at least three tokens.")
        return cls._of(codes, counts, vocab_size, top, tokens_of)

    @classmethod
    def _of(cls, codes: np.ndarray, counts: np.ndarray, V: int, top: int, tokens_of: str) -> "TrigramTable":
        pairs, begins = np.unique(codes // V, return_index=True)
        sizes = np.diff(np.append(begins, len(codes)))
        weight = counts / np.repeat(np.add.reduceat(counts, begins), sizes) if len(codes) else np.empty(0)
        number = np.repeat(np.arange(len(pairs)), sizes)
        order = np.lexsort((codes, -counts, number))
        rank = np.arange(len(codes)) - np.repeat(begins, sizes)
        kept = order[rank < top]
        row = np.append(0, np.cumsum(np.minimum(sizes, top)))
        first = np.searchsorted(pairs // V, np.arange(V + 1))
        return cls._frozen(first, pairs % V, row, codes[kept] % V, weight[kept], V, tokens_of)

    @classmethod
    def _frozen(cls, first: Any, second: Any, row: Any, token: Any, weight: Any, V: int, tokens_of: str) -> "TrigramTable":
        kinds = (np.int64, np.int32, np.int64, np.int32, np.float32)
        arrays = [np.ascontiguousarray(x, k) for x, k in zip((first, second, row, token, weight), kinds, strict=True)]
        for x in arrays:
            x.flags.writeable = False
        return cls(*arrays, V, tokens_of)

    def save(self, path: str | Path) -> None:
        """Write the table; see `index_file.save`."""
        arrays = dict(zip(ARRAYS, self.arrays, strict=True))
        index_file.save(path, "trigram", VERSION, arrays, vocab_size=self.vocab_size, tokens_of=self.tokens_of)

    @classmethod
    def load(cls, path: str | Path) -> "TrigramTable":
        """Map a table from a file.

        Raises:
            InvalidInputError: not a table, truncated, or with ids or weights that cannot be.
        """
        found = index_file.load(path, "trigram", VERSION)
        table = cls(*(found.arrays[name] for name in ARRAYS), found.vocab_size, found.tokens_of)
        index_file.check_tokens(table.token, table.vocab_size, Path(path).name)
        index_file.check_tokens(table.second, table.vocab_size, Path(path).name)
        if not (np.isfinite(table.weight).all() and (table.weight >= 0).all()):
            raise InvalidInputError(f"{Path(path).name!r} holds weights that are negative or not finite; build the table again.")
        return table

    def successors(self, a: int, b: int) -> list[tuple[int, float]]:
        """(token, weight) of what follows a pair, heaviest first."""
        at = _pair(*self.arrays[:2], a, b)
        entries = slice(self.row[at], self.row[at + 1]) if at >= 0 else slice(0)
        return list(zip(self.token[entries].tolist(), self.weight[entries].tolist(), strict=True))


def _merge(codes: np.ndarray, counts: np.ndarray, waiting: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Fold waiting triples into the sorted counts; empties `waiting`."""
    new, times = np.unique(np.concatenate([np.empty(0, np.int64), *waiting]), return_counts=True)
    waiting.clear()
    merged, place = np.unique(np.concatenate([codes, new]), return_inverse=True)
    return merged, np.bincount(place, np.concatenate([counts, times]), len(merged)).astype(np.int64)


@njit(cache=True)
def _pair(first, second, a, b):
    """Number of the pair (a, b), or -1."""
    if a + 1 >= len(first):
        return -1
    low, high = first[a], first[a + 1]
    while low < high:
        middle = (low + high) // 2
        if second[middle] < b:
            low = middle + 1
        else:
            high = middle
    return low if low < first[a + 1] and second[low] == b else -1


# Online updates: rows copied from the table when they are first bumped

_USED, _OLDEST, _NEWEST = range(3)


class TrigramStore:
    """Rows that differ from the corpus's table, bounded: the least recently bumped pair leaves first.

    One belongs to each request, unless a store is given to the drafter: then all its requests share what they learn.
    max_pairs: most pairs.  Memory: 152 bytes a pair, allocated at once.
    A shared store may be used by several threads at a time.

    Example:
        >>> store = TrigramStore(max_pairs=4)
        >>> store.bump(TrigramTable.empty(9), [1, 2, 3, 1, 2, 3], window=6, bump=1.25, cap=3.0)
        >>> store.successors(1, 2)
        [(3, 2.5)]
    """

    def __init__(self, max_pairs: int = 4096) -> None:
        if max_pairs < 1:
            raise InvalidInputError(f"max_pairs={max_pairs} was given; expected at least 1.")
        self.max_pairs, self.lock = max_pairs, threading.RLock()
        links = np.full((3, max_pairs), -1, np.int32)  # older, newer, next in the bucket
        buckets = np.full(1 << (max_pairs - 1).bit_length(), -1, np.int32)
        self._arrays = (
            np.zeros(max_pairs, np.int64),
            np.zeros(max_pairs, np.int32),
            np.zeros((max_pairs, WIDTH), np.int32),
            np.zeros((max_pairs, WIDTH), np.float32),
            links,
            buckets,
            np.array([0, -1, -1], np.int64),
        )

    def __len__(self) -> int:
        return int(self._arrays[-1][_USED])

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in self._arrays)

    def bump(self, table: TrigramTable, tokens: Sequence[int], *, window: int, bump: float, cap: float) -> None:
        """Raise the weight of every triple in the last `window` tokens by `bump`, up to `cap`."""
        last = np.array(tokens[-window:], np.int64)
        with self.lock:
            _bump(table.arrays, self._arrays, last, np.float32(bump), np.float32(cap))

    def successors(self, a: int, b: int) -> list[tuple[int, float]]:
        """(token, weight) of a pair that was bumped, heaviest first; empty for others."""
        with self.lock:
            at = _find(self._arrays, (a << 32) | b)
            n = self._arrays[1][at] if at >= 0 else 0
            return list(zip(self._arrays[2][at, :n].tolist(), self._arrays[3][at, :n].tolist(), strict=True))

    def to_arrays(self) -> dict[str, np.ndarray]:
        """The pairs from the least to the most recently bumped: key, size, token, weight."""
        with self.lock:
            order = _by_age(self._arrays)
            return {name: x[order] for name, x in zip(("key", "size", "token", "weight"), self._arrays, strict=False)}

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray], max_pairs: int) -> "TrigramStore":
        """The store that `to_arrays` was taken of; of more than `max_pairs` pairs the most recent stay."""
        store = cls(max_pairs)
        for i in range(max(0, len(arrays["key"]) - max_pairs), len(arrays["key"])):
            at = _insert(store._arrays, arrays["key"][i])
            for kept, given in zip(store._arrays[1:4], ("size", "token", "weight"), strict=True):
                kept[at] = arrays[given][i]
        return store

    def save(self, path: str | Path, vocab_size: int, tokens_of: str = "") -> None:
        """Write what was learnt; see `index_file.save`."""
        index_file.save(path, "trigram-store", VERSION, self.to_arrays(), vocab_size=vocab_size, tokens_of=tokens_of)

    @classmethod
    def load(cls, path: str | Path, max_pairs: int = 4096) -> "TrigramStore":
        """Read what was learnt; see `index_file.load` for what is refused."""
        return cls.from_arrays(index_file.load(path, "trigram-store", VERSION).arrays, max_pairs)


@njit(cache=True)
def _bucket(key, buckets):
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    return np.int64((mixed >> np.uint64(32)) & np.uint64(len(buckets) - 1))


@njit(cache=True)
def _find(store, key):
    keys, _, _, _, links, buckets, _ = store
    at = buckets[_bucket(key, buckets)]
    while at >= 0 and keys[at] != key:
        at = links[2, at]
    return at


@njit(cache=True)
def _detach(store, at):
    """Take a row out of the order of age."""
    links, about = store[4], store[6]
    older, newer = links[0, at], links[1, at]
    if older >= 0:
        links[1, older] = newer
    else:
        about[_OLDEST] = newer
    if newer >= 0:
        links[0, newer] = older
    else:
        about[_NEWEST] = older


@njit(cache=True)
def _make_newest(store, at):
    links, about = store[4], store[6]
    links[0, at], links[1, at] = about[_NEWEST], -1
    if about[_NEWEST] >= 0:
        links[1, about[_NEWEST]] = at
    else:
        about[_OLDEST] = at
    about[_NEWEST] = at


@njit(cache=True)
def _insert(store, key):
    """An empty row for a new key, the oldest one's if there is no other."""
    keys, sizes, _, _, links, buckets, about = store
    if about[_USED] < len(keys):
        at = about[_USED]
        about[_USED] += 1
    else:
        at = about[_OLDEST]
        _detach(store, at)
        place = _bucket(keys[at], buckets)
        if buckets[place] == at:
            buckets[place] = links[2, at]
        else:
            before = buckets[place]
            while links[2, before] != at:
                before = links[2, before]
            links[2, before] = links[2, at]
    place = _bucket(key, buckets)
    keys[at], sizes[at], links[2, at] = key, 0, buckets[place]
    buckets[place] = at
    _make_newest(store, at)
    return at


@njit(cache=True)
def _by_age(store):
    order = np.empty(store[6][_USED], np.int64)
    at = store[6][_OLDEST]
    for i in range(len(order)):
        order[i] = at
        at = store[4][1, at]
    return order


@njit(cache=True)
def _bump(table, store, tokens, bump, cap):
    first, second, row, token, weight = table
    _, sizes, successors, weights, _, _, _ = store
    for i in range(len(tokens) - 2):
        a, b, c = tokens[i], tokens[i + 1], tokens[i + 2]
        key = (a << 32) | b
        at = _find(store, key)
        if at < 0:
            at = _insert(store, key)
            pair = _pair(first, second, a, b)
            if pair >= 0:
                for e in range(row[pair], row[pair + 1]):
                    successors[at, sizes[at]], weights[at, sizes[at]] = token[e], weight[e]
                    sizes[at] += 1
        else:
            _detach(store, at)
            _make_newest(store, at)
        j = 0
        while j < sizes[at] and successors[at, j] != c:
            j += 1
        if j == sizes[at]:
            if j < WIDTH:
                sizes[at] += 1
            else:
                j -= 1  # the lightest one leaves
            successors[at, j], weights[at, j] = c, np.float32(0)
        w = min(cap, weights[at, j] + bump)
        while j > 0 and weights[at, j - 1] < w:
            successors[at, j], weights[at, j] = successors[at, j - 1], weights[at, j - 1]
            j -= 1
        successors[at, j], weights[at, j] = c, w


# The search


@njit(cache=True)
def _successors(table, store, a, b, tokens, weights):
    """Fill what follows a pair, the store's row before the table's; returns how many."""
    at = _find(store, (a << 32) | b)
    if at >= 0:
        n = store[1][at]
        for j in range(n):
            tokens[j], weights[j] = store[2][at, j], store[3][at, j]
        return n
    pair = _pair(table[0], table[1], a, b)
    if pair < 0:
        return 0
    begin, n = table[2][pair], min(table[2][pair + 1] - table[2][pair], WIDTH)
    for j in range(n):
        tokens[j], weights[j] = table[3][begin + j], table[4][begin + j]
    return n


@njit(cache=True)
def _search(table, store, a, b, levels, iterations, c1, c2, num_paths, seed, sample, position):
    """(tokens, parents, visits) of the draft's candidates, best first; parents index candidates, -1 is the root."""
    most = 1 + iterations * WIDTH
    token = np.empty(most, np.int64)
    before = np.empty(most, np.int64)  # the token above, the other half of the state
    parent = np.empty(most, np.int32)
    child = np.full(most, -1, np.int32)
    children = np.zeros(most, np.int32)
    visits = np.zeros(most, np.int32)
    reward = np.zeros(most)
    prior = np.zeros(most)
    total = np.zeros(most)  # weights from the root down to the node
    found, weights = np.empty(WIDTH, np.int64), np.empty(WIDTH)
    token[0], before[0], parent[0], size, draws = b, a, -1, 1, 0
    for _ in range(iterations):
        n, level = 0, 0
        while children[n] > 0:
            explore = (c1 + np.log((visits[n] + c2 + 1) / c2)) * np.sqrt(visits[n])
            best, best_score = -1, -np.inf
            for m in range(child[n], child[n] + children[n]):
                if visits[m] == 0:
                    best = m
                    break
                score = reward[m] / visits[m] + explore * prior[m] / (1 + visits[m])
                if score > best_score:
                    best, best_score = m, score
            n, level = best, level + 1
        if level < levels and child[n] < 0:
            count = _successors(table, store, before[n], token[n], found, weights)
            child[n], children[n] = size, count
            for j in range(count):
                m = size + j
                token[m], before[m], parent[m], prior[m] = found[j], token[n], n, weights[j]
                total[m] = total[n] + weights[j]
            size += count
            if count:
                n, level = child[n], level + 1
        x, y, gained = before[n], token[n], total[n]
        while level < levels:
            count = _successors(table, store, x, y, found, weights)
            mass = weights[:count].sum()
            if count == 0 or mass <= 0:
                break
            left = uniform_at(seed, sample, position, 0, draws) * mass
            draws += 1
            j = 0
            while j < count - 1 and left >= weights[j]:
                left -= weights[j]
                j += 1
            x, y, gained, level = y, found[j], gained + weights[j], level + 1
        while n >= 0:
            visits[n] += 1
            reward[n] += 1 + gained
            n = parent[n]
    order = np.argsort(-visits[1:size], kind="mergesort") + 1
    place = np.full(most, -1, np.int64)
    tokens, parents, ranks = (
        np.empty(2 * num_paths, np.int64),
        np.empty(2 * num_paths, np.int64),
        np.zeros(2 * num_paths, np.int64),
    )
    num = 0
    for n in order[:num_paths]:
        if visits[n] == 0:
            break
        tokens[num], parents[num], ranks[num] = token[n], place[parent[n]] if parent[n] else -1, visits[n]
        place[n] = num
        num += 1
    searched = num
    for n in order[:searched]:
        if _successors(table, store, before[n], token[n], found, weights):
            tokens[num], parents[num] = found[0], place[n]
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


# The drafter


@dataclass
class TrigramState:
    """One request: its text and the updates that it sees. store: its own, or the one shared by the drafter's requests."""

    request: Request
    tokens: list[int]
    store: TrigramStore


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
        self.window, self.bump, self.cap, self.read_prompt = window, bump, cap, read_prompt
        self._eos = frozenset(eos_token_ids)

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
            state = TrigramState(request, tokens, TrigramStore(self.max_pairs) if self.store is None else self.store)
            self._learn(state, len(tokens) if self.read_prompt else self.window)
            states.append(state)
        return states

    def _learn(self, state: TrigramState, window: int) -> None:
        if self.bump > 0:
            state.store.bump(self.table, state.tokens, window=window, bump=self.bump, cap=self.cap)

    def release(self, states: Sequence[TrigramState]) -> None:
        """Nothing to give back; what a shared store learnt stays in it."""

    def grow(self, state: TrigramState, budget: Budget) -> GrownTree:
        """The search's candidates, most visited first, scored by their share of the parent's visits; empty for a text of one token or a pair that was never seen."""
        grown = GrownTree(state.tokens[-1], budget, self._eos)
        if len(state.tokens) < 2 or not min(budget.max_nodes, budget.max_depth):
            return grown
        request, levels = state.request, min(self.levels, budget.max_depth)
        with state.store.lock:
            tokens, parents, visits = _search(
                self.table.arrays,
                state.store._arrays,
                *state.tokens[-2:],
                levels,
                self.iterations,
                self.c1,
                self.c2,
                self.num_paths,
                request.seed,
                request.sample,
                len(state.tokens),
            )
        grown.add_ranked(tokens, parents, _shares(parents, visits, self.iterations))
        return grown

    def propose(self, states: Sequence[TrigramState], budgets: Sequence[Budget]) -> Draft:
        """A searched tree for each row; see the module."""
        return point_mass([self.grow(state, budget) for state, budget in zip(states, budgets, strict=True)])

    def observe(self, states: Sequence[TrigramState], outcome: Outcome, scores: Scores) -> list[TrigramState]:
        """Bump the triples of the last tokens."""
        for state, tokens in zip(states, outcome.emitted(scores.tree), strict=True):
            state.tokens += tokens
            self._learn(state, self.window)
        return list(states)

    def snapshot(self, state: TrigramState) -> Snapshot:
        """The text and the request's own updates; a shared store is saved by its owner."""
        own = state.store.to_arrays() if self.store is None else {}
        return {"tokens": np.array(state.tokens), **own}

    def restore(self, request: Request, snapshot: Snapshot) -> TrigramState:
        """The state that drafts as the one of the snapshot; see `parts.Resumable`."""
        store = TrigramStore.from_arrays(snapshot, self.max_pairs) if self.store is None else self.store
        return TrigramState(request, snapshot["tokens"].tolist(), store)
