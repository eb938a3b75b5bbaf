"""A causal language model as its configuration and its weights by name, read one at a time: from a folder, a GGUF file or a module.

Read straight from files there is never a second copy of the model in memory, and transformers is not imported. That is for what the compiled path
runs; anything else (other architectures and codes, weights that are missing or misshapen) is left to transformers, which mends it or says what is
wrong; `UncompiledError` says why.
"""

import os
import re
import warnings
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from polydraft.errors import ModelLoadError, first_line
from polydraft.models.loading import predictor
from polydraft.models.loading.companions import predictor_beside
from polydraft.models.loading.config import COMPOSITES, CheckpointConfig, name_in_text_model, text_settings
from polydraft.models.loading.gguf import GgufWeights, weights_of_file
from polydraft.models.memory import CPU
from polydraft.models.mixers.layer import ATTENTION, LATENT_ATTENTION
from polydraft.models.networks import (
    COMPILED,
    LLAMA,
    NETWORKS,
    Experts,
    ModelSpec,
    Network,
)
from polydraft.models.networks.base import HEAD, UncompiledError
from polydraft.models.rotary import rotary
from polydraft.models.store.folder import GENERATION, FolderStore
from polydraft.models.store.gguf_parts import is_gguf
from polydraft.models.store.mx_blocks import BLOCKS, SCALES, is_mx
from polydraft.models.store.packed_codes import is_beside_codes, packing_of
from polydraft.models.store.places import NUMBERS
from polydraft.models.store.scaled_weights import is_beside
from polydraft.models.store.store import opened_folder
from polydraft.models.store.tensor_files import FolderWeights, fitting_outlines
from polydraft.models.store.weights import Renamed, StoredWeights
from polydraft.models.windows import setting
from polydraft.numerics.floats import as_float32

FLOAT32 = np.dtype(np.float32)
BUFFERS = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$|(^|\.)mtp\.")
"""Tensors that older versions stored and that follow from the configuration, and layers that predict further tokens."""
ODD_SETTINGS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What settings raise that are of another type or value than a description computes with."""


@dataclass(frozen=True)
class Checkpoint:
    """config, generation_config: as of transformers; the second may be None.  outlines: by name, arrays of each weight's shape and
    number format, without its values.  weights: where they lie.  tied: the embedding is the head, too.
    device, dtype: of the module; files are read to a CPU, to be used as float32.
    rope_factors: [half of a head] by what the configuration's rotary frequencies are divided, where a file says so.
    norm_offset: what is added to its norm weights.
    predictor: the layer behind the model's that predicts a further token, where there is one that is run.
    """

    config: Any
    outlines: Mapping[str, np.ndarray]
    weights: StoredWeights
    tied: bool = False
    generation_config: Any = None
    device: Any = CPU
    dtype: Any = FLOAT32
    rope_factors: np.ndarray | None = None
    norm_offset: float = 0.0
    predictor: "PredictorCheckpoint | None" = None

    def read(self, name: str) -> np.ndarray:
        """A weight by its name."""
        return self.weights.read(name)

    @property
    def architecture(self) -> Network:
        """What its layers are; configurations of heads that say nothing have Llama's."""
        return NETWORKS[getattr(self.config, "model_type", LLAMA.model_type)]

    @property
    def spec(self) -> ModelSpec:
        """What its layers compute."""
        return self.architecture.spec(self.config)

    @property
    def mixture(self) -> Experts | None:
        """Of its layers that are mixtures of experts, where there are any."""
        mixture = self.architecture.experts.of(self.config)
        return mixture if mixture is not None and any(mixture.layers) else None

    @property
    def has_blocks(self) -> bool:
        """Whether a weight is stored as blocks of integer codes."""
        return any(self.weights.kind(name) not in NUMBERS for name in self.outlines)


