"""Texts with their suffixes in order: the one index under prompt lookup, SuffixDecoding, REST and the corpus of ADED.

    order     places of the texts, sorted by what stands from there on: occurrences of a string are neighbours, an interval low .. high
    pending   the ends of a growing text that occurred before, longest first, each as the interval of its other occurrences
    depth     minimum number of tokens by which suffixes are sorted; no longer string is looked up

A string of q tokens occurs as often as its interval is long, and once for each pending end of q tokens or more within it, see `growing_text`.
Texts are sorted whole by libdivsufsort (Mori; bound by `pydivsufsort`).
"""

from typing import NamedTuple

import numpy as np

from polydraft.drafters.grown_tree import Limits, add_best, is_full, plant
from polydraft.numerics.compiled_code import njit

ABOUT = np.dtype([(name, np.int64) for name in ("length", "num_sorted", "num_pending", "depth", "separator")])
"""Of the whole: tokens, suffixes in the order, pending ends, the depth, the id that ends a text."""
INTERVAL = np.dtype([("low", np.int64), ("high", np.int64)])
"""Of the order: the suffixes low .. high - 1."""
PROBES = 32
"""Places of an interval that are looked at for its children: so many or more where there are as many, and less than twice as many."""
NO_SEPARATOR = np.iinfo(np.int32).max
"""The id behind a text in a store: beyond all others, as order wants it."""
NO_TABLE = np.empty(0, np.int64)


class Suffixes(NamedTuple):
    """Texts as compiled functions read them; those of a growing one have room for more.

    text: tokens.  order: places of suffixes.  first: [V + 1] where the suffixes that begin with a token begin in the order, or empty.
    pending: [depth] of INTERVAL.  about: [1] of ABOUT.
    """

    text: np.ndarray
    order: np.ndarray
    first: np.ndarray
    pending: np.ndarray
    about: np.ndarray


class Candidates(NamedTuple):
    """Tokens that may be drafted next. parents: nodes that they would hang on.  low, high, latest: their intervals, and the latest place there.
    shares: of the occurrences above.  masses: of the path."""

    parents: np.ndarray
    tokens: np.ndarray
    low: np.ndarray
    high: np.ndarray
    latest: np.ndarray
    shares: np.ndarray
    masses: np.ndarray


def sort_suffixes(text: np.ndarray) -> np.ndarray:
    """[T] uint32: a suffix that ends comes before those that go on."""
    if not len(text):
        return np.empty(0, np.uint32)
    from pydivsufsort import divsufsort  # most texts are never sorted whole

    return divsufsort(text).astype(np.uint32)


def suffixes(text: np.ndarray, order: np.ndarray, first: np.ndarray, depth: int, separator: int) -> Suffixes:
    """Of finished texts."""
    about = np.array([(len(text), len(text), 0, depth, separator)], ABOUT)
    return Suffixes(text, order, first, np.empty(0, INTERVAL), about)


# Looking up


@njit(cache=True)
def _token(text, order, length, i, offset):
    """The token at an offset into the i-th suffix; -1 behind the end."""
    place = np.int64(order[i]) + offset
    return np.int64(text[place]) if place < length else np.int64(-1)


@njit(cache=True)
def _edge(text, order, length, low, high, offset, token):
    """The first suffix in low .. high whose token at the offset is not below `token`."""
    while low < high:
        middle = (low + high) // 2
        if _token(text, order, length, middle, offset) < token:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True)
def narrow(text, order, length, low, high, offset, token):
    """The part of an interval whose token at the offset is this one; where it is empty, where it would be."""
    low = _edge(text, order, length, low, high, offset, token)
    if low == high or _token(text, order, length, low, offset) != token:
        return low, low
    return low, _edge(text, order, length, low + 1, high, offset, token + 1)


