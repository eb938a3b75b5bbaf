"""`python -m studies.policy`: the adaptive policy beside plain decoding and every fixed shape, run in turn on the same prompts.

The pair is the embedded one, or `--model` with `--draft-model`, or with `--head` or the head that comes for it. `--prompts FILE` has a question a line, as JSON
with `category` and `turns` or `prompt`; without it the questions of `studies.questions` or the package's Python prompts are taken. A fixed shape is
chosen on one half of the prompts and met on the other, both ways round, so that none wins by chance.
"""

import csv
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import typer

from polydraft import SamplingParams
from polydraft.core import Budget
from polydraft.core.geometry import chain, paths
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.engine.api import Engine
from polydraft.methods.head_folders import kind_of
from polydraft.models import pair
from polydraft.numerics.clock import clock
from polydraft.policy.fixed import FixedPolicy

CHAINS = tuple((f"chain {d}", Budget.fixed(chain(d))) for d in (1, 2, 3, 4, 5, 6, 8))
PATHS = tuple((f"{k} paths of {d}", Budget.fixed(paths(k, d))) for k, d in ((2, 2), (2, 4), (3, 2), (3, 4)))
TREES = tuple((f"tree {n}, depth {d}", Budget.grown(n, d, w)) for n, d, w in ((4, 2, 2), (6, 4, 2), (10, 6, 3)))
OTHER_DRAWS = {"without_replacement": "traversal", "systematic": "flow"}
"""Further ways of drawing several paths, and their verifiers."""


@dataclass
class Setting:
    """An engine of one policy, and what it took: tokens, seconds and target passes of every prompt."""

    name: str
    engine: Engine
    tokens: list[int] = field(default_factory=list[int])
    seconds: list[float] = field(default_factory=list[float])
    passes: list[int] = field(default_factory=list[int])

    def run(self, batch: list[list[int]], params: SamplingParams) -> None:
        """One batch of prompts; seconds without the prefill."""
        found = [r.stats for r in self.engine.generate(batch, params)]
        self.tokens.append(sum(s.generated_tokens for s in found))
        self.seconds.append(sum(s.total_seconds - s.seconds["prefill"] for s in found))
        self.passes.append(max(s.steps for s in found))

    def speed(self, rounds: Any = slice(None)) -> float:
        """Tokens per second over some prompts."""
        return float(np.array(self.tokens)[rounds].sum() / np.array(self.seconds)[rounds].sum())


def settings(options: dict[str, Any], drafter: str, greedy: bool) -> list[Setting]:
    """Adaptive, plain, and fixed shapes, all on one pair of models."""
    first = (
        Engine.from_pretrained(drafter=drafter, **options)
        if options.get("model")
        else Engine.embedded(drafter=drafter, **options)
    )
    target, made = first.target, first.drafter

    def setting(name: str, source: Any, policy: Any, rule: Any = "match") -> Setting:
        rule = first.verifier if source is made or source is None else rule
        built = Engine.of(
            target, tokenizer=first.tokenizer, drafter=source, verifier=rule, policy=policy, eos_token_ids=first.eos_token_ids
        )
        built._clock = built._pricing = clock(target)
        return Setting(name, built)

    found = [setting("adaptive", made, None), setting("plain", None, FixedPolicy(Budget.fixed((-1,))))]
    shapes = CHAINS if greedy else CHAINS + PATHS
    found += [setting(name, made, FixedPolicy(budget)) for name, budget in shapes]
    if greedy and isinstance(made, ModelDrafter):
        ranked = made.sibling("top_k")
        found += [setting(name, ranked, FixedPolicy(budget)) for name, budget in TREES]
    for kind, rule in OTHER_DRAWS.items():
        if not greedy and isinstance(made, ModelDrafter):
            other, words = made.sibling(kind), kind.replace("_", " ")
            found += [setting(f"{name}, {words}", other, FixedPolicy(budget), rule) for name, budget in PATHS]
    return found


def questions(file: Path | None, engine: Engine, chat: bool) -> Iterator[tuple[str, list[int]]]:
    """Category and token ids of every prompt."""
    if file is None and not chat:
        yield from (("python", engine.encode(p.text)) for p in pair.prompts())
        return
    if file is None:
        from studies.questions import QUESTIONS

        lines = [{"category": "chat", "prompt": q} for q in QUESTIONS]
    else:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        text = line["turns"][0] if "turns" in line else line["prompt"]
        yield line.get("category", "-"), engine.encode_chat([{"role": "user", "content": text}]) if chat else engine.encode(text)


