"""The nouns of polydraft: token trees, drafts, verdicts, and what a drafter, a verifier and a target promise.

A node is a context. Node 0 is the last committed token; row n of every [B, N, V] tensor is the distribution of the next token
given the path 0..n. A chain of gamma drafted tokens has N = gamma + 1 nodes and row gamma of the target distribution is the bonus
row. Every tensor has a leading batch dimension B; trees are padded to N nodes and padding cannot be reached.

    p  target distribution      q  draft distribution      both after sampling parameters, summing to one
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polydraft.core.budget import Budget, TreeShape
    from polydraft.core.decodings import Decoding, DecodingMethod, NamedDecoding, SecondSequenceDecoding
    from polydraft.core.drafts import FIXED, Draft, DraftSampling
    from polydraft.core.methods import Account, Drafter, Drawing, Method, Offers, Verifier, Walking
    from polydraft.core.outcomes import Outcome, Verdict
    from polydraft.core.params import SamplingParams
    from polydraft.core.requests import Request
    from polydraft.core.targets import (
        BlockCopying,
        EncoderDecoder,
        Mixing,
        Needs,
        Proposing,
        Scores,
        Target,
    )
    from polydraft.core.trees import NoiseKey, TokenTree

__all__ = [
    "FIXED",
    "Account",
    "BlockCopying",
    "Budget",
    "Decoding",
    "DecodingMethod",
    "Draft",
    "DraftSampling",
    "Drafter",
    "Drawing",
    "EncoderDecoder",
    "Method",
    "Mixing",
    "NamedDecoding",
    "Needs",
    "NoiseKey",
    "Offers",
    "Outcome",
    "Proposing",
    "Request",
    "SamplingParams",
    "Scores",
    "SecondSequenceDecoding",
    "Target",
    "TokenTree",
    "TreeShape",
    "Verdict",
    "Verifier",
    "Walking",
]

_WHERE = {
    "Budget": "budget",
    "TreeShape": "budget",
    "Decoding": "decodings",
    "DecodingMethod": "decodings",
    "NamedDecoding": "decodings",
    "SecondSequenceDecoding": "decodings",
    "FIXED": "drafts",
    "Draft": "drafts",
    "DraftSampling": "drafts",
    "Account": "methods",
    "Drafter": "methods",
    "Drawing": "methods",
    "Method": "methods",
    "Offers": "methods",
    "Verifier": "methods",
    "Walking": "methods",
    "Outcome": "outcomes",
    "Verdict": "outcomes",
    "SamplingParams": "params",
    "Request": "requests",
    "BlockCopying": "targets",
    "EncoderDecoder": "targets",
    "Mixing": "targets",
    "Needs": "targets",
    "Proposing": "targets",
    "Scores": "targets",
    "Target": "targets",
    "NoiseKey": "trees",
    "TokenTree": "trees",
}
"""Imported when they are first used: sampling parameters and checks of options need neither torch nor numba."""


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(
            f"module 'polydraft.core' has no attribute {name!r}; it offers {', '.join(_WHERE)}"
        )
    value = globals()[name] = getattr(import_module(f"polydraft.core.{_WHERE[name]}"), name)
    return value
