"""How networks are trained: Muon for the hidden matrices, AdamW for the rest, looks at what is held out, and a checkpoint that a run takes up.

Muon: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/. The momentum of a matrix is replaced by the nearest
semi-orthogonal matrix (five Newton-Schulz steps), here in float32: bfloat16 is slow on most CPUs.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polydraft.errors import InvalidInputError, unknown_name
from polydraft.files.atomic import replacing
from polydraft.heads.losses import DECAY, LOSSES, loss_at
from polydraft.heads.recipe import Recipe
from polydraft.methods import registry
from polydraft.train.examples import Batches, TrainingExample, epochs

SAVED_EVERY = 100.0
"""Seconds from one checkpoint, and one look at what is held out, to the next: what a run that is killed loses."""
REPORTED_EVERY = 20.0
"""Seconds."""
LOOKED_AT = 32
"""Texts of these that a look reads; the last one reads all."""
PATIENCE = 6
"""Looks in a row without a better one, after which training stops; what was best is saved. Steps of full size, in the first half, may make it worse."""


def orthogonalise(matrix: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrix up to a spread of its singular values. [rows, columns] -> same."""
    a = 3.4445
    b = -4.7750
    c = 2.0315  # of a Newton-Schulz step, as published
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, b * gram + c * gram @ gram, x, beta=a)
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


