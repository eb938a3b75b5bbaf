"""Models and tokenizers from folders, with errors that say what is wrong with the folder."""

from pathlib import Path
from typing import Any

import torch

from polydraft.core import Target
from polydraft.errors import IncompatibleError, InvalidInputError, ModelLoadError
from polydraft.models.hf import HFTarget
from polydraft.models.llama import CompiledLlama

__all__ = ["check_same_vocabulary", "encode", "load_model", "load_tokenizer"]

BACKENDS = ("auto", "compiled", "transformers")


def _check_folder(name: str) -> None:
    """Say what a local folder lacks; a name that is no folder is left to transformers' own look-up."""
    folder = Path(name)
    looks_local = folder.is_absolute() or name.startswith((".", "~")) or len(folder.parts) > 2
    if not folder.is_dir():
        if looks_local or folder.exists():
            raise ModelLoadError(f"model folder {name!r} was given; there is no such folder. Give the folder that holds config.json.")
        return
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"model folder {name!r} has no config.json; give the folder that `save_pretrained` wrote.")
    if not list(folder.glob("*.safetensors")):
        raise ModelLoadError(f"model folder {name!r} has no *.safetensors weights; convert them with `save_pretrained(safe_serialization=True)`.")


def load_transformers(name: str, *, dtype: str | None = None, device: str | None = None) -> Any:
    """A causal language model in eval mode; safetensors only, no remote code.

    Raises:
        ModelLoadError: folder missing, without weights or configuration, or with corrupt weights.
        InvalidInputError: an unknown dtype.
    """
    from transformers import AutoModelForCausalLM

    _check_folder(name)
    wanted = getattr(torch, dtype, None) if dtype else torch.float32 if (device or "cpu") == "cpu" else "auto"
    if wanted != "auto" and not isinstance(wanted, torch.dtype):
        raise InvalidInputError(f"dtype={dtype!r} was given; expected float32, bfloat16 or float16.")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=wanted, use_safetensors=True, trust_remote_code=False, attn_implementation="sdpa"
        )
    except Exception as error:
        raise ModelLoadError(
            f"model {name!r} could not be loaded ({type(error).__name__}: {str(error).splitlines()[0][:200]}). "
            "Check that the folder holds a complete causal language model with readable safetensors weights."
        ) from error
    return model.to(device or "cpu").eval()


def load_model(
    name: str,
    *,
    dtype: str | None = None,
    device: str | None = None,
    backend: str = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int = 8,
) -> Target:
    """A target (or draft) model: compiled for the Llama family in float32 on a CPU, else through transformers.

    backend: "compiled", "transformers", or "auto".

    Raises:
        ModelLoadError, InvalidInputError: see `load_transformers`.
        IncompatibleError: backend="compiled" for a model that it does not cover; says why.
    """
    if backend not in BACKENDS:
        raise InvalidInputError(f"backend={backend!r} was given; expected one of {', '.join(BACKENDS)}.")
    model = load_transformers(name, dtype=dtype, device=device)
    reason = CompiledLlama.why_unsupported(model)
    if backend == "compiled" and reason:
        raise IncompatibleError(f"backend='compiled' was asked for {name!r}, but {reason}. Use backend='transformers'.")
    kind = HFTarget if reason or backend == "transformers" else CompiledLlama
    return kind(model, max_model_len=max_model_len, max_num_seqs=max_num_seqs)


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model folder.

    Raises:
        ModelLoadError: none there, or unreadable.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        raise ModelLoadError(
            f"no tokenizer could be loaded from {name!r} ({type(error).__name__}: {str(error).splitlines()[0][:200]}). "
            "Save the model's tokenizer into its folder."
        ) from error


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, with special tokens as the tokenizer adds them and BOS never twice."""
    ids = list(tokenizer(text)["input_ids"])
    bos = tokenizer.bos_token_id
    return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


def check_same_vocabulary(target: Any, draft: Any, target_size: int, draft_size: int) -> None:
    """Raise IncompatibleError unless both tokenizers give every token the same id; padding rows of embeddings may differ."""
    ours, theirs = target.get_vocab(), draft.get_vocab()
    differing = sorted((token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)), key=str)
    if differing:
        token = differing[0]
        raise IncompatibleError(
            f"target and draft have different vocabularies: {len(differing)} tokens differ, for example {token!r} is "
            f"{ours.get(token)} in the target and {theirs.get(token)} in the draft. Use a draft trained with the target's tokenizer."
        )
    if max(ours.values()) >= min(target_size, draft_size):
        raise IncompatibleError(
            f"the vocabulary has ids up to {max(ours.values())}, but the models have {target_size} (target) and {draft_size} (draft) "
            "rows of logits. Use models that cover the whole vocabulary."
        )
