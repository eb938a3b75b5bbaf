"""A suffix tree of bounded depth over token texts: appends, exact counts of every substring, removal, in flat arrays.

    D      depth: substrings of at most D tokens are counted
    edge   the tokens that lead into a node: a place in the pool, of length depth(node) - depth(parent)
    place  (node, offset): so many tokens of the edge into the node have been matched

A node's count is the number of times its whole string occurs. While a text grows, the suffixes that occurred before have a place
each; one that leaves the tree becomes a leaf, whose edge runs to depth D as the text grows. A text that ends leaves its last
suffixes as nodes of their own, so that each of them ends at a node and can be removed again.
Every edge refers to the latest occurrence of its string: when the oldest text leaves, no edge that stays refers to it.
Siblings are sorted by count, the latest first among equals; the children of the root are not.
Memory: 32 bytes a node and at most 8 in the table of children, at most two nodes a token, 4 bytes a token.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
from numba import njit

from polydraft.drafters.text.suffix_nodes import (
    CHILD,
    COUNT,
    DEPTH,
    END,
    LIVE,
    NEXT,
    PARENT,
    PLACES,
    PREVIOUS,
    START,
    USED,
    SuffixArrays,
    add_to_table,
    child,
    edge,
    free_node,
    link,
    link_sorted,
    new_node,
    rehash,
    resort,
    take_from_table,
    token_at,
    unlink,
)
from polydraft.errors import InvalidInputError

Tokens = Sequence[int] | np.ndarray
ROOM = 64
"""Nodes and tokens of a new tree."""


class SuffixTree:
    """One growing text (`extend`), or many finished ones (`add`, `remove_oldest`), never both.

    depth: longest substring that is counted.  max_tokens: bound of the finished texts together, or None.
    arrays: the tree, for compiled callers.

    Raises:
        InvalidInputError: depth outside 2 .. 1024, max_tokens below 1 or above 2^30.

    Example:
        >>> tree = SuffixTree()
        >>> tree.extend([1, 2, 3, 1, 2, 4])
        >>> tree.count([1, 2]), tree.count([2, 3]), tree.count([3, 4])
        (2, 1, 0)
    """

    def __init__(self, depth: int = 64, max_tokens: int | None = None) -> None:
        if not 2 <= depth <= 1024 or not 1 <= (1 if max_tokens is None else max_tokens) <= 1 << 30:
            raise InvalidInputError(
                f"depth={depth} and max_tokens={max_tokens} were given; expected 2 <= depth <= 1024 and 1 <= max_tokens <= 2^30."
            )
        self.depth, self.max_tokens = depth, max_tokens
        self._clear()

    def _clear(self) -> None:
        room = ROOM if self.max_tokens is None else self.max_tokens
        self.arrays = SuffixArrays(
            pool=np.empty(1 << room.bit_length(), np.int32),  # never quite full
            nodes=np.zeros((ROOM, 8), np.int32),
            buckets=np.zeros(ROOM, np.int32),
            places=np.zeros((self.depth + 1, 2), np.int32),  # longest match first
            leaves=np.zeros(self.depth, np.int32),  # of the last suffixes of a growing text; 0: none
            about=np.array([0, 1, 0, 1, 0], np.int64),
        )
        self._texts: deque[tuple[int, int]] = deque()

    @property
    def num_nodes(self) -> int:
        return self.arrays.about.item(LIVE)

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in self.arrays)

    @property
    def num_tokens(self) -> int:
        """Of the growing text, or of all finished ones."""
        return self.arrays.about.item(END) if self.max_tokens is None else sum(b - a for a, b in self._texts)

    @property
    def tokens(self) -> np.ndarray:
        """[T] the growing text."""
        return self.arrays.pool[: self.arrays.about[END]].copy()

    def texts(self) -> list[np.ndarray]:
        """The finished texts, oldest first."""
        pool = self.arrays.pool
        return [pool[np.arange(a, b) & (len(pool) - 1)] for a, b in self._texts]

    def extend(self, tokens: Tokens) -> None:
        """Append to the growing text.

        Raises:
            InvalidInputError: negative ids.
        """
        new, end = np.array(tokens, np.int32), self.arrays.about.item(END)
        if _least(new) < 0:
            raise InvalidInputError(f"token id {new.min()} was given; expected ids >= 0. Use the target's own tokenizer.")
        if self.max_tokens is None and end + len(new) >= len(self.arrays.pool):
            larger = np.empty(1 << (end + len(new)).bit_length(), np.int32)
            larger[:end] = self.arrays.pool[:end]
            self.arrays = self.arrays._replace(pool=larger)
        done = 0
        while (done := _extend(tuple(self.arrays), new, done)) < len(new):
            self._make_room()

    def _make_room(self) -> None:
        nodes, buckets = self.arrays.nodes, self.arrays.buckets
        nodes = np.concatenate([nodes, np.zeros((max(4 * self.depth, len(nodes) // 4), 8), np.int32)])
        self.arrays = self.arrays._replace(nodes=nodes)
        if len(buckets) < len(nodes):
            buckets = np.zeros(2 * len(buckets) << (len(nodes) > 2 * len(buckets)), np.int32)
            self.arrays = self.arrays._replace(buckets=buckets)
            rehash(self.arrays)

    def count(self, tokens: Tokens) -> int:
        """Occurrences of a string of 1 to D tokens."""
        return _count(self.arrays, np.asarray(tokens, np.int32))

    def add(self, tokens: Tokens) -> None:
        """Put in a finished text. The oldest leave first; of a text beyond `max_tokens` the end stays.

        Raises:
            InvalidInputError: a tree without `max_tokens`; negative ids.
        """
        if self.max_tokens is None:
            raise InvalidInputError("a finished text was given to a tree of one growing text; expected a tree with max_tokens.")
        new = np.asarray(tokens, np.int32)[-self.max_tokens :]
        while self._texts and self.arrays.about.item(END) - self._texts[0][0] + len(new) > self.max_tokens:
            self.remove_oldest()
        begin = self.arrays.about.item(END)
        self.extend(new)
        while not _end(self.arrays, begin):
            self._make_room()
        self._texts.append((begin, self.arrays.about.item(END)))

    def remove_oldest(self) -> None:
        """Take out the finished text that was put in first; it costs its own length."""
        _remove(self.arrays, *self._texts.popleft())
        if len(self.arrays.nodes) > 16 * ROOM + 8 * self.num_nodes:  # give memory back: the same texts in new arrays
            texts = self.texts()
            self._clear()
            for text in texts:
                self.add(text)


# Growth


@njit(cache=True)
def _least(tokens):
    least = 0
    for t in tokens:
        least = min(least, t)
    return least


@njit(cache=True)
def _split(tree, num_places, n, offset, start):
    """A node after `offset` tokens of the edge into n, whose latest occurrence begins at `start`; places move along."""
    nodes, places = tree.nodes, tree.places
    parent, count, length = nodes[n, PARENT], nodes[n, COUNT], edge(nodes, n)
    for i in range(num_places):
        count += places[i, 0] == n and offset <= places[i, 1] < length
    take_from_table(tree, n)
    u = new_node(tree, parent, start, nodes[parent, DEPTH] + offset, count)
    link(nodes, u, nodes[n, PREVIOUS], nodes[n, NEXT])
    nodes[n, PARENT], nodes[u, CHILD] = u, n
    nodes[n, PREVIOUS] = nodes[n, NEXT] = 0
    nodes[n, START] = (nodes[n, START] + offset) & (len(tree.pool) - 1)
    add_to_table(tree, u)
    add_to_table(tree, n)
    resort(nodes, u)
    for i in range(num_places):
        if places[i, 0] == n:
            if places[i, 1] <= offset:
                places[i, 0] = u
            else:
                places[i, 1] -= offset
    return u


@njit(cache=True)
def _extend(tree, tokens, done):
    """Append tokens[done:], as far as there is room for nodes; returns how many are done.

    tree: `SuffixArrays` as a plain tuple, which costs a call from Python less.
    """
    tree = SuffixArrays(*tree)
    pool, nodes, places, leaves, about = tree.pool, tree.nodes, tree.places, tree.leaves, tree.about
    mask, D = len(pool) - 1, len(leaves)
    while done < len(tokens):
        if about[USED] + 2 * about[PLACES] + 4 > len(nodes):
            return done
        token, end = tokens[done], about[END]
        pool[end & mask] = token
        leaves[end % D] = 0
        places[about[PLACES], 0] = places[about[PLACES], 1] = 0
        about[PLACES] += 1
        i, num = 0, about[PLACES]
        while i < num:
            n, offset = places[i, 0], places[i, 1]
            above = nodes[nodes[n, PARENT], DEPTH] + offset  # tokens matched so far
            if offset < edge(nodes, n):
                stays = token_at(tree, nodes[n, START] + offset) == token
                if stays:
                    offset += 1
                else:
                    n = _split(tree, num, n, offset, end - offset)
            else:
                c = child(tree, n, token)
                stays = c > 0
                if stays:
                    n, offset = c, 1
            if stays:
                places[i, 0], places[i, 1] = n, offset
                if offset == edge(nodes, n):
                    nodes[n, COUNT] += 1
                    nodes[n, START] = (end + 1 - offset) & mask  # the latest occurrence begins with the same token
                    resort(nodes, n)
                    stays = nodes[n, DEPTH] < D
            else:
                leaf = new_node(tree, n, end, D, 1)
                link_sorted(nodes, leaf, 0, nodes[n, CHILD])
                add_to_table(tree, leaf)
                leaves[(end - above) % D] = leaf
            if stays:
                i += 1
            else:  # this suffix needs no place any more
                for j in range(i, num - 1):
                    places[j, 0], places[j, 1] = places[j + 1, 0], places[j + 1, 1]
                num -= 1
        about[PLACES] = num
        about[END] = end + 1
        done += 1
    return done


@njit(cache=True)
def _end(tree, begin):
    """End the text that began at `begin`: its last suffixes become nodes. False if there is no room for them."""
    nodes, places, leaves, about = tree.nodes, tree.places, tree.leaves, tree.about
    if about[USED] + about[PLACES] + 1 > len(nodes):
        return False
    end, num, D = about[END], about[PLACES], len(leaves)
    for s in range(max(begin, end - D + 1), end):
        if leaves[s % D]:
            nodes[leaves[s % D], DEPTH] = end - s
    for i in range(num):
        n, offset = places[i, 0], places[i, 1]
        if offset < edge(nodes, n):
            _split(tree, num, n, offset, end - offset)
    about[PLACES] = 0
    return True


# Removal


@njit(cache=True)
def _remove(tree, begin, end):
    """Count the substrings of the oldest text down; what occurs no more leaves."""
    nodes, D = tree.nodes, len(tree.leaves)
    path = np.empty(D, np.int64)
    for s in range(begin, end):
        n, at, last, size = 0, s, min(s + D, end), 0
        while at < last:
            n = child(tree, n, token_at(tree, at))
            at += edge(nodes, n)
            path[size] = n
            size += 1
        for n in path[:size][::-1]:
            nodes[n, COUNT] -= 1
            if nodes[n, COUNT] == 0:
                unlink(nodes, n)
                free_node(tree, n)
                continue
            resort(nodes, n)
            c = nodes[n, CHILD]
            if c and not nodes[c, NEXT] and nodes[c, COUNT] == nodes[n, COUNT]:
                _merge(tree, n, c)


@njit(cache=True)
def _merge(tree, n, c):
    """Let the only child of n take its place."""
    nodes = tree.nodes
    take_from_table(tree, c)
    nodes[c, START] = (nodes[c, START] - edge(nodes, n)) & (len(tree.pool) - 1)
    nodes[c, PARENT] = nodes[n, PARENT]
    link(nodes, c, nodes[n, PREVIOUS], nodes[n, NEXT])
    free_node(tree, n)
    add_to_table(tree, c)


# Looking up


@njit(cache=True)
def _find(tree, tokens, begin):
    """(node, offset) of the string tokens[begin:]; node 0 if it does not occur."""
    nodes, mask = tree.nodes, len(tree.pool) - 1
    n, at = 0, begin
    while True:
        n = child(tree, n, tokens[at])
        if not n:
            return 0, 0
        length = min(edge(nodes, n), (tree.about[END] - nodes[n, START]) & mask)
        offset = 1
        while offset < length and at + offset < len(tokens):
            if token_at(tree, nodes[n, START] + offset) != tokens[at + offset]:
                return 0, 0
            offset += 1
        at += offset
        if at == len(tokens):
            return n, offset
        if offset < edge(nodes, n):
            return 0, 0


@njit(cache=True)
def ends_of(tree):
    """[L, 2] the place of the last m tokens of the growing text in row m - 1: all lengths that occurred before."""
    return tree.places[: tree.about[PLACES]][::-1]


@njit(cache=True)
def last_of(tree):
    """The last token of the growing text."""
    return tree.pool[tree.about[END] - 1]


@njit(cache=True)
def tail_of(own, other):
    """[L, 2] the places in another tree of the end of this one's growing text, as `ends_of` gives them."""
    end = own.about[END]
    tokens = own.pool[max(0, end - len(other.places) + 1) : end]
    places = np.empty((min(len(tokens), len(other.places) - 2), 2), np.int32)
    for m in range(1, len(places) + 1):
        places[m - 1, 0], places[m - 1, 1] = _find(other, tokens, len(tokens) - m)
        if not places[m - 1, 0]:
            return places[: m - 1]
    return places


@njit(cache=True)
def _count(tree, tokens):
    nodes, places = tree.nodes, tree.places
    n, offset = _find(tree, tokens, 0)
    count = nodes[n, COUNT] if n else 0
    for i in range(tree.about[PLACES] if n else 0):
        count += places[i, 0] == n and offset <= places[i, 1] < edge(nodes, n)
    return count
