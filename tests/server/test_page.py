"""The page at / in a headless browser: a generation, the race, an error, a server that goes away and comes back."""

import socket
import threading
import time
from pathlib import Path

import pytest
import uvicorn

from polydraft import AsyncEngine
from polydraft.config import ServerConfig
from polydraft.server.app import PAGE, create_app
from tests.server.conftest import small_engine
from tests.server.windows import opened, shown, words


def test_the_page_allows_itself_alone(served):
    found = served.http.get("/")
    assert found.status_code == 200 and "polydraft</h1>" in found.text
    policy = found.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    for file in filter(Path.is_file, PAGE.rglob("*")):
        text = file.read_text(encoding="utf-8")
        assert served.http.get(f"/page/{file.relative_to(PAGE).as_posix()}").text == text
        assert "innerHTML" not in text and "insertAdjacentHTML" not in text
        assert "vendor" in file.parts or ("https://" not in text and " style=" not in text)
    assert (
        served.http.get("/page/../app.py").status_code
        == served.http.get("/page/%2e%2e/app.py").status_code
        == 404
    )


def test_a_text_the_race_a_chat_and_an_error_are_shown(window, served):
    said = []
    window.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    opened(window, served.url)
    window.fill("#tokens", "40")
    window.fill("#temperature", "0")
    window.click("#tab-text")
    window.keyboard.press("Tab")
    window.fill("#prompt", "def f(a):\n    return a\n\n\ndef f(a):\n")
    window.keyboard.press("Control+Enter")
    window.locator(".output .token.draft").first.wait_for()
    window.wait_for_selector("#go:enabled")
    whole = served.post(
        "/v1/completions", prompt=window.input_value("#prompt"), max_tokens=40, temperature=0
    ).json()
    assert shown(window) == whole["choices"][0]["text"]
    assert "drafted by ngram, depth 1, probability" in window.locator(
        ".output .token.d1"
    ).first.get_attribute("title")
    assert window.locator("#tree path.accepted").count() > 0
    assert "acceptance rate" in window.inner_text(
        ".figures"
    ) and "ended at the limit of tokens" in window.inner_text(".figures")
    window.click("#more")
    window.wait_for_function("document.querySelector('.said').textContent.length > 60")
    window.wait_for_selector("#go:enabled")
    assert window.inner_text(".said").startswith(
        "def f(a):\n    return a\n\n\ndef f(a):\n" + whole["choices"][0]["text"].rstrip()
    )
    window.click("#tab-race")
    window.fill("#prompt", "def f(a):\n    return a\n\n\ndef f(a):\n")
    window.click("#go")
    window.locator(".figures", has_text="the same text").wait_for()
    chat = [{"role": "user", "content": window.input_value("#prompt")}]
    reply = served.post("/v1/chat/completions", messages=chat, max_tokens=40, temperature=0).json()[
        "choices"
    ][0]["message"]["content"]
    assert words(shown(window, 0)) == words(shown(window, 1)) == words(reply)
    assert (
        "tokens/s" in window.locator(".figures").first.inner_text()
        and window.locator(".lane").first.locator(".draft").count() == 0
    )
    window.click("#tab-chat")
    window.fill("#prompt", "def g(")
    window.keyboard.press("Enter")
    window.wait_for_selector("#again:enabled")
    assert (
        window.inner_text(".output .user") == "def g("
        and window.locator(".output .answer .token").count() > 0
    )
    window.fill("#prompt", "more " * 600)
    window.click("#go")
    window.locator("#error", has_text="512").wait_for()
    assert window.locator(".output .user").count() == 1  # the refused message is the prompt again
    assert [x for x in said if "400" not in x] == []  # nothing that the policy refused


def test_drafter_rule_and_size_are_those_chosen_on_the_page(window, served):
    opened(window, served.url)
    window.click("#tab-text")
    window.fill("#prompt", "def f(a):\n    return a\n\n\ndef f(a):\n")
    window.fill("#tokens", "30")
    window.fill("#temperature", "0")
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
    opened(window, served.url)
    for control in window.locator("button, input, select, textarea").all():
        named = control.evaluate(
            "e => e.labels?.length ? e.labels[0].textContent.trim() : e.textContent.trim()"
        )
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
            uvicorn.Config(
                create_app(AsyncEngine(engine), ServerConfig(served_model_name=name, drain=0)),
                port=port,
                log_level="error",
            )
        )
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        if name == "one":
            window.goto(f"http://127.0.0.1:{port}")
        window.locator("#model", has_text="drafts").wait_for()
        assert window.locator("#error").is_hidden()
        server.force_exit = server.should_exit = True
        thread.join(60)
        if name == "one":
            window.click("#tab-text")
            window.click("#go")
            window.locator("#error:visible").wait_for()


def test_a_chat_has_a_system_prompt_and_can_be_generated_again(window, served):
    opened(window, served.url)
    window.click("#tab-chat")
    window.fill("#tokens", "12")
    window.fill("#temperature", "1")
    window.fill("#system", "You count.")
    requests = []
    for press in ("#go", "#again"):
        if press == "#go":
            window.fill("#prompt", "one two")
        with window.expect_request("**/v1/chat/completions") as sent:
            window.click(press)
        requests.append(sent.value.post_data_json)
        window.wait_for_selector("#stop:disabled")
        window.wait_for_selector("#again:enabled")
    system = {"role": "system", "content": "You count."}
    turn = {"role": "user", "content": "one two"}
    assert [request["messages"] for request in requests] == [[system, turn]] * 2
    assert window.locator(".user").count() == window.locator(".answer").count() == 1
    window.fill("#system", "")
    window.fill("#prompt", "three")
    with window.expect_request("**/v1/chat/completions") as sent:
        window.keyboard.press("Enter")
    window.wait_for_selector("#again:enabled")
    assert [message["role"] for message in sent.value.post_data_json["messages"]] == [
        "user",
        "assistant",
        "user",
    ]
    window.reload()
    assert window.input_value("#tokens") == "12" and window.input_value("#system") == ""  # settings stay
    window.select_option("#theme", "dark")
    assert window.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark"
    window.select_option("#theme", "")


