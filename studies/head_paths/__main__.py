"""`python -m studies.head_paths --model NAME`: do several drafts of a head pay, how many, how deep, and by which verifier?

Contexts are places in the target's own answers. At each, paths of every way of drawing are drawn from the head, up to eight of seven tokens, and scored by
the target; the tokens per step of every lossless verifier follow without another pass, and on the same drafts a bound that none exceeds on the mean. Seconds of a step are those of its
passes. A cut-off run keeps its contexts: the same command goes on with the next one. `--costs` measures only seconds, for a machine that does nothing
else; `--report` writes tables and plot from what is stored.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from studies.head_paths.contexts import written_contexts
from studies.head_paths.costs import HeadCosts, head_passes
from studies.head_paths.picture import picture
from studies.head_paths.tables import farthest_above, opening, put_into, rows_of, small_table, write_csv
from studies.head_paths.values import read_values
from studies.head_paths.work import measure_all, opened
from studies.options import Out, Quick, write_json
from studies.several_drafts.texts import COMPLETE_FUNCTION, packaged_prompts, read_prompts

__all__ = ["main"]

TABLE, PLOT = Path("docs/results/head-paths.csv"), Path("docs/pictures/head-paths.png")


def main(
    model: Annotated[str, typer.Option(help="Model whose distribution is followed.")] = "smollm2-135m-instruct",
    head: Annotated[Path | None, typer.Option(help="Folder of a head; the one that comes for the model.")] = None,
    code: Annotated[Path | None, typer.Option(help="JSONL file of code prompts, as HumanEval's.")] = None,
    chat: Annotated[Path | None, typer.Option(help="JSONL file of questions, as Spec-Bench's.")] = None,
    num_answers: Annotated[int, typer.Option("--answers", min=2, help="Answers of each kind of text; two contexts each.")] = 50,
    temperature: Annotated[list[float] | None, typer.Option(help="May be repeated.")] = None,
    out: Out = Path("build/head_paths"),
    table: Annotated[Path, typer.Option(help="CSV file that is written, a line a case.")] = TABLE,
    plot: Annotated[Path, typer.Option(help="Picture that is written.")] = PLOT,
    page: Annotated[Path | None, typer.Option(help="Page into which the table is written, between its marks.")] = None,
    processes: Annotated[int, typer.Option(help="Processes that measure contexts side by side.")] = 1,
    only_costs: Annotated[
        bool, typer.Option("--costs", help="Only the seconds of passes, measured anew, and the report.")
    ] = False,
    only_report: Annotated[bool, typer.Option("--report", help="Only tables and plot, from what is in --out.")] = False,
    quick: Quick = False,
) -> None:
    """Write the table and the plot; rows, values and seconds stay in `--out`."""
    if quick:
        num_answers, table, plot = 2, out / "head-paths.csv", out / "head-paths.png"
    rows, passes, contexts = out / "rows", out / "passes.json", out / "contexts.json"
    rows.mkdir(parents=True, exist_ok=True)
    if not only_report:
        engine, head_rows = opened(model, head)
        prompts: dict[str, Any] = packaged_prompts()
        prompts |= {"code": read_prompts(code, COMPLETE_FUNCTION)} if code else {}
        prompts |= {"chat": read_prompts(chat)} if chat else {}
        texts = written_contexts(engine, prompts, num_answers, contexts)
        if only_costs or not passes.exists():
            write_json(head_passes(engine.target, head_rows, texts[0].token_ids, 2 if quick else 9), passes)
        if not only_costs:
            measure_all(processes, model, head, texts, temperature or (0.7, 1.0), rows)
    values, seconds = read_values(rows), json.loads(passes.read_text(encoding="utf-8"))
    timed, free = (rows_of(values, HeadCosts(seconds, free_rows)) for free_rows in (False, True))
    write_csv(timed, table)
    picture(timed, free, plot)
    text = opening(model, timed, free)
    typer.echo(f"{text}\n\nIf a pass of many rows cost as one of a single row:\n\n{small_table(free)}")
    typer.echo(f"\n{farthest_above(timed)}")
    if page is not None:
        put_into(page, text)
    typer.echo(f"wrote {table} and {plot}", err=True)


if __name__ == "__main__":
    typer.run(main)
