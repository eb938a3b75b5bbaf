"""Expected tokens per step of every lossless verifier on the trees of measured contexts, whose verification is integrated: only drafts are random.

Most verifiers accept a node of a draft with a chance that what lies below it does not change, so that one verdict serves all depths; the others are
asked at every depth.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from polydraft.core import Draft, DraftSampling, TreeShape, Verdict
from polydraft.core import geometry as tree
from polydraft.methods import registry
from studies.head_paths.bound import bound
from studies.head_paths.contexts import MAX_DEPTH, MAX_PATHS, NUM_PATHS
from studies.several_drafts.verified import distinct_nodes, drafted, restricted

__all__ = ["BELOW_MATTERS", "BOUND", "KINDS", "Case", "Values", "by_depth", "read_values", "verifiers_of", "write_values"]

KINDS: Mapping[str, tuple[DraftSampling, TreeShape]] = {
    "chain": (DraftSampling.IID, TreeShape.CHAIN),
    "iid": (DraftSampling.IID, TreeShape.PATHS),
    "without_replacement": (DraftSampling.WITHOUT_REPLACEMENT, TreeShape.PATHS),
    "systematic": (DraftSampling.SYSTEMATIC, TreeShape.PATHS),
    "distinct spares": (DraftSampling.WITHOUT_REPLACEMENT, TreeShape.BY_POSITION),
}
"""How siblings were drawn, and the shape of the tree."""
BELOW_MATTERS = {"block", "flow", "traversal", "traversal_merged", "greedy_traversal", "greedy_traversal_wor", "multipath"}
BOUND = "bound"
"""Named as a verifier: what none exceeds on the mean, see `bound`."""


class Case(NamedTuple):
    """Temperature, kind of tree, paths, depth and verifier of one value."""

    temperature: float
    kind: str
    paths: int
    depth: int
    verifier: str


class Values(NamedTuple):
    """What one context yields. tokens: per step, by case.  nodes: distinct ones by depth, root first, of (temperature, kind, paths).
    overlap: of target and head at the root, by temperature."""

    answer: int
    text: str
    tokens: dict[Case, float]
    nodes: dict[tuple[float, str, int], list[float]]
    overlap: dict[float, float]


def verifiers_of(kind: str) -> list[str]:
    """Names of the lossless verifiers that are exact for a kind of tree; a chain needs none of those for several paths."""
    sampling, shape = KINDS[kind]
    infos = {name: registry.verifier(name).info for name in registry.names("verifier")}
    exact = [
        name
        for name, info in infos.items()
        if info.lossless and not info.shared_noise and sampling in info.draft_sampling and shape in info.shapes
    ]
    return [name for name in exact if kind != "chain" or name in ("speculative", "block", "match")]


def by_depth(draft: Draft, verdict: Verdict) -> Float[np.ndarray, "B L"]:
    """Expected tokens of each row if its draft were cut to a depth, from 1 on, where what lies below a node changes no chance to accept it."""
    depths, stop = tree.depths(draft.tree).cpu().numpy(), verdict.stop.double().cpu().numpy()
    reached = [(stop * (depths >= d)).sum(1) for d in range(1, depths.max() + 1)]
    return 1 + np.cumsum(reached, 0).T


def _choices(kind: str, paths: int) -> Iterator[tuple[str, int, list[range]]]:
    """(kind, number of paths, which paths) of the restrictions of a stored tree: of iid paths as many as are disjoint, of others the first ones."""
    if kind == "systematic":
        yield kind, paths, [range(paths)]
    elif kind == "iid":
        for k in (1, *NUM_PATHS):
            yield "chain" if k == 1 else kind, k, [range(i, i + k) for i in range(0, paths - k + 1, k)]
    else:
        yield from ((kind, k, [range(k)]) for k in NUM_PATHS if k <= paths)


def _tokens(
    name: str, kind: str, trees: Sequence[np.ndarray], rows: Sequence[np.ndarray], depth: int
) -> Float[np.ndarray, "B L"]:
    """Expected tokens of every tree, cut to every depth."""
    rule = registry.verifier(name)
    if name not in BELOW_MATTERS:
        draft, p = drafted(trees, rows, *KINDS[kind])
        return by_depth(draft, rule(draft, p))
    columns = list[np.ndarray]()
    for d in range(1, depth + 1):
        draft, p = drafted([restricted(part, range(MAX_PATHS), d) for part in trees], rows, *KINDS[kind])
        columns.append(by_depth(draft, rule(draft, p))[:, -1])
    return np.stack(columns, 1)


def evaluate(files: Sequence[Path]) -> list[Values]:
    """The values of some contexts, verified together."""
    contexts = [np.load(file) for file in files]
    values = [Values(int(c["answer"]), str(c["text"]), {}, {}, {}) for c in contexts]
    for stored in contexts[0].files:
        if "/" not in stored:
            continue
        temperature, key = stored.split("|")
        T, kind, width = float(temperature), key.split("/")[0], int(key.split("/")[1])
        rows, trees = [c[f"{temperature}|rows"] for c in contexts], [c[stored] for c in contexts]
        for value, own in zip(values, rows, strict=True):
            value.overlap[T] = float(np.minimum(own[0, 0], own[0, 1]).sum())
        for small, k, choices in _choices(kind, width):
            parts, part_rows = [restricted(t, paths, MAX_DEPTH) for paths in choices for t in trees], rows * len(choices)
            counts = np.array([distinct_nodes(part) for part in parts]).reshape(len(choices), len(trees), -1).mean(0)
            for value, nodes in zip(values, counts, strict=True):
                value.nodes[T, small, k] = nodes.tolist()
            depth = int(parts[0][3].max())
            tokens = {name: _tokens(name, small, parts, part_rows, depth) for name in verifiers_of(small)}
            tokens[BOUND] = np.array([bound(small, *part) for part in zip(parts, part_rows, strict=True)])
            for name, of_parts in tokens.items():
                for value, means in zip(values, of_parts.reshape(len(choices), len(trees), -1).mean(0), strict=True):
                    value.tokens.update({Case(T, small, k, d, name): float(mean) for d, mean in enumerate(means, 1)})
    return values


def write_values(files: Sequence[Path]) -> None:
    """Compute the values of contexts, and write them beside their rows."""
    for file, value in zip(files, evaluate(files), strict=True):
        tables = {part: [[key, number] for key, number in getattr(value, part).items()] for part in Values._fields[2:]}
        file.with_suffix(".json").write_text(json.dumps(value._asdict() | tables), encoding="utf-8")


def read_values(folder: Path) -> list[Values]:
    """The values of all contexts of a folder that were computed."""
    return [_from_plain(json.loads(file.read_text(encoding="utf-8"))) for file in sorted(folder.glob("*.json"))]


def _from_plain(plain: dict[str, Any]) -> Values:
    tokens, nodes = ({tuple(key): number for key, number in plain[part]} for part in ("tokens", "nodes"))
    tokens = {Case(*case): number for case, number in tokens.items()}
    return Values(plain["answer"], plain["text"], tokens, nodes, dict(plain["overlap"]))
