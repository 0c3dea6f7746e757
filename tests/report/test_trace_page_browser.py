"""The page of a traced job in a real browser, without a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from page_browser import NEEDS_BROWSER, Opened, offline_page

from stepscope.analyze.answers.compose import answer
from stepscope.report.trace_page import write_page
from trace_jobs import report_job, straggling

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = NEEDS_BROWSER

GUTTER = 170
"""Width of the lanes' labels."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    timelines = [draft.build() for draft in straggling()]
    job = report_job(timelines)
    path = tmp_path_factory.mktemp("page") / "trace.html"
    write_page(job, answer(job), timelines[job.telling_rank], path)
    return path


class OpenedTrace(Opened):
    """With what is in the timeline's view."""

    def shown_ns(self) -> tuple[float, float]:
        self.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        low, high = self.page.eval_on_selector("canvas", "c => [c.dataset.from, c.dataset.to]")
        return float(low), float(high)

    def point(self, label: str, share: float) -> tuple[float, float]:
        """The middle of a lane, at a share of the whole step while all of it is shown."""
        lanes = self.page.evaluate("() => JSON.parse(document.getElementById('overview').textContent).lanes")
        lane = [title for title, _ in lanes].index(label)
        breaks = sum(lanes[i][1] != lanes[i - 1][1] for i in range(1, lane + 1))
        canvas = self.page.locator("canvas")
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        assert box is not None
        return box["x"] + GUTTER + share * (box["width"] - GUTTER), box["y"] + 24 + lane * 16 + breaks * 7 + 8


@pytest.fixture
def opened(browser: Browser, file: Path) -> Iterator[OpenedTrace]:
    with offline_page(browser) as page:
        yield OpenedTrace(page, file)


def test_page_shows_everything_and_asks_for_nothing(opened: OpenedTrace, file: Path) -> None:
    page = opened.page
    page.evaluate("document.querySelectorAll('details').forEach((element) => (element.open = true))")
    sizes = page.eval_on_selector_all("svg, canvas", "all => all.map((s) => [s.clientWidth, s.clientHeight])")
    assert len(sizes) >= 2
    assert all(width > 0 and height > 0 for width, height in sizes)
    # Something is drawn: many pixels differ from the transparent ground.
    drawn = page.eval_on_selector(
        "canvas",
        "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.filter((v, i) => i % 4 === 3 && v).length",
    )
    assert drawn > 5000
    assert [url for url in opened.requests if not url.startswith("data:")] == [file.as_uri()]
    assert opened.complaints == []


def test_clicking_a_title_sorts_largest_first_and_back(opened: OpenedTrace) -> None:
    page = opened.page
    table = page.locator("#breakdown ~ * table.sortable").first
    header = table.locator("thead th", has_text="Kept others")
    column = header.evaluate("th => th.cellIndex")

    def cells(read: str) -> list[str]:
        return table.locator("tbody tr").evaluate_all(f"(rows, i) => rows.map((row) => {read})", column)

    def caused() -> list[float]:
        return [float(value) for value in cells("row.cells[i].dataset.v")]

    header.get_by_role("button").click()
    assert header.get_attribute("aria-sort") == "descending"
    assert caused() == sorted(caused(), reverse=True)
    assert cells("row.cells[0].textContent")[0] == "3"
    header.get_by_role("button").click()
    assert caused() == sorted(caused())
    assert header.get_attribute("aria-sort") == "ascending"


def test_wheel_buttons_and_dragging_change_the_view(opened: OpenedTrace) -> None:
    page = opened.page
    whole = opened.shown_ns()
    assert whole == (0.0, 4_000_000.0)
    x, y = opened.point("stream 20", 0.5)
    page.mouse.move(x, y)
    page.mouse.wheel(0, -240)
    low, high = opened.shown_ns()
    assert 0 < low < 2_000_000 < high < 4_000_000
    assert low + high == pytest.approx(4_000_000, rel=0.01), "it zooms at the pointer"
    page.mouse.down()
    page.mouse.move(x + 200, y, steps=4)
    page.mouse.up()
    moved_low, moved_high = opened.shown_ns()
    assert moved_low < low
    assert moved_high - moved_low == pytest.approx(high - low)
    page.get_by_role("button", name="Zoom in").click()
    nearer = opened.shown_ns()
    assert nearer[1] - nearer[0] < high - low
    assert "of 4.000 ms" in page.locator("#shown").inner_text()
    page.get_by_role("button", name="Whole step").click()
    assert opened.shown_ns() == whole
    assert opened.complaints == []


def test_hovering_shows_name_and_duration(opened: OpenedTrace) -> None:
    page = opened.page
    hover = page.locator("#hover")
    assert not hover.is_visible()
    page.mouse.move(*opened.point("stream 20", (72 + 200) / 4000))
    assert "ncclDevKernel_AllReduce_Sum_f32_RING_LL" in hover.inner_text()
    assert "408.0 µs, at 72.00 µs" in hover.inner_text()
    page.mouse.move(*opened.point("critical path of rank 0", (72 + 200) / 4000))
    assert "(communication)" in hover.inner_text()
    page.mouse.move(5, 5)
    assert not hover.is_visible()


@pytest.mark.parametrize("width", [390, 1200])
def test_page_never_scrolls_sideways(browser: Browser, file: Path, width: int) -> None:
    context = browser.new_context(offline=True, viewport={"width": width, "height": 844}, color_scheme="dark")
    page = Opened(context.new_page(), file).page
    page.evaluate("document.querySelectorAll('details').forEach((element) => (element.open = true))")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    context.close()


def test_page_is_useful_without_scripts(browser: Browser, file: Path) -> None:
    context = browser.new_context(offline=True, java_script_enabled=False)
    page = context.new_page()
    page.goto(file.as_uri())
    assert page.locator(".lead").is_visible()
    assert page.get_by_text("The timeline is drawn by a script").is_visible()
    assert not page.locator("#timeline").is_visible()
    assert page.locator("table.sortable").first.is_visible()
    context.close()
