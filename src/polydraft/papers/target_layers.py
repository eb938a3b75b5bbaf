"""A target whose own layers a drafter runs."""

from typing import Any

from polydraft.errors import IncompatibleError
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.loading.checkpoint import Checkpoint
from polydraft.models.torch.llama_layer import why_not_llama


def llama_checkpoint(target: Any, name: str) -> Checkpoint:
    """Configuration and weights of a target whose own layers a head runs. name: the drafter's.

    Raises:
        IncompatibleError: a target of another family, or whose weights cannot be read any more.
    """
    checkpoint: Checkpoint | None = target.checkpoint
    reason = "its layers cannot be had" if checkpoint is None else why_not_llama(checkpoint.config)
    if checkpoint is None or reason:
        raise IncompatibleError(
            f"the drafter {name!r} was given a target of type {type(target).__name__}: {reason}; expected a model of the Llama family, whose "
            "layers it runs. Load it with backend='compiled' or 'transformers', from a folder of `save_pretrained` or a GGUF file."
        )
    return checkpoint


def compiled(target: Any, name: str) -> CompiledModel:
    """The target, of a drafter that shares its layers.

    Raises:
        IncompatibleError: one that is not compiled.
    """
    if not isinstance(target, CompiledModel):
        raise IncompatibleError(
            f"the drafter {name!r} was asked for a target of type {type(target).__name__}; expected a compiled one, whose layers and cache "
            "it shares. Load it with backend='compiled'."
        )
    return target
