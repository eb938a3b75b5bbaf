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

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numba import njit

from polydraft.errors import InvalidInputError

__all__ = ["SuffixTree", "Tokens", "ends_of", "last_of", "tail_of"]

Tokens = Sequence[int] | np.ndarray

COUNT, PARENT, CHILD, NEXT, PREVIOUS, START, CHAIN, DEPTH = range(8)
END, USED, FREE, LIVE, PLACES = range(5)
ROOM = 64
"""Nodes and tokens of a new tree."""
FINDINGS = {
    1: "a child that does not name its parent",
    2: "siblings that are out of order",
    3: "a node whose count is below its children's",
    4: "a node that the table of children does not find",
    5: "a node that is no deeper than its parent",
    6: "an edge that refers to a text that has left",
    7: "a number of nodes that is not the number counted",
    8: "an inner node that could be merged with its only child",
}


class SuffixTree:
    """One growing text (`extend`), or many finished ones (`add`, `remove`), never both.

    depth: longest substring that is counted.  max_tokens: bound of the finished texts together, or None.

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
        self._pool = np.empty(1 << room.bit_length(), np.int32)  # a ring, never quite full
        self._nodes = np.zeros((ROOM, 8), np.int32)
        self._buckets = np.zeros(ROOM, np.int32)
        self._places = np.zeros((self.depth + 1, 2), np.int32)  # longest match first
        self._leaves = np.zeros(self.depth, np.int32)  # of the last suffixes of a growing text; 0: none
        self._about = np.array([0, 1, 0, 1, 0], np.int64)
        self._texts: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._next_id = 0

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self._pool, self._nodes, self._buckets, self._places, self._leaves, self._about

    @property
    def num_nodes(self) -> int:
        return int(self._about[LIVE])

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in self.arrays)

    @property
    def num_tokens(self) -> int:
        """Of the growing text, or of all finished ones."""
        return int(self._about[END]) if self.max_tokens is None else sum(b - a for a, b in self._texts.values())

    def tokens(self) -> np.ndarray:
        """[T] the growing text."""
        return self._pool[: self._about[END]].copy()

    def texts(self) -> list[np.ndarray]:
        """The finished texts, oldest first."""
        return [self._pool[np.arange(a, b) & (len(self._pool) - 1)] for a, b in self._texts.values()]

    def extend(self, tokens: Tokens) -> None:
        """Append to the growing text.

        Raises:
            InvalidInputError: negative ids.
        """
        new, end = np.array(tokens, np.int32), int(self._about[END])
        if _least(new) < 0:
            raise InvalidInputError(f"token id {new.min()} was given; expected ids >= 0. Use the target's own tokenizer.")
        if self.max_tokens is None and end + len(new) >= len(self._pool):
            larger = np.empty(1 << (end + len(new)).bit_length(), np.int32)
            larger[:end] = self._pool[:end]
            self._pool = larger
        done = 0
        while (done := _extend(self.arrays, new, done, self.depth)) < len(new):
            self._make_room()

    def _make_room(self) -> None:
        more = max(4 * self.depth, len(self._nodes) // 4)
        self._nodes = np.concatenate([self._nodes, np.zeros((more, 8), np.int32)])
        if len(self._buckets) < len(self._nodes):
            self._buckets = np.zeros(2 * len(self._buckets) << (len(self._nodes) > 2 * len(self._buckets)), np.int32)
            _rehash(self.arrays)

    def places(self) -> np.ndarray:
        """[L, 2] the place of the last m tokens of the growing text in row m - 1: all lengths that occurred before."""
        return ends_of(self.arrays)

    def count(self, tokens: Tokens) -> int:
        """Occurrences of a string of 1 to D tokens."""
        return _count(self.arrays, np.asarray(tokens, np.int32))

    def add(self, tokens: Tokens) -> int:
        """Put in a finished text; returns its number. The oldest leave first; of a text beyond `max_tokens` the end stays."""
        most = self._finished()
        new = np.asarray(tokens, np.int32)[-most:]
        while self._texts and int(self._about[END]) - next(iter(self._texts.values()))[0] + len(new) > most:
            self.remove(next(iter(self._texts)))
        begin = int(self._about[END])
        self.extend(new)
        while not _end(self.arrays, begin, self.depth):
            self._make_room()
        self._texts[self._next_id] = (begin, int(self._about[END]))
        self._next_id += 1
        return self._next_id - 1

    def _finished(self) -> int:
        if self.max_tokens is None:
            raise InvalidInputError("a finished text was given to a tree of one growing text; expected a tree with max_tokens.")
        return self.max_tokens

    def remove(self, text: int) -> None:
        """Take a finished text out. The oldest costs its own length; another one also that of those before it.

        Raises:
            InvalidInputError: no such text.
        """
        self._finished()
        if text not in self._texts:
            raise InvalidInputError(
                f"text {text} was to be removed; expected one of {list(self._texts)[:8]} ...: it is not there."
            )
        begin, end = self._texts[text]
        _remove(self.arrays, begin, end, self.depth)
        before = [(a, b) for a, b in self._texts.values() if a < begin]
        for a, b in reversed(before):  # the latest of them first
            _repoint(self.arrays, a, b, begin, end, self.depth)
        del self._texts[text]
        if len(self._nodes) > 16 * ROOM + 8 * self.num_nodes:
            self._compact()

    def _compact(self) -> None:
        """Give memory back: the same texts in new arrays."""
        kept = list(zip(self._texts, self.texts(), strict=True))
        following = self._next_id
        self._clear()
        for number, tokens in kept:
            self._next_id = number
            self.add(tokens)
        self._next_id = following

    def check(self) -> None:
        """Walk the whole tree.

        Raises:
            RuntimeError: naming what is wrong; a tree that only its methods have changed is never wrong.
        """
        oldest = next(iter(self._texts.values()))[0] if self._texts else int(self._about[END]) if self.max_tokens else 0
        found = _check(self.arrays, oldest, self.max_tokens is not None)
        if found:
            raise RuntimeError(f"the suffix tree is damaged: it has {FINDINGS[found]}.")


# Children: a chained table from (parent, first token) to the node, and a sorted list of siblings


@njit(cache=True)
def _bucket(parent, token, buckets):
    mixed = (np.uint64(parent) * np.uint64(0x9E3779B97F4A7C15)) ^ (np.uint64(token) * np.uint64(0xC2B2AE3D27D4EB4F))
    mixed ^= mixed >> np.uint64(32)
    return np.int64((mixed * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)) & (len(buckets) - 1)


@njit(cache=True)
def _find(tree, parent, token):
    """The child that begins with a token, or 0."""
    pool, nodes, buckets = tree[0], tree[1], tree[2]
    n = buckets[_bucket(parent, token, buckets)]
    while n and (nodes[n, PARENT] != parent or pool[nodes[n, START] & (len(pool) - 1)] != token):
        n = nodes[n, CHAIN]
    return n


@njit(cache=True)
def _chain(tree, n):
    pool, nodes, buckets = tree[0], tree[1], tree[2]
    place = _bucket(nodes[n, PARENT], pool[nodes[n, START] & (len(pool) - 1)], buckets)
    nodes[n, CHAIN], buckets[place] = buckets[place], n


@njit(cache=True)
def _unchain(tree, n):
    pool, nodes, buckets = tree[0], tree[1], tree[2]
    place = _bucket(nodes[n, PARENT], pool[nodes[n, START] & (len(pool) - 1)], buckets)
    if buckets[place] == n:
        buckets[place] = nodes[n, CHAIN]
        return
    before = buckets[place]
    while nodes[before, CHAIN] != n:
        before = nodes[before, CHAIN]
    nodes[before, CHAIN] = nodes[n, CHAIN]


@njit(cache=True)
def _rehash(tree):
    nodes, buckets, about = tree[1], tree[2], tree[5]
    buckets[:] = 0
    for n in range(1, about[USED]):
        if nodes[n, COUNT] > 0:
            _chain(tree, n)


@njit(cache=True)
def _unlink(nodes, n):
    """Take a node out of its list of siblings."""
    before, after = nodes[n, PREVIOUS], nodes[n, NEXT]
    if before:
        nodes[before, NEXT] = after
    else:
        nodes[nodes[n, PARENT], CHILD] = after
    if after:
        nodes[after, PREVIOUS] = before


@njit(cache=True)
def _link(nodes, n, before, after):
    nodes[n, PREVIOUS], nodes[n, NEXT] = before, after
    if before:
        nodes[before, NEXT] = n
    else:
        nodes[nodes[n, PARENT], CHILD] = n
    if after:
        nodes[after, PREVIOUS] = n


@njit(cache=True)
def _link_sorted(nodes, n):
    """Put a node before the siblings that are no heavier; the root's children just in front."""
    parent, before = nodes[n, PARENT], 0
    after = nodes[parent, CHILD]
    while parent and after and nodes[after, COUNT] > nodes[n, COUNT]:
        before, after = after, nodes[after, NEXT]
    _link(nodes, n, before, after)


