"""A real browser for the pages, without a network: what the tests of every page need."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run",
]  # fmt: skip
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

NO_BROWSER = "no chromium, chromium-browser or google-chrome on PATH"
NEEDS_BROWSER = [pytest.mark.services, pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)]
"""Marks of a module whose tests open pages."""


@contextmanager
def offline_page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(offline=True, viewport={"width": 1440, "height": 900})
    yield context.new_page()
    context.close()


class Opened:
    """A page, and everything it asked for or complained about."""

    def __init__(self, page: Page, file: Path) -> None:
        self.page = page
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.goto(file.as_uri())
