"""Frequencies of rotary positions and their scaling for longer contexts.

Position m turns the i-th pair of a head of width d by the angle m theta^(-2i/d).
    linear  positions are divided by `factor` (Chen et al. 2023, arXiv 2306.15595)
    yarn    only pairs of few turns over the trained length are; cosines and sines grow by `attention_factor`
            (Peng et al. 2023, arXiv 2309.00071, section 3.2 and equation 15)
Other kinds, and the options of some models' yarn, are computed by transformers.

Two kinds depend on the length of a text: keys in a KV cache would be stale once it grows past the trained length.
    longrope  other divisors of the frequencies beyond it (Ding et al. 2024, arXiv 2402.13753)
    dynamic   theta grows with the length
Both are taken here as for a text of `max_model_len` tokens, from the first token on, as llama.cpp and vLLM do.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from polydraft.models.windows import text_config

PART = "partial_rotary_factor"
"""The share of each head that rotates, where not all of it does."""
CHANGING = ("dynamic", "longrope")
"""Kinds that depend on the length of a text."""

YARN = frozenset(
    {
        "rope_type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "truncate",
    }
)
"""Options of yarn that are computed here."""


def head_width(config: Any) -> int:
    """Width of one attention head.

    Example:
        >>> from transformers import LlamaConfig
        >>> head_width(LlamaConfig(hidden_size=64, num_attention_heads=4))
        16
    """
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rope_parameters(config: Any) -> Any:
    """What a configuration says of its rotary positions, as a mapping."""
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}


def whole_heads(rope: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rotary parameters for classes whose default kind turns whole heads, whatever a folder says of a part of them.

    Example:
        >>> whole_heads({"rope_theta": 1e4, "partial_rotary_factor": 0.5})
        {'rope_theta': 10000.0}
    """
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        return rope
    return {name: value for name, value in rope.items() if name != PART}


def frequencies(config: Any, rope: Any = None, length: int | None = None) -> tuple[Tensor, float]:
    """Angles per position, [half of what is rotated of a head], and the factor of cosines and sines.

    rope: default the configuration's, of whole heads.  length: of the longest text, for the kinds that depend on it; None is any up to the trained one.

    Example:
        >>> from types import SimpleNamespace
        >>> frequencies(SimpleNamespace(head_dim=4, rope_parameters={"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}))
        (tensor([0.5000, 0.0500]), 1.0)
    """
    ropes = rope_parameters(config)
    rope = whole_heads(ropes) if rope is None else rope
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta: Any = rope.get("rope_theta") or getattr(config, "rope_theta", None)
    part = rope.get(PART, 1.0)
    if kind == "default":
        return 1.0 / _wavelengths(config, theta, part), 1.0
    if kind == "linear" and theta:
        return 1.0 / _wavelengths(config, theta, part) / rope["factor"], 1.0
    if kind == "yarn" and theta and rope.keys() <= YARN and rope.get("factor"):
        return _yarn(config, theta, rope)
    if kind == "longrope" and theta:
        return _longrope(config, _wavelengths(config, theta, part), rope, length)
    if kind == "dynamic" and theta:
        return 1.0 / _wavelengths(config, _grown(config, theta, rope, length), part), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    of_layers = next((name for name, layer_rope in ropes.items() if layer_rope == rope), None)
    return ROPE_INIT_FUNCTIONS[kind](
        config, torch.device("cpu"), **({} if of_layers is None else {"layer_type": of_layers})
    )


def rotary(
    config: Any,
    columns: int,
    factors: Float[Tensor, " D2"] | None = None,
    rope: Mapping[str, Any] | None = None,
    length: int | None = None,
) -> tuple[Float[Tensor, "C D2"], Float[Tensor, "C D2"]]:
    """Cosines and sines of the family's rotary positions 0 .. columns-1, for the first half of a head: the second repeats it.

    factors: frequencies are divided by them.  rope: rotary parameters, default the configuration's.  length: see `frequencies`.

    Example:
        >>> from transformers import LlamaConfig
        >>> cos, sin = rotary(LlamaConfig(hidden_size=8, num_attention_heads=2), 2)
        >>> cos[0].tolist(), sin.shape
        ([1.0, 1.0], torch.Size([2, 2]))
    """
    angles_of_one, growth = frequencies(config, rope, length)
    if factors is not None:
        angles_of_one = angles_of_one / factors
    angles = torch.arange(columns, dtype=torch.float32)[:, None] * angles_of_one
    return angles.cos() * growth, angles.sin() * growth


