"""Speculative sampling of the first child, with the others as spares: a residual token that was drafted is accepted too.

Leviathan et al. 2023 (arXiv 2211.17192) for the test. The spares enter no test; the walk goes on from one of them if the
residual of the first draft happens to emit it.

    acceptance with n iid draws  =  sum min(p, q) + sum (p - q)+ (1 - (1 - q)^(n-1))

Lossless if the first child was drawn from q, whatever the others are.
Trap: a first child that was chosen for its rank, such as the best of the siblings, is no draw from q.
Cost: time and memory O(V) a node, whatever the number of spares.
"""

from polydraft.core import DraftSampling
from polydraft.methods.papers import method
from polydraft.verifiers.lift.per_node import PerNode
from polydraft.verifiers.speculative import emitted_probs

single_with_spares = PerNode(
    method(
        "single_with_spares",
        "Speculative sampling with spare siblings",
        "2211.17192",
        {DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT},
    ),
    emitted_probs,
)
"""The verifier."""
