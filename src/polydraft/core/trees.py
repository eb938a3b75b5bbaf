"""A batch of token trees, and the noise that each row of it meets."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from polydraft.core.arrays import Array, host, like
from polydraft.core.batch import padded


class TreeArrays(NamedTuple):
    """`TokenTree` on the host: [B, N] each."""

    tokens: np.ndarray
    parents: np.ndarray


class TreeLists(NamedTuple):
    """`TokenTree` as plain integers."""

    tokens: list[list[int]]
    parents: list[list[int]]


@dataclass(frozen=True)
class TokenTree:
    """A batch of token trees, as arrays of NumPy, PyTorch or JAX: topological order, siblings in draw order, duplicates among them, padding last.

    tokens: [B, N] token ids; tokens[:, 0] is the last committed token; padding: 0.
    parents: [B, N] node indices, parents[:, 0] == -1 and parents[:, n] < n; padding: -1.

    Example:
        >>> chain = TokenTree.chain(np.array([[5, 7, 9]]))
        >>> chain.parents.tolist()
        [[-1, 0, 1]]
    """

    tokens: Int[Array, "B N"] = field(metadata=padded(0))
    parents: Int[Array, "B N"] = field(metadata=padded(-1))

    @cached_property
    def host(self) -> TreeArrays:
        """`tokens` and `parents` as arrays on the host, for compiled walks."""
        return TreeArrays(host(self.tokens), host(self.parents))

    @cached_property
    def lists(self) -> TreeLists:
        """`tokens` and `parents` as plain integers."""
        return TreeLists(self.host.tokens.tolist(), self.host.parents.tolist())

    @classmethod
    def of(cls, tokens: np.ndarray, parents: np.ndarray) -> "TokenTree":
        """From contiguous int64 arrays of NumPy, which the tree shares.

        Example:
            >>> TokenTree.of(np.array([[5, 7]]), np.array([[-1, 0]])).num_nodes
            2
        """
        tree = cls(tokens, parents)
        tree.__dict__["host"] = TreeArrays(tokens, parents)
        return tree

    @property
    def batch_size(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_nodes(self) -> int:
        """N, padding included."""
        return self.tokens.shape[1]

    @property
    def is_node(self) -> Bool[Array, "B N"]:
        """True where there is a node, False where there is padding."""
        mask = self.host.parents >= 0
        mask[:, 0] = True
        return like(mask, self.parents)

    def nodes_from(self, since: int) -> "TokenTree":
        """The nodes `since` .. N-1; the numbers of their parents stay.

        Example:
            >>> TokenTree.chain(np.array([[5, 7, 9]])).nodes_from(1).lists
            TreeLists(tokens=[[7, 9]], parents=[[0, 1]])
        """
        return TokenTree(self.tokens[:, since:], self.parents[:, since:]) if since else self

    @classmethod
    def chain(cls, tokens: Int[Array, "B N"]) -> "TokenTree":
        """One path: node n hangs on node n-1."""
        above = np.tile(np.arange(-1, tokens.shape[1] - 1), (len(tokens), 1))
        return cls(tokens, like(above, tokens))

    @classmethod
    def roots(cls, tokens: Int[Array, " B"]) -> "TokenTree":
        """Trees with no draft at all: plain decoding."""
        return cls(tokens[:, None], like(np.full((len(tokens), 1), -1), tokens))


@dataclass(frozen=True)
class NoiseKey:
    """Which noise a row of the batch meets; see `polydraft.sampling.noise` for the draws made with it.

    seed: [B] the request's seed.  sample: [B] sample index, for n > 1.
    position: [B] committed length at the start of the step (absolute position for the race stream).
    """

    seed: Int[Array, " B"]
    sample: Int[Array, " B"]
    position: Int[Array, " B"]

    @cached_property
    def host(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`seed`, `sample` and `position` as arrays on the host, for compiled walks."""
        return host(self.seed), host(self.sample), host(self.position)

    @classmethod
    def of(cls, seeds: Sequence[int], samples: Sequence[int], positions: Sequence[int]) -> "NoiseKey":
        """A key from plain integers, one each per row."""
        return cls(*np.array([list(seeds), list(samples), list(positions)], np.int64))
