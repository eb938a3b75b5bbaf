"""Draw the pictures of docs/how-it-works.md as SVG: one step of speculative decoding, lossless acceptance, and what decides the speed.

    PYTHONPATH=src:. python docs/pictures/step.py [FOLDER]

The tree is an example, chosen for its words. The probabilities of acceptance.svg and the curves of speed.svg are computed here. Text is
large enough to be read where a phone shows 640 units in 360 pixels.
"""

import sys
from collections.abc import Callable
from html import escape
from pathlib import Path

from polydraft.theory.speed import speed_up, tokens_of_chain

WIDTH, FONT = 640, 22
BLUE, GREEN, RED, GREY, INK = "#3f6fb5", "#2e8b57", "#c0392b", "#9aa3ad", "#1f2933"
FAINT_BLUE, FAINT_GREEN, FAINT_GREY = "#dbe7f6", "#d5eee0", "#eef1f4"

WORDS = ("cat", "sat", "ran", "on", "down", "off", "a")
PARENTS = (-1, 0, 0, 1, 1, 2, 3)
ACCEPTED = (0, 1, 3)
"""Node 0 is the last committed token; the target model rejects `a` behind `on` and writes `the` itself."""
EXTRA = "the"
PLACES = {0: (70, 150), 1: (230, 80), 2: (230, 220), 3: (390, 40), 4: (390, 125), 5: (390, 220), 6: (540, 40)}

TARGET, DRAFT = (0.2, 0.3, 0.5), (0.5, 0.3, 0.2)
DRAFT_COST, DEPTHS, RATES = 0.1, range(13), (0.9, 0.7, 0.5)


def text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "middle",
    fill: str = INK,
    size: int = FONT,
    weight: str = "normal",
) -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" fill="{fill}" font-weight="{weight}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(words)}</text>'


def box(
    x: float, y: float, width: float, height: float, fill: str, stroke: str = "none", dash: str = ""
) -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    size = f'width="{width:g}" height="{height:g}"'
    return (
        f'<rect x="{x:g}" y="{y:g}" {size} rx="6" fill="{fill}" stroke="{stroke}" stroke-width="2"{dashes}/>'
    )


def line(points: list[tuple[float, float]], stroke: str, width: float) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width:g}" stroke-linecap="round"/>'


