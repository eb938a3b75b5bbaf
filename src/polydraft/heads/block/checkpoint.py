"""Folders of block heads: DeepSpec's DSpark and DFlash, the DFlash authors' and JetSpec's, vLLM speculators' `dflash` and `dspark`, and what is trained here.

Each is read as one form, whose fields the configuration then has:

    diffusion_layers   whose states it reads, as a target counts them: DeepSpec's and JetSpec's `target_layer_ids` L is the state L + 1
    slots              places of a block, the last token's among them; `block_size` but for ours, which counts masks
    in_place           whether a place foretells its own token, so that the last token's foretells nothing; else the next one's (DeepSpec)
    sees               of each layer what its places see of the block: "all", "causal", or "apart": the last token alone is not shown the masks (ours)
    windows            of each layer how many tokens before the last one it reads, or None for all

Trap: "DFlash" is in place with all authors but DeepSpec's, and nothing but the architecture's name says so; the wrong place is silent.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from polydraft.core import Target
from polydraft.heads.checkpoint import HeadCheckpoint, has_whole_widths, layer_shapes, stored
from polydraft.heads.fields import words
from polydraft.heads.fit import flat
from polydraft.heads.markov import KINDS, Markov, markov, markov_shapes
from polydraft.models.mixers.workspace import CHUNK

GEMMA = "gemma4_text"
"""As configurations name Gemma 4."""
OWN = "dflash_config", "dflash", "dspark"
IN_CONFIG = {"mask_token_id", "target_layer_ids", "causal_head"}
"""Of `dflash_config`, what is understood."""


class BlockCheckpoint(HeadCheckpoint):
    """A block head; see the module."""

    kind = "block"
    LAYERS = "diffusion_layers"
    FIELDS = words(
        "block_size mask_token_id slots in_place sees windows target_layer_ids aux_hidden_state_layer_ids dflash_config markov_rank markov_head_type "
        "enable_confidence_head confidence_head_with_markov sample_from_anchor sliding_window_non_causal use_sliding_window "
        "hidden_activation final_logit_softcapping global_head_dim num_global_key_value_heads attention_k_eq_v rope_part"
    )

    @classmethod
    def reads(cls, settings: Mapping[str, Any]) -> bool:
        """Speculators' by its name, others by the architecture."""
        if "speculators_model_type" in settings:
            return settings["speculators_model_type"] in OWN
        named = any(
            part in str(name) for name in settings.get("architectures") or () for part in ("DSpark", "DFlash")
        )
        return named or "dflash_config" in settings

    @classmethod
    def read(cls, settings: dict[str, Any], folder: Path) -> tuple[dict[str, Any], Mapping[str, np.ndarray]]:
        """See the module.

        Raises:
            ValueError: what no block head computes.
        """
        tensors = stored(folder, "model.safetensors", "pytorch_model.bin")
        if "polydraft_head" in settings:
            layers = settings.get("num_hidden_layers") or 1
            ours = {
                "slots": settings["block_size"] + 1,
                "in_place": True,
                "sees": ["apart"] * layers,
                "windows": [None] * layers,
            }
            return ours | settings, tensors
        settings = flat(settings)
        form = cls._form(settings)
        if settings.get("model_type") == GEMMA:
            settings = _of_gemma(settings)
        return settings | form, tensors

    @classmethod
    def _form(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the module, of a published configuration."""
        block_config = settings.get("dflash_config") or {}
        if strange := sorted(block_config.keys() - IN_CONFIG):
            raise ValueError(
                f"dflash_config.{strange[0]}={block_config[strange[0]]!r} is not understood, and may change what the head drafts"
            )
        speculators = settings.get("speculators_model_type")
        names = [str(name) for name in settings.get("architectures") or ()]
        if speculators:
            layers = settings["aux_hidden_state_layer_ids"]
            in_place = not settings.get("sample_from_anchor", speculators == "dspark")
        else:
            outputs = block_config.get("target_layer_ids", settings.get("target_layer_ids"))
            layers = [layer + 1 for layer in outputs or _spread(settings)]
            in_place = bool(block_config) or "DFlashDraftModel" in names
        sliding = _sliding(settings)
        causal = bool(block_config.get("causal_head"))
        causal_window = not settings.get("sliding_window_non_causal")
        mask = block_config.get("mask_token_id", settings.get("mask_token_id"))
        if not isinstance(mask, int) or not 0 <= mask < settings["vocab_size"]:
            raise ValueError(
                f"mask_token_id={mask!r}: expected a token below vocab_size={settings['vocab_size']}"
            )
        return {
            cls.LAYERS: layers,
            "slots": settings["block_size"],
            "in_place": in_place,
            "sees": ["causal" if causal or (slides and causal_window) else "all" for slides in sliding],
            "windows": [settings["sliding_window"] if slides else None for slides in sliding],
            "mask_token_id": mask,
            "markov_head_type": _bias_kind(settings),
            "use_sliding_window": None,
        }

    @property
    def compiles(self) -> bool:
        """Whether the compiled form runs it: Llama's and Qwen's layers, and not more places than are in work at once."""
        return (
            self.config.model_type != GEMMA and self.config.slots <= CHUNK and has_whole_widths(self.config)
        )

    @property
    def depths(self) -> int:
        """Tokens that a block drafts."""
        return int(self.config.slots) - bool(self.config.in_place)

    @property
    def bias_kind(self) -> str:
        """Of `markov.KINDS`."""
        return self.config.markov_head_type

    def bias(self, slots: int, depths: int, num_drafts: int) -> Markov:
        """See `heads.markov`."""
        sure_of_word = self.config.confidence_head_with_markov and self.bias_kind != "none"
        return markov(self.tensors, self.bias_kind, slots, depths, num_drafts, sure_of_word=sure_of_word)

    def parts(self) -> dict[str, tuple[int, ...]]:
        """See `HeadCheckpoint.parts`; with those of a Markov part and of a confidence part."""
        config = self.config
        h = config.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (h, (len(self.layers) or 3) * self.state_size)}
        shapes |= {"hidden_norm.weight": (h,), "norm.weight": (h,)}
        shapes |= {"mask": (h,)} if config.mask_token_id is None else {}
        for l in range(config.num_hidden_layers):
            prefix = f"layers.{l}."
            shapes |= (
                _gemma_layer(config, prefix) if config.model_type == GEMMA else layer_shapes(config, prefix)
            )
        shapes |= markov_shapes(self.bias_kind, config.markov_rank, h, config.vocab_size, len(self.ids))
        if config.enable_confidence_head:
            width = h + (config.markov_rank if config.confidence_head_with_markov else 0)
            shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
        return shapes

    def layers_of(self, target: Target) -> tuple[int, ...]:
        """As the folder says."""
        return self.layers


def _gemma_layer(config: Any, prefix: str) -> dict[str, tuple[int, ...]]:
    """Of a full layer of Gemma 4."""
    shapes = layer_shapes(config, prefix, head_norms=True)
    if config.attention_k_eq_v:
        del shapes[f"{prefix}self_attn.v_proj.weight"]
    norms = ("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight")
    return {
        **shapes,
        **{prefix + name: (config.hidden_size,) for name in norms},
        f"{prefix}layer_scalar": (1,),
    }


def _sliding(settings: Mapping[str, Any]) -> list[bool]:
    """Whether each layer has a window.

    Raises:
        ValueError: layers that are not understood.
    """
    num_layers = settings["num_hidden_layers"]
    kinds = settings.get("layer_types") or ["full_attention"] * num_layers
    if len(kinds) != num_layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"layer_types={kinds!r}: expected full_attention or sliding_attention, {num_layers} of them"
        )
    sliding = [kind == "sliding_attention" for kind in kinds]
    if any(sliding) and not ("speculators_model_type" in settings and settings.get("sliding_window")):
        raise ValueError("sliding layers are understood of speculators' heads with a sliding_window alone")
    return sliding


def _bias_kind(settings: Mapping[str, Any]) -> str:
    """Of `markov.KINDS`.

    Raises:
        ValueError: a gate or an rnn of rank 0, or a kind that is not understood.
    """
    rank = settings.get("markov_rank") or 0
    kind = settings.get("markov_head_type") or "vanilla"
    if kind not in KINDS[1:] or (not rank and kind != "vanilla"):
        raise ValueError(
            f"markov_rank={rank} with markov_head_type={kind!r}: expected a rank, and one of {', '.join(KINDS[1:])}"
        )
    return kind if rank else "none"


def _spread(settings: Mapping[str, Any]) -> list[int]:
    """The target's layers where none are named, as the DFlash authors' code spreads them."""
    last = settings["num_target_layers"]
    count = settings["num_hidden_layers"]
    return [last // 2] if count == 1 else [round(1 + i * (last - 4) / (count - 1)) for i in range(count)]


def _of_gemma(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A Gemma 4 configuration with the widths and the rotation of its full layers under the names of other configurations."""
    rope = settings["rope_parameters"]["full_attention"]
    shared = settings.get("attention_k_eq_v") and settings.get("num_global_key_value_heads")
    if (
        rope.get("rope_type") not in ("proportional", "default")
        or settings.get("hidden_activation") != "gelu_pytorch_tanh"
    ):
        raise ValueError(
            f"rope_parameters={rope!r}, hidden_activation={settings.get('hidden_activation')!r} of a Gemma are not understood"
        )
    return {**settings} | {
        "rope_parameters": None,
        "rope_theta": rope["rope_theta"],
        "rope_part": rope.get("partial_rotary_factor", 1.0),
        "head_dim": settings.get("global_head_dim") or settings["head_dim"],
        "num_key_value_heads": shared or settings["num_key_value_heads"],
    }
