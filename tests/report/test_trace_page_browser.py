"""The page of a traced job in a real browser, without a network."""

from __future__ import annotations

import json
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
    write_page(job, answer(job), timelines.__getitem__, path)
    return path


class OpenedTrace(Opened):
    """With what is in the timeline's view."""

    def shown_ns(self) -> tuple[float, float]:
        self.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        low, high = self.page.eval_on_selector("canvas", "c => [c.dataset.from, c.dataset.to]")
        return float(low), float(high)

    def point(self, label: str, share: float) -> tuple[float, float]:
        """The middle of a lane, at a share of the whole step while all of it is shown."""
        canvas = self.page.locator("canvas")
        canvas.scroll_into_view_if_needed()
        self.shown_ns()
        top = dict(json.loads(canvas.get_attribute("data-tops") or ""))[label]
        box = canvas.bounding_box()
        assert box is not None
        return box["x"] + GUTTER + share * (box["width"] - GUTTER), box["y"] + top + 8

    def pixels(self) -> str:
        self.shown_ns()
        drawn: str = self.page.eval_on_selector("canvas", "c => c.toDataURL()")
        return drawn


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
    page.mouse.move(*opened.point("critical path of this rank", (72 + 200) / 4000))
    assert "(communication)" in hover.inner_text()
    page.mouse.move(5, 5)
    assert not hover.is_visible()


def test_the_advice_leads_to_the_timeline_of_the_rank_it_names(opened: OpenedTrace) -> None:
    page = opened.page
    caption = page.locator("#timeline-caption")
    assert caption.inner_text().startswith("rank 0, step 1 from its start on the host")
    before = opened.pixels()
    page.locator(".try").get_by_role("link", name="rank 3").first.click()
    assert caption.inner_text().startswith("rank 3, step 1")
    assert page.get_by_role("radio", name="3 straggler").is_checked()
    assert opened.pixels() != before
    page.mouse.move(*opened.point("stream 20", (412 + 20) / 4000))
    assert "68.00 µs, at 412.0 µs" in page.locator("#hover").inner_text()
    page.keyboard.press("ArrowLeft")
    assert caption.inner_text().startswith("rank 2, step 1"), "the choice has the focus and keys change it"
    assert opened.complaints == []


def test_a_link_with_a_rank_opens_its_timeline(browser: Browser, file: Path) -> None:
    with offline_page(browser) as page:
        page.goto(f"{file.as_uri()}#rank-2")
        assert page.locator("#timeline-caption").inner_text().startswith("rank 2, step 1")


def test_search_counts_highlights_and_walks_through_matches(opened: OpenedTrace) -> None:
    page = opened.page
    query, said, picked = (page.locator(name) for name in ("#query", "#matches", "#picked"))
    plain = opened.pixels()
    assert page.get_by_role("button", name="Next match").is_disabled()
    query.fill("ALLREDUCE")
    assert said.inner_text() == "16 matches", "eight operators and eight kernels; the path is not searched"
    assert opened.pixels() != plain
    query.press("Enter")
    assert said.inner_text() == "1 of 16 matches"
    assert "c10d::allreduce_" in picked.inner_text()
    low, high = opened.shown_ns()
    assert high - low < 4_000_000, "a short match is brought near"
    page.get_by_role("button", name="Next match").click()
    assert "ncclDevKernel_AllReduce" in picked.inner_text()
    assert "launched by cudaLaunchKernel, started 58.00 µs after it" in picked.inner_text()
    query.press("Shift+Enter")
    query.press("Shift+Enter")
    assert said.inner_text() == "16 of 16 matches", "before the first comes the last"
    query.fill("no such kernel")
    assert said.inner_text() == "0 matches"
    query.press("Escape")
    assert said.inner_text() == ""
    assert opened.complaints == []


def test_the_search_stays_when_the_rank_changes(opened: OpenedTrace) -> None:
    page = opened.page
    page.fill("#query", "sgemm")
    page.get_by_role("radio", name="3 straggler").check(force=True)
    assert page.locator("#matches").inner_text() == "8 matches"
    page.press("#query", "Enter")
    assert "400.0 µs, at 10.00 µs" in page.locator("#picked").inner_text()


def test_arrows_lead_from_launches_to_what_they_launched(opened: OpenedTrace) -> None:
    page = opened.page
    hover, plain = page.locator("#hover"), opened.pixels()
    page.mouse.move(*opened.point("stream 20", (72 + 200) / 4000))
    assert "launched by cudaLaunchKernel, started 58.00 µs after it" in hover.inner_text()
    assert opened.pixels() != plain, "an arrow is drawn while the pointer rests"
    page.mouse.move(*opened.point("main thread: annotations", 0.5))
    assert "launches 16 rectangles on the device" in hover.inner_text()
    page.mouse.move(5, 5)
    assert opened.pixels() == plain
    page.mouse.click(*opened.point("stream 20", (72 + 200) / 4000))
    page.mouse.move(5, 5)
    assert "launched by" in page.locator("#picked").inner_text()
    assert opened.pixels() != plain, "that of a chosen rectangle stays"


def test_everything_in_the_timeline_can_be_reached_by_keys(opened: OpenedTrace) -> None:
    page, picked = opened.page, opened.page.locator("#picked")
    page.locator("canvas").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert "ProfilerStep#1" in picked.inner_text()
    page.keyboard.press("ArrowDown")
    assert "aten::mm" in picked.inner_text() or "c10d::allreduce_" in picked.inner_text()
    first = picked.inner_text()
    page.keyboard.press(".")
    assert picked.inner_text() != first
    page.keyboard.press(",")
    assert picked.inner_text() == first
    page.keyboard.press("0")
    assert opened.shown_ns() == (0.0, 4_000_000.0)
    page.keyboard.press("+")
    page.keyboard.press("ArrowRight")
    assert opened.shown_ns()[0] > 0
    page.keyboard.press("Escape")
    assert picked.inner_text() == ""
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "query"
    described = page.locator("canvas").get_attribute("aria-describedby")
    assert "Keys:" in page.locator(f"#{described}").inner_text()
    assert opened.complaints == []


def test_lanes_over_time_say_their_value(opened: OpenedTrace) -> None:
    page, hover = opened.page, opened.page.locator("#hover")
    page.mouse.move(*opened.point("queue length", (16 + 20) / 4000))
    assert hover.inner_text().startswith("queue length: 1")
    page.mouse.move(*opened.point("collectives, algbw", (72 + 200) / 4000))
    assert hover.inner_text().startswith("collectives, algbw: 10.3 GB/s")


def test_the_printed_page_holds_the_timeline_and_no_controls(opened: OpenedTrace) -> None:
    page = opened.page
    page.emulate_media(media="print")
    assert page.locator("canvas").is_visible()
    for hidden in (".ranks", ".timeline .controls", ".keys"):
        assert not page.locator(hidden).is_visible()
    assert page.locator("#timeline-caption").is_visible()


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
    assert not page.locator("#ranks").is_visible(), "nothing to choose from that does nothing"
    assert page.locator("table.sortable").first.is_visible()
    context.close()
