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

from polydraft.bench.record import processor
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
    page, texts = list[str](), prompts(code, chat, count)
    for temperature in (0.0, 1.0):
        by_kind = answers(engine, texts, temperature, max_tokens)
        spent = seconds(target, models, by_kind["code"][0], repetitions)
        for kind, few in by_kind.items():
            found = tallies(target, drafts, few, special, temperature == 0)
            page += table(kind, temperature, models, found, spent)
            typer.echo("\n".join(page[-11:]))
    target_name, draft_name = (Path(name).stem for name in (model, draft_model))
    head = HEAD.format(
        target=target_name, draft=draft_name, count=count, max_tokens=max_tokens, processor=processor(), depth=DEPTH
    )
    if not quick:
        out.write_text(head + "\n".join(page) + "\n", encoding="utf-8")


HEAD = """# Draft models over a part of their vocabulary, and in four bits

Target {target}, draft model {draft}, the official Q4_K_M files, one thread; {processor}, other programs running beside. {count} prompts of a kind, {max_tokens} tokens each.
`python -m studies.draft_vocabulary`, which says what each column is. Speed is computed for a chain of {depth}: tokens a step over the seconds of a target pass and the draft steps.
Chosen as defaults: 32,768 first tokens, and four bits made from the blocks of a draft model's file.

"""


def table(
    kind: str,
    temperature: float,
    models: Mapping[tuple[str, int | str], CompiledLlama],
    found: Mapping[tuple[str, int | str], Tally],
    spent: Mapping[Any, float],
) -> list[str]:
    """Lines of Markdown."""
    lines = [
        f"## {kind.capitalize()}, T = {temperature:g}",
        "",
        "| first tokens | weights | read a step, MB | draft step, ms | over target pass | coverage | all drafted | acceptance | tokens a step | speed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]

    def speed(name: str, part: int | str) -> float:
        _, of_all, _, steps = found[name, part].means
        step = of_all * spent[name, WHOLE] + (1 - of_all) * spent[name, part]
        return steps / (spent["pass"] + DEPTH * step)

    for name, part in models:
        covered, of_all, accepted, steps = found[name, part].means
        step = spent[name, part]
        size = part if part == WHOLE else f"{part:,}"
        lines.append(
            f"| {size} | {name} | {models[name, part].weight_bytes / 1e6:.0f} | {1e3 * step:.1f} | {step / spent['pass']:.3f} | {covered:.4f} | {of_all:.2f} | "
            f"{accepted:.4f} | {steps:.3f} | {speed(name, part) / speed('file', WHOLE):.3f} |"
        )
    return [*lines, ""]


if __name__ == "__main__":
    typer.run(main)
