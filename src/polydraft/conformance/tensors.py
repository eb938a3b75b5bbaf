"""Samplers of PyTorch that draw by themselves, as functions of uniforms: `torch.rand` and its kin are answered by the source that is enumerated.

torch.rand, rand_like, Tensor.uniform_     uniforms that can be compared with tensors and numbers, scaled, shifted, indexed and reshaped
torch.multinomial                          a choice with the probabilities of the row
Tensor.exponential_                        clocks: argmax over w / E takes place i with probability w_i / sum of w
"""

from collections.abc import Callable
from typing import Any

from polydraft.conformance.branching import Branches
from polydraft.conformance.steps import Sampler


def with_uniforms(sampler: Callable[[Any, Any, Any], tuple[Any, Any]]) -> Sampler:
    """A sampler (p, q, tokens) -> (node, token) of tensors that draws by torch's own functions, with a source of uniforms as its fourth argument.

    Example:
        >>> import torch
        >>> from polydraft.conformance import of_uniforms
        >>> def module(p, q, tokens):
        ...     x = tokens[0]
        ...     accepted = torch.rand(1) <= p[0, x] / q[0, x]
        ...     row = p[1] if accepted else (p[0] - q[0]).clamp(min=0)
        ...     return int(accepted), torch.multinomial(row, 1)
        >>> of_uniforms(with_uniforms(module), parents=(-1, 0), arrays=torch.from_numpy).status
        'passed'
    """

    def drawn(p: Any, q: Any, tokens: Any, source: Branches) -> tuple[Any, Any]:
        from polydraft.conformance.torch_draws import ScriptedDraws

        with ScriptedDraws(source):
            return sampler(p, q, tokens)

    return drawn
