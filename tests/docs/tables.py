"""The tables of the docs that follow from the registry: `python -m tests.docs.tables` writes them anew."""

import re
from collections.abc import Callable
from pathlib import Path

from polydraft.cli.methods import markdown as methods
from polydraft.config import markdown as configuration
from tests.exactness.validity import markdown as validity

DOCS = Path(__file__).parents[2] / "docs"
TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "methods": ("methods.md", methods),
    "configuration": ("reference/configuration.md", configuration),
    "validity": ("results/exactness.md", validity),
}


def split(mark: str) -> tuple[Path, str, str, str]:
    """The page of a table, and its text before, in and behind the table."""
    page = DOCS / TABLES[mark][0]
    found = re.fullmatch(rf"(.*<!-- {mark} -->\n)(.*)(\n<!-- /{mark} -->.*)", page.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None, f"{page} lacks the marks of {mark}"
    return page, found[1], found[2], found[3]


if __name__ == "__main__":
    for mark, (_, made) in TABLES.items():
        page, before, _, behind = split(mark)
        page.write_text(before + made() + behind, encoding="utf-8")
