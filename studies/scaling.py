"""`python -m studies.scaling`: how the cost of a round grows with batch, context, rows, vocabulary, paths and depth; memory beside it.

Rounds are real ones; medians of several repetitions, in CPU seconds on one thread. Batch,
paths and depth are measured on the embedded pair, with the tokens that it really emits. Context, rows and vocabulary are
measured on random models of the sizes said, as costs do not depend on weights; their drafted rounds are counted in rounds.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer

from polydraft.bench.record import markdown_table, provenance
from polydraft.core import Budget, Request, SamplingParams, TokenTree
from polydraft.core.geometry import paths
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.engine.loop import Loop
from polydraft.engine.speculation import Menu, Speculation
from polydraft.methods.registry import verifier
from polydraft.models import load, pair
from polydraft.models.compiled.model import CompiledModel
from polydraft.policy.fixed import FixedPolicy
from polydraft.policy.measuring import clock
from studies.options import Out, Quick, write_json

BATCHES = (1, 2, 4, 8, 16)
CONTEXTS = (256, 512, 1024, 2048, 4096)
ROWS = (1, 2, 4, 8, 12, 16, 24, 32)
VOCABULARIES = (2048, 8192, 32768, 65536, 151936)
DEPTHS = (0, 1, 2, 4, 8, 12)
BLOCK = 6
"""Rounds of one size in a row that count, after one that does not."""
TARGET: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 3,
}
DRAFT: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
}


@dataclass(frozen=True)
class Point:
    """seconds: of a round or a pass.  tokens: emitted in it; 1 a sequence without drafts.  num_bytes: weights and caches."""

    x: int
    seconds: float
    tokens: float
    num_bytes: int

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Curve:
    """One line of a panel. panel: what is varied.  name: the setting."""

    panel: str
    name: str
    points: tuple[Point, ...]

    @property
    def exponents(self) -> tuple[float, float]:
        """d log seconds / d log x over the first step and over the last: 1 is linear, 0 is free."""
        points = [p for p in self.points if p.x > 0]

        def slope(a: Point, b: Point) -> float:
            return math.log(b.seconds / a.seconds) / math.log(b.x / a.x)

        return slope(points[0], points[1]), slope(points[-2], points[-1])

    @property
    def knee(self) -> int | None:
        """The first x from which a doubling of x costs at least 1.6 times the seconds (exponent 0.68); None if none does."""
        points = [p for p in self.points if p.x > 0]
        for a, b in itertools.pairwise(points):
            if math.log(b.seconds / a.seconds) / math.log(b.x / a.x) > math.log2(1.6):
                return a.x
        return None


def _random(shape: dict[str, Any], vocab_size: int, space: int, slots: int = 1) -> CompiledModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, tie_word_embeddings=True, max_position_embeddings=space, **shape
    )
    return CompiledModel(LlamaForCausalLM(config).eval(), max_num_seqs=slots, cache_dtype="float32")


def _weight_bytes(model: CompiledModel) -> int:
    return sum(getattr(x, "nbytes", 0) for x in model.weights)


def _bytes(*models: CompiledModel) -> int:
    return sum(_weight_bytes(m) + m.cache_bytes for m in models)


def _rounds(
    target: CompiledModel,
    draft: CompiledModel,
    prompt: list[int],
    sizes: Sequence[tuple[int, int]],
    batch: int,
    repetitions: int,
) -> dict[tuple[int, int], tuple[float, float]]:
    """By size (seconds, tokens) of a round: the median of seconds, the mean of tokens; blocks of rounds of all sizes in turn."""
    plain = FixedPolicy(Budget.fixed((-1,)))
    loop = Loop(
        target,
        Menu(target, Speculation(ModelDrafter(draft), verifier("greedy_traversal"), plain)),
        clock=clock(target),
        teaching=False,
    )
    found: dict[tuple[int, int], list[tuple[float, int]]] = {size: [] for size in sizes}
    room = draft.max_model_len - len(prompt) - 2
    for _ in range(repetitions):
        for size, taken in found.items():
            params = SamplingParams(ignore_eos=True, max_tokens=min(room, (BLOCK + 2) * (1 + size[1])))
            loop.policy = FixedPolicy(Budget.fixed(paths(*size))) if size[1] else plain
            samples = [loop.add_request(Request(str(b), tuple(prompt), params, b)) for b in range(batch)]
            loop.step()
            for _ in range(BLOCK):
                before = [(sum(s.stats.seconds.values()), s.stats.generated_tokens) for s in samples]
                loop.step()
                now = [(sum(s.stats.seconds.values()), s.stats.generated_tokens) for s in samples]
                if any(s.finish_reason for s in samples):
                    break
                spent = [tuple(b - a for a, b in zip(*x, strict=True)) for x in zip(before, now, strict=True)]
                taken.append((sum(seconds for seconds, _ in spent), int(sum(tokens for _, tokens in spent))))
            loop.discard(str(b) for b in range(batch))
    return {
        size: (float(np.median([s for s, _ in x])), float(np.mean([t for _, t in x])))
        for size, x in found.items()
    }


def _by_batch(repetitions: int) -> list[Curve]:
    folders = (str(pair.target_folder()), str(pair.draft_folder()))
    prompt = load.encode(load.load_tokenizer(folders[0]), pair.prompts()[0].text)
    sizes = {"plain": (1, 0), "1x4": (1, 4), "2x4": (2, 4)}
    found = {}
    for batch in BATCHES:
        target, draft = (_embedded(folder, batch) for folder in folders)
        rounds = _rounds(target, draft, prompt, list(sizes.values()), batch, repetitions)
        for name, size in sizes.items():
            found.setdefault(name, []).append(Point(batch, *rounds[size], _bytes(target, draft)))
    return [Curve("sequences at a time", name, tuple(points)) for name, points in found.items()]


def _embedded(folder: str, slots: int) -> CompiledModel:
    model = load.load_model(folder, max_num_seqs=slots, backend="compiled")
    assert isinstance(model, CompiledModel)
    return model


def _by_depth(repetitions: int) -> list[Curve]:
    folders = (str(pair.target_folder()), str(pair.draft_folder()))
    prompt = load.encode(load.load_tokenizer(folders[0]), pair.prompts()[0].text)
    target, draft = (_embedded(folder, 1) for folder in folders)
    curves = []
    for width in (1, 2, 4):
        rounds = _rounds(target, draft, prompt, [(width, d) for d in DEPTHS], 1, repetitions)
        points = tuple(Point(d, *rounds[width, d], _bytes(target, draft)) for d in DEPTHS)
        curves.append(Curve("depth", f"{width} path{'s' if width > 1 else ''}", points))
    return curves


def _by_context(repetitions: int, longest: int) -> list[Curve]:
    contexts = [c for c in CONTEXTS if c <= longest]
    found: dict[str, list[Point]] = {"plain": [], "1x4": []}
    for context in contexts:
        space = context + 160
        target = _random(TARGET, 2048, space)
        draft = _random(DRAFT, 2048, space)
        prompt = np.random.default_rng(0).integers(1, 2048, context).tolist()
        rounds = _rounds(target, draft, prompt, [(1, 0), (1, 4)], 1, repetitions)
        for name, size in (("plain", (1, 0)), ("1x4", (1, 4))):
            found[name].append(Point(context, *rounds[size], _bytes(target, draft)))
    return [Curve("tokens of context", name, tuple(points)) for name, points in found.items()]


def _by_vocabulary(repetitions: int, largest: int) -> list[Curve]:
    found: dict[str, list[Point]] = {"plain": [], "1x4": []}
    for size in (v for v in VOCABULARIES if v <= largest):
        target = _random(TARGET, size, 512)
        draft = _random(DRAFT, size, 512)
        rounds = _rounds(target, draft, list(range(1, 65)), [(1, 0), (1, 4)], 1, repetitions)
        for name, drafts in (("plain", (1, 0)), ("1x4", (1, 4))):
            found[name].append(Point(size, *rounds[drafts], _bytes(target, draft)))
    return [Curve("vocabulary", name, tuple(points)) for name, points in found.items()]


def _by_rows(repetitions: int) -> list[Curve]:
    curves = []
    for name, shape in (
        ("3M", TARGET),
        ("25M", {**TARGET, "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8}),
    ):
        model = _random(shape, 2048, 512)
        watch = clock(model)
        model.prefill([0], [list(range(1, 129))])
        taken: dict[int, list[float]] = {rows: [] for rows in ROWS}
        for _ in range(BLOCK * repetitions + 1):
            for rows in ROWS:
                tree = TokenTree.chain(np.ones((1, rows), np.int64))
                start = watch()
                model.score([0], tree)
                taken[rows].append(watch() - start)
        curves.append(
            Curve(
                "rows of a forward pass",
                name,
                tuple(Point(r, float(np.median(taken[r][1:])), r, _bytes(model)) for r in ROWS),
            )
        )
    return curves


def scaling(*, quick: bool = False, progress: Callable[[str], None] = lambda name: None) -> list[Curve]:
    """All curves. quick: few repetitions, contexts up to 512 and vocabularies up to 8k.  progress: called with each panel's name."""
    repetitions = 1 if quick else 8
    found = []
    for name, measured in (
        ("batch", lambda: _by_batch(repetitions)),
        ("context", lambda: _by_context(repetitions, 512 if quick else CONTEXTS[-1])),
        ("rows", lambda: _by_rows(repetitions)),
        ("vocabulary", lambda: _by_vocabulary(repetitions, 8192 if quick else VOCABULARIES[-1])),
        ("depth", lambda: _by_depth(repetitions)),
    ):
        progress(name)
        found += measured()
    return found


