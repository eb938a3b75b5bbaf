"""Drafting while verifying against drafting, then verifying: tokens per second of the wall, in one interleaved run, with the model's figures.

python -m studies.asynchronous --layers 0 --layers 20 --out build/asynchronous
python -m studies.asynchronous --model smollm2-135m-instruct --exit FOLDER       # its own first layers draft; FOLDER of `polydraft train early-exit`
"""

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM

from polydraft import Engine, SamplingParams
from polydraft.core import Target
from polydraft.models import load, pair
from polydraft.models.compiled.llama import CompiledLlama
from studies.contrastive import first_layers
from studies.inflate import inflate
from studies.questions import QUESTIONS
from studies.theory.asynchronous import asynchronous_rate, synchronous_rate
from studies.theory.speed import tokens_of_chain

DEPTH, CAP, MIN_LEAD = 5, 11, 2


def inflated(layers: int, draft_layers: int) -> dict[str, Engine]:
    """The contenders on an embedded target with so many more layers."""

    def model(folder: Path, more: int) -> CompiledLlama:
        module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return CompiledLlama(inflate(module, more), max_num_seqs=1)

    tokenizer = load.load_tokenizer(str(pair.target_folder()))
    return engines(model(pair.target_folder(), layers), tokenizer, lambda: model(pair.draft_folder(), draft_layers))


def engines(target: Target, tokenizer: Any, draft: Callable[[], Target]) -> dict[str, Engine]:
    """The contenders; a draft model for each, as a worker's is nobody else's."""

    def make(**options: Any) -> Engine:
        return Engine.of(target, tokenizer=tokenizer, draft_model=draft(), **options)

    ahead = {"lead_cap": CAP, "min_lead": MIN_LEAD, "burst": 1, "trace": True}
    return {
        "plain": make(drafter=None),
        "synchronous": make(drafter="model:chain", depth=DEPTH),
        "asynchronous": make(asynchronous=True, depth=DEPTH, drafter_options=ahead),
        "asynchronous, bursts of 4": make(asynchronous=True, depth=DEPTH, drafter_options=ahead | {"burst": 4}),
        "asynchronous, whole drafts": make(asynchronous=True, depth=DEPTH, drafter_options=ahead | {"burst": 5, "min_lead": 5}),
    }


Took = dict[str, list[tuple[float, Any]]]


def measure(made: dict[str, Engine], prompts: Sequence[str], temperature: float, tokens: int) -> Took:
    """Seconds of the wall and statistics for each prompt, everyone in turn."""
    took: Took = {name: [] for name in made}
    for number, prompt in enumerate(["warm = 1\n", *prompts]):
        for name, engine in made.items():
            params = SamplingParams(temperature=temperature, max_tokens=tokens, seed=number, ignore_eos=True)
            began = perf_counter()
            chat = getattr(engine.tokenizer, "chat_template", None) and number
            (result,) = engine.generate([engine.encode_chat([{"role": "user", "content": prompt}]) if chat else prompt], params)
            if number:
                took[name].append((perf_counter() - began, result.stats))
    return took


def durations(engine: Engine) -> tuple[float, float, float]:
    """Median seconds of a draft step and of a pass with both at work, and the share of draft steps that lie inside a pass."""
    drafter: Any = engine.drafter
    steps, passes = drafter.trace.of("draft"), drafter.trace.of("verify")
    middle = [statistics.median(e.end - e.begin for e in events) for events in (steps, passes)]
    return middle[0], middle[1], drafter.trace.draft_steps_inside / len(steps)


