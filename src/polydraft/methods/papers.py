"""The papers behind methods: what a method declares of them, and BibTeX for those that were used."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Protocol

from polydraft import __version__
from polydraft.core import DecodingMethod, DraftSampling, Method, TreeShape
from polydraft.errors import unknown_name
from polydraft.methods import registry


@dataclass(frozen=True)
class Paper:
    """authors: as in BibTeX."""

    title: str
    authors: str
    year: int

    def entry(self, key: str, arxiv: str) -> str:
        return (
            f"@misc{{{key},\n  title = {{{self.title}}},\n  author = {{{self.authors}}},\n  year = {{{self.year}}},\n"
            f"  eprint = {{{arxiv}}},\n  archivePrefix = {{arXiv}}\n}}"
        )

    @property
    def by(self) -> str:
        """The authors as in running text.

        Example:
            >>> PAPERS["2211.17192"].by, PAPERS["2403.10444"].by
            ('Leviathan, Kalman & Matias', 'Sun et al.')
        """
        names = [name.partition(",")[0] for name in self.authors.split(" and ")]
        if names[-1] == "others":
            return f"{', '.join(names[:-1])} et al."
        return " & ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


_ENTRY = re.compile(r"title = \{(.*)\},\n  author = \{(.*)\},\n  year = \{(.*)\},\n  eprint = \{(.*)\}")
PAPERS = {
    arxiv: Paper(title, authors, int(year))
    for title, authors, year, arxiv in _ENTRY.findall(
        (files("polydraft.methods") / "papers.bib").read_text("utf-8")
    )
}
"""arXiv id -> paper, as in papers.bib."""


def method(
    name: str,
    title: str,
    arxiv: str,
    draft_sampling: Iterable[DraftSampling],
    shapes: Iterable[TreeShape] = TreeShape,
    **others: Any,
) -> Method:
    """What a method of this package declares. arxiv: ids in `PAPERS`, its own first; "" is our own work.  others: as of `core.Method`.

    Example:
        >>> found = method("new", "A new one", "2305.09781 2401.06706", {DraftSampling.IID})
        >>> found.authors, found.year, found.arxiv
        ('Miao et al.; Yang et al.', 2024, '2305.09781')
    """
    return Method(
        name,
        title,
        draft_sampling=frozenset(draft_sampling),
        shapes=frozenset(shapes),
        **(_source(arxiv) | others),
    )


def decoding_method(name: str, title: str, arxiv: str, lossless_to: str, drafter: str = "") -> DecodingMethod:
    """The same of a decoding method of this package."""
    return DecodingMethod(name, title, lossless_to=lossless_to, drafter=drafter, **_source(arxiv))


def _source(arxiv: str) -> dict[str, Any]:
    ids = arxiv.split()
    return {
        "authors": "; ".join(PAPERS[number].by for number in ids) or "polydraft",
        "year": max((PAPERS[number].year for number in ids), default=2026),
        "arxiv": "".join(ids[:1]),
    }


OURS = (
    "@software{polydraft,\n  title = {polydraft: lossless multi-draft speculative decoding},\n"
    f"  author = {{{{polydraft developers}}}},\n  version = {{{__version__}}},\n  year = {{2026}}\n}}"
)


def _methods() -> dict[str, Method | DecodingMethod]:
    verifiers = (registry.verifier(name).info for name in registry.names("verifier"))
    drafters = (info for name in registry.names("drafter") for info in registry.drafter(name).methods)
    decodings = (registry.decoding(name).info for name in registry.names("decoding"))
    return {
        info.name: info for info in (*decodings, *drafters, *registry.made_verifiers(), *verifiers)
    }  # of equal names the verifier


def _key(paper: Paper) -> str:
    return f"{paper.authors.split(',')[0].lower()}{paper.year}{paper.title.split()[0].strip(':').lower()}"


class Used(Protocol):
    """An engine, as far as its papers go."""

    @property
    def drafter(self) -> Any: ...

    @property
    def verifier(self) -> Any: ...


def _methods_of(used: Any) -> list[Method | DecodingMethod]:
    """A mixture stands for what it is made of."""
    parts = getattr(used, "sources", None)
    return [info for part in parts for info in _methods_of(part)] if parts else [used.info]


def bibtex(*used: str | Used) -> str:
    """BibTeX of the library and of the papers behind methods; all of them without arguments. See `citation`."""
    methods = _methods()
    names = [name for name in used if isinstance(name, str)]
    for name in names:
        if name not in methods and name not in PAPERS:
            raise unknown_name("method or arXiv id", name, (*methods, *PAPERS))
    engines = [engine for engine in used if not isinstance(engine, str)]
    parts = [part for engine in engines for part in (engine.drafter, engine.verifier) if part is not None]
    parts += [method for engine in engines if hasattr(method := getattr(engine, "decoding", None), "info")]
    infos = [info for part in parts for info in _methods_of(part)]
    chosen = names if used else (*methods, *PAPERS)
    ids = {methods[name].arxiv if name in methods else name for name in chosen}
    ids |= {info.arxiv for info in infos}
    plugged = {info.arxiv: info for info in reversed((*methods.values(), *infos))}
    entries = [OURS]
    for arxiv in sorted(ids - {""}):
        paper = PAPERS.get(arxiv) or _paper_of(plugged.get(arxiv), arxiv)
        entries.append(paper.entry(_key(paper), arxiv))
    return "\n\n".join(entries)


def _paper_of(info: Method | DecodingMethod | None, arxiv: str) -> Paper:
    """What a method of another package says of its paper."""
    return Paper(arxiv, "", 0) if info is None else Paper(info.title, info.authors, info.year)


def citation(*used: str | Used) -> None:
    """Print BibTeX for what was used: an engine, names of verifiers and drafters, or arXiv ids; everything without arguments.

    Raises:
        UnknownNameError: with the nearest known name.

    Example:
        >>> citation("kseq")
        @software{polydraft,
          title = {polydraft: lossless multi-draft speculative decoding},
          author = {{polydraft developers}},
          version = {...},
          year = {2026}
        }
        <BLANKLINE>
        @misc{sun2023spectr,
          title = {SpecTr: Fast Speculative Decoding via Optimal Transport},
          author = {Sun, Ziteng and others},
          year = {2023},
          eprint = {2310.15141},
          archivePrefix = {arXiv}
        }
    """
    print(bibtex(*used))
