"""`python -m studies.large_vocabulary`: milliseconds of a step outside of the forward passes at a vocabulary of 151,936, by drafter and verifier.

The pair is a small random one with the vocabulary of Qwen2.5, whose logits spread like those of real models; so passes are cheap, and what is left of a step
is sampling parameters, draws, verification and Python. Passes are taken off: those of the target as they are timed, those inside a compiled
proposal as one pass of as many rows costs. Drafters are those that a user may name, each with the verifier that `auto` chooses for it.
"""

import copy
import platform
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any
from unittest.mock import patch

import torch
import typer

from polydraft.core import Budget, Request, SamplingParams, TokenTree
from polydraft.engine.api import Engine
from polydraft.models.compiled.draft_vocabulary import FIRST_TOKENS
from polydraft.models.compiled.llama import CompiledLlama
from polydraft.policy.fixed import FixedPolicy
from polydraft.tree import chain, paths
from studies.options import Out, Quick

__all__ = ["BUDGETS", "PARAMS", "main", "measured", "outside", "page"]

VOCABULARY = 151_936
"""Of Qwen2.5."""
PASS = 78.0
"""Milliseconds of a forward pass of Qwen2.5-Coder-1.5B in four bits, one token, one thread (docs/results/qwen-pair.md)."""
SHARE = 0.05
"""Of a step that may lie outside of its passes; here of one pass, and a step has more."""
STEPS = 24
_CHAINS = Budget.fixed(chain(3)), Budget.fixed(chain(7))
_TREES = Budget.fixed(paths(3, 1)), Budget.fixed(paths(2, 3))
BUDGETS = {
    "model:chain": _CHAINS,
    "model": _TREES,
    "model:without_replacement": _TREES,
    "model:greedy_plus_one": _TREES,
    "model:systematic": _TREES,
    "model:coupled": _TREES,
    "model:listed": _TREES,
    "model:top_k": (Budget.grown(3, depth=3, width=3), Budget.grown(7, depth=7, width=3)),
}
"""By drafter: drafts of four rows, the root among them, and of seven or eight."""
PARAMS = {
    "T = 0": SamplingParams(temperature=0),
    "T = 1": SamplingParams(),
    "top_p .95": SamplingParams(top_p=0.95),
    "top_k 50": SamplingParams(top_k=50),
}


def _models(vocab_size: int) -> tuple[CompiledLlama, CompiledLlama]:
    """Target and draft model: one network, whose output layers differ by a fifth of their spread; later tokens are rarer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1, tie_word_embeddings=False,
        max_position_embeddings=512,
    )  # fmt: skip
    target = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        target.lm_head.weight.normal_(std=5.0 / 8.0)
        target.lm_head.weight[FIRST_TOKENS:] *= 0.3
        draft = copy.deepcopy(target)
        draft.lm_head.weight += 0.2 * draft.lm_head.weight * torch.randn_like(draft.lm_head.weight)
    models = CompiledLlama(target, max_num_seqs=1), CompiledLlama(draft, max_num_seqs=2)
    models[1].draft_over(FIRST_TOKENS)
    return models


def _seconds_of_a_pass(model: CompiledLlama, rows: int) -> float:
    """The median of ten, in the last slot."""
    tree, seconds = TokenTree(torch.ones(1, rows, dtype=torch.int64), torch.tensor([[-1, *[0] * (rows - 1)]])), list[float]()
    for _ in range(10):
        start = thread_time()
        model.score([1], tree)
        seconds.append(thread_time() - start)
        model.cut(1, 0)
    return median(seconds)


def outside(
    models: tuple[CompiledLlama, CompiledLlama], drafter: str, budget: Budget, params: SamplingParams
) -> tuple[str, float]:
    """The verifier that `auto` takes, and the median of a step's milliseconds outside of the forward passes."""
    target, draft = models
    per_pass = _seconds_of_a_pass(draft, budget.width)
    engine = Engine.of(target, draft_model=draft, drafter=drafter, policy=FixedPolicy(budget))
    engine.add_request(Request("outside", (1, 2, 3), params.with_(ignore_eos=True, max_tokens=None), 0, 0))
    score, timed_passes, steps = CompiledLlama.score, list[tuple[CompiledLlama, float]](), list[float]()

    def timed(model: CompiledLlama, *args: Any, **options: Any) -> Any:
        start = thread_time()
        scores = score(model, *args, **options)
        timed_passes.append((model, thread_time() - start))
        return scores

    with patch.object(CompiledLlama, "score", timed):
        for _ in range(STEPS):
            timed_passes.clear()
            before, start = draft.passes, thread_time()
            engine.step()
            seconds = thread_time() - start - sum(length for _, length in timed_passes)
            in_proposals = draft.passes - before - sum(model is draft for model, _ in timed_passes)
            steps.append(seconds - per_pass * in_proposals)
    engine.discard(["outside"])
    return engine.verifier.info.name, 1e3 * median(steps[4:])


def measured(vocab_size: int = VOCABULARY, drafters: Iterable[str] = BUDGETS) -> list[tuple[str, str, int, list[float]]]:
    """Drafter, verifier, rows, and milliseconds by sampling parameters, on as many threads as torch has."""
    models, rows = _models(vocab_size), list[tuple[str, str, int, list[float]]]()
    for drafter in drafters:
        for budget in BUDGETS[drafter]:
            cells = [outside(models, drafter, budget, params) for params in PARAMS.values()]
            rows.append((drafter, cells[0][0], 1 + budget.max_nodes, [ms for _, ms in cells]))
    return rows


def page(tables: dict[int, list[tuple[str, str, int, list[float]]]]) -> str:
    """The page of the documentation, from tables by number of threads."""
    lines = [
        "# Outside of the forward passes", "",
        f"`python -m studies.large_vocabulary` on {platform.processor() or platform.machine()}: milliseconds of processor time of a step outside of its forward passes, at a vocabulary",
        f"of {VOCABULARY:,} tokens. A pass of Qwen2.5-Coder-1.5B takes {PASS:.0f} ms on one thread: {SHARE:.0%} of it are {SHARE * PASS:.1f} ms, and a step has several passes.", "",
        "```text",
        f"threads  {'drafter':26}{'verifier':22}rows" + "".join(f"{name:>11}" for name in PARAMS),
    ]  # fmt: skip
    for threads, rows in tables.items():
        lines += [
            f"{threads:<9}{drafter:26}{verifier:22}{num_rows:4}" + "".join(f"{ms:11.2f}" for ms in cells)
            for drafter, verifier, num_rows, cells in rows
        ]
    return "\n".join([*lines, "```", ""])


def main(out: Out = Path("build/large-vocabulary"), quick: Quick = False) -> None:
    """Write large-vocabulary.md."""
    tables: dict[int, list[tuple[str, str, int, list[float]]]] = {}
    for threads in (1,) if quick else (1, 2):
        torch.set_num_threads(threads)
        tables[threads] = measured(4096 if quick else VOCABULARY)
    out.mkdir(parents=True, exist_ok=True)
    (out / "large-vocabulary.md").write_text(page(tables), encoding="utf-8")
    typer.echo(page(tables))


if __name__ == "__main__":
    typer.run(main)