@njit(cache=True)
def _rise(nodes, n):
    """Move a node whose count has grown before the siblings that are no heavier."""
    if nodes[n, PARENT] == 0:
        return
    before = nodes[n, PREVIOUS]
    if not before or nodes[before, COUNT] > nodes[n, COUNT]:
        return
    _unlink(nodes, n)
    after = before
    while before and nodes[before, COUNT] <= nodes[n, COUNT]:
        after, before = before, nodes[before, PREVIOUS]
    _link(nodes, n, before, after)


@njit(cache=True)
def _sink(nodes, n):
    """Move a node whose count has shrunk behind the siblings that are heavier."""
    if nodes[n, PARENT] == 0:
        return
    after = nodes[n, NEXT]
    if not after or nodes[after, COUNT] <= nodes[n, COUNT]:
        return
    _unlink(nodes, n)
    before = after
    while after and nodes[after, COUNT] > nodes[n, COUNT]:
        before, after = after, nodes[after, NEXT]
    _link(nodes, n, before, after)


@njit(cache=True)
def _new_node(tree, parent, start, depth, count):
    nodes, about = tree[1], tree[5]
    if about[FREE]:
        n = about[FREE]
        about[FREE] = nodes[n, NEXT]
    else:
        n = about[USED]
        about[USED] += 1
    about[LIVE] += 1
    nodes[n, COUNT], nodes[n, PARENT], nodes[n, CHILD] = count, parent, 0
    nodes[n, START], nodes[n, DEPTH] = start & (len(tree[0]) - 1), depth
    return n


