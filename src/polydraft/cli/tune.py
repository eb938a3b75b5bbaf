"""`polydraft tune`: what to draft on these models and prompts, and whether it pays."""

import json
from pathlib import Path
from typing import Annotated

import typer

from polydraft.cli import options as given
from polydraft.cli.files import check_output, read_lines, say_written
from polydraft.cli.progress import bars
from polydraft.cli.start import build, use_threads
from polydraft.cli.tables import grid, output


def tune(
    model: given.Model = None,
    draft_model: given.DraftModel = None,
    drafter: given.Drafter = "auto",
    verifier: given.Verifier = "auto",
    prompts: given.Prompts = None,
    temperature: given.Temperature = 1.0,
    max_tokens: given.MaxTokens = 64,
    repetitions: given.Repetitions = 4,
    threads: given.Threads = 1,
    save: Annotated[Path | None, typer.Option(help="Write the profile to FILE, for `generate --profile FILE`.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything that was found to FILE.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw speed over depth and paths into a PNG.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two prompts of 24 tokens and fewer sizes.")] = False,
) -> None:
    """Measure costs and acceptance, predict and measure the speed of several sizes, and recommend one."""
    check_output("--save", save)
    check_output("--json", json_file)
    check_output("--picture", picture, picture=True)
    use_threads(threads)
    from polydraft.core import SamplingParams
    from polydraft.models import pair
    from polydraft.models.folder import load_config
    from polydraft.plan.profile import remember
    from polydraft.tune import tune as tuning

    engine = build(model, draft_model, drafter=drafter, verifier=verifier, max_num_seqs=4)
    texts = [p.text for p in pair.prompts()[:6]] if prompts is None else read_lines("--prompts", prompts)
    folder = draft_model or (str(pair.draft_folder()) if model is None else None)
    with bars("measuring costs of rounds") as step:
        found = tuning.tune(
            engine,
            [engine.encode(text) for text in (texts[:2] if quick else texts)],
            params=SamplingParams(temperature=temperature, max_tokens=min(max_tokens, 24) if quick else max_tokens),
            sizes=((1, 2), (1, 4), (2, 2)) if quick else tuning.SIZES,
            repetitions=1 if quick else repetitions,
            budget_seconds=0.2 if quick else 1.0,
            draft_config=None if folder is None or quick else load_config(folder),
            progress=lambda what, number: step(number, what=f"measuring {what}"),
        )
    plain = found.trial("plain").measured
    rows = [
        (
            t.name,
            "-" if t.predicted is None else f"{t.predicted:.0f}",
            f"{t.measured:.0f}",
            "-" if t.predicted is None else f"{t.predicted / t.measured - 1:+.0%}",
            f"{t.measured / plain:.2f}",
            f"{t.tokens_per_call:.2f}",
        )
        for t in found.trials
    ]
    console = output()
    console.print(grid(["setting", "predicted", "measured", "error", "over plain", "tokens/call"], rows))
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
    if json_file is not None:
        json_file.write_text(json.dumps(found.to_dict(), indent=1) + "\n", encoding="utf-8")
    if picture is not None:
        from polydraft.tune.picture import picture as draw

        draw(found, picture)
    say_written(file for file in (save, json_file, picture) if file is not None)