def picture(title: str, height: int, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" role="img">'
    ground = f'<rect width="{WIDTH}" height="{height}" rx="10" fill="white"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", ground, *parts, "</svg>"]) + "\n"


def ancestors(node: int) -> list[int]:
    """The node itself and all nodes above it."""
    return [] if node < 0 else [node, *ancestors(PARENTS[node])]


def node(
    n: int, fill: str, stroke: str, words: str | None = None, place: tuple[int, int] | None = None
) -> list[str]:
    x, y = place or PLACES[n]
    return [box(x - 45, y - 21, 90, 42, fill, stroke), text(x, y + 8, words or WORDS[n])]


def edge(n: int, stroke: str, width: float) -> str:
    return line([PLACES[PARENTS[n]], PLACES[n]], stroke, width)


def draft_tree() -> str:
    parts = [edge(n, BLUE, 3) for n in range(1, len(WORDS))]
    for n in range(len(WORDS)):
        parts += node(n, FAINT_GREY if n == 0 else FAINT_BLUE, GREY if n == 0 else BLUE)
    parts += [
        text(70, 200, "committed", fill="#5c6670", size=20),
        text(385, 285, "six draft tokens on three paths", fill=BLUE),
    ]
    return picture("A draft tree: six tokens that may follow the last committed one", 305, parts)


def tree_attention() -> str:
    size, left, top = 38, 330, 62
    parts = [
        box(left - 190, top, 172, size * len(WORDS) - 4, FAINT_GREEN, GREEN),
        text(left - 104, top + 140, "KV cache"),
    ]
    parts += [
        text(left - 104, 40, "context", fill=GREEN),
        text(left + size * 3.5, 40, "the tree's own tokens", fill=BLUE),
    ]
    for row, word in enumerate(WORDS):
        y = top + row * size
        parts.append(text(120, y + 26, word, anchor="end"))
        for column in range(len(WORDS)):
            seen = column in ancestors(row)
            parts.append(box(left + column * size, y, size - 4, size - 4, BLUE if seen else FAINT_GREY))
    parts.append(text(WIDTH / 2, 362, "each row attends to the context and to its own path", size=FONT))
    return picture("Tree attention: which tokens each token of the tree attends to", 380, parts)


def accepted_path() -> str:
    x, y = PLACES[6]
    parts = [
        edge(n, GREEN if n in ACCEPTED else GREY, 6 if n in ACCEPTED else 2) for n in range(1, len(WORDS))
    ]
    parts.append(line([PLACES[3], (x, y + 85)], RED, 4))
    for n in range(len(WORDS)):
        parts += node(n, FAINT_GREEN if n in ACCEPTED else FAINT_GREY, GREEN if n in ACCEPTED else GREY)
    parts += node(6, "#fbe3e0", RED, EXTRA, (x, y + 85))
    parts += [
        line([(x - 38, y), (x + 38, y)], INK, 2),
        text(540, 190, "the target's", fill=RED),
        text(540, 216, "own token", fill=RED),
    ]
    parts.append(text(300, 285, "two tokens accepted + one = three in this step", fill=GREEN))
    return picture("The accepted path, and the token that the target model adds", 305, parts)


def kv_cache() -> str:
    parts, size = [], 64
    for y, caption, columns in (
        (
            50,
            "after the forward pass",
            [(w, FAINT_GREEN if n in ACCEPTED else FAINT_BLUE) for n, w in enumerate(WORDS)],
        ),
        (170, "after the rollback", [(WORDS[n], FAINT_GREEN) for n in ACCEPTED]),
    ):
        parts += [
            text(20, y - 14, caption, anchor="start"),
            box(20, y, 126, 46, FAINT_GREEN, GREEN),
            text(83, y + 31, "context"),
        ]
        for i, (word, fill) in enumerate(columns):
            x = 154 + i * (size + 3)
            parts += [
                box(x, y, size, 46, fill, GREEN if fill == FAINT_GREEN else BLUE),
                text(x + size / 2, y + 31, word, size=20),
            ]
    free = 154 + 3 * (size + 3)
    parts += [
        box(free, 170, 4 * (size + 3) - 3, 46, "white", GREY, "7 6"),
        text(free + 129, 201, "free again", fill="#5c6670"),
    ]
    parts.append(text(WIDTH / 2, 254, "the next step begins at the target's own token", size=FONT))
    return picture("The KV cache before and after the rollback", 275, parts)


def acceptance() -> str:
    parts, unit, base = [], 360, 240
    for i, (p, q, word) in enumerate(zip(TARGET, DRAFT, ("on", "in", "at"), strict=True)):
        x, both = 60 + i * 200, min(p, q)
        parts += [box(x, base - both * unit, 110, both * unit, GREEN)]
        top = base - max(p, q) * unit
        parts.append(
            box(
                x,
                top,
                110,
                abs(p - q) * unit,
                "#fbe3e0" if p > q else FAINT_GREY,
                RED if p > q else GREY,
                "" if p > q else "7 6",
            )
        )
        if p != q:
            parts.append(text(x + 55, top + 34, f"{abs(p - q):.1f}", fill=RED if p > q else "#5c6670"))
        parts += [text(x + 55, base - 14, f"{both:.1f}", fill="white", weight="bold")]
        parts += [
            text(x + 55, base + 28, word, weight="bold"),
            text(x + 55, base + 56, f"p {p:.1f}   q {q:.1f}", fill="#46505a"),
        ]
    total = sum(map(min, TARGET, DRAFT))
    parts += [
        text(24, 336, f"green: min(p, q), accepted in {total:.0%} of the steps", anchor="start", fill=GREEN),
        text(24, 366, "red: what p has beyond q, drawn after a rejection", anchor="start", fill=RED),
        text(24, 396, "grey: what q has too much of, rejected", anchor="start", fill="#5c6670"),
    ]
    return picture("Green and red together are the target distribution p", 415, parts)


def speed() -> str:
    left, right, bottom, top, highest = 70, 600, 330, 30, 4.0

    def place(depth: float, value: float) -> tuple[float, float]:
        return left + depth / DEPTHS[-1] * (right - left), bottom - value / highest * (bottom - top)

    parts = [line([place(0, v), place(DEPTHS[-1], v)], "#dfe4e8", 1) for v in (1, 2, 3, 4)]
    parts += [text(left - 12, place(0, v)[1] + 8, f"{v}x", anchor="end") for v in (1, 2, 3, 4)]
    parts += [text(place(d, 0)[0], bottom + 28, str(d)) for d in DEPTHS[::4]]
    for rate, colour in zip(RATES, (GREEN, BLUE, RED), strict=True):
        curve = [speed_up(tokens_of_chain(rate, d), draft_steps=d, draft_cost=DRAFT_COST) for d in DEPTHS]
        best = max(DEPTHS, key=lambda d: curve[d])
        parts.append(line([place(d, v) for d, v in zip(DEPTHS, curve, strict=True)], colour, 4))
        x, y = place(best, curve[best])
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" fill="{colour}"/>')
        y = place(0, curve[-1])[1] + 34 if rate == min(RATES) else place(0, curve[7])[1] - 14
        parts.append(text(right, y, f"acceptance rate {rate:.0%}", anchor="end", fill=colour))
    parts.append(text((left + right) / 2, bottom + 60, "speculation length"))
    parts.append(
        text(
            (left + right) / 2,
            bottom + 92,
            f"a draft step costs {DRAFT_COST:.0%} of a forward pass",
            fill="#5c6670",
        )
    )
    return picture("Speed-up by speculation length, for three acceptance rates", 440, parts)


PICTURES: dict[str, Callable[[], str]] = {
    "step-draft-tree": draft_tree,
    "step-tree-attention": tree_attention,
    "step-accepted-path": accepted_path,
    "step-kv-cache": kv_cache,
    "acceptance": acceptance,
    "speed": speed,
}


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw(), encoding="utf-8")
