"""The documentation builds as a site without a warning, and its reference has what a user looks for."""

import doctest
import importlib.util
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from polydraft import __version__
from polydraft.methods import registry

ROOT = Path(__file__).parents[2]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CUT_OFF = (
    "() => [...document.querySelectorAll('pre code')].some(code => code.scrollWidth > code.clientWidth + 1)"
)
TOO_WIDE = "() => document.documentElement.scrollWidth > window.innerWidth"


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(config),
        "--site-dir",
        str(site),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stderr
    return folder


def text(site: Path, page: str) -> str:
    return (site / page / "index.html").read_text(encoding="utf-8")


def test_every_page_is_built(site):
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix("")
        folder = name.parent if name.name == "index" else name
        assert (site / folder / "index.html").exists(), page


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("core", "polydraft.core.Draft"),
        ("core", "polydraft.core.TokenTree.chain"),
        ("verify", "polydraft.verifiers.verify"),
        ("engine", "polydraft.engine.api.Engine.from_pretrained"),
        ("engine", "polydraft.integrations.transformers.custom_generate"),
        ("sampling-params", "polydraft.core.params.SamplingParams"),
        ("theory", "polydraft.theory.optimum.with_replacement"),
        ("tools", "polydraft.errors.PolydraftError"),
    ],
)
def test_reference_explains_the_name(site, page, name):
    assert f'id="{name}"' in text(site, f"reference/{page}")


@pytest.mark.parametrize(("page", "kind"), [("verifiers", "verifier"), ("drafters", "drafter")])
def test_reference_has_every_registered_method(site, page, kind):
    found = text(site, f"reference/{page}")
    missing = [
        where for where in registry.places(kind).values() if f'id="{where.replace(":", ".")}"' not in found
    ]
    assert not missing, f"docs/reference/{page}.md lacks ::: of {missing}"


def test_examples_of_the_reference_are_code(site):
    assert "<blockquote>" not in text(site, "reference/verifiers"), "a prompt >>> was read as a quotation"


def test_the_example_of_the_docstring_reader_runs():
    spec = importlib.util.spec_from_file_location("docstring_lines", ROOT / "docs" / "docstring_lines.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    done = doctest.testmod(module)
    assert done.attempted > 0 and done.failed == 0


def test_a_page_shows_the_version_and_the_mark(site):
    html = text(site, ".")
    assert f"polydraft {__version__}" in html and "Apache-2.0" in html
    assert re.search(
        r'<a [^>]*class="md-header__button md-logo"[^>]*>\s*<img src="[^"]*pictures/mark.svg"', html
    )


@pytest.fixture(scope="module")
def browser(site):
    """A Chromium, and the address of the site."""
    api = pytest.importorskip("playwright.sync_api")
    if BROWSER is None:
        pytest.skip(
            "no Chromium on the PATH: apt install chromium. Nothing else tests what a page looks like"
        )
    handler = partial(
        type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None}), directory=str(site)
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, api.sync_playwright() as starter:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        program = starter.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield program, f"http://127.0.0.1:{server.server_address[1]}"
        program.close()
        server.shutdown()


@pytest.mark.parametrize("width", [390, 1280])
def test_no_code_is_cut_off_and_no_page_is_wider_than_the_window(browser, width):
    program, address = browser
    page = program.new_page(viewport={"width": width, "height": 900})
    for name in ("", "using/", "vllm/", "extending/", "coming-from/", "results/gguf-files/"):
        page.goto(f"{address}/{name}")
        assert page.locator("h1").count() == 1
        assert not page.evaluate(CUT_OFF), name
        assert not page.evaluate(TOO_WIDE), name
    page.close()


def test_pages_ask_no_other_host_for_anything(site):
    for page in site.rglob("*.html"):
        html = page.read_text(encoding="utf-8")
        assert not re.search(
            r'<(?:script|img|iframe)[^>]* src="(?:https?:)?//|<link[^>]*rel="(?:stylesheet|preconnect)"[^>]*//',
            html,
        )


def test_formulas_are_set_by_a_script_of_the_site_itself(site):
    html = text(site, "papers/traversal")
    assert html.count('class="arithmatex">') > 5
    assert "$" not in re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)
    for script in re.findall(r'<script src="([^"]+)"', html):
        assert (site / "papers" / "traversal" / script).resolve().exists()


def test_a_link_that_leads_nowhere_stops_the_build(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# A page\n\n[no such page](missing.md)\n", encoding="utf-8")
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nplugins:")[0]
    (tmp_path / "mkdocs.yml").write_text(config, encoding="utf-8")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0 and "missing.md" in done.stderr
