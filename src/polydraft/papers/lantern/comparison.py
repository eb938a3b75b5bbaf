"""Pictures side by side: without drafts, with an exact verifier, and with LANTERN at several budgets; what each accepts, and how far it is from the distribution."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import process_time
from typing import Any

from polydraft.core import Draft, Method, Verdict
from polydraft.papers.lantern.engine import ImageEngine, Pictures, neighbourhoods
from polydraft.papers.lantern.folder import ImageFolder
from polydraft.papers.lantern.latent import Latent


@dataclass
class MeteredVerifier:
    """A verifier of LANTERN that adds up, over the steps that it decides, how far what it emits is from the distribution; see `Latent.deviation`."""

    verifier: Latent
    total_variation: float = 0.0
    num_tokens: float = 0.0

    @property
    def info(self) -> Method:
        return self.verifier.info

    def __call__(self, draft: Draft, target_probs: Any) -> Verdict:
        tv, tokens = self.verifier.deviation(draft, target_probs)
        self.total_variation += float(tv.sum())
        self.num_tokens += float(tokens.sum())
        return self.verifier(draft, target_probs)

    @property
    def per_token(self) -> float:
        """Mean total variation of a token's distribution from the target's, in the contexts that the steps went through."""
        return self.total_variation / self.num_tokens if self.num_tokens else 0.0


@dataclass(frozen=True)
class ImageContender:
    """name: as it is shown.  drafter: see `ImageEngine`.  verifier: "auto", which is lossless, or LANTERN.  pictures: its own, a
    call each.  seconds: of the processor, that each call took."""

    name: str
    drafter: str = "model"
    verifier: str | MeteredVerifier | Latent = "auto"
    pictures: list[Pictures] = field(default_factory=list[Pictures])
    seconds: list[float] = field(default_factory=list[float])

    @property
    def tokens_per_step(self) -> float:
        """Codes over forward passes of the target, of all pictures."""
        stats = [result.stats for part in self.pictures for result in part.results]
        return sum(s.generated_tokens for s in stats) / sum(s.steps for s in stats)

    @property
    def total_variation(self) -> float:
        """Of a token, see `MeteredVerifier.per_token`; 0 of lossless verifiers."""
        return self.verifier.per_token if isinstance(self.verifier, MeteredVerifier) else 0.0

    def row(self) -> dict[str, Any]:
        """As plain data."""
        (first, *_), *_ = [part.results for part in self.pictures]
        figures = {"tokens_per_step": self.tokens_per_step, "total_variation": self.total_variation}
        return {
            "verifier": self.name,
            "drafter": self.drafter,
            "lossless_to": first.lossless_to if first.lossless else None,
            **figures,
        }


def contenders(
    folder: ImageFolder,
    drafter: str,
    deltas: Iterable[float],
    factors: Iterable[float],
    *,
    num_neighbours: int | None = None,
    measured: bool = True,
) -> list[ImageContender]:
    """Without drafts, with a lossless verifier, and LANTERN with each budget. measured: how far it is from the distribution, which costs time."""
    budgets = [(f"LANTERN, mass {d:g}", {"delta": d}) for d in deltas]
    budgets += [(f"LANTERN++, {f:g} times its own", {"factor": f}) for f in factors]
    verifiers = [
        (name, neighbourhoods(folder, num_neighbours=num_neighbours, **budget)) for name, budget in budgets
    ]
    relaxed = [
        ImageContender(name, drafter, MeteredVerifier(verifier) if measured else verifier)
        for name, verifier in verifiers
    ]
    return [ImageContender("without drafts", "none"), ImageContender("exact", drafter), *relaxed]


def compare(
    folder: ImageFolder,
    contenders: Sequence[ImageContender],
    classes: Sequence[str | int],
    *,
    samples: int = 1,
    seed: int = 0,
    temperature: float = 1.0,
    top_k: int = 0,
    step: Callable[[], object] = lambda: None,
    **options: Any,
) -> None:
    """Let each make `samples` pictures of every class, by turns. options: of `ImageEngine`.  step: called behind each call."""
    engines = [
        ImageEngine(folder, drafter=contender.drafter, verifier=contender.verifier, **options)
        for contender in contenders
    ]
    for n in range(samples):
        for contender, engine in zip(contenders, engines, strict=True):
            began = process_time()
            contender.pictures.append(
                engine.generate(classes, temperature=temperature, top_k=top_k, seed=seed + n)
            )
            contender.seconds.append(process_time() - began)
            step()


def draw(contenders: Sequence[ImageContender], path: Path) -> None:
    """A PNG: a row for each contender, a column for each picture."""
    import torch
    from matplotlib import pyplot as plt

    rows = [torch.cat([part.pixels for part in contender.pictures]) for contender in contenders]
    wide = max(map(len, rows))
    figure, axes = plt.subplots(
        len(rows), 1, figsize=(2 + 0.5 * wide, 0.62 * len(rows)), layout="constrained", squeeze=False
    )
    for contender, pixels, axis in zip(contenders, rows, axes[:, 0], strict=True):
        framed = torch.nn.functional.pad(pixels, (0, 1, 0, 1), value=1.0)
        strip = torch.cat(list(framed), 2).permute(1, 2, 0).numpy()
        axis.imshow(
            strip if strip.shape[2] == 3 else strip[..., 0],
            cmap="gray",
            vmin=0,
            vmax=1,
            interpolation="nearest",
        )
        axis.set_ylabel(contender.name, rotation=0, ha="right", va="center", fontsize=8)
        axis.set_xticks([])
        axis.set_yticks([])
        for spine in axis.spines.values():
            spine.set_visible(False)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
