"""Frequencies of rotary positions and their scaling for longer contexts.

Position m turns the i-th pair of a head of width d by the angle m theta^(-2i/d).
    linear  positions are divided by `factor` (Chen et al. 2023, arXiv 2306.15595)
    yarn    only pairs of few turns over the trained length are; cosines and sines grow by `attention_factor`
            (Peng et al. 2023, arXiv 2309.00071, section 3.2 and equation 15)
    llama3  pairs whose waves are long beside the trained length are, those in between in part (arXiv 2407.21783, section 3.2)
    proportional  the first pairs turn as those of a whole head, the others not at all (Gemma 4)

Models were trained with frequencies and angles in float32, so each step of these is rounded to it; cosines and sines are rounded once.

Two kinds depend on the length of a text: keys in a KV cache would be stale once it grows past the trained length.
    longrope  other divisors of the frequencies beyond it (Ding et al. 2024, arXiv 2402.13753)
    dynamic   theta grows with the length
Both are taken here as for a text of `max_model_len` tokens, from the first token on, as llama.cpp and vLLM do.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float32

from polydraft.models.windows import text_config

PART = "partial_rotary_factor"
"""The share of each head that rotates, where not all of it does."""
WIDTH = "head_dim"
"""Of heads that rotate so, where it is not the configuration's."""
CHANGING = ("dynamic", "longrope")
"""Kinds that depend on the length of a text."""
YARN_TURNS = {"beta_fast": 32, "beta_slow": 1}
"""Turns over the trained length of the pairs between which yarn's divisor rises, where a configuration does not say them."""
ONE = np.float32(1)


