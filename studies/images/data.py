"""Pictures with classes: scikit-learn's digits, or the emoji of an npm package."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.errors import InvalidInputError

PARTS = ("Component",)
"""Categories that are no pictures of their own: five tones of skin."""


@dataclass(frozen=True)
class Pictures:
    """pixels in [0, 1], and the number of the class of each."""

    pixels: Float[Tensor, "n c s s"]
    labels: Int[Tensor, " n"]
    classes: tuple[str, ...]

    def split(self, share: float, seed: int) -> tuple["Pictures", "Pictures"]:
        """Two parts at random, the second with this share."""
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(self.labels)))
        first = len(order) - round(share * len(order))
        parts = order[:first], order[first:]
        return tuple(Pictures(self.pixels[p], self.labels[p], self.classes) for p in parts)  # pyright: ignore[reportReturnType]


def digits() -> Pictures:
    """1,797 handwritten digits of 8 by 8 pixels (Alpaydin & Kaynak 1998, UCI, CC BY 4.0), as scikit-learn ships them."""
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    pixels = torch.from_numpy(found.images / 16).float()[:, None]
    return Pictures(pixels, torch.from_numpy(found.target).long(), tuple(str(i) for i in range(10)))


def varied(pixels: Float[Tensor, "n c s s"], generator: torch.Generator) -> Float[Tensor, "n c s s"]:
    """Each picture turned by up to 12 degrees, scaled by up to a tenth and moved by up to a tenth of its side; what comes in repeats the edge."""

    def drawn(most: float) -> Tensor:
        return (2 * torch.rand(len(pixels), generator=generator) - 1) * most

    angle = drawn(math.radians(12))
    scale = 1 + drawn(0.1)
    cos = scale * angle.cos()
    sin = scale * angle.sin()
    moves = torch.stack([cos, -sin, drawn(0.2), sin, cos, drawn(0.2)], 1).view(-1, 2, 3)
    places = torch.nn.functional.affine_grid(moves, list(pixels.shape), align_corners=False)
    return torch.nn.functional.grid_sample(pixels, places, padding_mode="border", align_corners=False)


def emoji(package: Path, size: int) -> Pictures:
    """Emoji pictures by category, on white and `size` pixels wide, from an unpacked npm package such as emoji-datasource-google (Noto, Apache-2.0).

    Raises:
        InvalidInputError: a folder that is no such package.
    """
    from PIL import Image

    listed = package / "emoji.json"
    folders = sorted(package.glob("img/*/64"))
    if not listed.exists() or not folders:
        raise InvalidInputError(
            f"{str(package)!r} was given; expected the folder of an npm package with emoji.json and img/NAME/64. "
            "Try: npm pack emoji-datasource-google, and unpack what it fetches."
        )
    listed_all = json.loads(listed.read_text(encoding="utf-8"))
    found = [e for e in listed_all if e["category"] not in PARTS and (folders[0] / e["image"]).exists()]
    classes = tuple(sorted({e["category"] for e in found}))
    pixels = list[Tensor]()
    for one in found:
        picture = Image.open(folders[0] / one["image"]).convert("RGBA")
        on = Image.new("RGBA", picture.size, "white")
        on.alpha_composite(picture)
        small = on.convert("RGB").resize((size, size), Image.Resampling.LANCZOS)
        pixels.append(torch.from_numpy(np.array(small)).permute(2, 0, 1) / 255)
    return Pictures(torch.stack(pixels), torch.tensor([classes.index(e["category"]) for e in found]), classes)
