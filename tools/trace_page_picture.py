"""Take the picture of a traced job's page for the docs: the first screen, down to the end of the timeline.

Run: python tools/trace_page_picture.py TRACES docs/images/trace-report.png (needs playwright and a Chromium on PATH).
The picture in the docs shows PARAM's public Kineto traces of DLRM on 8 V100.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from stepscope.analyze.answers.compose import answer
from stepscope.analyze.job import explain_job
from stepscope.report.trace_page import write_page
from stepscope.traces import read_traces

WIDTH = 1200
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


def take_picture(page: Path, picture: Path) -> None:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        opened = browser.new_context(offline=True, viewport={"width": WIDTH, "height": 900}).new_page()
        opened.goto(page.as_uri())
        box = opened.locator("section", has=opened.locator("#timeline")).bounding_box()
        assert box is not None
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": box["y"] + box["height"] + 8}
        opened.screenshot(path=picture, clip=clip, full_page=True)
        browser.close()


def main() -> None:
    traces = read_traces(sys.argv[1])
    job = explain_job(traces)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        write_page(job, answer(job, limits=job.limits), traces.timeline, page)
        take_picture(page, Path(sys.argv[2]))


if __name__ == "__main__":
    main()
