"""Rotary positions of transformers whose frequencies depend on the length of a text, fixed for one length while a forward pass runs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polydraft.models.rotary import CHANGING, unchanging_length


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
