"""Matrices of pairs in every format, and in a real browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from page_browser import Opened
from page_structure import check
from report_examples import make_case, make_comms, make_run, make_system

from pair_clusters import SMALL, Cluster, make_pair_case
from stepscope.records import Notice
from stepscope.report.heatmap import MAX_DRAWN_UNITS, draw_heatmap, make_heatmaps, view_pairs
from stepscope.report.html import render_html
from stepscope.report.render import render_csv, render_json, render_markdown, render_text
from stepscope.report.view import Report, build_report

if TYPE_CHECKING:
    from playwright.sync_api import Browser

COMMAND = ["stepscope", "bench", "pairs"]


def slow_host(host: int, per_host: int, factor: float = 2.0) -> Any:
    return lambda s, t, _: factor if (s // per_host == host) != (t // per_host == host) else 1.0


def report_of(cluster: Cluster, **more: Any) -> Report:
    return build_report([make_run(cluster.cases(**more), make_system(), command=COMMAND)])


def three(**more: Any) -> Cluster:
    """Round numbers, for tables that can be read."""
    return Cluster(3, 2, noise=0.0, slower=slow_host(1, 2), **more)


GOLDEN = """\
# pairs of pair/micro/nccl/6ranks (dtype=float32, device=cuda): 6 ranks on 3 hosts
# latency of 8 B in µs; rows send, columns receive; ! marks what is named below
# rank  host      0      1      2      3      4      5
     0  node0     ·   2.00   24.0!  24.0!  12.0   12.0
     1  node0  2.00      ·   24.0!  24.0!  12.0   12.0
     2  node1  24.0!  24.0!     ·   2.00   24.0!  24.0!
     3  node1  24.0!  24.0!  2.00      ·   24.0!  24.0!
     4  node2  12.0   12.0   24.0!  24.0!     ·   2.00
     5  node2  12.0      -!  24.0!  24.0!  2.00      ·
# bandwidth of 4 MiB in GB/s; rows send, columns receive; ! marks what is named below
# rank  host      0      1      2      3      4      5
     0  node0     ·   40.0   5.50!  5.50!  11.0   11.0
     1  node0  40.0      ·   5.50!  5.50!  11.0   11.0
     2  node1  5.50!  5.50!     ·   40.0   5.50!  5.50!
     3  node1  5.50!  5.50!  40.0      ·   5.50!  5.50!
     4  node2  11.0   11.0   5.50!  5.50!     ·   40.0
     5  node2  11.0      -!  5.50!  5.50!  40.0      ·
