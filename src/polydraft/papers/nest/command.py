"""`polydraft index build --kind passages` and `polydraft index delete`: the documents that NEST quotes."""

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from polydraft.cli.downloads import Yes, agree_on_downloads
from polydraft.cli.options import DEFAULT_MODEL
from polydraft.cli.progress import bars
from polydraft.cli.start import quiet
from polydraft.config import EngineConfig
from polydraft.errors import InvalidInputError
from polydraft.papers.index.command import say_skipped


def delete(
    file: Annotated[Path, typer.Argument(help="File of `polydraft index build --kind passages`.")],
    source: Annotated[str, typer.Argument(help="Name of the document, as its quotations show it.")],
    model: Annotated[str, typer.Option(help="Target model that it was built with.")] = DEFAULT_MODEL,
    yes: Yes = False,
) -> None:
    """Delete a document's passages: no engine quotes them again, a running one neither."""
    quiet()
    agree_on_downloads([EngineConfig(model=model, drafter=None)], yes=yes)
    target, tokenizer = _target(model)
    from polydraft.papers.nest.passages import Passages

    opened = Passages.open(file, target, tokenizer, write=True)
    count = opened.delete(source)
    if not count:
        raise InvalidInputError(
            f"{source!r} is no document of {str(file)!r}; it has {', '.join(list(opened.sources)[:8]) or 'none'}."
        )
    typer.echo(f"{file}: {count} passages of {source} deleted")


def _target(name: str) -> tuple[Any, Any]:
    from polydraft.models import load

    target = load.load_model(name, max_num_seqs=1, max_model_len=256)
    words = load.load_tokenizer(name)
    load.take_vocabulary(target, words)
    return target, words


def build(
    corpus: list[Path],
    out: Path,
    *,
    model: str | None,
    append: bool,
    tokenizer: str | None,
    skip_unreadable: bool,
) -> None:
    """Build the index in one transaction, into the file that is there, or into a new one that takes its name. The tokenizer is the model's."""
    target, tokenizer = _target(model or DEFAULT_MODEL)
    from polydraft.models import load
    from polydraft.papers.index.corpus import Corpus
    from polydraft.papers.nest.passages import Passages

    texts = Corpus(corpus)
    place = out if append else out.with_name(out.name + ".part")
    if not append:
        place.unlink(missing_ok=True)
    store = (
        Passages.open(out, target, tokenizer, write=True)
        if append
        else Passages.create(place, target, tokenizer)
    )
    try:
        with warnings.catch_warnings(record=True) as skipped, bars("reading files") as step:
            warnings.simplefilter("always")
            read = list[Path]()
            documents = texts.documents(
                lambda text: load.encode(tokenizer, text) if text else [],
                skip_unreadable=skip_unreadable,
                named=read.append,
            )
            named = ((str(read[-1]), ids) for ids in documents if not step(len(texts.files)))
            count = store.append(named, target)
        if not store.sources:
            raise InvalidInputError("an empty corpus was given; expected a document of at least two tokens.")
        if not append:
            place.replace(out)
    finally:
        store.close()
        if not append:
            place.unlink(missing_ok=True)
    say_skipped(skipped)
    typer.echo(
        f"{out}: {count} passages of {texts.num_read:,} files added, {out.stat().st_size:,} bytes{texts.left_out}"
    )
