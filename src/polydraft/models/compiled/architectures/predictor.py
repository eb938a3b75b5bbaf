"""A layer behind a model's own that predicts the token after the next one: what its tensors are called in folders and in GGUF files.

DeepSeek-AI 2024, DeepSeek-V3, section 2.2 (arXiv 2412.19437). Its file calls it multi-token prediction, or next-n; `heads.mtp` drafts with it. It is a
layer of attention of the model's architecture, with its experts and gates, behind a projection of the next token's embedding and the model's last
state, both normed; embeddings and output rows are the model's.

    Qwen3-Next, Qwen3.5          mtp.fc, mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden, mtp.norm, and the layer as mtp.layers.0.*
    DeepSeek-V3, GLM             model.layers.N.{eh_proj, enorm, hnorm, shared_head.norm}, N behind the model's layers, and the layer beside them
    GGUF files                   blk.N.nextn.{eh_proj, enorm, hnorm, shared_head_norm}, and the layer beside them
"""

from collections.abc import Collection
from typing import NamedTuple

LAYER = "model.layers.0."
"""How names of the layer's own weights begin, among those of `PredictorTensors.layer`."""


class Layout(NamedTuple):
    """Names behind a prefix: of the projection, of the norms of the embedding, of the state and of what is put out; how the layer's own begin."""

    project: str
    embedding_norm: str
    state_norm: str
    norm: str
    layer: str = ""


OF_QWEN = Layout("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "layers.0.")
BEHIND = Layout("eh_proj", "enorm", "hnorm", "shared_head.norm")


class PredictorTensors(NamedTuple):
    """Where tensors are. outer: of what is around the layer, by `Layout`'s fields.  layer: the file's name by the one in a model's first layer."""

    outer: dict[str, str]
    layer: dict[str, str]


def in_folder(tensors: Collection[str], num_layers: int) -> PredictorTensors | None:
    """Where a folder has such a layer; None where there is none. num_layers: of the model.

    Example:
        >>> in_folder(["mtp.fc.weight"], 2) is None
        True
    """
    return _located(tensors, "mtp.", OF_QWEN) or _located(tensors, f"model.layers.{num_layers}.", BEHIND)


def in_gguf(tensors: Collection[str], num_layers: int) -> PredictorTensors | None:
    """Likewise for a GGUF file."""
    return _located(
        tensors,
        f"blk.{num_layers}.",
        Layout("nextn.eh_proj", "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm"),
    )


def _located(tensors: Collection[str], prefix: str, layout: Layout) -> PredictorTensors | None:
    copies = (
        "embed_tokens.weight",
        "shared_head.head.weight",
        "nextn.embed_tokens.weight",
        "nextn.shared_head_head.weight",
    )
    names = {
        name.removeprefix(prefix): name
        for name in tensors
        if name.startswith(prefix) and not name.endswith(copies)
    }
    outer_names = {field: f"{getattr(layout, field)}.weight" for field in Layout._fields[:-1]}
    if not names.keys() >= {*outer_names.values()}:
        return None
    layer = {
        LAYER + name.removeprefix(layout.layer): names[name]
        for name in names.keys() - {*outer_names.values()}
    }
    return PredictorTensors({field: names[name] for field, name in outer_names.items()}, layer)