class Muon(torch.optim.Optimizer):
    """Orthogonalised Nesterov momentum for 2-D parameters, scaled by sqrt(max(1, rows / columns))."""

    def __init__(self, params, lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalise(p.grad.lerp(buffer, group["momentum"]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * math.sqrt(max(1.0, p.shape[0] / p.shape[1])))


def _is_hidden(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and not name.startswith(
        ("lm_head", "model.embed_tokens", "markov_head", "confidence_head")
    )


def optimizers_for(model: nn.Module, *, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between embedding and output, AdamW for what has a row for each token and the norms; neither where there are none."""
    hidden = [p for n, p in model.named_parameters() if _is_hidden(n, p)]
    rest = [p for n, p in model.named_parameters() if not _is_hidden(n, p)]
    muon = [Muon(hidden, lr=muon_lr, weight_decay=0.02)] if hidden else []
    return [
        *muon,
        *([torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0)] if rest else []),
    ]


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


@dataclass
class Clock:
    """The minutes of a run: of everything from `began` on, by `now` in seconds; `spent` by runs before it on training alone."""

    now: Callable[[], float] = time.monotonic
    began: float = 0.0
    spent: float = 0.0

    def start(self, options: TrainingOptions) -> None:
        """Training begins: the minutes that are left are its own, half of one at least."""
        self.started = self.now()
        self.left = max(30.0, 60 * options.minutes - (self.started - self.began) - self.spent)
        self.piece_end = max(self.started + 30, self.began + 60 * options.piece)

    @property
    def training(self) -> float:
        """Seconds of training so far, those of runs before included."""
        return self.spent + self.now() - self.started

    @property
    def share(self) -> float:
        """Of the seconds of training, those that are over."""
        return self.training / (self.spent + self.left)


class Training:
    """A network on its way: what a step changes, and what the checkpoint holds of it."""

    def __init__(
        self,
        recipe: Recipe,
        network: nn.Module,
        batch: Batches,
        held: Sequence[TrainingExample],
        checkpoint: Path,
        options: TrainingOptions,
        report: Callable[[str], None],
        clock: Clock,
    ) -> None:
        self.recipe = recipe
        self.network = network
        self.batch = batch
        self.held = held
        self.checkpoint = checkpoint
        self.options = options
        self.report = report
        self.clock = clock
        self.optimizers = optimizers_for(network, muon_lr=options.lr, adam_lr=1e-3)
        self.groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        self.rates = [group["lr"] for group in self.groups]
        self.looked_at = held[:: -(-len(held) // LOOKED_AT)]
        self.steps = 0
        self.num_tokens = 0
        self.recent = list[float]()
        """Acceptance of first drafts, of the steps since the last report."""
        self.best = (-1.0, dict[str, Tensor]())
        """Held-out acceptance of all depths together, with its weights."""
        self.worse_looks = 0
        if checkpoint.exists():
            self._load()

    def _load(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True)
        self.network.load_state_dict(state["network"])
        for optimizer, optimizer_state in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer_state)
        self.clock.spent = state["seconds"]
        self.steps = state["steps"]
        self.num_tokens = state["seen"]
        self.best = state.get("best", self.best)
        self.batch.rng = np.random.default_rng((self.options.seed, self.steps))

    def _save(self) -> None:
        state = {
            "network": self.network.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "seconds": self.clock.training,
            "steps": self.steps,
            "seen": self.num_tokens,
            "best": self.best,
        }
        with replacing(self.checkpoint) as file:
            torch.save(state, file)

    def evaluate(self, held: Sequence[TrainingExample]) -> dict[str, Any]:
        """Acceptance and agreement by depth."""
        batch = self.batch
        rng = np.random.default_rng(self.options.seed)  # the same places in the texts at every look
        same = Batches(batch.output, batch.window, rng, batch.device)
        with torch.no_grad(), torch.autocast(batch.device, torch.bfloat16):
            figures = [
                self.recipe.loss(
                    self.network, same(held[i : i + 8]), steps=self.options.unroll + 1, loss=LOSSES["kl"]
                )
                for i in range(0, len(held), 8)
            ]
        return {
            name: np.nanmean([getattr(f, name) for f in figures], 0).round(3).tolist()
            for name in ("acceptance", "agreement")
        }

    def _step(self, examples: Sequence[TrainingExample], done: float) -> None:
        """One step of the optimizers; rates rise over 50 steps, and fall in the second half."""
        factor = min(1.0, (self.steps + 1) / 50) * min(1.0, 2.04 - 2 * done)
        for group, lr in zip(self.groups, self.rates, strict=True):
            group["lr"] = lr * factor
        inputs = self.batch(examples)
        o = self.options
        with torch.autocast(self.batch.device, torch.bfloat16):
            loss, acceptance, _ = self.recipe.loss(
                self.network, inputs, steps=o.unroll, loss=loss_at(o.loss, done, o.decay)
            )
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        with torch.autocast(self.batch.device, torch.bfloat16):
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        self.num_tokens += int(inputs.counted.sum())
        self.recent.append(acceptance[0])

    def _tell(self) -> None:
        left = (self.clock.left - self.clock.now() + self.clock.started) / 60
        self.report(
            f"step {self.steps}, {self.num_tokens / self.clock.training:.0f} tokens/s, "
            f"first drafts accepted {np.mean(self.recent):.3f}, {left:.1f} min left"
        )
        self.recent = []

    def _look(self, done: float) -> None:
        """At what is held out: the best weights so far are kept."""
        figures = self.evaluate(self.looked_at)
        self.report(f"held out: {figures}")
        acceptance = sum(figures["acceptance"])
        if acceptance > self.best[0]:
            self.best = (acceptance, {name: x.clone() for name, x in self.network.state_dict().items()})
            self.worse_looks = 0
        elif done < 0.5:
            self.worse_looks = 0
        else:
            self.worse_looks += 1
        self._save()

    def run(self, examples: Sequence[TrainingExample]) -> None:
        """Train until the minutes, or the piece of them, are over; the network is then the best one that was met."""
        clock = self.clock
        reported = clock.started
        saved = clock.started
        for batch in epochs(examples, self.options.batch, self.batch.rng):
            done = max(clock.share, self.steps / self.options.max_steps)
            if done >= 1:
                break
            if clock.now() > clock.piece_end:
                self.report(f"a piece is over, {done:.0%} of the training is done: --resume goes on with it")
                break
            self._step(batch, done)
            now = clock.now()
            if now - reported > REPORTED_EVERY:
                self._tell()
                reported = now
            if now - saved > SAVED_EVERY:
                self._look(done)
                saved = clock.now()
                if self.worse_looks == PATIENCE:
                    self.report(f"what is held out was better {self.worse_looks} looks ago: training ends")
                    break
        self._save()
        if sum(self.evaluate(self.looked_at)["acceptance"]) < self.best[0]:
            self.network.load_state_dict(self.best[1])

    def figures(self) -> dict[str, Any]:
        """What the card says: seconds and tokens, held-out figures by depth, and those of the recipe's last part."""
        seconds = round(self.clock.training, 1)
        held = self.held
        finished = self.recipe.finish(
            self.network, (self.batch(held[i : i + 8]) for i in range(0, len(held), 8))
        )
        for name, value in finished.items():
            self.report(f"{name}: {value}")
        return {
            "training_seconds": seconds,
            "tokens_seen": self.num_tokens,
            **self.evaluate(held),
            **finished,
        }
