"""`python -m studies.draft_vocabulary`: what a draft model loses and gains by a part of its vocabulary, and by four bits a weight.

The target writes answers; at each of their positions its distribution p and the draft model's q are computed, q over each part of the vocabulary.

    coverage        share of the answers' tokens that the part holds when they are due: first tokens, special ones, and those of the text so far
    acceptance      sum min(p, q) at temperature 1; at 0 whether both have the same most probable token
    tokens a step   of a chain of DEPTH: 1 + a1 + a1 a2 + ..., the a of consecutive positions
    draft step      median of a proposal's CPU seconds for each of its tokens; parts, and passes of the target, take turns
    all drafted     share of positions behind which a text drafts the whole vocabulary, see `polydraft.models.compiled.draft_vocabulary`
    speed           tokens a step / (target pass + DEPTH draft steps), over that of the whole vocabulary in the file's own bits

Answers in other languages are the worst case: byte-level BPE gives their tokens late ids.
"""

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import process_time
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer

from polydraft.bench.record import csv_table, markdown_table, processor, write_texts
from polydraft.core import SamplingParams, TokenTree
from polydraft.core import geometry as trees
from polydraft.engine.api import Engine
from polydraft.models.compiled.draft_vocabulary import MOST_NEW, RECENT
from polydraft.models.compiled.llama import CompiledLlama
from polydraft.models.load import load_model, load_tokenizer
from studies.options import Quick

__all__ = ["main"]

PARTS = (8_192, 16_384, 32_768, 65_536)
WHOLE = "all"
DEPTH = 3
"""Nearly the best chain of the Qwen pair, whose draft step is .2 of a pass."""
CONTEXT = 1024
CODE = "Complete this function. Answer with code only.\n\n"
OTHER_LANGUAGES = (
    "请用三句话解释为什么天空是蓝色的。",
    "用中文写一封简短的邮件，请同事明天把报告发给我。",
    "Объясни простыми словами, что такое рекурсия.",
    "日本の四季について短く説明してください。",
    "اشرح باختصار ما هي قاعدة البيانات.",
    "피보나치 수열이 무엇인지 간단히 설명해 주세요.",
)


DEFAULT = ("32768", "int4")
"""First tokens and weights of a draft model that is not told otherwise."""


class Row(NamedTuple):
    """One part of the vocabulary and one format on one kind of text; columns are those of the module's table."""

    text: str
    temperature: float
    first_tokens: str
    weights: str
    read_mb: float
    draft_step_ms: float
    over_target_pass: float
    coverage: float
    all_drafted: float
    acceptance: float
    tokens_a_step: float
    speed: float


class Answer(NamedTuple):
    """Tokens of a prompt and of the target's answer to it."""

    prompt: list[int]
    tokens: list[int]


