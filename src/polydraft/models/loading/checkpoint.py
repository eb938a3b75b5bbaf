"""A causal language model as its configuration and its weights by name, read one at a time: from a folder, a GGUF file or a module.

Read straight from safetensors files there is never a second copy of the model in memory, and neither the modelling code of
transformers nor its loader is imported. That is for folders of the Llama family as `save_pretrained` writes them; anything else
(names of older versions, quantised, missing or misshapen weights) is left to transformers, which mends it or says what is wrong;
`UncompiledError` says why.
"""

import os
import warnings
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polydraft.errors import ModelLoadError, first_line
from polydraft.models.loading import predictor
from polydraft.models.loading.companions import predictor_beside
from polydraft.models.loading.composites import COMPOSITES, language_model_config, name_in_text_model
from polydraft.models.loading.config import CheckpointConfig
from polydraft.models.loading.folder import load_config, unread
from polydraft.models.loading.gguf import GgufFile
from polydraft.models.mixers.experts.names import NO_EXPERTS
from polydraft.models.mixers.layer import ATTENTION
from polydraft.models.networks import (
    COMPILED,
    LLAMA,
    LLAMA_FAMILY,
    NETWORKS,
    Experts,
    ModelSpec,
    Network,
)
from polydraft.models.networks.base import EMBEDDING, HEAD, UncompiledError, as_named
from polydraft.models.rotary import rotary
from polydraft.models.store.folder import GENERATION, FolderStore
from polydraft.models.store.gguf_parts import parts_of
from polydraft.models.store.mx_blocks import BLOCKS, FORMAT, SCALES, MxWeights, is_mx
from polydraft.models.store.places import NUMBERS, Stored
from polydraft.models.store.scaled_weights import Scaling, is_beside
from polydraft.models.store.store import opened_folder
from polydraft.models.store.tensor_files import Entry, Reader, outlines_of, readers, weight_in
from polydraft.models.windows import setting

ODD_SETTINGS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What settings raise that are of another type or value than a description computes with."""


@dataclass(frozen=True)
class Checkpoint:
    """config, generation_config: as of transformers; the second may be None.  outlines: by name, tensors of each weight's shape and
    number format, whose values may not be there.  read: a weight by its name.  tied: the embedding is the head, too.
    device, dtype: of the module; files are read to a CPU, to be used as float32.
    rope_factors: [half of a head] by what the configuration's rotary frequencies are divided, where a file says so.
    norm_offset: what is added to its norm weights.
    predictor: the layer behind the model's that predicts a further token, where there is one that is run.
    blocks, rows, forget: of a GGUF file, see there: a weight's blocks; some rows of it in float32; they are not needed in memory any more.
    kinds: a weight's number format, where reading its blocks for that would take long.
    files: that weights are read from; none of a module.
    """

    config: Any
    generation_config: Any
    outlines: Mapping[str, Tensor]
    read: Callable[[str], Tensor]
    tied: bool
    device: torch.device
    dtype: torch.dtype
    rope_factors: Tensor | None = None
    norm_offset: float = 0.0
    predictor: "PredictorCheckpoint | None" = None
    blocks: Callable[[str], tuple[str, np.ndarray]] | None = None
    rows: Callable[[str, slice], Tensor] | None = None
    forget: Callable[[Iterable[str], slice], None] = lambda names, rows: None
    kinds: Callable[[str], str] | None = None
    files: tuple[Path, ...] = ()

    def kind(self, name: str) -> str | None:
        """Number format of a weight, where blocks are read."""
        if self.kinds is not None:
            return self.kinds(name)
        return None if self.blocks is None else self.blocks(name)[0]

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
        return self.architecture.experts.of(self.config)

    @property
    def has_blocks(self) -> bool:
        """Whether a weight is stored as blocks of integer codes."""
        return self.blocks is not None and any(self.kind(name) not in NUMBERS for name in self.outlines)


@dataclass(frozen=True)
class PredictorCheckpoint(Checkpoint):
    """A layer behind a model's own that predicts a further token, as a checkpoint of one layer; see `predictor`. config: the model's.
    outer: what is around the layer, by the fields of `predictor.Layout`; norms multiply as they are.
    """

    outer: Callable[[], dict[str, Tensor]] = dict

    @property
    def spec(self) -> ModelSpec:
        """Of the model's last layer of attention."""
        whole = super().spec
        last = whole.layers(ATTENTION)[-1]
        windows, rotaries = (numbers[last : last + 1] for numbers in (whole.windows, whole.rotary_of_layer))
        return replace(whole, mixers=(ATTENTION,), states={}, windows=windows, rotary_of_layer=rotaries)

    @property
    def mixture(self) -> Experts | None:
        """That of the model's last layer."""
        mixture = super().mixture
        return None if mixture is None else replace(mixture, layers=mixture.layers[-1:])


