"""What the page makes of an answer: markdown, formulas, colours of code."""

import itertools
import re

import pytest

MARKDOWN = """# Lists

Some **bold `code`** and <b>no markup</b>, [a link](https://example.com) and [none](javascript:alert(1)).

1. one
2. two

| a | b |
|---|--:|
| 1 | 2 |

```python
def f(x):
    return x  # <script>
```

    indented:
        code
"""

RENDER = """async (text) => {
    const { render } = await import('/page/markdown.js');
    const tokens = [];
    for (let at = 0; at < text.length; at += 3) {
        const end = Math.min(at + 3, text.length);
        tokens.push({ start: at, end, span: () => { const e = document.createElement('span'); e.title = `${at}`; return e; } });
    }
    const box = document.createElement('div');
    box.append(render(text, tokens));
    return { text: box.textContent, tags: [...box.querySelectorAll('*')].map((e) => e.tagName), links: [...box.querySelectorAll('a')].map((e) => e.href),
        misplaced: [...box.querySelectorAll('span[title]')].filter((e) => !text.slice(Number(e.title), Number(e.title) + 3).includes(e.textContent)).length,
        plain: [...box.querySelectorAll('pre code')].map((e) => e.textContent), spans: box.querySelectorAll('span[title]').length };
}"""


def test_markdown_becomes_nodes_whose_pieces_are_the_tokens_that_wrote_them(window, served):
    window.goto(served.url)
    page = window.evaluate(RENDER, MARKDOWN)
    assert {"H3", "STRONG", "OL", "LI", "TABLE", "TH", "PRE", "CODE", "A"} <= set(page["tags"])
    assert not {"SCRIPT", "B", "IMG", "IFRAME"} & set(page["tags"])  # what a model writes is never markup
    assert page["links"] == ["https://example.com/"]
    assert page["plain"] == ["def f(x):\n    return x  # <script>", "indented:\n    code\n"]
    assert "<b>no markup</b>" in page["text"] and page["misplaced"] == 0 and page["spans"] > 40


FORMULA = """async (text) => {
    const { render } = await import('/page/markdown.js');
    const box = document.createElement('div');
    document.querySelector('#lanes').replaceChildren(box);
    box.append(render(text, []));
    await (await import('/page/mathematics.js')).load();
    const math = [...box.querySelectorAll('math')];
    const tex = math.map((e) => e.querySelector('annotation').textContent);
    const displayed = math.map((e) => e.getAttribute('display') === 'block');
    box.querySelectorAll('annotation').forEach((e) => e.remove());
    return { tex, displayed, text: box.textContent, tags: [...box.querySelectorAll('math *')].map((e) => e.tagName) };
}"""


@pytest.mark.parametrize(
    ("text", "tex", "displayed"),
    [
        (r"so \(a_1\) is", ["a_1"], False),
        ("so $a^2$, and $b$.", ["a^2", "b"], False),
        ("so $$a$$ is", ["a"], True),
        ("so:\n$$\na\n= b\n$$\nand", ["\na\n= b\n"], True),
        ("1. so:\n   \\[\n   \\frac{a}{b}\n   \\]\n2. and", ["\n\\frac{a}{b}\n"], True),
        ("\\begin{align}\na &= b\n\\end{align}", ["\\begin{align}\na &= b\n\\end{align}"], True),
    ],
)
def test_a_formula_in_any_of_its_marks_becomes_mathml(window, served, text, tex, displayed):
    window.goto(served.url)
    page = window.evaluate(FORMULA, text)
    assert page["tex"] == tex and page["displayed"] == [displayed] * len(tex)
    assert not re.search(r"\$|\\[()\[\]]", page["text"])


def test_a_formula_has_fractions_roots_tables_and_letters_of_other_alphabets(window, served):
    window.goto(served.url)
    page = window.evaluate(
        FORMULA,
        r"$\frac{a}{\sqrt b} \begin{pmatrix} 1 & 2 \end{pmatrix} \mathbb{R} \mathbb{E} \mathcal{L} \vec v$",
    )
    assert {"mfrac", "msqrt", "mtable", "mover"} <= set(page["tags"])
    assert all(letter in page["text"] for letter in "ℝ𝔼ℒ→")


@pytest.mark.parametrize(
    "text",
    [
        r"an unfinished \(a + b",
        r"an unfinished \[a",
        r"no macro: $\nosuchmacro{a}$",
        "it costs $5 and $10, or US$7.",
        "from $HOME/$USER to $PATH",
        "`$a$` and `\\(b\\)` are code",
    ],
)
def test_what_is_no_formula_keeps_its_marks(window, served, text):
    window.goto(served.url)
    page = window.evaluate(FORMULA, text)
    assert page["tex"] == [] and page["text"] == text.replace("`", "")


COLOURS = """async ([code, language]) => (await import('/page/highlight.js')).highlighted(code, language)"""


@pytest.mark.parametrize(
    ("language", "code", "kinds"),
    [
        (
            "python",
            'def f(x):  # one\n    return """a\n#b""" + 0x1F',
            "keyword called comment keyword string number",
        ),
        ("ts", "const s = `a${b}`; /* c\n */ f(2.5e3) // d", "keyword string comment called number comment"),
        ("c++", 'int main() { return "\\"a"; }', "keyword called keyword string"),
        ("rust", "fn f<'a>(x: &'a str) {}", "keyword"),
        ("sql", "SELECT a FROM b -- c", "keyword keyword comment"),
        ("sh", "if true; then echo 'a # b'; fi # c", "keyword keyword string keyword comment"),
        ("json", '{"a": [1, true]}', "string number keyword"),
        ("html", '<a href="b">c</a><!-- d -->', "keyword string keyword keyword keyword comment"),
        ("", "def f(): pass", ""),
        ("no-such", "def f(): pass", ""),
    ],
)
def test_code_is_coloured_by_its_language_and_stays_whole(window, served, language, code, kinds):
    window.goto(served.url)
    pieces = window.evaluate(COLOURS, [code, language])
    assert "".join(text for _, text in pieces) == code
    assert " ".join(kind for kind, _ in pieces if kind) == kinds


CONTRASTS = """() => {
    const code = document.createElement('div');
    code.className = 'code output';
    document.body.append(code);
    const colour = (kind, property) => {
        const e = code.appendChild(document.createElement('span'));
        e.className = kind;
        return getComputedStyle(e)[property].match(/[\\d.]+/g).slice(0, 3).map(Number);
    };
    const paper = getComputedStyle(code).backgroundColor.match(/\\d+/g).map(Number);
    return {
        words: ['comment', 'string', 'keyword', 'number', 'called'].map((kind) => colour(kind, 'color')),
        papers: [paper, ...[1, 2, 3, 4, 5].map((depth) => colour(`token draft d${depth}`, 'backgroundColor'))],
    };
}"""


def luminance(colour):
    """WCAG's relative luminance of sRGB in 0..255."""
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (part / 255 for part in colour)
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_code_is_readable_on_the_colour_of_every_draft(window, served, theme):
    window.emulate_media(color_scheme=theme)
    window.goto(served.url)
    found = window.evaluate(CONTRASTS)
    for word, paper in itertools.product(found["words"], found["papers"]):
        dark, light = sorted((luminance(word), luminance(paper)))
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (word, paper)
