"""Settings of a model by the names of transformers' configurations, without transformers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["CheckpointConfig"]


@dataclass(frozen=True)
class CheckpointConfig:
    """What the compiled path reads of a configuration; its names and meanings are those of transformers' `LlamaConfig`.

    rope_parameters: `rope_theta`, `rope_type` and what that kind of scaling needs.
    eos_token_id: ids that end a text, or None.
    """

    model_type: str
    name_or_path: str
    vocab_size: int
    max_position_embeddings: int
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_parameters: Mapping[str, Any]
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_id: list[int] | None
    pad_token_id: int | None
    sliding_window: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
