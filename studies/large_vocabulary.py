"""`python -m studies.large_vocabulary`: milliseconds of a step outside of the forward passes at a vocabulary of 151,936, by drafter and verifier.

The pair is a small random one with the vocabulary of Qwen2.5, whose logits spread like those of real models; so passes are cheap, and what is left of a step
is sampling parameters, draws, verification and Python. Passes are taken off: those of the target as they are timed, those inside a compiled
proposal as one pass of as many rows costs. Drafters are those that a user may name, each with the verifier that `auto` chooses for it.

Each cell has two numbers: the median of the steps' processor time, all threads together, and the fastest step by the wall clock, which is what
several threads shorten and what neighbours on the machine disturb least.
"""

import copy
import platform
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter, process_time
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import typer

from polydraft.bench.record import csv_table, markdown_table, write_texts
from polydraft.core import Budget, Request, SamplingParams, TokenTree
from polydraft.core.geometry import chain, paths
from polydraft.engine.api import Engine
from polydraft.models.compiled.draft_vocabulary import FIRST_TOKENS
from polydraft.models.compiled.llama import CompiledLlama
from polydraft.policy.fixed import FixedPolicy
from studies.options import Out, Quick

__all__ = ["BUDGETS", "PARAMS", "csv_of", "main", "measured", "outside", "page"]

CSV = "large-vocabulary.csv"

VOCABULARY = 151_936
"""Of Qwen2.5."""
PASS = 78.0
"""Milliseconds of a forward pass of Qwen2.5-Coder-1.5B in four bits, one token, one thread of a Xeon (docs/results/qwen-pair-native.md)."""
SHARE = 0.05
"""Of a step that may lie outside of its passes; here of one pass, and a step has more."""
STEPS = 24
"""Of a cell by default; the first four are not counted."""
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


class Milliseconds(NamedTuple):
    """Of steps outside of their passes: the median by the processor's clock, the least by the wall's."""

    processor: float
    wall: float


Rows = list[tuple[str, str, int, list[Milliseconds]]]
"""Drafter, verifier, rows, and a cell for each of PARAMS."""


def _now() -> np.ndarray:
    return np.array([process_time(), perf_counter()])


def _models(vocab_size: int, threads: int) -> tuple[CompiledLlama, CompiledLlama]:
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
    models = CompiledLlama(target, max_num_seqs=1, threads=threads), CompiledLlama(draft, max_num_seqs=2, threads=threads)
    models[1].draft_over(FIRST_TOKENS)
    return models


def _seconds_of_a_pass(model: CompiledLlama, rows: int) -> np.ndarray:
    """The median of ten, in the last slot, by each clock."""
    tree, seconds = TokenTree(torch.ones(1, rows, dtype=torch.int64), torch.tensor([[-1, *[0] * (rows - 1)]])), list[np.ndarray]()
    for _ in range(10):
        start = _now()
        model.score([1], tree)
        seconds.append(_now() - start)
        model.cut(1, 0)
    return np.median(seconds, 0)


def outside(
    models: tuple[CompiledLlama, CompiledLlama], drafter: str, budget: Budget, params: SamplingParams, steps: int = STEPS
) -> tuple[str, Milliseconds]:
    """The verifier that `auto` takes, and what a step takes outside of the forward passes."""
    target, draft = models
    per_pass = _seconds_of_a_pass(draft, budget.width)
    engine = Engine.of(target, draft_model=draft, drafter=drafter, policy=FixedPolicy(budget))
    engine.add_request(Request("outside", (1, 2, 3), params.with_(ignore_eos=True, max_tokens=None), 0, 0))
    score, passes, seconds = CompiledLlama.score, list[tuple[CompiledLlama, np.ndarray]](), list[np.ndarray]()

    def timed(model: CompiledLlama, *args: Any, **options: Any) -> Any:
        start = _now()
        scores = score(model, *args, **options)
        passes.append((model, _now() - start))
        return scores

    with patch.object(CompiledLlama, "score", timed):
        for _ in range(steps):
            passes.clear()
            before, start = draft.passes, _now()
            engine.step()
            whole = _now() - start - sum(length for _, length in passes)
            in_proposals = draft.passes - before - sum(model is draft for model, _ in passes)
            seconds.append(whole - per_pass * in_proposals)
    engine.discard(["outside"])
    counted = 1e3 * np.array(seconds[4:])
    return engine.verifier.info.name, Milliseconds(float(np.median(counted[:, 0])), float(counted[:, 1].min()))


def measured(vocab_size: int = VOCABULARY, drafters: Iterable[str] = BUDGETS, *, threads: int = 1, steps: int = STEPS) -> Rows:
    """A row for each drafter and budget. Helper threads stay: measure with fewer threads first."""
    torch.set_num_threads(threads)
    models, rows = _models(vocab_size, threads), Rows()
    for drafter in drafters:
        for budget in BUDGETS[drafter]:
            cells = [outside(models, drafter, budget, params, steps) for params in PARAMS.values()]
            rows.append((drafter, cells[0][0], 1 + budget.max_nodes, [cell for _, cell in cells]))
    return rows


def csv_of(tables: dict[int, Rows]) -> str:
    """Every cell, from tables by number of threads."""
    head = ["threads", "drafter", "verifier", "rows", "parameters", "processor_ms", "wall_ms"]
    return csv_table(
        head,
        (
            [threads, drafter, verifier, num_rows, name, f"{cell.processor:.2f}", f"{cell.wall:.2f}"]
            for threads, rows in tables.items()
            for drafter, verifier, num_rows, cells in rows
            for name, cell in zip(PARAMS, cells, strict=True)
        ),
    )


def page(tables: dict[int, Rows], steps: int = STEPS) -> str:
    """The page of the documentation, from tables by number of threads: the largest drafts of each kind on the fewest threads."""
    fewest = min(tables)
    parts = [
        "# Outside of the forward passes",
        f"`python -m studies.large_vocabulary --threads {' --threads '.join(map(str, tables))} --steps {steps}` on {platform.processor() or platform.machine()}: processor milliseconds of a step "
        f"outside of its forward passes at a vocabulary of {VOCABULARY:,} tokens, the median, with {fewest} thread{'s' * (fewest > 1)}. A forward pass of Qwen2.5-Coder-1.5B takes {PASS:.0f} ms on one thread: {SHARE:.0%} of it are "
        f"{SHARE * PASS:.1f} ms, and a step has several passes. [Fewer rows, other numbers of threads, the fastest steps by the wall clock]({CSV}).",
    ]
    largest = {drafter: (verifier, num_rows, cells) for drafter, verifier, num_rows, cells in tables[fewest]}
    lines = [
        [f"`{drafter}`", f"`{verifier}`", num_rows, *(f"{cell.processor:.2f}" for cell in cells)]
        for drafter, (verifier, num_rows, cells) in largest.items()
    ]
    return "\n\n".join([*parts, markdown_table(["drafter", "verifier", "rows", *PARAMS], lines)]) + "\n"


def main(
    out: Out = Path("build/large-vocabulary"),
    threads: Annotated[list[int], typer.Option(help="Threads of an engine, one table each.")] = [1, 2],  # noqa: B006
    steps: Annotated[int, typer.Option(min=6, help="Steps of a cell.")] = STEPS,
    quick: Quick = False,
) -> None:
    """Write large-vocabulary.md and .csv."""
    tables = {count: measured(4096 if quick else VOCABULARY, threads=count, steps=steps) for count in sorted(threads)}
    text = page(tables, steps)
    out.mkdir(parents=True, exist_ok=True)
    write_texts({out / "large-vocabulary.md": text, out / CSV: csv_of(tables)})
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
