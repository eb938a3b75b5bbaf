"""`python -m studies.never_slower`: the default beside plain decoding on prompts that drafts are bad at, and on everyday ones.

Two engines, each with its own copy of the model, continue a prompt together: the one that is behind takes the next step, so that both meet the same
machine. A prompt comes several times. The steps of an answer in which the prompt is read are not counted. Drafts are compiled and costs measured before.

kind         everyday questions, or one of the adversarial kinds below
first        plain seconds over those of the default, the first time that the prompt comes: 1 is as fast as plain decoding
later        the same, the median of the other times
least        the slowest prompt, of both
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import geometric_mean, median
from time import perf_counter, thread_time
from typing import Annotated, Any

import typer

from polydraft import SamplingParams
from polydraft.bench.record import markdown_table, provenance
from polydraft.engine.api import Engine
from polydraft.engine.sequence import Result
from polydraft.engine.stats import RequestStats
from studies.options import Quick, append_rows
from studies.policy.prompts import questions

NUM_RANDOM = 64
"""Tokens of a prompt of random tokens."""
COUNTED = "".join(f"item {number}: the same line again and again\n" for number in range(1, 13))
COLLAPSING = (
    f"Continue this list to item 15, then write a story about a lighthouse in unusual words.\n{COUNTED}"
)
FOREIGN = (
    "Erzähle in drei Absätzen, wie ein Uhrmacher in Königsberg seine verlorene Werkstatt wiederfindet.",
    "Raconte en trois paragraphes la journée d'un gardien de phare pendant une tempête.",
)
BAR = 0.98
"""What the default has to make of plain decoding."""
HOT = 1.5
"""Temperature at which texts of small models fall apart."""


@dataclass(frozen=True)
class Case:
    """A prompt. kind: why it is here.  temperature: None for that of the run."""

    kind: str
    prompt: list[int]
    temperature: float | None = None


@dataclass(frozen=True)
class Row:
    """One turn of one prompt. plain, default: seconds behind the first token of the answer.  plain_first, default_first: until it.

    tokens, steps, drafted: of the default's answer.
    """

    model: str
    temperature: float
    kind: str
    prompt: int
    turn: int
    plain: float
    default: float
    plain_first: float
    default_first: float
    tokens: int
    steps: int
    drafted: int


def cases(
    engine: Engine, files: Sequence[Path], count: int, *, chat: bool, adversarial: bool = True
) -> Iterator[Case]:
    """Everyday prompts, by category where there are no others, and adversarial ones of each kind."""

    def encoded(text: str) -> list[int]:
        return engine.encode_chat([{"role": "user", "content": text}]) if chat else engine.encode(text)

    found = questions(files, count, engine, chat)
    everyday = [prompt for _, prompt in found]
    for category, prompt in found:
        yield Case("everyday" if adversarial else category, prompt)
    if not adversarial:
        return
    yield Case("collapses half way", encoded(COLLAPSING))
    for text in FOREIGN:
        yield Case("another language", encoded(text))
    chance = Random(0)
    for _ in FOREIGN:
        tokens = [chance.randrange(engine.target.vocab_size) for _ in range(NUM_RANDOM)]
        yield Case("random tokens", tokens)
    for prompt in everyday[:2]:
        yield Case(f"temperature {HOT:g}", prompt, HOT)


@dataclass
class Answer:
    """Of one engine. first, later: seconds until its first token and behind it, by the study's clock.  wall: those behind it by the wall's.
    later_tokens: those that came behind the first step that gave any."""

    result: Result
    first: float = 0.0
    later: float = 0.0
    wall: float = 0.0
    later_tokens: int = 0

    @property
    def stats(self) -> RequestStats:
        return self.result.stats

    def step(self, engine: Engine, clock: Callable[[], float]) -> None:
        """One step of its engine, timed."""
        before = len(self.result.token_ids)
        begin_wall = perf_counter()
        begin = clock()
        engine.step()
        seconds = clock() - begin
        if before:
            self.later += seconds
            self.wall += perf_counter() - begin_wall
            self.later_tokens += len(self.result.token_ids) - before
        else:
            self.first += seconds


def answered(
    engines: Mapping[str, Engine],
    prompt: Sequence[int],
    params: SamplingParams,
    clock: Callable[[], float],
) -> dict[str, Answer]:
    """The answers of all engines to one prompt, side by side: the one that is behind takes the next step."""
    answers = {name: Answer(engine.submit(prompt, params)) for name, engine in engines.items()}
    unfinished = list(engines)
    while unfinished:
        behind = min(unfinished, key=lambda name: len(answers[name].result.token_ids))
        answers[behind].step(engines[behind], clock)
        unfinished = [name for name in unfinished if answers[name].result.finish_reason is None]
    return answers


def measured(
    engines: dict[str, Engine],
    found: Sequence[Case],
    *,
    temperature: float,
    max_tokens: int,
    turns: int,
    model: str,
    clock: Callable[[], float],
) -> Iterator[Row]:
    """A row for each turn of each prompt; who begins changes from turn to turn."""
    for turn in range(turns):
        for number, case in enumerate(found):
            chosen = temperature if case.temperature is None else case.temperature
            params = SamplingParams(temperature=chosen, max_tokens=max_tokens, ignore_eos=True)
            order = list(engines.items())[:: 1 if turn % 2 else -1]
            answers = answered(dict(order), case.prompt, params, clock)
            plain = answers["plain"]
            default = answers["default"]
            yield Row(
                model,
                chosen,
                case.kind,
                number,
                turn,
                plain=plain.later,
                default=default.later,
                plain_first=plain.first,
                default_first=default.first,
                tokens=default.stats.generated_tokens,
                steps=default.stats.steps,
                drafted=default.stats.drafted_tokens,
            )


def ratios(rows: Sequence[Row]) -> tuple[float, float]:
    """Of one prompt: plain seconds over those of the default, the first time and the median of the later ones."""
    found = [row.plain / row.default for row in sorted(rows, key=lambda row: row.turn)]
    return found[0], median(found[1:] or found)


def table(rows: Sequence[Row]) -> str:
    """A line for each kind.

    Example:
        >>> rows = [Row("a", 1.0, "everyday", 0, turn, 2.0, 1.0, 1.0, 1.0, tokens=8, steps=4, drafted=6) for turn in range(3)]
        >>> print(table(rows).splitlines()[-1])
        | a | 1 | everyday | 1 | 2.00 | 2.00 | 2.00 | 2.00 | 0 | 2.00 |
    """
    lines = list[list[object]]()
    for key in dict.fromkeys((row.model, row.temperature, row.kind) for row in rows):
        some = [row for row in rows if (row.model, row.temperature, row.kind) == key]
        prompts = sorted({row.prompt for row in some})
        pairs = [ratios([row for row in some if row.prompt == prompt]) for prompt in prompts]
        first, later = zip(*pairs, strict=True)
        model, temperature, kind = key
        means = [f"{mean(each):.2f}" for mean in (geometric_mean, min) for each in (first, later)]
        below = sum(ratio < BAR for ratio in later)
        tokens = sum(row.tokens for row in some) / sum(row.steps for row in some)
        lines.append([model, f"{temperature:g}", kind, len(prompts), *means, below, f"{tokens:.2f}"])
    head = ["model", "temperature", "kind", "prompts", "first", "later", "least of first", "least of later"]
    return markdown_table([*head, "later below .98", "tokens a step"], lines)


def main(
    model: Annotated[str | None, typer.Option(help="Default: the embedded pair.")] = None,
    prompts: Annotated[
        list[Path] | None, typer.Option(help=".jsonl of questions, which may be gzipped; may be repeated.")
    ] = None,
    temperature: Annotated[float, typer.Option()] = 1.0,
    count: Annotated[int, typer.Option(help="Everyday prompts.")] = 8,
    turns: Annotated[int, typer.Option(help="Answers to each prompt, by each.")] = 4,
    max_tokens: Annotated[int, typer.Option()] = 96,
    threads: Annotated[int, typer.Option()] = 1,
    processor: Annotated[
        bool,
        typer.Option(help="The thread's own seconds in place of the wall's, on a busy machine; one thread."),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="CSV file of all turns.")] = None,
    drafter: Annotated[str, typer.Option(help="In the place of the default.")] = "auto",
    adversarial: Annotated[
        bool,
        typer.Option(help="Adversarial prompts, too; without them questions by category, as of Spec-Bench."),
    ] = True,
    quick: Quick = False,
) -> None:
    """The default and plain decoding by turns."""
    if quick:
        count = 1
        turns = 1
        max_tokens = 8
    sizes: dict[str, Any] = {"max_num_seqs": 1, "threads": threads}
    build = partial(Engine.from_pretrained, model) if model else Engine.embedded
    engines = {"plain": build(drafter=None, **sizes), "default": build(drafter=drafter, **sizes)}
    default = engines["default"]
    clock = thread_time if processor else perf_counter
    found = list(cases(default, prompts or (), count, chat=model is not None, adversarial=adversarial))
    for engine in engines.values():  # compiles
        engine.generate([found[0].prompt], SamplingParams(temperature=temperature, max_tokens=16))
    default.measure()
    rows = list(
        measured(
            engines,
            found,
            temperature=temperature,
            max_tokens=max_tokens,
            turns=turns,
            model=" + ".join(
                [Path(model).name if model else "embedded", *([drafter] if drafter != "auto" else [])]
            ),
            clock=clock,
        )
    )
    if out is not None:
        out.unlink(missing_ok=True)
        append_rows(rows, out)
    print(table(rows))
    print(provenance()["hardware"])


if __name__ == "__main__":
    typer.run(main)
