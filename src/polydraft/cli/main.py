"""`polydraft`: its commands, and how errors look to a user.

Nothing heavy is imported here; each command imports what it needs when it runs.
"""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from polydraft import __version__
from polydraft.cli.bench import bench
from polydraft.cli.demo import demo
from polydraft.cli.doctor import doctor
from polydraft.cli.generate import generate
from polydraft.cli.limits import limits
from polydraft.cli.methods import methods
from polydraft.errors import PolydraftError

__all__ = ["EXIT_STATUS", "app"]

EXIT_STATUS = 2
"""Of every refusal: the same as for an option that does not exist."""


class _Commands(TyperGroup):
    """Errors that the library raises on purpose become one line; anything else is a defect and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PolydraftError as error:
            message = " ".join(str(error).split())
            typer.secho(f"error: {message}", fg="red", err=True)
            raise typer.Exit(EXIT_STATUS) from error


app = typer.Typer(
    cls=_Commands,
    help="Language models generate faster with several drafts per step, and what they generate does not change.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command()(demo)
app.command()(bench)
app.command()(limits)
app.command()(methods)
app.command()(doctor)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"polydraft {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    pass
