"""What a drafter is trained on: texts with the target's states along them, saved once, and batches of them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from polydraft.engine.api import Engine
from polydraft.files.atomic import replacing
from polydraft.heads.recipe import Batch
from polydraft.train.conversations import TrainingText


@dataclass(frozen=True)
class TrainingExample:
    """A text with the target's states in bfloat16, [T, F] of the layers that are read and [T, h] of the last, and, of each position, the
    logarithm of the sum of exponents of all logits."""

    text: TrainingText
    states: Tensor
    last: Tensor
    totals: Tensor


@torch.inference_mode()
def _states(
    engine: Engine, texts: Sequence[TrainingText], stored: Sequence[int], last: int
) -> dict[str, Tensor]:
    """The target's states along texts, those of the stored layers side by side, and the logarithms of sums of exponents."""
    rows = list[Tensor]()
    totals = list[Tensor]()
    head: Any = engine.target.head  # pyright: ignore[reportAttributeAccessIssue]
    for text in texts:
        engine.target.release([0])
        loaded = engine.target.prefill([0], [text.tokens.tolist()], hidden=stored).hidden
        rows.append(torch.cat([torch.from_numpy(loaded[layer][0]) for layer in stored], -1).bfloat16())
        pieces = np.split(loaded[last][0], range(64, len(text.tokens), 64))
        totals.append(torch.cat([torch.from_numpy(head(x)).float().logsumexp(-1) for x in pieces]))
    engine.target.release([0])
    return {"states": torch.cat(rows).view(torch.int16), "totals": torch.cat(totals)}


def examples_of(
    engine: Engine, texts: Sequence[TrainingText], folder: Path, number: int, layers: Sequence[int], last: int
) -> list[TrainingExample]:
    """The target's states along texts, mapped from the files where they are saved, or made now: several trainings read the same pages."""
    stored = tuple(sorted({*layers, last}))
    name = f"{number:05d}-{'-'.join(map(str, stored))}"
    paths = {part: folder / f"{name}.{part}.npy" for part in ("states", "totals")}
    if not all(path.exists() for path in paths.values()):
        folder.mkdir(parents=True, exist_ok=True)
        for part, values in _states(engine, texts, stored, last).items():
            with replacing(paths[part]) as file:
                np.save(file, values.numpy())
    states, totals = (
        torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False)) for path in paths.values()
    )
    states = states.view(torch.bfloat16)
    width = states.shape[1] // len(stored)
    read = states[:, : len(layers) * width]
    last_states = states[:, -width:]
    examples = list[TrainingExample]()
    begin = 0
    for text in texts:
        at = slice(begin, begin + len(text.tokens))
        examples.append(TrainingExample(text, read[at], last_states[at], totals[at]))
        begin = at.stop
    return examples


class Batches:
    """Examples as tensors, padded; the target's distributions at the draft vocabulary are made from its last states. output: [D, h] its rows."""

    def __init__(self, output: Tensor, window: int, rng: np.random.Generator, device: str) -> None:
        self.output = output.to(device)
        self.window = window
        self.rng = rng
        self.device = device

    def __call__(self, examples: Sequence[TrainingExample]) -> Batch:
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


def epochs(
    examples: Sequence[TrainingExample], size: int, rng: np.random.Generator
) -> Iterator[list[TrainingExample]]:
    """Batches of texts of like length, without end."""
    while True:
        order = sorted(
            rng.permutation(len(examples)), key=lambda i: len(examples[i].totals) + int(rng.integers(0, 60))
        )
        batches = [[examples[i] for i in order[b : b + size]] for b in range(0, len(order), size)]
        rng.shuffle(batches)  # pyright: ignore[reportArgumentType]
        yield from batches
