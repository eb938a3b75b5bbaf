"""`python -m studies.planner`: the adaptive plan against every fixed size, and every drafter against none."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from polydraft.bench.record import provenance
from studies.options import Out, Quick, write_json
from studies.planner import accuracy, every_drafter

__all__ = ["main"]


def main(
    out: Out = Path("build/planner"),
    model: Annotated[
        str | None, typer.Option(help="Folder of a chat model, to run every drafter on; without it the embedded pair.")
    ] = None,
    quick: Quick = False,
) -> None:
    """Write accuracy.json: six workloads, and all drafters on a target that none fits. Of a chat model the drafters alone."""
    torch.set_num_threads(1)
    rows = []
    for row in every_drafter.against_plain(model, count=2 if quick else 24, max_tokens=16 if quick else 96):
        rows.append(row)
        typer.echo(every_drafter.markdown([row]).splitlines()[-1], err=True)
    typer.echo(every_drafter.markdown(rows))
    report = {**provenance("python -m studies.planner"), "drafters": [row.to_dict() for row in rows]}
    if model is not None:
        write_json({**report, "model": Path(model).name}, out / f"{Path(model).name}.json")
        return
    found = []
    for name in accuracy.WORKLOADS:
        count = 2 if quick else 60 if name == "mixed batch" else 120  # of four texts each
        found.append(accuracy.accuracy(name, count=count, max_tokens=16 if quick else 96))
        typer.echo(f"{name}: {found[-1].ratio:.3f} of the best fixed plan, {found[-1].best_fixed}", err=True)
    typer.echo(accuracy.markdown(found))
    write_json({**report, "workloads": [a.to_dict() for a in found]}, out / "accuracy.json")


if __name__ == "__main__":
    typer.run(main)