def main(
    model: Annotated[str | None, typer.Option()] = None,
    draft_model: Annotated[str | None, typer.Option()] = None,
    drafter: Annotated[str, typer.Option()] = "auto",
    head: Annotated[Path | None, typer.Option(help="Folder of a trained head.")] = None,
    quantization: Annotated[str | None, typer.Option()] = None,
    prompts: Annotated[Path | None, typer.Option()] = None,
    temperature: Annotated[float, typer.Option()] = 0.0,
    count: Annotated[int, typer.Option(help="Prompts.")] = 24,
    max_tokens: Annotated[int, typer.Option()] = 96,
    batch: Annotated[int, typer.Option()] = 1,
    every: Annotated[int, typer.Option(help="Of the file's prompts one in so many.")] = 1,
    table: Annotated[Path | None, typer.Option(help="Append rows in Markdown to FILE.")] = None,
    raw: Annotated[Path | None, typer.Option(help="Append tokens, seconds and steps of every prompt to a CSV file.")] = None,
) -> None:
    """Adaptive policy and fixed shapes in turn."""
    options: dict[str, Any] = {"max_num_seqs": batch, "threads": 1}
    if model:
        options |= {"model": model, "draft_model": draft_model, "quantization": quantization, "max_model_len": 1024}
        options |= {"draft_quantization": quantization} if draft_model else {}
    if head:
        drafter, options["drafter_options"] = kind_of(head), {"weights": str(head)}
    runs = settings(options, drafter, temperature == 0)
    texts = [t for t in list(questions(prompts, runs[0].engine, model is not None))[::every] if len(t[1]) < 600][: count * batch]
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)
    start = perf_counter()
    for number in range(len(texts) // batch):
        ids = [t for _, t in texts[number * batch : (number + 1) * batch]]
        turn = number % len(runs)
        for run in runs[turn:] + runs[:turn]:
            if number == 0:  # compiles, and fills caches
                run.run(ids, params)
                run.engine.measure()  # as a command does behind its first answer, and a server while it waits
                run.tokens, run.seconds, run.passes = [], [], []
            run.run(ids, params)
    if raw is not None:
        write_raw(runs, f"{model or 'embedded'} {drafter}", temperature, raw)
    report(runs, [c for c, _ in texts[::batch]], f"{model or 'embedded'} {drafter}, T={temperature:g}, batch {batch}", table)
    print(f"{perf_counter() - start:.0f} s")


def write_raw(runs: list[Setting], pair_name: str, temperature: float, file: Path) -> None:
    """One line a prompt and setting."""
    new = not file.exists()
    with file.open("a", encoding="utf-8", newline="") as out:
        rows = csv.writer(out, lineterminator="\n")
        if new:
            rows.writerow(("pair", "temperature", "setting", "prompt", "tokens", "seconds", "steps"))
        for run in runs:
            for prompt, (tokens, seconds, steps) in enumerate(zip(run.tokens, run.seconds, run.passes, strict=True)):
                rows.writerow((pair_name, f"{temperature:g}", run.name, prompt, tokens, f"{seconds:.4f}", steps))


def report(runs: list[Setting], categories: list[str], title: str, table: Path | None) -> None:
    """Speeds, and the policy over the best fixed shape of the other half."""
    adaptive, plain, *fixed = runs
    rounds = np.arange(len(adaptive.tokens))
    for run in sorted(runs, key=lambda r: -r.speed()):
        print(
            f"{run.name:18} {run.speed():8.1f} tokens/s {run.speed() / plain.speed():6.3f} {sum(run.tokens) / sum(run.passes):6.2f} tokens/step"
        )
    ratios = list[float]()
    for half in (rounds % 2 == 0, rounds % 2 == 1):
        best = max([plain, *fixed], key=lambda r: r.speed(~half))
        ratios.append(adaptive.speed(half) / best.speed(half))
    best = max([plain, *fixed], key=lambda r: r.speed())
    ratio = float(np.mean(ratios))
    groups = defaultdict[str, list[int]](list)
    for n, c in enumerate(categories[: len(rounds)]):
        groups[c].append(n)
    for c, picked in groups.items():
        if len(groups) > 1:
            print(f"  {c:16} adaptive / plain {adaptive.speed(picked) / plain.speed(picked):.3f}")
    line = (
        f"| {title} | {best.name} | {best.speed() / plain.speed():.3f} | {adaptive.speed() / plain.speed():.3f} | {ratio:.3f} |"
    )
    print(line)
    if table is not None:
        with table.open("a", encoding="utf-8") as out:
            out.write(line + "\n")


if __name__ == "__main__":
    typer.run(main)
