"""`python -m studies.planner`: the adaptive plan against every fixed size, and every drafter against none."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer

from polydraft.bench.record import provenance
from studies.options import Out, Quick, write_json
from studies.planner import accuracy, every_drafter, workloads

__all__ = ["main"]


def main(
    out: Out = Path("build/planner"),
    model: Annotated[str | None, typer.Option(help="A chat model, by name or folder; without it the embedded pair.")] = None,
    inflate: Annotated[int, typer.Option(min=0, help="Append N layers to the pair's target that cost and change nothing.")] = 0,
    workload: Annotated[list[str] | None, typer.Option(help="Only these; can be given more than once.")] = None,
    drafters: Annotated[bool, typer.Option(help="Run every drafter against none, too.")] = True,
    rounds: Annotated[int, typer.Option(min=2, help="Of each workload, a quarter of it for sizes that fall behind.")] = 120,
    quick: Quick = False,
) -> None:
    """Write accuracy.json: the plan on each workload, and all drafters on a target that none fits, or on a chat model."""
    torch.set_num_threads(1)
    tokens, rows = 16 if quick else 96, []
    for row in every_drafter.against_plain(model, count=2 if quick else 24, max_tokens=tokens) if drafters else ():
        rows.append(row)
        typer.echo(every_drafter.markdown([row]).splitlines()[-1], err=True)
    typer.echo(every_drafter.markdown(rows))
    found = []
    for name, work in _workloads(model, workload, 2 if quick else rounds, tokens, inflate):
        found.append(accuracy.accuracy(name, work))
        typer.echo(f"{name}: {found[-1].ratio:.3f} of the best fixed plan, {found[-1].best_fixed}", err=True)
    typer.echo(accuracy.markdown(found))
    report = {**provenance("python -m studies.planner"), "model": model, "layers": inflate}
    write_json(
        {**report, "drafters": [r.to_dict() for r in rows], "workloads": [a.to_dict() for a in found]}, out / "accuracy.json"
    )


def _workloads(
    model: str | None, wanted: list[str] | None, rounds: int, tokens: int, layers: int
) -> Iterator[tuple[str, workloads.Workload]]:
    names = workloads.WORKLOADS if model is None else workloads.ANSWERS
    for name in wanted or names:
        if name not in names:
            raise typer.BadParameter(f"--workload={name!r} was given; expected one of {', '.join(names)}.")
        count = max(2, rounds // 4 * 2) if name == "mixed batch" else rounds  # of four texts each
        if model is None:
            yield name, workloads.workload(name, count, tokens, layers=layers)
        else:
            yield name, workloads.chat_workload(model, name, count, tokens)


if __name__ == "__main__":
    typer.run(main)
