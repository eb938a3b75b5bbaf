"""Speculative sampling of the first child, with the others as spares: a residual token that was drafted is accepted too.

Leviathan et al. 2023 (arXiv 2211.17192) for the test. The spares enter no test; the walk goes on from one of them if the
residual of the first draft happens to emit it.

    acceptance with n iid draws  =  sum min(p, q) + sum (p - q)+ (1 - (1 - q)^(n-1))

Lossless if the first child was drawn from q, whatever the others are.
"""

from polydraft.core import Method, SiblingLaw, TreeShape
from polydraft.verifiers.lift.per_node import PerNode
from polydraft.verifiers.speculative import emitted_law

__all__ = ["single_with_spares"]

single_with_spares = PerNode(
    Method(
        name="single_with_spares",
        title="Speculative sampling with spare siblings",
        authors="Leviathan, Kalman & Matias",
        year=2023,
        arxiv="2211.17192",
        laws=frozenset({SiblingLaw.IID, SiblingLaw.WITHOUT_REPLACEMENT}),
        shapes=frozenset(TreeShape),
    ),
    emitted_law,
)
"""The verifier."""
