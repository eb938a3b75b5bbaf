"""`python -m studies.one_pass`: trees of one-pass heads, and of hybrids' own heads, by every kind of draws and verifier, beside match and rejection.

A head of one pass branches for nothing, so only rows of the target's pass are paid. Ways are run in the engine, interleaved with plain decoding:

    tokens      emitted per step
    over plain  median over prompts of the speed of a way over plain decoding's on the same prompt
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from polydraft.bench.record import csv_table, markdown_table, write_texts
from polydraft.cli.files import say_written
from polydraft.cli.progress import bars
from polydraft.cli.start import use_threads
from polydraft.models import pair
from studies.options import Out, Quick
from studies.question_files import questions
from studies.yardstick import Yardstick

KINDS = (
    ":chain+speculative@1x{depth}",
    ":chain+block@1x{depth}",
    "+match@{paths}x{depth}",
    ":top_k+match@{paths}x{depth}",
    ":without_replacement+recursive_wor@{paths}x{depth}",
    "+transport@{paths}x{depth}",
    "+traversal@{paths}x{depth}",
    "+greedy_traversal@{paths}x{depth}",
    ":without_replacement+traversal@{paths}x{depth}",
    ":greedy_plus_one+traversal@{paths}x{depth}",
    ":systematic+flow@{paths}x{depth}",
)
"""Draws and verifier: a chain by the two rules for one, then paths by match, rejection, and rules for blocks, by transport and by flow."""
SIZES = (2, 4)
DEPTH = 3
TEMPERATURES = (0.6, 1.0)
HEAD = ("drafter", "temperature", "way", "verifier", "tokens_per_step", "over_plain", "drafting_ms")


def ways(drafter: str) -> list[str]:
    """Of one drafter; chains once."""
    every = [drafter + kind.format(paths=paths, depth=DEPTH) for kind in KINDS for paths in SIZES]
    return list(dict.fromkeys(every))


def lines(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Of the CSV file; a way that failed says why."""
    found = list[list[Any]]()
    for row in rows:
        drafter = row["way"].partition("+")[0].partition(":")[0]
        start = [drafter, row["temperature"], row["way"]]
        if "error" in row:
            found.append([*start, row["error"], None, None, None])
            continue
        figures = [f"{row['tokens_per_step']:.3f}", f"{row['over_plain']:.3f}", f"{row['drafting_ms']:.3f}"]
        found.append([*start, row["verifier"], *figures])
    return found


def page(table: Sequence[Sequence[Any]]) -> str:
    """Tokens per step and speed of each kind of drafts and size, at each temperature and by each drafter."""
    cells = {(line[0], float(line[1]), line[2].removeprefix(line[0])): line for line in table}
    drafters = list(dict.fromkeys(line[0] for line in table if line[0] != "plain"))
    temperatures = sorted({float(line[1]) for line in table})
    columns = [(drafter, temperature) for drafter in drafters for temperature in temperatures]
    head = ["draws, verifier, paths x tokens", *(f"{drafter}, T = {t:g}" for drafter, t in columns)]
    kinds = dict.fromkeys(way for _, _, way in cells if way)
    body = [[way.lstrip("+:"), *(_cell(cells.get((*column, way))) for column in columns)] for way in kinds]
    return markdown_table(head, body) + "\n"


def _cell(line: Sequence[Any] | None) -> str:
    if line is None or line[4] in (None, ""):
        return "" if line is None else str(line[3])
    return f"{float(line[4]):.2f}, {float(line[5]):.2f}"


def main(
    prompts: Annotated[Path, typer.Option(help='.jsonl file of "prompt", or "turns".')],
    model: Annotated[str | None, typer.Option(help="Target model; default the embedded one.")] = None,
    head: Annotated[list[Path] | None, typer.Option(help="Folder of a head; may be repeated.")] = None,
    drafter: Annotated[
        list[str] | None, typer.Option(help="Drafter of the model's own file, as mtp.")
    ] = None,
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="Prompts.")] = 16,
    num_tokens: Annotated[int, typer.Option("--num-tokens", min=1, help="New tokens of each.")] = 128,
    out: Out = Path("build/one_pass"),
    quick: Quick = False,
) -> None:
    """Write one-pass.csv and one-pass.md."""
    use_threads()
    heads = head or []
    names = [*(folder.name for folder in heads), *(drafter or [])]
    count = 2 if quick else num_prompts
    asked = questions([prompts], count)[:count]
    yardstick = Yardstick(
        model or str(pair.target_folder()),
        heads,
        [way for name in names for way in ways(name)],
        max_model_len=1024,
    )
    with bars("measuring") as step:
        report = yardstick.run(asked, TEMPERATURES, max_tokens=8 if quick else num_tokens, progress=step)
    table = lines(report["rows"])
    out.mkdir(parents=True, exist_ok=True)
    say_written(write_texts({out / "one-pass.csv": csv_table(HEAD, table), out / "one-pass.md": page(table)}))


app = typer.Typer(pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
