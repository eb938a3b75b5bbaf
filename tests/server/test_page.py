"""The page at / in a headless browser: a generation, the race, an error, a server that goes away and comes back."""

import shutil
import socket
import threading
import time

import pytest
import uvicorn

from polydraft import AsyncEngine
from polydraft.server.app import PAGE, Settings, create_app
from tests.server.conftest import small_engine

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def test_the_page_allows_itself_alone(served):
    found = served.http.get("/")
    assert found.status_code == 200 and "<h1>polydraft</h1>" in found.text
    policy = found.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    for file in PAGE.iterdir():
        text = file.read_text(encoding="utf-8")
        assert served.http.get(f"/page/{file.name}").text == text
        assert "innerHTML" not in text and "https://" not in text and " style=" not in text
    assert served.http.get("/page/../app.py").status_code == served.http.get("/page/%2e%2e/app.py").status_code == 404


@pytest.fixture(scope="module")
def window():
    if BROWSER is None:
        pytest.skip("no Chromium on the PATH: apt install chromium. Nothing else tests what the page does")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as starter:
        browser = starter.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser.new_page(viewport={"width": 1280, "height": 860})
        browser.close()


def shown(window, lane=0):
    """The tokens of a lane, as text."""
    return "".join(window.locator(".lane").nth(lane).locator(".output .token").all_text_contents())


def test_a_text_the_race_a_chat_and_an_error_are_shown(window, served):
    said = []
    window.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    window.goto(served.url)
    window.locator("#model", has_text="small · drafts: ngram").wait_for()
    window.fill("#tokens", "40")
    window.click("#tab-text")
    window.keyboard.press("Tab")
    window.fill("#prompt", "def f(a):\n    return a\n\n\ndef f(a):\n")
    window.keyboard.press("Control+Enter")
    window.locator(".token.draft").first.wait_for()
    window.wait_for_selector("#go:enabled")
    whole = served.post("/v1/completions", prompt=window.input_value("#prompt"), max_tokens=40, temperature=0).json()
    assert shown(window) == whole["choices"][0]["text"]
    assert "drafted by ngram, depth 1, probability" in window.locator(".output .token.d1").first.get_attribute("title")
    assert window.locator("#tree path.kept").count() > 0
    window.click("#tab-race")
    window.fill("#prompt", "def f(a):\n    return a\n\n\ndef f(a):\n")
    window.click("#go")
    window.locator(".figures", has_text="the same text").wait_for()
    assert shown(window, 0) == shown(window, 1) == whole["choices"][0]["text"]
    assert window.locator(".lane").first.locator(".draft").count() == 0
    window.click("#tab-chat")
    window.fill("#prompt", "def g(")
    window.keyboard.press("Enter")
    window.locator(".output .token").nth(5).wait_for()
    window.wait_for_selector("#go:enabled")
    window.fill("#tokens", "9999")
    window.fill("#prompt", "more")
    window.click("#go")
    window.locator("#error", has_text="the context holds 512").wait_for()
    assert [x for x in said if "400" not in x] == []  # nothing that the policy refused


def test_drafter_rule_and_size_are_those_chosen_on_the_page(window, served):
    window.goto(served.url)
    window.locator("#model", has_text="small · drafts: ngram").wait_for()
    window.click("#tab-text")
    window.fill("#prompt", "def f(a):\n    return a\n\n\ndef f(a):\n")
    window.fill("#tokens", "30")
    told = served.http.get("/v1/models").json()["data"][0]["speculation"]
    for drafter in ("ngram", "suffix"):
        window.select_option("#drafter", drafter)
        assert window.locator("#verifier option").all_text_contents() == ["auto", *told["verifiers"][drafter]]
    window.select_option("#verifier", "race")
    window.select_option("#depth", "2")

    def generated():
        with window.expect_request("**/v1/completions") as asked:
            window.click("#go")
        window.locator(".output .token").first.wait_for()
        window.wait_for_selector("#go:enabled")
        return asked.value.post_data_json["speculation"]

    asked = {"enabled": True, "trace": True, "drafter": "suffix", "verifier": "race", "depth": 2}
    assert generated() == asked
    titles = " ".join(token.get_attribute("title") for token in window.locator(".output .draft").all())
    assert "drafted by suffix" in titles and "ngram" not in titles and "depth 3" not in titles
    text = shown(window)
    window.select_option("#drafter", "none")
    assert window.locator("#verifier").is_disabled() and window.locator("#depth").is_disabled()
    assert generated() == {"enabled": False, "trace": True}
    assert window.locator(".output .draft").count() == 0 and shown(window) == text


def test_every_control_has_a_name_and_tabs_go_by_arrows(window, served):
    window.goto(served.url)
    window.locator("#model", has_text="small · drafts: ngram").wait_for()
    for control in window.locator("button, input, select, textarea").all():
        named = control.evaluate("e => e.labels?.length ? e.labels[0].textContent.trim() : e.textContent.trim()")
        assert named, control.evaluate("e => e.outerHTML")
    window.focus("#tab-chat")
    for expected in ("text", "race", "chat"):
        window.keyboard.press("ArrowRight")
        assert window.get_attribute(f"#tab-{expected}", "aria-selected") == "true"
    window.set_viewport_size({"width": 390, "height": 844})
    assert window.evaluate("document.documentElement.scrollWidth <= innerWidth")
    window.set_viewport_size({"width": 1280, "height": 860})


def test_it_connects_again_after_the_server_went_away(window):
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    engine = small_engine()
    for name in ("one", "two"):
        server = uvicorn.Server(
            uvicorn.Config(create_app(AsyncEngine(engine), Settings(name, drain=0)), port=port, log_level="error")
        )
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        if name == "one":
            window.goto(f"http://127.0.0.1:{port}")
        window.locator("#model", has_text=f"{name} · drafts").wait_for()
        assert window.locator("#error").is_hidden()
        server.force_exit = server.should_exit = True
        thread.join(20)
        if name == "one":
            window.click("#tab-text")
            window.click("#go")
            window.locator("#error:visible").wait_for()
