"""What a step accepts: the verdict of a verifier, before any randomness, and the outcome that is drawn from it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Float, Int

from polydraft.core.arrays import Array, host
from polydraft.core.batch import padded
from polydraft.core.trees import NoiseKey, TokenTree


class OutcomeArrays(NamedTuple):
    """`Outcome` on the host: [B, A], [B] and [B]."""

    path: np.ndarray
    num_accepted: np.ndarray
    token: np.ndarray


class OutcomeLists(NamedTuple):
    """`Outcome` as plain integers, paths without padding."""

    paths: list[list[int]]
    tokens: list[int]


@dataclass(frozen=True)
class Outcome:
    """What a step accepts.

    path: [B, A] accepted nodes below the root, padded with -1.
    num_accepted: [B]; row b emits num_accepted[b] + 1 tokens, never zero.
    token: [B] the extra token.
    """

    path: Int[Array, "B A"] = field(metadata=padded(-1))
    num_accepted: Int[Array, " B"]
    token: Int[Array, " B"]

    @classmethod
    def of(cls, path: np.ndarray, num_accepted: np.ndarray, token: np.ndarray) -> "Outcome":
        """From contiguous int64 arrays of NumPy, which the outcome shares.

        Example:
            >>> Outcome.of(np.array([[1, -1]]), np.array([1]), np.array([9])).lists
            OutcomeLists(paths=[[1]], tokens=[9])
        """
        outcome = cls(path, num_accepted, token)
        outcome.__dict__["host"] = OutcomeArrays(path, num_accepted, token)
        return outcome

    @classmethod
    def of_paths(cls, paths: Sequence[Sequence[int]], tokens: Sequence[int] | None = None) -> "Outcome":
        """Of accepted nodes without padding. tokens: the extra ones; 0 where nobody asks for them.

        Example:
            >>> Outcome.of_paths([[1, 3], []], [9, 8]).path.tolist()
            [[1, 3], [-1, -1]]
        """
        path = np.full((len(paths), max(map(len, paths), default=0)), -1)
        for b, nodes in enumerate(paths):
            path[b, : len(nodes)] = nodes
        extra = np.zeros(len(paths), np.int64) if tokens is None else np.array(tokens, np.int64)
        return cls.of(path, np.array([len(nodes) for nodes in paths], np.int64), extra)

    @cached_property
    def host(self) -> OutcomeArrays:
        """`path`, `num_accepted` and `token` as arrays on the host."""
        return OutcomeArrays(host(self.path), host(self.num_accepted), host(self.token))

    @cached_property
    def lists(self) -> OutcomeLists:
        """Accepted nodes without padding, and the extra tokens, as plain integers."""
        path, counts, token = (x.tolist() for x in self.host)
        return OutcomeLists([nodes[:count] for nodes, count in zip(path, counts, strict=True)], token)

    def emitted(self, tree: TokenTree) -> list[list[int]]:
        """The tokens that each row emits: accepted path, then the extra token."""
        tokens = tree.host.tokens
        path, counts, extra = self.host
        return [
            [*tokens[b].take(path[b, :count]).tolist(), last] if count else [last]
            for b, (count, last) in enumerate(zip(counts.tolist(), extra.tolist(), strict=True))
        ]


class Verdict(Protocol):
    """What a verifier decides, before any randomness; randomness then is two draws: stop node and extra token."""

    @property
    def stop(self) -> Float[Array, "B N"]:
        """P(the last accepted node is n); rows sum to 1; padding 0; equal siblings: on the first copy."""
        ...

    def after(self, node: Int[Array, " B"]) -> Float[Array, "B V"]:
        """Distribution of the one extra token once stopped at `node`."""
        ...

    def sample(self, key: NoiseKey) -> Outcome:
        """Draw the stop node and the extra token."""
        ...
