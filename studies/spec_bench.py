"""`python -m studies.spec_bench --prompts question.jsonl`: the default and single drafters beside plain decoding, by kind of question.

The file is Spec-Bench's (arXiv 2401.07851): 480 questions, of which the first turns are asked. All engines, each with its own copy of the model, answer
a question side by side: the one that is behind takes the next step, so that all meet the same machine. An answer ends where the model ends it, or behind
some tokens. Seconds are the thread's own, as the machine may be busy, and begin behind the first token, so that prompts are not counted. Single drafters
answer only the first questions of each kind. A cut-off run goes on where its file ends, and several models share one.

over plain   plain seconds a token over those of the way, of all answers together
wall         the same by the wall's clock; by kind in a CSV file of its own
least        the same of the slowest question
tokens       per forward pass of the target behind the prompt
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import thread_time
from typing import Annotated, Any, NamedTuple

import typer

from polydraft import SamplingParams
from polydraft.bench.record import markdown_table, provenance
from polydraft.engine.api import Engine
from studies import question_files
from studies.never_slower import BAR, answered
from studies.options import Out, Quick, append_rows, read_rows

PLAIN = "plain"
DEFAULT = "default"
DRAFTERS = ("eagle", "ngram", "suffix", "state-lookup", "lookahead")
"""Those that need nothing beside a model and its head."""
TEMPERATURES = (0.0, 1.0)
MULTI_TURN = "multi-turn"
TURNS = frozenset(("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"))
"""Kinds of MT-bench, which Spec-Bench counts as one task."""
ALL = "all"


@dataclass(frozen=True)
class Row:
    """One answer. question: its number in the file.  way: plain, default, or a drafter.  prompt_tokens: that were read for it.

    first: seconds until the first token.  seconds, wall, later_tokens: behind it, wall by the wall's clock.
    tokens, steps, drafted, accepted: of the whole answer.
    """

    model: str
    temperature: float
    kind: str
    question: int
    way: str
    prompt_tokens: int
    first: float
    seconds: float
    wall: float
    later_tokens: int
    tokens: int
    steps: int
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Asked:
    """A question. in_part: whether single drafters answer it, too."""

    number: int
    kind: str
    text: str
    in_part: bool


def asked(file: Path, count: int, part: int) -> list[Asked]:
    """The first questions of each kind, kinds by turns, so that a cut-off run has some of all."""
    found = list[Asked]()
    seen = dict[str, int]()
    for number, question in enumerate(question_files.questions([file], count)):
        kind = question.category
        seen[kind] = seen.get(kind, 0) + 1
        found.append(Asked(number, kind, question.text, seen[kind] <= part))
    return found


def measured(
    engines: Mapping[str, Engine], question: Asked, temperature: float, max_tokens: int, model: str = ""
) -> Iterator[Row]:
    """A row for each engine; who begins changes from question to question.

    Raises:
        AssertionError: a greedy answer that drafts changed.
    """
    prompt = engines[PLAIN].encode_chat([{"role": "user", "content": question.text}])
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    names = list(engines)[:: 1 if question.number % 2 else -1]
    answers = answered({name: engines[name] for name in names}, prompt, params, thread_time)
    plain = answers[PLAIN].result.token_ids
    for way, answer in answers.items():
        assert temperature or answer.result.token_ids == plain, f"{way} changed answer {question.number}"
        stats = answer.stats
        yield Row(
            model,
            temperature,
            question.kind,
            question.number,
            way,
            prompt_tokens=stats.prompt_tokens - stats.cached_tokens,
            first=round(answer.first, 5),
            seconds=round(answer.later, 5),
            wall=round(answer.wall, 5),
            later_tokens=answer.later_tokens,
            tokens=stats.generated_tokens,
            steps=stats.steps,
            drafted=stats.drafted_tokens,
            accepted=stats.accepted_tokens,
        )


def _speed(plain: Sequence[Row], way: Sequence[Row], clock: str = "seconds") -> float:
    """Plain seconds a token over those of the way. clock: the column of seconds."""
    plain_seconds, seconds = (sum(getattr(row, clock) for row in rows) for rows in (plain, way))
    plain_tokens, tokens = (sum(row.later_tokens for row in rows) for rows in (plain, way))
    return plain_seconds / plain_tokens * tokens / seconds


def _is_of(row: Row, kind: str) -> bool:
    """kind: one of the file's, or a name of several."""
    return kind in (ALL, row.kind) or (kind == MULTI_TURN and row.kind in TURNS)


