"""The engine's outcome against that of the verdict on the same noise: exact, but for draws that rounding decides.

A verifier's compiled walk and its verdict draw the stop node and the extra token from the same two uniforms, so their tokens are equal.
A difference counts unless both uniforms lie within `RESOLUTION` of the place where the verdict's cumulative distribution has the engine's
node and token, for the target distribution as it is or changed by as much as float32 may.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from polydraft.check.finding import Finding
from polydraft.core import Draft, NoiseKey, Outcome, TokenTree, Verdict, Verifier
from polydraft.core import geometry as tree
from polydraft.core.batch import select
from polydraft.sampling import noise
from polydraft.verifiers.lift.verdict import TreeVerdict

RESOLUTION = 1e-5
"""Of cumulative probabilities and, relative, of probabilities: a hundred times what float32 rounds. Mean differences of this size mean nothing."""
EXAMPLES = 3
"""Differing steps that are shown."""
CHANGES = 8
"""Changed target distributions that are tried where a draw differs: a race between two tokens goes either way in half of them."""


@dataclass
class Comparison:
    """compared: sequences' steps.  differing: (seed, position, tokens of the engine, tokens of the verdict) of those that differ."""

    compared: int = 0
    differing: list[tuple[int, int, list[int], list[int]]] = field(
        default_factory=list[tuple[int, int, list[int], list[int]]]
    )

    def see(
        self,
        verifier: Verifier,
        verdict: Verdict,
        draft: Draft,
        target_probs: Float[Tensor, "B N V"],
        key: NoiseKey,
        outcome: Outcome,
    ) -> None:
        """Compare what the engine did in a step with what the verifier's verdict samples."""
        ours = outcome.emitted(draft.tree)
        theirs = verdict.sample(key).emitted(draft.tree)
        self.compared += len(ours)
        for b, (emitted, expected) in enumerate(zip(ours, theirs, strict=True)):
            if emitted != expected and not _by_rounding(verifier, draft, target_probs, key, outcome, b):
                self.differing.append((int(key.seed[b]), int(key.position[b]), emitted, expected))

    @property
    def examples(self) -> tuple[str, ...]:
        """The first steps that differ, in words."""
        return tuple(
            f"seed {seed}, position {position}: the engine accepted {ours}; the verdict samples {theirs} on the same noise"
            for seed, position, ours, theirs in self.differing[:EXAMPLES]
        )

    @property
    def findings(self) -> list[Finding]:
        """One test, whose p-value is 0 where anything differs."""
        if not self.compared:
            return []
        share = len(self.differing) / self.compared
        return [Finding("walk", self.compared, share, 0.0 if self.differing else 1.0)]


def _by_rounding(
    verifier: Verifier, draft: Draft, p: Float[Tensor, "B N V"], key: NoiseKey, outcome: Outcome, b: int
) -> bool:
    row_draft, at = select((draft, key), [b])
    count = int(outcome.num_accepted[b])
    node = int(outcome.path[b, count - 1]) if count else 0
    return any(
        _reaches(verifier(row_draft, row_probs), row_draft.tree, at, node, int(outcome.token[b]))
        for row_probs in _rounded(p[b : b + 1])
    )


def _rounded(p: Float[Tensor, "1 N V"]) -> Iterator[Float[Tensor, "1 N V"]]:
    """The target distribution, and some that differ from it by rounding; copies of a context have equal rows."""
    yield p
    random = torch.Generator().manual_seed(0)
    for _ in range(CHANGES):
        changed = p * (1 + RESOLUTION * (2 * torch.rand(p.shape[-1], generator=random, dtype=p.dtype) - 1))
        yield changed / changed.sum(-1, keepdim=True)


def _reaches(verdict: Verdict, drafted: TokenTree, key: NoiseKey, node: int, token: int) -> bool:
    """Whether the verdict stops at the node and goes on with the token, for uniforms within `RESOLUTION` of these."""
    node = int(tree.first_copies(drafted)[0, node])
    order = verdict.order if isinstance(verdict, TreeVerdict) else None
    stop = verdict.stop[0].double().numpy()
    turns = np.arange(len(stop)) if order is None else order[0].numpy()
    place = int(np.flatnonzero(turns == node)[0])
    after = verdict.after(torch.tensor([node]))[0].double().numpy()
    return _within(stop[turns], place, key, noise.Stream.STOP) and _within(
        after, token, key, noise.Stream.EXTRA
    )


def _within(probs: Float[np.ndarray, " n"], index: int, key: NoiseKey, stream: noise.Stream) -> bool:
    cumulative = probs.cumsum()
    low = cumulative[index] - probs[index]
    high = cumulative[index]
    u = float(noise.uniforms(key, stream, 1)[0, 0]) * cumulative[-1]
    return probs[index] > 0 and low - RESOLUTION <= u <= high + RESOLUTION
