"""Options of the command line, generated from configurations: one a field."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from polydraft.config import Config, EngineConfig, PairConfig, Setting, flag, setting, settings
from polydraft.errors import InvalidInputError
from polydraft.files.cache_folder import NO_CACHE

ENGINE_OF_REQUESTS = ("offered", "max_num_seqs", "prefix_cache_bytes", "prefix_cache_file")
"""Fields of engines that serve many requests at a time."""


DEFAULT_MODEL = "smollm2-135m-instruct"
"""Of every command: a chat model of 98 MB that is downloaded once."""


class Only:
    """Which fields of a configuration a command takes, and defaults of its own. unset: what None means here."""

    def __init__(
        self,
        *names: str,
        without: tuple[str, ...] = (),
        unset: Mapping[str, str] | None = None,
        **defaults: Any,
    ) -> None:
        self.names = names
        self.without = without
        self.unset = unset or {}
        self.defaults = defaults

    def of(self, config: type[Config]) -> dict[str, tuple[Setting, Any]]:
        """By field its setting and its default here."""
        specs = {n: s for n, s in settings(config).items() if n not in self.without and s.flag != ""}
        specs |= {n: replace(specs[n], unset=words) for n, words in self.unset.items()}
        if self.names:
            specs = {n: replace(s, rest=s.rest if s.rest in self.names else "") for n, s in specs.items()}
        defaults = ({"model": DEFAULT_MODEL} if issubclass(config, PairConfig) else {}) | self.defaults
        return {n: (specs[n], defaults.get(n, specs[n].default)) for n in self.names or specs}


JSON_HELP = "JSON on standard output, and nothing else there"
AsJson = Annotated[bool, typer.Option("--json", help=f"{JSON_HELP}.", rich_help_panel="Output")]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        help="Context, batch, KV cache and activations of what was loaded, too.",
        rich_help_panel="Output",
    ),
]


def _keep_nothing(wanted: bool) -> None:
    if wanted:
        os.environ[NO_CACHE] = "1"


NoCache = Annotated[
    bool,
    typer.Option(
        "--no-cache",
        callback=_keep_nothing,
        help="Neither use nor store costs and packed weights, see `polydraft cache`.",
    ),
]
Engine = Annotated[EngineConfig, Only(without=ENGINE_OF_REQUESTS)]


@dataclass(frozen=True, kw_only=True)
class MeasurementOptions(Config):
    """What is measured, and how often."""

    prompts: Path | None = setting(
        "File of prompts, one a line, or .jsonl with a prompt key", Path, unset="held-out Python files"
    )
    temperature: float = setting("Sampling temperature; 0 is greedy", float, 1.0, low=0)
    max_tokens: int = setting("Number of new tokens of each continuation", int, 64, low=1)
    repetitions: int = setting("Number of measured repetitions of all prompts", int, 2, low=1)
    threads: int = setting("Number of CPU threads of every contender", int, 1, low=1)
    quick: bool = setting("Fewer and shorter measurements", bool, False, flag="--quick")


def configured(command: Callable[..., None]) -> Callable[..., None]:
    """A command with an option for each field of the configurations that it takes, as typer reads them."""
    hints = get_type_hints(command, include_extras=True)
    parameters = list[Parameter]()
    groups = dict[str, Any]()
    for parameter in signature(command).parameters.values():
        config, only = _configuration(hints[parameter.name])
        if config is None:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))
            continue
        groups[parameter.name] = config, only.of(config)
        parameters += [_option(name, *spec) for name, spec in only.of(config).items()]

    @wraps(command)
    def run(**values: Any) -> None:
        configs = {
            parameter: config(**_fields(specs, {name: values.pop(name) for name in specs}))
            for parameter, (config, specs) in groups.items()
        }
        command(**values, **configs)

    run.__signature__ = Signature(sorted(parameters, key=lambda p: p.default is not Parameter.empty))  # pyright: ignore[reportAttributeAccessIssue]
    run.__annotations__ = {}
    return run


def _configuration(hint: Any) -> tuple[Any, Only]:
    kind, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if not (is_dataclass(kind) and issubclass(kind, Config)):  # pyright: ignore[reportArgumentType]
        return None, Only()
    return kind, next((extra for extra in extras if isinstance(extra, Only)), Only())


def _option(name: str, spec: Setting, default: Any) -> Parameter:
    kind: Any = (
        bool
        if spec.value is not None
        else list[str]
        if spec.kind is dict or spec.rest
        else list[spec.items]
        if spec.kind is list
        else spec.kind
    )
    several = spec.kind in (list, dict) or bool(spec.rest)
    value = False if spec.value is not None else None if several else default
    if spec.rest:
        spec = replace(spec, text=f"{spec.text}; may be repeated, a path of each")
    flags = [f"{flag(name)}/--no-{name}"] if value is True else (spec.flag or flag(name)).split()
    option = typer.Option(*flags, help=spec.described(default), rich_help_panel=spec.panel)
    return Parameter(
        name,
        Parameter.KEYWORD_ONLY,
        default=value,
        annotation=Annotated[kind if value is not None else kind | None, option],
    )


def _fields(specs: Mapping[str, tuple[Setting, Any]], values: Mapping[str, Any]) -> dict[str, Any]:
    """Of a configuration, from what the command line has."""
    fields = dict[str, Any]()
    for name, (spec, default) in specs.items():
        if spec.rest and values[name]:
            fields[name], *rest = values[name]
            fields[spec.rest] = tuple(rest)
        else:
            fields[name] = _value(spec, values[name], default)
    return fields


def _value(spec: Setting, value: Any, default: Any) -> Any:
    """A field's value from what the command line has."""
    if spec.value is not None:
        return spec.value if value else default
    if spec.kind is dict:
        return dict(map(_named, value)) if value else default
    return (tuple(value) if value else default) if spec.kind is list else value


def _named(text: str) -> tuple[str, int | float | str]:
    """NAME=VALUE; a value that reads as a number, or is true or false, is one.

    Raises:
        InvalidInputError: something else.

    Example:
        >>> _named("k=8"), _named("passages=notes")
        (('k', 8), ('passages', 'notes'))
        >>> _named("share=true")
        ('share', True)
    """
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise InvalidInputError(
            f"{text!r} was given as an option by name; expected NAME=VALUE, such as alpha=0.2."
        )
    if value in ("true", "false"):
        return name, value == "true"
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            pass
    return name, value