def test_an_empty_chat_invites_and_settings_are_closed(window, served):
    window.goto(served.url)
    window.locator(".invite button").first.wait_for()
    assert window.locator(".invite button").count() == 3 and window.get_attribute("#settings", "open") is None
    assert window.locator("body").inner_text().count("small") == 1
    with window.expect_request("**/v1/chat/completions") as sent:
        window.locator(".invite button").nth(1).click()
    assert "merges two sorted lists" in sent.value.post_data_json["messages"][0]["content"]
    window.wait_for_selector("#again:enabled")
    assert window.locator(".invite").count() == 0
    box, prompt = (window.locator(name).bounding_box() for name in ("#error", "#prompt"))
    assert box is None or box["y"] > prompt["y"]


def test_a_cut_answer_says_so_and_goes_on(window, served):
    opened(window, served.url)
    window.click("#tab-chat")
    window.fill("#tokens", "6")
    window.fill("#temperature", "0")
    window.fill("#prompt", "def f(")
    window.click("#go")
    window.locator(".answer.cut").wait_for()
    window.wait_for_selector("#more:visible")
    with window.expect_request("**/v1/chat/completions") as sent:
        window.click("#more")
    window.wait_for_selector("#again:enabled")
    asked = sent.value.post_data_json
    assert asked["continue_final_message"] and [m["role"] for m in asked["messages"]] == ["user", "assistant"]
    assert window.locator(".answer").count() == 1 and len(shown(window)) > len(
        asked["messages"][1]["content"]
    )
    assert words(shown(window)).startswith(words(asked["messages"][1]["content"]))


def test_a_race_is_greedy_and_a_stop_keeps_what_is_there(window, served):
    opened(window, served.url)
    window.fill("#temperature", "")
    window.fill("#tokens", "400")
    window.click("#tab-race")
    with window.expect_request("**/v1/chat/completions") as sent:
        window.click("#go")
    assert sent.value.post_data_json["temperature"] == 0
    window.locator(".lane .token").first.wait_for()
    tops = [window.locator(".output").nth(lane).bounding_box()["y"] for lane in (0, 1)]
    window.evaluate("document.querySelectorAll('.figures')[1].textContent = 'many figures '.repeat(30)")
    tops += [window.locator(".output").nth(lane).bounding_box()["y"] for lane in (0, 1)]
    window.keyboard.press("Escape")
    window.wait_for_selector("#again:enabled")
    assert tops[2] == tops[3] and tops[0] == tops[1] and window.locator(".lane .token").count() > 0


WIDE = "document.querySelector('.output').append(Object.assign(document.createElement('pre'), {textContent: 'x'.repeat(900)}))"


@pytest.mark.parametrize("width", [390, 1280, 1680])
def test_the_prompt_and_the_choices_are_in_reach(window, served, width):
    window.set_viewport_size({"width": width, "height": 844})
    window.goto(served.url)
    window.locator(".invite button").first.wait_for()
    assert window.evaluate("document.documentElement.scrollWidth <= innerWidth")
    prompt = window.locator("#prompt").bounding_box()
    assert prompt["y"] + prompt["height"] <= 844
    window.evaluate(WIDE)
    assert window.evaluate("document.querySelector('.lane').getBoundingClientRect().right <= innerWidth")
    assert all(
        window.locator(name).bounding_box()["width"] >= (110 if width < 500 else 60)
        for name in ("#models", "#theme")
    )
    window.set_viewport_size({"width": 1280, "height": 860})


TREE = (
    """async ([parents, texts]) => (await import('/page/tree.js')).draw({ parents, texts, path: [1, 2] })"""
)


@pytest.mark.parametrize("width", [390, 820, 1280])
def test_no_race_and_no_tree_is_wider_than_the_window(window, served, width):
    window.set_viewport_size({"width": width, "height": 844})
    opened(window, served.url)
    window.click("#tab-race")
    window.fill("#tokens", "8")
    window.click("#go")
    window.locator(".figures", has_text="text").wait_for()
    parents = [-1, *range(40), *[0] * 12]  # a chain of 40 beside 12 leaves
    window.evaluate(TREE, [parents, ["token"] * len(parents)])
    assert window.locator("#tree").bounding_box()["width"] > 40 * 60
    for tab in ("race", "text", "chat"):
        window.click(f"#tab-{tab}")
        window.evaluate(TREE, [parents, ["token"] * len(parents)])
        assert window.evaluate("document.documentElement.scrollWidth <= innerWidth"), tab
        assert window.evaluate(
            "document.querySelector('aside').getBoundingClientRect().right <= innerWidth"
        ), tab


def test_comments_of_a_stream_are_no_part_of_an_answer(window, served):
    def commented(route):
        answer = route.fetch()
        route.fulfill(response=answer, body=": prefill 1 / 2\n\n" + answer.text())

    opened(window, served.url)
    window.click("#tab-text")
    window.fill("#tokens", "8")
    window.route("**/v1/completions", commented)
    window.click("#go")
    window.locator(".output .token").first.wait_for()
    window.wait_for_selector("#go:enabled")
    window.unroute("**/v1/completions")
