"""Pictures as tokens: a vector-quantised tokenizer, and the folder of a class-conditional model over its codes.

van den Oord, Vinyals & Kavukcuoglu 2017 (VQ-VAE, arXiv 1711.00937); Sun et al. 2024 (LlamaGen, arXiv 2406.06525): a Llama writes the codes of a
picture row by row, and the first token is the class.

    0 .. K-1      codes of the codebook, T of them a picture       K + c    class c, the first token
    K + C         no class: with it the second sequence of classifier-free guidance begins

A folder holds `images.json`, `tokenizer.safetensors`, the codes of the training pictures (`codes.safetensors`, for drafts by n-gram), and a
model each in `target` and `draft`. All of them name the codebook by its fingerprint: parts of two codebooks are refused.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from polydraft.errors import IncompatibleError, InvalidInputError, ModelLoadError
from polydraft.files.schema import Array, ListOf, Number, Record, String, fault, read_json
from polydraft.models.torch.module import load_config

DIGITS = "digits"
"""The folder that comes with the package: handwritten digits of 8 by 8 pixels."""
_SCHEMA = Record(
    {
        "sizes": Record(
            dict.fromkeys(
                ("channels", "size", "halvings", "width", "num_codes", "code_size"), Number(1, 1 << 16)
            )
        ),
        "classes": ListOf(String(), 1, 1 << 12),
        "codebook": String("[0-9a-f]{64}"),
        "guidance": Number(0, 100, whole=False),
    }
)


@dataclass(frozen=True)
class ImageSizes:
    """channels, size: pictures of size by size pixels.  halvings: of the side, from pixels to codes.  width: channels inside.
    num_codes, code_size: the codebook, [num_codes, code_size]."""

    channels: int = 1
    size: int = 8
    halvings: int = 1
    width: int = 32
    num_codes: int = 128
    code_size: int = 4

    @property
    def grid(self) -> int:
        """Codes on a side."""
        return self.size >> self.halvings

    @property
    def num_tokens(self) -> int:
        """Codes of a picture."""
        return self.grid**2


class ImageTokenizer(nn.Module):
    """Pictures to codes and back. Values of pictures are in [0, 1].

    Example:
        >>> tokenizer = ImageTokenizer(ImageSizes())
        >>> codes = tokenizer.encode(torch.zeros(2, 1, 8, 8))
        >>> codes.shape, tokenizer.decode(codes).shape
        (torch.Size([2, 16]), torch.Size([2, 1, 8, 8]))
    """

    def __init__(self, sizes: ImageSizes) -> None:
        super().__init__()
        self.sizes = sizes
        w = sizes.width

        def between() -> list[nn.Module]:
            return [nn.GELU(), nn.Conv2d(w, w, 3, padding=1), nn.GELU()]

        down = list[nn.Module]()
        up = list[nn.Module]()
        for _ in range(sizes.halvings):
            down += [nn.GELU(), nn.Conv2d(w, w, 4, 2, 1)]
            up += [nn.ConvTranspose2d(w, w, 4, 2, 1), nn.GELU()]
        self.encoder = nn.Sequential(
            nn.Conv2d(sizes.channels, w, 3, padding=1), *down, *between(), nn.Conv2d(w, sizes.code_size, 1)
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(sizes.code_size, w, 3, padding=1),
            *between(),
            *up,
            nn.Conv2d(w, sizes.channels, 3, padding=1),
        )
        self.codebook = nn.Parameter(torch.randn(sizes.num_codes, sizes.code_size))

    def latents(self, pictures: Float[Tensor, "B c s s"]) -> Float[Tensor, "B T d"]:
        """What is quantised."""
        return self.encoder(2 * pictures - 1).flatten(2).transpose(1, 2)

    def nearest(self, latents: Float[Tensor, "B T d"]) -> Int[Tensor, "B T"]:
        """The code nearest to each latent."""
        return torch.cdist(latents, self.codebook[None]).argmin(-1)

    def picture(self, latents: Float[Tensor, "B T d"]) -> Float[Tensor, "B c s s"]:
        """Pixels from latents or codebook rows, not yet within [0, 1]."""
        grid = self.sizes.grid
        return (self.decoder(latents.transpose(1, 2).unflatten(2, (grid, grid))) + 1) / 2

    @torch.no_grad()
    def encode(self, pictures: Float[Tensor, "B c s s"]) -> Int[Tensor, "B T"]:
        """Codes, row by row."""
        return self.nearest(self.latents(pictures))

    @torch.no_grad()
    def decode(self, codes: Int[Tensor, "B T"]) -> Float[Tensor, "B c s s"]:
        """Pixels.

        Raises:
            InvalidInputError: another number of codes than a picture has, or ids that are no codes.
        """
        if codes.shape[1] != self.sizes.num_tokens or not (
            int(codes.min()) >= 0 and int(codes.max()) < self.sizes.num_codes
        ):
            raise InvalidInputError(
                f"codes of shape {tuple(codes.shape)} from {int(codes.min())} to {int(codes.max())} were given; expected "
                f"[B, {self.sizes.num_tokens}] in [0, {self.sizes.num_codes}). Generate whole pictures with this codebook's model."
            )
        return self.picture(self.codebook[codes]).clamp(0, 1)

    @property
    def fingerprint(self) -> str:
        """Of the codebook: SHA-256 of its numbers."""
        return hashlib.sha256(self.codebook.detach().float().numpy().tobytes()).hexdigest()

    def neighbours(self, num_neighbours: int, num_tokens: int | None = None) -> Int[Tensor, "V m"]:
        """The nearest other codes of each code, nearest first, by the distance of their rows; other tokens have none (-1).

        num_tokens: of the model, classes among them; None: the codes alone.

        Raises:
            InvalidInputError: more neighbours than there are other codes, or none.
        """
        K = self.sizes.num_codes
        if not 1 <= num_neighbours < K:
            raise InvalidInputError(
                f"{num_neighbours} neighbours were asked for; expected from 1 to {K - 1}, as there are {K} codes."
            )
        rows = self.codebook.detach().double()
        distance = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(
            torch.inf
        )
        nearest = distance.argsort(dim=1, stable=True)[:, :num_neighbours]
        return torch.cat([nearest, nearest.new_full(((num_tokens or K) - K, num_neighbours), -1)])


def digits_folder() -> Path:
    """The folder that comes with the package.

    Example:
        >>> len(ImageFolder.load(digits_folder()).classes)
        10
    """
    return Path(__file__).parent / DIGITS


@dataclass(frozen=True)
class ImageFolder:
    """What belongs together: tokenizer, classes by name, the codes of the training pictures [n, 1 + T] behind their classes.

    guidance: the scale on whose distribution the draft was distilled.
    """

    path: Path
    tokenizer: ImageTokenizer
    classes: tuple[str, ...]
    guidance: float
    texts: Int[np.ndarray, "n S"]

    @property
    def num_tokens(self) -> int:
        """Of the model: codes, classes, and no class."""
        return self.tokenizer.sizes.num_codes + len(self.classes) + 1

    @property
    def no_class(self) -> int:
        """The token with which an unconditional sequence begins."""
        return self.num_tokens - 1

    @property
    def others(self) -> list[int]:
        """Tokens that are no codes: a picture has none of them."""
        return list(range(self.tokenizer.sizes.num_codes, self.num_tokens))

    def class_token(self, name: str | int) -> int:
        """The token of a class, by its name or its number.

        Raises:
            InvalidInputError: a class that there is not.
        """
        names = [*self.classes]
        number = names.index(str(name)) if str(name) in names else name if isinstance(name, int) else -1
        if not 0 <= number < len(names):
            listing = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
            raise InvalidInputError(f"the class {name!r} was given; expected one of {listing}.")
        return self.tokenizer.sizes.num_codes + number

    @property
    def target(self) -> str:
        """Folder of the model."""
        return str(self.path / "target")

    @property
    def draft(self) -> str:
        """Folder of the smaller one."""
        return str(self.path / "draft")

    @classmethod
    def load(cls, path: str | Path) -> "ImageFolder":
        """Read a folder.

        Raises:
            ModelLoadError: a file that is missing or damaged.
            IncompatibleError: a tokenizer, codes or a model of another codebook, or of another number of tokens.
        """
        path = Path(path)
        card, weights, stored = _files(path)
        sizes = ImageSizes(**card["sizes"])
        if sizes.size % (1 << sizes.halvings):
            raise _damaged(path, f"pictures of {sizes.size} pixels cannot be halved {sizes.halvings} times")
        tokenizer = ImageTokenizer(sizes)
        expected = tokenizer.state_dict()
        formats = {name: Array(("float32",), tuple(x.shape)) for name, x in expected.items()}
        arrays: Mapping[str, Any] = {name: x.float().numpy() for name, x in weights.items()}
        texts = {name: x.long().numpy() for name, x in stored.items()}
        K = sizes.num_codes
        C = len(card["classes"])
        whole = {"texts": Array(("int64",), ("n", 1 + sizes.num_tokens), 0, K + C - 1)}
        if wrong := fault(arrays, Record(formats)) or fault(texts, Record(whole)):
            raise _damaged(path, wrong)
        tokenizer.load_state_dict({name: torch.from_numpy(x) for name, x in arrays.items()})
        target = cls(path, tokenizer.eval(), tuple(card["classes"]), float(card["guidance"]), texts["texts"])
        _check_codebook("images.json", card["codebook"], tokenizer)
        target._check_model(target.target)
        target._check_model(target.draft)
        return target

    def _check_model(self, part: str) -> None:
        """Refuse a model of another codebook, or of another number of tokens."""
        config = load_config(part)
        _check_codebook(f"{Path(part).name}/config.json", getattr(config, "codebook", None), self.tokenizer)
        if config.vocab_size != self.num_tokens:
            raise IncompatibleError(
                f"the model {part!r} has {config.vocab_size} tokens; expected {self.num_tokens}, {self.tokenizer.sizes.num_codes} codes, "
                f"{len(self.classes)} classes and no class. Take all parts from one training."
            )


def _files(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The card, the tokenizer's weights and the texts of codes.

    Raises:
        ModelLoadError: one of them is missing or damaged.
    """
    from safetensors.torch import load_file

    try:
        card = read_json((path / "images.json").read_bytes())
        weights = load_file(path / "tokenizer.safetensors")
        stored = load_file(path / "codes.safetensors")
    except Exception as error:  # safetensors' own among them
        raise _damaged(path, error) from error
    if wrong := fault(card, _SCHEMA):
        raise _damaged(path, wrong)
    return card, weights, stored


def _damaged(path: Path, why: object) -> ModelLoadError:
    return ModelLoadError(
        f"no model of pictures could be read from {str(path)!r}: {why}. Give a folder that `python -m studies.images` wrote."
    )


def _check_codebook(part: str, codebook: str | None, tokenizer: ImageTokenizer) -> None:
    if codebook != tokenizer.fingerprint:
        raise IncompatibleError(
            f"{part} belongs to the codebook {str(codebook)[:12]} and the tokenizer holds {tokenizer.fingerprint[:12]}; expected the same. "
            "Take all parts from one training."
        )
