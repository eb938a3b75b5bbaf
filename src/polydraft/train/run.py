"""From a checkpoint to a drafter of any kind: text, features, training, evaluation, export; every part is saved and taken up again.

texts/       what the target wrote (or the files that were given), in shards        features/   its states there, in bfloat16
checkpoint   weights, optimizers, seconds spent                                     card.json   what was done and what it is worth
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from polydraft.core import Target
from polydraft.engine.api import Engine
from polydraft.errors import IncompatibleError, InvalidInputError, unknown_name
from polydraft.files.atomic import replacing
from polydraft.heads.checkpoint import embeddings, output_rows
from polydraft.heads.losses import DECAY, LOSSES, loss_at
from polydraft.heads.recipe import Batch, Material, Recipe
from polydraft.methods import registry
from polydraft.train import conversations
from polydraft.train.conversations import TrainingText
from polydraft.train.loop import optimizers_for

HELD_OUT = 0.04
"""Share of the texts that no step sees."""
SAVED_EVERY = 100.0
"""Seconds from one checkpoint, and one look at what is held out, to the next: what a run that is killed loses."""
LOOKED_AT = 32
"""Texts of these that a look reads; the last one reads all."""
PATIENCE = 6
"""Looks in a row without a better one, after which training stops; what was best is saved. Steps of full size, in the first half, may make it worse."""


@dataclass(frozen=True)
class TrainingOptions:
    """minutes: of everything; a third of it writes texts where none are given, and by half of it they are read.  unroll: depths that are trained.
    draft_vocab: most tokens that can be drafted.  batch: texts.  window: most tokens of each.  layers: whose states are read; default the
    kind's choice.  max_steps: that training ends at, where the minutes are not over.  lr: Muon's, of which one that was trained before
    gets half.  sizes: of what the kind lets choose.  loss: of `heads.losses`.  decay: weight of a depth in it over that of the one before, in (0, 1].
    piece: minutes after which a run ends that one with `resume` goes on with; default all.
    """

    minutes: float = 10.0
    unroll: int = 3
    draft_vocab: int = 8192
    batch: int = 6
    window: int = 384
    layers: tuple[int, ...] | None = None
    max_steps: int = 1_000_000
    lr: float = 0.02
    seed: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)
    loss: str = "mixed"
    decay: float = DECAY
    piece: float = math.inf

    def __post_init__(self) -> None:
        if not 1 <= self.minutes < math.inf:
            raise InvalidInputError(
                f"minutes={self.minutes} were given; expected at least 1, which writes, trains and looks once."
            )
        if self.piece < 1 or math.isnan(self.piece):
            raise InvalidInputError(
                f"piece={self.piece} minutes were given; expected at least 1, or none: all at once."
            )
        if self.loss not in LOSSES:
            raise unknown_name("loss", self.loss, LOSSES)
        if not 0 < self.decay <= 1:
            raise InvalidInputError(
                f"decay={self.decay} was given; expected more than 0, and at most 1: all depths weigh the same."
            )
        whole = {
            name: getattr(self, name) for name in ("unroll", "draft_vocab", "batch", "window", "max_steps")
        } | dict(self.sizes)
        if wrong := next((name for name, value in whole.items() if value < 1), None):
            raise InvalidInputError(
                f"{wrong}={whole[wrong]} was given; expected a whole number of at least 1."
            )

    @classmethod
    def of(cls, kind: str, **given: Any) -> "TrainingOptions":
        """Those of a kind; what is None is left to it.

        Raises:
            InvalidInputError: sizes that the kind does not have, and numbers that are too small.

        Example:
            >>> TrainingOptions.of("eagle", minutes=5, unroll=None).unroll
            3
        """
        recipe: Recipe = registry.recipe(kind)
        sizes = given.pop("sizes", None) or {}
        if unknown := sorted(set(sizes) - set(recipe.sizes)):
            raise InvalidInputError(
                f"{unknown[0]}={sizes[unknown[0]]} was given; {kind!r} lets choose {', '.join(recipe.sizes) or 'no sizes'}."
            )
        chosen = {
            "decay": recipe.decay,
            **recipe.defaults,
            **{name: value for name, value in given.items() if value is not None},
        }
        return cls(**chosen, sizes={**recipe.sizes, **sizes})


@dataclass(frozen=True)
class Example:
    """A text with the target's states in bfloat16, [T, F] of the layers that are read and [T, h] of the last, and, of each position, the
    logarithm of the sum of exponents of all logits."""

    text: TrainingText
    states: Tensor
    last: Tensor
    totals: Tensor


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


@torch.inference_mode()
def _examples(
    engine: Engine, texts: Sequence[TrainingText], folder: Path, number: int, layers: Sequence[int], last: int
) -> list[Example]:
    """The target's states along texts, mapped from the files where they are saved, or made now: several trainings read the same pages."""
    stored = tuple(sorted({*layers, last}))
    name = f"{number:05d}-{'-'.join(map(str, stored))}"
    paths = {part: folder / f"{name}.{part}.npy" for part in ("states", "totals")}
    text_ends = np.cumsum([len(t.tokens) for t in texts])
    if not all(path.exists() for path in paths.values()):
        folder.mkdir(parents=True, exist_ok=True)
        rows = list[Tensor]()
        totals = list[Tensor]()
        for text in texts:
            engine.target.release([0])
            loaded = engine.target.prefill([0], [text.tokens.tolist()], hidden=stored).hidden
            rows.append(torch.cat([loaded[layer][0] for layer in stored], -1).bfloat16())
            head: Any = engine.target.head  # pyright: ignore[reportAttributeAccessIssue]
            totals.append(torch.cat([head(x).float().logsumexp(-1) for x in loaded[last][0].split(64)]))
        engine.target.release([0])
        parts = {"states": torch.cat(rows).cpu().view(torch.int16), "totals": torch.cat(totals).cpu()}
        for part, values in parts.items():
            with replacing(paths[part]) as file:
                np.save(file, values.numpy())
    states, totals = (
        torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False)) for path in paths.values()
    )
    states = states.view(torch.bfloat16)
    width = states.shape[1] // len(stored)
    read = states[:, : len(layers) * width]
    last_states = states[:, -width:]
    pieces = zip(np.split(np.arange(len(totals)), text_ends[:-1]), texts, strict=True)
    return [
        Example(text, *(part[at[0] : at[-1] + 1] for part in (read, last_states, totals)))
        for at, text in pieces
    ]


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
        target, layers, ids, embeddings(target), output_rows(target, ids).bfloat16(), recipe.sizes
    )
    recipe.export(recipe.fresh(material), material, folder)
    return folder


