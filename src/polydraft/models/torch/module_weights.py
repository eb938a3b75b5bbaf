"""The weights of a module of transformers as a checkpoint: what is read are views of its tensors."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from polydraft.models.loading.checkpoint import Checkpoint, offset_of_norms, shapes_of
from polydraft.models.loading.config import CheckpointConfig
from polydraft.models.mixers.experts.names import NO_EXPERTS
from polydraft.models.networks import COMPILED
from polydraft.models.networks.base import EMBEDDING, HEAD, UncompiledError, as_named
from polydraft.models.store.places import Stored
from polydraft.models.store.weights import NAMES, StoredWeights
from polydraft.models.torch.door import numpy_type, out


class ModuleWeights(StoredWeights):
    """Weights in the tensors of a module. places: of all weights, by name."""

    def __init__(self, tensors: Mapping[str, Tensor], places: Mapping[str, Stored]) -> None:
        self.tensors = tensors
        self.places = places

    def read(self, name: str) -> np.ndarray:
        """See `StoredWeights.read`; nothing is copied of what lies in the host's memory as it is asked for."""
        place = self.places[name]
        return place.of(out(self.tensors[place.name]))

    def kind(self, name: str) -> str:
        """See `StoredWeights.kind`."""
        dtype = self.outline(name).dtype
        return NAMES.get(dtype, str(dtype))

    def outline(self, name: str) -> np.ndarray:
        """An array without values, of a weight's shape and type."""
        place = self.places[name]
        tensor = self.tensors[place.name]
        return place.outline(tuple(tensor.shape), numpy_type(tensor.dtype))


def _readable(config: Any) -> Any:
    """A configuration whose settings are read even where those of some layers differ."""
    network = COMPILED.get(config.model_type)
    if network is None or not getattr(config, "is_heterogeneous", False):
        return config
    return CheckpointConfig.of_json(config.to_dict(), network, str(config.name_or_path))


def of_module(module: Any) -> Checkpoint:
    """The weights of a module; nothing is copied."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    tied = HEAD in parameters and parameters[HEAD] is parameters.get(EMBEDDING)
    tensors = {**dict(module.named_buffers()), **parameters}
    places = {name: Stored(name) for name in parameters}
    weights = ModuleWeights(tensors, places | _parts_of_tensors(module, tensors))
    return Checkpoint(
        _readable(module.config),
        {name: weights.outline(name) for name in weights.places},
        weights,
        tied,
        getattr(module, "generation_config", None),
        module.device,
        module.dtype,
        norm_offset=offset_of_norms(module.config),
    )


def _parts_of_tensors(module: Any, tensors: Mapping[str, Tensor]) -> dict[str, Stored]:
    """Of mixtures, by the names of `mixture`, what transformers stacks; of other layers what is a part or a multiple of a tensor."""
    architecture = COMPILED.get(module.config.model_type)
    if architecture is None or (
        architecture.experts == NO_EXPERTS and not architecture.fused and architecture.place is as_named
    ):
        return {}
    try:
        config = _readable(module.config)
        return architecture.located(config, shapes_of(config), tensors)
    except UncompiledError:  # whoever compiles it is told by `why_unsupported`
        return {}