@njit(cache=True)
def find(index, tokens, begin):
    """The interval of the string tokens[begin:]."""
    first = index.first
    about = index.about[0]
    low = np.int64(0)
    high = about.num_sorted
    num_matched = 0
    if len(first):
        token = tokens[begin]
        num_matched = 1
        if token >= len(first) - 1:
            return low, low  # beyond the vocabulary
        low = first[token]
        high = first[token + 1]
    for k in range(num_matched, len(tokens) - begin):
        if low == high:
            break
        low, high = narrow(index.text, index.order, about.length, low, high, k, np.int64(tokens[begin + k]))
    return low, high


@njit(cache=True)
def _pending_in(index, low, high, length):
    """(number, latest place) of the pending ends of `length` tokens or more that begin like an interval of so many."""
    number = 0
    latest = np.int64(-1)
    about = index.about[0]
    for i in range(about.num_pending - length + 1):
        if low <= index.pending[i].low < high:
            number = number + 1
            latest = about.length - about.num_pending + i
    return number, latest


@njit(cache=True)
def occurrences(index, low, high, length):
    """How often the string of an interval occurs with `length` tokens or more from its begin on."""
    return high - low + _pending_in(index, low, high, length)[0]


@njit(cache=True)
def count(index, tokens):
    """Occurrences of a string of 1 to `depth` tokens."""
    low, high = find(index, tokens, 0)
    return occurrences(index, low, high, len(tokens))


@njit(cache=True)
def matches_of(index):
    """[L] intervals of the last m tokens of the growing text in row m - 1: all lengths that occurred before."""
    return index.pending[: index.about[0].num_pending][::-1]


@njit(cache=True)
def latest_places(index, n, places):
    """Fill in where the last n tokens of the growing text went on before, the latest places first; returns how many."""
    order = index.order
    pending = index.pending
    about = index.about[0]
    longer = about.num_pending - n
    number = 0
    if longer < 0:
        return 0
    low = pending[longer].low
    high = pending[longer].high
    for i in range(longer - 1, -1, -1):
        if number < len(places) and low <= pending[i].low < high:
            places[number] = about.length - about.num_pending + i + n
            number += 1
    for i in range(low, high):
        place = np.int64(order[i]) + n
        at = number
        if number < len(places):
            number += 1
        elif place > places[number - 1]:
            at -= 1
        else:
            continue
        while at > 0 and places[at - 1] < place:
            places[at] = places[at - 1]
            at -= 1
        places[at] = place
    return number


@njit(cache=True)
def matches_in(index, own):
    """[L] the intervals in other texts of the end of a growing one, as `matches_of` gives them."""
    end = own.about[0].length
    depth = index.about[0].depth
    tokens = own.text[max(0, end - depth + 1) : end]
    intervals = np.empty(len(tokens), INTERVAL)
    for m in range(1, len(tokens) + 1):
        low, high = find(index, tokens, len(tokens) - m)
        if low == high:
            return intervals[: m - 1]
        intervals[m - 1].low = low
        intervals[m - 1].high = high
    return intervals


# Drafting


@njit(cache=True)
def new_candidates(limits):
    """Room for the candidates of drafts within limits; what does not fit is too unlikely to matter."""
    room = 2 * PROBES + 11 * limits.max_nodes
    places = np.empty((5, room), np.int64)
    chances = np.empty((2, room))
    return Candidates(places[0], places[1], places[2], places[3], places[4], chances[0], chances[1])


@njit(cache=True, error_model="numpy")
def draft(trial, index, low, high, m, how, limits, candidates):
    """Plant and grow the trie of what follows an interval of m tokens, the most probable nodes first; returns their sum of probabilities.

    how: (most nodes, smoothing, min_prob). A node's score is n(sc)/n(s) * |s|/(|s| + smoothing), s the match and the path above it;
    the product along its path is min_prob or more where the path forks. Of equally frequent children the latest one comes first.
    """
    most, smoothing, min_prob = how
    plant(trial, 0, Limits(min(limits.max_nodes, most), limits.max_depth, limits.width))
    parents = candidates.parents
    masses = candidates.masses
    size = 0
    node = 0
    path_mass = 1.0
    total_mass = 0.0
    while not is_full(trial):
        level = trial.nodes[node].depth
        if level < limits.max_depth and m + level < index.about[0].depth:
            begin = size
            size = _add_children(
                index, low, high, m + level, smoothing, min_prob / path_mass, candidates, size
            )
            for i in range(begin, size):
                masses[i] = path_mass * candidates.shares[i]
                parents[i] = node
        best, node = add_best(trial, parents, masses, candidates.tokens, candidates.shares, size)
        if best < 0:
            break
        low = candidates.low[best]
        high = candidates.high[best]
        path_mass = masses[best]
        total_mass += path_mass
    return total_mass


