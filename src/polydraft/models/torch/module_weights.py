"""The weights of a module of transformers as a checkpoint: what is read are views of its tensors."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from polydraft.models.loading.checkpoint import Checkpoint, described, offset_of_norms, shapes_of
from polydraft.models.networks import COMPILED, Network
from polydraft.models.networks.base import EMBEDDING, HEAD, UncompiledError
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


def of_module(module: Any) -> Checkpoint:
    """The weights of a module; nothing is copied."""
    config = described(module.config)
    network = COMPILED.get(config.model_type)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    embedding = EMBEDDING if network is None else network.own_name(EMBEDDING)
    tied = HEAD in parameters and parameters[HEAD] is parameters.get(embedding)
    tensors = {**dict(module.named_buffers()), **parameters}
    places = {name: Stored(name) for name in parameters}
    weights = ModuleWeights(tensors, places | _parts_of_tensors(network, config, tensors))
    return Checkpoint(
        config,
        {name: weights.outline(name) for name in weights.places},
        weights,
        tied,
        getattr(module, "generation_config", None),
        module.device,
        module.dtype,
        norm_offset=offset_of_norms(config),
    )


def _parts_of_tensors(
    network: Network | None, config: Any, tensors: Mapping[str, Tensor]
) -> dict[str, Stored]:
    """Of mixtures, by the names of `mixture`, what transformers stacks; of other layers what is a part or a multiple of a tensor."""
    if network is None or network.has_plain_places:
        return {}
    try:
        return network.located(config, shapes_of(config), tensors)
    except UncompiledError:  # whoever compiles it is told by `why_unsupported`
        return {}
