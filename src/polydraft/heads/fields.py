"""Fields of a head's config.json: what every head reads, what changes nothing, and values of the rest that are computed.

A field that is none of these changes what the head computes in a way that nobody here knows: it is refused by name, and so is a tensor that no
part of the head reads. A head adds its own to `HeadCheckpoint.FIELDS`.
"""

from collections.abc import Iterable, Mapping
from typing import Any


def words(text: str) -> frozenset[str]:
    """Names that a text lists.

    Example:
        >>> sorted(words("b a"))
        ['a', 'b']
    """
    return frozenset(text.split())


READ = words(
    "polydraft_head architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim max_position_embeddings rms_norm_eps rope_theta rope_scaling rope_parameters draft_vocab_size "
    "num_target_layers speculators_model_type speculators_config embed_requires_grad target_hidden_size tie_word_embeddings"
)
"""That say how a head of any kind is computed, or for which target."""
INERT = words(
    "dtype torch_dtype transformers_version bos_token_id eos_token_id pad_token_id initializer_range use_cache pretraining_tp "
    "attention_dropout auto_map speculators_version transformer_layer_config max_window_layers target_model_name_or_path "
    "target_model_type target_text_model_type num_anchors step_loss_decay ttt_length _name_or_path name_or_path layer_types "
    "sliding_window head_type _attn_implementation _attn_implementation_autoset vocab_size_per_layer_input"
)
"""That change no draft, or nothing where another field says so: `layer_types` and `sliding_window` beside `use_sliding_window`."""
COMPUTED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "hidden_size_per_layer_input": (0,),
    "num_kv_shared_layers": (0,),
    "use_double_wide_mlp": (False,),
    "markov_rank": (0,),
    "markov_head_type": ("none",),
    "enable_confidence_head": (False,),
    "confidence_head_with_markov": (False,),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_sliding_window", "attention_k_eq_v", "enable_moe_block", "fc_norm", "norm_before_fc",
                     "norm_output", "norm_before_residual", "norm_final_state"), (False,)),
}  # fmt: skip
"""Of fields of which a head that says nothing of them computes these values alone."""


def unknown_field(settings: Mapping[str, Any], own: Iterable[str]) -> str | None:
    """The first field, with its value, that a head which reads `own` beside what all read does not understand.

    Example:
        >>> unknown_field({"hidden_size": 8, "norm_output": True}, ()), unknown_field({"norm_output": True}, ["norm_output"])
        ('norm_output=True', None)
    """
    known_fields = {*READ, *INERT, *own}
    for name, value in settings.items():
        if name not in known_fields and value is not None and value not in COMPUTED.get(name, ()):
            return f"{name}={value!r}"
    return None
