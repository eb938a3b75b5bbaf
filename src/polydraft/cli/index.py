"""`polydraft index build`: count or sort a corpus into a file that a drafter reads."""

import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from polydraft.cli.files import check_output
from polydraft.cli.progress import bars
from polydraft.cli.start import quiet

app = typer.Typer(help="Make index files for drafters that read a corpus.", no_args_is_help=True)


@app.callback()
def _index() -> None:
    pass


@app.command()
def build(
    corpus: Annotated[list[Path], typer.Argument(help="Text files, or folders of them; each file is one document.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write; an old one stays until the new one is complete.")],
    kind: Annotated[str, typer.Option(help="trigram or retrieval.")] = "trigram",
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder of the target model whose tokenizer to use; the embedded one without it.")
    ] = None,
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Name files that cannot be read, and go on.")
    ] = False,
) -> None:
    """Build an index of a corpus for `--drafter trigram` or `--drafter retrieval`."""
    check_output("--out", out)
    quiet()
    from polydraft import registry
    from polydraft.drafters.text import corpus as reading
    from polydraft.drafters.text.index_file import fingerprint
    from polydraft.models import load, pair

    maker = registry.index(kind)
    paths = reading.files(corpus)
    words = load.load_tokenizer(tokenizer or str(pair.target_folder()))
    vocab_size = max(words.get_vocab().values()) + 1
    with warnings.catch_warnings(record=True) as skipped, bars("reading files") as step:
        warnings.simplefilter("always")
        texts = reading.documents(
            paths,
            lambda text: load.encode(words, text) if text else [],
            skip_unreadable=skip_unreadable,
            done=lambda _: step(len(paths)),
        )
        maker.build(texts, vocab_size, tokens_of=fingerprint(words)).save(out)
    for warning in skipped:
        if issubclass(warning.category, UserWarning):
            print(f"warning: {warning.message}", file=sys.stderr)
    typer.echo(f"{out}: {kind} index of {len(paths)} files, {out.stat().st_size:,} bytes")
