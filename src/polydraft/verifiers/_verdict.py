"""A verdict as two tables: where the walk stops, and what follows there."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from polydraft import noise, tree
from polydraft.core import NoiseKey, Outcome, TokenTree

__all__ = ["TreeVerdict"]


@dataclass(frozen=True)
class TreeVerdict:
    """Stop probabilities, and a function that makes the law of the extra token only where it is asked for.

    stop: [B, N] float64, rows sum to 1.  law_after: node [B] -> [B, V] float64, rows sum to 1.
    """

    tree: TokenTree
    stop: Float[Tensor, "B N"]
    law_after: Callable[[Tensor], Tensor]

    def after(self, node: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        """Law of the one extra token once stopped at `node`."""
        return self.law_after(node)

    def sample(self, key: NoiseKey) -> Outcome:
        """Two draws: the stop node from the stop stream, the extra token from the extra stream."""
        node = noise.draw(self.stop, key, noise.Stream.STOP)
        token = noise.draw(self.after(node), key, noise.Stream.EXTRA)
        path, length = tree.path_to(self.tree, node)
        return Outcome(path, length, token)
