"""Who decides a row of a batch: the verifier, or what every lossless verifier comes to where it does not matter how the row was drafted.

    greedy     temperature 0: a lossless verifier follows the largest logits, whatever was drafted and however; the tree may be one that it does not take
    copied     tokens from the text have no q: `match` is for them
    bare       nothing was drafted: a token is drawn from p, unless the noise is shared with drafts
    drafted    all others

It is chosen once, when parts are joined; a step asks which of them a row is for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxtyping import Float

from polydraft.core import Draft, NoiseKey, Outcome, SamplingParams, Verifier, Walking
from polydraft.core.arrays import Array
from polydraft.sampling.processing import samplings_of
from polydraft.verifiers import greedy
from polydraft.verifiers.match import match

PLAIN: Verifier = match
"""The verifier where nothing is drafted."""


@dataclass(frozen=True, eq=False)
class Decider:
    """A verifier and its fast form, see `core.Walking`, or None."""

    verifier: Verifier
    walk: Callable[..., Outcome | None] | None

    def __call__(
        self,
        draft: Draft,
        logits: Float[Array, "B N V"],
        key: NoiseKey,
        params: Sequence[SamplingParams],
        probs: Callable[[], Float[Array, "B N V"]],
    ) -> Outcome:
        """By the walk where it applies to these logits, before the temperature; else by the verdict on the distributions that `probs` makes."""
        if self.walk is not None and str(logits.dtype).endswith("float32"):
            outcome = self.walk(draft, logits, key, samplings_of(params))
            if outcome is not None:
                return outcome
        return self.verifier(draft, probs()).sample(key)


@dataclass(frozen=True)
class Deciders:
    """Of the rows of one verifier; see the module.

    Example:
        >>> from polydraft.methods.registry import verifier
        >>> deciders = Deciders.of(verifier("block"))
        >>> deciders.of_row(SamplingParams(temperature=0.7), copied=True, bare=False).verifier.info.name
        'match'
    """

    drafted: Decider
    greedy: Decider
    copied: Decider
    bare: Decider

    @classmethod
    def of(cls, verifier: Verifier) -> "Deciders":
        """Those beside a verifier; one that is not lossless, or shares its noise, decides more rows itself."""
        drafted = Decider(verifier, verifier.walk if isinstance(verifier, Walking) else None)
        info = verifier.info
        return cls(
            drafted,
            greedy=Decider(match, greedy.walk) if info.lossless else drafted,
            copied=Decider(match, match.walk),
            bare=Decider(verifier, match.walk) if info.lossless and not info.shared_noise else drafted,
        )

    def of_row(self, params: SamplingParams, *, copied: bool, bare: bool) -> Decider:
        """Of a row of these parameters. bare: whether the whole batch is without drafts."""
        if params.greedy and self.greedy is not self.drafted:
            return self.greedy
        if copied:
            return self.copied
        return self.bare if bare else self.drafted