@njit(cache=True)
def _free(tree, n):
    nodes, about = tree[1], tree[5]
    nodes[n, COUNT], nodes[n, NEXT] = 0, about[FREE]
    about[FREE] = n
    about[LIVE] -= 1


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
    nodes, places = tree[1], tree[3]
    parent = nodes[n, PARENT]
    count = nodes[n, COUNT]
    length = nodes[n, DEPTH] - nodes[parent, DEPTH]
    for i in range(num_places):
        if places[i, 0] == n and offset <= places[i, 1] < length:
            count += 1
    _unchain(tree, n)
    u = _new_node(tree, parent, start, nodes[parent, DEPTH] + offset, count)
    _link(nodes, u, nodes[n, PREVIOUS], nodes[n, NEXT])
    nodes[n, PARENT], nodes[u, CHILD] = u, n
    nodes[n, PREVIOUS] = nodes[n, NEXT] = 0
    nodes[n, START] = (nodes[n, START] + offset) & (len(tree[0]) - 1)
    _chain(tree, u)
    _chain(tree, n)
    _rise(nodes, u)
    for i in range(num_places):
        if places[i, 0] == n:
            if places[i, 1] <= offset:
                places[i, 0] = u
            else:
                places[i, 1] -= offset
    return u


@njit(cache=True)
def _extend(tree, tokens, done, D):
    """Append tokens[done:], as far as there is room for nodes; returns how many are done."""
    pool, nodes, places, leaves, about = tree[0], tree[1], tree[3], tree[4], tree[5]
    mask = len(pool) - 1
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
            parent = nodes[n, PARENT]
            length = nodes[n, DEPTH] - nodes[parent, DEPTH] if n else 0
            above = nodes[parent, DEPTH] + offset if n else 0  # tokens matched so far
            stays = True
            if offset < length:
                stays = pool[(nodes[n, START] + offset) & mask] == token
                if stays:
                    offset += 1
                else:
                    n = _split(tree, num, n, offset, end - offset)
            else:
                c = _find(tree, n, token)
                stays = c > 0
                if stays:
                    n, offset = c, 1
            if stays:
                places[i, 0], places[i, 1] = n, offset
                if offset == nodes[n, DEPTH] - nodes[nodes[n, PARENT], DEPTH]:
                    nodes[n, COUNT] += 1
                    nodes[n, START] = (end + 1 - offset) & mask  # the latest occurrence begins with the same token
                    _rise(nodes, n)
                    stays = nodes[n, DEPTH] < D
            else:
                leaf = _new_node(tree, n, end, D, 1)
                _link_sorted(nodes, leaf)
                _chain(tree, leaf)
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
def _end(tree, begin, D):
    """End the text that began at `begin`: its last suffixes become nodes. False if there is no room for them."""
    nodes, places, leaves, about = tree[1], tree[3], tree[4], tree[5]
    if about[USED] + about[PLACES] + 1 > len(nodes):
        return False
    end, num = about[END], about[PLACES]
    for s in range(max(begin, end - D + 1), end):
        if leaves[s % D]:
            nodes[leaves[s % D], DEPTH] = end - s
    for i in range(num):
        n, offset = places[i, 0], places[i, 1]
        if n and offset < nodes[n, DEPTH] - nodes[nodes[n, PARENT], DEPTH]:
            _split(tree, num, n, offset, end - offset)
    about[PLACES] = 0
    return True


