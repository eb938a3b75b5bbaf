"""`python -m studies.repeats --model FILE --draft-model FILE`: what repeats of the text add to the drafts of a model.

Two engines share the models: `auto`, and the same without copying repeats of the text. They answer every prompt in turn, the other one first each
time, on edits of the standard library's code, functions to complete and questions. At temperatures above 0 a request's seed is its number, so that
both answers are the same up to the first copied token. Speed counts tokens behind those of the first step, over the processor's or the wall's
seconds since then. Answers are kept in `--out`: a cut-off run goes on.
"""

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib import import_module
from pathlib import Path
from time import perf_counter, process_time
from typing import Annotated, Any

import numpy as np
import typer

from polydraft import SamplingParams
from polydraft.bench.record import command_line, csv_table, markdown_table, processor, write_texts
from polydraft.engine.api import Engine
from polydraft.models import pair
from polydraft.policy.adaptive import AdaptivePolicy
from polydraft.policy.costs import clock
from studies.options import Out, Quick
from studies.question_files import questions

MODES = WITH, WITHOUT = "auto", "auto without repeats"
MODULES = ("textwrap", "shlex", "argparse", "ast", "statistics", "calendar", "difflib", "cmd")
"""Of the standard library, whose code is edited."""
EDITED_LINES = 40
REQUESTS = (
    "Rename the first parameter of the first function and leave everything else as it is.",
    "Add a comment above the last function and leave everything else as it is.",
    "Write the names of local variables of the last function in upper case and leave everything else as it is.",
)
LONGEST_PROMPT = 900
"""Tokens."""
RESAMPLES = 4000


@dataclass(frozen=True)
class Answer:
    """One answer of one mode. tokens: behind those of the first step.  copied: of them, from the text.  cpu, wall: seconds since the first step."""

    mode: str
    text: str
    temperature: float
    number: int
    tokens: int
    copied: int
    steps: int
    cpu: float
    wall: float