@dataclass(frozen=True)
class PredictorCheckpoint(Checkpoint):
    """A layer behind a model's own that predicts a further token, as a checkpoint of one layer; see `predictor`. config: the model's.
    outer: what is around the layer, by the fields of `predictor.PredictorNames`; norms multiply as they are.
    """

    outer: Callable[[], dict[str, np.ndarray]] = dict

    @property
    def spec(self) -> ModelSpec:
        """Of the model's last layer of attention."""
        whole = super().spec
        kind = _attention_of(whole)
        last = whole.layers(kind)[-1]
        windows, rotaries = (numbers[last : last + 1] for numbers in (whole.windows, whole.rotary_of_layer))
        return replace(whole, mixers=(kind,), states={}, windows=windows, rotary_of_layer=rotaries)

    @property
    def mixture(self) -> Experts | None:
        """That of the model's last layer."""
        mixture = super().mixture
        return None if mixture is None else replace(mixture, layers=mixture.layers[-1:])


def offset_of_norms(config: Any) -> float:
    architecture = NETWORKS.get(config.model_type)
    return 0.0 if architecture is None else architecture.norm_offset


def checkpoint_of(place: Path) -> Checkpoint:
    """The weights of a folder or a GGUF file. Raises as `of_folder` and `of_file`.

    Example:
        >>> from polydraft.models import pair
        >>> checkpoint_of(pair.draft_folder()).architecture.model_type
        'llama'
    """
    return of_file(weights_of_file(place)) if is_gguf(place) else of_folder(place)


def of_folder(name: str | os.PathLike[str]) -> Checkpoint:
    """The weights of a folder of `save_pretrained`.

    What is read are views of its files, of which memory holds the pages that are looked at.

    Raises:
        ModelLoadError: no folder with a configuration and readable safetensors files.
        UncompiledError: one that transformers has to load.

    Example:
        >>> from polydraft.models import pair
        >>> files = of_folder(str(pair.draft_folder()))
        >>> files.outlines["model.norm.weight"].dtype, files.read("model.norm.weight").shape
        (dtype(bfloat16), (128,))
    """
    store = opened_folder(Path(os.path.expanduser(name)))
    store.check()
    config = _config_of_folder(store, str(name))
    shapes = shapes_of(config)
    in_blocks = is_mx(store.settings)
    stacks = {name.removesuffix(BLOCKS) for name in store.entries if in_blocks and name.endswith(BLOCKS)}
    own_names = {name_in_text_model(name): name for name in (*store.entries, *store.packed)}
    located = COMPILED[config.model_type].located(config, shapes, {*own_names, *stacks})
    places = {
        name: place._replace(name=own_names.get(place.name, place.name)) for name, place in located.items()
    }
    weights = FolderWeights(store.entries, places, store.scalings, stacks, store.packed)
    outlines = _outlines(weights, shapes)
    used = {place.name for place in places.values()}
    used |= {own_names.get(name, name) for name in COMPILED[config.model_type].unread(config)}
    used |= {stack + part for stack in stacks for part in (BLOCKS, SCALES)}
    if strange := _unused(store, used, config):
        raise UncompiledError(f"it has a weight {strange[0]!r} more than its configuration says")
    return Checkpoint(
        config,
        outlines,
        weights,
        HEAD not in shapes,
        _generation_ids(store),
        norm_offset=offset_of_norms(config),
        predictor=_said_if_not_run(str(store.place), lambda: _predictor_of_folder(store, config)),
    )


def unread(names: Iterable[str], tensors: Collection[str], num_layers: int) -> list[str]:
    """Of tensors that nothing reads those that would make another model.

    tensors: all.  num_layers: of the model; a layer behind them that predicts further tokens, and buffers, are none of it.

    Example:
        >>> unread(["model.rotary_emb.inv_freq", "score.weight"], [], 2)
        ['score.weight']
    """
    behind = re.compile(r"model\.layers\.(\d+)\.")
    predicts = any(name.endswith(f"layers.{num_layers}.eh_proj.weight") for name in tensors)
    others = list[str]()
    for name in names:
        layer = behind.match(name_in_text_model(name))
        if not BUFFERS.search(name) and not (predicts and layer and int(layer[1]) >= num_layers):
            others.append(name)
    return sorted(others)


