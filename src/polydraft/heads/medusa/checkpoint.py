"""Medusa's heads on disk, see `heads.checkpoint`, with the authors' tensor names, of what is trained here and of what others published.

    config.json          medusa_num_heads, medusa_num_layers (blocks of each head)
    model.safetensors    {k}.{l}.linear.weight and .bias: block l of head k; {k}.{blocks}.weight: output rows of head k

Where there are no output rows, all heads use `lm_head.weight`, or the target's own rows.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from polydraft.heads.checkpoint import HeadCheckpoint, stored


class MedusaCheckpoint(HeadCheckpoint):
    """Heads of Medusa."""

    kind = "medusa"
    FIELDS = frozenset({"medusa_num_heads", "medusa_num_layers", "base_model_name_or_path", "version"})

    @classmethod
    def reads(cls, settings: Mapping[str, Any]) -> bool:
        """The authors' name no kind."""
        return "medusa_num_heads" in settings

    @classmethod
    def read(cls, settings: dict[str, Any], folder: Path) -> tuple[dict[str, Any], Mapping[str, np.ndarray]]:
        """What is written here, or the authors' medusa_lm_head, whose configuration leaves out the target's widths."""
        files = stored(folder, "model.safetensors", "medusa_lm_head.safetensors", "medusa_lm_head.pt")
        tensors = {name.removeprefix("medusa_head."): tensor for name, tensor in files.items()}
        settings = {cls.LAYERS: [], "medusa_num_layers": 1, **settings}
        if "0.0.linear.weight" in tensors:
            settings = {"hidden_size": len(tensors["0.0.linear.weight"]), **settings}
        if (rows := tensors.get(f"0.{settings['medusa_num_layers']}.weight")) is not None:
            settings = {"vocab_size": len(rows), **settings}
        return settings, tensors

    @property
    def num_heads(self) -> int:
        """Depths that are drafted."""
        return int(self.config.medusa_num_heads)

    @property
    def num_blocks(self) -> int:
        """Residual blocks of each head."""
        return int(self.config.medusa_num_layers)

    @property
    def has_own_rows(self) -> bool:
        """Whether each head has output rows of its own."""
        return f"0.{self.num_blocks}.weight" in self.tensors

    def parts(self) -> dict[str, tuple[int, ...]]:
        """See `HeadCheckpoint.parts`."""
        h = self.config.hidden_size
        blocks = [f"{k}.{l}.linear" for k in range(self.num_heads) for l in range(self.num_blocks)]
        shapes = {f"{block}.weight": (h, h) for block in blocks} | {f"{block}.bias": (h,) for block in blocks}
        rows = range(self.num_heads) if self.has_own_rows else ()
        return shapes | {f"{k}.{self.num_blocks}.weight": (len(self.ids), h) for k in rows}
