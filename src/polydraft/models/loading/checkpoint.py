"""A causal language model as its configuration and its weights by name, read one at a time: from a folder, a GGUF file or a module.

Read straight from safetensors files there is never a second copy of the model in memory, and neither the modelling code of
transformers nor its loader is imported. That is for folders of the Llama family as `save_pretrained` writes them; anything else
(names of older versions, quantised, missing or misshapen weights) is left to transformers, which mends it or says what is wrong.
"""

import os
import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polydraft.errors import ModelLoadError
from polydraft.files.schema import read_json
from polydraft.models.compiled.architectures import (
    ARCHITECTURES,
    LLAMA,
    LLAMA_FAMILY,
    Architecture,
    Mixture,
    ModelSpec,
    Stored,
    predictor,
)
from polydraft.models.compiled.architectures.base import ATTENTION, as_named
from polydraft.models.loading.composites import COMPOSITES, language_model_config, name_in_text_model
from polydraft.models.loading.config import CheckpointConfig
from polydraft.models.loading.folder import check_folder, load_config, own_scalings, unread
from polydraft.models.loading.gguf import NUMBERS, GgufFile
from polydraft.models.loading.gguf_beside import predictor_beside
from polydraft.models.loading.gguf_parts import parts_of
from polydraft.models.loading.mx_blocks import BLOCKS, FORMAT, SCALES, MxWeights, is_mx
from polydraft.models.loading.scaled_weights import Scaling, is_beside
from polydraft.models.loading.tensor_files import Entry, Reader, entries_of, outlines_of, readers, weight_in
from polydraft.models.rotary import rotary
from polydraft.models.windows import setting

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
LAYER = re.compile(r"(model\.layers\.\d+\.|)(.+)")
"""Prefix of a layer's weights, and their names in it."""


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
    def architecture(self) -> Architecture:
        """What its layers are; configurations of heads that say nothing have Llama's."""
        return ARCHITECTURES[getattr(self.config, "model_type", LLAMA.model_type)]

    @property
    def spec(self) -> ModelSpec:
        """What its layers compute."""
        return self.architecture.spec(self.config)

    @property
    def mixture(self) -> Mixture | None:
        """Of its layers that are mixtures of experts, where there are any."""
        return self.architecture.mixture_of(self.config)

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
    def mixture(self) -> Mixture | None:
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
    architecture = ARCHITECTURES.get(module.config.model_type)
    if architecture is None or (
        architecture.mixture is None and not architecture.fused and architecture.place is as_named
    ):
        return {}
    tensors = {**dict(module.named_buffers()), **weights}
    try:
        places = _located(module.config, _shapes(module.config), tensors)
    except (KeyError, ValueError):
        return {}
    return {name: weight_in(tensors[place.name], place) for name, place in places.items()}


def _located(config: Any, names: Iterable[str], tensors: Container[str]) -> dict[str, Stored]:
    """Where weights lie among tensors of these names.

    Raises:
        KeyError: nowhere.
    """
    architecture = ARCHITECTURES[config.model_type]
    located = dict[str, Stored]()
    for name in names:
        prefix, part = LAYER.fullmatch(name).groups()  # pyright: ignore[reportOptionalMemberAccess]
        places = [place._replace(name=prefix + place.name) for place in architecture.places(part, config)]
        place = next((place for place in places if place.name in tensors), None)
        if place is None:
            raise KeyError(name)
        located[name] = place
    return located


def _norm_offset(config: Any) -> float:
    architecture = ARCHITECTURES.get(config.model_type)
    return 0.0 if architecture is None else architecture.norm_offset