# rank 5 on host node2 → rank 1 on host node0 gave no good result (1 pair; timeout: no answer within 10 s)
#   next: look at the failed cases, then whether the two ends reach each other at all: address, port, firewall, cable
# host node1 (ranks 2, 3) is slow to and from every other host: latency is 2.00 times the usual, bandwidth is 50 % of \
the usual (16 pairs)
#   next: compare its NIC, cable and switch port with a good host's: speed, error counters (ethtool, ibstat)
"""


def test_text_is_a_matrix_with_findings() -> None:
    text = render_text(report_of(three(), failed=[(5, 1)]))
    scale = "# scale: operators only; tells early what devices can do at best, not how much of it a model uses"
    assert text.endswith(f"stepscope bench pairs\n{scale}\n#\n{GOLDEN}")


def test_a_healthy_cluster_says_so_without_marks() -> None:
    text = render_text(report_of(Cluster(4)))
    assert text.rstrip().endswith("# no host, link or rank stands out")
    assert "!" not in text


def test_marks_stand_only_where_the_quantity_stands_out() -> None:
    cluster = Cluster(6, slower=lambda s, t, q: 2.0 if 1 in {s, t} and q == "latency" else 1.0)
    latency, bandwidth = make_heatmaps(view_pairs(cluster.matrix(), "run"), 16)
    assert len(latency.marked) == 10
    assert bandwidth.marked == frozenset()


def test_many_ranks_are_folded_to_hosts_in_text() -> None:
    text = render_text(report_of(Cluster(6, 4, noise=0.0, slower=slow_host(1, 4))))
    assert "#    host      0      1      2      3      4      5   inside\n" in text
    assert "  1  node1  24.0!     ·   24.0!  24.0!  24.0!  24.0!    2.00\n" in text


def test_more_hosts_than_fit_are_cut_to_the_slowest() -> None:
    text = render_text(report_of(Cluster(20, noise=0.01, slower=slow_host(13, 1))))
    assert "the 16 slowest ranks, 4 are left out" in text
    assert re.search(r"^ +13  node13 ", text, flags=re.MULTILINE)


def test_a_narrow_terminal_gets_a_smaller_matrix() -> None:
    report = report_of(Cluster(4, 3, noise=0.0))
    rows = [line for line in render_text(report, width=60).splitlines() if line.startswith("  ")]
    assert max(map(len, rows)) <= 60
    assert any("node3" in row for row in rows)


def test_markdown_has_the_matrix_too() -> None:
    text = render_markdown(report_of(three(), failed=[(5, 1)]))
    assert "### Pairs of pair/micro/nccl/6ranks (dtype=float32, device=cuda): 6 ranks on 3 hosts\n" in text
    assert "\nLatency of 8 B in µs; rows send, columns receive; ! marks what is named below.\n" in text
    assert "\n| rank | host | 0 | 1 | 2 | 3 | 4 | 5 |\n| ---: | --- | ---: |" in text
    assert "\n| 5 | node2 | 12.0 | -! | 24.0! | 24.0! | 2.00 | · |\n" in text
    assert "\n- host node1 (ranks 2, 3) is slow to and from every other host: " in text


def test_other_cases_keep_their_table() -> None:
    cases = [*make_comms(0), *three().cases()]
    report = build_report([make_run(cases, make_system())])
    text, markdown, page = render_text(report), render_markdown(report), render_html(report)
    assert text.count("\n  all_reduce") == len(make_comms(0))
    assert "\n  pair " not in text
    assert "| pair |" not in markdown
    assert sum(tag == "tr" and "data-case" in attrs for tag, attrs in check(page).found) == len(make_comms(0))
    assert [sweep.benchmark for sweep in report.systems[0].sweeps] == ["all_reduce/micro/nccl/default"]


def test_notices_of_pairs_are_told_in_text() -> None:
    case = make_pair_case(0, 1, SMALL, [1e-6] * 5)
    noticed = case._replace(result=_with_notice(case.result))
    text = render_text(build_report([make_run([noticed], None)]))
    assert "# notice: pair/micro/nccl/4ranks [source=0 target=1 size=8 B]: the interval is wide" in text


def _with_notice(result: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(result, notices=[Notice(kind="unstable", message="the interval is wide")])


def test_programs_get_every_case_and_the_matrix() -> None:
    report = report_of(three())
    assert len(render_csv(report).splitlines()) == 1 + 60
    (pairs,) = json.loads(render_json(report))["systems"][0]["pairs"]
    assert pairs["matrix"]["ranks"] == [0, 1, 2, 3, 4, 5]
    assert pairs["hosts"]["hosts"] == ["node0", "node1", "node2"]
    assert pairs["findings"][0]["kind"] == "slow_host"


def test_runs_without_pairs_have_none() -> None:
    report = build_report([make_run([make_case(values_s=[1.0])], make_system())])
    assert report.systems[0].pairs == []
    assert "heatmap" not in check(render_html(report)).found


# The page


def cells(markup: str, kind: str) -> int:
    return sum(kind in found.split() for found in re.findall(r'<rect class="([^"]+)"', markup))


def test_the_page_has_two_maps_with_names_and_tooltips() -> None:
    page = render_html(report_of(three(missing=[(0, 4)]), failed=[(5, 1)]))
    checker = check(page)
    assert checker.count("svg", "heatmap") == 2
    labels = [str(attrs["aria-label"]) for tag, attrs in checker.found if tag == "svg"]
    assert labels[0].startswith(
        "Latency of 8 B, µs, from every one of the ranks to every other; pair/micro/nccl/6ranks"
    )
    assert cells(page, "cell") == 2 * 30
    assert cells(page, "marked") == 2 * 16
    assert cells(page, "failed") == cells(page, "gap") == 2
    assert "<title>rank 0 (node0) → rank 2 (node1): 24.00 µs (24.00–24.00)</title>" in page
    assert "<title>rank 0 (node0) → rank 4 (node2): not measured</title>" in page
    assert "<title>rank 5 (node2) → rank 1 (node0): timeout: no answer within 10 s</title>" in page
    text = "".join(checker.text)
    assert "host node1 (ranks 2, 3) is slow to and from every other host" in text
    assert "Next: compare its NIC" in text
    assert "Failed and skipped" in text
    assert "No finished cases" not in text


def test_a_page_of_a_large_cluster_is_bounded() -> None:
    page = render_html(report_of(Cluster(8, 8, samples=1)))
    assert cells(page, "cell") == 2 * 64 * 63
    assert len(page) < 2_000_000
    folded = render_html(report_of(Cluster(10, 7, samples=1)))
    assert cells(folded, "cell") == 2 * 10 * 9
    view = view_pairs(Cluster(MAX_DRAWN_UNITS + 6, samples=1).matrix(), "run")
    (latency, _) = make_heatmaps(view, MAX_DRAWN_UNITS)
    assert len(latency.units.names) == MAX_DRAWN_UNITS
    assert latency.units.left_out == 6


def test_the_slowest_has_the_strongest_colour() -> None:
    cluster = Cluster(4, noise=0.0, slower=lambda s, t, _: {(0, 1): 4.0, (2, 3): 2.0}.get((s, t), 1.0))
    for heatmap in make_heatmaps(view_pairs(cluster.matrix(), "run"), 16):
        assert heatmap.heat[0][1] == pytest.approx(1.0)
        assert heatmap.heat[2][3] == pytest.approx(0.5)
        assert heatmap.heat[1][0] == pytest.approx(0.0)
        assert heatmap.heat[1][1] is None


def test_noise_looks_like_one_colour() -> None:
    for heatmap in make_heatmaps(view_pairs(Cluster(8).matrix(), "run"), 16):
        assert max(value for row in heatmap.heat for value in row if value is not None) < 0.6


def test_hosts_are_divided_by_lines() -> None:
    (latency, _) = make_heatmaps(view_pairs(three().matrix(), "run"), 16)
    assert draw_heatmap(latency, "name").count('class="home"') == 1
    (latency, _) = make_heatmaps(view_pairs(Cluster(4).matrix(), "run"), 16)
    drawn = draw_heatmap(latency, "name")
    assert 'class="home"' not in drawn
    assert ">3 node3</text>" in drawn


def test_hostile_names_stay_text() -> None:
    attack = '"><script>alert(1)</script>'
    ends = {"source_host": attack, "target_host": attack + "2", "source_nic": attack, "target_nic": attack}
    cases = [make_pair_case(0, 1, SMALL, [1e-6] * 5, observed=ends), make_pair_case(1, 0, SMALL, None)]
    report = build_report([make_run(cases, None, attack)])
    page = render_html(report)
    assert check(page).count("script") == 1
    assert "<script>alert" not in page
    matrices = render_markdown(report).split("### Pairs")[1]
    assert "&lt;script&gt;" in matrices
    assert "<script>" not in matrices


def test_a_single_failed_pair_is_shown() -> None:
    report = build_report([make_run([make_pair_case(0, 1, SMALL, None)], make_system())])
    assert "gave no good result" in render_text(report)
    assert "gave no good result" in render_markdown(report)
    assert check(render_html(report)).count("svg", "heatmap") == 0


# In a browser


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "pairs.html"
    runs = [
        make_run(three().cases(failed=[(5, 1)]), make_system(), "small", command=COMMAND),
        make_run(Cluster(8, 8, samples=1, slower=slow_host(3, 8)).cases(), make_system(), "large", command=COMMAND),
    ]
    path.write_text(render_html(build_report(runs)), encoding="utf-8")
    return path


CUT_OFF = """svg => [...svg.querySelectorAll("text, rect")].map((t) => t.getBoundingClientRect()).filter((t) => {
    const whole = svg.getBoundingClientRect();
    return t.left < whole.left - 1 || t.right > whole.right + 1 || t.top < whole.top - 1 || t.bottom > whole.bottom + 1;
}).length"""


@pytest.mark.services
def test_maps_are_whole_and_can_be_pointed_at(browser: Browser, file: Path) -> None:
    context = browser.new_context(offline=True, viewport={"width": 1440, "height": 900})
    opened = Opened(context.new_page(), file)
    maps = opened.page.locator("svg.heatmap")
    assert maps.count() == 4
    for drawn in maps.all():
        assert drawn.is_visible()
        assert drawn.evaluate(CUT_OFF) == 0
    smallest = maps.nth(2).locator("rect").first.bounding_box()
    assert smallest is not None
    assert smallest["width"] >= 5
    # What is under the pointer is the cell, not its number: the cell has the tooltip.
    cell = maps.nth(0).locator("rect").nth(3)
    cell.hover()
    under = "e => document.elementsFromPoint(e.x, e.y)[0].querySelector('title').textContent"
    box = cell.bounding_box()
    assert box is not None
    middle = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
    assert opened.page.evaluate(under, middle) == "rank 0 (node0) → rank 4 (node2): 12.00 µs (12.00–12.00)"
    assert [url for url in opened.requests if not url.startswith("data:")] == [file.as_uri()]
    assert opened.complaints == []
    context.close()


@pytest.mark.services
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_maps_can_be_seen_in_light_and_dark(browser: Browser, file: Path, scheme: str) -> None:
    context = browser.new_context(offline=True, color_scheme=scheme)  # type: ignore[arg-type]
    page = Opened(context.new_page(), file).page
    style = "(e, name) => getComputedStyle(e)[name]"
    card = page.locator("section.system").first.evaluate(style, "backgroundColor")
    drawn = page.locator("svg.heatmap").first
    fill = drawn.locator("rect.cell").first.evaluate(style, "fill")
    outline = drawn.locator("rect.marked").first.evaluate(style, "stroke")
    number = drawn.locator("text.value").first.evaluate(style, "fill")
    assert len({card, fill, outline, number, "none"}) == 5
    opacities = [float(rect.evaluate(style, "fillOpacity")) for rect in drawn.locator("rect.marked").all()]
    assert min(opacities) > float(drawn.locator("rect.cell:not(.marked)").first.evaluate(style, "fillOpacity"))
    context.close()


@pytest.mark.services
@pytest.mark.parametrize("width", [390, 1440])
def test_pages_with_maps_never_scroll_sideways(browser: Browser, file: Path, width: int) -> None:
    context = browser.new_context(offline=True, viewport={"width": width, "height": 844})
    page = Opened(context.new_page(), file).page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    context.close()
