"""What lies beside a model and drafts for it: the first that fits, and the GGUF file `mtp-NAME.gguf` that llama.cpp's converter writes beside that of the model."""

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from polydraft.errors import ModelLoadError, PolydraftError, first_line
from polydraft.models.loading.gguf import GgufWeights, weights_of_file
from polydraft.models.store.gguf_parts import FURTHER_LAYERS, first_parts, model_title
from polydraft.models.store.gguf_roles import TOKENS

Candidate = TypeVar("Candidate")
Companion = TypeVar("Companion")
SIZES = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads")
"""Settings that a file with further layers has of its model."""


def first_that_fits(
    candidates: Iterable[Candidate], opened: Callable[[Candidate], Companion | None]
) -> Companion | None:
    """The first companion that can be used; a line says which it is, or why one that was found is not.

    opened: makes it of a candidate; None passes over one in silence, an error says what is wrong with it.
    """
    for candidate in candidates:
        try:
            companion = opened(candidate)
        except PolydraftError as error:
            not_used(candidate, first_line(error))
            continue
        if companion is not None:
            warnings.warn(
                f"the draft head {str(candidate)!r} was found and drafts; --drafter none, or another one, does without it.",
                stacklevel=3,
            )
            return companion
    return None


def not_used(candidate: object, reason: str) -> None:
    """Say that a head was found, and why it does not draft."""
    warnings.warn(f"the draft head {str(candidate)!r} was found and is not used: {reason}", stacklevel=3)


def predictor_beside(
    file: GgufWeights, predictor_of: Callable[[GgufWeights], Companion | None]
) -> Companion | None:
    """What predicts a further token in the first file beside a model's that is for it, by its header.

    Files of other architectures are passed over in silence. predictor_of: a file's, or None.
    """
    title = FURTHER_LAYERS + model_title(file.store.path)
    beside = sorted(
        first_parts(file.store.path.parent.glob(f"{FURTHER_LAYERS}*.gguf")),
        key=lambda path: (model_title(path) != title, path.name),
    )

    def opened(path: Path) -> Companion | None:
        candidate = weights_of_file(path)
        if candidate.store.architecture != file.store.architecture:
            return None
        check_beside(candidate, file)
        predictor = predictor_of(candidate)
        if predictor is None:
            raise ModelLoadError("it has no layer that predicts a further token and is run.")
        return predictor

    return first_that_fits((path for path in beside if not path.samefile(file.store.path)), opened)


def check_beside(file: GgufWeights, model: GgufWeights) -> None:
    """Refuse a file with further layers that is for another model.

    Raises:
        ModelLoadError: by what differs.
    """
    for name in SIZES:
        ours, theirs = (getattr(x.config, name) for x in (file, model))
        if ours != theirs:
            raise ModelLoadError(f"it is for {name}={ours}, the model has {theirs}.")
    if file.store.raw_strings(TOKENS) != model.store.raw_strings(TOKENS):
        raise ModelLoadError("its tokens are others than the model's.")