def _config_of_folder(store: FolderStore, place: str) -> CheckpointConfig:
    """The settings of a folder's language model.

    Raises:
        UncompiledError: of another type, sizes that are missing, or weights that are coded in a way that is not read here.
    """
    settings = store.settings
    if str(settings.get("model_type")) in COMPOSITES:
        settings = text_settings(settings, {*map(name_in_text_model, store.entries)})
    is_quantized = settings.get("quantization_config") or store.settings.get("quantization_config")
    if is_quantized and not store.scalings and not store.packed and not is_mx(store.settings):
        why = packing_of(is_quantized)
        raise UncompiledError(
            why if isinstance(why, str) else "its quantization_config is none that is read here"
        )
    model_type = str(settings.get("model_type"))
    if model_type not in COMPILED:
        raise UncompiledError(f"models of type {model_type!r} are not compiled")
    return CheckpointConfig.of_json(settings, COMPILED[model_type], place)


def _unused(store: FolderStore, used: Container[str], config: Any) -> list[str]:
    """Tensors that nothing reads and that would make another model; of composite models those of the language model."""
    is_composite = store.settings.get("model_type") in COMPOSITES
    others = [name for name in store.entries if name not in used and not is_beside(name, store.scalings)]
    others = [name for name in others if not is_beside_codes(name, store.packed)]
    others = [name for name in others if not is_composite or name_in_text_model(name) != name]
    return unread(others, store.entries, config.num_hidden_layers)