@njit(cache=True)
def _make_room(candidates, begin, size, share, latest):
    """Where a candidate belongs among those from `begin` on: more frequent ones first, of equally frequent ones the latest.

    Its share and latest place are written there; what is behind it moves on by one.
    """
    shares = candidates.shares
    latests = candidates.latest
    at = size
    while at > begin and (shares[at - 1] < share or (shares[at - 1] == share and latests[at - 1] < latest)):
        above = at - 1
        candidates.tokens[at] = candidates.tokens[above]
        candidates.low[at] = candidates.low[above]
        candidates.high[at] = candidates.high[above]
        latests[at] = latests[above]
        shares[at] = shares[above]
        at = above
    shares[at] = share
    latests[at] = latest
    return at


@njit(cache=True, error_model="numpy")
def _add_children(index, low, high, offset, smoothing, min_share, candidates, begin):
    """Put the tokens that follow an interval of `offset` tokens, with a share of `min_share` or more, behind `begin` candidates."""
    text = index.text
    order = index.order
    about = index.about[0]
    length = about.length
    trust = offset / (offset + smoothing)
    continued = _pending_in(index, low, high, offset + 1)[0]
    total = high - low + continued
    step = max(1, (high - low) // PROBES, min(high - low, int(min_share * total / trust) - continued))
    size = begin
    child = low
    probe = low
    while probe < high and high - child >= step and size < len(candidates.shares):
        token = _token(text, order, length, probe, offset)
        end = high
        if _token(text, order, length, high - 1, offset) != token:
            end = _edge(text, order, length, probe + 1, high - 1, offset, token + 1)
        child = _edge(text, order, length, child, probe, offset, token)
        if token >= 0 and token != about.separator:
            number, latest = _pending_in(index, child, end, offset + 1)
            number += end - child
            if number == total or trust * number >= min_share * total:
                if smoothing > 0 and latest < 0 and end - child <= PROBES and number < total:
                    for i in range(child, end):
                        latest = max(latest, np.int64(order[i]))
                at = _make_room(candidates, begin, size, trust * number / total, latest)
                candidates.tokens[at] = token
                candidates.low[at] = child
                candidates.high[at] = end
                size += 1
        child = end
        probe = max(end, probe + step)
    return size


# Joining


@njit(cache=True)
def merge(text, order, others, cut, depth):
    """The order of all texts less the first `cut` tokens. order: of the suffixes there were.  others: of those behind them."""
    merged = np.empty(len(order) + len(others) - cut, order.dtype)
    size = 0
    at = 0
    for k in range(len(others) + 1):
        end = len(order) if k == len(others) else _rank(text, order, at, others[k], depth)
        while at < end:
            if order[at] >= cut:
                merged[size] = order[at] - cut
                size += 1
            at += 1
        if k < len(others):
            merged[size] = others[k] - cut
            size += 1
    return merged


@njit(cache=True)
def _rank(text, order, low, place, depth):
    """The first suffix from `low` on that is not below the one at a place, by so many tokens."""
    high = len(order)
    while low < high:
        middle = (low + high) // 2
        below = False
        for k in range(min(depth, len(text) - place)):
            ours = text[np.int64(order[middle]) + k]
            theirs = text[np.int64(place) + k]
            if ours != theirs:
                below = ours < theirs
                break
        if below:
            low = middle + 1
        else:
            high = middle
    return low
