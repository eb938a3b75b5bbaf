"""For the reference: a page for each lossless verifier, from its docstring, its declaration and `polydraft.theory`, and an index of them.

A page has the claim, the symbols of the paper, traps and cost (the docstring of the verifier's file), what it is exact for, acceptance beside the
optimum, and an example with what it prints.
"""

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from mkdocs.structure.files import File

from polydraft.core import DraftSampling, Method
from polydraft.methods import registry
from polydraft.theory import acceptance, compare
from polydraft.theory.comparison import COMPARED
from polydraft.theory.optimum import optimum

FOLDER = "reference/rules"
PAPERS = Path(__file__).parent / "papers"
P = (0.4, 0.3, 0.2, 0.1)
Q = (0.1, 0.2, 0.3, 0.4)
CHILDREN = (1, 2, 3)
SHARED = {"race": acceptance.race, "list_race": acceptance.list_matching}
"""Acceptance of verifiers that share their noise with the draft; of `list_race` a lower bound."""
EXAMPLE = """from polydraft.theory import compare

p = {p}  # the target's distribution at the node
q = {q}  # the draft's
print(compare(p, q, {tree}, verifiers=["{name}"]))
"""
SHARED_EXAMPLE = """import numpy as np

from polydraft.theory import acceptance

p = np.array({p})  # the target's distribution at the node
q = np.array({q})  # the draft's
print(round(acceptance.{function}(p, q, 2), 3))
"""


def lossless() -> Iterator[Method]:
    """What the lossless verifiers of the package declare, in the order of the registry."""
    for name in registry.VERIFIERS:
        info = registry.verifier(name).info
        if info.lossless:
            yield info


def module_of(name: str) -> Any:
    """The file of a verifier."""
    return import_module(registry.VERIFIERS[name].partition(":")[0])


def example(info: Method) -> str:
    """Code that prints what the verifier accepts of two children, or of a chain of two where it takes chains alone."""
    if info.name in SHARED:
        function = SHARED[info.name].__name__
        return SHARED_EXAMPLE.format(p=list(P), q=list(Q), function=function)
    takes_siblings = any(shape.name == "PRODUCT" for shape in info.shapes)
    return EXAMPLE.format(p=list(P), q=list(Q), tree=2 if takes_siblings else (-1, 0, 1), name=info.name)


def printed(code: str) -> str:
    """What an example prints."""
    lines = list[str]()
    exec(code, {"print": lambda text: lines.append(str(text))})
    return "\n".join(lines)


def accepted(info: Method) -> Iterator[tuple[str, int, float, float | None]]:
    """(draft sampling, children, acceptance, optimum) at one node."""
    for K in CHILDREN:
        if info.name in SHARED:
            yield shared(info, K)
            continue
        samplings = [s for s in COMPARED if s in info.draft_sampling]
        compared = compare(P, Q, K, verifiers=[info.name]).rows if samplings else []
        for row in sorted(compared, key=lambda row: COMPARED.index(row.sampling)):
            best = None if row.bound is None else row.bound - 1
            yield row.sampling.name, K, row.tokens - 1, best


def shared(info: Method, K: int) -> tuple[str, int, float, float | None]:
    """Of a verifier that shares its noise with the draft, in closed form."""
    value = SHARED[info.name](*rows(), K)
    if info.name != "race":
        return DraftSampling.LISTED.name, K, value, None
    return DraftSampling.COUPLED.name, K, value, optimum(*rows(), K, DraftSampling.COUPLED).alpha


def rows() -> tuple[Any, Any]:
    """p and q as arrays."""
    return np.array(P), np.array(Q)


def table(info: Method) -> str:
    """Acceptance beside the optimum."""
    lines = ["| draft sampling | children | acceptance | optimum |", "|---|---|---|---|"]
    for sampling, K, value, best in accepted(info):
        shown = "" if best is None else f"{best:.3f}"
        lines.append(f"| {sampling.lower()} | {K} | {value:.3f} | {shown} |")
    return "\n".join(lines)


def source(info: Method) -> str:
    """Who published it, and the page of what was measured."""
    file = f"src/polydraft/verifiers/{module_of(info.name).__name__.rpartition('.')[2]}.py"
    texts = {page.name: page.read_text("utf-8") for page in sorted(PAPERS.glob("*.md"))}
    pages = [name for name, text in texts.items() if f"`{file}`" in text]
    pages += [name for name, text in texts.items() if info.arxiv and f'"{info.arxiv}"' in text]
    paper = f"[{info.arxiv}](https://arxiv.org/abs/{info.arxiv})" if info.arxiv else "no paper"
    measured = "".join(f" [What we measured](../../papers/{page})." for page in pages[:1])
    return f"{info.authors} ({info.year}), {paper}. `{file}`.{measured}"


def page(info: Method) -> str:
    """The page of one verifier."""
    claim, _, body = inspect.cleandoc(module_of(info.name).__doc__).partition("\n")
    code = example(info)
    samplings = ", ".join(sorted(s.name.lower() for s in info.draft_sampling))
    shapes = ", ".join(sorted(s.name.lower() for s in info.shapes))
    parts = [
        f"# `{info.name}`: {info.title}",
        source(info),
        f"**{claim}**",
        f"Draft sampling: {samplings}. Draft shapes: {shapes}.",
        re.sub(r"\n(?=(Lossless|Traps?:|Cost:))", "\n\n", body.strip()),
        "## Beside the optimum",
        f"One node, p = {P}, q = {Q}; the optimum is that of the same draft sampling (`polydraft.theory.optimum`):",
        table(info),
        "## Example",
        f"```python\n{code}```",
        f"It prints\n\n```text\n{printed(code)}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def index() -> str:
    """All of them in a table."""
    lines = ["| verifier | method | year | arXiv | draft sampling |", "|---|---|---|---|---|"]
    for info in lossless():
        arxiv = f"[{info.arxiv}](https://arxiv.org/abs/{info.arxiv})" if info.arxiv else "ours"
        samplings = ", ".join(sorted(s.name.lower() for s in info.draft_sampling))
        lines.append(
            f"| [`{info.name}`]({info.name}.md) | {info.title} | {info.year} | {arxiv} | {samplings} |"
        )
    title = "# Every lossless verifier"
    summary = "One page each: claim, symbols, traps, cost, acceptance beside the optimum, an example."
    return "\n\n".join([title, summary, "\n".join(lines)]) + "\n"


def on_config(config: Any, **_: Any) -> Any:
    """MkDocs calls it first: the pages enter the navigation, behind the page of verifiers."""
    pages = [{info.name: f"{FOLDER}/{info.name}.md"} for info in lossless()]
    develop = next(section["Develop"] for section in config.nav if "Develop" in section)
    reference = next(entry["Reference"] for entry in develop if "Reference" in entry)
    reference.append({"Lossless verifiers": [f"{FOLDER}/index.md", *pages]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """MkDocs calls it once."""
    texts = {"index": index()} | {info.name: page(info) for info in lossless()}
    for name, text in texts.items():
        files.append(File.generated(config, f"{FOLDER}/{name}.md", content=text))
    return files