class Figures(NamedTuple):
    """Of a way on some questions. speed, wall: over plain decoding, by either clock.  single: the speed of each question.  tokens: a step."""

    speed: float
    wall: float
    single: list[float]
    tokens: float

    @classmethod
    def of(cls, rows: Sequence[Row], way: str, kind: str) -> "Figures":
        some = [row for row in rows if _is_of(row, kind) and row.later_tokens]
        plain = {row.question: row for row in some if row.way == PLAIN}
        own = [row for row in some if row.way == way and row.question in plain]
        beside = [plain[row.question] for row in own]
        single = [_speed([other], [row]) for other, row in zip(beside, own, strict=True)]
        tokens = sum(row.tokens for row in own) / sum(row.steps for row in own)
        return cls(_speed(beside, own), _speed(beside, own, "wall"), single, tokens)


def _tasks(rows: Sequence[Row]) -> Iterator[str]:
    """Spec-Bench's tasks of these rows, and all."""
    yield from dict.fromkeys(MULTI_TURN if row.kind in TURNS else row.kind for row in rows)
    yield ALL


def default_table(rows: Sequence[Row]) -> str:
    """A line for each task, the default's speed over plain decoding and tokens a step for each temperature.

    Example:
        >>> plain = Row("a", 0.0, "qa", 0, "plain", 5, 0.1, 2.0, 2.2, 7, 8, 8, 0, 0)
        >>> default = Row("a", 0.0, "qa", 0, "default", 5, 0.1, 1.0, 2.0, 7, 8, 4, 6, 4)
        >>> print(default_table([plain, default]).splitlines()[-1])
        | all | 1 | 2.00, 2.00 |
    """
    temperatures = sorted({row.temperature for row in rows})
    lines = list[list[object]]()
    for task in _tasks(rows):
        cells: list[object] = [task, len({row.question for row in rows if _is_of(row, task)})]
        for temperature in temperatures:
            found = Figures.of([row for row in rows if row.temperature == temperature], DEFAULT, task)
            cells.append(f"{found.speed:.2f}, {found.tokens:.2f}")
        lines.append(cells)
    return markdown_table(["default", "questions", *(f"T = {t:g}" for t in temperatures)], lines)


@dataclass(frozen=True)
class Kind:
    """Questions of a kind, answered by a way. speed, wall: over plain decoding, by either clock.  least: the slowest question's speed.

    below: questions whose speed is below the bar.  tokens: a step.
    """

    model: str
    temperature: float
    way: str
    kind: str
    questions: int
    speed: float
    wall: float
    least: float
    below: int
    tokens: float


def kinds(rows: Sequence[Row]) -> list[Kind]:
    """A line for each model, temperature, way and kind."""
    lines = list[Kind]()
    for model, temperature, way in dict.fromkeys((row.model, row.temperature, row.way) for row in rows):
        if way == PLAIN:
            continue
        some = [row for row in rows if (row.model, row.temperature) == (model, temperature)]
        for kind in (*dict.fromkeys(row.kind for row in some if row.way == way), ALL):
            found = Figures.of(some, way, kind)
            below = sum(ratio < BAR for ratio in found.single)
            figures = (round(each, 3) for each in (found.speed, found.wall, min(found.single)))
            about = model, temperature, way, kind, len(found.single)
            lines.append(Kind(*about, *figures, below, round(found.tokens, 3)))
    return lines


