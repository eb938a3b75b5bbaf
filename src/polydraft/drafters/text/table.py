"""One bounded table of what was learnt: a row of entries for each key, for ADED's updates and the phrases of Lookahead and Ouroboros.

A full table gives the row of the key least recently used to a new one; a full row gives the place of its last entry.
For compiled functions it is a tuple of arrays: keys [R], links [3, R] (older, newer, next in the bucket), buckets (a power of two),
about [3] (used, oldest, newest), and rows [R, 1 + width * words] of int32, each the number of its entries, then those, the foremost first.
"""

import threading

import numpy as np

from polydraft.errors import InvalidInputError
from polydraft.numerics.compiled_code import njit

KEYS, LINKS, BUCKETS, ABOUT, ROWS = range(5)
USED, OLDEST, NEWEST = range(3)


class Table:
    """Entries by key. May be used by several threads at a time.

    max_keys: keys that have a row.  width: entries of a row.  words: of an entry.
    Memory: 28 bytes a key at most, and 4 a word; allocated at once.

    Raises:
        InvalidInputError: a size below 1.

    Example:
        >>> table = Table(max_keys=2, width=2, words=1)
        >>> for key, entry in ((7, 1), (7, 2), (8, 3), (7, 4), (9, 5)):
        ...     row = claim(table.arrays, key)
        ...     lift(table.arrays[ROWS], row, 1, seat(table.arrays[ROWS], row, 1, (entry,), 1), 0)
        >>> table.entries(7).tolist(), table.entries(8).tolist(), table.entries(9).tolist()
        ([[4], [2]], [], [[5]])
    """

    def __init__(self, max_keys: int, width: int, words: int) -> None:
        if min(max_keys, width, words) < 1:
            raise InvalidInputError(
                f"{max_keys} keys of {width} entries of {words} words were asked for; expected at least 1 each."
            )
        self.width, self.words, self.lock = width, words, threading.RLock()
        buckets = np.full(1 << (max_keys - 1).bit_length(), -1, np.int32)
        links, about = np.full((3, max_keys), -1, np.int32), np.array([0, -1, -1], np.int64)
        rows = np.zeros((max_keys, 1 + width * words), np.int32)
        self.arrays = np.zeros(max_keys, np.int64), links, buckets, about, rows

    @property
    def num_keys(self) -> int:
        return self.arrays[ABOUT].item(USED)

    @property
    def num_entries(self) -> int:
        return int(self.arrays[ROWS][:, 0].sum())

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in self.arrays)

    def entries(self, key: int) -> np.ndarray:
        """[size, words] of a key, the foremost first; none of one that is not there."""
        with self.lock:
            at = find(self.arrays, key)
            size = self.arrays[ROWS][at, 0] if at >= 0 else 0
            return self.arrays[ROWS][at, 1 : 1 + size * self.words].reshape(size, self.words).copy()

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Its rows from the least to the most recently used: key [P], size [P], entry [P, width, words]."""
        with self.lock:
            order = by_age(self.arrays)
            rows = self.arrays[ROWS][order]
            return {
                "key": self.arrays[KEYS][order],
                "size": rows[:, 0].copy(),
                "entry": rows[:, 1:].reshape(len(rows), self.width, self.words),
            }

    def read_arrays(self, key: np.ndarray, size: np.ndarray, entry: np.ndarray) -> None:
        """Put in the rows of `to_arrays`; of more keys than fit the most recent stay."""
        rows = np.hstack([size[:, None], entry.reshape(len(entry), self.width * self.words)])
        with self.lock:
            for number, row in zip(key.tolist(), rows, strict=True):
                self.arrays[ROWS][claim(self.arrays, number)] = row


@njit(cache=True)
def _bucket(key, buckets):
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    return np.int64((mixed >> np.uint64(32)) & np.uint64(len(buckets) - 1))


@njit(cache=True)
def find(table, key):
    """The row of a key, or -1."""
    keys, links, buckets = table[KEYS], table[LINKS], table[BUCKETS]
    at = buckets[_bucket(key, buckets)]
    while at >= 0 and keys[at] != key:
        at = links[2, at]
    return np.int64(at)


@njit(cache=True)
def _detach(table, at):
    """Take a row out of the order of age."""
    links, about = table[LINKS], table[ABOUT]
    older, newer = links[0, at], links[1, at]
    if older >= 0:
        links[1, older] = newer
    else:
        about[OLDEST] = newer
    if newer >= 0:
        links[0, newer] = older
    else:
        about[NEWEST] = older


@njit(cache=True)
def _make_newest(table, at):
    links, about = table[LINKS], table[ABOUT]
    links[0, at], links[1, at] = about[NEWEST], -1
    if about[NEWEST] >= 0:
        links[1, about[NEWEST]] = at
    else:
        about[OLDEST] = at
    about[NEWEST] = at


@njit(cache=True)
def _touch(table, at):
    """Make a row the most recently used."""
    if table[ABOUT][NEWEST] != at:
        _detach(table, at)
        _make_newest(table, at)


@njit(cache=True)
def _insert(table, key):
    """An empty row for a key that has none, the oldest one's if there is no other."""
    keys, links, buckets, about, rows = table
    if about[USED] < len(keys):
        at = about[USED]
        about[USED] += 1
    else:
        at = about[OLDEST]
        _detach(table, at)
        place = _bucket(keys[at], buckets)
        if buckets[place] == at:
            buckets[place] = links[2, at]
        else:
            before = buckets[place]
            while links[2, before] != at:
                before = links[2, before]
            links[2, before] = links[2, at]
    place = _bucket(key, buckets)
    keys[at], links[2, at], rows[at, 0] = key, buckets[place], 0
    buckets[place] = at
    _make_newest(table, at)
    return at


@njit(cache=True)
def claim(table, key):
    """The row of a key, which is now the most recently used; an empty one if it had none."""
    at = find(table, key)
    if at < 0:
        return np.int64(_insert(table, key))
    _touch(table, at)
    return at


@njit(cache=True)
def seat(rows, at, words, entry, num_known):
    """The number of the entry of a row whose first `num_known` words are these; of a new one, the last, the other words being 0."""
    size, width = rows[at, 0], (rows.shape[1] - 1) // words
    for j in range(size):
        first, k = 1 + j * words, 0
        while k < num_known and rows[at, first + k] == entry[k]:
            k += 1
        if k == num_known:
            return j
    rows[at, 0] = min(size + 1, width)
    last = rows[at, 0] - 1
    for k in range(words):
        rows[at, 1 + last * words + k] = entry[k] if k < num_known else 0
    return last


@njit(cache=True)
def lift(rows, at, words, j, to):
    """Move an entry of a row in front of others."""
    for k in range(words):
        word = rows[at, 1 + j * words + k]
        for i in range(j, to, -1):
            rows[at, 1 + i * words + k] = rows[at, 1 + (i - 1) * words + k]
        rows[at, 1 + to * words + k] = word


@njit(cache=True)
def by_age(table):
    """The rows in use, from the least to the most recently used."""
    order = np.empty(table[ABOUT][USED], np.int64)
    at = np.int64(table[ABOUT][OLDEST])
    for i in range(len(order)):
        order[i] = at
        at = np.int64(table[LINKS][1, at])
    return order