def of_folder(name: str | os.PathLike[str]) -> Checkpoint | None:
    """The weights of a folder of `save_pretrained`, or None where transformers has to load it.

    A tensor that was read holds its file open: what is dropped before the next one is read is no longer in memory.

    Raises:
        ModelLoadError: no folder with a configuration and readable safetensors files.

    Example:
        >>> from polydraft.models import pair
        >>> files = of_folder(str(pair.draft_folder()))
        >>> files.outlines["model.norm.weight"].dtype, files.read("model.norm.weight").shape
        (torch.bfloat16, torch.Size([128]))
    """
    folder = Path(os.path.expanduser(name))
    if not folder.is_dir():
        return None
    check_folder(folder)
    settings = read_json((folder / "config.json").read_bytes())
    own_config = CheckpointConfig.of_json(settings, str(name))
    config = (
        own_config if own_config is not None and own_config.model_type in LLAMA_FAMILY else load_config(name)
    )
    in_blocks = is_mx(settings)
    is_quantized = getattr(config, "quantization_config", None) is not None
    try:
        entries, _ = entries_of(folder)
        files = {name: entry.file for name, entry in entries.items()}
        scalings = own_scalings(entries, settings)
        is_known = not is_quantized or bool(scalings)
        is_composite = config.model_type in COMPOSITES
        if is_composite and is_known:
            config = language_model_config(config, {*map(name_in_text_model, files)})
        if config.model_type not in ARCHITECTURES or not (is_known or in_blocks):
            return None
        shapes = _shapes(config)
        stacks = (
            {name.removesuffix(BLOCKS) for name in files if name.endswith(BLOCKS)}
            if in_blocks
            else set[str]()
        )
        own_names = {name_in_text_model(name): name for name in files}
        located = _located(config, shapes, {*own_names, *stacks})
        places = {
            name: place._replace(name=own_names.get(place.name, place.name))
            for name, place in located.items()
        }
        reader, mx = readers(files, places, stacks, scalings)
        outlines = outlines_of(entries, reader.places, shapes, mx, scalings)
        used = {place.name for place in places.values()} | {
            stack + part for stack in stacks for part in (BLOCKS, SCALES)
        }
        others = [name for name in files if name not in used and not is_beside(name, scalings)]
        others = [name for name in others if not is_composite or name_in_text_model(name) != name]
        if unread(others, files, config.num_hidden_layers):
            return None
        spec = ARCHITECTURES[config.model_type].spec(config)
        for rope in spec.rotaries:
            rotary(config, 1, rope=rope)
        float(spec.epsilon)
        if (HEAD in shapes) != (HEAD in own_names):
            return None
        generation = _generation_ids(folder)
    except ModelLoadError:
        raise
    except Exception:  # whatever is odd about it, transformers' own loader has the words for it
        return None
    offers: dict[str, Any] = {}
    if mx.places:
        kinds = {dtype: name for name, dtype in NUMBERS.items()}
        offers["kinds"] = lambda name: FORMAT if name in mx.places else kinds[outlines[name].dtype]
        offers["blocks"] = mx.blocks
    tied = HEAD not in shapes
    cpu = torch.device("cpu")
    return Checkpoint(
        config,
        generation,
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


def _predictor_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Of the weights of a layer like the model's last, but of attention."""
    shapes = ARCHITECTURES[config.model_type].layer_shapes(config, layer=config.num_hidden_layers - 1)
    return {predictor.LAYER + name: shape for name, shape in shapes.items()}


def _predictor_of_folder(
    folder: Path, config: Any, entries: Mapping[str, Entry], scalings: Mapping[str, Scaling]
) -> PredictorCheckpoint | None:
    """The layer of a folder that predicts a further token; None where there is none, or one of other parts."""
    files = {name: entry.file for name, entry in entries.items() if not is_beside(name, scalings)}
    names = predictor.in_folder(files, config.num_hidden_layers)
    if names is None:
        return None
    shapes = _predictor_shapes(config)
    offset = _norm_offset(config)
    try:
        located = _located(config, shapes, names.layer)
        places = {name: place._replace(name=names.layer[place.name]) for name, place in located.items()}
        if {place.name for place in places.values()} != {*names.layer.values()}:
            return None
        outlines = outlines_of(
            entries, places, shapes, MxWeights({}, lambda name, index: torch.empty(0)), scalings
        )
    except (KeyError, ValueError, ModelLoadError):
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
    placed = predictor.in_gguf(file.tensors, config.num_hidden_layers)
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


def of_file(file: GgufFile) -> Checkpoint | None:
    """The weights of a GGUF file, dequantised, or None where transformers has to run it.

    Raises:
        ModelLoadError: weights are missing, or there are others.
    """
    if not file.is_described:
        return None
    config = file.config
    try:
        shapes = _shapes(config)
    except ValueError:
        return None
    file.check_all_used(map(file.own_name, shapes))
    for name, shape in shapes.items():
        stored_shape = file.shape(name)
        cut_up = len(shape) == 1 and prod(stored_shape) == shape[0]  # gains by group
        if not cut_up and [size for size in stored_shape if size > 1] != [size for size in shape if size > 1]:
            problem = f"its tensor {file.own_name(name)!r} has the shape {stored_shape} for {name!r}; expected {shape}"
            raise file.refusal(problem, "Give another file of the model")
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


def _generation_ids(folder: Path) -> Any:
    """Ids of generation_config.json; None without such a file: the model's configuration then has them."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return None
    settings = read_json(file.read_bytes())
    return SimpleNamespace(
        eos_token_id=settings.get("eos_token_id"), bos_token_id=settings.get("bos_token_id")
    )


def why_not_compiled(config: Any) -> str | None:
    """Why a model's architecture is not compiled, or None."""
    if config.model_type not in ARCHITECTURES:
        return f"its type {config.model_type!r} is not one of {', '.join(sorted(ARCHITECTURES))}"
    return ARCHITECTURES[config.model_type].why_refused(config)


def _shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Of the weights of a model without biases but those of its architecture, by name."""
    architecture = ARCHITECTURES[config.model_type]
    h = config.hidden_size
    if reason := architecture.why_refused(config):
        raise ValueError(reason)
    if not architecture.has_qkv_bias(config) and (
        setting(config, "attention_bias") or setting(config, "mlp_bias")
    ):
        raise ValueError(config.model_type)
    layers = {
        f"model.layers.{i}.{name}": shape
        for i, kind in enumerate(architecture.spec(config).mixers)
        for name, shape in architecture.layer_shapes(config, layer=i, mixer=kind).items()
    }
    outer = {EMBEDDING: (config.vocab_size, h), f"{architecture.final_norm}.weight": (h,)}
    return (
        {**outer, **layers}
        if config.tie_word_embeddings
        else {**outer, **layers, HEAD: (config.vocab_size, h)}
    )