def to_dict(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """Plain data for JSON; seconds and bytes."""
    return [
        {
            "panel": c.panel,
            "name": c.name,
            "points": [vars(p) for p in c.points],
            "exponents": c.exponents,
            "knee": c.knee,
        }
        for c in curves
    ]


def markdown(curves: Sequence[Curve]) -> str:
    """A row for each curve: its ends and how it bends. Every point is in curves.json."""
    lines = [
        [
            c.panel,
            c.name,
            f"{c.points[0].x} to {c.points[-1].x}",
            f"{1e3 * c.points[0].seconds:.2f} to {1e3 * c.points[-1].seconds:.2f}",
            f"{c.points[0].rate:.0f} to {c.points[-1].rate:.0f}",
            f"{c.points[0].num_bytes / 2**20:.1f} to {c.points[-1].num_bytes / 2**20:.1f}",
            *(f"{exponent:.2f}" for exponent in c.exponents),
            c.knee or "none",
        ]
        for c in curves
    ]
    return (
        markdown_table(
            ["by", "curve", "from, to", "ms", "tokens/s", "MiB", "exponent at first", "at last", "knee"],
            lines,
        )
        + "\n"
    )


def picture(curves: Sequence[Curve], path: Path) -> None:
    """A column for each panel: seconds above, tokens per second in the middle, memory below."""
    from matplotlib import pyplot as plt

    panels = list(dict.fromkeys(c.panel for c in curves))
    figure, grid = plt.subplots(
        3, len(panels), figsize=(3.4 * len(panels), 8), layout="constrained", squeeze=False
    )
    for column, panel in enumerate(panels):
        for i, curve in enumerate(c for c in curves if c.panel == panel):
            xs = [p.x for p in curve.points]
            grid[0][column].plot(
                xs, [1e3 * p.seconds for p in curve.points], "o-", label=curve.name, markersize=3
            )
            grid[1][column].plot(xs, [p.rate for p in curve.points], "o-", label=curve.name, markersize=3)
            wide = {
                "linewidth": 6 - 2 * i,
                "markersize": 7 - 2 * i,
            }  # equal memory is seen as lines within each other
            grid[2][column].plot(
                xs, [p.num_bytes / 2**20 for p in curve.points], "o-", label=curve.name, **wide
            )
        for row, label in enumerate(
            ("ms", "rows/s" if panel == "rows of a forward pass" else "tokens/s", "MiB")
        ):
            grid[row][column].set_ylabel(label)
            grid[row][column].set_ylim(bottom=0)
            grid[row][column].set_xlabel(panel)
        grid[0][column].legend(fontsize=7)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main(out: Out = Path("build/scaling"), quick: Quick = False) -> None:
    """Write curves.json and curves.png, and print the tables of docs/results/scaling.md."""
    torch.set_num_threads(1)
    found = scaling(quick=quick, progress=lambda name: typer.echo(f"measuring by {name} ...", err=True))
    typer.echo(markdown(found))
    write_json({**provenance("python -m studies.scaling"), "curves": to_dict(found)}, out / "curves.json")
    picture(found, out / "curves.png")


if __name__ == "__main__":
    typer.run(main)
