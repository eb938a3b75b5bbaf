"""Pictures from a class-conditional model of codes: the engine with guidance, and its answers as pixels."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from polydraft.core import Verifier
from polydraft.core.params import SamplingParams
from polydraft.decoding.guidance import Guidance
from polydraft.drafters.text.text_index import TextIndex
from polydraft.engine.api import Engine
from polydraft.engine.parts import slots
from polydraft.engine.sequence import Result
from polydraft.errors import InvalidInputError
from polydraft.models.load import load_model
from polydraft.papers.lantern.folder import ImageFolder, digits_folder
from polydraft.papers.lantern.latent import Latent, latent
from polydraft.papers.trigram.drafter import TrigramDrafter
from polydraft.papers.trigram.table import TrigramTable

DRAFTERS = {"model": "model:chain", "paths": "model", "tree": "model:top_k", "none": None}
"""Drafts of the smaller model: a chain, iid paths, its most probable tree; or none. Beside them "ngram": those of the training pictures' codes."""


@dataclass(frozen=True)
class Pictures:
    """What was generated: pixels in [0, 1], and the engine's results."""

    pixels: Float[Tensor, "B c s s"]
    results: Sequence[Result]


class ImageEngine:
    """Pictures by class.

    folder: an `ImageFolder`, or where one is; default the digits that come with the package.
    guidance: scale of classifier-free guidance; default that of the folder, 1 is none.
    drafter: one of `DRAFTERS`, or "ngram".  verifier: a name, a verifier, or "auto" for a lossless one; see `neighbourhoods` for those of LANTERN.
    depth, num_paths: of drafts; a tree has as many nodes as so many paths.  max_num_seqs: pictures that are made at the same time.

    Raises:
        ModelLoadError, IncompatibleError: a folder that is damaged, or whose parts are of different codebooks.
        InvalidInputError: a drafter or a scale that there is not.

    Example:
        >>> made = ImageEngine(depth=3).generate([3, 7], seed=1)
        >>> made.pixels.shape
        torch.Size([2, 1, 8, 8])
    """

    def __init__(
        self,
        folder: ImageFolder | str | Path | None = None,
        *,
        guidance: float | None = None,
        drafter: str = "model",
        verifier: str | Verifier = "auto",
        depth: int = 5,
        num_paths: int = 1,
        max_num_seqs: int = 16,
    ) -> None:
        image_folder = (
            folder if isinstance(folder, ImageFolder) else ImageFolder.load(folder or digits_folder())
        )
        if drafter not in (*DRAFTERS, "ngram"):
            raise InvalidInputError(
                f"the drafter {drafter!r} was given; expected one of {', '.join([*DRAFTERS, 'ngram'])}."
            )
        self.folder = image_folder
        scale = image_folder.guidance if guidance is None else guidance
        decoding = None if scale == 1 else Guidance([image_folder.no_class], scale)
        target = load_model(image_folder.target, max_num_seqs=max_num_seqs * slots(decoding), threads=1)
        small = (
            load_model(image_folder.draft, max_num_seqs=max_num_seqs, threads=1)
            if drafter not in ("none", "ngram")
            else None
        )
        source: Any = DRAFTERS.get(drafter)
        if drafter == "ngram":
            source = TrigramDrafter(
                TrigramTable.of(TextIndex.build(image_folder.texts, image_folder.num_tokens))
            )
        more: dict[str, Any] = (
            {} if source is None else {"depth": depth, "num_paths": num_paths, "verifier": verifier}
        )
        self.engine = Engine.of(target, draft_model=small, drafter=source, decoding=decoding, **more)

    def generate(
        self, classes: Sequence[str | int], *, temperature: float = 1.0, top_k: int = 0, seed: int = 0
    ) -> Pictures:
        """A picture of each class, by name or number.

        Raises:
            InvalidInputError: a class that there is not, or parameters out of their range.
        """
        if not len(classes):
            raise InvalidInputError(
                "no class was given; expected at least one of those of `ImageFolder.classes`."
            )
        prompts = [[self.folder.class_token(c)] for c in classes]
        length = self.folder.tokenizer.sizes.num_tokens
        bans = dict.fromkeys(self.folder.others, -torch.inf)
        params = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            max_tokens=length,
            logit_bias=bans,
            ignore_eos=True,
        )
        results = self.engine.generate(prompts, params)
        return Pictures(self.folder.tokenizer.decode(torch.tensor([r.token_ids for r in results])), results)


def neighbourhoods(folder: ImageFolder, *, num_neighbours: int | None = None, **budget: Any) -> Latent:
    """LANTERN for the codebook of a folder; budgets as of `latent`. num_neighbours: that are looked at; default half of the codes.

    Raises:
        InvalidInputError: a budget or a number of neighbours out of its range.

    Example:
        >>> neighbourhoods(ImageFolder.load(digits_folder()), delta=0.2).neighbours.shape
        (139, 64)
    """
    tokenizer = folder.tokenizer
    count = tokenizer.sizes.num_codes // 2 if num_neighbours is None else num_neighbours
    return latent(tokenizer.neighbours(count, folder.num_tokens), **budget)
