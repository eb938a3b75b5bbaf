"""`python -m studies.policy`: the adaptive policy beside plain decoding and every fixed shape, run in turn on the same prompts.

The pair is the embedded one, or `--model` with `--draft-model`, or with `--head` or the head that comes for it. `--prompts FILE` has a question a line, as JSON
with `category` and `turns` or `prompt`; without it a few that come with the studies, or the package's Python prompts, are taken. A fixed shape is
met on other prompts than those it is chosen on, see `comparison`. `--report FILE.csv` prints the comparison of raw figures.
"""

from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from polydraft import SamplingParams
from polydraft.core import Budget
from polydraft.core.geometry import chain, paths
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.engine.api import Engine
from polydraft.heads.folder import kind_of
from polydraft.policy.fixed import FixedPolicy
from polydraft.policy.measuring import clock
from studies.options import Quick, append_rows, read_rows
from studies.policy.prompts import questions
from studies.policy.report import Row, speeds, table

CHAINS = tuple((f"chain {d}", Budget.fixed(chain(d))) for d in (1, 2, 3, 4, 5, 6, 8))
PATHS = tuple((f"{k} paths of {d}", Budget.fixed(paths(k, d))) for k, d in ((2, 2), (2, 4), (3, 2), (3, 4)))
TREES = tuple(
    (f"tree {n}, depth {d}", Budget.grown(n, d, w)) for n, d, w in ((4, 2, 2), (6, 4, 2), (10, 6, 3))
)
OTHER_DRAWS = {"without_replacement": "traversal", "systematic": "flow"}
"""Further ways of drawing several paths, and their verifiers."""


@dataclass
class Setting:
    """An engine of one policy, and the figures of every prompt: tokens, seconds and steps."""

    name: str
    engine: Engine
    figures: list[tuple[int, float, int]] = field(default_factory=list[tuple[int, float, int]])

    def run(self, batch: list[list[int]], params: SamplingParams) -> None:
        """One batch of prompts; seconds without the prefill."""
        stats = [result.stats for result in self.engine.generate(batch, params)]
        seconds = sum(s.total_seconds - s.seconds["prefill"] for s in stats)
        self.figures.append((sum(s.generated_tokens for s in stats), seconds, max(s.steps for s in stats)))


def settings(options: dict[str, Any], drafter: str, greedy: bool) -> list[Setting]:
    """Adaptive, plain, and fixed shapes, all on one pair of models."""
    first = (
        Engine.from_pretrained(drafter=drafter, **options)
        if options.get("model")
        else Engine.embedded(drafter=drafter, **options)
    )
    target = first.target
    made = first.drafter

    def setting(name: str, source: Any, policy: Any, rule: Any = "match") -> Setting:
        rule = first.verifier if source is made or source is None else rule
        built = Engine.of(
            target,
            tokenizer=first.tokenizer,
            drafter=source,
            verifier=rule,
            policy=policy,
            eos_token_ids=first.eos_token_ids,
        )
        built._clocks.steps = built._clocks.pricing = clock(target)
        return Setting(name, built)

    found = [setting("adaptive", made, None), setting("plain", None, FixedPolicy(Budget.fixed((-1,))))]
    shapes = CHAINS if greedy else CHAINS + PATHS
    found += [setting(name, made, FixedPolicy(budget)) for name, budget in shapes]
    if greedy and isinstance(made, ModelDrafter):
        ranked = made.sibling("top_k")
        found += [setting(name, ranked, FixedPolicy(budget)) for name, budget in TREES]
    for kind, rule in OTHER_DRAWS.items():
        if not greedy and isinstance(made, ModelDrafter):
            other = made.sibling(kind)
            words = kind.replace("_", " ")
            found += [setting(f"{name}, {words}", other, FixedPolicy(budget), rule) for name, budget in PATHS]
    return found


def main(
    model: Annotated[str | None, typer.Option()] = None,
    draft_model: Annotated[str | None, typer.Option()] = None,
    drafter: Annotated[str, typer.Option()] = "auto",
    head: Annotated[Path | None, typer.Option(help="Folder of a trained head.")] = None,
    quantization: Annotated[str | None, typer.Option()] = None,
    prompts: Annotated[
        list[Path] | None, typer.Option(help=".jsonl of questions, which may be gzipped; may be repeated.")
    ] = None,
    temperature: Annotated[float, typer.Option()] = 0.0,
    count: Annotated[int, typer.Option(help="Prompts.")] = 24,
    max_tokens: Annotated[int, typer.Option()] = 96,
    batch: Annotated[int, typer.Option()] = 1,
    shape: Annotated[
        list[str] | None, typer.Option(help="Fixed shape, such as 'chain 3'; may be repeated. Default: all.")
    ] = None,
    raw: Annotated[
        Path | None, typer.Option(help="Append tokens, seconds and steps of every prompt to a CSV file.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="CSV file of raw figures to compare, in place of measuring.")
    ] = None,
    quick: Quick = False,
) -> None:
    """Adaptive policy and fixed shapes in turn."""
    if quick:
        count = 2
        max_tokens = 8
        shape = ["chain 3"]
    if report is not None:
        print(table(read_rows(Row, report)))
        return
    options: dict[str, Any] = {"max_num_seqs": batch, "threads": 1}
    if model:
        options |= {
            "model": model,
            "draft_model": draft_model,
            "quantization": quantization,
            "max_model_len": 1024,
        }
        options |= {"draft_quantization": quantization} if draft_model else {}
    if head:
        drafter = kind_of(head)
        options["drafter_options"] = {"weights": str(head)}
    runs = settings(options, drafter, temperature == 0)
    runs = [run for run in runs if not shape or run.name in ("adaptive", "plain", *shape)]
    texts = questions(prompts or (), count * batch, runs[0].engine, model is not None)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)
    start = perf_counter()
    for number in range(len(texts) // batch):
        ids = [ids for _, ids in texts[number * batch : (number + 1) * batch]]
        turn = number % len(runs)
        for run in runs[turn:] + runs[:turn]:
            if number == 0:  # compiles, and fills caches
                run.run(ids, params)
                run.engine.measure()  # as a command does behind its first answer, and a server while it waits
                run.figures.clear()
            run.run(ids, params)
    rows = [
        Row(
            f"{model or 'embedded'} {drafter}, batch {batch}",
            f"{temperature:g}",
            run.name,
            prompt,
            category,
            *figures,
        )
        for run in runs
        for prompt, ((category, _), figures) in enumerate(zip(texts[::batch], run.figures, strict=True))
    ]
    if raw is not None:
        append_rows(rows, raw)
    print(speeds(rows))
    print(table(rows))
    print(f"{perf_counter() - start:.0f} s")


if __name__ == "__main__":
    typer.run(main)
