"""A layer behind a model's own that predicts the token after the next one: what its tensors are called in folders and in GGUF files.

DeepSeek-AI 2024, DeepSeek-V3, section 2.2 (arXiv 2412.19437). Its file calls it multi-token prediction, or next-n; `heads.mtp` drafts with it. It is a
layer of attention of the model's architecture, with its experts and gates, behind a projection of the next token's embedding and the model's last
state, both normed; embeddings and output rows are the model's.

    Qwen3-Next, Qwen3.5          mtp.fc, mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden, mtp.norm, and the layer as mtp.layers.0.*
    DeepSeek-V3, GLM             model.layers.N.{eh_proj, enorm, hnorm, shared_head.norm}, N behind the model's layers, and the layer beside them
    speculators                  mtp_layers.0.{input_proj, token_layernorm, hidden_layernorm, final_layernorm}, and the layer beside them
    GGUF files                   blk.N.nextn.{eh_proj, enorm, hnorm, shared_head_norm}, and the layer beside them
"""

from collections.abc import Collection
from typing import NamedTuple

from polydraft.errors import ModelLoadError

LAYER = "model.layers.0."
"""How names of the layer's own weights begin, among those of `PredictorTensors.layer`."""


class PredictorNames(NamedTuple):
    """Names behind a prefix: of the projection, of the norms of the embedding, of the state and of what is put out; how the layer's own begin."""

    project: str
    embedding_norm: str
    state_norm: str
    norm: str
    layer: str = ""


FOLDERS = {
    "mtp.": PredictorNames("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "layers.0."),
    "mtp_layers.0.": PredictorNames("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"),
    "model.layers.{num_layers}.": PredictorNames("eh_proj", "enorm", "hnorm", "shared_head.norm"),
}
FILES = {
    "blk.{num_layers}.": PredictorNames(
        "nextn.eh_proj", "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm"
    ),
}
"""By prefix, of folders and of GGUF files. num_layers: of the model."""
COPIES = (
    "embed_tokens.weight",
    "shared_head.head.weight",
    "verifier_lm_head.weight",
    "nextn.embed_tokens.weight",
    "nextn.shared_head_head.weight",
)
"""How names of copies of the model's own tensors end, which are not read."""


class PredictorTensors(NamedTuple):
    """Where tensors are. outer: of what is around the layer, by `PredictorNames`'s fields.  layer: the file's name by the one in a model's first layer."""

    outer: dict[str, str]
    layer: dict[str, str]


def located(
    tensors: Collection[str], num_layers: int, layouts: dict[str, PredictorNames] = FOLDERS
) -> PredictorTensors | None:
    """Where a folder, or a file, has such a layer; None where there is none. num_layers: of the model.

    Raises:
        ModelLoadError: it lacks a tensor around the layer, by name.

    Example:
        >>> located(["mtp.norm.bias"], 2, {}) is None
        True
    """
    for template, layout in layouts.items():
        prefix = template.format(num_layers=num_layers)
        names = {
            name.removeprefix(prefix): name
            for name in tensors
            if name.startswith(prefix) and not name.endswith(COPIES)
        }
        if not names:
            continue
        outer_names = {
            field: f"{part}.weight" for field, part in layout._asdict().items() if field != "layer"
        }
        if lacking := {*outer_names.values()} - names.keys():
            raise ModelLoadError(f"it has no tensor {prefix + min(lacking)!r}")
        outer = {field: names.pop(name) for field, name in outer_names.items()}
        layer = {LAYER + name.removeprefix(layout.layer): place for name, place in names.items()}
        return PredictorTensors(outer, layer)
    return None
