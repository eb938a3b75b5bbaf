"""What all commands share: help by panels, options that hold once, and how errors look to a user."""

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from errno import EPIPE
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from polydraft.cli.help import write_help
from polydraft.cli.option_rules import Given, check_options
from polydraft.errors import InvalidInputError, PolydraftError
from polydraft.files.atomic import is_full
from polydraft.methods import registry

EXIT_STATUS = 2
"""Of every refusal: the same as for an option that does not exist."""


_BASE: Any = object
"""A command or a group of click."""


class _WithOptions(_BASE):
    """Refuses two models, of which one would be dropped in silence; of other options the last one holds, as ever."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, _, options = self.make_parser(ctx).parse_args(args=list(args))
        single = [
            option
            for option in options
            if option.opts[0] in ("--model", "--draft-model") and not option.multiple
        ]
        twice = next((option for option in single if single.count(option) > 1), None)
        if twice is not None:
            raise InvalidInputError(
                f"{twice.opts[0]} was given {options.count(twice)} times; expected it once. Drop the others."
            )
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        check_options(ctx.info_name, _given(ctx, self.params))
        try:
            return super().invoke(ctx)
        except PolydraftError as error:
            options = {p.name: p.opts[0] for p in self.params if p.param_type_name == "option"}
            raise type(error)(in_options(str(error), options)) from error

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_help(ctx, formatter, self.get_params(ctx))


def _given(ctx: Any, parameters: Iterable[Any]) -> Given:
    """Options of a command as they are now, by the names that they are given by."""
    values = dict[str, str]()
    named = list[str]()
    for parameter in parameters:
        if parameter.param_type_name != "option":
            continue
        value = ctx.params.get(parameter.name)
        off = value is False and bool(parameter.secondary_opts)
        option = parameter.secondary_opts[0] if off else parameter.opts[0]
        several = isinstance(value, (list, tuple))
        values[option] = (
            ""
            if value is None or isinstance(value, bool)
            else " ".join(map(str, value))
            if several
            else str(value)
        )
        if getattr(ctx.get_parameter_source(parameter.name), "name", "") == "COMMANDLINE":
            named.append(option)
    return Given(values, tuple(named))


class Command(_WithOptions, TyperCommand):
    """One with options and no commands below it."""


class PluggedGroup(TyperGroup):
    """Commands, each with the first sentence of its help, whole; those of other packages are imported when none of its own is asked for."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            self._plug_in(ctx)
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        self._plug_in(ctx)
        return super().list_commands(ctx)

    def _plug_in(self, ctx: Any) -> None:
        above = f"{ctx.info_name}." if ctx.parent else ""
        for full in registry.names("command"):
            name = full.removeprefix(above)
            if full == above + name and "." not in name and name not in self.commands:
                self.add_command(_plugged_in(registry.load("command", full), name), name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            commands = ((name, self.commands[name]) for name in self.list_commands(ctx))
            formatter.write_dl([(name, command.get_short_help_str(limit=200)) for name, command in commands])


def _plugged_in(loaded: Any, name: str) -> Any:
    """A function for Typer as a command, or a `typer.Typer` as a group."""
    if not isinstance(loaded, typer.Typer):
        command = loaded
        loaded = typer.Typer(add_completion=False, rich_markup_mode=None)
        loaded.command(name)(command)
    for registered in loaded.registered_commands:
        registered.cls = Command
    return typer.main.get_command(loaded)


class CommandGroup(_WithOptions, PluggedGroup):
    """A command with options, and others below it."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


class Commands(PluggedGroup):
    """Errors that the library raises on purpose and those of files become one line; anything else is a defect and has its traceback."""

    def make_context(self, *given: Any, **more: Any) -> Any:
        _take_any_text()
        with _in_one_line():  # --help and --version are printed here
            return super().make_context(*given, **more)

    def invoke(self, ctx: Any) -> Any:
        with _in_one_line():
            return super().invoke(ctx)


def in_options(message: str, options: Mapping[str, str]) -> str:
    """An error of the library in the words of the command line. options: by field.

    Example:
        >>> in_options("depth=0 was given; expected 1. For plain decoding use drafter=None.", {"depth": "--depth", "drafter": "--drafter"})
        '--depth 0 was given; expected 1. For plain decoding use --drafter none.'
        >>> in_options("max_tokens=0 was given; expected an integer >= 1, -1 or None.", {"max_tokens": "--max-tokens"})
        '--max-tokens 0 was given; expected an integer >= 1 or -1.'
    """

    def option(match: re.Match[str]) -> str:
        name = match["name"]
        value = match["value"]
        if name not in options:
            return match[0]
        if value is None:
            return options[name] if "_" in name else match[0]
        text = "none" if value == "None" and name == "drafter" else value.strip("'") or value
        return (
            f"no {options[name]}"
            if text == "None"
            else options[name]
            if text == "True"
            else f"{options[name]} {text}"
        )

    options_text = re.sub(
        r"(?<![\w'\"/.-])(?P<name>[a-z]\w*)(?:=(?P<value>'[^']*'|\"[^\"]*\"|\([^)]*\)|-?\w+(?:\.\d+)?(?:e[+-]?\d+)?))?(?![\w=])",
        option,
        message,
    )
    return (
        re.sub(r", (-?\d+) or None\b", r" or \1", options_text)
        .replace(" or None", "")
        .replace("None or ", "")
    )


def _take_any_text() -> None:
    """What an output's encoding lacks is written as "?", and a stream that was closed before the start takes nothing and gives nothing."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - it stays open
        elif mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


@contextmanager
def _in_one_line() -> Iterator[None]:
    try:
        yield
    except PolydraftError as error:
        _end(" ".join(str(error).split()), error)
    except OSError as error:
        if error.errno in (None, EPIPE):  # no file's, or the reader of a pipe has left, who wants no message
            raise
        what = (
            "the output could not be written"
            if error.filename is None
            else f"{str(error.filename)!r} could not be used"
        )
        advice = (
            "Free some room, or name another place."
            if is_full(error)
            else "Check the path and who may use it."
        )
        _end(f"{what}: {error.strerror}. {advice}", error)


def _end(message: str, error: Exception) -> NoReturn:
    try:
        sys.stdout.flush()
    except OSError:  # the rest goes nowhere, or it would fail once more when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    typer.secho(f"error: {message}", fg="red", err=True)
    raise typer.Exit(EXIT_STATUS) from error
