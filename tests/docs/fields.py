"""The keyword arguments of engines as types, from the settings: `python -m tests.docs.tables` writes src/polydraft/engine/fields.py anew."""

import json
from pathlib import Path

from polydraft.config import Config, EngineConfig, Setting, SpeculationConfig, settings

FILE = Path(__file__).parents[2] / "src" / "polydraft" / "engine" / "fields.py"
HEAD = '''"""The keyword arguments of engines, for editors and type checkers; `python -m tests.docs.tables` writes this file from `polydraft.config`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from polydraft.core import Decoding, Drafter, Target, Verifier
from polydraft.policy.fixed import Policy
from polydraft.policy.profile import Profile
'''
KINDS = {Path: "str | Path", dict: "Mapping[str, Any]"}


def type_of(spec: Setting) -> str:
    """Of the values that a setting takes in Python.

    Example:
        >>> type_of(settings(EngineConfig)["depth"]), type_of(settings(EngineConfig)["backend"])
        ('int | None', 'Literal["auto", "compiled", "transformers"]')
    """
    listed = (
        f"Sequence[{spec.items.__name__}]" if spec.kind is list else KINDS.get(spec.kind, spec.kind.__name__)
    )
    named = f"Literal[{', '.join(map(json.dumps, spec.choices))}]" if spec.choices else listed
    return " | ".join(filter(None, (named, spec.objects, "None" if spec.default is None else "")))


def help_of(spec: Setting) -> str:
    """What a setting is, and its default."""
    told = spec.described(spec.default)
    return told if spec.default in (None, ()) else f"{told} Default: {spec.default!r}."


def typed_dict(name: str, base: str, config: type[Config], without: frozenset[str]) -> str:
    fields = [
        f'    {field}: {type_of(spec)}\n    """{help_of(spec)}"""\n'
        for field, spec in settings(config).items()
        if field not in without
    ]
    head = f'class {name}({base}):\n    """Fields of `polydraft.config.{config.__name__}`{", but for the model" if "model" in without else ""}."""\n\n'
    return head + "".join(fields)


def text() -> str:
    speculation = typed_dict("SpeculationFields", "TypedDict, total=False", SpeculationConfig, frozenset())
    shared = frozenset({"model", *settings(SpeculationConfig)})
    return "\n\n".join(
        (
            HEAD,
            speculation,
            typed_dict("EngineFields", "SpeculationFields, total=False", EngineConfig, shared),
        )
    )
