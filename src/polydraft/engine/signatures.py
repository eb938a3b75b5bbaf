"""Signatures with a parameter for each field behind `**fields`, which notebooks complete and `help` shows."""

from collections.abc import Callable
from inspect import Parameter, signature
from typing import TypeVar

from polydraft.config import Config, settings

F = TypeVar("F", bound=Callable[..., object])


def with_fields(config: type[Config], typed: type) -> Callable[[F], F]:
    """A function whose signature names its keyword arguments. typed: their types, by name; their defaults are those of the configuration.

    Example:
        >>> from polydraft.config import SpeculationConfig
        >>> from polydraft.engine.fields import SpeculationFields
        >>> @with_fields(SpeculationConfig, SpeculationFields)
        ... def build(**fields): ...
        >>> signature(build).parameters["depth"]
        <Parameter "depth: int | None = None">
    """
    specs = settings(config)
    fields = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=specs[name].default, annotation=hint)
        for name, hint in typed.__annotations__.items()
    ]

    def named(function: F) -> F:
        plain = signature(function)
        parameters = [p for p in plain.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        function.__signature__ = plain.replace(parameters=[*parameters, *fields])  # pyright: ignore[reportFunctionMemberAccess]
        return function

    return named
