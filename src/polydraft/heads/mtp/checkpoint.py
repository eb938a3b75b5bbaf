"""Modules for multi-token prediction on disk: an EAGLE-3 head but for what its layer reads, a layer in a target's own files, or one that others published,
in the target's folder or in one of vLLM's speculators. `models.loading.predictor` has the names of its tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from polydraft.errors import ModelLoadError
from polydraft.heads.checkpoint import head_config, layer_shapes, own_predictor
from polydraft.heads.eagle.checkpoint import EagleCheckpoint
from polydraft.heads.fit import flat
from polydraft.heads.folder import HeadFolder
from polydraft.models.loading import predictor
from polydraft.models.loading.checkpoint import Checkpoint, PredictorCheckpoint
from polydraft.models.store.folder import FolderStore
from polydraft.models.store.places import Stored
from polydraft.models.store.scaled_weights import is_beside, scalings_of, unexplained
from polydraft.models.store.tensor_files import FolderWeights

SHARED = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
"""Settings that a target's own layer has of the target."""
ENDS = {
    "project": "project.weight",
    "embedding_norm": "midlayer.input_layernorm.weight",
    "state_norm": "midlayer.hidden_norm.weight",
    "norm": "norm.weight",
}
"""Fields of `predictor.PredictorNames` -> names here."""


class Published(NamedTuple):
    """A layer of another family than Llama's. settings: as of the target's config.json.  outer: tensors around it, by the fields of `predictor.PredictorNames`.
    layer: its own, as a model of its family names those of its first layer.  before_norm: whether it reads the state before the target's final norm.
    """

    settings: dict[str, Any]
    outer: dict[str, np.ndarray]
    layer: dict[str, np.ndarray]
    before_norm: bool


def published(store: FolderStore) -> Published:
    """The module of a folder; of a whole model's its tensors alone.

    Raises:
        KeyError, ValueError: no such module, or one with a tensor that is missing or of which nothing says which numbers it stands for.
    """
    inner = flat(store.settings)
    inner |= inner.get("text_config") or {}
    entries = store.entries
    scalings = scalings_of(entries, store.settings)
    names = [name for name in entries if not is_beside(name, scalings)]
    places = predictor.located(names, inner["num_hidden_layers"])
    if places is None:
        raise ValueError("no tensor of it is there")
    module = {**places.outer, **places.layer}
    if codes := unexplained({name: entries[name] for name in module.values()}, scalings):
        raise ValueError(f"nothing says which numbers the codes of {codes} stand for")
    reader = FolderWeights(entries, {name: Stored(place) for name, place in module.items()}, scalings)
    return Published(
        inner,
        {name: reader.read(name) for name in places.outer},
        {name: reader.read(name) for name in places.layer},
        "speculators_model_type" in store.settings,
    )


@dataclass(frozen=True)
class MtpCheckpoint(EagleCheckpoint):
    """A module for multi-token prediction: one trained here, one of another's folder, which is `published`, or the `predictor` in a target's own files,
    whose embeddings and output rows are the target's.
    """

    kind = "mtp"
    projects = True
    published: Published | None = None
    predictor: PredictorCheckpoint | None = None

    def first_layer(self) -> dict[str, tuple[int, ...]]:
        """See `EagleCheckpoint.first_layer`."""
        h = self.config.hidden_size
        outer = {"project.weight": (h, 2 * h), "midlayer.attention_norm.weight": (h,)}
        return {**outer, **layer_shapes(self.config, "midlayer.", head_norms=False)}

    @classmethod
    def reads(cls, settings: Mapping[str, Any]) -> bool:
        """Those of others: speculators' by its name, a whole model's by the number of such layers."""
        if "speculators_model_type" in settings:
            return settings["speculators_model_type"] == "mtp"
        inner = {**settings, **(settings.get("text_config") or {})}
        return any(
            isinstance(inner.get(name), int) and inner[name] > 0
            for name in ("mtp_num_hidden_layers", "num_nextn_predict_layers")
        )

    @classmethod
    def of_folder(cls, folder: HeadFolder) -> "MtpCheckpoint":
        """See `HeadCheckpoint.load`; of a whole model's folder the module's tensors alone."""
        if "polydraft_head" in folder.settings:
            return super().of_folder(folder)
        try:
            module = published(folder.store)
        except Exception as error:  # whatever these files hold: they are somebody else's
            raise ModelLoadError(
                f"{str(folder)!r} was given as a module for multi-token prediction, and cannot be read as one: {error!r}. Expected a folder "
                "with config.json and safetensors, in which the target's, or speculators', module is."
            ) from error
        sizes = {name: module.settings.get(name) for name in ("hidden_size", "vocab_size")}
        return cls._around(
            module.outer, published=module, num_target_layers=module.settings["num_hidden_layers"], **sizes
        )

    @classmethod
    def of_target(cls, target: Any) -> "MtpCheckpoint | None":
        """That in a target's own files, where there is one that is run."""
        predictor = own_predictor(target)
        if predictor is None:
            return None
        sizes = {name: getattr(predictor.config, name) for name in SHARED}
        return cls._around(predictor.outer(), predictor=predictor, **sizes)

    @classmethod
    def _around(
        cls,
        outer: Mapping[str, np.ndarray],
        published: Published | None = None,
        predictor: PredictorCheckpoint | None = None,
        **settings: Any,
    ) -> "MtpCheckpoint":
        """One whose layer is not of this package's names. outer: by the fields of `predictor.PredictorNames`.  settings: sizes of the target."""
        config = head_config({"num_hidden_layers": 1, "norm_output": True, **settings})
        tensors = {ENDS[field]: tensor for field, tensor in outer.items()}
        return cls(config, (), tensors, np.empty(0, np.int64), published, predictor)

    @property
    def shares_rows(self) -> bool:
        """Those of a target's own files do."""
        return self.predictor is not None

    @property
    def layer(self) -> Checkpoint:
        """One of the target's architecture, or of Llama's."""
        return super().layer if self.predictor is None else self.predictor

    @property
    def compiles(self) -> bool:
        """As the target does; layers of others run in transformers."""
        if self.published is not None:
            return False
        return self.predictor is not None or super().compiles

    def check(self, target: Any) -> None:
        """See `HeadCheckpoint.check`; what is in a target's own files is of no other."""
        if self.predictor is None:
            super().check(target)