# Removal


@njit(cache=True)
def _remove(tree, begin, end, D):
    pool, nodes = tree[0], tree[1]
    mask = len(pool) - 1
    path = np.empty(D, np.int64)
    for s in range(begin, end):
        n, at, last, size = 0, s, min(s + D, end), 0
        while at < last:
            n = _find(tree, n, pool[at & mask])
            at += nodes[n, DEPTH] - nodes[nodes[n, PARENT], DEPTH]
            path[size] = n
            size += 1
        for i in range(size - 1, -1, -1):
            n = path[i]
            nodes[n, COUNT] -= 1
            if nodes[n, COUNT] == 0:
                _unchain(tree, n)
                _unlink(nodes, n)
                _free(tree, n)
                continue
            _sink(nodes, n)
            c = nodes[n, CHILD]
            if c and not nodes[c, NEXT] and nodes[c, COUNT] == nodes[n, COUNT]:
                _merge(tree, n, c)


@njit(cache=True)
def _merge(tree, n, c):
    """Let the only child of n take its place."""
    nodes = tree[1]
    parent = nodes[n, PARENT]
    _unchain(tree, n)
    _unchain(tree, c)
    nodes[c, START] = (nodes[c, START] - (nodes[n, DEPTH] - nodes[parent, DEPTH])) & (len(tree[0]) - 1)
    nodes[c, PARENT] = parent
    _link(nodes, c, nodes[n, PREVIOUS], nodes[n, NEXT])
    _chain(tree, c)
    _free(tree, n)


@njit(cache=True)
def _repoint(tree, begin, end, gone_begin, gone_end, D):
    """Let edges that refer to a text that left refer to this one, where it has their string."""
    pool, nodes = tree[0], tree[1]
    mask = len(pool) - 1
    for s in range(begin, end):
        n, at, last = 0, s, min(s + D, end)
        while at < last:
            n = _find(tree, n, pool[at & mask])
            if (nodes[n, START] - gone_begin) & mask < gone_end - gone_begin:
                nodes[n, START] = at & mask
            at += nodes[n, DEPTH] - nodes[nodes[n, PARENT], DEPTH]


