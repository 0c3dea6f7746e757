"""The page in a real browser, without a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from page_browser import NEEDS_BROWSER, Opened, offline_page
from report_examples import ops_runs, rich_runs

from stepscope.report.html import render_html
from stepscope.report.view import build_report

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = NEEDS_BROWSER


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "report.html"
    path.write_text(render_html(build_report(rich_runs())), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser: Browser, file: Path) -> Iterator[Opened]:
    with offline_page(browser) as page:
        yield Opened(page, file)


ROWS = "table.results >> nth=0 >> tbody tr"


def test_page_shows_everything_and_asks_for_nothing(opened: Opened, file: Path, tmp_path: Path) -> None:
    page = opened.page
    assert page.locator(ROWS).count() == 30
    assert all(row.is_visible() for row in page.locator(ROWS).all())
    page.evaluate("document.querySelectorAll('details').forEach((element) => (element.open = true))")
    sizes = page.eval_on_selector_all("svg", "all => all.map((s) => [s.clientWidth, s.clientHeight])")
    assert len(sizes) > 60
    assert all(width > 0 and height > 0 for width, height in sizes)
    page.screenshot(path=str(tmp_path / "report.png"), full_page=True)
    assert (tmp_path / "report.png").stat().st_size > 50_000
    assert [url for url in opened.requests if not url.startswith("data:")] == [file.as_uri()]
    assert opened.complaints == []


def test_clicking_a_title_sorts_numbers_as_numbers_and_puts_gaps_last(opened: Opened) -> None:
    page = opened.page
    header = page.locator("table.results >> nth=0 >> thead th", has_text="Median")
    column = header.evaluate("th => th.cellIndex")

    def medians() -> list[str | None]:
        return page.locator(ROWS).evaluate_all("(rows, i) => rows.map((row) => row.cells[i].dataset.v ?? null)", column)

    before = medians()
    header.get_by_role("button").click()
    rising = medians()
    assert rising != before
    assert header.get_attribute("aria-sort") == "ascending"
    numbers = [float(value) for value in rising if value is not None]
    assert numbers == sorted(numbers)
    assert rising[-2:] == [None, None]
    header.get_by_role("button").click()
    falling = medians()
    assert [float(value) for value in falling if value is not None] == numbers[::-1]
    assert falling[-2:] == [None, None]


def test_filter_hides_rows_and_details(opened: Opened) -> None:
    page = opened.page
    page.get_by_label("Filter cases by text").fill("GEMM 8192x4096")
    assert sum(row.is_visible() for row in page.locator(ROWS).all()) == 2
    assert page.locator("details.case:visible").count() == 2
    assert page.locator("#shown").inner_text() == "2 of 31 cases"
    page.get_by_label("Filter cases by text").fill("")
    assert all(row.is_visible() for row in page.locator(ROWS).all())


def test_a_row_leads_to_its_unfolded_details(opened: Opened) -> None:
    page = opened.page
    details = page.locator("#case-2")
    assert details.get_attribute("open") is None
    page.locator('a[href="#case-2"]').click()
    details.locator(".inside").wait_for(state="visible")
    assert "p95" in details.inner_text()


@pytest.fixture
def ops_file(tmp_path: Path) -> Path:
    path = tmp_path / "ops.html"
    path.write_text(render_html(build_report(ops_runs())), encoding="utf-8")
    return path


def test_a_point_of_the_roofline_leads_to_its_case(browser: Browser, ops_file: Path) -> None:
    context = browser.new_context(offline=True, viewport={"width": 1440, "height": 900})
    opened = Opened(context.new_page(), ops_file)
    plot = opened.page.locator("svg.roofline").first
    assert plot.is_visible()
    frame = plot.bounding_box()
    assert frame is not None
    boxes = [point.bounding_box() for point in plot.locator("circle").all()]
    assert len(boxes) == 90
    for box in boxes:
        assert box is not None
        assert frame["x"] < box["x"] < box["x"] + box["width"] < frame["x"] + frame["width"]
        assert frame["y"] < box["y"] < box["y"] + box["height"] < frame["y"] + frame["height"]
    # Nothing of the plot is cut off, whatever the width of the letters here.
    cut = """svg => [...svg.querySelectorAll("text")].map((t) => t.getBoundingClientRect()).filter((t) => {
        const whole = svg.getBoundingClientRect();
        return t.left < whole.left - 1 || t.right > whole.right + 1 || t.top < whole.top - 1 || t.bottom > whole.bottom;
    }).length"""
    assert plot.evaluate(cut) == 0
    last = plot.locator("a").last
    target = opened.page.locator(last.get_attribute("href") or "")
    assert target.get_attribute("open") is None
    last.locator("circle").click()
    target.locator(".inside").wait_for(state="visible")
    assert "flop per byte" in target.inner_text()
    assert opened.complaints == []
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_roofline_can_be_seen_in_light_and_dark(browser: Browser, ops_file: Path, scheme: str) -> None:
    context = browser.new_context(offline=True, color_scheme=scheme)  # type: ignore[arg-type]
    page = Opened(context.new_page(), ops_file).page
    style = "(e, name) => getComputedStyle(e)[name]"
    card = page.locator("section.system").first.evaluate(style, "backgroundColor")
    plot = page.locator("svg.roofline").first
    seen = {roof.evaluate(style, "stroke") for roof in plot.locator("path.roof").all()}
    assert len(seen) == 5  # four dtypes, and one for both bandwidths
    seen |= {plot.locator("circle:not(.hollow)").first.evaluate(style, "fill")}
    seen |= {plot.locator("circle.hollow").first.evaluate(style, "stroke")}
    assert card not in seen
    assert "none" not in seen
    context.close()


@pytest.mark.parametrize("width", [390, 1440])
def test_operators_never_scroll_sideways(browser: Browser, ops_file: Path, width: int) -> None:
    test_page_never_scrolls_sideways(browser, ops_file, width)


@pytest.mark.parametrize("width", [390, 768, 1440])
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
    assert page.locator(ROWS).first.is_visible()
    assert not page.locator("#toolbar").is_visible()
    page.locator("#case-1 > summary").click()
    assert page.locator("#case-1 .inside").is_visible()
    context.close()
