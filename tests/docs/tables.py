"""What follows from the registry and the settings, tables of the docs and CITATION.cff: `python -m tests.docs.tables` writes it anew."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from polydraft.cli.methods import lossless
from polydraft.cli.methods import table as methods_table
from polydraft.config import (
    BatchConfig,
    Config,
    EngineConfig,
    ReplicaConfig,
    SamplingConfig,
    ServerConfig,
    Setting,
    flag,
    settings,
)
from polydraft.methods import registry
from tests.docs import architectures, citation_file, fields, request_fields
from tests.exactness import validity


def short(authors: str) -> str:
    """Of each paper at most three names, else the first one and et al.

    Example:
        >>> short("Li, Wei, Zhang & Zhang; Sun et al.")
        'Li et al.; Sun et al.'
    """
    papers = [names.strip() for names in authors.split(";")]
    return "; ".join(names if names.count(",") < 2 else f"{names.split(',')[0]} et al." for names in papers)


def paper(row: dict[str, Any]) -> str:
    link = f" ([{row['arxiv']}](https://arxiv.org/abs/{row['arxiv']}))" if row["arxiv"] else ""
    return f"{row['title']}, {short(row['authors'])}{link}"


HEADS = {"verifier": ("Verifiers", "lossless"), "decoding": ("Decoding methods", "outputs are lossless to")}


def methods() -> str:
    """The tables of docs/methods.md: method, year, paper, lossless. Those of drafters are on a page of their own."""
    parts: list[str] = []
    for kind, (title, claim) in HEADS.items():
        lines = [f"## {title}", "", f"| method | year | paper | {claim} |", "|---|---|---|---|"]
        for row in methods_table():
            if row["kind"] == kind:
                said = lossless(row) if kind == "verifier" else row["lossless_to"]
                lines.append(f"| `{row['name']}` | {row['year']} | {paper(row)} | {said} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


GROUPS = {
    "From a smaller model": "Smaller model, ",
    "From a trained head": "",
    "From the text alone": "",
    "From an index of a corpus": "",
    "Others, most of [the wing](papers/index.md#the-wing)": "",
}
"""Of drafters, and how titles begin that need not say so again."""


def group(drafter: str) -> str:
    """What a registered drafter drafts from, in the registry's own groups."""
    smaller_model, head, text, corpus, others = GROUPS
    if registry.takes(drafter, "index"):
        return corpus
    if drafter in registry.OF_TEXT:
        return text
    if drafter in registry.heads():
        return head
    return smaller_model if drafter in ("model", *registry.OF_MODELS) else others


def drafters() -> str:
    """The tables of docs/drafters.md: every way of drafting, by what it needs, and its paper."""
    tables = {name: ["| drafter | year | method, paper |", "|---|---|---|"] for name in GROUPS}
    for row in methods_table():
        if row["kind"] == "drafter":
            needed = group(row["name"].partition(":")[0])
            title = paper(row).removeprefix(GROUPS[needed])
            tables[needed].append(f"| `{row['name']}` | {row['year']} | {title} |")
    return "\n\n".join(f"**{name}**\n\n" + "\n".join(lines) for name, lines in tables.items())


def configuration() -> str:
    """The reference page's tables: a field, what it is, its default."""
    kinds = (EngineConfig, SamplingConfig, ServerConfig, ReplicaConfig, BatchConfig)
    return "\n\n".join(f"## {kind.__name__}\n\n{kind.__doc__}\n\n{settings_table(kind)}" for kind in kinds)


def settings_table(kind: type[Config]) -> str:
    rows = ["| field | what it is | default |", "|---|---|---|"]
    for name, spec in settings(kind).items():
        told = spec.described().partition(" Default: ")[0]
        default = spec.unset or ("" if spec.default in (None, ()) else f"`{spec.default}`")
        rows.append(f"| {named(name, spec)} | {told} | {default} |")
    return "\n".join(rows)


def named(name: str, spec: Setting) -> str:
    """A field, and its option where that has another name, or where there is none.

    Example:
        >>> fields_of_engines = settings(EngineConfig)
        >>> named("depth", fields_of_engines["depth"]), named("activations", fields_of_engines["activations"])
        ('`depth`', '`activations`, `--exact`')
    """
    if spec.flag == "":
        return f"`{name}`, no option"
    option = (spec.flag or flag(name)).split()[0]
    return f"`{name}`" if option == flag(name) else f"`{name}`, `{option}`"


DOCS = Path(__file__).parents[2] / "docs"
PAIRS = DOCS / "results" / "exactness.csv"
"""Every verifier with every way of drafting."""
REQUEST_FIELDS = DOCS / "reference" / "fields.csv"
"""What becomes of each field of each server."""
TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "methods": ("methods.md", methods),
    "drafters": ("drafters.md", drafters),
    "configuration": ("reference/configuration.md", configuration),
    "validity": ("results/exactness.md", validity.markdown),
    "architectures": ("reference/architectures.md", architectures.table),
    "missing": ("reference/architectures.md", architectures.missing),
    "refused": ("reference/fields.md", partial(request_fields.by_reason, "refused")),
    "ignored": ("reference/fields.md", partial(request_fields.by_reason, "ignored")),
}


def split(mark: str) -> tuple[Path, str, str, str]:
    """The page of a table, and its text before, in and behind the table."""
    page = DOCS / TABLES[mark][0]
    found = re.fullmatch(
        rf"(.*<!-- {mark} -->\n)(.*)(\n<!-- /{mark} -->.*)", page.read_text(encoding="utf-8"), re.DOTALL
    )
    assert found is not None, f"{page} lacks the marks of {mark}"
    return page, found[1], found[2], found[3]


if __name__ == "__main__":
    citation_file.FILE.write_text(citation_file.text(), encoding="utf-8")
    fields.FILE.write_text(fields.text(), encoding="utf-8")
    PAIRS.write_text(validity.csv_text(), encoding="utf-8")
    REQUEST_FIELDS.write_text(request_fields.csv_text(), encoding="utf-8")
    for mark, (_, made) in TABLES.items():
        page, before, _, behind = split(mark)
        page.write_text(before + made() + behind, encoding="utf-8")