# Looking up


@njit(cache=True)
def _walk(tree, tokens, begin):
    """(node, offset) of the string tokens[begin:]; node 0 if it does not occur."""
    pool, nodes, about = tree[0], tree[1], tree[5]
    mask = len(pool) - 1
    n, at = 0, begin
    while True:
        n = _find(tree, n, tokens[at])
        if not n:
            return 0, 0
        length = min(nodes[n, DEPTH] - nodes[nodes[n, PARENT], DEPTH], (about[END] - nodes[n, START]) & mask)
        offset = 1
        while offset < length and at + offset < len(tokens):
            if pool[(nodes[n, START] + offset) & mask] != tokens[at + offset]:
                return 0, 0
            offset += 1
        at += offset
        if at == len(tokens):
            return n, offset
        if offset < nodes[n, DEPTH] - nodes[nodes[n, PARENT], DEPTH]:
            return 0, 0


@njit(cache=True)
def ends_of(tree):
    """`SuffixTree.places`, for compiled callers."""
    return tree[3][: tree[5][PLACES]][::-1]


@njit(cache=True)
def last_of(tree):
    """The last token of the growing text."""
    return tree[0][tree[5][END] - 1]


@njit(cache=True)
def tail_of(own, other):
    """[L, 2] the places in another tree of the end of this one's growing text, as `ends_of` gives them."""
    pool, end = own[0], own[5][END]
    tokens = pool[max(0, end - len(other[3]) + 1) : end]
    found = np.empty((min(len(tokens), len(other[3]) - 2), 2), np.int32)
    return found[: _matches(other, tokens, found)]


@njit(cache=True)
def _matches(tree, tokens, found):
    for m in range(1, len(found) + 1):
        found[m - 1, 0], found[m - 1, 1] = _walk(tree, tokens, len(tokens) - m)
        if not found[m - 1, 0]:
            return m - 1
    return len(found)


@njit(cache=True)
def _count(tree, tokens):
    nodes, places, about = tree[1], tree[3], tree[5]
    n, offset = _walk(tree, tokens, 0)
    if not n:
        return 0
    length = nodes[n, DEPTH] - nodes[nodes[n, PARENT], DEPTH]
    count = nodes[n, COUNT]
    for i in range(about[PLACES]):
        count += places[i, 0] == n and offset <= places[i, 1] < length
    return count


@njit(cache=True)
def _check(tree, oldest, finished):
    """The number of the first finding, or 0."""
    pool, nodes, about = tree[0], tree[1], tree[5]
    mask = len(pool) - 1
    stack = np.empty(len(nodes), np.int64)
    stack[0], size, seen = 0, 1, 0
    while size:
        size -= 1
        n = stack[size]
        seen += 1
        total, children, c, before = 0, 0, nodes[n, CHILD], 0
        while c:
            if nodes[c, PARENT] != n or nodes[c, PREVIOUS] != before:
                return 1
            if n and before and nodes[before, COUNT] < nodes[c, COUNT]:
                return 2
            if nodes[c, DEPTH] <= nodes[n, DEPTH]:
                return 5
            length = nodes[c, DEPTH] - nodes[n, DEPTH]
            if (nodes[c, START] - oldest) & mask >= about[END] - oldest:
                return 6
            if finished and ((nodes[c, START] - oldest) & mask) + length > about[END] - oldest:
                return 6
            if _find(tree, n, pool[nodes[c, START]]) != c:
                return 4
            total += nodes[c, COUNT]
            children += 1
            if size == len(stack):
                return 7
            stack[size] = c
            size += 1
            before, c = c, nodes[c, NEXT]
        if n and total > nodes[n, COUNT]:
            return 3
        if finished and n and children == 1 and total == nodes[n, COUNT]:
            return 8
    return 0 if seen == about[LIVE] else 7