def head_width(config: Any) -> int:
    """Width of one attention head.

    Example:
        >>> from types import SimpleNamespace
        >>> head_width(SimpleNamespace(hidden_size=64, num_attention_heads=4))
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


def frequencies(
    config: Any, rope: Any = None, length: int | None = None
) -> tuple[Float32[np.ndarray, " D2"], float]:
    """Angles per position, [half of what is rotated of a head], and the factor of cosines and sines.

    rope: default the configuration's, of whole heads.  length: of the longest text, for the kinds that depend on it; None is any up to the trained one.

    Raises:
        ValueError: a kind that is not known.

    Example:
        >>> from types import SimpleNamespace
        >>> angles, growth = frequencies(SimpleNamespace(head_dim=4, rope_parameters={"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}))
        >>> angles.round(6).tolist(), growth
        ([0.5, 0.05000000074505806], 1.0)
    """
    rope = whole_heads(rope_parameters(config)) if rope is None else rope
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta: Any = rope.get("rope_theta") or getattr(config, "rope_theta", None)
    part = rope.get(PART, 1.0)
    if kind == "default":
        return ONE / _wavelengths(config, theta, part), 1.0
    if kind == "linear":
        return ONE / _wavelengths(config, theta, part) / np.float32(rope["factor"]), 1.0
    if kind == "yarn":
        return _yarn(config, theta, rope)
    if kind == "llama3":
        return _llama3(ONE / _wavelengths(config, theta, part), rope), 1.0
    if kind == "longrope":
        return _longrope(config, _wavelengths(config, theta, part), rope, length)
    if kind == "proportional":
        return _proportional(rope.get(WIDTH) or head_width(config), theta, rope), 1.0
    if kind == "dynamic":
        return ONE / _wavelengths(config, _grown(config, theta, rope, length), part), 1.0
    raise ValueError(f"its rope_type {kind!r} is not known")


def rotary(
    config: Any,
    columns: int,
    factors: Float32[np.ndarray, " D2"] | None = None,
    rope: Mapping[str, Any] | None = None,
    length: int | None = None,
) -> tuple[Float32[np.ndarray, "C D2"], Float32[np.ndarray, "C D2"]]:
    """Cosines and sines of the family's rotary positions 0 .. columns-1, for the first half of a head: the second repeats it.

    factors: frequencies are divided by them.  rope: rotary parameters, default the configuration's.  length: see `frequencies`.

    Example:
        >>> from types import SimpleNamespace
        >>> cos, sin = rotary(SimpleNamespace(head_dim=4, rope_parameters={"rope_theta": 100.0}), 2)
        >>> cos[0].tolist(), sin.shape
        ([1.0, 1.0], (2, 2))
    """
    angles_of_one, growth = frequencies(config, rope, length)
    if factors is not None:
        angles_of_one = angles_of_one / factors
    angles = (np.arange(columns, dtype=np.float32)[:, None] * angles_of_one).astype(np.float64)
    cosines = (np.cos(angles) * growth).astype(np.float32)
    sines = (np.sin(angles) * growth).astype(np.float32)
    return cosines, sines


def trained_length(config: Any, rope: Any) -> int:
    """Of texts before positions were scaled."""
    of_config = getattr(config, "original_max_position_embeddings", None)
    return rope.get("original_max_position_embeddings") or of_config or config.max_position_embeddings


def _longrope(
    config: Any, wavelengths: Float32[np.ndarray, " D2"], rope: Any, length: int | None
) -> tuple[Float32[np.ndarray, " D2"], float]:
    trained = trained_length(config, rope)
    factor = rope.get("factor") or config.max_position_embeddings / trained
    growth = rope.get("attention_factor")
    if growth is None:
        growth = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    divisors = rope["long_factor" if (length or 0) > trained else "short_factor"]
    return ONE / (np.array(divisors, np.float32) * wavelengths), growth


def _proportional(width: int, theta: float, rope: Any) -> Float32[np.ndarray, " D2"]:
    turning = int(rope.get(PART, 1.0) * width // 2)
    exponents = np.arange(0, 2 * turning, 2, dtype=np.float32) / np.float32(width)
    angles = np.zeros(width // 2, np.float32)
    angles[:turning] = ONE / np.power(float(theta), exponents.astype(np.float64)).astype(np.float32)
    return angles / np.float32(rope.get("factor", 1.0))


def _grown(config: Any, theta: float, rope: Any, length: int | None) -> float:
    """The base of a text that is longer than the trained ones."""
    trained = config.max_position_embeddings
    factor = rope["factor"]
    width = int(head_width(config) * rope.get(PART, 1.0))
    times = factor * max(length or 0, trained) / trained - (factor - 1)
    return theta * times ** (width / (width - 2))


def _wavelengths(config: Any, theta: float, part: float = 1.0) -> Float32[np.ndarray, " D2"]:
    """Positions per radian, [half of the part of a head that is rotated]."""
    width = int(head_width(config) * part)
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    return np.power(float(theta), exponents.astype(np.float64)).astype(np.float32)


def _llama3(angles: Float32[np.ndarray, " D2"], rope: Any) -> Float32[np.ndarray, " D2"]:
    length = rope["original_max_position_embeddings"]
    low = rope["low_freq_factor"]
    high = rope["high_freq_factor"]
    waves = np.float32(2 * math.pi) / angles
    slow = np.where(waves > length / low, angles / np.float32(rope["factor"]), angles)
    share = (np.float32(length) / waves - np.float32(low)) / np.float32(high - low)
    between = (ONE - share) * slow / np.float32(rope["factor"]) + share * slow
    return np.where((waves < length / high) | (waves > length / low), slow, between)


def _yarn(config: Any, theta: float, rope: Any) -> tuple[Float32[np.ndarray, " D2"], float]:
    part = rope.get(PART, 1.0)
    width = int(head_width(config) * part)
    length = rope["original_max_position_embeddings"]
    factor = rope.get("factor") or config.max_position_embeddings / length

    def pair_of(turns: float) -> float:
        """The pair that turns so often over the trained length."""
        return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = (pair_of(rope.get(name) or turns) for name, turns in YARN_TURNS.items())
    if rope.get("truncate", True):
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, width - 1)
    ramp = (np.arange(width // 2, dtype=np.float32) - np.float32(first)) / np.float32(max(last - first, 1e-3))
    extrapolated = ONE - ramp.clip(0, 1)
    wavelengths = _wavelengths(config, theta, part)
    scaled = ONE / (np.float32(factor) * wavelengths) * (ONE - extrapolated)
    return scaled + ONE / wavelengths * extrapolated, _growth(factor, rope)


def _growth(factor: float, rope: Any) -> float:
    """What yarn multiplies cosines and sines by; multipliers of its logarithm are DeepSeek's (arXiv 2405.04434, section 3.1.4)."""
    given = rope.get("attention_factor")
    if given is not None:
        return given

    def grown(multiplier: float = 1.0) -> float:
        return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0

    over = rope.get("mscale")
    below = rope.get("mscale_all_dim")
    return grown(over) / grown(below) if over and below else grown()


def unchanging_length(config: Any) -> int | None:
    """Longest text whose frequencies do not depend on its length, or None if they never do.

    Example:
        >>> from types import SimpleNamespace
        >>> unchanging_length(SimpleNamespace(max_position_embeddings=64, rope_parameters={"rope_type": "dynamic", "factor": 2.0}))
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
