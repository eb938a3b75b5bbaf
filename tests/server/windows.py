"""The page at / in a headless Chromium."""

import shutil

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SCREEN = {"width": 1280, "height": 860}


def opened(window, url):
    """The page, connected, with its settings open."""
    window.goto(url)
    window.locator("#model", has_text="drafts: ngram").wait_for()
    window.evaluate("document.getElementById('settings').open = true")


def shown(window, lane=0):
    """The tokens of a lane, as text."""
    return "".join(window.locator(".lane").nth(lane).locator(".output .token").all_text_contents())


def words(text):
    """Letters and digits, which markdown leaves as they are."""
    return "".join(filter(str.isalnum, text))
