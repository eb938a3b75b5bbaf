"""An EAGLE-3 head on disk: a folder with the authors' tensor names, of what is trained here and of what others published.

    config.json          a Llama configuration of one layer, with `draft_vocab_size` and `eagle_aux_hidden_state_layer_ids`
    model.safetensors    fc, midlayer.*, norm; d2t: draft token i is the target's token i + d2t[i]; lm_head of the draft vocabulary
    target_probe         of heads trained here: some embeddings of the target, by which another target is refused

Where `lm_head.weight` is missing the head uses the target's own output rows, which it was trained with.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from polydraft.core import Target
from polydraft.errors import IncompatibleError, ModelLoadError
from polydraft.models.checkpoint import head_width

__all__ = ["EagleCheckpoint", "probe", "rope_theta", "shipped"]

PROBED = 8
"""Tokens whose embeddings tell one target from another, at equal steps of the vocabulary."""


def probe(target: Target) -> Float[Tensor, "N h"]:
    """What a head remembers of its target."""
    ids = torch.arange(PROBED) * (target.vocab_size // PROBED)
    return target.embed(ids).float()  # pyright: ignore[reportAttributeAccessIssue] - offered, as `Needs` says


@dataclass(frozen=True)
class EagleCheckpoint:
    """config: of transformers, `LlamaConfig`.  layers: whose states it reads, as `Needs.hidden` counts them.  tensors: by name.
    ids: [D] the draft vocabulary, rising.
    """

    config: Any
    layers: tuple[int, ...]
    tensors: Mapping[str, Tensor]
    ids: np.ndarray

    @classmethod
    def load(cls, folder: str | Path) -> "EagleCheckpoint":
        """Read a folder.

        Raises:
            ModelLoadError: files that are missing or cannot be read, or tensors that are missing or misshapen, by name.
        """
        from safetensors.torch import load_file
        from transformers import LlamaConfig

        folder = Path(folder).expanduser()
        try:
            said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            tensors = load_file(folder / "model.safetensors")
            config = LlamaConfig(**said)
            layers = tuple(int(layer) for layer in said["eagle_aux_hidden_state_layer_ids"])
        except Exception as error:  # whatever these files hold: they are somebody else's
            raise ModelLoadError(
                f"{str(folder)!r} was given as an EAGLE-3 head, and cannot be read as one: {error!r}. Expected a folder with "
                "config.json (eagle_aux_hidden_state_layer_ids in it) and model.safetensors."
            ) from error
        made = cls(config, layers, tensors, _draft_ids(tensors, config.vocab_size))
        for name, shape in made.shapes().items():
            found = tuple(tensors[name].shape) if name in tensors else None
            if found != shape:
                raise ModelLoadError(f"the head in {str(folder)!r} has {name} of shape {found}; expected {shape}. Is it EAGLE-3?")
        return made

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the tensors that a head of this configuration has."""
        c = self.config
        h, inner, width = c.hidden_size, c.intermediate_size, head_width(c)
        q, kv = c.num_attention_heads * width, c.num_key_value_heads * width
        layer = {
            "input_layernorm": (h,),
            "hidden_norm": (h,),
            "post_attention_layernorm": (h,),
            "self_attn.q_proj": (q, 2 * h),
            "self_attn.k_proj": (kv, 2 * h),
            "self_attn.v_proj": (kv, 2 * h),
            "self_attn.o_proj": (h, q),
            "mlp.gate_proj": (inner, h),
            "mlp.up_proj": (inner, h),
            "mlp.down_proj": (h, inner),
        }
        own_head = {"lm_head.weight": (len(self.ids), h)} if "lm_head.weight" in self.tensors else {}
        named = {"fc.weight": (h, len(self.layers) * h), "norm.weight": (h,)}
        return named | own_head | {f"midlayer.{name}.weight": shape for name, shape in layer.items()}

    def check(self, target: Target) -> None:
        """Refuse another target than the head was trained for.

        Raises:
            IncompatibleError: another width, vocabulary or model.
        """
        name, theirs = getattr(target, "name", type(target).__name__), probe(target)
        if theirs.shape[1] != self.config.hidden_size or target.vocab_size > self.config.vocab_size:
            raise IncompatibleError(
                f"the head is for states of {self.config.hidden_size} numbers and {self.config.vocab_size} tokens; {name} has "
                f"{theirs.shape[1]} and {target.vocab_size}. Use the head of this target, or train one: polydraft train eagle."
            )
        ours = self.tensors.get("target_probe")
        if ours is not None and torch.cosine_similarity(ours.float().flatten(), theirs.flatten(), dim=0) < 0.98:
            raise IncompatibleError(
                f"the head was trained for another model than {name}: their embeddings differ. Use the head of this target, or "
                "train one: polydraft train eagle."
            )

    def output(self, target: Target) -> Float[Tensor, "D h"]:
        """Rows of the output matrix at the draft vocabulary: its own, or the target's."""
        if "lm_head.weight" in self.tensors:
            return self.tensors["lm_head.weight"].float()
        columns = target.head(torch.eye(self.config.hidden_size))  # pyright: ignore[reportAttributeAccessIssue]
        return columns[:, torch.from_numpy(self.ids)].T.float().contiguous()


def rope_theta(config: Any) -> float:
    """Base of the rotary frequencies."""
    return float((getattr(config, "rope_parameters", None) or {}).get("rope_theta") or config.rope_theta)


def _draft_ids(tensors: Mapping[str, Tensor], vocab_size: int) -> np.ndarray:
    """The target's tokens that a head can draft.

    Raises:
        ModelLoadError: a map beyond the vocabulary.
    """
    if "d2t" not in tensors:
        return np.arange(vocab_size)
    offsets = tensors["d2t"].numpy().astype(np.int64)
    ids = np.arange(len(offsets)) + offsets
    if len(ids) == 0 or ids[0] < 0 or ids[-1] >= vocab_size or (np.diff(ids) <= 0).any():
        raise ModelLoadError(f"the head's map d2t leads out of the {vocab_size} tokens or is not rising. Get the file again.")
    return ids


def shipped(target: Target) -> Path | None:
    """The head for this target that comes with the package, if there is one."""
    if not (target.offers.embeddings and target.offers.head and target.offers.hidden):
        return None
    for folder in sorted(Path(str(files("polydraft.models") / "heads")).glob("*/")):
        try:
            EagleCheckpoint.load(folder).check(target)
        except IncompatibleError:
            continue
        return folder
    return None
