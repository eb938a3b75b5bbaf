"""The GGUF file with a model's further layers alone, which llama.cpp's converter writes beside that of the model as `mtp-NAME.gguf`."""

import warnings
from collections.abc import Callable
from typing import TypeVar

from polydraft.errors import ModelLoadError, first_line
from polydraft.models.loading.gguf import GgufFile
from polydraft.models.loading.gguf_parts import FURTHER_LAYERS, first_parts, model_title

__all__ = ["predictor_beside"]

Predictor = TypeVar("Predictor")
SIZES = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads")


def predictor_beside(file: GgufFile, predictor_of: Callable[[GgufFile], Predictor | None]) -> Predictor | None:
    """What predicts a further token in the first file beside a model's that is for it, by its header; a line says what was taken, or why not.

    Files of other architectures are passed over in silence. predictor_of: a file's, or None.
    """
    beside, title = first_parts(file.path.parent.glob(f"{FURTHER_LAYERS}*.gguf")), FURTHER_LAYERS + model_title(file.path)
    for path in sorted(beside, key=lambda path: (model_title(path) != title, path.name)):
        if path.samefile(file.path):
            continue
        predictor = None
        try:
            other = GgufFile(path)
            if other.architecture != file.architecture:
                continue
            reason = _differs(other, file)
            predictor = None if reason else predictor_of(other)
        except ModelLoadError as error:
            reason = first_line(error)
        if predictor is not None:
            warnings.warn(f"the draft head {str(path)!r} was found and drafts; --drafter none does without it.", stacklevel=2)
            return predictor
        reason = reason or "it has no layer that predicts a further token and is run"
        warnings.warn(f"the draft head {str(path)!r} was found and is not used: {reason}.", stacklevel=2)
    return None


def _differs(file: GgufFile, model: GgufFile) -> str | None:
    """By what a file is not of a model, or None."""
    for name in SIZES:
        ours, theirs = (getattr(x.config, name) for x in (file, model))
        if ours != theirs:
            return f"it is for {name}={ours}, the model has {theirs}"
    tokens, theirs = (x.raw_strings("tokenizer.ggml.tokens") for x in (file, model))
    return None if tokens == theirs else "its tokens are others than the model's"
