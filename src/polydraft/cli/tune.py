"""`polydraft tune`: what to draft on these models and prompts, and whether it pays."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from polydraft.cli.files import check_output, check_picture, read_lines
from polydraft.cli.quiet import quiet

__all__ = ["tune"]


def tune(
    model: Annotated[str | None, typer.Option(help="Folder of the target model; the embedded one without it.")] = None,
    draft_model: Annotated[str | None, typer.Option(help="Folder of a smaller model with the same vocabulary.")] = None,
    drafter: Annotated[str, typer.Option(help="A name of `polydraft methods`.")] = "auto",
    verifier: Annotated[str, typer.Option(help="A name of `polydraft methods`, or auto.")] = "auto",
    prompts: Annotated[Path | None, typer.Option(help="Text file, one prompt a line; default: held-out Python files.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each continuation.")] = 64,
    repetitions: Annotated[int, typer.Option(min=1, help="Of all prompts; one with --quick.")] = 4,
    threads: Annotated[int, typer.Option(min=1, help="Threads of everyone.")] = 1,
    save: Annotated[Path | None, typer.Option(help="Write the profile to FILE, for `generate --profile FILE`.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything that was found to FILE.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw speed over depth and paths into a PNG.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two prompts of 24 tokens and fewer sizes.")] = False,
) -> None:
    """Measure costs and acceptance, predict and measure the speed of several sizes, and recommend one."""
    for option, file in (("--save", save), ("--json", json_file), ("--picture", picture)):
        check_output(option, file)
    check_picture("--picture", picture)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch

    torch.set_num_threads(threads)
    quiet()
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
    from transformers import AutoConfig

    from polydraft.core import SamplingParams
    from polydraft.engine.api import Engine
    from polydraft.engine.plan import FixedPlan
    from polydraft.engine.profile import remember
    from polydraft.models import pair
    from polydraft.tune import tune as tuning

    options = {"drafter": drafter, "verifier": verifier, "max_num_seqs": 4}
    given = {} if draft_model is None else {"draft": draft_model}
    engine = Engine.embedded(**given, **options) if model is None else Engine.from_pretrained(model, **given, **options)
    texts = [p.text for p in pair.prompts()[:6]] if prompts is None else read_lines("--prompts", prompts)
    ids = [engine.encode(text) for text in (texts[:2] if quick else texts)]
    folder = draft_model or (str(pair.draft_folder()) if model is None else None)
    repetitions = 1 if quick else repetitions
    fixed = [FixedPlan(2), FixedPlan(4), FixedPlan(2, 2)] if quick else None
    console = Console() if sys.stdout.isatty() else Console(width=120)
    with Progress(transient=True, disable=not sys.stderr.isatty()) as bar:
        tasks = {what: bar.add_task(f"measuring {what}", total=None) for what in ("costs of rounds", "sizes")}
        found = tuning.tune(
            tuning.Parts.of(engine),
            ids,
            params=SamplingParams(temperature=temperature, max_tokens=min(max_tokens, 24) if quick else max_tokens),
            fixed=fixed,
            repetitions=repetitions,
            budget_seconds=0.2 if quick else 1.0,
            draft_config=None if folder is None or quick else AutoConfig.from_pretrained(folder),
            progress=lambda what, number: bar.update(tasks[what], total=number, advance=1),
        )
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("setting", "predicted", "measured", "error", "over plain", "tokens/call"):
        table.add_column(title, justify="left" if title == "setting" else "right")
    plain = found.trial("plain").measured
    for t in found.trials:
        guess = ("-", "-") if t.predicted is None else (f"{t.predicted:.0f}", f"{t.predicted / t.measured - 1:+.0%}")
        table.add_row(t.name, guess[0], f"{t.measured:.0f}", guess[1], f"{t.measured / plain:.2f}", f"{t.tokens_per_call:.2f}")
    console.print(table)
    console.print(
        f"\nTokens per second of decoding; the model is off by {found.error:.1%} on average, costs of rounds by "
        f"{found.profile.costs.error:.1%}.\n\n{found.recommendation()}\n",
        highlight=False,
    )
    for line in found.advice():
        console.print(f"- {line}", highlight=False)
    if not quick:
        remember(found.profile.about.get("identity"), found.profile)
    if save is not None:
        found.advised.save(save)
        typer.echo(f"wrote {save}", err=True)
    if json_file is not None:
        json_file.write_text(json.dumps(found.to_dict(), indent=1) + "\n", encoding="utf-8")
        typer.echo(f"wrote {json_file}", err=True)
    if picture is not None:
        tuning.picture(found, picture)
        typer.echo(f"wrote {picture}", err=True)
