"""From a checkpoint to an EAGLE-3 head: text, features, training, evaluation, export; every part is kept and taken up again.

texts/       what the target wrote (or the files that were given), in shards        features/   its states there, in bfloat16
checkpoint   weights, optimizers, seconds spent                                     card.json   what was done and what it is worth
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polydraft.atomic import replacing
from polydraft.engine.api import Engine
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.models.checkpoint import head_width
from polydraft.models.eagle import EagleCheckpoint, probe, rope_theta
from polydraft.train import conversations
from polydraft.train.conversations import Text
from polydraft.train.eagle import EagleHead, HeadShape, export, unrolled_loss
from polydraft.train.loop import optimizers_for, save_atomically

__all__ = ["Options", "train_eagle"]

HELD_OUT = 0.04
"""Share of the texts that no step sees."""


@dataclass(frozen=True)
class Options:
    """minutes: of everything; half of it writes texts where none are given.  unroll: steps over the head's own output.
    draft_vocab: most tokens that it can draft.  batch: texts.  window: most tokens of each.  layers: default a low, a middle and the last.
    max_steps: that training ends at, where the minutes are not over.
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


@dataclass(frozen=True)
class Example:
    """A text with the target's states [T, F] in bfloat16 and, of each position, the logarithm of the sum of exponents of all logits."""

    text: Text
    states: Tensor
    totals: Tensor