class Batches:
    """Examples as tensors, padded; the target's distributions at the draft vocabulary are made from its last states. output: [D, h] its rows."""

    def __init__(self, output: Tensor, window: int, rng: np.random.Generator, device: str) -> None:
        self.output = output.to(device)
        self.window = window
        self.rng = rng
        self.device = device

    def __call__(self, examples: Sequence[Example]) -> Batch:
        n = min(self.window, max(len(e.totals) for e in examples))
        cut = [(e, int(self.rng.integers(0, max(len(e.totals) - n, 0) + 1))) for e in examples]

        def padded(parts: Iterable[Tensor]) -> Tensor:
            return pad_sequence(list(parts), batch_first=True).to(self.device)

        tokens = padded(torch.from_numpy(e.text.tokens[i : i + n]) for e, i in cut)
        states, last, totals = (
            padded(getattr(e, name)[i : i + n] for e, i in cut) for name in ("states", "last", "totals")
        )
        at = torch.arange(tokens.shape[1])
        counted = torch.stack(
            [(at >= e.text.prompt_length - i) & (at < len(e.totals) - i) for e, i in cut]
        ).to(self.device)
        distributions = ((last @ self.output.T).float() - totals[..., None]).exp_()
        return Batch(tokens, states, distributions, counted)


def _epochs(examples: Sequence[Example], size: int, rng: np.random.Generator) -> Iterator[list[Example]]:
    """Batches of texts of like length, without end."""
    while True:
        order = sorted(
            rng.permutation(len(examples)), key=lambda i: len(examples[i].totals) + int(rng.integers(0, 60))
        )
        batches = [[examples[i] for i in order[b : b + size]] for b in range(0, len(order), size)]
        rng.shuffle(batches)  # pyright: ignore[reportArgumentType]
        yield from batches


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
    began = clock()
    recipe = registry.recipe(kind)
    o = options or TrainingOptions.of(kind)
    target = engine.target
    first = None if start is None else recipe.checkpoint.load(start)
    layers, last = _layers(target, recipe, o.layers if first is None else first.layers_of(target))
    if first is not None:
        first.check(target)
    work = out / "work"
    shards = _texts(engine, data, work / "texts", lambda: clock() - began < 20 * o.minutes, o.seed, report)
    shards = [[t for t in shard if len(t.tokens) > o.unroll + 8] for shard in shards]
    rows = embeddings(target)
    vectors = len({*layers, last})
    size = sum(len(t.tokens) for shard in shards for t in shard) * vectors * rows.shape[1] * 2
    report(
        f"the target's states along {sum(map(len, shards))} texts take {size / 1e6:.0f} MB on the disk, and as much of the memory"
    )
    examples = list[Example]()
    half = began + 30 * o.minutes
    for i, shard in enumerate(shards):
        if examples and clock() > half:
            report(
                f"half of the time is over: {len(shards) - i} of {len(shards)} shards are left for a longer run, or one that resumes"
            )
            break
        examples += _examples(engine, shard, work / "features", i, layers, last)
        report(f"states of {i + 1} of {len(shards)} shards")
    rng = np.random.default_rng(o.seed)
    held = set(rng.permutation(len(examples))[: max(1, int(HELD_OUT * len(examples)))].tolist())
    trained = [e for i, e in enumerate(examples) if i not in held]
    ids, share = draft_vocabulary(
        [e.text for e in trained], target.vocab_size, o.draft_vocab, None if first is None else first.ids
    )
    material = Material(
        target, layers, ids, rows, output_rows(target, ids).bfloat16(), o.sizes, engine.tokenizer
    )
    torch.manual_seed(o.seed)
    network = recipe.fresh(material) if first is None else recipe.started(material, first)
    batches = Batches(material.output, o.window, rng, "cuda" if torch.cuda.is_available() else "cpu")
    o = o if first is None else replace(o, lr=o.lr / 2)
    figures = _fit(
        recipe,
        network.to(batches.device),
        batches,
        trained,
        [examples[i] for i in sorted(held)],
        work,
        o,
        report,
        clock,
        began,
    )
    recipe.export(network, material, out)
    card = {"command": command, "kind": kind, "options": asdict(o), "tokens": sum(len(e.totals) for e in examples),
            "parameters": sum(p.numel() for p in network.parameters()), "draft_vocab_coverage": share, **figures}  # fmt: skip
    with replacing(out / "card.json") as file:
        file.write(json.dumps(card, indent=2).encode())
    return card


