"""A verdict as two tables: where the walk stops, and what follows there."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float, Int

from polydraft.core import NoiseKey, Outcome, TokenTree
from polydraft.core import geometry as tree
from polydraft.core.arrays import Array, gather, host
from polydraft.errors import InvalidInputError
from polydraft.sampling import categorical, noise


@dataclass(frozen=True)
class TreeVerdict:
    """Stop probabilities, and a function that makes the distribution of the extra token only where it is asked for.

    stop: [B, N] float64, rows sum to 1.  probs_after: node [B] -> [B, V] float64, rows sum to 1.
    order: [B, N] nodes in the order in which the stop is drawn, ended by any whose stop is 0; default as they are numbered.
    """

    tree: TokenTree
    stop: Float[Array, "B N"]
    probs_after: Callable[[Array], Array]
    order: Int[Array, "B N"] | None = None

    def after(self, node: Int[Array, " B"]) -> Float[Array, "B V"]:
        """Distribution of the one extra token once stopped at `node`.

        Raises:
            InvalidInputError: not one node of its tree for each row of the batch.
        """
        B, N = self.stop.shape
        nodes = host(node)
        if nodes.shape != (B,) or nodes.dtype != "int64" or not ((nodes >= 0) & (nodes < N)).all():
            raise InvalidInputError(
                f"node={nodes.tolist()} was given; expected {B} whole numbers in [0, {N}), one node of each tree."
            )
        return self.probs_after(node)

    def sample(self, key: NoiseKey) -> Outcome:
        """Two draws: the stop node from the stop stream, the extra token from the extra stream.

        Raises:
            InvalidInputError: a key of another batch.
        """
        B = len(self.stop)
        if not len(key.seed) == len(key.sample) == len(key.position) == B:
            raise InvalidInputError(
                f"a key of {len(key.seed)} seeds was given for {B} trees; expected one seed, sample and position each."
            )
        if self.order is None:
            node = categorical.draw(self.stop, key, noise.Stream.STOP)
        else:
            place = categorical.draw(gather(self.stop, self.order), key, noise.Stream.STOP)
            node = gather(self.order, place[:, None])[:, 0]
        token = categorical.draw(self.probs_after(node), key, noise.Stream.EXTRA)
        path, length = tree.path_to(self.tree, node)
        return Outcome(path, length, token)
