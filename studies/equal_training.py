"""`python -m studies.equal_training`: draft heads of several kinds, sizes and losses at equal CPU time, on text that a target wrote itself.

    train     every contender for so many seconds of the process's CPU time (neighbours do not matter), on one thread; the target's states are read once
    measure   each on questions that none has seen: chains of DEPTH drafts at temperature 0 and 1, token by token (`speculative`)
    page      the table of what is stored

Of a chain that is verified token by token, its first k drafts are what a chain of k is: one run gives the tokens per step of all shorter chains.
What is there is not made again, so that a cut-off run goes on, and runs of different contenders may share a folder.
"""

import csv
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from polydraft.cli.start import build
from polydraft.config import EngineConfig
from polydraft.core import SamplingParams
from polydraft.engine.api import Engine
from polydraft.heads.checkpoint import shipped
from polydraft.train.conversations import read_shard
from polydraft.train.run import TrainingOptions, train_drafter
from studies.options import Quick

__all__ = ["CONTENDERS", "Contender", "Measured", "main", "measure", "page", "questions"]

TEXTS = Path(__file__).parent / "chat_head"
HIDDEN, DEPTH = "00000.npz", 4
CSV = "equal-training.csv"


@dataclass(frozen=True)
class Contender:
    """kind and sizes as of `polydraft train`."""

    kind: str
    loss: str
    layers: int = 1

    @property
    def name(self) -> str:
        """Of its folder and its row."""
        return f"{self.kind}-{self.layers}-{self.loss}"

    @property
    def sizes(self) -> dict[str, int]:
        """What `polydraft train --size` takes."""
        return {} if self.kind == "eagle" else {"layers": self.layers, "block": DEPTH}


CONTENDERS = (
    Contender("eagle", "kl"),
    Contender("dspark", "lk", 2),
    Contender("dspark", "kl", 2),
    Contender("dspark", "tv", 2),
    Contender("dspark", "ce", 2),
    Contender("dspark", "lk", 1),
    Contender("dspark", "lk", 3),
    Contender("eagle", "lk"),
)


@dataclass(frozen=True)
class Measured:
    """A head at one temperature. cpu_seconds: of its training, or -1.  first: share of first drafts that are accepted.  tokens_1 .. tokens_4: per step
    of a chain of so many.  held_out: first drafts accepted, in expectation, along texts like those of training that it has not seen; at temperature 0 how often
    the most likely tokens are the same.  calibration_error: of its confidence, or -1.
    """

    head: str
    temperature: float
    cpu_seconds: float
    tokens_seen: int
    parameters: int
    first: float
    tokens_1: float
    tokens_2: float
    tokens_3: float
    tokens_4: float
    held_out: float
    calibration_error: float
    questions: int
    max_tokens: int


