"""`python -m studies.profile`: where a step goes, each part of a round in milliseconds, for targets of several sizes.

The models are random Llama models with the embedded draft's shape beside them: costs do not depend on weights, so drafts are
one chain of fixed length whatever is accepted. Parts inside the compiled pass are timed by running its products alone, on the
same weights and rows; what remains of the pass is attention, norms and rotations. Verification
is the fused walk: softmax, stop probabilities and residual. Noise is a round's key, and its uniforms, one for each drafted token and
two for the walk, which are timed alone and taken off what they are part of. What no part claims is Python.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import typer
from numba import njit
from rich.console import Console
from rich.table import Table

from polydraft.core import NoiseKey, Request, SamplingParams
from polydraft.engine.api import Engine
from polydraft.engine.stopping import Stopper
from polydraft.models import load, pair
from polydraft.models.compiled.layers import multiply
from polydraft.models.compiled.model import CompiledModel
from polydraft.sampling import processing as sampling
from polydraft.sampling.noise import uniform_at
from polydraft.verifiers.lift.leaf_to_root import LeafToRoot
from studies.options import Quick
from studies.timing import shortest

SIZES: dict[str, dict[str, Any]] = {
    "3M": {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 3},
    "10M": {"hidden_size": 320, "intermediate_size": 896, "num_hidden_layers": 8, "num_attention_heads": 5},
    "110M": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 15,
        "num_attention_heads": 12,
    },
}
PARTS = (
    "drafting",
    "projections",
    "head",
    "attention",
    "penalties",
    "verification",
    "noise",
    "detokenising",
    "Python",
)


@dataclass
class _Probe:
    """Seconds spent in some callables while it is on."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            start = perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start

        return wrapper

    @contextmanager
    def watching(self) -> Iterator[None]:
        watched = (
            (sampling, "in_context", "penalties"),
            (LeafToRoot, "walk", "verification"),
            (NoiseKey, "of", "noise"),
            (Stopper, "push", "detokenising"),
            (CompiledModel, "score", "pass"),
        )
        patches = [
            patch.object(owner, name, self.timed(part, getattr(owner, name))) for owner, name, part in watched
        ]
        for p in patches:
            p.start()
        try:
            yield
        finally:
            for p in patches:
                p.stop()


def random_module(shape: dict[str, Any], vocab_size: int, context: int = 1024) -> Any:
    """A Llama model of a shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, tie_word_embeddings=True, max_position_embeddings=context, **shape
    )
    return LlamaForCausalLM(config).eval()


def _random_target(shape: dict[str, Any], vocab_size: int) -> CompiledModel:
    return CompiledModel(random_module(shape, vocab_size), max_num_seqs=1, cache_dtype="float32")


@njit
def compiled_multiply(x, w, k, rounded, y, rows):
    """`layers.multiply` by itself."""
    multiply(x, w, k, rounded, y, rows)


def _products(target: CompiledModel, rows: int, repetitions: int) -> tuple[float, float]:
    """Seconds of one pass in the layers' products and in the head."""
    w = target.weights
    work = target.arrays.work
    x = np.zeros((rows, max(work.normed.shape[1], work.act.shape[1])), np.float32)
    y = np.zeros((rows, max(w.gate_up.outputs, target.arrays.sizes.outputs)), np.float32)
    best = [float("inf")] * 2
    for _ in range(repetitions):
        start = perf_counter()
        for layer in range(len(w.qkv.segments)):
            for weights in (w.qkv, w.out, w.gate_up, w.down):
                compiled_multiply(x, weights, layer, work.rounded, y, rows)
        middle = perf_counter()
        compiled_multiply(x, w.head, 0, work.rounded, y, rows)
        best = [min(best[0], middle - start), min(best[1], perf_counter() - middle)]
    return best[0], best[1]


@njit(error_model="numpy")
def _draws(repetitions: int) -> float:
    total = 0.0
    for i in range(repetitions):
        total += uniform_at(1, 0, i, 0, 0)
    return total


def _seconds_of_a_draw(repetitions: int = 10_000) -> float:
    return shortest(lambda: _draws(repetitions), 1) / repetitions


def profile(shape: dict[str, Any], *, depth: int = 4, num_rounds: int = 40) -> dict[str, float]:
    """Milliseconds per round of one sequence by part, for a random target of a shape; a chain of `depth` and block verification."""
    folder = str(pair.draft_folder())
    draft = load.load_model(folder, device="cpu", max_num_seqs=1)
    tokenizer = load.load_tokenizer(folder)
    target = _random_target(shape, draft.vocab_size)
    prompt = tuple(load.encode(tokenizer, pair.prompts()[0].text))
    params = SamplingParams(ignore_eos=True)
    probe = _Probe()
    with probe.watching():  # engines look up what a verifier offers when they are built
        engine = Engine.of(
            target,
            tokenizer=tokenizer,
            draft_model=draft,
            drafter="model:chain",
            verifier="block",
            depth=depth,
        )
        engine.add_request(Request("profile", prompt, params, 0, 0))
        for _ in range(3):
            engine.step()
        (output,) = engine.step()
        probe.seconds.clear()
        before = dict(output.sample.stats.seconds)
        start = perf_counter()
        for _ in range(num_rounds):
            (output,) = engine.step()
    total = perf_counter() - start
    after = output.sample.stats.seconds
    engine.discard(["profile"])
    layers, head = _products(target, depth + 1, 5)
    found = {name: 1e3 * seconds / num_rounds for name, seconds in probe.seconds.items()}
    found["drafting"] = 1e3 * (after["drafting"] - before["drafting"]) / num_rounds
    draw = 1e3 * _seconds_of_a_draw()
    found["Python"] = 1e3 * total / num_rounds - sum(found.values())
    for part, count in (("drafting", depth), ("verification", 2)):
        noise = min(count * draw, found[part])
        found[part] -= noise
        found["noise"] += noise
    found["projections"] = 1e3 * layers
    found["head"] = 1e3 * head
    found["attention"] = max(found.pop("pass") - found["projections"] - found["head"], 0.0)
    return {part: found[part] for part in PARTS}


def main(quick: Quick = False) -> None:
    """Print the table for all sizes: milliseconds, and shares of the step."""
    torch.set_num_threads(1)
    table = Table(
        box=None,
        header_style="bold",
        pad_edge=False,
        title="one round, chain of 4 and block verification, context 150 to 350",
    )
    table.add_column("part")
    console = Console(width=None if sys.stdout.isatty() else 120)
    found = dict[str, dict[str, float]]()
    with console.status("profiling ..."):
        for name, shape in SIZES.items():
            found[name] = profile(shape, num_rounds=10 if quick else 40)
            table.add_column(f"{name}, ms", justify="right")
            table.add_column("share", justify="right")
    totals = {name: sum(parts.values()) for name, parts in found.items()}
    for part in PARTS:
        cells = [(f"{parts[part]:.2f}", f"{parts[part] / totals[name]:.0%}") for name, parts in found.items()]
        table.add_row(part, *(text for pair_ in cells for text in pair_))
    table.add_row("sum", *(text for total in totals.values() for text in (f"{total:.2f}", "")))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
