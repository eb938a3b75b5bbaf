"""`polydraft tune`: what the policy knows of these models and prompts, and whether drafts pay."""

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
    """Print seconds by rows, acceptance by confidence, predicted and measured speeds of draft shapes, and a recommendation."""
    check_output("--save", save)
    check_output("--json", json_file)
    check_output("--picture", picture, picture=True)
    use_threads(threads)
    from polydraft.confidence import BINS
    from polydraft.core import SamplingParams
    from polydraft.models import pair
    from polydraft.policy.profile import remember
    from polydraft.tune import tune as tuning

    engine = build(model, draft_model, drafter=drafter, verifier=verifier, max_num_seqs=4)
    texts = [p.text for p in pair.prompts()[:6]] if prompts is None else read_lines("--prompts", prompts)
    with bars("running shapes") as step:
        found = tuning.tune(
            engine,
            [engine.encode(text) for text in (texts[:2] if quick else texts)],
            params=SamplingParams(temperature=temperature, max_tokens=min(max_tokens, 24) if quick else max_tokens),
            shapes=tuning.SHAPES[1:4] if quick else tuning.SHAPES,
            repetitions=1 if quick else repetitions,
            progress=lambda number: step(number),
        )
    console, costs, plain = output(), found.profile.costs, found.trial("plain").measured
    rates, _ = found.profile.known(found.greedy)
    seconds = [(f"pass of {n} rows" if n > 1 else "pass of 1 row", f"{1e3 * costs.rows(n):.3f}") for n in (1, 2, 4, 8, 16)]
    seconds += [("draft, at all", f"{1e3 * costs.draft_start:.3f}"), ("draft step", f"{1e3 * costs.draft_step:.3f}")]
    console.print(grid(["milliseconds of a", ""], seconds))
    odds = ["below 2%", "2%", "5%", "12%", "27%", "50%", "73%", "88%", "95%", "98%"]
    lanes = [*zip(odds, rates[:BINS], strict=True), ("first token", rates[BINS]), ("next tokens", rates[BINS + 1])]
    console.print(grid(["confidence from", "accepted"], [(name, f"{rate:.2f}") for name, rate in lanes]))
    rows = list[tuple[str, ...]]()
    for t in found.trials:
        said = found.predicted(t)
        words = ("-", "-") if said is None else (f"{said:.0f}", f"{said / t.measured - 1:+.0%}")
        rows.append((t.name, words[0], f"{t.measured:.0f}", words[1], f"{t.measured / plain:.2f}", f"{t.tokens / t.steps:.2f}"))
    console.print(grid(["shape", "predicted", "measured", "error", "over plain", "tokens/step"], rows))
    console.print(f"\n{found.recommendation()}\n", highlight=False)
    if not quick:
        remember(found.profile.about.get("identity"), found.profile)
    if save is not None:
        found.profile.save(save)
    if json_file is not None:
        json_file.write_text(json.dumps(found.to_dict(), indent=1) + "\n", encoding="utf-8")
    if picture is not None:
        from polydraft.tune.picture import picture as draw

        draw(found, picture)
    say_written(file for file in (save, json_file, picture) if file is not None)