def _outlines(weights: FolderWeights, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """As `fitting_outlines`.

    Raises:
        UncompiledError: weights of another type or shape.
    """
    try:
        return fitting_outlines(weights, shapes)
    except ValueError as error:
        raise UncompiledError(str(error)) from error


def _generation_ids(store: FolderStore) -> Any:
    """Ids of generation_config.json; None without such a file: the model's configuration then has them."""
    if not (store.place / GENERATION).is_file():
        return None
    ids = {name: store.generation.get(name) for name in ("eos_token_id", "bos_token_id")}
    return SimpleNamespace(**ids)


def of_file(file: GgufWeights) -> Checkpoint:
    """The weights of a GGUF file, dequantised.

    Raises:
        ModelLoadError: weights are missing, or there are others.
        UncompiledError: a model that transformers has to run.
    """
    if file.network.lacks:
        raise UncompiledError(f"models of type {file.store.architecture!r} are not compiled")
    config = file.config
    shapes = shapes_of(config)
    file.check_weights(shapes)
    outlines = {name: file.outline(name, shape) for name, shape in shapes.items()}
    own = _said_if_not_run(str(file.store.path), lambda: _predictor_of_file(file))
    further = own or predictor_beside(file, _predictor_of_file)
    return Checkpoint(
        config, outlines, file, HEAD not in shapes, rope_factors=file.rope_factors, predictor=further
    )


def _attention_of(spec: ModelSpec) -> str:
    """The kind of attention of a layer that predicts a further token."""
    return ATTENTION if spec.latent is None else LATENT_ATTENTION


def _predictor_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Of the weights of a layer like the model's last, but of attention."""
    network = NETWORKS[config.model_type]
    kind = _attention_of(network.spec(config))
    shapes = network.layer_shapes(config, layer=config.num_hidden_layers - 1, mixer=kind)
    return {predictor.LAYER + name: shape for name, shape in shapes.items()}


def _said_if_not_run(
    place: str, located: Callable[[], PredictorCheckpoint | None]
) -> PredictorCheckpoint | None:
    """The layer that predicts a further token, or None, after a line that says why one that is there is not run."""
    try:
        return located()
    except ModelLoadError as reason:
        warnings.warn(
            f"the layer of {place!r} that predicts a further token is not compiled: {first_line(reason)}.",
            stacklevel=2,
        )
        return None


def _predictor_of_folder(store: FolderStore, config: Any) -> PredictorCheckpoint | None:
    """The layer of a folder that predicts a further token; None where there is none.

    Raises:
        ModelLoadError: one of other parts.
    """
    tensors = [name for name in store.entries if not is_beside(name, store.scalings)]
    names = predictor.located(tensors, config.num_hidden_layers)
    if names is None:
        return None
    shapes = _predictor_shapes(config)
    located = COMPILED[config.model_type].located(config, shapes, names.layer)
    places = {name: place._replace(name=names.layer[place.name]) for name, place in located.items()}
    _check_all_run(names.layer, {place.name for place in places.values()})
    weights = FolderWeights(store.entries, places, store.scalings)
    offset = offset_of_norms(config)

    def outer() -> dict[str, np.ndarray]:
        tensors = {name: as_float32(weights.tensor(place)) for name, place in names.outer.items()}
        shift = np.float32(offset)
        return {name: tensor + shift if tensor.ndim == 1 else tensor for name, tensor in tensors.items()}

    return PredictorCheckpoint(config, _outlines(weights, shapes), weights, norm_offset=offset, outer=outer)


def _predictor_of_file(file: GgufWeights) -> PredictorCheckpoint | None:
    """Likewise of a GGUF file."""
    config = file.config
    names = predictor.located(file.store.tensors, config.num_hidden_layers, predictor.FILES)
    if names is None:
        return None

    def renamed(name: str) -> str:
        return name.replace(predictor.LAYER, f"model.layers.{config.num_hidden_layers}.", 1)

    shapes = _predictor_shapes(config)
    _check_all_run(names.layer, {file.own_name(renamed(name)) for name in shapes})
    for name, shape in shapes.items():
        if file.shape(renamed(name)) != shape:
            raise UncompiledError(f"its weight {name!r} is of shape {file.shape(renamed(name))}, not {shape}")
    outlines = {name: file.outline(renamed(name), shape) for name, shape in shapes.items()}
    return PredictorCheckpoint(
        config,
        outlines,
        Renamed(file, renamed),
        rope_factors=file.rope_factors,
        outer=lambda: {name: file.tensor(place) for name, place in names.outer.items()},
    )


def _check_all_run(layer: Mapping[str, str], used: Container[str]) -> None:
    """Refuse a layer with a tensor that none of the model's has. layer: its tensors.  used: those that have a place."""
    if more := [name for name in layer.values() if name not in used]:
        raise UncompiledError(f"it has a weight {min(more)!r} more than the model's layers")


def described(config: Any) -> Any:
    """A configuration of transformers with the names that all networks have, where its class has others.

    Example:
        >>> from transformers import FalconConfig
        >>> described(FalconConfig(num_attention_heads=8)).num_key_value_heads
        1
    """
    network = COMPILED.get(config.model_type)
    if network is None:
        return config
    is_uniform = not getattr(config, "is_heterogeneous", False)
    if is_uniform and all(hasattr(config, name) for name in ("num_key_value_heads", "intermediate_size")):
        return config
    return CheckpointConfig.of_json(config.to_dict(), network, str(getattr(config, "name_or_path", "")))


def why_not_compiled(config: Any) -> str | None:
    """Why a model's architecture is not compiled, or None."""
    if config.model_type not in COMPILED:
        return f"its type {config.model_type!r} is not one of {', '.join(sorted(COMPILED))}"
    return NETWORKS[config.model_type].why_refused(config)


def shapes_of(config: Any) -> dict[str, tuple[int, ...]]:
    """Of the weights of a model without biases but those of its architecture, by name.

    Raises:
        UncompiledError: a configuration that is not compiled, or that nothing can be computed with.
    """
    architecture = NETWORKS[config.model_type]
    try:
        reason = architecture.why_refused(config)
        spec = architecture.spec(config)
        for rope in spec.rotaries:
            rotary(config, 1, rope=rope)
        float(spec.epsilon)
        shapes = architecture.shapes(config)
    except ODD_SETTINGS as error:
        raise UncompiledError(f"its configuration cannot be computed with ({error!r})") from error
    attention_bias = setting(config, "attention_bias") and not architecture.attention.has_bias(config)
    mlp_bias = setting(config, "mlp_bias") and not architecture.feed_forward.has_bias(config)
    if reason is None and (attention_bias or mlp_bias):
        reason = "its products have biases"
    if reason is not None:
        raise UncompiledError(reason)
    return shapes
