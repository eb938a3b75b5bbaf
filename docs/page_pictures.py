"""Pictures of the page at / of a running server: `python docs/page_pictures.py http://127.0.0.1:8000 [FOLDER]`."""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

OUT = Path(__file__).parent / "pictures"
QUESTION = "Write a Python function that merges two sorted lists, and say in a short list how it works and what it costs."


def opened(browser: Browser, url: str, **options) -> Page:
    """The page, once it is connected."""
    page = browser.new_page(**options)
    page.set_default_timeout(180_000)
    page.goto(url)
    page.locator("#model", has_text="drafts").wait_for()
    return page


def asked(page: Page) -> None:
    """The question in the chat, answered."""
    page.fill("#prompt", QUESTION)
    page.keyboard.press("Enter")
    page.locator(".output .token").nth(9).wait_for()
    page.wait_for_selector("#again:enabled")


def main(url: str, folder: Path = OUT) -> None:
    """The race on a screen, a chat on a dark one, and on a phone."""
    with sync_playwright() as starter:
        browser = starter.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = opened(browser, url, viewport={"width": 1280, "height": 900})
        page.click("#tab-race")
        page.click("#settings summary")
        page.fill("#prompt", QUESTION)
        page.fill("#temperature", "0")
        page.fill("#tokens", "200")
        page.click("#go")
        page.locator(".figures", has_text="text").wait_for()
        page.screenshot(path=folder / "page-race.png")
        dark = opened(browser, url, viewport={"width": 1280, "height": 900}, color_scheme="dark")
        asked(dark)
        dark.screenshot(path=folder / "page-chat.png")
        phone = opened(
            browser,
            url,
            viewport={"width": 390, "height": 844},
            device_scale_factor=2,
            color_scheme="dark",
            is_mobile=True,
        )
        asked(phone)
        phone.screenshot(path=folder / "page-phone.png")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
