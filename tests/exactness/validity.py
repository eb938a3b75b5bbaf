"""The validity matrix of docs/losslessness.md, from the registry and the exact checker."""

from functools import cache

from polydraft.bench.record import csv_table, markdown_table
from polydraft.core import DraftSampling, TreeShape
from polydraft.errors import InvalidInputError
from polydraft.methods import registry
from polydraft.testing import Tables, by_position, measure
from tests.exactness.harness import across, by_depth, ragged, with_spares

TABLES = Tables(4, 0)
SPARES = with_spares(TABLES, 2, lambda path: [0] if path[-1] < 2 else [])
COLUMNS = {
    "one chain": (DraftSampling.IID, TreeShape.CHAIN, by_depth(1, 1), 2),
    "2 iid paths": (DraftSampling.IID, TreeShape.PATHS, by_depth(2, 1), 2),
    "trunk + 2 iid": (DraftSampling.IID, TreeShape.PRODUCT, by_depth(1, 2), 2),
    "2x2 iid": (DraftSampling.IID, TreeShape.PRODUCT, by_depth(2, 2), 2),
    "iid, 3 and 1": (DraftSampling.IID, TreeShape.RAGGED, ragged(3, 1), 3),
    "iid, 3 then 2": (DraftSampling.IID, TreeShape.BY_POSITION, by_position(-1, 0, 0, 0, 1, 1), 2),
    "iid, grown": (DraftSampling.IID, TreeShape.GROWN, across, 2),
    "2x2 distinct": (DraftSampling.WITHOUT_REPLACEMENT, TreeShape.PRODUCT, by_depth(2, 2), 2),
    "chain + spares": (DraftSampling.WITHOUT_REPLACEMENT, TreeShape.GROWN, by_depth(), 2, SPARES),
    "2x2 top": (DraftSampling.POINT_MASS, TreeShape.PRODUCT, by_depth(2, 2), 2),
    "2x2 top + sampled": (DraftSampling.GREEDY_PLUS_ONE, TreeShape.PRODUCT, by_depth(2, 2), 2),
    "2 at equal steps": (DraftSampling.SYSTEMATIC, TreeShape.PATHS, by_depth(2, 1), 2),
    "2 models": (DraftSampling.INDEPENDENT, TreeShape.PATHS, by_depth(2, 1), 2),
}


def cell(rule, distribution, shape, counts, depth, drafts=None) -> str:
    """Tokens per step where the rule is declared, else the bias that it would have, or - where it cannot be applied."""
    declared = distribution in rule.info.draft_sampling and shape in rule.info.shapes
    if not declared and distribution in (DraftSampling.POINT_MASS, DraftSampling.INDEPENDENT):
        return "-"  # there is no q, or more than one
    try:
        found = measure(rule, TABLES, distribution, shape, counts, depth, drafts)
    except InvalidInputError:
        return "noticed"
    if declared and rule.info.lossless:
        assert found.error < 1e-12, (rule.info.name, distribution, shape, found)
        return f"{found.block_efficiency:.3f}"
    return f"tv {found.tv:.3f}" if found.tv > 1e-12 else f"({found.block_efficiency:.3f})"


SHOWN = (
    "one chain",
    "2 iid paths",
    "2x2 iid",
    "2x2 distinct",
    "chain + spares",
    "2x2 top + sampled",
    "2 at equal steps",
)
"""Columns of the page; the others are in the CSV file beside it."""


@cache
def rows() -> dict[str, dict[str, str]]:
    """Of every verifier that shares no noise with the draft: its cells by column."""
    table = dict[str, dict[str, str]]()
    for name in registry.names("verifier"):
        rule = registry.verifier(name)
        if not rule.info.shared_noise:
            chain_only = rule.info.shapes == {TreeShape.CHAIN}
            table[name] = {
                title: cell(rule, *c) if not chain_only or c[1] is TreeShape.CHAIN else "-"
                for title, c in COLUMNS.items()
            }
    return table


def markdown() -> str:
    lines = [[f"`{name}`", *(cells[title] for title in SHOWN)] for name, cells in rows().items()]
    return markdown_table(["verifier", *SHOWN], lines)


def csv_text() -> str:
    return csv_table(["verifier", *COLUMNS], ([name, *cells.values()] for name, cells in rows().items()))
