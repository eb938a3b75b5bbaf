"""Chats that the browser keeps: they are there again, and are edited, deleted, copied, exported; and what an answer shows that was cut."""

import json
import socket
import threading
from contextlib import contextmanager, suppress

import pytest

from tests.server.windows import opened, shown, words


@pytest.fixture
def chatting(window, served):
    """A window with the chat open, and answers of a few tokens."""
    opened(window, served.url)
    window.click("#tab-chat")
    window.fill("#tokens", "12")
    window.fill("#temperature", "0")
    return window


def say(window, text):
    window.fill("#prompt", text)
    window.keyboard.press("Enter")
    window.wait_for_function(
        "text => [...document.querySelectorAll('.user')].at(-1)?.textContent === text && document.querySelector('#again:enabled')",
        arg=text,
    )


def reloaded(window):
    window.reload()
    window.locator("#model", has_text="drafts").wait_for()


def titles(window):
    return window.locator("#kept > li > button").all_text_contents()


def turns(window):
    return window.locator(".user, .answer").all_text_contents()


def test_a_chat_is_there_again_with_its_colours_and_goes_on(chatting):
    say(chatting, "def f(a):\n    return a\n\n\ndef f(")
    told = words(shown(chatting))
    before = turns(chatting), chatting.locator(".output .draft").count()
    reloaded(chatting)
    chatting.locator(".answer").wait_for()
    assert (turns(chatting), chatting.locator(".output .draft").count()) == before and before[1] > 0
    with chatting.expect_request("**/v1/chat/completions") as sent:
        say(chatting, "and?")
    messages = sent.value.post_data_json["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert words(messages[1]["content"]) == told


def test_chats_are_listed_opened_renamed_and_deleted(chatting):
    for text in ("one", "two"):
        chatting.click("#new")
        say(chatting, text)
    assert titles(chatting) == ["two", "one"]
    chatting.click("#kept button:text-is('one')")
    assert chatting.locator(".user").all_text_contents() == ["one"]
    chatting.once("dialog", lambda dialog: dialog.accept("first"))
    chatting.click("#kept button:text-is('Rename')")
    assert sorted(titles(chatting)) == ["first", "two"]
    chatting.once("dialog", lambda dialog: dialog.accept())
    chatting.click("#kept button:text-is('Delete')")
    assert titles(chatting) == ["two"] and chatting.locator(".invite").count() == 1
    reloaded(chatting)
    assert titles(chatting) == ["two"]
    chatting.once("dialog", lambda dialog: dialog.accept())
    chatting.click("#forget")
    assert (
        titles(chatting) == []
        and chatting.evaluate("Object.keys(localStorage).filter((key) => key.includes('chat')).length") == 0
    )


def test_the_list_of_chats_unfolds_on_a_phone_and_goes_with_a_choice(chatting):
    say(chatting, "one")
    chatting.click("#new")
    chatting.set_viewport_size({"width": 390, "height": 844})
    assert chatting.locator("#kept").is_hidden() and chatting.inner_text("#fold") == "Chats (1)"
    chatting.click("#fold")
    assert chatting.get_attribute("#fold", "aria-expanded") == "true"
    chatting.click("#kept button:text-is('one')")
    assert chatting.locator("#kept").is_hidden() and chatting.locator(".user").all_text_contents() == ["one"]


def test_an_edited_message_is_answered_anew_and_what_followed_it_is_gone(chatting):
    for text in ("one", "two"):
        say(chatting, text)
    chatting.locator(".mine .tools button", has_text="Edit").first.click()
    chatting.fill(".editor textarea", "three")
    with chatting.expect_request("**/v1/chat/completions") as sent:
        chatting.click(".editor button:text-is('Send')")
    chatting.wait_for_selector("#again:enabled")
    assert sent.value.post_data_json["messages"] == [{"role": "user", "content": "three"}]
    assert (
        chatting.locator(".user").all_text_contents() == ["three"]
        and chatting.locator(".answer").count() == 1
    )


def test_an_edited_answer_is_what_the_model_is_told(chatting):
    say(chatting, "one")
    chatting.locator(".turn:not(.mine) .tools button", has_text="Edit").click()
    chatting.fill(".editor textarea", "My **own** words.")
    chatting.keyboard.press("Control+Enter")
    assert chatting.locator(".answer strong").inner_text() == "own" and chatting.locator(".note").count() == 0
    with chatting.expect_request("**/v1/chat/completions") as sent:
        say(chatting, "two")
    assert sent.value.post_data_json["messages"][1] == {"role": "assistant", "content": "My **own** words."}


def test_a_deleted_message_takes_what_follows_it(chatting):
    for text in ("one", "two"):
        say(chatting, text)
    for answer, left in (("dismiss", ["one", "two"]), ("accept", ["one"])):
        chatting.once("dialog", lambda dialog, answer=answer: getattr(dialog, answer)())
        chatting.locator(".mine .tools button", has_text="Delete").last.click()
        assert chatting.locator(".user").all_text_contents() == left
    reloaded(chatting)
    assert chatting.locator(".user").all_text_contents() == ["one"]


@pytest.mark.parametrize("secure", [True, False])
def test_an_answer_is_copied_also_where_a_page_has_no_clipboard(chatting, secure):
    chatting.context.grant_permissions(["clipboard-read", "clipboard-write"])
    say(chatting, "def g(")
    chatting.evaluate("navigator.clipboard.writeText('before')")
    if not secure:  # a page of http from another machine
        chatting.evaluate("navigator.clipboard.writeText = undefined")
    chatting.locator(".turn:not(.mine) > .tools button", has_text="Copy").click()
    chatting.locator("button", has_text="Copied").wait_for()
    copied = chatting.evaluate("navigator.clipboard.readText()")
    assert copied != "before" and words(copied) == words(shown(chatting))


def test_chats_are_exported_for_people_and_for_programs(chatting):
    say(chatting, "A list: one")
    answer = chatting.evaluate(
        "JSON.parse(localStorage[Object.keys(localStorage).find((key) => key.includes('chat.'))]).turns[1].text"
    )
    messages = [{"role": "user", "content": "A list: one"}, {"role": "assistant", "content": answer}]
    files = {}
    for name in ("#kept button:text-is('Markdown')", "#kept button:text-is('JSON')", "#export"):
        with chatting.expect_download() as download:
            chatting.click(name)
        files[download.value.suggested_filename] = download.value.path().read_text(encoding="utf-8")
    assert set(files) == {"A-list-one.md", "A-list-one.json"}
    assert (
        files["A-list-one.md"]
        == f"# A list: one\n\n## User\n\nA list: one\n\n## Assistant\n\n{answer.strip()}\n"
    )
    (told,) = json.loads(files["A-list-one.json"])
    assert told["title"] == "A list: one" and told["messages"] == messages


def test_a_full_browser_says_that_a_chat_is_not_kept(chatting):
    chatting.evaluate("""() => {
        for (let size = 2 ** 20; size; size >>= 1) {
            try { for (let n = 0; ; n++) localStorage.setItem(`filled${size}.${n}`, 'x'.repeat(size)); } catch { /* full */ }
        }
    }""")
    say(chatting, "one")
    assert "storage is full" in chatting.inner_text("#where") and chatting.locator(".answer").count() == 1


def test_a_text_is_there_again_and_the_tab_is_the_same(window, served):
    opened(window, served.url)
    window.click("#tab-text")
    window.fill("#tokens", "8")
    window.fill("#prompt", "def f(")
    window.click("#go")
    window.wait_for_selector("#again:enabled")
    before = window.inner_text(".output")
    reloaded(window)
    window.locator(".answer").wait_for()
    assert window.inner_text(".output") == before and window.input_value("#prompt") == "def f("
    assert window.get_attribute("#tab-text", "aria-selected") == "true"


def test_thoughts_are_no_part_of_what_is_copied_or_sent(window, served):
    window.goto(served.url)
    said = """async (turn) => (await import('/page/chats.js')).said(turn)"""
    assert window.evaluate(said, {"text": "<think>\na\n</think>\n\nb"}) == "b"
    assert window.evaluate(said, {"text": "a\n</think>\n\nb", "thinks": True}) == "b"
    assert window.evaluate(said, {"text": "a is <think> b"}) == "a is <think> b"


class Wire:
    """A connection to a server that is cut as if the server were killed. left: bytes of answers that still pass, or None for all; at 0 nothing does.
    silent: whether it stays open behind them.
    """

    def __init__(self, port):
        self.port = port
        self.left = None
        self.silent = False
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"

    def run(self):
        while True:
            try:
                client, _ = self.listening.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self.port))
            asked = threading.Event()
            for source, sink in ((client, server), (server, client)):
                threading.Thread(
                    target=self.carry,
                    args=(source, sink, asked),
                    kwargs={"down": source is server},
                    daemon=True,
                ).start()

    def carry(self, source, sink, asked, *, down):
        """asked: of the connection, whether an answer comes through it; files of the page are not counted."""
        try:
            while data := source.recv(4096):
                if not down and data.startswith(b"POST"):
                    asked.set()
                if down and self.left is not None and (asked.is_set() or self.left == 0):
                    data, self.left = data[: self.left], max(self.left - len(data), 0)
                sink.sendall(data)
                if down and self.left == 0:
                    if self.silent:
                        return
                    break
        except OSError:
            pass
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def wired(served):
    wire = Wire(int(served.url.rpartition(":")[2]))
    thread = threading.Thread(target=wire.run, daemon=True)
    thread.start()
    try:
        yield wire
    finally:
        wire.listening.shutdown(socket.SHUT_RDWR)
        wire.listening.close()
        thread.join(10)


