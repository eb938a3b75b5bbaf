"""Train the embedded pair: `python -m studies.embedded_pair all`.

Every sub-command reads and writes one work folder, so each can be repeated alone; `target` and `draft` resume from checkpoints.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from studies.embedded_pair.corpus import Corpus, installed_sources, select
from studies.embedded_pair.distil import distillation_loss, mixed_batches, sample_corpus
from studies.embedded_pair.evaluate import pair_figures
from studies.embedded_pair.export import export_model, export_prompts, model_card
from studies.embedded_pair.figures import figures
from studies.embedded_pair.models import DRAFT, TARGET, VOCAB_SIZE, from_checkpoint, llama, load_float32
from studies.embedded_pair.rows import Phase, next_token_loss, shuffled_rows
from studies.embedded_pair.tokenizer import END_OF_TEXT_ID, MAX_CONTEXT, encode_documents, train_tokenizer
from studies.embedded_pair.trigram import TrigramTable
from studies.training import train

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
Work = Annotated[Path, typer.Option(help="Folder of intermediate files and checkpoints.")]
Folder = Annotated[Path, typer.Option(help="Folder of the exported pair.")]
Seed = Annotated[int, typer.Option(help="Seed of the corpus order, the batches and the initial weights.")]
Threads = Annotated[int, typer.Option(help="Torch threads.")]
Compiled = Annotated[
    bool, typer.Option("--compile", help="Use torch.compile: about a quarter faster, needs a C++ compiler.")
]
WORK = Path("build/pair")
FOLDER = Path("src/polydraft/models/embedded")


def command_line() -> str:
    return " ".join(["python -m studies.embedded_pair", *sys.argv[1:]])


def target_phases(num_steps: int) -> tuple[Phase, ...]:
    """4,096 tokens a step: 60% at length 256, 30% at 512, the rest at the full context of 1,024."""
    short = round(0.6 * num_steps)
    middle = round(0.3 * num_steps)
    return (Phase(short, 16, 256), Phase(middle, 8, 512), Phase(num_steps - short - middle, 4, MAX_CONTEXT))


@app.command()
def corpus(work: Work = WORK, seed: Seed = 0, max_package_megabytes: float = 5.0) -> None:
    """Collect the Python sources of the standard library and the installed dependencies."""
    work.mkdir(parents=True, exist_ok=True)
    chosen = select(installed_sources(), max_package_bytes=int(max_package_megabytes * 1e6), seed=seed)
    chosen.save(work / "corpus.json")
    num_bytes = sum(len(d.text) for d in chosen.train)
    typer.echo(
        f"{len(chosen.train)} files, {num_bytes / 1e6:.1f} MB, {len(chosen.packages)} packages, hash {chosen.hash()}"
    )


@app.command()
def tokenizer(work: Work = WORK) -> None:
    """Learn the tokenizer from the training part and encode both parts."""
    chosen = Corpus.load(work / "corpus.json")
    train_tokenizer((d.text for d in chosen.train), VOCAB_SIZE, work / "tokenizer")
    for part, documents in (("train", chosen.train), ("held_out", chosen.held_out)):
        ids = encode_documents((d.text for d in documents), work / "tokenizer")
        np.save(work / f"{part}.npy", ids)
        typer.echo(
            f"{part}: {len(ids)} tokens, {sum(len(d.text.encode()) for d in documents) / len(ids):.2f} bytes per token"
        )


@app.command()
def target(
    work: Work = WORK, seed: Seed = 0, threads: Threads = 1, num_steps: int = 2000, compiled: Compiled = False
) -> None:
    """Train the target once through the first 4,096 * num_steps tokens of the corpus."""
    torch.set_num_threads(threads)
    model = llama(TARGET, seed=seed)
    if compiled:
        model.compile(dynamic=False)
    phases = target_phases(num_steps)
    record = {
        "num_steps": num_steps,
        "num_tokens": sum(p.num_tokens for p in phases),
        "command": command_line(),
    }
    (work / "target.json").write_text(json.dumps(record))
    batch = shuffled_rows(np.load(work / "train.npy"), phases, seed=seed)
    train(
        model, next_token_loss, batch, num_steps=num_steps, checkpoint=work / "target.pt", report=typer.echo
    )


@app.command()
def draft(
    work: Work = WORK,
    seed: Seed = 0,
    threads: Threads = 1,
    pretrain_steps: int = 1000,
    num_steps: int = 2800,
    num_samples: Annotated[int, typer.Option(help="Rows of text that the target writes.")] = 1536,
    tv_weight: Annotated[
        float, typer.Option(help="Share of total variation in the loss; the rest is KL.")
    ] = 0.7,
    compiled: Compiled = False,
) -> None:
    """Pre-train the draft, then distil it on the target's distributions; text that the target has not seen comes first."""
    torch.set_num_threads(threads)
    teacher = from_checkpoint(TARGET, work / "target.pt")
    model = llama(DRAFT, seed=seed + 1)
    if compiled:
        model.compile(dynamic=False)
    seen = json.loads((work / "target.json").read_text())["num_tokens"]
    stream = np.roll(np.load(work / "train.npy"), -seen)
    first = (Phase(pretrain_steps, 16, 256),)
    batch = shuffled_rows(stream, first, seed=seed)
    train(
        model,
        next_token_loss,
        batch,
        num_steps=pretrain_steps,
        checkpoint=work / "draft-pretrained.pt",
        floor=1.0,
        report=typer.echo,
    )

    rest = stream[first[0].num_tokens :]
    length = 512
    num_generated = 2
    mixed = round(0.85 * num_steps)
    phases = (Phase(mixed, 8 - num_generated, length), Phase(num_steps - mixed, 4, MAX_CONTEXT))
    samples = sample_corpus(
        teacher,
        rest,
        work / "samples.npy",
        num_rows=num_samples,
        length=length + 1,
        prompt_length=64,
        end_of_text_id=END_OF_TEXT_ID,
        seed=seed,
    )
    if compiled:
        teacher.compile(dynamic=False)
    batch = mixed_batches(
        shuffled_rows(rest, phases, seed=seed), samples, rows_per_batch=num_generated, num_steps=mixed
    )
    train(
        model,
        distillation_loss(teacher, tv_weight=tv_weight),
        batch,
        num_steps=num_steps,
        checkpoint=work / "draft.pt",
        muon_lr=0.015,
        adam_lr=2e-3,
        report=typer.echo,
    )
    generated = mixed * num_generated * length
    distilled = sum(p.num_tokens for p in phases) + generated
    record = {
        "command": command_line(),
        "num_tokens": first[0].num_tokens + distilled,
        "num_distillation_tokens": distilled,
        "share_generated": generated / distilled,
    }
    (work / "draft.json").write_text(json.dumps(record))


