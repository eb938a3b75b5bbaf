"""Sentences of pages whose figures stand in a table beside them: each is made anew from the table and must stand on its page so."""

import csv
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from studies.rules import page

DOCS = Path(__file__).parents[2] / "docs"
PATHS = (2, 3, 4)
DEPTHS = (4, 6, 8)


def rows(name: str, **where: object) -> list[dict[str, str]]:
    """Rows of a table of docs/results whose columns hold these values."""
    with open(DOCS / "results" / f"{name}.csv", encoding="utf-8", newline="") as file:
        found = [row for row in csv.DictReader(file) if all(row[k] == str(v) for k, v in where.items())]
    assert found, f"{name}.csv has no row of {where}"
    return found


def tokens(verifier: str, drafts: str, paths: int, depth: int) -> float:
    (row,) = rows("verifiers-paths", verifier=verifier, drafts=drafts, paths=paths, depth=depth)
    return float(row["tokens"])


def percents(
    verifier: str, drafts: str, column: str, paths: Iterable[int], depths: Iterable[int]
) -> list[float]:
    """What a verifier is ahead of another in %, of each number of paths and depth."""
    column = f"over_{column}_percent"
    return [
        float(rows("verifiers-paths", verifier=verifier, drafts=drafts, paths=K, depth=L)[0][column])
        for K in paths
        for L in depths
    ]


def between(values: Iterable[float], digits: int = 0) -> str:
    """The least and the largest of some numbers, without sign: what a sentence says of a range.

    Example:
        >>> between([-19.1, -19.8])
        '19 to 20'
    """
    sizes = sorted(abs(value) for value in values)
    low = f"{sizes[0]:.{digits}f}"
    high = f"{sizes[-1]:.{digits}f}"
    return low if low == high else f"{low} to {high}"


def race() -> str:
    return f"its top-down walk costs it {between(percents('race', 'coupled', 'traversal', PATHS, [8]))}% against\ntraversal at $L = 8$"


def acceptance_of_race() -> str:
    values = [
        rows("verifiers-nodes", verifier="race", temperature=1, drafts=n)[0]["acceptance"]
        for n in (1, 2, 4, 8)
    ]
    return f"Acceptance: {', '.join(values)} with 1, 2, 4, 8 drafts"


def block() -> str:
    ours = tokens("block", "one path", 2, 8)
    theirs = tokens("speculative", "one path", 2, 8)
    return f"+{100 * (ours / theirs - 1):.0f}% over token-by-token verification at eight drafts ({ours:.2f} against {theirs:.2f};"


def traversal() -> str:
    over = [
        100 * (tokens("traversal", "paths", K, 8) / tokens("recursive", "paths", K, 8) - 1) for K in PATHS
    ]
    return f"{between(over)}% above recursive rejection at two, three and four paths"


def greedy_traversal() -> str:
    over_traversal = between(percents("greedy_traversal", "paths", "traversal", PATHS, DEPTHS), 1)
    over_block = between(percents("greedy_traversal", "paths", "block", PATHS, DEPTHS))
    return f"{over_traversal}% over traversal, {over_block}% over block verification"


def gbv() -> str:
    two = between(percents("multipath", "paths", "block", [2], DEPTHS))
    four = between(percents("multipath", "paths", "block", [4], DEPTHS))
    return f"it gains {two}% over block verification at two paths and {four}% at four"


def gbv_by_overlap() -> str:
    gains = {
        overlap: rows("verifiers-thirds", verifier="multipath", paths=4, overlap=overlap)[0][
            "over_block_percent"
        ]
        for overlap in ("0.59", "0.95")
    }
    low = float(gains["0.59"])
    high = float(gains["0.95"])
    return f"where draft and target overlap by .59, four paths gain {low:.0f}%; where they overlap by .95, {high:.0f}%"


def gbv_by_quality() -> str:
    """Gains of 2, 4 and 8 paths over one, where drafts fit less well and well."""
    gains = dict[float, str]()
    for overlap in (0.5, 0.9):
        where = {"overlap": overlap, "shape": "length 4", "verifier": "multipath", "draft_sampling": "IID"}
        cells = [float(rows("rules", paths=K, **where)[0]["over_block_percent"]) for K in (2, 4, 8)]
        gains[overlap] = ", ".join(f"{cell:+.0f}" for cell in cells)
    return f"{gains[0.5]}% over one path at overlap .5, as claimed. At .9 they are {gains[0.9]}%"


SENTENCES: list[tuple[str, Callable[[], str]]] = [
    ("papers/exponential-races.md", race),
    ("papers/exponential-races.md", acceptance_of_race),
    ("papers/block-verification.md", block),
    ("papers/traversal.md", traversal),
    ("papers/greedy-traversal.md", greedy_traversal),
    ("papers/gbv.md", gbv),
    ("papers/gbv.md", gbv_by_overlap),
    ("papers/gbv.md", gbv_by_quality),
]


@pytest.mark.parametrize(("page", "sentence"), SENTENCES, ids=lambda part: getattr(part, "__name__", part))
def test_page_says_what_its_table_says(page: str, sentence: Callable[[], str]) -> None:
    words = " ".join((DOCS / page).read_text(encoding="utf-8").split())
    assert " ".join(sentence().split()) in words


def test_the_page_of_all_verifiers_is_made_of_its_tables():
    tables = [
        list(csv.reader((DOCS / "results" / name).open(encoding="utf-8", newline="")))[1:]
        for name in ("rules.csv", "rules-nodes.csv")
    ]
    assert (DOCS / "reference" / "compared.md").read_text(encoding="utf-8").startswith(page(*tables))
