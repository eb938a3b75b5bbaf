"""The pages that help: errors are quoted as they are written, configurations of other programs are whole and short."""

import ast
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TROUBLES = ROOT / "docs" / "use" / "troubles.md"
CLIENTS = ROOT / "docs" / "serve" / "clients.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def texts_of(source: str) -> list[str]:
    """The texts in a file, each expression inside one written as an ellipsis."""
    texts = list[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            texts.append(
                "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
    return [text.replace("`", "") for text in texts]


QUOTED = re.findall(r"^\| `([^`]+)` \|", TROUBLES.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def texts():
    files = (ROOT / "src" / "polydraft").rglob("*.py")
    return [
        text
        for file in files
        for text in texts_of(file.read_text(encoding="utf-8"))
        if "…" in text or " " in text
    ]


def test_the_page_of_troubles_quotes_errors():
    assert len(QUOTED) > 11


@pytest.mark.parametrize("quoted", QUOTED)
def test_an_error_is_quoted_as_it_is_written(quoted, texts):
    pattern = re.compile(".*".join(map(re.escape, quoted.split("…"))), re.DOTALL)
    assert any(pattern.search(text) for text in texts), quoted


def test_clients_take_a_dozen_lines_each_and_the_servers_address():
    blocks = BLOCK.findall(CLIENTS.read_text(encoding="utf-8"))
    shown = [text for kind, text in blocks if kind != "console"]
    assert len(shown) == 3 and all(
        len(text.splitlines()) <= 12 and "http://127.0.0.1:8000/v1" in text for text in shown
    )
    for kind, text in blocks:
        if kind == "py":
            ast.parse(text)
    (config,) = (yaml.safe_load(text) for kind, text in blocks if kind == "yaml")
    assert config["schema"] == "v1" and {"name", "provider", "model", "apiBase"} <= config["models"][0].keys()
