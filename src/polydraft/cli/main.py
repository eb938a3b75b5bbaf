"""`polydraft`: its commands, and how errors look to a user.

Nothing heavy is imported here; each command imports what it needs when it runs.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EDQUOT, EFBIG, ENOSPC, EPIPE
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from polydraft import __version__, deprecation
from polydraft.cli.batch import batch
from polydraft.cli.bench import bench
from polydraft.cli.chat import chat
from polydraft.cli.check import check
from polydraft.cli.demo import demo
from polydraft.cli.doctor import doctor
from polydraft.cli.generate import generate
from polydraft.cli.images import images
from polydraft.cli.index import app as index
from polydraft.cli.methods import methods
from polydraft.cli.models import app as models
from polydraft.cli.serve import serve
from polydraft.cli.start import warn_in_one_line
from polydraft.cli.train import train
from polydraft.cli.tune import tune
from polydraft.errors import InvalidInputError, PolydraftError

EXIT_STATUS = 2
"""Of every refusal: the same as for an option that does not exist."""
ONCE = ("--model", "--draft-model")
FULL = (ENOSPC, EDQUOT, EFBIG)
"""Where there is no more room."""


class _Commands(TyperGroup):
    """Errors that the library raises on purpose and those of files become one line; anything else is a defect and keeps its traceback."""

    def make_context(self, *given: Any, **more: Any) -> Any:
        with _in_one_line():  # --help and --version are printed here
            return super().make_context(*given, **more)

    def invoke(self, ctx: Any) -> Any:
        with _in_one_line():
            return super().invoke(ctx)


class _Command(TyperCommand):
    """One that refuses two models, of which one would be dropped in silence; of other options the last one holds, as ever."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = deprecation.arguments(args)
        _, _, options = self.make_parser(ctx).parse_args(args=list(args))
        twice = next(
            (option for option in options if option.opts[0] in ONCE and not option.multiple and options.count(option) > 1), None
        )
        if twice is not None:
            raise InvalidInputError(f"{twice.opts[0]} was given {options.count(twice)} times; expected it once. Drop the others.")
        return super().parse_args(ctx, args)


@contextmanager
def _in_one_line() -> Iterator[None]:
    try:
        yield
    except PolydraftError as error:
        _end(" ".join(str(error).split()), error)
    except OSError as error:
        if error.errno in (None, EPIPE):  # no file's, or the reader of a pipe has left, who wants no message
            raise
        what = "the output could not be written" if error.filename is None else f"{str(error.filename)!r} could not be used"
        advice = "Free some room, or name another place." if error.errno in FULL else "Check the path and who may use it."
        _end(f"{what}: {error.strerror}. {advice}", error)


def _end(message: str, error: Exception) -> NoReturn:
    try:
        sys.stdout.flush()
    except OSError:  # the rest goes nowhere, or it would fail once more when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    typer.secho(f"error: {message}", fg="red", err=True)
    raise typer.Exit(EXIT_STATUS) from error


app = typer.Typer(
    cls=_Commands,
    help="Lossless multi-draft speculative decoding: language models generate faster, and the output distribution does not change.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (generate, batch, chat, serve, check, demo, tune, bench, images, methods, train, doctor):
    app.command()(command)
app.add_typer(index, name="index")
app.add_typer(models, name="models")
for group in (app, index, models):
    for registered in group.registered_commands:
        registered.cls = _Command


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"polydraft {__version__}")
        raise typer.Exit


EXAMPLES = """\
polydraft: lossless multi-draft speculative decoding.

  polydraft demo                                             the embedded pair with and without drafts, measured
  polydraft generate "def add(a, b):" --show                 continue a prompt, accepted draft tokens in colour
  polydraft chat --model FILE.gguf                           talk to a model
  polydraft serve --model FILE.gguf --draft-model SMALL.gguf an OpenAI-compatible server
  polydraft tune --model FILE.gguf --draft-model SMALL.gguf  which draft shape pays on this machine

All commands: polydraft --help"""


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Version number.")] = False,
) -> None:
    warn_in_one_line()
    if context.invoked_subcommand is None:
        typer.echo(EXAMPLES)
