"""`polydraft demo`: the embedded pair generates before your eyes, with and without drafts, and is measured."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from polydraft import __version__
from polydraft.cli.options import AsJson
from polydraft.cli.start import use_threads
from polydraft.cli.tables import grid, output

if TYPE_CHECKING:
    from rich.console import Console

    from polydraft.bench.showcase import DemoComparison, Showcase
    from polydraft.cli.show import Palette

WHAT_HAPPENS = f"""\
polydraft {__version__}, a live demo on the pair of small models inside this package. Nothing is downloaded.
It takes about a minute and a half on two slow cores:
  1. load the models and compile what they run (stored for the next time)
  2. watch them continue real Python files, without drafts and with drafts
  3. measure every contender in turn on the same prompts, and compare their outputs"""


def demo(
    as_json: AsJson = False,
    num_prompts: Annotated[
        int, typer.Option("--prompts", min=1, help="Number of held-out files to continue.")
    ] = 6,
    max_tokens: Annotated[int, typer.Option(min=1, help="Number of new tokens of each continuation.")] = 64,
    repetitions: Annotated[
        int, typer.Option(min=1, help="Number of repetitions of all prompts; fewer on a slow machine.")
    ] = 3,
) -> None:
    """Watch a model generate with and without drafts, then see how fast each way is (about a minute and a half)."""
    if not as_json:
        typer.echo(WHAT_HAPPENS)
        sys.stdout.flush()
    use_threads()
    from polydraft.bench.showcase import Showcase

    showcase = Showcase(num_prompts)
    if not as_json:
        _perform(showcase, max_tokens, repetitions)
        return
    showcase.warm_up()
    typer.echo(json.dumps(showcase.compare(max_tokens=max_tokens, repetitions=repetitions).to_dict()))


def _perform(showcase: "Showcase", max_tokens: int, repetitions: int) -> None:
    from polydraft.cli.show import Palette

    console = output()
    with _timed(console, "Compiling and warming up"):
        showcase.warm_up()
    palette = Palette()
    names = list(showcase.prompts)
    _watch(showcase, palette, names[0], 0.0, ("plain", "chain + block"), max_tokens)
    _watch(showcase, palette, names[-1], 1.0, ("race without drafts", "race"), max_tokens)
    typer.echo(f"\n{palette.legend()}\n")
    with _timed(console, "Measuring, interleaved"):
        comparison = showcase.compare(max_tokens=max_tokens, repetitions=repetitions)
    _report(console, comparison)
    typer.echo("\nNow your own model, with a smaller one of the same vocabulary:")
    typer.echo(f'{_command()} generate "Once upon a time" --model PATH --draft-model PATH')


@contextmanager
def _timed(console: "Console", what: str) -> Iterator[None]:
    start = perf_counter()
    with console.status(f"{what} ..."):
        yield
    console.print(f"{what}: {perf_counter() - start:.0f} s", highlight=False)


def _watch(
    showcase: "Showcase",
    palette: "Palette",
    name: str,
    temperature: float,
    ways: tuple[str, str],
    max_tokens: int,
) -> None:
    """Stream one prompt both ways: the same text twice, the second time with drafts."""
    from polydraft.cli.show import play, speed
    from polydraft.core import SamplingParams

    console = output()
    prompt = showcase.prompts[name]
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=1)
    last_lines = "".join(showcase.tokenizer.decode(prompt).splitlines(keepends=True)[-2:])
    for title, way in zip(("without drafts", "with drafts"), ways, strict=True):
        console.print(f"\n[bold]{name}, temperature {temperature:g}, {title} ({way})[/bold]", highlight=False)
        console.out(last_lines, style="dim", end="", highlight=False)
        sample = play(showcase.engines[way], prompt, params, palette, colour=True, begin=lambda: None)
        if sample is not None:
            console.print(f"[dim]{speed(sample.stats)}[/dim]", highlight=False)


def _report(console: "Console", comparison: "DemoComparison") -> None:
    from polydraft.bench.record import processor

    ratios = {"speedup": "speed-up", "speedup_transformers": "over transformers"}
    found = comparison.rows()
    ratios = {key: title for key, title in ratios.items() if key in found[0]}
    rows = [
        (
            row["name"],
            f"{row['temperature']:g}",
            f"{row['tokens_per_second']:.0f}",
            *(f"{row[key]:.2f}x" for key in ratios),
            f"{row['tokens_per_step']:.2f}",
            " ".join(f"{a:.2f}" for a in measurement.acceptance_by_depth) or "-",
        )
        for row, measurement in zip(found, comparison.measurements, strict=True)
    ]
    depths = "acceptance by depth"
    head = ("contender", "temperature", "tokens/s", *ratios.values(), "tokens/step", depths)
    console.print(grid(head, rows, left_aligned=[depths]))
    repetitions = len(comparison.measurements[0].runs)
    ties = (
        f" ({comparison.near_ties} near ties, where two logits are equal in float32)"
        if comparison.near_ties
        else ""
    )
    included = ", transformers included" if "speedup_transformers" in ratios else ""
    console.print(
        f"\nTemperature 0: outputs equal token for token{included}: {'yes' if comparison.equal_greedy else 'NO'}{ties}\n"
        f"Temperature 1, seed-exact (race with drafts = race without): {'yes' if comparison.equal_seed_exact else 'NO'}\n"
        f"Measured now: {len(comparison.prompts)} prompts, {repetitions} repetitions, medians, one thread, float32, {processor()}",
        highlight=False,
    )


def _command() -> str:
    """How this installation's command is called from here."""
    if shutil.which("polydraft"):
        return "polydraft"
    beside = Path(sys.executable).with_name("polydraft")
    return os.path.relpath(beside) if beside.exists() else f"{sys.executable} -m polydraft"
