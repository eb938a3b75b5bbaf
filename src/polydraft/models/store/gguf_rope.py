"""How the positions of a GGUF file are scaled, read as llama.cpp reads it.

A factor without a type is linear; older files call it `rope.scale_linear`; 0 is none. What would change the angles and is not read here
is refused by name: ignored, it would be another model.
"""

import math
from collections.abc import Collection
from typing import Any

from polydraft.models.store.gguf_header import GgufHeader

ORIGINAL_LENGTH = "rope.scaling.original_context_length"
ROPE_FACTORS = "rope_freqs.weight"
"""Tensor of divisors of frequencies."""
LONG_FACTORS = "rope_factors_long.weight"
SHORT_FACTORS = "rope_factors_short.weight"
"""Tensors of Phi's files."""
YARN_TURNS = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}
YARN_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
"""What some architectures alone read."""
READ = {
    f"rope.scaling.{name}"
    for name in ("type", "factor", "finetuned", "original_context_length", "attn_factor")
} | {*YARN_TURNS.values()}
"""Keys of scaling; `finetuned` says nothing that the others do not."""
FOLDER = "Give its safetensors folder"


def rope_scaling(
    file: GgufHeader, width: int, *, read: Collection[str] = (), partial: bool | None = None
) -> dict[str, Any]:
    """Rotary parameters as transformers names them, but for the base and the factors of a longrope. width: of a head.

    read: further keys of scaling that the architecture reads.  partial: whether it may rotate a part of each head; default those of Phi alone.

    Raises:
        ModelLoadError: a scaling, or an option of it, that is not read.
    """
    unread = sorted(
        key
        for key in file.metadata
        if ".rope.scaling." in key and key.partition(".")[2] not in {*READ, *read}
    )
    if unread:
        raise file.refusal(f"its {unread[0]} is {file.metadata[unread[0]]!r}, which is not read", FOLDER)
    turned = file.count("rope.dimension_count", width)
    if turned != width and not (file.architecture == "phi3" if partial is None else partial):
        raise file.refusal(
            f"it turns {turned} of the {width} numbers of a head; expected all of them", FOLDER
        )
    part = {} if turned == width else {"partial_rotary_factor": turned / width}
    return _scaled(file) | part


def _scaled(file: GgufHeader) -> dict[str, Any]:
    kind = "longrope" if LONG_FACTORS in file.tensors else file.setting("rope.scaling.type", "linear")
    factor = file.number_or_none("rope.scaling.factor") or file.number_or_none("rope.scale_linear") or 1.0
    growth = file.number_or_none("rope.scaling.attn_factor") or 1.0
    if kind == "longrope" and LONG_FACTORS in file.tensors and factor == 1.0:
        return {"rope_type": kind} | ({"attention_factor": growth} if growth != 1.0 else {})
    if kind == "yarn" and factor != 1.0:
        turns = {name: file.number(key) for name, key in YARN_TURNS.items() if file.number_or_none(key)}
        grown = {"attention_factor": growth * (0.1 * math.log(factor) + 1.0)} if growth != 1.0 else {}
        return {
            "rope_type": kind,
            "factor": factor,
            "original_max_position_embeddings": file.count(ORIGINAL_LENGTH),
            **turns,
            **grown,
        }
    if kind not in ("linear", "none", "yarn") or growth != 1.0:
        scaling = f"{kind!r} with a factor of {factor} and attention times {growth}"
        raise file.refusal(f"its rope scaling is {scaling}; expected 'linear' or 'yarn'", FOLDER)
    return (
        {"rope_type": "default"} if kind == "none" or factor == 1.0 else {"rope_type": kind, "factor": factor}
    )
