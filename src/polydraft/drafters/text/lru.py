"""A bounded index from keys to rows of a caller's arrays: when it is full, the key least recently used gives its row away.

It is a tuple of arrays, so that compiled functions of several stores share it: keys [R], links [3, R] (older, newer, next in the
bucket), buckets (a power of two), about [3] (used, oldest, newest). Memory: 20 bytes a row, and at most 8 of buckets.
"""

import numpy as np
from numba import njit

KEYS, LINKS, BUCKETS, ABOUT = range(4)
USED, OLDEST, NEWEST = range(3)


def new_index(rows: int) -> tuple[np.ndarray, ...]:
    """An empty index of so many rows.

    Example:
        >>> index = new_index(2)
        >>> insert(index, 7), insert(index, 8), touch(index, 0), insert(index, 9)
        (0, 1, None, 1)
        >>> find(index, 7), find(index, 8), by_age(index).tolist()
        (0, -1, [0, 1])
    """
    buckets = np.full(1 << (rows - 1).bit_length(), -1, np.int32)
    return np.zeros(rows, np.int64), np.full((3, rows), -1, np.int32), buckets, np.array([0, -1, -1], np.int64)


def num_used(index: tuple[np.ndarray, ...]) -> int:
    """Rows in use."""
    return int(index[ABOUT][USED])


@njit(cache=True)
def _bucket(key, buckets):
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    return np.int64((mixed >> np.uint64(32)) & np.uint64(len(buckets) - 1))


@njit(cache=True)
def find(index, key):
    """The row of a key, or -1."""
    keys, links, buckets, _ = index
    at = buckets[_bucket(key, buckets)]
    while at >= 0 and keys[at] != key:
        at = links[2, at]
    return np.int64(at)


@njit(cache=True)
def _detach(index, at):
    """Take a row out of the order of age."""
    links, about = index[LINKS], index[ABOUT]
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
def _make_newest(index, at):
    links, about = index[LINKS], index[ABOUT]
    links[0, at], links[1, at] = about[NEWEST], -1
    if about[NEWEST] >= 0:
        links[1, about[NEWEST]] = at
    else:
        about[OLDEST] = at
    about[NEWEST] = at


@njit(cache=True)
def touch(index, at):
    """Make a row the most recently used."""
    if index[ABOUT][NEWEST] != at:
        _detach(index, at)
        _make_newest(index, at)


@njit(cache=True)
def insert(index, key):
    """A row for a key that has none, the oldest one's if there is no other; its old contents are the caller's to clear."""
    keys, links, buckets, about = index
    if about[USED] < len(keys):
        at = about[USED]
        about[USED] += 1
    else:
        at = about[OLDEST]
        _detach(index, at)
        place = _bucket(keys[at], buckets)
        if buckets[place] == at:
            buckets[place] = links[2, at]
        else:
            before = buckets[place]
            while links[2, before] != at:
                before = links[2, before]
            links[2, before] = links[2, at]
    place = _bucket(key, buckets)
    keys[at], links[2, at] = key, buckets[place]
    buckets[place] = at
    _make_newest(index, at)
    return at


@njit(cache=True)
def by_age(index):
    """The rows in use, from the least to the most recently used."""
    order = np.empty(index[ABOUT][USED], np.int64)
    at = np.int64(index[ABOUT][OLDEST])
    for i in range(len(order)):
        order[i] = at
        at = np.int64(index[LINKS][1, at])
    return order
