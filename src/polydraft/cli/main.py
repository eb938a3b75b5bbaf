"""`polydraft`: its commands.

Nothing heavy is imported here; each command imports what it needs when it runs.
"""

from typing import Annotated

import typer

from polydraft import __version__
from polydraft.cli.batch import batch
from polydraft.cli.bench import app as bench
from polydraft.cli.cache import app as cache
from polydraft.cli.chat import chat
from polydraft.cli.check import check
from polydraft.cli.commands import Command, Commands
from polydraft.cli.demo import demo
from polydraft.cli.doctor import doctor
from polydraft.cli.generate import generate
from polydraft.cli.launch import launch
from polydraft.cli.methods import methods
from polydraft.cli.models import app as models
from polydraft.cli.serve import serve
from polydraft.cli.start import warn_in_one_line
from polydraft.cli.train import train
from polydraft.cli.tune import tune

app = typer.Typer(
    cls=Commands,
    help="Lossless multi-draft speculative decoding: language models generate faster, and the output distribution does not change.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (generate, batch, chat, serve, launch, check, demo, tune, methods, train, doctor):
    app.command()(command)
app.add_typer(bench, name="bench")
app.add_typer(models, name="models")
app.add_typer(cache, name="cache")
for group in (app, bench, models, cache):
    for registered in group.registered_commands:
        registered.cls = Command


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
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Version number.")
    ] = False,
) -> None:
    warn_in_one_line()
    if context.invoked_subcommand is None:
        typer.echo(EXAMPLES)