def trained_length(config: Any, rope: Any) -> int:
    """Of texts before positions were scaled."""
    of_config = getattr(config, "original_max_position_embeddings", None)
    return rope.get("original_max_position_embeddings") or of_config or config.max_position_embeddings


def _longrope(config: Any, wavelengths: Tensor, rope: Any, length: int | None) -> tuple[Tensor, float]:
    trained = trained_length(config, rope)
    factor = rope.get("factor") or config.max_position_embeddings / trained
    growth = rope.get("attention_factor")
    if growth is None:
        growth = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    divisors = rope["long_factor" if (length or 0) > trained else "short_factor"]
    return 1.0 / (torch.tensor(divisors, dtype=torch.float32) * wavelengths), growth


def _grown(config: Any, theta: float, rope: Any, length: int | None) -> float:
    """The base of a text that is longer than the trained ones."""
    trained = config.max_position_embeddings
    factor = rope["factor"]
    width = int(head_width(config) * rope.get(PART, 1.0))
    times = factor * max(length or 0, trained) / trained - (factor - 1)
    return theta * times ** (width / (width - 2))


def _wavelengths(config: Any, theta: float, part: float = 1.0) -> Tensor:
    """Positions per radian, [half of the part of a head that is rotated]."""
    width = int(head_width(config) * part)
    return theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)


def _yarn(config: Any, theta: float, rope: Any) -> tuple[Tensor, float]:
    width = head_width(config)
    factor = rope["factor"]
    length = rope["original_max_position_embeddings"]

    def pair_of(turns: float) -> float:
        """The pair that turns so often over the trained length."""
        return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = pair_of(rope.get("beta_fast") or 32)
    last = pair_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, width - 1)
    ramp = (torch.arange(width // 2, dtype=torch.float32) - first) / max(last - first, 1e-3)
    extrapolated = 1 - ramp.clamp(0, 1)
    wavelengths = _wavelengths(config, theta)
    growth = rope.get("attention_factor")
    if growth is None:
        growth = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return 1.0 / (factor * wavelengths) * (1 - extrapolated) + 1.0 / wavelengths * extrapolated, growth


def unchanging_length(config: Any) -> int | None:
    """Longest text whose frequencies do not depend on its length, or None if they never do.

    Example:
        >>> from transformers import LlamaConfig
        >>> unchanging_length(LlamaConfig(max_position_embeddings=64, rope_parameters={"rope_type": "dynamic", "factor": 2.0}))
        64
    """
    config = text_config(config)
    ropes = rope_parameters(config)
    limits = [
        trained_length(config, rope)
        for rope in [r for r in ropes.values() if isinstance(r, dict)] or [ropes]
        if rope.get("rope_type", rope.get("type")) in CHANGING
    ]
    return min(limits, default=None)


class FixedRotary(NamedTuple):
    """A module of transformers that makes rotary positions, and its frequencies for texts of one length. kind: of layers, where it has several."""

    module: Any
    kind: str | None
    frequencies: Tensor


def fixed_rotary(model: Any, length: int) -> list[FixedRotary]:
    """Those of a model whose frequencies depend on the length; none where texts of `length` tokens change nothing."""
    unchanging = unchanging_length(model.config)
    if unchanging is None or length <= unchanging:
        return []
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rotaries: list[FixedRotary] = []
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        for kind, name in types.items() if isinstance(types, dict) else [(None, types)]:
            if name in CHANGING:
                options = {} if kind is None else {"layer_type": kind}
                angles, _ = ROPE_INIT_FUNCTIONS[name](
                    module.config, torch.device("cpu"), seq_len=length, **options
                )
                rotaries.append(FixedRotary(module, kind, angles))
    return rotaries


@contextmanager
def fixed(rotaries: Sequence[FixedRotary]) -> Iterator[None]:
    """For the length of a forward pass, modules use their fixed frequencies; the modules are the caller's."""
    before = []
    for module, kind, angles in rotaries:
        name = "inv_freq" if kind is None else f"{kind}_inv_freq"
        saved = getattr(module, name)
        before.append((module, name, saved, module.rope_type))
        setattr(module, name, angles.to(saved.device, saved.dtype))
        module.rope_type = "default" if kind is None else {**module.rope_type, kind: "default"}
    try:
        yield
    finally:
        for module, name, saved, rope_type in reversed(before):
            setattr(module, name, saved)
            module.rope_type = rope_type
