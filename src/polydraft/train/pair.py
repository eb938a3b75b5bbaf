"""Train the embedded pair: `python -m polydraft.train.pair all`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from polydraft.train.corpus import Corpus, installed_sources, select
from polydraft.train.tokenizer import END_OF_TEXT_ID, MAX_CONTEXT, encode_documents, train_tokenizer

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
Work = Annotated[Path, typer.Option(help="Folder of intermediate files and checkpoints.")]
Seed = Annotated[int, typer.Option(help="Seed of the corpus order and of the initial weights.")]
Threads = Annotated[int, typer.Option(help="Torch threads.")]
VOCAB_SIZE = 2048
TARGET = dict(hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
DRAFT = dict(hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32)


def llama(shape: dict, *, seed: int):
    """A LlamaForCausalLM with tied embeddings and freshly drawn weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        **shape,
    )
    return LlamaForCausalLM(config)


def next_token_loss(model, rows):
    """Mean cross-entropy in nats per token. rows: [B, N + 1] token ids."""
    import torch.nn.functional as F

    logits = model(rows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


@app.command()
def corpus(work: Work = Path("build/pair"), seed: Seed = 0, max_package_megabytes: float = 5.0) -> None:
    """Collect the Python sources of the standard library and the installed dependencies."""
    work.mkdir(parents=True, exist_ok=True)
    (work / ".gitignore").write_text("*\n")
    chosen = select(installed_sources(), max_package_bytes=int(max_package_megabytes * 1e6), seed=seed)
    chosen.save(work / "corpus.json")
    num_bytes = sum(len(d.text) for d in chosen.train)
    typer.echo(f"{len(chosen.train)} files, {num_bytes / 1e6:.1f} MB, {len(chosen.packages)} packages, hash {chosen.hash()}")


@app.command()
def tokenizer(work: Work = Path("build/pair")) -> None:
    """Learn the tokenizer from the training part and encode both parts."""
    import numpy as np

    chosen = Corpus.load(work / "corpus.json")
    train_tokenizer((d.text for d in chosen.train), VOCAB_SIZE, work / "tokenizer")
    for part, documents in (("train", chosen.train), ("held_out", chosen.held_out)):
        ids = encode_documents((d.text for d in documents), work / "tokenizer")
        np.save(work / f"{part}.npy", ids)
        typer.echo(f"{part}: {len(ids)} tokens, {sum(len(d.text.encode()) for d in documents) / len(ids):.2f} bytes per token")


def target_phases(num_steps: int):
    """4,096 tokens a step: 60% at length 256, 25% at 512, the rest at the full context of 1,024."""
    from polydraft.train.loop import Phase

    short, middle = round(0.6 * num_steps), round(0.25 * num_steps)
    return (Phase(short, 16, 256), Phase(middle, 8, 512), Phase(num_steps - short - middle, 4, MAX_CONTEXT))


@app.command()
def target(work: Work = Path("build/pair"), seed: Seed = 0, threads: Threads = 1, num_steps: int = 2400, compile: bool = False) -> None:
    """Train the target on the corpus, once through the first 4,096 * num_steps tokens; resumes from its checkpoint."""
    import numpy as np
    import torch

    from polydraft.train.loop import lanes, train

    torch.set_num_threads(threads)
    model = llama(TARGET, seed=seed)
    if compile:
        model.compile(dynamic=False)
    phases = target_phases(num_steps)
    (work / "target.json").write_text(json.dumps({"num_steps": num_steps, "num_tokens": sum(p.num_tokens for p in phases)}))
    batch = lanes(np.load(work / "train.npy"), phases)
    train(model, next_token_loss, batch, num_steps=num_steps, checkpoint=work / "target.pt", report=lambda line: typer.echo(line))


if __name__ == "__main__":
    app()