def test_an_answer_that_a_killed_server_cut_says_so_and_goes_on_later(window, served):
    with wired(served) as wire:
        opened(window, wire.url)
        window.click("#tab-chat")
        window.fill("#tokens", "200")
        window.fill("#temperature", "0")
        wire.left = 5000
        window.fill("#prompt", "def f(a):\n    return a\n")
        window.keyboard.press("Enter")
        window.locator(".answer.cut .note", has_text="the server went away").wait_for()
        cut = shown(window)
        wire.left = None
        window.locator("#error", has_text="went away").wait_for(state="hidden")
        reloaded(window)
        assert shown(window) == cut and "the server went away" in window.inner_text(".note")
        with window.expect_request("**/v1/chat/completions") as sent:
            window.click("#more")
        window.wait_for_selector("#again:enabled")
        assert sent.value.post_data_json["continue_final_message"] and "went away" not in window.inner_text(
            ".answer"
        )
        assert words(shown(window)).startswith(words(cut)) and len(shown(window)) > len(cut) > 0


def test_an_answer_stays_where_no_other_one_comes(window, served):
    with wired(served) as wire:
        opened(window, wire.url)
        window.click("#tab-chat")
        window.fill("#tokens", "12")
        say(window, "def f(")
        before = turns(window)
        wire.left = 0
        window.click("#again")
        window.locator("#error", has_text="cannot be reached").wait_for()
        assert turns(window) == before
        wire.left = None
        reloaded(window)
        assert turns(window) == before


def test_an_answer_whose_page_was_closed_keeps_what_came(window, served):
    with wired(served) as wire:
        opened(window, wire.url)
        window.click("#tab-chat")
        window.fill("#tokens", "200")
        window.fill("#temperature", "0")
        wire.left = 8000
        wire.silent = True
        window.fill("#prompt", "def f(a):")
        window.keyboard.press("Enter")
        window.locator(".answer .token").nth(5).wait_for(state="attached")
        window.wait_for_timeout(100)
        came = shown(window)
        wire.left = None
        reloaded(window)
        assert shown(window) == came and "the page was closed" in window.inner_text(".answer.cut .note")
        assert window.locator("#more").is_visible()
