"""A verifier from zero: one rule for the children of a node, lifted to trees, tested by enumeration, used by the engine."""

import numpy as np

from polydraft import DraftSampling, Engine, Method, SamplingParams, TreeShape
from polydraft.core.arrays import scatter_add
from polydraft.testing import enumerate_outputs
from polydraft.verifiers.lift.per_node import PerNode

INFO = Method(
    name="halved",
    title="Speculative sampling that accepts half as often",
    authors="an example",
    year=2026,
    arxiv="",
    draft_sampling=frozenset({DraftSampling.IID}),
    shapes=frozenset({TreeShape.CHAIN}),
)


def halved(p, q, draws):
    """Keep the draft x with probability a(x) = min(1, p/q) / 2; else draw from what p has left over, p - q a.

    p, q: [M, V] distributions.  draws: [M, 1] the drafted token.  Returns the distribution of the emitted token, [M, V].
    """
    kept = np.minimum(p, q) / 2  # q(x) a(x): the mass of p that acceptances give
    accept = np.take_along_axis(kept / q, draws, 1)
    rest = (p - kept) / (p - kept).sum(1, keepdims=True)
    return scatter_add((1 - accept) * rest, draws, accept)


rule = PerNode(INFO, halved)

p = [0.2, 0.3, 0.5]
q = [0.5, 0.3, 0.2]
outputs = enumerate_outputs(rule, lambda path: p, lambda path: q, parents=(-1, 0))  # every draft of one token
print("distribution of the first token:", [round(float(x), 6) for x in outputs.probs.sum(1)])

engine = Engine.embedded(drafter="model:chain", verifier=rule, depth=3)
result = engine.generate("import os\n", SamplingParams(seed=1, max_tokens=24))[0]
print(f"lossless: {result.lossless}, {result.stats.generated_tokens} tokens")

# distribution of the first token: [0.2, 0.3, 0.5]
# lossless: True, 24 tokens
