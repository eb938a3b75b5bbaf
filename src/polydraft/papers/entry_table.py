"""One bounded table of what was learnt: a row of entries for each key, for ADED's updates and the phrases of Lookahead and Ouroboros.

A full table gives the row of the key that was used longest ago to a new one; a full row gives the place of its last entry.
"""

import threading
from typing import NamedTuple

import numpy as np

from polydraft.errors import InvalidInputError
from polydraft.numerics.compiled_code import njit

LINK = np.dtype([(name, np.int32) for name in ("older", "newer", "next", "num_entries")])
"""Of a row: its neighbours by age, and the next one in its bucket, -1 for none; and the number of its entries."""
ABOUT = np.dtype([("used", np.int64), ("oldest", np.int64), ("newest", np.int64)])


class TableArrays(NamedTuple):
    """A table of R rows for compiled functions.

    keys: [R].  links: [R] of LINK.  buckets: the first row of each, a power of two.  about: [1] of ABOUT.
    entries: [R, width, words] of int32, of each row the foremost first.
    """

    keys: np.ndarray
    links: np.ndarray
    buckets: np.ndarray
    about: np.ndarray
    entries: np.ndarray


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
        ...     lift(table.arrays, row, seat(table.arrays, row, (entry,), 1), 0)
        >>> table.entries(7).tolist(), table.entries(8).tolist(), table.entries(9).tolist()
        ([[4], [2]], [], [[5]])
    """

    def __init__(self, max_keys: int, width: int, words: int) -> None:
        if min(max_keys, width, words) < 1:
            raise InvalidInputError(
                f"{max_keys} keys of {width} entries of {words} words were asked for; expected at least 1 each."
            )
        self.width = width
        self.words = words
        self.lock = threading.RLock()
        buckets = np.full(1 << (max_keys - 1).bit_length(), -1, np.int32)
        links = np.full(max_keys, -1, LINK)
        about = np.array([(0, -1, -1)], ABOUT)
        links["num_entries"] = 0
        entries = np.zeros((max_keys, width, words), np.int32)
        self.arrays = TableArrays(np.zeros(max_keys, np.int64), links, buckets, about, entries)

    @property
    def num_keys(self) -> int:
        return self.arrays.about["used"].item()

    @property
    def num_entries(self) -> int:
        return int(self.arrays.links["num_entries"].sum())

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in self.arrays)

    def entries(self, key: int) -> np.ndarray:
        """[size, words] of a key, the foremost first; none of one that is not there."""
        with self.lock:
            at = find(self.arrays, key)
            return self.arrays.entries[at, : self.arrays.links[at]["num_entries"] if at >= 0 else 0].copy()

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Its rows, the longest unused first: key [P], size [P], entry [P, width, words]."""
        with self.lock:
            order = by_age(self.arrays)
            return {
                "key": self.arrays.keys[order],
                "size": self.arrays.links["num_entries"][order],
                "entry": self.arrays.entries[order],
            }

    def read_arrays(self, key: np.ndarray, size: np.ndarray, entry: np.ndarray) -> None:
        """Put in the rows of `to_arrays`; of more keys than fit the most recent stay."""
        with self.lock:
            for number, num_entries, row in zip(key.tolist(), size.tolist(), entry, strict=True):
                at = claim(self.arrays, number)
                self.arrays.links[at]["num_entries"] = num_entries
                self.arrays.entries[at] = row


@njit(cache=True)
def _bucket(key, buckets):
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    return np.int64((mixed >> np.uint64(32)) & np.uint64(len(buckets) - 1))


@njit(cache=True)
def find(table, key):
    """The row of a key, or -1."""
    at = table.buckets[_bucket(key, table.buckets)]
    while at >= 0 and table.keys[at] != key:
        at = table.links[at].next
    return np.int64(at)


@njit(cache=True)
def _detach(table, at):
    """Take a row out of the order of age."""
    links = table.links
    about = table.about[0]
    older = links[at].older
    newer = links[at].newer
    if older >= 0:
        links[older].newer = newer
    else:
        about.oldest = newer
    if newer >= 0:
        links[newer].older = older
    else:
        about.newest = older


@njit(cache=True)
def _make_newest(table, at):
    links = table.links
    about = table.about[0]
    links[at].older = about.newest
    links[at].newer = -1
    if about.newest >= 0:
        links[about.newest].newer = at
    else:
        about.oldest = at
    about.newest = at


@njit(cache=True)
def _touch(table, at):
    """Make a row the most recently used."""
    if table.about[0].newest != at:
        _detach(table, at)
        _make_newest(table, at)


@njit(cache=True)
def _insert(table, key):
    """An empty row for a key that has none, the oldest one's if there is no other."""
    keys = table.keys
    links = table.links
    buckets = table.buckets
    about = table.about[0]
    if about.used < len(keys):
        at = about.used
        about.used += 1
    else:
        at = about.oldest
        _detach(table, at)
        place = _bucket(keys[at], buckets)
        if buckets[place] == at:
            buckets[place] = links[at].next
        else:
            before = buckets[place]
            while links[before].next != at:
                before = links[before].next
            links[before].next = links[at].next
    place = _bucket(key, buckets)
    links[at].next = buckets[place]
    keys[at] = key
    links[at].num_entries = 0
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
def seat(table, at, entry, num_known):
    """The number of the entry of a row whose first `num_known` words are these; of a new one, the last, the other words being 0."""
    row = table.entries[at]
    link = table.links[at]
    for j in range(link.num_entries):
        k = 0
        while k < num_known and row[j, k] == entry[k]:
            k += 1
        if k == num_known:
            return np.int64(j)
    link.num_entries = min(link.num_entries + 1, len(row))
    last = np.int64(link.num_entries) - 1
    for k in range(row.shape[1]):
        row[last, k] = entry[k] if k < num_known else 0
    return last


@njit(cache=True)
def lift(table, at, j, to):
    """Move an entry of a row in front of others."""
    row = table.entries[at]
    for k in range(row.shape[1]):
        word = row[j, k]
        for i in range(j, to, -1):
            row[i, k] = row[i - 1, k]
        row[to, k] = word


@njit(cache=True)
def by_age(table):
    """The rows in use, the longest unused first."""
    about = table.about[0]
    order = np.empty(about.used, np.int64)
    at = np.int64(about.oldest)
    for i in range(len(order)):
        order[i] = at
        at = np.int64(table.links[at].newer)
    return order
