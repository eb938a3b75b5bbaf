"""`python -m studies.several_drafts --target FILE --draft FILE`: where does a second path of drafts pay?

Contexts are places in the target's own answers. At each, trees of every kind of drafts are drawn from the draft model and from weaker ones, which are
the same model without some of its layers, in two bits or both, and scored by the target, each context's nodes in few forward passes; every verifier's expected tokens per step
follow without another one. Speed is tokens over the seconds of a step, from passes measured by rows. A cut-off run keeps its contexts: the same command
goes on with the next one, and adds draft models that it lacks. `--costs`
measures only seconds, for a machine that does nothing else; `--report` writes the page from what is stored.
"""

import csv
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import typer

from polydraft.engine.api import Engine
from polydraft.models import load, pair
from polydraft.models.compiled.llama import CompiledLlama
from studies.options import Out, Quick, write_json
from studies.several_drafts.costs import TARGET, measured_passes
from studies.several_drafts.measure import checkpoint_of, measure, missing_drafts, stored_context, without_layers
from studies.several_drafts.picture import picture
from studies.several_drafts.report import markdown, second_rows, speed_rows, token_rows
from studies.several_drafts.rows import RowStore
from studies.several_drafts.texts import COMPLETE_FUNCTION, CONTEXTS, Context, answers, packaged_prompts, read_prompts
from studies.several_drafts.two_bits import in_two_bits
from studies.several_drafts.verified import read_values

__all__ = ["main", "size_name"]

PAGE, PLOT = Path("docs/results/several-drafts.md"), Path("docs/pictures/several-drafts.png")
MAX_LENGTH = 512


def _models(target: str, draft: str, quick: bool) -> tuple[Any, Any, dict[str, Any]]:
    """Target, its tokenizer, and draft models by name, the full one first. quick: beside it the one of two bits alone."""
    options: dict[str, Any] = {"max_model_len": MAX_LENGTH, "max_num_seqs": 2, "threads": 1}
    big: Any = load.load_model(target, **options)
    small: Any = load.load_model(draft, **options)
    tokenizer = load.load_tokenizer(target)
    shared = load.check_same_vocabulary(tokenizer, load.load_tokenizer(draft), big.vocab_size, small.vocab_size)
    big.vocab_size = small.vocab_size = shared
    files = checkpoint_of(draft)
    coarse, layers = in_two_bits(files), files.config.num_hidden_layers
    few = f"{layers - layers // 2} of {layers} layers"
    weaker = {
        f"{layers - layers // 4} of {layers} layers": without_layers(files, range(layers // 3, layers // 3 + layers // 4)),
        few: without_layers(files, middle := range(layers // 4, layers // 4 + layers // 2)),
        "two bits": coarse,
        f"two bits, {few}": without_layers(coarse, middle),
    }
    weaker = {"two bits": coarse} if quick else weaker
    return big, tokenizer, {size_name(draft): small} | {name: CompiledLlama(model, **options) for name, model in weaker.items()}


def size_name(model: str) -> str:
    """How a model is called in tables: the size in its name, else "draft model".

    Example:
        >>> size_name("models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf")
        '0.5B'
    """
    size = re.search(r"\d+(\.\d+)?[bm](?![a-z])", Path(model).name.lower())
    return size.group().upper() if size else "draft model"


def main(
    target: Annotated[str, typer.Option(help="Model whose distribution is followed.")] = str(pair.target_folder()),
    draft: Annotated[str, typer.Option(help="Draft model of the same vocabulary.")] = str(pair.draft_folder()),
    code: Annotated[Path | None, typer.Option(help="JSONL file of code prompts, as HumanEval's.")] = None,
    chat: Annotated[Path | None, typer.Option(help="JSONL file of questions, as Spec-Bench's.")] = None,
    num_answers: Annotated[int, typer.Option("--answers", min=2, help="Answers of each kind of text.")] = 30,
    temperature: Annotated[list[float] | None, typer.Option(help="May be repeated.")] = None,
    out: Out = Path("build/several_drafts"),
    page: Annotated[Path, typer.Option(help="Markdown page that is written.")] = PAGE,
    plot: Annotated[Path, typer.Option(help="Picture that is written.")] = PLOT,
    only_costs: Annotated[
        bool, typer.Option("--costs", help="Only the seconds of forward passes, measured anew, and the page.")
    ] = False,
    only_report: Annotated[bool, typer.Option("--report", help="Only the page and the plot, from what is in --out.")] = False,
    quick: Quick = False,
) -> None:
    """Write the page, its tables and the plot; rows, values and seconds stay in `--out`."""
    if quick:
        num_answers, page, plot, temperature = 2, out / "several-drafts.md", out / "several-drafts.png", [0.7]
    rows, passes = out / "rows", out / "passes.json"
    rows.mkdir(parents=True, exist_ok=True)
    if not only_report:
        big, tokenizer, drafts = _models(target, draft, quick)
        if not only_costs:
            prompts: dict[str, Any] = packaged_prompts()
            prompts |= {"code": read_prompts(code, COMPLETE_FUNCTION)} if code else {}
            prompts |= {"chat": read_prompts(chat)} if chat else {}
            _write_rows(rows, big, tokenizer, drafts, prompts, num_answers, temperature or (0.7, 1.0))
        models = {TARGET: big, **drafts}
        if only_costs or not passes.exists() or set(models) - set(json.loads(passes.read_text(encoding="utf-8"))):
            write_json(measured_passes(models, 2 if quick else 9), passes)
    values, seconds = read_values(rows), json.loads(passes.read_text(encoding="utf-8"))
    page.parent.mkdir(parents=True, exist_ok=True)
    kinds = (("speed", speed_rows), ("tokens", token_rows), ("seconds", second_rows))
    tables = {page.with_name(f"{page.stem}-{name}.csv"): rows_of for name, rows_of in kinds}
    page.write_text(markdown(values, seconds, Path(target).name, [table.name for table in tables]), encoding="utf-8")
    for table, rows_of in tables.items():
        with table.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows_of(values, seconds))
    picture(values, seconds, plot)
    typer.echo(f"wrote {page}, {', '.join(table.name for table in tables)} and {plot}", err=True)


def _write_rows(
    rows: Path,
    target: Any,
    tokenizer: Any,
    drafts: Mapping[str, Any],
    prompts: dict[str, Any],
    num_answers: int,
    temperatures: Sequence[float],
) -> None:
    """The contexts that are there with the draft models that they lack, then further ones."""
    engine = Engine.of(target, tokenizer=tokenizer, draft_model=next(iter(drafts.values())), draft_tokenizer=tokenizer)
    stores = RowStore(target, target.vocab_size), {name: RowStore(model, target.vocab_size) for name, model in drafts.items()}
    begin = perf_counter()

    def add(context: Context, file: Path) -> None:
        measure(context, *stores, temperatures, context.answer, file)
        typer.echo(f"{file.name} of {2 * num_answers} answers, {perf_counter() - begin:.0f} s", err=True)

    for file in sorted(rows.glob("*.npz")):
        if missing_drafts(drafts, np.load(file).files):
            add(stored_context(file), file)
    for contexts in answers(engine, tokenizer, prompts, num_answers, lambda answer: _file(rows, answer, CONTEXTS - 1).exists()):
        for number, context in enumerate(contexts):
            add(context, _file(rows, context.answer, number))


def _file(rows: Path, answer: int, number: int) -> Path:
    return rows / f"{answer:03}-{number}.npz"


if __name__ == "__main__":
    typer.run(main)
