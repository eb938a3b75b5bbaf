"""`python -m studies.gallery`: pictures of what verifiers accept, as SVG: by number of children, by temperature, and where they stop in a tree.

acceptance-children     acceptance of one node by the number of its children, and the optimum of iid children
acceptance-temperature  the same of four children by temperature: logits of target and draft are divided by it
stop-mass               the draft tree (2, 2): probability that a verifier stops at each node, over all drafts

The pair is that of `studies.rules`, overlap .7, 32 tokens; the tree's rows have 3 tokens, so that all of its drafts are enumerated.
"""

from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

import numpy as np
import typer

from polydraft.bench.record import write_texts
from polydraft.cli.files import say_written
from polydraft.core import Budget, DraftSampling, TreeShape
from polydraft.core import geometry as trees
from polydraft.methods import registry
from polydraft.testing import Tables, as_batch, by_position, enumerate_drafts
from polydraft.theory import acceptance, optimum
from studies.options import Out, Quick
from studies.rules import Pair

WIDTH = 640
HEIGHT = 420
LEFT = 60
RIGHT = 400
TOP = 30
BOTTOM = 350
COLOURS = ("#1f2933", "#3f6fb5", "#2e8b57", "#c0392b", "#b7791f", "#7b4fa3", "#9aa3ad")
CHILDREN = range(1, 9)
TEMPERATURES = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4)
TREE = trees.product(2, 2)
STOPPED = (
    ("recursive", DraftSampling.IID),
    ("traversal", DraftSampling.IID),
    ("greedy_traversal", DraftSampling.IID),
    ("flow", DraftSampling.SYSTEMATIC),
)
Accepted = Callable[[np.ndarray, np.ndarray, int], float]
CURVES: dict[str, Accepted] = {
    "optimum, iid": lambda p, q, n: optimum.with_replacement(p, q, n).alpha,
    "transport": acceptance.transport,
    "kseq": lambda p, q, n: acceptance.kseq(p, q, n)[1],
    "recursive": acceptance.recursive,
    "race, coupled": acceptance.race,
    "single_with_spares": acceptance.single_with_spares,
    "match": acceptance.target_sample,
}
"""Name -> acceptance of n children; all but the race's are iid."""


def rows(num: int, temperature: float = 1.0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Target and draft rows of some contexts."""
    pair = Pair.of(0.7)
    for context in range(0, len(pair.target), len(pair.target) // num):
        yield _sharpened(pair.target[context], temperature), _sharpened(pair.draft[context], temperature)


def _sharpened(row: np.ndarray, temperature: float) -> np.ndarray:
    scaled = row ** (1 / temperature)
    return scaled / scaled.sum()


def by_children(num: int) -> dict[str, list[float]]:
    """Mean acceptance of each curve at each number of children."""
    every = list(rows(num))
    return {name: [_mean(curve, every, n) for n in CHILDREN] for name, curve in CURVES.items()}


def by_temperature(num: int) -> dict[str, list[float]]:
    """Mean acceptance of four children at each temperature."""
    found = dict[str, list[float]]()
    for temperature in TEMPERATURES:
        every = list(rows(num, temperature))
        for name, curve in CURVES.items():
            found.setdefault(name, []).append(_mean(curve, every, 4))
    return found


def _mean(curve: Accepted, every: Sequence[tuple[np.ndarray, np.ndarray]], n: int) -> float:
    return float(np.mean([curve(p, q, n) for p, q in every]))


def stop_mass(verifier: str, sampling: DraftSampling) -> np.ndarray:
    """[N] probability to stop at each node of the tree, over all its drafts."""
    tables = Tables(3, seed=0)
    budget = Budget.fixed(TREE)
    drafts = enumerate_drafts(tables, sampling, by_position(*TREE), budget.max_depth)
    draft, p = as_batch(tables, sampling, TreeShape.PRODUCT, drafts)
    stop = registry.verifier(verifier)(draft, p).stop
    return np.array([d.probability for d in drafts]) @ stop


def text(x: float, y: float, words: str, *, anchor: str = "middle", fill: str = COLOURS[0]) -> str:
    """A line of text."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{fill}" font-size="17">{escape(words)}</text>'


def line(points: Sequence[tuple[float, float]], stroke: str, width: float) -> str:
    """A line through some points."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width:g}"/>'


def picture(title: str, parts: Sequence[str]) -> str:
    """A whole file."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" role="img">'
    ground = f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="white"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", ground, *parts, "</svg>"]) + "\n"


def curves(title: str, label: str, at: Sequence[float], values: dict[str, list[float]]) -> str:
    """Acceptance over one quantity; the legend stands in the order of the last values."""
    least = np.floor(10 * min(map(min, values.values()))) / 10

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - at[0]) / (at[-1] - at[0])
        up = (y - least) / (1 - least)
        return LEFT + across * (RIGHT - LEFT), BOTTOM - up * (BOTTOM - TOP)

    parts = list[str]()
    for level in np.arange(least, 1.001, 0.1):
        parts.append(line([place(at[0], level), place(at[-1], level)], "#dfe4e8", 1))
        parts.append(text(LEFT - 10, place(at[0], level)[1] + 6, f"{level:.1f}", anchor="end"))
    parts += [text(place(x, least)[0], BOTTOM + 26, f"{x:g}") for x in at]
    parts.append(text((LEFT + RIGHT) / 2, BOTTOM + 56, label))
    ranked = sorted(values, key=lambda name: -values[name][-1])
    colour = dict(zip(values, COLOURS, strict=True))
    for number, name in enumerate(ranked):
        points = [place(x, y) for x, y in zip(at, values[name], strict=True)]
        parts.append(line(points, colour[name], 3))
        shown = f"{name} {values[name][-1]:.2f}"
        parts.append(text(RIGHT + 12, TOP + 14 + 26 * number, shown, anchor="start", fill=colour[name]))
    return picture(title, parts)


