"""Are the tokens that a contender handed out the target's? Judged by transformers, outside the time that is measured.

Temperature 0: token for token equal to the judge's own argmax, but for near ties, which are counted.
Temperature T: each token's place u in the cumulative law, tokens sorted by falling probability, with a uniform share of its
own mass, is uniform on [0, 1] if and only if tokens follow the law given what came before (a randomised probability
integral transform). A law that is too sharp or too flat moves u; a Kolmogorov-Smirnov test on all tokens tells.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy import stats

from polydraft.bench.compare import Measurement, Prompts

__all__ = ["check_law", "places"]

NEAR_TIE = 1e-4
"""In logits; below it the order of float operations decides."""
IMPLAUSIBLE = 1e-5
"""A p-value below this disqualifies."""


@torch.inference_mode()
def _rows(judge: Any, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    """Logits before each output token, [len(output), V], float64."""
    return judge(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1].double()


def places(logits: torch.Tensor, tokens: Sequence[int], temperature: float, rng: np.random.Generator) -> np.ndarray:
    """Place of each token in its row's cumulative law, from the most probable token down, in [0, 1].

    logits: [T, V].  tokens: T ids.
    """
    p = (logits / temperature).softmax(-1)
    own = p.gather(1, torch.tensor(list(tokens))[:, None])
    above = torch.where(p > own, p, 0.0).sum(-1).numpy()
    return above + rng.random(len(tokens)) * own[:, 0].numpy()


def check_law(judge: Any, measurement: Measurement, batches: Sequence[Prompts]) -> dict[str, Any]:
    """Whether a measurement's tokens are the target's.

    judge: the same model in transformers.  batches: the prompts of each of the measurement's runs.
    Returns `passed` and what it rests on: near ties and tokens compared, or the p-value and tokens tested.
    """
    temperature = measurement.contender.temperature
    rng, found, wrong, ties, count = np.random.default_rng(0), [], 0, 0, 0
    for run, prompts in zip(measurement.runs, batches, strict=True):
        for prompt, output in zip(prompts, run.outputs, strict=True):
            logits = _rows(judge, prompt, output)
            count += len(output)
            if temperature:
                found.append(places(logits, output, temperature, rng))
                continue
            margin = logits.amax(-1) - logits.gather(1, torch.tensor(output)[:, None])[:, 0]
            ties += int(((margin > 0) & (margin < NEAR_TIE)).sum())
            wrong += int((margin >= NEAR_TIE).sum())
    if not temperature:
        return {"passed": wrong == 0, "kind": "greedy", "tokens": count, "wrong": wrong, "near_ties": ties}
    p_value = float(stats.kstest(np.concatenate(found), "uniform").pvalue)
    return {"passed": p_value > IMPLAUSIBLE, "kind": "sampled", "tokens": count, "p_value": p_value}
