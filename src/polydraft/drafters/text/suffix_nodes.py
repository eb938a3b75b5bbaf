"""The nodes of a suffix tree in flat arrays, each in a table of children and in its parent's list of them, sorted by count."""

from typing import NamedTuple

import numpy as np
from numba import njit

COUNT, PARENT, CHILD, NEXT, PREVIOUS, START, CHAIN, DEPTH = range(8)
"""Columns of the nodes. CHILD: the first one.  NEXT, PREVIOUS: siblings; NEXT also links free nodes.  CHAIN: of the table."""
END, USED, FREE, LIVE, PLACES = range(5)
"""What is known of the whole: tokens in the pool so far, nodes ever used, the first free one, nodes of the tree, places in use."""


class SuffixArrays(NamedTuple):
    """A tree. pool: tokens, a ring.  buckets: heads of the table of children.  places, leaves: see `suffix_tree`."""

    pool: np.ndarray
    nodes: np.ndarray
    buckets: np.ndarray
    places: np.ndarray
    leaves: np.ndarray
    about: np.ndarray


@njit(cache=True)
def token_at(tree, at):
    """The token at a place of the pool."""
    return tree.pool[at & (len(tree.pool) - 1)]


@njit(cache=True)
def edge(nodes, n):
    """Tokens of the edge into a node; 0 for the root."""
    return nodes[n, DEPTH] - nodes[nodes[n, PARENT], DEPTH]


@njit(cache=True)
def _bucket(tree, parent, token):
    mixed = (np.uint64(parent) * np.uint64(0x9E3779B97F4A7C15)) ^ (np.uint64(token) * np.uint64(0xC2B2AE3D27D4EB4F))
    mixed ^= mixed >> np.uint64(32)
    return np.int64((mixed * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)) & (len(tree.buckets) - 1)


@njit(cache=True)
def _bucket_of(tree, n):
    return _bucket(tree, tree.nodes[n, PARENT], token_at(tree, tree.nodes[n, START]))


@njit(cache=True)
def child(tree, parent, token):
    """The child that begins with a token, or 0."""
    nodes = tree.nodes
    n = tree.buckets[_bucket(tree, parent, token)]
    while n and (nodes[n, PARENT] != parent or token_at(tree, nodes[n, START]) != token):
        n = nodes[n, CHAIN]
    return n


@njit(cache=True)
def add_to_table(tree, n):
    """Let a node be found by its parent and first token."""
    bucket = _bucket_of(tree, n)
    tree.nodes[n, CHAIN], tree.buckets[bucket] = tree.buckets[bucket], n


@njit(cache=True)
def take_from_table(tree, n):
    """The opposite, before parent or first token change."""
    nodes, bucket = tree.nodes, _bucket_of(tree, n)
    if tree.buckets[bucket] == n:
        tree.buckets[bucket] = nodes[n, CHAIN]
        return
    before = tree.buckets[bucket]
    while nodes[before, CHAIN] != n:
        before = nodes[before, CHAIN]
    nodes[before, CHAIN] = nodes[n, CHAIN]


@njit(cache=True)
def rehash(tree):
    """Fill the table anew."""
    tree.buckets[:] = 0
    for n in range(1, tree.about[USED]):
        if tree.nodes[n, COUNT] > 0:
            add_to_table(tree, n)


@njit(cache=True)
def unlink(nodes, n):
    """Take a node out of its list of siblings."""
    before, after = nodes[n, PREVIOUS], nodes[n, NEXT]
    if before:
        nodes[before, NEXT] = after
    else:
        nodes[nodes[n, PARENT], CHILD] = after
    if after:
        nodes[after, PREVIOUS] = before


@njit(cache=True)
def link(nodes, n, before, after):
    """Put a node between two siblings; 0 where there is none."""
    nodes[n, PREVIOUS], nodes[n, NEXT] = before, after
    if before:
        nodes[before, NEXT] = n
    else:
        nodes[nodes[n, PARENT], CHILD] = n
    if after:
        nodes[after, PREVIOUS] = n


@njit(cache=True)
def link_sorted(nodes, n, before, after):
    """Put a node between two siblings or as far on as it must go: before those that are no heavier, behind those that are.

    The root's children are not sorted.
    """
    if nodes[n, PARENT]:
        while before and nodes[before, COUNT] <= nodes[n, COUNT]:
            after, before = before, nodes[before, PREVIOUS]
        while after and nodes[after, COUNT] > nodes[n, COUNT]:
            before, after = after, nodes[after, NEXT]
    link(nodes, n, before, after)


@njit(cache=True)
def resort(nodes, n):
    """Move a node whose count has changed to where it belongs."""
    before, after = nodes[n, PREVIOUS], nodes[n, NEXT]
    rises, sinks = before and nodes[before, COUNT] <= nodes[n, COUNT], after and nodes[after, COUNT] > nodes[n, COUNT]
    if nodes[n, PARENT] and (rises or sinks):
        unlink(nodes, n)
        link_sorted(nodes, n, before, after)


@njit(cache=True)
def new_node(tree, parent, start, depth, count):
    """A node that is in no list and in no table yet."""
    nodes, about = tree.nodes, tree.about
    n = about[FREE]
    if n:
        about[FREE] = nodes[n, NEXT]
    else:
        n = about[USED]
        about[USED] += 1
    about[LIVE] += 1
    nodes[n, COUNT], nodes[n, PARENT], nodes[n, CHILD] = count, parent, 0
    nodes[n, START], nodes[n, DEPTH] = start & (len(tree.pool) - 1), depth
    return n


@njit(cache=True)
def free_node(tree, n):
    """Give a node back that is in no list any more."""
    take_from_table(tree, n)
    nodes, about = tree.nodes, tree.about
    nodes[n, COUNT], nodes[n, NEXT] = 0, about[FREE]
    about[FREE] = n
    about[LIVE] -= 1
