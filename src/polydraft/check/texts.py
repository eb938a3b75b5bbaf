"""Are the tokens of finished texts the target's? Judged by a forward pass of transformers over each text, outside the time that is measured.

Temperature 0: token for token equal to the judge's own argmax, but for near ties, which are counted.
Temperature T: each token's place u in the cumulative distribution, tokens sorted by falling probability, with a uniform share of its
own mass, is uniform on [0, 1] if and only if tokens follow the distribution given what came before (a randomised probability
integral transform). A distribution that is too sharp or too flat moves u; a Kolmogorov-Smirnov test on all tokens tells.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Float64

from polydraft.check.finding import kolmogorov_smirnov
from polydraft.check.steps import FEWEST_STEPS, Finding
from polydraft.core import SamplingParams, TokenTree
from polydraft.engine.api import Engine
from polydraft.engine.sequence import Origin, Result, Sample
from polydraft.models.torch.door import logits_of_text
from polydraft.sampling import processing as sampling
from polydraft.sampling.softmax import softmax

NEAR_TIE = 1e-4
"""In logits; below it the order of float operations decides."""
IMPLAUSIBLE = 1e-5
"""A p-value below this disqualifies."""


def _judged(judge: Any, prompt: Sequence[int], output: Sequence[int]) -> Float64[np.ndarray, "T V"]:
    """The judge's logits before each output token."""
    return logits_of_text(judge, [*prompt, *output])[len(prompt) - 1 : -1]


def _margins(logits: Float[np.ndarray, "T V"], tokens: Sequence[int]) -> Float[np.ndarray, " T"]:
    """By how much the best token beats the one that came."""
    return logits.max(-1) - logits[np.arange(len(logits)), list(tokens)]


def integral_transform(
    logits: Float[np.ndarray, "T V"], tokens: Sequence[int], temperature: float, rng: np.random.Generator
) -> Float[np.ndarray, " T"]:
    """Place of each token in its row's cumulative distribution, from the most probable token down, in [0, 1]."""
    p = softmax(logits / temperature)
    own_prob = p[np.arange(len(p)), list(tokens)]
    above = np.where(p > own_prob[:, None], p, 0.0).sum(-1)
    return above + rng.random(len(tokens)) * own_prob


def check_distribution(
    judge: Any, temperature: float, texts: Iterable[tuple[Sequence[int], list[int]]]
) -> dict[str, Any]:
    """Whether tokens are the target's. judge: the same model in transformers.  texts: each prompt with what followed.

    Returns `passed` and what it rests on: near ties and tokens compared, or the p-value and tokens tested.
    """
    rng = np.random.default_rng(0)
    findings = []
    wrong = 0
    ties = 0
    count = 0
    for prompt, output in texts:
        logits = _judged(judge, prompt, output)
        count += len(output)
        if temperature:
            findings.append(integral_transform(logits, output, temperature, rng))
            continue
        margin = _margins(logits, output)
        ties += int(((margin > 0) & (margin < NEAR_TIE)).sum())
        wrong += int((margin >= NEAR_TIE).sum())
    if not temperature:
        return {"passed": wrong == 0, "kind": "greedy", "tokens": count, "wrong": wrong, "near_ties": ties}
    _, p_value = kolmogorov_smirnov(np.concatenate(findings))
    return {"passed": p_value > IMPLAUSIBLE, "kind": "sampled", "tokens": count, "p_value": p_value}


def _offsets(origins: Sequence[Origin]) -> list[int]:
    """Position of each token in its block: a block ends with the target's own token."""
    offsets = []
    at = 0
    for origin in origins:
        offsets.append(at)
        at = 0 if origin.source == "target" else at + 1
    return offsets


def _uniform(what: str, u: list[float]) -> Finding:
    return Finding(what, len(u), *kolmogorov_smirnov(u))


def _target_probs(
    logits: np.ndarray, prompt: Sequence[int], sample: Sample, params: SamplingParams, engine: Engine
) -> np.ndarray:
    """The judge's distributions of a sample's tokens, sampling parameters included: [T, V]."""
    chain = TokenTree.chain(np.array([[prompt[-1], *sample.token_ids[:-1]]], np.int64))
    return sampling.distributions(
        logits[None], chain, [prompt], [len(prompt)], [params], engine.eos_token_ids
    )[0]


def _distributions(
    judge: Any, engine: Engine, result: Result, sample: Sample, params: SamplingParams
) -> tuple[Sample, np.ndarray, np.ndarray]:
    """A sample, the judge's logits at its tokens, and its distributions there."""
    prompt = result.prompt_token_ids
    logits = _judged(judge, prompt, sample.token_ids)[:, : engine.target.vocab_size]
    return sample, logits, _target_probs(logits, prompt, sample, params, engine)


def _greedy_finding(judged: Iterable[tuple[Sample, np.ndarray, np.ndarray]]) -> Finding:
    """Whether each token is the most likely one, but for near ties."""
    wrong = 0
    ties = 0
    count = 0
    for sample, logits, target_probs in judged:
        margin = _margins(logits, sample.token_ids)
        own_prob = target_probs[np.arange(len(target_probs)), sample.token_ids]
        count += len(sample.token_ids)
        ties += int(((margin > 0) & (margin < NEAR_TIE)).sum())
        wrong += int(((margin >= NEAR_TIE) & (own_prob == 0)).sum())
    what = f"text, {count} greedy tokens, {ties} near ties"
    return Finding(what, count, wrong / max(count, 1), 0.0 if wrong else 1.0)


def text_findings(
    judge: Any, engine: Engine, results: Sequence[Result], params: SamplingParams
) -> list[Finding]:
    """Tests of an engine's texts by the judge's distributions, sampling parameters included, for each position of a block."""
    judged = (
        _distributions(judge, engine, result, sample, params)
        for result in results
        for sample in result.samples
        if sample.token_ids
    )
    if params.greedy:
        return [_greedy_finding(judged)]
    rng = np.random.default_rng(0)
    by_offset = dict[int, list[float]]()
    for sample, _, target_probs in judged:
        with np.errstate(divide="ignore"):
            log_probs = np.log(target_probs)
        u = integral_transform(log_probs, sample.token_ids, 1.0, rng)
        for offset, value in zip(_offsets(sample.origins), u.tolist(), strict=True):
            by_offset.setdefault(offset, []).append(value)
    findings = [
        _uniform(f"text, position {j + 1}", u) for j, u in sorted(by_offset.items()) if len(u) >= FEWEST_STEPS
    ]
    everything = [value for u in by_offset.values() for value in u]
    return [*findings, _uniform("text, all tokens", everything)] if everything else findings