def stopped() -> str:
    """A tree for each verifier; a node's area is the probability to stop there."""
    parts = list[str]()
    for number, (verifier, sampling) in enumerate(STOPPED):
        left = number % 2 * WIDTH / 2
        top = number // 2 * HEIGHT / 2
        parts += _tree(left, top, verifier, stop_mass(verifier, sampling))
    return picture("Where verifiers stop in a tree of two times two paths", parts)


def _tree(left: float, top: float, verifier: str, mass: np.ndarray) -> Iterator[str]:
    depth = _depths()
    places = list[tuple[float, float]]()
    for node, level in enumerate(depth):
        peers = [n for n in range(len(TREE)) if depth[n] == level]
        down = (peers.index(node) + 0.5) / len(peers)
        places.append((left + 50 + 100 * level, top + 36 + 164 * down))
    tokens = 1 + float(mass @ np.array(depth))
    yield text(left + 160, top + 26, f"{verifier}: {tokens:.2f} tokens")
    for node in range(1, len(TREE)):
        yield line([places[TREE[node]], places[node]], COLOURS[-1], 2)
    for (x, y), share in zip(places, mass, strict=True):
        radius = 3 + 28 * share**0.5
        circle = f'cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"'
        yield f'<circle {circle} fill="{COLOURS[1]}"/>'
        yield text(x + radius + 4, y + 6, f"{share:.2f}", anchor="start")


def _depths() -> list[int]:
    depth = [0]
    for parent in TREE[1:]:
        depth.append(depth[parent] + 1)
    return depth


def main(out: Out = Path("docs/pictures"), quick: Quick = False) -> None:
    """Write acceptance-children.svg, acceptance-temperature.svg and stop-mass.svg."""
    num = 2 if quick else 8
    children = by_children(num)
    temperatures = by_temperature(num)
    out.mkdir(parents=True, exist_ok=True)
    texts = {
        "acceptance-children": curves("Acceptance of one node", "children", list(CHILDREN), children),
        "acceptance-temperature": curves(
            "Acceptance of four children", "temperature", TEMPERATURES, temperatures
        ),
        "stop-mass": stopped(),
    }
    say_written(write_texts({out / f"{name}.svg": content for name, content in texts.items()}))


app = typer.Typer(pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
