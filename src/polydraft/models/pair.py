"""The embedded pair: a small target and a smaller draft, trained on Python source and shipped inside the package."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

EMBEDDED = "embedded"
"""Name of the target, wherever a model is named; its draft model comes with it."""


@dataclass(frozen=True)
class Prompt:
    """The beginning of a Python module that neither model saw in training."""

    name: str
    text: str
    source: str
    licence: str


def embedded_folder() -> Path:
    return Path(str(files("polydraft.models") / "embedded"))


def target_folder() -> Path:
    """Folder of the target, for `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`.

    >>> (target_folder() / "config.json").exists()
    True
    """
    return embedded_folder() / "target"


def draft_folder() -> Path:
    """Folder of the draft; same tokenizer as the target.

    >>> (draft_folder() / "model.safetensors").exists()
    True
    """
    return embedded_folder() / "draft"


def prompts() -> list[Prompt]:
    """Held-out prompts: short ones of 60 to 200 tokens first, then a few of about 500, named `*-long`.

    >>> prompts()[0].name
    'argparse'
    """
    lines = (embedded_folder() / "prompts" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [Prompt(**json.loads(line)) for line in lines]


def card() -> dict[str, Any]:
    """Figures of the model card: held-out losses in nats per token, acceptance, corpus hash, commands.

    >>> card()["held_out"]["target_nats_per_token"] < card()["held_out"]["trigram_nats_per_token"]
    True
    """
    return json.loads((embedded_folder() / "figures.json").read_text(encoding="utf-8"))
