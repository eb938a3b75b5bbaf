"""A verifier from zero: one rule for the children of a node, lifted to trees, tested by enumeration, used by the engine."""

import torch

from polydraft import Draft, DraftSampling, Engine, Method, SamplingParams, TokenTree, TreeShape
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

    p, q: [M, V] laws.  draws: [M, 1] the drafted token.  Returns the law of the emitted token, [M, V].
    """
    kept = torch.minimum(p, q) / 2  # q(x) a(x): the mass of p that acceptances give
    x = draws[:, 0]
    accept = (kept / q).gather(1, x[:, None])
    rest = (p - kept) / (p - kept).sum(1, keepdim=True)
    return ((1 - accept) * rest).scatter_add(1, x[:, None], accept)


rule = PerNode(INFO, halved)

p = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
law = torch.zeros(3, dtype=torch.float64)
for x in range(3):  # every draft
    tree = TokenTree.chain(torch.tensor([[0, x]]))
    draft = Draft(tree, DraftSampling.IID, TreeShape.CHAIN, q[None, None], torch.tensor([[-1, 0]]))
    verdict = rule(draft, torch.stack([p, p])[None])
    law[x] += q[x] * verdict.stop[0, 1]
    law += q[x] * verdict.stop[0, 0] * verdict.after(torch.tensor([0]))[0]
print("law of the first token:", [round(v, 6) for v in law.tolist()])

engine = Engine.embedded(drafter="model:chain", verifier=rule, depth=3)
result = engine.generate("import os\n", SamplingParams(seed=1, max_tokens=24))[0]
print(f"lossless: {result.lossless}, {result.stats.generated_tokens} tokens")

# law of the first token: [0.2, 0.3, 0.5]
# lossless: True, 24 tokens