def of_module(module: Any) -> Checkpoint:
    """The weights of a module of transformers; nothing is copied."""
    weights = dict(module.named_parameters(remove_duplicate=False))
    tied = HEAD in weights and weights[HEAD] is weights.get(EMBEDDING)
    weights |= _parts_of_tensors(module, weights)
    generation = getattr(module, "generation_config", None)
    return Checkpoint(
        module.config,
        generation,
        weights,
        lambda name: weights[name].detach(),
        tied,
        module.device,
        module.dtype,
        norm_offset=_norm_offset(module.config),
    )


def _parts_of_tensors(module: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of mixtures, by the names of `mixture`, what transformers stacks; of other layers what is a part or a multiple of a tensor."""
    architecture = COMPILED.get(module.config.model_type)
    if architecture is None or (
        architecture.experts == NO_EXPERTS and not architecture.fused and architecture.place is as_named
    ):
        return {}
    tensors = {**dict(module.named_buffers()), **weights}
    try:
        places = architecture.located(module.config, _shapes(module.config), tensors)
    except UncompiledError:  # whoever compiles it is told by `why_unsupported`
        return {}
    return {name: weight_in(tensors[place.name], place) for name, place in places.items()}


def _norm_offset(config: Any) -> float:
    architecture = NETWORKS.get(config.model_type)
    return 0.0 if architecture is None else architecture.norm_offset


def of_folder(name: str | os.PathLike[str]) -> Checkpoint:
    """The weights of a folder of `save_pretrained`.

    A tensor that was read holds its file open: what is dropped before the next one is read is no longer in memory.

    Raises:
        ModelLoadError: no folder with a configuration and readable safetensors files.
        UncompiledError: one that transformers has to load.

    Example:
        >>> from polydraft.models import pair
        >>> files = of_folder(str(pair.draft_folder()))
        >>> files.outlines["model.norm.weight"].dtype, files.read("model.norm.weight").shape
        (torch.bfloat16, torch.Size([128]))
    """
    folder = Path(os.path.expanduser(name))
    store = opened_folder(folder)
    store.check()
    settings = store.settings
    own_config = CheckpointConfig.of_json(settings, str(name))
    config = (
        own_config if own_config is not None and own_config.model_type in LLAMA_FAMILY else load_config(name)
    )
    in_blocks = is_mx(settings)
    is_quantized = getattr(config, "quantization_config", None) is not None
    entries = store.entries
    files = {name: entry.file for name, entry in entries.items()}
    scalings = store.scalings
    is_known = not is_quantized or bool(scalings)
    is_composite = config.model_type in COMPOSITES
    if is_composite and is_known:
        config = language_model_config(config, {*map(name_in_text_model, files)})
    if config.model_type not in COMPILED:
        raise UncompiledError(f"models of type {config.model_type!r} are not compiled")
    if not (is_known or in_blocks):
        raise UncompiledError("its quantization_config is none that is read here")
    shapes = _shapes(config)
    stacks = (
        {name.removesuffix(BLOCKS) for name in files if name.endswith(BLOCKS)} if in_blocks else set[str]()
    )
    own_names = {name_in_text_model(name): name for name in files}
    located = COMPILED[config.model_type].located(config, shapes, {*own_names, *stacks})
    places = {
        name: place._replace(name=own_names.get(place.name, place.name)) for name, place in located.items()
    }
    reader, mx = readers(files, places, stacks, scalings)
    outlines = _outlines(entries, reader.places, shapes, mx, scalings)
    used = {place.name for place in places.values()} | {
        stack + part for stack in stacks for part in (BLOCKS, SCALES)
    }
    others = [name for name in files if name not in used and not is_beside(name, scalings)]
    others = [name for name in others if not is_composite or name_in_text_model(name) != name]
    if strange := unread(others, files, config.num_hidden_layers):
        raise UncompiledError(f"it has a weight {strange[0]!r} more than its configuration says")
    offers: dict[str, Any] = {}
    if mx.places:
        kinds = {dtype: name for name, dtype in NUMBERS.items()}
        offers["kinds"] = lambda name: FORMAT if name in mx.places else kinds[outlines[name].dtype]
        offers["blocks"] = mx.blocks
    tied = HEAD not in shapes
    cpu = torch.device("cpu")
    return Checkpoint(
        config,
        _generation_ids(store),
        outlines,
        lambda name: mx.read(name) if name in mx.places else reader.read(name),
        tied,
        cpu,
        torch.float32,
        norm_offset=_norm_offset(config),
        **offers,
        files=(folder / "config.json", *sorted(set(files.values()))),
        predictor=_predictor_of_folder(folder, config, entries, scalings),
    )


def _outlines(
    entries: Mapping[str, Entry],
    places: Mapping[str, Stored],
    shapes: Mapping[str, tuple[int, ...]],
    mx: MxWeights,
    scalings: Container[str],
) -> dict[str, Tensor]:
    """As `outlines_of`.

    Raises:
        UncompiledError: weights of another type or shape.
    """
    try:
        return outlines_of(entries, places, shapes, mx, scalings)
    except ValueError as error:
        raise UncompiledError(str(error)) from error


def _predictor_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Of the weights of a layer like the model's last, but of attention."""
    shapes = NETWORKS[config.model_type].layer_shapes(config, layer=config.num_hidden_layers - 1)
    return {predictor.LAYER + name: shape for name, shape in shapes.items()}


def _predictor_of_folder(
    folder: Path, config: Any, entries: Mapping[str, Entry], scalings: Mapping[str, Scaling]
) -> PredictorCheckpoint | None:
    """The layer of a folder that predicts a further token; None where there is none, or one of other parts."""
    files = {name: entry.file for name, entry in entries.items() if not is_beside(name, scalings)}
    offset = _norm_offset(config)
    try:
        names = predictor.located(files, config.num_hidden_layers)
        if names is None:
            return None
        shapes = _predictor_shapes(config)
        located = COMPILED[config.model_type].located(config, shapes, names.layer)
        places = {name: place._replace(name=names.layer[place.name]) for name, place in located.items()}
        if more := {*names.layer.values()} - {place.name for place in places.values()}:
            raise UncompiledError(f"it has a weight {min(more)!r} more than the model's layers")
        mx = MxWeights({}, lambda name, index: torch.empty(0))
        outlines = _outlines(entries, places, shapes, mx, scalings)
    except ModelLoadError as reason:
        warnings.warn(
            f"the layer of {str(folder)!r} that predicts a further token is not compiled: {first_line(reason)}.",
            stacklevel=2,
        )
        return None
    every_file = {name: entry.file for name, entry in entries.items()}
    reader = Reader(
        every_file, places | {name: Stored(place) for name, place in names.outer.items()}, scalings
    )

    def outer() -> dict[str, Tensor]:
        tensors = {name: reader.read(name).float() for name in names.outer}
        return {name: tensor + offset if tensor.ndim == 1 else tensor for name, tensor in tensors.items()}

    cpu = torch.device("cpu")
    used = sorted({files[place.name] for place in places.values()})
    return PredictorCheckpoint(
        config,
        None,
        outlines,
        reader.read,
        False,
        cpu,
        torch.float32,
        norm_offset=offset,
        files=(folder / "config.json", *used),
        outer=outer,
    )


def _predictor_of_file(file: GgufFile) -> PredictorCheckpoint | None:
    """Likewise of a GGUF file."""
    config = file.config
    try:
        placed = predictor.located(file.tensors, config.num_hidden_layers, predictor.FILES)
    except KeyError:
        return None
    if placed is None:
        return None
    shapes = _predictor_shapes(config)

    def its(name: str) -> str:
        return name.replace(predictor.LAYER, f"model.layers.{config.num_hidden_layers}.", 1)

    try:
        used = {file.own_name(its(name)) for name in shapes}
    except ModelLoadError:
        return None
    if used != {*placed.layer.values()} or any(
        file.shape(its(name)) != shape for name, shape in shapes.items()
    ):
        return None
    outlines = {name: _outline_of_file(file, its(name), shape) for name, shape in shapes.items()}
    return PredictorCheckpoint(
        config,
        None,
        outlines,
        lambda name: file.read(its(name)),
        False,
        torch.device("cpu"),
        torch.float32,
        file.rope_factors,
        blocks=lambda name: file.blocks(its(name)),
        rows=lambda name, rows: file.rows(its(name), rows),
        forget=lambda names, rows: file.forget(map(its, names), rows),
        files=tuple(parts_of(file.path)),
        outer=lambda: {name: file.tensor(place) for name, place in placed.outer.items()},
    )


def _outline_of_file(file: GgufFile, name: str, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=NUMBERS.get(file.blocks(name)[0], torch.float32), device="meta")


def of_file(file: GgufFile) -> Checkpoint:
    """The weights of a GGUF file, dequantised.

    Raises:
        ModelLoadError: weights are missing, or there are others.
        UncompiledError: a model that transformers has to run.
    """
    if file.network.lacks:
        raise UncompiledError(f"models of type {file.architecture!r} are not compiled")
    config = file.config
    shapes = _shapes(config)
    file.check_weights(shapes)
    outlines = {name: _outline_of_file(file, name, shape) for name, shape in shapes.items()}
    tied = HEAD not in shapes
    cpu = torch.device("cpu")
    offers: dict[str, Any] = {
        "blocks": file.blocks,
        "rows": file.rows,
        "forget": file.forget,
        "files": tuple(parts_of(file.path)),
        "predictor": _predictor_of_file(file) or predictor_beside(file, _predictor_of_file),
    }
    return Checkpoint(
        config, None, outlines, file.read, tied, cpu, torch.float32, file.rope_factors, **offers
    )


def _generation_ids(store: FolderStore) -> Any:
    """Ids of generation_config.json; None without such a file: the model's configuration then has them."""
    if not (store.place / GENERATION).is_file():
        return None
    ids = {name: store.generation.get(name) for name in ("eos_token_id", "bos_token_id")}
    return SimpleNamespace(**ids)


def why_not_compiled(config: Any) -> str | None:
    """Why a model's architecture is not compiled, or None."""
    if config.model_type not in COMPILED:
        return f"its type {config.model_type!r} is not one of {', '.join(sorted(COMPILED))}"
    return NETWORKS[config.model_type].why_refused(config)


def _shapes(config: Any) -> dict[str, tuple[int, ...]]:
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
    has_others = setting(config, "attention_bias") or setting(config, "mlp_bias")
    if reason is None and has_others and not architecture.attention.has_bias(config):
        reason = "its products have biases"
    if reason is not None:
        raise UncompiledError(reason)
    return shapes
