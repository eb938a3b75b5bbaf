"""How good pictures are: a trained classifier's accuracy on them, and the Fréchet distance of its features from those of real pictures.

Heusel et al. 2017 (arXiv 1706.08500), with the features of a classifier that was trained on the same pictures in place of Inception's.

    distance  |m - m'|^2 + tr(S + S' - 2 (S S')^(1/2))      m, S  mean and covariance of the features
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from studies.images.data import Pictures, varied
from studies.theory.efficiency import Estimate

FEATURES = 32


class Classifier(nn.Module):
    """Convolutions, halved once for every doubling of the side above four, and a layer of features before the classes."""

    def __init__(self, channels: int, size: int, num_classes: int) -> None:
        super().__init__()
        layers = [nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU()]
        wide = 32
        while size > 4:
            layers += [nn.Conv2d(wide, 64, 3, 2, 1), nn.ReLU()]
            size = size // 2
            wide = 64
        self.body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(wide * size * size, FEATURES), nn.ReLU())
        self.head = nn.Linear(FEATURES, num_classes)

    @torch.no_grad()
    def features(self, pixels: Float[Tensor, "n c s s"]) -> Float[Tensor, "n f"]:
        """What the last layer reads."""
        return self.eval().body(pixels)


def train_classifier(pictures: Pictures, *, steps: int, seed: int) -> Classifier:
    """Cross-entropy on varied pictures."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Classifier(*pictures.pixels.shape[1:3], len(pictures.classes)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        chosen = torch.randint(len(pictures.labels), (64,), generator=generator)
        logits = model.head(model.body(varied(pictures.pixels[chosen], generator)))
        loss = nn.functional.cross_entropy(logits, pictures.labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def distance(a: Float[np.ndarray, "n f"], b: Float[np.ndarray, "m f"]) -> float:
    """Fréchet distance of two sets of features."""
    S = np.cov(a.T)
    T = np.cov(b.T)
    values, vectors = np.linalg.eigh(S)
    root = vectors * np.sqrt(values.clip(0)) @ vectors.T
    shared = np.sqrt(
        np.linalg.eigvalsh(root @ T @ root).clip(0)
    ).sum()  # tr (S T)^(1/2); features may be idle, S singular
    return float(((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(S) + np.trace(T) - 2 * shared)


@dataclass(frozen=True)
class Quality:
    """accuracy: share of the pictures that the classifier takes for their class.  distance: from real pictures. Errors by bootstrap."""

    accuracy: Estimate
    distance: Estimate


@torch.no_grad()
def quality(
    classifier: Classifier,
    pixels: Tensor,
    labels: Int[Tensor, " n"],
    real: Tensor,
    *,
    draws: int = 100,
    seed: int = 0,
) -> Quality:
    """Of pictures against real ones; both are drawn anew for the errors."""
    rng = np.random.default_rng(seed)
    own = classifier.features(pixels)
    others = classifier.features(real)
    right = (classifier.head(own).argmax(1) == labels).double().numpy()
    a = own.double().numpy()
    b = others.double().numpy()
    again = [
        distance(a[rng.integers(len(a), size=len(a))], b[rng.integers(len(b), size=len(b))])
        for _ in range(draws)
    ]
    accuracy = [right[rng.integers(len(right), size=len(right))].mean() for _ in range(draws)]
    return Quality(
        Estimate(float(right.mean()), float(np.std(accuracy))), Estimate(distance(a, b), float(np.std(again)))
    )
