"""Drafters of one model on one yardstick: trained ones, from folders, and those from text, interleaved with plain decoding.

way          as of `bench.ways`
over plain   median over rounds of seconds a token of plain decoding divided by the way's, after the prompt was read
equal        at temperature 0: whether all texts were those of plain decoding
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from polydraft.bench.compare import Measurement, engine_contender, measure
from polydraft.bench.record import markdown_table, provenance, write_texts
from polydraft.bench.ways import Way, engine_options
from polydraft.cli.files import say_written
from polydraft.cli.options import Only, configured
from polydraft.cli.progress import bars
from polydraft.cli.start import use_threads
from polydraft.config import Config, EngineConfig, setting
from polydraft.engine.api import Engine
from polydraft.errors import InvalidInputError
from polydraft.models import pair
from studies.labels import label
from studies.question_files import Question, questions

PLAIN = "plain"
FROM_TEXT = ("ngram", "suffix", "mixture")
SIZE = "@1x3"
"""Of the chains that trained drafters draft where no way is named."""


class Yardstick:
    """A model, loaded once, and an engine for every way. heads: folders as `polydraft train` writes them, draft models among them."""

    def __init__(
        self, model: str, heads: Sequence[Path], ways: Sequence[str] = (), *, max_model_len: int | None = None
    ) -> None:
        self.plain = Engine.from_pretrained(model, drafter=None, max_num_seqs=1, max_model_len=max_model_len)
        self.heads = {head.name: head for head in heads}
        ways = ways or [*FROM_TEXT, *(f"{name}{SIZE}" for name in self.heads)]
        self.engines = {PLAIN: self.plain} | {way: self._engine(Way.parse(way)) for way in ways}

    def _engine(self, way: Way) -> Engine:
        return Engine.of(self.plain.target, tokenizer=self.plain.tokenizer, **engine_options(way, self.heads))

    def encoded(self, text: str) -> list[int]:
        """A question as the model is asked it."""
        if getattr(self.plain.tokenizer, "chat_template", None):
            return self.plain.encode_chat([{"role": "user", "content": text}])
        return self.plain.encode(text)

    def run(
        self,
        asked: Sequence[Question],
        temperatures: Sequence[float],
        *,
        max_tokens: int = 64,
        repetitions: int = 1,
        progress: Callable[[int], None] = lambda total: None,
    ) -> dict[str, Any]:
        """Every way on every question at every temperature; one interleaved run for each temperature. progress: called with the number of calls."""
        prompts = [self.encoded(q.text) for q in asked]
        rows = list[dict[str, Any]]()
        total = len(self.engines) * (1 + len(prompts) * repetitions) * len(temperatures)
        for temperature in temperatures:
            contenders = [
                engine_contender(name, engine, temperature) for name, engine in self.engines.items()
            ]
            measure(
                contenders, prompts[:1], max_tokens=8, repetitions=1, progress=lambda: progress(total)
            )  # compiles
            measurements = measure(
                contenders,
                prompts,
                max_tokens=max_tokens,
                repetitions=repetitions,
                progress=lambda: progress(total),
            )
            rows += [self._row(m, measurements[0], asked) for m in measurements]
        settings = {"temperatures": list(temperatures), "questions": len(asked), "max_tokens": max_tokens,
                    "repetitions": repetitions, "model": self.plain.summary()}  # fmt: skip
        return {**provenance("python -m studies.yardstick"), "settings": settings, "rows": rows}

    def _row(self, m: Measurement, plain: Measurement, asked: Sequence[Question]) -> dict[str, Any]:
        if m.error is not None:
            return {"way": m.contender.name, "temperature": m.contender.temperature, "error": m.error}
        stats = [s for run in m.runs for s in run.stats]
        calls = sum(s.steps for s in stats)
        rates = [run.stats[0].tokens_per_second for run in m.runs]
        base = [run.stats[0].tokens_per_second for run in plain.runs]
        texts = zip(m.runs, plain.runs, strict=True)
        return {
            "way": m.contender.name,
            **m.row(),
            "tokens_per_second": median(rates),
            "over_plain": median(a / b for a, b in zip(rates, base, strict=True)),
            "acceptance_by_depth": m.acceptance_by_depth,
            "drafting_ms": 1000 * sum(s.seconds["drafting"] for s in stats) / max(calls, 1),
            "equal": all(a.outputs == b.outputs for a, b in texts) if m.contender.temperature == 0 else None,
            "by_category": dict(_by_category(m, asked)),
            **self._card(m.contender.name),
        }

    def _card(self, way: str) -> dict[str, Any]:
        folder = self.heads.get((Way.parse(way).drafter or "").partition(":")[0])
        file = None if folder is None else folder / "card.json"
        card: Mapping[str, Any] = (
            json.loads(file.read_text(encoding="utf-8")) if file is not None and file.exists() else {}
        )
        return {name: card.get(name) for name in ("training_seconds", "parameters", "tokens")}


def _by_category(m: Measurement, asked: Sequence[Question]) -> Iterator[tuple[str, float]]:
    for category in dict.fromkeys(q.category for q in asked):
        stats = [run.stats[0] for i, run in enumerate(m.runs) if asked[i % len(asked)].category == category]
        yield category, sum(s.generated_tokens for s in stats) / max(sum(s.steps for s in stats), 1)


def markdown(report: Mapping[str, Any]) -> str:
    """A table for each temperature, with hardware, settings and command."""
    s = report["settings"]
    lines = [
        f"{report['hardware']['processor']}, one thread; {s['model']['target']}, weights {s['model']['weight_format']}; {s['questions']} questions, "
        f"{s['max_tokens']} tokens each, interleaved.",
        f"`{report['command']}`",
    ]
    head = [
        "way",
        "rule",
        "over plain",
        "tokens/s",
        "tokens per step",
        "kept by depth",
        "drafting ms",
        "parameters",
        "trained s",
    ]
    for temperature in s["temperatures"]:
        rows = [r for r in report["rows"] if r["temperature"] == temperature]
        same = all(r.get("equal") is not False for r in rows)
        note = (
            ""
            if temperature
            else ("; all texts are those of plain decoding" if same else "; TEXTS DIFFER FROM PLAIN DECODING")
        )
        lines += ["", f"Temperature {temperature:g}{note}:", "", markdown_table(head, map(_cells, rows))]
    return "\n".join(lines) + "\n"


def _cells(row: Mapping[str, Any]) -> list[str]:
    if "error" in row:
        return [row["way"], row["error"], *["-"] * 7]
    size = row["parameters"]
    seconds = row["training_seconds"]
    return [
        row["way"],
        row["verifier"] or "-",
        f"{row['over_plain']:.2f}",
        f"{row['tokens_per_second']:.0f}",
        f"{row['tokens_per_step']:.2f}",
        " ".join(f"{a:.2f}" for a in row["acceptance_by_depth"][:5]) or "-",
        f"{row['drafting_ms']:.2f}",
        "-" if size is None else f"{size / 1e6:.1f}M",
        "-" if seconds is None else f"{seconds:.0f}",
    ]


def picture(report: Mapping[str, Any], path: Path) -> None:
    """Tokens a call and speed over plain decoding of every way, by temperature; matplotlib."""
    from matplotlib import pyplot as plt

    rows = [r for r in report["rows"] if "error" not in r and r["way"] != PLAIN]
    names = list(dict.fromkeys(r["way"] for r in rows))[::-1]
    temperatures = report["settings"]["temperatures"]
    figure, panels = plt.subplots(
        1, 2, figsize=(9, 1.2 + 0.5 * len(names)), sharey=True, layout="constrained"
    )
    for axes, key, title in zip(
        panels, ("tokens_per_step", "over_plain"), ("tokens per step", "speed-up"), strict=True
    ):
        for i, temperature in enumerate(temperatures):
            values = {r["way"]: r[key] for r in rows if r["temperature"] == temperature}
            height = 0.8 / len(temperatures)
            at = [names.index(name) + height * (0.5 * (len(temperatures) - 1) - i) for name in values]
            axes.barh(at, list(values.values()), height, label=f"temperature {temperature:g}")
        axes.axvline(1, color="grey", linewidth=0.8)
        axes.tick_params(labelsize=12)
        axes.set_xlabel(title, fontsize=13)
    panels[0].set_yticks(range(len(names)), [label(name) for name in names])
    panels[1].legend(fontsize=11)
    figure.savefig(path, dpi=120)
    plt.close(figure)


@dataclass(frozen=True, kw_only=True)
class DrafterOptions(Config):
    """Which drafters are compared, and on what."""

    out: Path = setting("Folder that is written; it is made", Path, Path("build/yardstick"), flag="--out -o")
    quick: bool = setting("Two requests of 16 tokens", bool, False, flag="--quick")
    temperature: Sequence[float] = setting(
        "Sampling temperature; may be repeated", list, (), items=float, unset="0, 0.7 and 1"
    )
    num_tokens: int = setting("Number of new tokens of each continuation", int, 200, low=1)
    num_requests: int = setting("Number of requests", int, 8, low=1)
    head: Sequence[Path] = setting("Folder of a trained drafter; may be repeated", list, (), items=Path)
    way: Sequence[str] = setting(
        "DRAFTER or folder's name, [:KIND][+VERIFIER][@PATHSxDEPTH]; may be repeated", list, ()
    )
    prompts: Path | None = setting('.jsonl file of "prompt", or "turns", and "category"', Path)
    repetitions: int = setting("Number of measured repetitions of all prompts", int, 1, low=1)


@configured
def main(*, config: Annotated[EngineConfig, Only("model", model=None)], options: DrafterOptions) -> None:
    """Compare any drafters of one model, trained ones among them, with plain decoding."""
    if options.prompts is None:
        raise InvalidInputError("--prompts was not given; expected a .jsonl file of questions. Name one.")
    use_threads()
    count = 2 if options.quick else options.num_requests
    prompts = questions([options.prompts], count)[:count]
    yardstick = Yardstick(config.model or str(pair.target_folder()), list(options.head), list(options.way))
    out = options.out
    temperatures = list(options.temperature) or [0.0, 0.7, 1.0]
    num_tokens = 16 if options.quick else options.num_tokens
    with bars("measuring") as step:
        figures = yardstick.run(
            prompts, temperatures, max_tokens=num_tokens, repetitions=options.repetitions, progress=step
        )
    text = markdown(figures)
    typer.echo(text)
    out.mkdir(parents=True, exist_ok=True)
    say_written(
        write_texts(
            {out / "yardstick.json": json.dumps(figures, indent=1) + "\n", out / "yardstick.md": text}
        )
    )
    picture(figures, out / "yardstick.png")


app = typer.Typer(pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