def questions(file: Path, count: int) -> list[list[int]]:
    """Prompts of so many conversations of a shard: up to where the answer begins, which is three tokens behind the last beginning of a turn."""
    prompts = list[list[int]]()
    for text in read_shard(file):
        turns = np.flatnonzero(text.tokens == text.tokens[0])
        if len(turns) > 1 and turns[-1] + 3 < len(text.tokens):
            prompts.append(text.tokens[: turns[-1] + 3].tolist())
    return prompts[:: max(1, len(prompts) // count)][:count]


def measure(engine: Engine, name: str, folder: Path, prompts: Sequence[list[int]], max_tokens: int) -> list[Measured]:
    """A head at both temperatures."""
    card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    options = {"drafter_options": {"weights": folder}, "depth": DEPTH, "verifier": "speculative"}
    drafted, rows = Engine.of(engine.target, tokenizer=engine.tokenizer, **options), list[Measured]()
    parameters = card.get("parameters") or (folder / "model.safetensors").stat().st_size // 2
    for temperature in (0.0, 1.0):
        params = [SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=i) for i in range(len(prompts))]
        stats = [result.stats for result in drafted.generate(list(prompts), params)]
        by_depth = np.zeros((2, DEPTH))
        for s in stats:
            for row, counts in zip(by_depth, (s.accepted_by_depth, s.drafted_by_depth), strict=True):
                row[: len(counts)] += counts
        accepted = by_depth[0] / max(by_depth[1, 0], 1)
        chains = (1 + accepted.cumsum()).round(3).tolist()
        error = card.get("confidence", {}).get("calibration_error", -1)
        seen = card["training_seconds"], card["tokens_seen"], parameters
        along = card["acceptance" if temperature else "agreement"][0]
        first = round(float(accepted[0]), 3)
        rows.append(Measured(name, temperature, *seen, first, *chains, along, error, len(prompts), max_tokens))
    return rows


def page(rows: Sequence[Measured], folder: Path, settings: str) -> str:
    """Write the figures and the page into a folder; returns the page. settings: what all of them have in common, in words."""
    with (folder / CSV).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(Measured.__dataclass_fields__), lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, rows))
    lines = [
        "# Heads trained for equal CPU time\n",
        settings + "\n",
        f"A head is its kind, its layers and its loss. {rows[0].questions} questions that no head has seen, answers of at most {rows[0].max_tokens} tokens, chains of "
        f"{DEPTH} drafts verified token by token. [Held-out texts, shorter chains, tokens seen, confidence's error]({CSV}).\n",
        "| head | CPU seconds | million weights | first draft accepted, T = 0 | T = 1 | tokens per step, T = 0 | T = 1 |",
        "|---|---|---|---|---|---|---|",
    ]
    for cold in (row for row in rows if row.temperature == 0):
        (hot,) = (row for row in rows if row.head == cold.head and row.temperature == 1)
        lines.append(
            f"| {cold.head} | {cold.cpu_seconds:,.0f} | {cold.parameters / 1e6:.1f} | {cold.first:.2f} | {hot.first:.2f} | {cold.tokens_4:.2f} | {hot.tokens_4:.2f} |"
        )
    (folder / "equal-training.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return "\n".join(lines)


def _trained(engine: Engine, contender: Contender, out: Path, data: Sequence[Path], options: dict[str, Any]) -> Path:
    """The folder of a contender, trained if it is not there."""
    folder = out / contender.name
    if not (folder / "card.json").exists():
        states = folder / "work" / "features"
        states.parent.mkdir(parents=True, exist_ok=True)
        if not states.is_symlink():
            states.symlink_to((out / "states").resolve())
        chosen = TrainingOptions.of(contender.kind, loss=contender.loss, sizes=contender.sizes, unroll=DEPTH - 1, **options)

        def report(line: str) -> None:
            typer.echo(f"{contender.name}: {line}", err=True)

        train_drafter(engine, contender.kind, folder, chosen, data=data, report=report, clock=time.process_time)
    return folder


def main(
    out: Annotated[Path, typer.Option(help="Folder of heads, states and figures; what it holds is not made again.")] = Path(
        "build/equal_training"
    ),
    seconds: Annotated[float, typer.Option(min=60, help="CPU seconds of each training.")] = 480,
    shards: Annotated[int, typer.Option(min=1, help="Shards of text that are trained on, from the last.")] = 25,
    draft_vocab: Annotated[int, typer.Option(help="Tokens that can be drafted.")] = 8192,
    batch: Annotated[int, typer.Option(help="Texts of a step.")] = 6,
    asked: Annotated[int, typer.Option(min=1, help="Hidden questions.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 64,
    contender: Annotated[list[str] | None, typer.Option(help="Only this head, such as dspark-2-lk; may be repeated.")] = None,
    head: Annotated[list[Path] | None, typer.Option(help="Folder of a further head to measure; may be repeated.")] = None,
    model: Annotated[str, typer.Option(help="The target.")] = "smollm2-135m-instruct",
    quick: Quick = False,
) -> None:
    """Train, measure, write `equal-training.csv` and `equal-training.md`."""
    from polydraft.cli.train import keep_memory

    chosen = {c.name: c for c in CONTENDERS[: 2 if quick else None] if not contender or c.name in contender}
    if unknown := sorted(set(contender or ()) - {*chosen, "shipped"}):
        raise typer.BadParameter(f"--contender {unknown[0]!r} is none of shipped, {', '.join(c.name for c in CONTENDERS)}.")
    torch.set_num_threads(1)
    keep_memory()
    (out / "states").mkdir(parents=True, exist_ok=True)
    engine = build(EngineConfig(model=model, drafter=None, max_num_seqs=16, max_model_len=1024, quantization="int8"))
    data = sorted(TEXTS.glob("*.npz"))[:0:-1][:shards]
    options = {"minutes": seconds / 60, "draft_vocab": draft_vocab, "batch": batch} | ({"max_steps": 2} if quick else {})
    prompts, most = questions(TEXTS / HIDDEN, 2 if quick else asked), 16 if quick else max_tokens
    heads: dict[str, Any] = {"shipped": shipped(engine.target)} | {folder.name: folder for folder in head or []} | chosen
    for name, source in heads.items():
        stored = out / name / "measured.json"
        if source is None or stored.exists() or (name == "shipped" and contender and name not in contender):
            continue
        folder = _trained(engine, source, out, data, options) if isinstance(source, Contender) else source
        stored.parent.mkdir(exist_ok=True)
        stored.write_text(json.dumps([asdict(row) for row in measure(engine, name, folder, prompts, most)]), encoding="utf-8")
    names = ["shipped", *(folder.name for folder in head or []), *(c.name for c in CONTENDERS)]
    files = [file for name in names if (file := out / name / "measured.json").exists()]
    rows = [Measured(**row) for file in files for row in json.loads(file.read_text(encoding="utf-8"))]
    flags = {"seconds": f"{seconds:.0f}", "shards": shards, "draft-vocab": draft_vocab, "batch": batch}
    flags |= {"asked": rows[0].questions, "max-tokens": rows[0].max_tokens}
    typer.echo(page(rows, out, _settings(model, flags)))


def _settings(model: str, flags: Mapping[str, Any]) -> str:
    """What the trainings have in common, in words."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "a CPU")
    return (
        f"{model}, its own texts (`studies/chat_head`, {flags['shards']} shards from the last), one thread of {name}: each trained head has "
        f"{flags['seconds']} seconds of CPU time, {flags['batch']} texts a step, {flags['draft-vocab']:,} tokens to draft; "
        f"`shipped` is the EAGLE-3 head of the package.\n`python -m studies.equal_training {' '.join(f'--{flag} {value}' for flag, value in flags.items())}`"
    )


if __name__ == "__main__":
    typer.run(main)
