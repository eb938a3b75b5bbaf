"""`python -m studies.several_drafts --target FILE --draft FILE`: where does a second path of drafts pay?

Contexts are places in the target's own answers. At each, trees of every kind of drafts are drawn from the draft model and from weaker ones, which are
the same model without some of its layers, and scored by the target, each context's nodes in few forward passes; every verifier's expected tokens per step
follow without another one. Speed is tokens over the seconds of a step, from passes measured by rows. A cut-off run keeps its contexts: the same command
goes on with the next one.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from polydraft.engine.api import Engine
from polydraft.models import load, pair
from studies.options import Out, Quick
from studies.several_drafts.costs import TARGET, measured_passes
from studies.several_drafts.measure import measure, without_layers
from studies.several_drafts.picture import picture
from studies.several_drafts.report import markdown
from studies.several_drafts.rows import RowStore
from studies.several_drafts.texts import COMPLETE_FUNCTION, CONTEXTS, answers, packaged_prompts, read_prompts
from studies.several_drafts.verified import read_values

__all__ = ["main", "size_name"]

PAGE, PLOT = Path("docs/results/several-drafts.md"), Path("docs/pictures/several-drafts.png")
MAX_LENGTH = 512


def _models(target: str, draft: str) -> tuple[Any, Any, dict[str, Any]]:
    """Target, its tokenizer, and draft models by name, the full one first."""
    options: dict[str, Any] = {"max_model_len": MAX_LENGTH, "max_num_seqs": 2, "threads": 1}
    big: Any = load.load_model(target, **options)
    small: Any = load.load_model(draft, **options)
    tokenizer = load.load_tokenizer(target)
    shared = load.check_same_vocabulary(tokenizer, load.load_tokenizer(draft), big.vocab_size, small.vocab_size)
    big.vocab_size = small.vocab_size = shared
    layers = len(small.arrays.weights.attention_norm)
    drafts = {size_name(draft): small}
    for first, count in ((layers // 3, layers // 4), (layers // 4, layers // 2)):
        drafts[f"{layers - count} of {layers} layers"] = without_layers(draft, range(first, first + count), **options)
    return big, tokenizer, drafts


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
    quick: Quick = False,
) -> None:
    """Write the page and the plot; rows, values and seconds stay in `--out`."""
    if quick:
        num_answers, page, plot = 2, out / "several-drafts.md", out / "several-drafts.png"
    rows = out / "rows"
    rows.mkdir(parents=True, exist_ok=True)
    big, tokenizer, drafts = _models(target, draft)
    prompts: dict[str, Any] = packaged_prompts()
    prompts |= {"code": read_prompts(code, COMPLETE_FUNCTION)} if code else {}
    prompts |= {"chat": read_prompts(chat)} if chat else {}
    engine = Engine.of(big, tokenizer=tokenizer, draft_model=next(iter(drafts.values())), draft_tokenizer=tokenizer)
    stores = RowStore(big, big.vocab_size), {name: RowStore(model, big.vocab_size) for name, model in drafts.items()}
    begin = perf_counter()
    for contexts in answers(engine, tokenizer, prompts, num_answers, lambda answer: _file(rows, answer, CONTEXTS - 1).exists()):
        for number, context in enumerate(contexts):
            measure(context, *stores, temperature or (0.7, 1.0), context.answer, _file(rows, context.answer, number))
        typer.echo(f"answer {contexts[0].answer + 1} of {2 * num_answers}, {perf_counter() - begin:.0f} s", err=True)
    passes = _passes(out / "passes.json", {TARGET: big, **drafts}, 2 if quick else 9)
    values = read_values(rows)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(markdown(values, passes, Path(target).name), encoding="utf-8")
    picture(values, passes, plot)
    typer.echo(f"wrote {page} and {plot}", err=True)


def _file(rows: Path, answer: int, number: int) -> Path:
    return rows / f"{answer:03}-{number}.npz"


def _passes(file: Path, models: Mapping[str, Any], repetitions: int) -> dict[str, list[float]]:
    """Those of an earlier run, else measured now."""
    if not file.exists():
        file.write_text(json.dumps(measured_passes(models, repetitions)), encoding="utf-8")
    return json.loads(file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    typer.run(main)
