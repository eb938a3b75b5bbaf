"""A layer behind the model's own that predicts the token after the next one: what its tensors are called in both kinds of files.

DeepSeek-AI 2024, DeepSeek-V3, section 2.2 (arXiv 2412.19437). Its file calls it multi-token prediction, or next-n; `heads.mtp` drafts with it. Its input
is a projection of the next token's embedding and the model's last state, both normed; embeddings and output rows are the model's.
"""

from collections.abc import Collection

__all__ = ["FOLDER_NAMES", "GGUF_NAMES", "in_folder", "in_gguf"]

LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
    **{name: name for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm") for name in [f"self_attn.{part}"]},
    **{name: name for part in ("gate_proj", "up_proj", "down_proj") for name in [f"mlp.{part}"]},
}
FOLDER_NAMES = {
    "project": "mtp.fc",
    "midlayer.input_layernorm": "mtp.pre_fc_norm_embedding",
    "midlayer.hidden_norm": "mtp.pre_fc_norm_hidden",
    "norm": "mtp.norm",
    **{f"midlayer.{ours}": f"mtp.layers.0.{theirs}" for ours, theirs in LAYER_NAMES.items()},
}
"""`heads.mtp`'s names -> those of folders."""
GGUF_NAMES = {
    "project": "nextn.eh_proj",
    "midlayer.input_layernorm": "nextn.enorm",
    "midlayer.hidden_norm": "nextn.hnorm",
    "norm": "nextn.shared_head_norm",
    "midlayer.attention_norm": "attn_norm",
    "midlayer.post_attention_layernorm": "post_attention_norm",
    "midlayer.self_attn.o_proj": "attn_output",
    **{f"midlayer.self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"midlayer.self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"midlayer.mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
"""The same -> those of GGUF files, without the block."""


def in_folder(tensors: Collection[str]) -> dict[str, str] | None:
    """Where the tensors of the layer are, by `heads.mtp`'s names; None where there is none, or one of other parts.

    Example:
        >>> in_folder(["mtp.fc.weight"]) is None
        True
    """
    names = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in FOLDER_NAMES.items()}
    parts = {name for name in tensors if name.startswith("mtp.")}
    return names if parts == {*names.values()} else None


def in_gguf(tensors: Collection[str], block: int) -> dict[str, str] | None:
    """Likewise for a GGUF file, whose layer is this block."""
    names = {f"{ours}.weight": f"blk.{block}.{theirs}.weight" for ours, theirs in GGUF_NAMES.items()}
    parts = {name for name in tensors if name.startswith(f"blk.{block}.")}
    return names if parts == {*names.values()} else None