def drafters_table(rows: Sequence[Row], temperature: float) -> str:
    """A line for each task of Spec-Bench: each way's speed over plain decoding and its tokens a step, on the questions that all of them answered."""
    some = [row for row in rows if row.temperature == temperature]
    ways = [way for way in dict.fromkeys(row.way for row in some) if way not in (PLAIN, DEFAULT)]
    ways = [DEFAULT, *sorted(ways)]
    common = {row.question for row in some if row.way == ways[-1]}
    some = [row for row in some if row.question in common]
    lines = list[list[object]]()
    for kind in _tasks(some):
        numbers = {row.question for row in some if _is_of(row, kind)}
        figures = [Figures.of(some, way, kind) for way in ways]
        lines.append([kind, len(numbers), *(f"{each.speed:.2f}, {each.tokens:.2f}" for each in figures)])
    return markdown_table([f"T = {temperature:g}", "questions", *ways], lines)


def tables(rows: Sequence[Row]) -> str:
    """All tables, under the name of each model."""
    parts = list[str]()
    for model in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == model]
        parts += [f"### {model}", default_table(own)]
        parts += [drafters_table(own, each) for each in sorted({row.temperature for row in own})]
    return "\n\n".join(parts)


def engines_of(model: str, drafters: Sequence[str]) -> dict[str, Engine]:
    """Plain decoding, the default and the drafters, each compiled and with measured costs."""
    build = partial(Engine.from_pretrained, model, max_num_seqs=1, threads=1, prefix_cache_bytes=0)
    ways: dict[str, Any] = {PLAIN: None, DEFAULT: "auto"} | {name: name for name in drafters}
    engines = {way: build(drafter=drafter) for way, drafter in ways.items()}
    for way, engine in engines.items():
        for temperature in TEMPERATURES:
            params = SamplingParams(temperature=temperature, max_tokens=32, ignore_eos=True)
            engine.chat([{"role": "user", "content": question_files.QUESTIONS[0].text}], params)
        if way != PLAIN:
            engine.measure()
    return engines


def main(
    prompts: Annotated[Path, typer.Option(help="Spec-Bench's question.jsonl.")],
    model: Annotated[
        str, typer.Option(help="A name of `polydraft models`, a folder or a file.")
    ] = "smollm2-135m-instruct",
    drafter: Annotated[
        list[str] | None, typer.Option(help=f"Single drafters; default {', '.join(DRAFTERS)}.")
    ] = None,
    count: Annotated[int, typer.Option(help="Questions of each kind.")] = 80,
    part: Annotated[int, typer.Option(help="Those of each kind that single drafters answer, too.")] = 8,
    max_tokens: Annotated[int, typer.Option()] = 64,
    out: Out = Path("build/spec-bench"),
    quick: Quick = False,
) -> None:
    """Answers of all questions, then tables."""
    if quick:
        count = part = 1
        max_tokens = 8
    file = out / "spec-bench.csv"
    rows = read_rows(Row, file)
    name = Path(model).name
    done = {(row.temperature, row.question) for row in rows if row.model == name}
    engines = engines_of(model, DRAFTERS if drafter is None else drafter)
    both = {way: engines[way] for way in (PLAIN, DEFAULT)}
    for question in asked(prompts, count, part):
        for temperature in TEMPERATURES:
            if (temperature, question.number) in done:
                continue
            ways = engines if question.in_part else both
            found = list(measured(ways, question, temperature, max_tokens, name))
            append_rows(found, file)
            rows += found
    (out / "spec-bench-kinds.csv").unlink(missing_ok=True)
    append_rows(kinds(rows), out / "spec-bench-kinds.csv")
    page = tables(rows)
    (out / "spec-bench.md").write_text(page + "\n", encoding="utf-8")
    print(page, provenance()["hardware"], sep="\n")


if __name__ == "__main__":
    typer.run(main)