def main(
    model: Annotated[str | None, typer.Option(help="A chat model in the place of the embedded pair; needs --exit.")] = None,
    exit_: Annotated[Path | None, typer.Option("--exit", help="A trained exit behind its first layers, which draft.")] = None,
    layers: Annotated[list[int], typer.Option(help="Layers that inflate the embedded target; its texts stay.")] = [0, 20],  # noqa: B006
    draft_layers: Annotated[int, typer.Option(help="The same of the draft model.")] = 0,
    tokens: int = 64,
    num_prompts: int = 6,
    quick: bool = False,
    out: Path = Path("build/asynchronous"),
) -> None:
    """Measure and write `figures.json`, `trace.json` and `trace.png`."""
    out.mkdir(parents=True, exist_ok=True)
    prompts = [p.text for p in pair.prompts()[: 2 if quick else num_prompts]]
    rows = list[dict[str, Any]]()
    if (model is None) != (exit_ is None):
        raise typer.BadParameter("--model and --exit go together")
    place = out / "draft"
    if model is not None:
        first_layers(model, 0, place, exit_)
        layers, prompts = [0], list(QUESTIONS[: 2 if quick else num_prompts])
    for more in layers:
        if model is None:
            made = inflated(more, draft_layers)
        else:
            target = load.load_model(model, max_num_seqs=1, max_model_len=1024)
            made = engines(
                target, load.load_tokenizer(model), lambda: load.load_model(str(place), max_num_seqs=1, max_model_len=1024)
            )
        for temperature in (0.0, 1.0):
            took = measure(made, prompts, temperature, 16 if quick else tokens)
            row = {"draft_layers": draft_layers} | summary(made, took, temperature, more, 16 if quick else tokens)
            rows.append(row)
            typer.echo(json.dumps(row))
        if more == layers[-1]:
            drafter: Any = made["asynchronous"].drafter
            drafter.trace.save(out / "trace.json")
            draw(drafter.trace, out / "trace.png")
        for engine in made.values():
            if hasattr(engine.drafter, "close"):
                engine.drafter.close()  # pyright: ignore
    (out / "figures.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")


def acceptance_of(tokens_per_step: float) -> float:
    """The constant acceptance at which a chain of DEPTH gives so many tokens."""
    return min((a / 1000 for a in range(1001)), key=lambda a: abs(tokens_of_chain(a, DEPTH) - tokens_per_step))


def summary(made: dict[str, Engine], took: Took, temperature: float, more: int, tokens: int) -> dict[str, Any]:
    """Ratios to synchronous drafting (least, median, most over prompts), and the model's from measured seconds."""
    seconds = {name: [x for x, _ in each] for name, each in took.items()}
    stats = [x for _, x in took["synchronous"]]
    calls = sum(x.steps for x in stats)
    acceptance = acceptance_of(sum(x.generated_tokens for x in stats) / calls)
    drafting = sum(x.seconds["drafting"] for x in stats) / calls
    rest = sum(x.total_seconds - x.seconds["prefill"] for x in stats) / calls - drafting
    step, verify, inside = durations(made["asynchronous"])
    ratios = {name: [s / x for s, x in zip(seconds["synchronous"], each, strict=True)] for name, each in seconds.items()}

    def model(step: float, verify: float) -> float:
        rate = asynchronous_rate(acceptance, step, lambda n: verify, min_lead=MIN_LEAD, depth=DEPTH, cap=CAP)
        return round(rate / synchronous_rate(acceptance, drafting / DEPTH, lambda n: rest, DEPTH), 3)

    return {
        "layers": more,
        "temperature": temperature,
        "acceptance": acceptance,
        "tokens_per_second": {name: round(tokens / statistics.median(each)) for name, each in seconds.items()},
        "over_synchronous": {name: [round(x, 2) for x in (min(r), statistics.median(r), max(r))] for name, r in ratios.items()},
        "milliseconds_alone": [round(1e3 * x, 2) for x in (drafting / DEPTH, rest)],
        "milliseconds_together": [round(1e3 * x, 2) for x in (step, verify)],
        "draft_steps_inside": round(inside, 2),
        "model": {"undisturbed": model(drafting / DEPTH, rest), "as measured together": model(step, verify)},
    }


def draw(trace: Any, path: Path) -> None:
    """A stretch of the trace: who worked when."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    passes, steps = trace.of("verify"), trace.of("draft")
    middle = len(passes) // 2
    begin, end = passes[middle].begin, passes[min(middle + 8, len(passes) - 1)].end
    figure, axes = pyplot.subplots(figsize=(10, 2.4), layout="constrained")
    for place, (events, colour) in enumerate(((passes, "#3b6ea8"), (steps, "#d98032"))):
        shown = [e for e in events if e.end > begin and e.begin < end]
        axes.broken_barh(
            [(1e3 * (e.begin - begin), 1e3 * (e.end - e.begin)) for e in shown],
            (1 - place - 0.35, 0.7),
            color=colour,
            edgecolor="white",
        )
        for e in shown if events is passes else ():
            axes.text(
                500 * (e.begin + e.end - 2 * begin),
                1,
                f"{e.details['accepted'][0]} of {e.details['drafted'][0]}",
                ha="center",
                va="center",
                color="white",
                fontsize=8,
            )
    axes.set_yticks([1, 0], ["verify worker\n(accepted drafts)", "draft worker"])
    axes.set_xlim(0, 1e3 * (end - begin))
    axes.set_xlabel("milliseconds")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    typer.run(main)