def prompts(code: Path, chat: Path, count: int) -> dict[str, list[str]]:
    """By kind, so many of them, evenly over the files."""
    with gzip.open(code, "rt", encoding="utf-8") as lines:
        functions = [CODE + json.loads(line)["prompt"] for line in lines]
    questions = [json.loads(line)["turns"][0] for line in chat.read_text(encoding="utf-8").splitlines()]
    questions = [text for text in questions if len(text) < 1500]
    return {
        "code": functions[:: len(functions) // count][:count],
        "chat": questions[:: len(questions) // count][:count],
        "other languages": list(OTHER_LANGUAGES[:count]),
    }


def answers(engine: Engine, texts: Mapping[str, Sequence[str]], temperature: float, max_tokens: int) -> dict[str, list[Answer]]:
    """The target's answers by kind."""
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=1)
    encoded = {kind: [engine.encode_chat([{"role": "user", "content": text}]) for text in few] for kind, few in texts.items()}
    return {
        kind: [Answer(prompt, engine.generate([prompt], params)[0].token_ids) for prompt in few] for kind, few in encoded.items()
    }


def logits_of(model: CompiledLlama, answer: Answer) -> torch.Tensor:
    """Before each token of an answer, [T, V]."""
    model.release([0])
    if len(answer.prompt) > 1:
        model.prefill([0], [answer.prompt[:-1]])
    chain = TokenTree.chain(torch.tensor([[answer.prompt[-1], *answer.tokens[:-1]]]))
    return model.score([0], chain).logits[0]


def drafted_at(answer: Answer, first: int, special: Sequence[int], vocab_size: int) -> Iterator[torch.Tensor]:
    """Before each token of an answer, which tokens are drafted, [V]."""
    text, all_tokens, drafted = (
        [*answer.prompt, *answer.tokens],
        torch.ones(vocab_size, dtype=torch.bool),
        torch.arange(vocab_size) < first,
    )
    drafted[list(special)] = True
    new = list[bool]()
    for place, token in enumerate(text):
        if place >= len(answer.prompt):
            yield all_tokens if sum(new[-RECENT:]) > MOST_NEW else drafted
        new.append(not drafted[token])
        drafted[token] = True


def acceptance(p: torch.Tensor, q: torch.Tensor, greedy: bool) -> float:
    """Of one position, from logits."""
    if greedy:
        return float(p.argmax() == q.argmax())
    return float(torch.minimum(p.softmax(-1), q.softmax(-1)).sum())


def tokens_a_step(accepted: Sequence[float]) -> float:
    """The mean over all positions of a text that a chain of DEPTH can begin at."""
    chances = np.lib.stride_tricks.sliding_window_view(np.array(accepted), DEPTH) if len(accepted) >= DEPTH else np.ones((0, 1))
    return float(1 + chances.cumprod(1).sum(1).mean()) if len(chances) else float("nan")


class Tally:
    """Coverage, drafts of all tokens, acceptance and tokens a step of one part, over positions and answers."""

    def __init__(self) -> None:
        self.covered, self.of_all = list[bool](), list[bool]()
        self.accepted, self.steps = list[float](), list[float]()

    def add(self, covered: list[bool], of_all: list[bool], accepted: list[float]) -> None:
        """Of an answer."""
        self.covered += covered
        self.of_all += of_all
        self.accepted += accepted
        self.steps += [tokens_a_step(accepted)] * len(accepted)

    @property
    def means(self) -> tuple[float, float, float, float]:
        """Coverage, share of positions that draft all tokens, acceptance, tokens a step."""
        each = np.mean(self.covered), np.mean(self.of_all), np.mean(self.accepted), np.nanmean(self.steps)
        covered, of_all, accepted, steps = map(float, each)
        return covered, of_all, accepted, steps


def tallies(
    target: CompiledLlama, drafts: Mapping[str, CompiledLlama], few: Sequence[Answer], special: Sequence[int], greedy: bool
) -> dict[tuple[str, int | str], Tally]:
    """By format of the draft model and part."""
    found = {(name, part): Tally() for name in drafts for part in (*PARTS, WHOLE)}
    for answer in few:
        ours = logits_of(target, answer)
        for name, draft in drafts.items():
            theirs = logits_of(draft, answer)
            size = min(ours.shape[1], theirs.shape[1])
            p, q = ours[:, :size], theirs[:, :size]
            for part in (*PARTS, WHOLE):
                covered, of_all, accepted = list[bool](), list[bool](), list[float]()
                for t, drafted in enumerate(drafted_at(answer, size if part == WHOLE else int(part), special, size)):
                    covered.append(bool(drafted[answer.tokens[t]]))
                    of_all.append(bool(drafted.all()))
                    accepted.append(acceptance(p[t], q[t].masked_fill(~drafted, -torch.inf), greedy))
                found[name, part].add(covered, of_all, accepted)
    return found


def seconds(
    target: CompiledLlama, models: Mapping[tuple[str, int | str], CompiledLlama], answer: Answer, repetitions: int
) -> dict[Any, float]:
    """Medians by turns: of a draft step by model, and of a target pass over a chain of DEPTH, "pass"."""
    taken: dict[Any, list[float]] = {key: [] for key in ("pass", *models)}
    text = (answer.prompt + answer.tokens)[:300]
    params, tree = [SamplingParams(temperature=1.0, seed=1)], trees.chain(DEPTH)
    for model in (target, *models.values()):
        model.release([0])
        model.prefill([0], [text[:-1]])
    for repetition in range(repetitions + 2):
        for key, model in models.items():
            model.cut(0, len(text) - 1)
            start = process_time()
            model.propose_paths([0], [text[-1:]], ([repetition], [0], [len(text)]), [tree], params)
            taken[key].append((process_time() - start) / DEPTH)
        start = process_time()
        target.score([0], TokenTree.chain(torch.tensor([text[-DEPTH - 1 :]])))
        taken["pass"].append(process_time() - start)
    return {key: float(np.median(times[2:])) for key, times in taken.items()}


def main(
    model: Annotated[str, typer.Option(help="Target.")] = "qwen2.5-coder-1.5b-instruct",
    draft_model: Annotated[str, typer.Option(help="Draft model of the same vocabulary.")] = "qwen2.5-coder-0.5b-instruct",
    code: Annotated[Path, typer.Option(help="HumanEval.jsonl.gz.")] = Path("HumanEval.jsonl.gz"),
    chat: Annotated[Path, typer.Option(help="Questions of Spec-Bench.")] = Path("spec_bench.jsonl"),
    out: Annotated[Path, typer.Option(help="Page that is written.")] = Path("docs/results/draft-vocabulary.md"),
    count: Annotated[int, typer.Option(help="Prompts of a kind.")] = 10,
    max_tokens: int = 96,
    repetitions: int = 15,
    quick: Quick = False,
) -> None:
    """Parts of the vocabulary and formats of the draft model's weights."""
    if quick:
        count, max_tokens, repetitions = 1, 8, 2
    options: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": CONTEXT, "threads": 1}
    target: Any = load_model(model, **options)
    tokenizer = load_tokenizer(model)
    special = sorted(tokenizer.all_special_ids)
    formats = {"file": None, "int4": "int4"}
    models: dict[tuple[str, int | str], Any] = {}
    for name, quantization in formats.items():
        for part in (WHOLE, *PARTS) if name == "file" else (WHOLE, 32_768):
            models[name, part] = load_model(draft_model, quantization=quantization, **options)
            models[name, part].vocab_size = target.vocab_size = min(target.vocab_size, models[name, part].vocab_size)
            if part != WHOLE:
                models[name, part].draft_over(int(part), special)
    drafts: dict[str, Any] = {name: models[name, WHOLE] for name in formats}
    engine = Engine.of(target, draft_model=models["file", 32_768], tokenizer=tokenizer, drafter="model:chain", depth=DEPTH)
    rows, texts = list[Row](), prompts(code, chat, count)
    for temperature in (0.0, 1.0):
        by_kind = answers(engine, texts, temperature, max_tokens)
        spent = seconds(target, models, by_kind["code"][0], repetitions)
        for kind, few in by_kind.items():
            tallied = tallies(target, drafts, few, special, temperature == 0)
            rows += measured_rows(kind, temperature, models, tallied, spent)
            typer.echo(csv_of(rows[-len(models) :]))
    target_name, draft_name = (Path(name).stem for name in (model, draft_model))
    head = HEAD.format(
        target=target_name, draft=draft_name, count=count, max_tokens=max_tokens, processor=processor(), depth=DEPTH
    )
    beside = out.with_suffix(".csv")
    texts_by_file = {out: markdown(rows, head, beside.name), beside: csv_of(rows)}
    if not quick:
        write_texts(texts_by_file)


def measured_rows(
    kind: str,
    temperature: float,
    models: Mapping[tuple[str, int | str], CompiledLlama],
    tallied: Mapping[tuple[str, int | str], Tally],
    spent: Mapping[Any, float],
) -> list[Row]:
    """One for each part of the vocabulary and format of the draft model's weights."""

    def seconds_a_token(name: str, part: int | str) -> float:
        _, of_all, _, steps = tallied[name, part].means
        draft = of_all * spent[name, WHOLE] + (1 - of_all) * spent[name, part]
        return (spent["pass"] + DEPTH * draft) / steps

    whole = seconds_a_token("file", WHOLE)
    return [
        Row(
            kind,
            temperature,
            str(part),
            name,
            models[name, part].weight_bytes / 1e6,
            1e3 * spent[name, part],
            spent[name, part] / spent["pass"],
            *tallied[name, part].means,
            whole / seconds_a_token(name, part),
        )
        for name, part in models
    ]


def csv_of(rows: Sequence[Row]) -> str:
    """Every row."""
    return csv_table(Row._fields, ([f"{x:.4g}" if isinstance(x, float) else x for x in row] for row in rows))


def markdown(rows: Sequence[Row], head: str, csv_name: str) -> str:
    """What a draft step costs by part and format, and what the defaults gain on every kind of text."""
    first = [row for row in rows if (row.text, row.temperature) == (rows[0].text, rows[0].temperature)]
    steps = [
        [r.first_tokens, r.weights, f"{r.read_mb:.0f}", f"{r.draft_step_ms:.1f}", f"{r.over_target_pass:.3f}"] for r in first
    ]
    by_text = {(r.text, r.temperature, r.first_tokens, r.weights): r for r in rows}
    gains = list[list[str]]()
    for row in (row for row in rows if (row.first_tokens, row.weights) == DEFAULT):
        whole = by_text[row.text, row.temperature, WHOLE, "file"]
        gains.append(
            [
                row.text,
                f"{row.temperature:g}",
                f"{row.coverage:.3f}",
                f"{row.all_drafted:.2f}",
                f"{whole.tokens_a_step:.2f}",
                f"{row.tokens_a_step:.2f}",
                f"{row.speed:.2f}",
            ]
        )
    parts = [
        "# Draft models over a part of their vocabulary, and in four bits",
        head,
        markdown_table(["first tokens", "weights", "read a step, MB", "draft step, ms", "over a target forward pass"], steps),
        f"The last row is the default. Its coverage and speed on every kind of text; [all parts]({csv_name}):",
        markdown_table(
            ["text", "T", "coverage", "all drafted", "tokens a step, whole vocabulary", "tokens a step, default", "speed"], gains
        ),
    ]
    return "\n\n".join(parts) + "\n"


HEAD = """Target {target}, draft model {draft}, the official Q4_K_M files, one thread; {processor}, other programs running beside. {count} prompts of a kind, {max_tokens} tokens each.
`python -m studies.draft_vocabulary`, which says what each column is. Speed is computed for a chain of {depth}: tokens a step over the seconds of a target forward pass and the
draft steps, over that of the whole vocabulary in the file's own bits. Chosen as defaults: 32,768 first tokens, and four bits made from the blocks of a draft model's file."""


if __name__ == "__main__":
    typer.run(main)
