"""Tools, calls and thoughts in the formats of others' chat templates: what each template writes itself, read back by the parser and through the server.

    python -m studies.tool_formats [--templates FOLDER] [--out FOLDER]

Without a folder the templates of llama.cpp's source distribution are fetched from the package index. Each template writes an assistant's answers by
Jinja2 alone: a model that says just that is served, and what clients get is compared with what went in. Nothing of `server/formats` writes here.
"""

import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import typer

from polydraft.bench.record import csv_table, markdown_table, write_texts
from polydraft.models import load, pair
from polydraft.server.formats.derive import format_of
from studies.options import Out, Quick
from studies.tool_formats.answers import asked, parsed, served, told, wanted_of
from studies.tool_formats.cases import CASES, FEW, THINKING, TOOLS
from studies.tool_formats.templates import Template

DISTRIBUTION = "llama-cpp-python==0.3.36"
INSIDE = "vendor/llama.cpp/models/templates/"


class Row(NamedTuple):
    """One answer of a template. whole, pieces: by the parser.  server: what a client gets.  None: not tried."""

    template: str
    format: str
    origin: str
    case: str
    whole: bool | None
    pieces: bool | None
    server: bool

    @property
    def right(self) -> bool:
        """Whether all of it comes back."""
        return False not in (self.whole, self.pieces, self.server)


def rows_of(template: Template, few: bool) -> Iterator[Row]:
    """Of all that a template writes."""
    form = format_of(template.text)
    row = partial(Row, template.name, form.name, form.origin)
    tools = template.tools_name
    told_of = {tools: template.told(tools)} if tools else {}
    with served(template) as (client, model):
        prompts = (
            {"prompt": ({}, {}), "tools": (told_of, {"tools": TOOLS})} if tools else {"prompt": ({}, {})}
        )
        for name, (names, more) in prompts.items():
            wanted = template.prompt(**names)
            found = asked(client, template, return_prompt_text=True, max_tokens=1, **more)
            if wanted is not None:
                yield row(name, None, None, found.get("prompt_text") == wanted)
        for case in (*CASES, *THINKING):
            names, more = ({}, {}) if case.name == "thinking" else (told_of, {"tools": TOOLS})
            text = None if few and case.name not in FEW else template.answer(case, **names)
            if text is None or (case.name == "thinking with tools" and not tools):
                continue
            wanted = wanted_of(case)
            prompt = template.prompt(**names) or ""
            whole, pieces = (parsed(template, prompt, text, model.tokenizer, size) == wanted for size in (len(text), 1))  # fmt: skip
            yield row(case.name, whole, pieces, told(client, model, template, text, **more) == wanted)


GROUPS = {
    "prompts": ("prompt",),
    "tools": ("tools",),
    "calls": tuple(case.name for case in CASES),
    "thinking": ("thinking",),
    "thinking with tools": ("thinking with tools",),
}
WHY = {
    ("openai-gpt-oss-120b", "text before"): "the template writes a text before a call as thoughts",
    ("Reka-Edge", "unicode"): "the grammar of JSON has no escapes of characters, which the template writes",
    ("LFM2.5-8B-A1B", "no arguments"): "the grammar, not found out",
    ("MiniMax-M3", "nested"): "the grammar of an object whose schema names no properties",
}
"""Why not, where something does not come back."""


def page(rows: Sequence[Row]) -> str:
    """Two tables: of all, and of each template of which not all comes back."""
    names = list(dict.fromkeys(row.template for row in rows))
    by_group = list[tuple[Any, ...]]()
    for group, cases in GROUPS.items():
        found = [[row.right for row in rows if row.template == name and row.case in cases] for name in names]
        by_group.append((group, sum(map(bool, found)), sum(all(f) for f in found if f)))
    by_template = list[tuple[Any, ...]]()
    for name in names:
        own = [row for row in rows if row.template == name]
        wrong = [f"{row.case}: {WHY.get((name, row.case), 'open')}" for row in own if not row.right]
        form = own[0].format.replace("|", "\\|")
        if wrong:
            right = len(own) - len(wrong)
            by_template.append((name, f"`{form}`", own[0].origin, len(own), right, "; ".join(wrong)))
    groups = markdown_table(["what a template writes", "templates", "all of it is right"], by_group)
    head = ["template", "format", "found by", "answers", "right", "not right"]
    return f"{groups}\n\n{markdown_table(head, by_template)}\n"


def fetched(folder: Path) -> Path:
    """The templates of llama.cpp's source distribution, in a folder that is for nothing else."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary",
        ":all:",
        DISTRIBUTION,
    ]
    subprocess.run([*command, "--dest", str(folder)], check=True)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        for member in archive:
            if INSIDE in member.name and member.name.endswith(".jinja"):
                content = archive.extractfile(member)
                assert content is not None
                (folder / Path(member.name).name).write_bytes(content.read())
    return folder


def main(
    templates: Annotated[
        Path | None, typer.Option(help="Folder of templates, *.jinja; fetched without it.")
    ] = None,
    out: Out = Path("build/tool-formats"),
    quick: Quick = False,
) -> None:
    """Count what comes back of what chat templates write."""
    tokenizer = load.load_tokenizer(str(pair.draft_folder()))
    tokens = {
        f"{name}_token": str(getattr(tokenizer, f"{name}_token") or "")
        for name in ("bos", "eos", "unk", "pad")
    }
    with TemporaryDirectory() as folder:
        files = sorted((templates or fetched(Path(folder))).glob("*.jinja"))
        read = [Template(file.stem, file.read_text(encoding="utf-8"), tokens) for file in files]
    rows = list[Row]()
    for template in read:
        rows += rows_of(template, quick)
        typer.echo(
            f"{template.name}: {sum(row.right for row in rows if row.template == template.name)}", err=True
        )
    out.mkdir(parents=True, exist_ok=True)
    text = page(rows)
    write_texts({out / "tool-formats.md": text, out / "tool-formats.csv": csv_table(Row._fields, rows)})
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