def edits(count: int) -> Iterator[str]:
    """Requests to change little of some code, and to write all of it."""
    for number in range(count):
        lines = inspect.getsource(import_module(MODULES[number % len(MODULES)])).splitlines()
        begin = 60 + EDITED_LINES * (number // len(MODULES))
        code = "\n".join(lines[begin : begin + EDITED_LINES])
        yield f"{REQUESTS[number % len(REQUESTS)]} Answer with all of the code.\n\n```python\n{code}\n```"


def texts(count: int, code: Path | None, chat: Path | None) -> dict[str, list[str]]:
    """Prompts by kind of text."""
    functions = (
        [q.text for q in questions([code], 1000)][:: 1 + 100 // count][:count]
        if code
        else [p.text for p in pair.prompts()][:count]
    )
    answers = {
        "edits": list(edits(count)),
        "functions": [f"Complete this function.\n\n```python\n{text}```" for text in functions],
    }
    return answers | {"chat": [q.text for q in questions([chat], count)][: 2 * count]} if chat else answers


def measured(
    engine: Engine, prompt: Sequence[int], params: SamplingParams
) -> tuple[int, int, int, float, float]:
    """Tokens, copied ones and steps behind the first step, and CPU and wall seconds since then."""
    times = list[tuple[float, float]]()
    sources = list[str]()
    counts = list[int]()
    for output in engine.stream(list(prompt), params):
        times.append((process_time(), perf_counter()))
        counts.append(len(output.token_ids))
        sources += [origin.source for origin in output.origins]
    cpu, wall = (last - first for first, last in zip(times[0], times[-1], strict=True))
    return sum(counts[1:]), sources[counts[0] :].count("ngram"), len(counts) - 1, cpu, wall


def engines(options: dict[str, Any]) -> dict[str, Engine]:
    """Both, on one pair of models; of the embedded pair without options."""
    whole = Engine.from_pretrained(**options) if options.get("model") else Engine.embedded(threads=1)
    bare = Engine.of(
        whole.target,
        tokenizer=whole.tokenizer,
        drafter=whole.drafter,
        verifier=whole.verifier,
        policy=AdaptivePolicy(),
        eos_token_ids=whole.eos_token_ids,
    )
    for engine in (whole, bare):
        engine._clock = engine._pricing = clock(whole.target)
    return {WITH: whole, WITHOUT: bare}


def ratio(answers: Sequence[Answer]) -> tuple[float, float, float]:
    """Speed with repeats over that without, all tokens to all processor seconds, and its 95% interval over prompts."""
    totals = [
        [(a.tokens, a.cpu) for a in sorted(answers, key=lambda a: a.number) if a.mode == mode]
        for mode in MODES
    ]
    table = np.array(totals)  # [modes, prompts, 2]

    def of(rows: np.ndarray) -> float:
        with_repeats, without = rows[..., 0].sum(1) / rows[..., 1].sum(1)
        return float(with_repeats / without)

    chosen = np.random.default_rng(0).integers(table.shape[1], size=(RESAMPLES, table.shape[1]))
    low, high = np.quantile([of(table[:, rows]) for rows in chosen], (0.025, 0.975))
    return of(table), float(low), float(high)


def markdown(answers: Sequence[Answer], models: str, csv_name: str = "repeats.csv") -> str:
    """The page."""
    lines = list[list[str]]()
    for text, T in sorted({(a.text, a.temperature) for a in answers}):
        part = _in_both([a for a in answers if (a.text, a.temperature) == (text, T)])
        if not part:
            continue
        by_mode = {mode: [a for a in part if a.mode == mode] for mode in MODES}
        steps = [
            sum(a.tokens for a in by_mode[mode]) / max(sum(a.steps for a in by_mode[mode]), 1)
            for mode in (WITHOUT, WITH)
        ]
        copied = sum(a.copied for a in by_mode[WITH]) / max(sum(a.tokens for a in by_mode[WITH]), 1)
        faster = "{:.2f} [{:.2f}, {:.2f}]".format(*ratio(part))
        lines.append(
            [
                text,
                f"{T:g}",
                str(len(part) // 2),
                f"{100 * copied:.0f}%",
                *(f"{s:.2f}" for s in steps),
                faster,
            ]
        )
    head = ["text", "T", "prompts", "copied", "tokens per step without", "with", "speed"]
    return (
        "# Repeats of the text beside a draft model\n\n"
        f"`{command_line('python -m studies.repeats')}`; {date.today()}; {processor()}, one thread. {models}. `auto` with long repeats of the text "
        "copied in place of the model's drafts, and without, prompt by prompt in turn. Speed: all tokens to all processor seconds, with over without; in "
        f"brackets 95% intervals, bootstrap over prompts. [Every answer]({csv_name}).\n\n{markdown_table(head, lines)}\n"
    )


def _in_both(answers: Sequence[Answer]) -> list[Answer]:
    """Of prompts that both modes have answered, with more than one step."""
    numbers = [{a.number for a in answers if a.mode == mode and a.tokens and a.cpu > 0} for mode in MODES]
    return [a for a in answers if a.number in set.intersection(*numbers)]


def main(
    model: Annotated[str | None, typer.Option(help="Target; the embedded pair by default.")] = None,
    draft_model: Annotated[str | None, typer.Option(help="Its draft model.")] = None,
    code: Annotated[Path | None, typer.Option(help="JSONL file of code prompts, as HumanEval's.")] = None,
    chat: Annotated[Path | None, typer.Option(help="JSONL file of questions, as Spec-Bench's.")] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="May be repeated.")] = None,
    count: Annotated[int, typer.Option(help="Prompts of a kind; of questions, of a category.")] = 8,
    text: Annotated[
        list[str] | None,
        typer.Option(help="Kinds of prompts: edits, functions, chat. May be repeated; all by default."),
    ] = None,
    max_tokens: int = 96,
    out: Out = Path("build/repeats"),
    page: Annotated[Path, typer.Option(help="Markdown page that is written.")] = Path(
        "docs/results/repeats.md"
    ),
    quick: Quick = False,
) -> None:
    """Write the page; answers stay in `--out`."""
    if quick:
        count = 2
        max_tokens = 24
        page = out / "repeats.md"
    stored = out / "repeats.jsonl"
    stored.parent.mkdir(parents=True, exist_ok=True)
    answers = (
        [Answer(**json.loads(line)) for line in stored.read_text("utf-8").splitlines()]
        if stored.exists()
        else []
    )
    done = {(a.mode, a.text, a.temperature, a.number) for a in answers}
    both = engines(
        {"model": model, "draft_model": draft_model, "threads": 1, "max_model_len": 2048, "max_num_seqs": 1}
    )
    tokenize = _tokenizer(both[WITH])
    warm = SamplingParams(max_tokens=16, ignore_eos=True)
    for engine in both.values():
        measured(engine, tokenize("def first(a, b):\n    return a\n"), warm)
    for kind, prompts in texts(count, code, chat).items():
        for number, ids in enumerate(map(tokenize, prompts if not text or kind in text else ())):
            for T in temperature or (0.0, 1.0):
                params = SamplingParams(
                    temperature=T, max_tokens=max_tokens, ignore_eos=True, seed=number if T else None
                )
                for mode in MODES[:: 1 if number % 2 else -1]:
                    if len(ids) > LONGEST_PROMPT or (mode, kind, T, number) in done:
                        continue
                    answers.append(Answer(mode, kind, T, number, *measured(both[mode], ids, params)))
                    with stored.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(asdict(answers[-1])) + "\n")
    page.parent.mkdir(parents=True, exist_ok=True)
    names = (
        "Embedded pair"
        if model is None
        else f"{Path(model).name} with {Path(draft_model or 'its draft model').name}"
    )
    beside = page.with_suffix(".csv")
    table = csv_table(list(Answer.__dataclass_fields__), (asdict(answer).values() for answer in answers))
    write_texts({page: markdown(answers, names, beside.name), beside: table})
    typer.echo(f"wrote {page}", err=True)


def _tokenizer(engine: Engine) -> Callable[[str], list[int]]:
    """Text to the token ids of a prompt: a question to a chat model."""
    if getattr(engine.tokenizer, "chat_template", None):
        return lambda text: engine.encode_chat([{"role": "user", "content": text}])
    return engine.encode


if __name__ == "__main__":
    typer.run(main)