def _fit(
    recipe: Recipe,
    network: nn.Module,
    batch: Batches,
    examples: Sequence[Example],
    held: Sequence[Example],
    work: Path,
    o: TrainingOptions,
    report: Callable[[str], None],
    clock: Callable[[], float],
    began: float,
) -> dict[str, Any]:
    """Train until the minutes, or the piece of them, are over. Returns held-out figures by depth, seconds and tokens."""
    optimizers = optimizers_for(network, muon_lr=o.lr, adam_lr=1e-3)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    base = [group["lr"] for group in groups]
    saved = clock()
    checkpoint = work / "checkpoint.pt"
    spent = 0.0
    steps = 0
    num_tokens = 0
    recent = list[float]()
    best = (-1.0, dict[str, Tensor]())
    worse = 0
    """Held-out acceptance of all depths together with its weights, and looks since."""
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        network.load_state_dict(state["network"])
        for optimizer, optimizer_state in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer_state)
        spent = state["seconds"]
        steps = state["steps"]
        num_tokens = state["seen"]
        best = state.get("best", best)
        batch.rng = np.random.default_rng((o.seed, steps))
    seconds_left = max(30.0, 60 * o.minutes - (clock() - began) - spent)
    start = clock()
    reported = start
    whole = spent + seconds_left
    piece_end = max(start + 30, began + 60 * o.piece)

    some = held[:: -(-len(held) // LOOKED_AT)]

    def evaluate(held: Sequence[Example]) -> dict[str, Any]:
        same = Batches(
            batch.output, batch.window, np.random.default_rng(o.seed), batch.device
        )  # places in the texts, at every look
        with torch.no_grad(), torch.autocast(batch.device, torch.bfloat16):
            losses = [
                recipe.loss(network, same(held[i : i + 8]), steps=o.unroll + 1, loss=LOSSES["kl"])
                for i in range(0, len(held), 8)
            ]
        return {
            name: np.nanmean([getattr(f, name) for f in losses], 0).round(3).tolist()
            for name in ("acceptance", "agreement")
        }

    def save() -> None:
        state = {
            "network": network.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        }
        counted = {"seconds": spent + clock() - start, "steps": steps, "seen": num_tokens, "best": best}
        with replacing(checkpoint) as file:
            torch.save(state | counted, file)

    for examples_now in _epochs(examples, o.batch, batch.rng):
        done = max((spent + clock() - start) / whole, steps / o.max_steps)
        if done >= 1:
            break
        if clock() > piece_end:
            report(f"a piece is over, {done:.0%} of the training is done: --resume goes on with it")
            break
        factor = min(1.0, (steps + 1) / 50) * min(1.0, 2.04 - 2 * done)
        for group, lr in zip(groups, base, strict=True):
            group["lr"] = lr * factor
        inputs = batch(examples_now)
        with torch.autocast(batch.device, torch.bfloat16):
            loss, acceptance, _ = recipe.loss(
                network, inputs, steps=o.unroll, loss=loss_at(o.loss, done, o.decay)
            )
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        with torch.autocast(batch.device, torch.bfloat16):
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        steps = steps + 1
        num_tokens = num_tokens + int(inputs.counted.sum())
        recent.append(acceptance[0])
        now = clock()
        if now - reported > 20:
            report(
                f"step {steps}, {num_tokens / (spent + now - start):.0f} tokens/s, first drafts accepted {np.mean(recent):.3f}, {(seconds_left - now + start) / 60:.1f} min left"
            )
            reported = now
            recent = []
        if now - saved > SAVED_EVERY:
            figures = evaluate(some)
            report(f"held out: {figures}")
            better = sum(figures["acceptance"]) > best[0]
            worse = 0 if better or done < 0.5 else worse + 1
            if better:
                best = (
                    sum(figures["acceptance"]),
                    {name: x.clone() for name, x in network.state_dict().items()},
                )
            save()
            saved = clock()
            if worse == PATIENCE:
                report(f"what is held out was better {worse} looks ago: training ends")
                break
    save()
    if sum(evaluate(some)["acceptance"]) < best[0]:
        network.load_state_dict(best[1])
    seconds = round(spent + clock() - start, 1)
    finished = recipe.finish(network, (batch(held[i : i + 8]) for i in range(0, len(held), 8)))
    for name, value in finished.items():
        report(f"{name}: {value}")
    return {"training_seconds": seconds, "tokens_seen": num_tokens, **evaluate(held), **finished}
