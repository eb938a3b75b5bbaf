"""Is a sampler lossless, anybody's? It is enumerated where it is a function of uniforms, else tested at a stated error; its likeliest mistake is named.

    of_uniforms      a function (p, q, draft tokens, uniforms) -> (last accepted node, token), every comparison followed: exact
    of_array         the same with an array of uniforms, as compiled samplers take it: exact for threshold tests and inverse transforms
    of_seeds         the same with a seed: tested one text after the other, a false alarm has probability 1e-4 at most
    of_steps         a system that drafts for itself, with uniforms: exact
    of_seeded_steps  the same with a seed: tested
    with_uniforms    a sampler of PyTorch that draws by `torch.rand` and `torch.multinomial`, as one for `of_uniforms`

Chains, several drafts and trees: `parents` and `sampling` say how drafts look. A server is tested by `polydraft check --url`.
"""

from polydraft.conformance.checks import (
    of_array,
    of_seeded_steps,
    of_seeds,
    of_steps,
    of_uniforms,
)
from polydraft.conformance.enumeration import TOLERANCE_OF_FLOAT32
from polydraft.conformance.report import Example, Report, Suspect
from polydraft.conformance.tensors import with_uniforms

__all__ = [
    "TOLERANCE_OF_FLOAT32",
    "Example",
    "Report",
    "Suspect",
    "of_array",
    "of_seeded_steps",
    "of_seeds",
    "of_steps",
    "of_uniforms",
    "with_uniforms",
]
