"""How a token is taken from logits where nothing was drafted, greedy or drawn, is compiled: what a first answer needs beside the forward pass."""

from contextlib import suppress

import numpy as np

from polydraft.core import Draft, NoiseKey, SamplingParams
from polydraft.core.geometry import dedup
from polydraft.numerics.compiled_code import WALKS, mark
from polydraft.sampling.processing import samplings_of
from polydraft.verifiers import greedy
from polydraft.verifiers.match import match


def compile_walks() -> None:
    """Take a token in both ways, and mark that it was done."""
    draft = Draft.bare(np.array([1]))
    logits = np.zeros((1, 1, 64), np.float32)
    key = NoiseKey.of([0], [0], [1])
    for walk in (greedy.walk, match.walk):
        outcome = walk(draft, logits, key, samplings_of([SamplingParams()]))
        assert outcome is not None
        dedup(draft.tree).outcome(outcome)
    with suppress(OSError):
        mark(WALKS).touch()