@app.command()
def polish(
    work: Work = WORK, seed: Seed = 0, threads: Threads = 1, num_steps: int = 170, compiled: Compiled = False
) -> None:
    """Go on distilling on total variation alone, which is what acceptance is made of; resumes like `draft`."""
    torch.set_num_threads(threads)
    teacher = from_checkpoint(TARGET, work / "target.pt")
    model = llama(DRAFT, seed=seed + 1)
    model.load_state_dict(torch.load(work / "draft.pt", weights_only=True)["model"])
    if compiled:
        model.compile(dynamic=False)
        teacher.compile(dynamic=False)
    phases = (Phase(num_steps, 8, MAX_CONTEXT // 2),)
    stream = np.load(work / "train.npy")
    blocks = stream[: len(stream) // MAX_CONTEXT * MAX_CONTEXT].reshape(-1, MAX_CONTEXT)
    spread = blocks[
        np.random.default_rng(seed + 2).permutation(len(blocks))[: phases[0].num_tokens // MAX_CONTEXT + 1]
    ]
    train(
        model,
        distillation_loss(teacher, tv_weight=1.0),
        shuffled_rows(spread.flatten(), phases, seed=seed),
        num_steps=num_steps,
        checkpoint=work / "draft-polished.pt",
        muon_lr=0.002,
        adam_lr=3e-4,
        warm_up=10,
        report=typer.echo,
    )
    record = json.loads((work / "draft.json").read_text())
    record |= {
        "command": f"{record['command']} && {command_line()}",
        "num_tokens": record["num_tokens"] + phases[0].num_tokens,
        "num_distillation_tokens": record["num_distillation_tokens"] + phases[0].num_tokens,
    }
    (work / "draft-polished.json").write_text(json.dumps(record))


@app.command()
def export(work: Work = WORK, folder: Folder = FOLDER) -> None:
    """Write both models, their tokenizer and the held-out prompts into the package."""
    for name, shape, checkpoint in (("target", TARGET, "target.pt"), ("draft", DRAFT, "draft-polished.pt")):
        export_model(from_checkpoint(shape, work / checkpoint), work / "tokenizer", folder / name)
    export_prompts(Corpus.load(work / "corpus.json"), work / "tokenizer", folder / "prompts")


@app.command()
def evaluate(work: Work = WORK, folder: Folder = FOLDER, seed: Seed = 0, threads: Threads = 1) -> None:
    """Measure the exported pair on the held-out modules; write figures.json and the model card."""
    torch.set_num_threads(threads)
    chosen = Corpus.load(work / "corpus.json")
    models = {name: load_float32(folder / name) for name in ("target", "draft")}
    records = {"target": "target.json", "draft": "draft-polished.json"}
    training = {name: json.loads((work / records[name]).read_text()) for name in models}
    seen = np.load(work / "train.npy")[: training["target"]["num_tokens"] + 1]
    num_bytes = sum(len(d.text.encode()) for d in chosen.held_out)
    trigram = TrigramTable.count(seen, VOCAB_SIZE)
    lines = (folder / "prompts" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = encode_documents((json.loads(line)["text"] for line in lines), folder / "target")
    record: dict[str, Any] = {
        "held_out": figures(
            models["target"], models["draft"], trigram, np.load(work / "held_out.npy"), num_bytes
        ),
        "prompts": pair_figures(
            models["target"], models["draft"], prompts, context=MAX_CONTEXT, end_of_text_id=END_OF_TEXT_ID
        ),
    }
    for name, model in models.items():
        c = model.config
        heads = f"{c.num_attention_heads} ({c.num_key_value_heads})"
        shape = [c.hidden_size, c.num_hidden_layers, heads, c.intermediate_size]
        record[name] = {"num_parameters": model.num_parameters(), "shape": shape, **training[name]}
    stages = [f"python -m studies.embedded_pair {stage}" for stage in ("corpus", "tokenizer", "export")]
    record |= {
        "held_out_modules": [d.path for d in chosen.held_out],
        "corpus_hash": chosen.hash(),
        "seed": seed,
        "torch": torch.__version__,
        "commands": [*stages[:2], *(training[name]["command"] for name in models), stages[2], command_line()],
        "packages": [asdict(p) for p in chosen.packages],
    }
    (folder / "figures.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(model_card(record), encoding="utf-8")
    typer.echo(json.dumps(record["held_out"], indent=1))


@app.command(name="all")
def every(
    work: Work = WORK,
    folder: Folder = FOLDER,
    seed: Seed = 0,
    threads: Threads = 1,
    compiled: Compiled = False,
) -> None:
    """All stages in order, with their default sizes."""
    corpus(work, seed)
    tokenizer(work)
    target(work, seed, threads, compiled=compiled)
    draft(work, seed, threads, compiled=compiled)
    polish(work, seed, threads, compiled=compiled)
    export(work, folder)
    evaluate(work, folder, seed, threads)


if __name__ == "__main__":
    app()
