"""Pictures of the page at / of a running server: `python docs/page_pictures.py http://127.0.0.1:8000`."""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

OUT = Path(__file__).parent / "pictures"
QUESTION = "Write a short poem about the sea."


def main(url: str) -> None:
    """The race on a screen, and a chat on a phone."""
    with sync_playwright() as starter:
        browser = starter.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(180_000)
        page.goto(url)
        page.locator("#model", has_text="drafts").wait_for()
        page.click("#tab-race")
        page.fill("#prompt", "<|im_start|>user\n" + QUESTION + "<|im_end|>\n<|im_start|>assistant\n")
        page.click("#go")
        page.locator(".figures", has_text="text").wait_for()
        page.screenshot(path=OUT / "page-race.png")
        phone = browser.new_page(
            viewport={"width": 390, "height": 844}, device_scale_factor=2, color_scheme="dark", is_mobile=True
        )
        phone.set_default_timeout(180_000)
        phone.goto(url)
        phone.locator("#model", has_text="drafts").wait_for()
        phone.fill("#prompt", QUESTION)
        phone.keyboard.press("Enter")
        phone.locator(".output .token").nth(9).wait_for()
        phone.wait_for_selector("#go:enabled")
        phone.screenshot(path=OUT / "page-phone.png")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])