def _layers(engine: Engine, wanted: tuple[int, ...] | None) -> tuple[int, ...]:
    offered = engine.target.offers
    last = max(offered.hidden, default=-1)
    if not (offered.embeddings and offered.head) or last < 3:
        raise IncompatibleError(
            f"{engine.summary()['target']} gives no hidden states, embeddings and head ({offered}), from which a head is trained. "
            "Load it with backend='compiled', 'static' or 'transformers'."
        )
    layers = wanted or (max(1, last // 4), last // 2 + 1, last)
    if not set(layers) <= set(offered.hidden) or layers[-1] != last:
        raise InvalidInputError(f"layers={layers} were given; expected layers in 0..{last}, {last} the last of them.")
    return layers


def _texts(
    engine: Engine, data: Sequence[Path], folder: Path, until: float, seed: int, report: Callable[[str], None]
) -> list[list[Text]]:
    """Texts of files, or of the target until the clock says `until`: at least one shard, and those that were there before."""
    if data:
        return [conversations.from_file(path, engine) for path in data]
    folder.mkdir(parents=True, exist_ok=True)
    found, known = [conversations.read_shard(path) for path in sorted(folder.glob("[0-9]*.npz"))], set[str]()
    while not found or time.monotonic() < until:
        began = time.monotonic()
        shard = conversations.write_shard(engine, len(found), seed=seed, count=32, known=known)
        conversations.save_shard(folder / f"{len(found):05d}.npz", shard)
        found.append(shard)
        size = sum(len(t.tokens) for t in shard)
        report(f"{sum(len(t.tokens) for s in found for t in s)} tokens written, {size / (time.monotonic() - began):.0f} tokens/s")
    return found


@torch.inference_mode()
def _examples(engine: Engine, texts: Sequence[Text], path: Path, layers: Sequence[int]) -> list[Example]:
    """The target's states along texts, from the file where they are kept, or made now."""
    ends = np.cumsum([len(t.tokens) for t in texts])
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        rows, totals = list[Tensor](), list[Tensor]()
        for text in texts:
            engine.target.release([0])
            found = engine.target.prefill([0], [text.tokens.tolist()], hidden=layers).hidden
            rows.append(torch.cat([found[layer][0] for layer in layers], -1).bfloat16())
            last = found[layers[-1]][0].split(64)
            totals.append(torch.cat([engine.target.head(x).float().logsumexp(-1) for x in last]))  # pyright: ignore
        engine.target.release([0])
        with replacing(path) as file:
            np.savez(file, states=torch.cat(rows).cpu().view(torch.int16).numpy(), totals=torch.cat(totals).cpu().numpy())
    with np.load(path, allow_pickle=False) as found:
        states, totals = torch.from_numpy(found["states"]).view(torch.bfloat16), torch.from_numpy(found["totals"])
    pieces = zip(np.split(np.arange(len(totals)), ends[:-1]), texts, strict=True)
    return [Example(text, states[at[0] : at[-1] + 1], totals[at[0] : at[-1] + 1]) for at, text in pieces]


def draft_vocabulary(
    texts: Sequence[Text], vocab_size: int, most: int, chosen: np.ndarray | None = None
) -> tuple[np.ndarray, float]:
    """Tokens that were chosen before, or the most frequent tokens of what the target wrote, rising, and their share of it; equally rare ones: the lower number, which tokenizers learnt first."""
    counts = np.zeros(vocab_size)
    for text in texts:
        counts += np.bincount(text.tokens[text.given :], minlength=vocab_size)[:vocab_size]
    ids = np.sort(np.argsort(-counts, kind="stable")[: -(-min(most, vocab_size) // 8) * 8]) if chosen is None else chosen
    return ids, float(counts[ids].sum() / max(counts.sum(), 1))


class Batches:
    """Examples as tensors, padded; the target's laws at the draft vocabulary are made from its last states."""

    def __init__(self, output: Tensor, width: int, window: int, rng: np.random.Generator) -> None:
        self.output, self.width, self.window, self.rng = output.bfloat16(), width, window, rng

    def __call__(self, examples: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        n = min(self.window, max(len(e.totals) for e in examples))
        tokens, counted = torch.zeros(len(examples), n, dtype=torch.long), torch.zeros(len(examples), n, dtype=torch.bool)
        states, totals = (
            torch.zeros(len(examples), n, examples[0].states.shape[1], dtype=torch.bfloat16),
            torch.zeros(len(examples), n),
        )
        for j, e in enumerate(examples):
            begin = int(self.rng.integers(0, max(len(e.totals) - n, 0) + 1))
            here = slice(begin, begin + n)
            m = len(e.totals[here])
            tokens[j, :m], states[j, :m], totals[j, :m] = torch.from_numpy(e.text.tokens[here]), e.states[here], e.totals[here]
            counted[j, max(e.text.given - begin, 0) : m] = True
        laws = ((states[..., -self.width :] @ self.output.T).float() - totals[..., None]).exp_()
        return tokens, states, laws, counted


def _epochs(examples: Sequence[Example], size: int, rng: np.random.Generator) -> Iterator[list[Example]]:
    """Batches of texts of like length, without end."""
    while True:
        order = sorted(rng.permutation(len(examples)), key=lambda i: len(examples[i].totals) + int(rng.integers(0, 60)))
        batches = [[examples[i] for i in order[b : b + size]] for b in range(0, len(order), size)]
        rng.shuffle(batches)  # pyright: ignore[reportArgumentType]
        yield from batches


def train_eagle(
    engine: Engine,
    out: Path,
    options: Options,
    *,
    data: Sequence[Path] = (),
    start: Path | None = None,
    command: str = "",
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train a head for an engine's target and write it to `out`; returns its card. What `out` holds of an earlier run is taken up.

    data: files of text; without them the target writes its own.  start: folder of a head to begin with, whose layers and draft vocabulary
        stay; default a fresh one.

    Raises:
        InvalidInputError: layers that are not there, files without text, or too few minutes for one evaluation.
        IncompatibleError: a target whose hidden states cannot be had.
    """
    began, o = time.monotonic(), options
    target, first = engine.target, None if start is None else EagleCheckpoint.load(start)
    layers = _layers(engine, o.layers if first is None else first.layers)
    if o.minutes < 1:
        raise InvalidInputError(f"minutes={o.minutes} were given; expected at least 1, which writes, trains and looks once.")
    work = out / "work"
    shards = _texts(engine, data, work / "texts", began + 30 * o.minutes, o.seed, report)
    texts = [t for shard in shards for t in shard if len(t.tokens) > o.unroll + 8]
    made, size = list[Example](), sum(len(t.tokens) for t in texts) * len(layers) * probe(target).shape[1] * 2
    report(f"the target's states along {len(texts)} texts take {size / 1e6:.0f} MB on the disk, and as much of the memory")
    for i, shard in enumerate(shards):
        kept = [t for t in shard if len(t.tokens) > o.unroll + 8]
        made += _examples(engine, kept, work / "features" / f"{i:05d}-{'-'.join(map(str, layers))}.npz", layers)
        report(f"states of {i + 1} of {len(shards)} shards")
    rng = np.random.default_rng(o.seed)
    held = set(rng.permutation(len(made))[: max(1, int(HELD_OUT * len(made)))].tolist())
    trained = [e for i, e in enumerate(made) if i not in held]
    ids, share = draft_vocabulary(
        [e.text for e in trained], target.vocab_size, o.draft_vocab, None if first is None else first.ids
    )
    head = _fresh(engine, layers, ids) if first is None else _started(engine, first)
    figures, seconds, seen = _fit(head, trained, [made[i] for i in sorted(held)], rng, work, began, o, report)
    export(head, ids, target, out)
    tokens = sum(len(t.tokens) for t in texts)
    card = {"command": command, "kind": "eagle", "options": asdict(o), "tokens": tokens, "draft_vocab_coverage": share,
            "training_seconds": seconds, "tokens_seen": seen, **figures}  # fmt: skip
    with replacing(out / "card.json") as file:
        file.write(json.dumps(card, indent=2).encode())
    return card


def _embeddings(target: Any) -> Tensor:
    return torch.cat([target.embed(some).bfloat16() for some in torch.arange(target.vocab_size).split(4096)])


def _fresh(engine: Engine, layers: tuple[int, ...], ids: np.ndarray) -> EagleHead:
    """A head of its target's widths, before training."""
    target: Any = engine.target
    embeddings = _embeddings(target)
    h = embeddings.shape[1]
    output = target.head(torch.eye(h))[:, torch.from_numpy(ids)].T.bfloat16().contiguous()
    width = 64 if h % 64 == 0 else h // max(1, h // 32)
    torch.manual_seed(0)
    return EagleHead(HeadShape(h, -(-8 * h // 24) * 8, h // width, h // width, width, layers, 1e-5, 1e5), embeddings, output)


def _started(engine: Engine, first: EagleCheckpoint) -> EagleHead:
    """A head that was trained before."""
    first.check(engine.target)
    c = first.config
    shape = HeadShape(
        c.hidden_size,
        c.intermediate_size,
        c.num_attention_heads,
        c.num_key_value_heads,
        head_width(c),
        first.layers,
        c.rms_norm_eps,
        rope_theta(c),
    )
    head = EagleHead(shape, _embeddings(engine.target), first.output(engine.target).bfloat16())
    head.load_state_dict({name: tensor.float() for name, tensor in first.tensors.items() if name in head.state_dict()})
    return head


def _fit(
    head: EagleHead,
    examples: Sequence[Example],
    held: Sequence[Example],
    rng: np.random.Generator,
    work: Path,
    began: float,
    o: Options,
    report: Callable[[str], None],
) -> tuple[dict[str, Any], float, int]:
    """Train until the minutes are over. Returns held-out figures by depth, seconds and tokens."""
    optimizers = optimizers_for(head, muon_lr=o.lr, adam_lr=1e-3)
    groups = [group for each in optimizers for group in each.param_groups]
    base, saved, checkpoint = [group["lr"] for group in groups], time.monotonic(), work / "checkpoint.pt"
    device = head.output.device.type
    spent, steps, seen, recent = 0.0, 0, 0, list[float]()
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        head.load_state_dict(state["head"])
        for optimizer, one in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(one)
        spent, steps, seen = state["seconds"], state["steps"], state["seen"]
    left, start = max(30.0, 60 * o.minutes - (time.monotonic() - began) - spent), time.monotonic()
    batch, said = Batches(head.output, head.shape.hidden_size, o.window, rng), start

    def evaluate() -> dict[str, Any]:
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            found = [unrolled_loss(head, *batch(held[i : i + 8]), steps=o.unroll + 1)[1:] for i in range(0, len(held), 8)]
        kept, agreed = (np.mean([f[j] for f in found], 0).round(3).tolist() for j in range(2))
        return {"acceptance": kept, "agreement": agreed}

    def save() -> None:
        state = {"head": head.state_dict(), "optimizers": [each.state_dict() for each in optimizers]}
        save_atomically(state | {"seconds": spent + time.monotonic() - start, "steps": steps, "seen": seen}, checkpoint)

    for examples_now in _epochs(examples, o.batch, rng):
        done = max((time.monotonic() - start) / left, steps / o.max_steps)
        if done >= 1:
            break
        factor = min(1.0, (steps + 1) / 50) * min(1.0, 2.04 - 2 * done)
        for group, lr in zip(groups, base, strict=True):
            group["lr"] = lr * factor
        inputs = batch(examples_now)
        with torch.autocast(device, torch.bfloat16):
            loss, kept, _ = unrolled_loss(head, *inputs, steps=o.unroll, tv_weight=0.5 if done > 0.5 else 0.0)
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        with torch.autocast(device, torch.bfloat16):
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        steps, seen = steps + 1, seen + int(inputs[3].sum())
        recent.append(kept[0])
        now = time.monotonic()
        if now - said > 20:
            report(
                f"step {steps}, {seen / (spent + now - start):.0f} tokens/s, first drafts kept {np.mean(recent):.3f}, {(left - now + start) / 60:.1f} min left"
            )
            said, recent = now, []
        if now - saved > 100:
            save()
            report(f"held out: {evaluate()}")
            saved = time.monotonic()
    save()
    return evaluate(), round(spent + time.monotonic() - start, 1), seen
