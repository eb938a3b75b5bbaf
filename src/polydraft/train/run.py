"""From a checkpoint to a drafter of any kind: text, features, training, evaluation, export; every part is saved and taken up again.

texts/       what the target wrote (or the files that were given), in shards        features/   its states there, in bfloat16
checkpoint   weights, optimizers, seconds spent                                     card.json   what was done and what it is worth
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polydraft.core import Target
from polydraft.engine.api import Engine
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.files.atomic import replacing
from polydraft.heads.checkpoint import embeddings, output_rows
from polydraft.heads.recipe import Material, Recipe
from polydraft.methods import registry
from polydraft.models.torch.door import into
from polydraft.numerics.floats import as_bfloat16
from polydraft.train import conversations
from polydraft.train.conversations import TrainingText
from polydraft.train.examples import Batches, TrainingExample, examples_of
from polydraft.train.loop import Clock, Training, TrainingOptions

HELD_OUT = 0.04
"""Share of the texts that no step sees."""


def _layers(target: Target, recipe: Recipe, wanted: tuple[int, ...] | None) -> tuple[tuple[int, ...], int]:
    """Layers that are read, and the last one."""
    offered = target.offers
    last = max(offered.hidden, default=-1)
    if not (offered.embeddings and offered.head) or last < 3:
        raise IncompatibleError(
            f"{target.name or type(target).__name__} gives no hidden states, embeddings and head ({offered}), from which a head is trained. "
            "Load it with backend='compiled' or 'transformers'."
        )
    layers = recipe.layers(last) if wanted is None else wanted
    if not set(layers) <= set(offered.hidden) or tuple(sorted(set(layers))) != layers:
        raise InvalidInputError(f"layers={layers} were given; expected layers in 0..{last}, rising.")
    return layers, last


def _texts(
    engine: Engine,
    data: Sequence[Path],
    folder: Path,
    goes_on: Callable[[], bool],
    seed: int,
    report: Callable[[str], None],
) -> list[list[TrainingText]]:
    """Texts of files, or of the target while there is time: one shard or more, and those that were there before."""
    if data:
        return [conversations.from_file(path, engine) for path in data]
    folder.mkdir(parents=True, exist_ok=True)
    shards = [conversations.read_shard(path) for path in sorted(folder.glob("[0-9]*.npz"))]
    known_texts = set[str]()
    while not shards or goes_on():
        began = time.monotonic()
        shard = conversations.write_shard(engine, len(shards), seed=seed, count=32, earlier=known_texts)
        conversations.save_shard(folder / f"{len(shards):05d}.npz", shard)
        shards.append(shard)
        size = sum(len(t.tokens) for t in shard)
        report(
            f"{sum(len(t.tokens) for s in shards for t in s)} tokens written, {size / (time.monotonic() - began):.0f} tokens/s"
        )
    return shards


def _examples(
    engine: Engine,
    data: Sequence[Path],
    work: Path,
    layers: tuple[Sequence[int], int],
    o: TrainingOptions,
    seconds: Clock,
    report: Callable[[str], None],
) -> list[TrainingExample]:
    """Texts with the target's states: a third of the minutes writes them where none are given, by half of them they are read."""
    began = seconds.began
    third = began + 20 * o.minutes
    half = began + 30 * o.minutes
    shards = _texts(engine, data, work / "texts", lambda: seconds.now() < third, o.seed, report)
    shards = [[t for t in shard if len(t.tokens) > o.unroll + 8] for shard in shards]
    return _read(engine, shards, work / "features", *layers, lambda: seconds.now() <= half, report)


def _read(
    engine: Engine,
    shards: Sequence[Sequence[TrainingText]],
    folder: Path,
    layers: Sequence[int],
    last: int,
    goes_on: Callable[[], bool],
    report: Callable[[str], None],
) -> list[TrainingExample]:
    """The target's states along the texts of all shards, or of as many as there is time for."""
    width = len({*layers, last}) * embeddings(engine.target).shape[1]
    size = sum(len(t.tokens) for shard in shards for t in shard) * width * 2
    report(
        f"the target's states along {sum(map(len, shards))} texts take {size / 1e6:.0f} MB on the disk, and as much of the memory"
    )
    examples = list[TrainingExample]()
    for i, shard in enumerate(shards):
        if examples and not goes_on():
            report(
                f"half of the time is over: {len(shards) - i} of {len(shards)} shards are left for a longer run, or one that resumes"
            )
            break
        examples += examples_of(engine, shard, folder, i, layers, last)
        report(f"states of {i + 1} of {len(shards)} shards")
    return examples


