"""`polydraft index build`: sort a corpus into a file that drafters read."""

import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from polydraft.cli.commands import PluggedGroup
from polydraft.cli.downloads import Yes, agree_on_downloads
from polydraft.cli.files import check_output
from polydraft.cli.options import DEFAULT_MODEL
from polydraft.cli.progress import bars
from polydraft.cli.start import quiet
from polydraft.config import EngineConfig
from polydraft.methods import registry

app = typer.Typer(
    cls=PluggedGroup,
    help="Index files for retrieval-based drafting.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


@app.callback()
def _index() -> None:
    pass


@app.command()
def build(
    corpus: Annotated[
        list[Path],
        typer.Argument(
            help="Text files, or folders of which hidden files and files that are no text are left out; each file is one document."
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Output file; an old one stays until the new one is complete.")
    ],
    kind: Annotated[str, typer.Option(help="text or passages.")] = "text",
    model: Annotated[
        str | None,
        typer.Option(
            help=f"passages: target model, whose hidden states are stored. Default: {DEFAULT_MODEL}.",
            show_default=False,
        ),
    ] = None,
    append: Annotated[bool, typer.Option("--append", help="passages: addition to an existing file.")] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help=f"text: target model, for its tokenizer. Default: {DEFAULT_MODEL}.", show_default=False
        ),
    ] = None,
    skip_unreadable: Annotated[
        bool,
        typer.Option("--skip-unreadable", help="Warnings instead of errors for files that cannot be read."),
    ] = False,
    yes: Yes = False,
) -> None:
    """Build an index of a corpus for `--drafter trigram`, `--drafter retrieval`, a mixture of both, or `--decoding nest`."""
    check_output("--out", out)
    quiet()
    options = {"model": model, "append": append, "tokenizer": tokenizer, "skip_unreadable": skip_unreadable}
    build_index = registry.load("index", kind)
    agree_on_downloads([EngineConfig(model=tokenizer or model or DEFAULT_MODEL, drafter=None)], yes=yes)
    build_index(corpus, out, **options)


def build_text(
    corpus: list[Path],
    out: Path,
    *,
    model: str | None,
    append: bool,
    tokenizer: str | None,
    skip_unreadable: bool,
) -> None:
    """A text index, which needs neither a model nor what is there."""
    name = tokenizer or DEFAULT_MODEL
    from polydraft.drafters.text.index_file import fingerprint
    from polydraft.drafters.text.text_index import TextIndex
    from polydraft.models import load
    from polydraft.papers.index.corpus import Corpus

    texts = Corpus(corpus)
    words = load.load_tokenizer(name)
    vocab_size = max(load.token_names(words).values()) + 1
    with warnings.catch_warnings(record=True) as skipped, bars("reading files") as step:
        warnings.simplefilter("always")
        documents = texts.documents(
            lambda text: load.encode(words, text) if text else [],
            skip_unreadable=skip_unreadable,
            done=lambda _: step(len(texts.files)),
        )
        TextIndex.build(documents, vocab_size, tokens_of=fingerprint(words)).save(out)
    say_skipped(skipped)
    typer.echo(f"{out}: text index of {texts.num_read:,} files, {out.stat().st_size:,} bytes{texts.left_out}")


def say_skipped(skipped: list[warnings.WarningMessage]) -> None:
    for warning in skipped:
        if issubclass(warning.category, UserWarning):
            print(f"warning: {warning.message}", file=sys.stderr)
