"""CITATION.cff: what `polydraft.citation()` prints, in the Citation File Format 1.2.0, which repositories' hosts and Zotero read.

Source of the format: Druskat et al. (2021), Citation File Format, doi 10.5281/zenodo.5171937.
"""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import yaml

import polydraft

FILE = Path(__file__).parents[2] / "CITATION.cff"
ENTRY = re.compile(r"@(\w+)\{([^,]+),\n(.*?)\n\}", re.DOTALL)
FIELD = re.compile(r"^  (\w+) = \{(.*)\},?$", re.MULTILINE)


def printed() -> str:
    """The BibTeX of the library and of all papers."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        polydraft.citation()
    return out.getvalue()


def entries(bibtex: str) -> list[dict[str, str]]:
    """Fields of each entry, in order.

    Example:
        >>> entries("@misc{key,\\n  title = {A title},\\n  year = {2026}\\n}")
        [{'title': 'A title', 'year': '2026'}]
    """
    return [dict(FIELD.findall(body)) for _, _, body in ENTRY.findall(bibtex)]


def authors(names: str) -> list[dict[str, str]]:
    """People and groups as the format has them; "others" are a group of that name.

    Example:
        >>> authors("Sun, Ziteng and others")
        [{'family-names': 'Sun', 'given-names': 'Ziteng'}, {'name': 'others'}]
    """
    parts = (name.strip("{}").partition(", ") for name in names.split(" and "))
    return [
        {"family-names": family, "given-names": given} if given else {"name": family}
        for family, _, given in parts
    ]


def reference(entry: dict[str, str]) -> dict[str, Any]:
    """A paper of arXiv."""
    address = f"https://arxiv.org/abs/{entry['eprint']}"
    return {
        "type": "article",
        "title": entry["title"],
        "authors": authors(entry["author"]),
        "year": int(entry["year"]),
        "url": address,
        "identifiers": [{"type": "other", "value": f"arXiv:{entry['eprint']}"}],
    }


def text() -> str:
    """The whole file."""
    ours, *papers = entries(printed())
    whole = {
        "cff-version": "1.2.0",
        "message": "If you use polydraft, please cite it, and the papers of the methods that you used: polydraft.citation(engine) prints them.",
        "type": "software",
        "title": ours["title"],
        "version": ours["version"],
        "authors": authors(ours["author"]),
        "license": "Apache-2.0",
        "keywords": ["speculative decoding", "language models", "inference", "sampling"],
        "references": [reference(paper) for paper in papers],
    }
    return yaml.safe_dump(whole, sort_keys=False, allow_unicode=True, width=1000)