def _parted(
    examples: Sequence[TrainingExample], rng: np.random.Generator
) -> tuple[list[TrainingExample], list[TrainingExample]]:
    """Those that are trained on, and those that are held out."""
    held = set(rng.permutation(len(examples))[: max(1, int(HELD_OUT * len(examples)))].tolist())
    return [e for i, e in enumerate(examples) if i not in held], [examples[i] for i in sorted(held)]


def draft_vocabulary(
    texts: Sequence[TrainingText], vocab_size: int, most: int, chosen: np.ndarray | None = None
) -> tuple[np.ndarray, float]:
    """Tokens that were chosen before, or the most frequent tokens of what the target wrote, rising, and their share of it; equally rare ones: the lower number, which tokenizers learnt first."""
    counts = np.zeros(vocab_size)
    for text in texts:
        counts += np.bincount(text.tokens[text.prompt_length :], minlength=vocab_size)[:vocab_size]
    ids = (
        np.sort(np.argsort(-counts, kind="stable")[: -(-min(most, vocab_size) // 8) * 8])
        if chosen is None
        else chosen
    )
    return ids, float(counts[ids].sum() / max(counts.sum(), 1))


def untrained(kind: str, target: Target, folder: Path, *, draft_vocab: int = 512) -> Path:
    """Write what a drafter is before training, to the folder that is returned: to compile it, and to see what a draft that never fits costs.

    Raises:
        UnknownNameError: no such kind.
        IncompatibleError: a target whose hidden states cannot be had.
    """
    recipe = registry.recipe(kind)
    ids = np.arange(min(draft_vocab, target.vocab_size) // 8 * 8)
    layers, _ = _layers(target, recipe, None)
    material = Material(
        target,
        layers,
        ids,
        into(embeddings(target)),
        into(as_bfloat16(output_rows(target, ids))),
        recipe.sizes,
    )
    recipe.export(recipe.fresh(material), material, folder)
    return folder


def train_drafter(
    engine: Engine,
    kind: str,
    out: Path,
    options: TrainingOptions | None = None,
    *,
    data: Sequence[Path] = (),
    start: Path | None = None,
    command: str = "",
    report: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Train a drafter for an engine's target and write it to `out`; returns its card. What `out` holds of an earlier run is taken up.

    kind: a recipe's name.  data: files of text; without them the target writes its own.  start: folder of a trained one to
        begin with, whose layers and draft vocabulary stay; default a fresh one.  clock: whose minutes these are, in seconds.

    Raises:
        UnknownNameError: no such kind.
        InvalidInputError: layers that are not there, or files without text.
        IncompatibleError: a target whose hidden states cannot be had, or a start for another one.
    """
    seconds = Clock(clock, clock())
    recipe = registry.recipe(kind)
    o = options or TrainingOptions.of(kind)
    target = engine.target
    first = None if start is None else recipe.checkpoint.load(start)
    layers, last = _layers(target, recipe, o.layers if first is None else first.layers_of(target))
    if first is not None:
        first.check(target)
        o = replace(o, lr=o.lr / 2)
    work = out / "work"
    examples = _examples(engine, data, work, (layers, last), o, seconds, report)
    rng = np.random.default_rng(o.seed)
    trained, held = _parted(examples, rng)
    chosen = None if first is None else first.ids
    ids, share = draft_vocabulary([e.text for e in trained], target.vocab_size, o.draft_vocab, chosen)
    material = _material(engine, layers, ids, o)
    torch.manual_seed(o.seed)
    network = recipe.fresh(material) if first is None else recipe.started(material, first)
    batches = Batches(material.output, o.window, rng, "cuda" if torch.cuda.is_available() else "cpu")
    network = network.to(batches.device)
    training = Training(recipe, network, batches, held, work / "checkpoint.pt", o, report, seconds)
    seconds.start(o)
    training.run(trained)
    trained_on: dict[str, Any] = {
        "command": command,
        "kind": kind,
        "options": asdict(o),
        "tokens": sum(len(e.totals) for e in examples),
        "draft_vocab_coverage": share,
    }
    recipe.export(network, material, out)
    return _write_card(out, trained_on, training)


def _write_card(folder: Path, trained_on: dict[str, Any], training: Training) -> dict[str, Any]:
    """What a drafter was trained on and what came of it, beside its weights."""
    num_parameters = sum(p.numel() for p in training.network.parameters())
    card = {**trained_on, "parameters": num_parameters, **training.figures()}
    with replacing(folder / "card.json") as file:
        file.write(json.dumps(card, indent=2).encode())
    return card


def _material(engine: Engine, layers: tuple[int, ...], ids: np.ndarray, options: TrainingOptions) -> Material:
    """What a network for an engine's target is made of. ids: the draft vocabulary."""
    target = engine.target
    output = into(as_bfloat16(output_rows(target, ids)))
    return Material(target, layers, ids, into(embeddings(target)), output, options.sizes, engine.tokenizer)
