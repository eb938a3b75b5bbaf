"""Old public names: each still works, and a `DeprecationWarning` says the new one."""

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

C = TypeVar("C", bound=type)
KEYWORDS = {"law": "decoding", "law_options": "decoding_options", "draft": "draft_model", "target": "model"}
"""Of engines."""
OPTIONS = {"--law": "--decoding", "--law-option": "--decoding-option"}
"""Of the command line."""
STATISTICS = {
    "emitted": "generated_tokens",
    "target_calls": "steps",
    "drafted": "drafted_tokens",
    "accepted": "accepted_tokens",
    "tokens_per_call": "tokens_per_step",
}
"""Of `RequestStats`."""


def current(name: str, names: Mapping[str, str], stacklevel: int = 3) -> str:
    """The name of today; an old one warns.

    Example:
        >>> current("decoding", KEYWORDS)
        'decoding'
    """
    if name in names:
        warnings.warn(f"{name} is deprecated; use {names[name]}.", DeprecationWarning, stacklevel=stacklevel)
    return names.get(name, name)


def keywords(values: Mapping[str, Any], names: Mapping[str, str] = KEYWORDS) -> dict[str, Any]:
    """Keyword arguments under the names of today."""
    return {current(name, names, 4): value for name, value in values.items()}


def arguments(args: list[str]) -> list[str]:
    """Arguments of a command line with the options of today.

    Example:
        >>> arguments(["generate", "--decoding=nest"])
        ['generate', '--decoding=nest']
    """
    return ["".join((current(option, OPTIONS), equals, value)) for option, equals, value in (arg.partition("=") for arg in args)]


def renamed(names: Mapping[str, str]) -> Callable[[C], C]:
    """A class that also takes and gives its fields under their old names. names: old to new."""

    def add(cls: C) -> C:
        def old(name: str) -> property:
            return property(lambda self: getattr(self, current(name, names)))

        for name in names:
            setattr(cls, name, old(name))
        init = cls.__init__

        def build(self: Any, *args: Any, **fields: Any) -> None:
            init(self, *args, **keywords(fields, names))

        cls.__init__ = wraps(init)(build)
        return cls

    return add
