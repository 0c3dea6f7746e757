"""Operators: device, graph and kernel times, rates, shares of ceilings, rooflines."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from itertools import pairwise

import pytest
from page_structure import check
from report_examples import make_case, make_ceilings, make_op, make_run, make_system, ops_runs, small_runs

from stepscope.metrics import list_metrics
from stepscope.records import Failure, KernelUse
from stepscope.report.html import MAX_KERNELS, MAX_ROOFLINES, render_html
from stepscope.report.plots import RooflinePlot, assign_colours, draw_roofline
from stepscope.report.render import CSV_COLUMNS, render_csv, render_json, render_markdown, render_text
from stepscope.report.series import Roofline, RooflinePoint
from stepscope.report.view import CaseView, build_report
from stepscope.store import MeasuredCase

FLOPS, MOVED = 2 * 1024 * 1024 * 1024, 3 * 2 * 1024 * 1024
"""Of a square bfloat16 matrix product of 1024."""


def view(*cases: MeasuredCase) -> CaseView:
    """The last of the cases of one run."""
    return build_report([make_run(list(cases), None)]).cases[-1]


def header(text: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith("# Model"))
    return re.split(r"\s{2,}", line[2:])


def test_rates_and_shares_are_those_of_the_ceilings() -> None:
    case = view(*make_ceilings(copy=4e12, bfloat16=8e14), make_op(seconds=10e-6, flops=FLOPS, moved=MOVED))
    assert case.value("flops_per_s") == pytest.approx(2 * 1024**3 / 10e-6)
    assert case.value("bytes_per_s") == pytest.approx(6 * 1024**2 / 10e-6)
    assert case.value("compute_share") == pytest.approx(2 * 1024**3 / 10e-6 / 8e14)
    assert case.value("memory_share") == pytest.approx(6 * 1024**2 / 10e-6 / 4e12)
    assert case.value("intensity_flops_per_byte") == pytest.approx(1024 / 3)
    assert not case.spec.is_measured_peak


def test_a_share_of_the_matrix_rate_needs_the_same_dtype_and_an_operator_that_computes() -> None:
    ceilings = make_ceilings(copy=4e12, bfloat16=8e14)
    other = view(*ceilings, make_op(seconds=1e-5, flops=FLOPS, moved=MOVED, dtype="float32"))
    assert (other.value("compute_share"), other.value("memory_share")) == (None, pytest.approx(MOVED / 1e-5 / 4e12))
    moving = view(*ceilings, make_op("relu", seconds=1e-5, flops=1000, moved=4000, unit="GB/s"))
    assert (moving.value("compute_share"), moving.value("memory_share")) == (None, pytest.approx(4000 / 1e-5 / 4e12))


def test_device_times_are_the_cases_own_and_wall_times_stand_beside_them() -> None:
    extra = {"graph": [2.0, 4.0, 3.0], "kernel": [1.0, 2.0]}
    case = view(make_op(seconds=[4.0, 5.0, 6.0], flops=10, moved=5, wall_s=9.0, extra_s=extra))
    assert case.timing is not None
    assert case.timing.summary.median_s == 5.0
    assert case.series.seconds == [4.0, 5.0, 6.0]
    assert (case.value("wall_median_s"), case.value("graph_median_s"), case.value("kernel_median_s")) == (9.0, 3.0, 1.5)
    assert (case.result.timing, case.value("flops_per_s"), case.value("bytes_per_s")) == ("device", 10 / 5.0, 5 / 5.0)
    own = view(make_op(seconds=5.0, flops=10, moved=5))
    assert (own.result.timing, *map(own.value, ("wall_median_s", "graph_median_s", "kernel_median_s"))) == (
        "own",
        None,
        None,
        None,
    )


@pytest.mark.parametrize("observed", [{"flops": "many"}, {"moved_bytes": True}, {"flops": -1}, {"moved_bytes": 0}])
def test_work_that_is_no_positive_number_gives_no_share(observed: dict[str, object]) -> None:
    case = view(*make_ceilings(bfloat16=8e14), make_op(seconds=1.0, flops=1, moved=1, observed=observed))
    assert case.value("intensity_flops_per_byte") is None
    assert case.value("compute_share") is None or case.value("memory_share") is None


def test_without_ceilings_there_are_rates_but_neither_shares_nor_rooflines() -> None:
    report = build_report([make_run([make_op(seconds=1e-3, flops=FLOPS, moved=MOVED)], make_system())])
    assert report.systems[0].rooflines == []
    assert report.cases[0].value("flops_per_s") == pytest.approx(FLOPS / 1e-3)
    assert (report.cases[0].value("compute_share"), report.cases[0].value("memory_share")) == (None, None)
    page = render_html(report)
    for shown in (render_text(report), render_markdown(report), page.split("<tbody>")[0]):
        assert "% of matmul peak" not in shown
        assert "% of copy bandwidth" not in shown
    assert check(page).count("svg", "roofline") == 0


def test_ceilings_of_one_run_are_never_used_for_another() -> None:
    system, case = make_system(gpus=1), make_op(seconds=1e-3, flops=1e9, moved=1e9)
    runs = [
        make_run([*make_ceilings(copy=2e12, bfloat16=2e12), case], system, "slow"),
        make_run([*make_ceilings(copy=4e12, bfloat16=8e12), case], system, "fast"),
        make_run([case], system, "none"),
    ]
    view = build_report(runs).systems[0]
    shares = {
        one.run_id: (one.value("compute_share"), one.value("memory_share"))
        for one in view.cases
        if not one.spec.is_measured_peak
    }
    assert shares["slow"] == (pytest.approx(1e12 / 2e12), pytest.approx(1e12 / 2e12))
    assert shares["fast"] == (pytest.approx(1e12 / 8e12), pytest.approx(1e12 / 4e12))
    assert shares["none"] == (None, None)
    assert [(one.run_id, one.device, len(one.points)) for one in view.rooflines] == [
        ("slow", "cuda", 1),
        ("fast", "cuda", 1),
    ]
    assert [one.bytes_per_s["copy"] for one in view.rooflines] == [pytest.approx(2e12), pytest.approx(4e12)]
    assert [one.matrix_flops_per_s["bfloat16"] for one in view.rooflines] == [pytest.approx(2e12), pytest.approx(8e12)]


def test_two_runs_of_one_name_are_still_two() -> None:
    case = make_op(seconds=1e-3, flops=1e9, moved=1e9)
    runs = [make_run([*make_ceilings(copy=1e12), case], make_system(), "same"), make_run([case], make_system(), "same")]
    view = build_report(runs).systems[0]
    assert [one.value("memory_share") for one in view.cases if not one.spec.is_measured_peak] == [
        pytest.approx(1.0),
        None,
    ]
    assert [len(one.points) for one in view.rooflines] == [1]


def test_devices_of_one_run_have_their_own_ceilings() -> None:
    cases = [
        *make_ceilings(copy=2e10, device="cpu"),
        *make_ceilings(copy=2e12, device="cuda"),
        make_op(seconds=1e-3, flops=1e6, moved=1e7, device="cpu"),
        make_op(seconds=1e-3, flops=1e6, moved=1e7, device="cuda"),
        make_op(seconds=1e-3, flops=1e6, moved=1e7, device="cuda:1"),
    ]
    view = build_report([make_run(cases, None)]).systems[0]
    assert [case.value("memory_share") for case in view.cases[2:]] == [
        pytest.approx(1e10 / 2e10),
        pytest.approx(0.005),
        None,
    ]
    assert [(one.device, len(one.points)) for one in view.rooflines] == [("cpu", 1), ("cuda", 1)]


def test_a_ceiling_that_failed_is_none() -> None:
    broken = make_op("memcpy", "ceiling", seconds=1e-3, flops=0, moved=1e9, unit="GB/s", status="failed",
                     failure=Failure(kind="wrong_result", message="differs"))  # fmt: skip
    report = build_report([make_run([broken, make_op(seconds=1e-3, flops=1e6, moved=1e7)], None)])
    assert report.systems[0].rooflines == []
    assert report.cases[1].value("memory_share") is None


def test_ceilings_are_rows_but_not_points() -> None:
    system = build_report(ops_runs()).systems[0]
    ceilings = [case for case in system.cases if case.spec.is_measured_peak]
    assert len(ceilings) == 6
    assert {case.benchmark.config for case in ceilings} == {"ceiling"}
    assert [case.value("compute_share") for case in ceilings if case.benchmark.model == "gemm"] == [
        pytest.approx(1.0)
    ] * 4
    anchors = {point.anchor for point in system.rooflines[0].points}
    assert len(anchors) == len(system.cases) - 6
    assert not anchors & {case.anchor for case in ceilings}
    checker = check(render_html(build_report(ops_runs())))
    assert checker.count("tr", "ceiling") == 6 + 2


def test_columns_are_added_only_where_a_case_fills_them() -> None:
    added = ["% of matmul peak", "% of copy bandwidth", "Wall", "Graph", "Kernel"]
    assert not set(added) & set(header(render_text(build_report(small_runs()))))
    gpu, cpu = (build_report([run]) for run in ops_runs())
    assert [title for title in header(render_text(gpu)) if title in added] == added
    assert [title for title in header(render_text(cpu)) if title in added] == added[:2]
    for shown in (render_markdown(gpu), "".join(check(render_html(gpu)).text)):
        for title in added:
            assert title in shown
    titles = [attrs["title"] for tag, attrs in check(render_html(gpu)).found if tag == "th" and "title" in attrs]
    assert sum("measured on this machine in the same run" in (title or "") for title in titles) == 2
    assert any("by the host's clock" in (title or "") for title in titles)


@pytest.mark.parametrize(("cache", "moved", "shown"), [
    ("warm", 1.37e9, "137.0 % (cache)"),
    ("cold", 1.37e9, "137.0 %"),
    ("warm", 0.82e9, "82.0 %"),
    ("cold", 4e5, "<0.1 %"),
])  # fmt: skip
def test_a_share_above_the_copy_is_marked_where_a_cache_explains_it(cache: str, moved: float, shown: str) -> None:
    case = make_op("relu", seconds=1e-3, flops=1e6, moved=moved, unit="GB/s", dtype="float32", cache=cache)
    report = build_report([make_run([*make_ceilings(copy=1e12), case], None)])
    text = render_text(report)
    row = next(line for line in text.splitlines() if line.startswith("  relu"))
    assert shown in re.split(r"\s{2,}", row.strip())
    assert f"| {shown.replace('<', '&lt;')} |" in render_markdown(report)
    assert ("# (cache): " in text) == shown.endswith("(cache)")
    assert "# % of copy bandwidth: fractions of the peaks that the same run measured" in text
    assert "% of copy bandwidth: fractions of the peaks that the same run measured" in render_markdown(report)


def test_csv_and_json_hold_everything_in_base_units() -> None:
    kernel = KernelUse(name='void gemm<float, "x">', count=1.5, duration_s=3e-6)
    case = make_op(seconds=4e-6, flops=8e6, moved=4e6, wall_s=9e-6, extra_s={"graph": [3.5e-6], "kernel": [3e-6]},
                   kernels=[kernel])  # fmt: skip
    plain = make_case("dlrm/ootb/train/x", values_s=[1.0])
    report = build_report([make_run([*make_ceilings(copy=2e12, bfloat16=4e12), case, plain], None)])
    *ceilings, row, other = csv.DictReader(io.StringIO(render_csv(report)))
    names = ("flops_per_s", "bytes_per_s", "compute_share", "memory_share", "wall_median_s", "graph_median_s",
             "kernel_median_s", "intensity_flops_per_byte")  # fmt: skip
    expected = (8e6 / 4e-6, 4e6 / 4e-6, 2e12 / 4e12, 1e12 / 2e12, 9e-6, 3.5e-6, 3e-6, 2.0)
    assert [float(row[name]) for name in names] == pytest.approx(expected)
    assert json.loads(row["kernels"]) == [{"name": kernel.name, "count": 1.5, "duration_s": 3e-6}]
    assert (row["timing"], row["is_ceiling"], ceilings[0]["is_ceiling"]) == ("device", "false", "true")
    assert {other[name] for name in names} == {""}
    assert (other["timing"], other["kernels"]) == ("own", "[]")
    system = json.loads(render_json(report))["systems"][0]
    content = system["cases"][2]
    assert [content[name] for name in (*names[:-1], "intensity")] == pytest.approx(expected)
    assert content["kernels"] == [{"name": kernel.name, "count": 1.5, "duration_s": 3e-6}]
    (roofline,) = system["rooflines"]
    assert roofline["matrix_flops_per_s"] == {"bfloat16": pytest.approx(4e12)}
    assert roofline["bytes_per_s"] == {"copy": pytest.approx(2e12)}
    point = roofline["points"][0]
    assert (point["anchor"], point["operator"], point["dtype"]) == (content["anchor"], "gemm", "bfloat16")
    assert (point["cache"], point["intensity"]) == ("cold", pytest.approx(2.0))


def test_csv_columns_were_added_at_the_end() -> None:
    columns = render_csv(build_report([])).strip().split(",")
    assert columns[columns.index("failure_message") + 1] == "timing"
    assert columns[columns.index("kernels") + 1 :][:3] == ["skew_s", "straggler_rank", "straggler_share"]
    of_models = ["loader_score", "input_share", "mfu", "peak_memory_bytes", "energy_j_per_example"]
    assert columns[columns.index("straggler_share") + 1 :][:5] == of_models
    assert columns[columns.index("energy_j_per_example") + 1] == "ttft_p50_s"
    added = [name for name in list_metrics() if name not in CSV_COLUMNS]
    assert columns[columns.index("serving_missed_latency") + 1 :] == ["check", *added]


def make_point(intensity: float, flops_per_s: float, dtype: str = "bfloat16", cache: str = "cold") -> RooflinePoint:
    return RooflinePoint(
        anchor="case-1", label="gemm", operator="gemm", dtype=dtype, cache=cache, intensity=intensity, median_s=1e-3,
        flops_per_s=flops_per_s, bytes_per_s=flops_per_s / intensity, compute_share=None, memory_share=None,
    )  # fmt: skip


def draw(*points: RooflinePoint, copy: float | None = 4e12, read: float | None = None, **matrix: float) -> RooflinePlot:
    rates = {name: value for name, value in (("copy", copy), ("read", read)) if value is not None}
    roofline = Roofline(run_id="r", device="cuda", matrix_flops_per_s=matrix, bytes_per_s=rates, points=list(points))
    drawn = draw_roofline(roofline, "Roofline")
    assert drawn is not None
    check(drawn.markup)
    return drawn


def circles(markup: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r'<circle [^>]*cx="([-\d.]+)" cy="([-\d.]+)"', markup)]


def roofs(markup: str, kind: str) -> list[tuple[float, float, float, float]]:
    found = re.findall(rf'<path class="roof {kind}" d="M([-\d.]+) ([-\d.]+)L([-\d.]+) ([-\d.]+)"', markup)
    return [(float(a), float(b), float(c), float(d)) for a, b, c, d in found]


def test_points_on_the_roof_lie_on_the_line() -> None:
    below = make_point(2.0, 4e12)
    on_slope, on_level = make_point(2.0, 2.0 * 4e12), make_point(500.0, 8e14)
    ridge = make_point(8e14 / 4e12, 8e14)
    markup = draw(below, on_slope, on_level, ridge, bfloat16=8e14).markup
    (x1, y1, x2, y2), = roofs(markup, "memory copy")  # fmt: skip
    (left, height, right, end), = roofs(markup, "s0")  # fmt: skip
    low, slope, level, corner = circles(markup)
    at_slope = y1 + (slope[0] - x1) / (x2 - x1) * (y2 - y1)
    assert slope[1] == pytest.approx(at_slope, abs=0.2)
    assert low[0] == slope[0]
    assert low[1] > slope[1] + 5  # lower on the page
    assert level[1] == pytest.approx(height, abs=0.1)
    assert left < level[0] < right
    assert height == end
    # The roofs meet where the matrix rate is reached.
    assert corner == pytest.approx((x2, y2), abs=0.1)
    assert (left, height) == pytest.approx((x2, y2), abs=0.1)


def test_both_axes_are_logarithmic() -> None:
    marks = [make_point(10.0**power, 1e9 * 10.0**power) for power in range(4)]
    places = circles(draw(*marks, bfloat16=8e14).markup)
    across = [after[0] - before[0] for before, after in pairwise(places)]
    upward = [before[1] - after[1] for before, after in pairwise(places)]
    assert across == pytest.approx([across[0]] * 3, abs=0.2)
    assert upward == pytest.approx([upward[0]] * 3, abs=0.2)
    assert min(across[0], upward[0]) > 10


def test_roofs_bear_their_values() -> None:
    markup = draw(make_point(1.0, 1e12), read=4.3e12, bfloat16=7.2e14, float32=5.1e13).markup
    for label in ("copy 4000 GB/s", "read 4300 GB/s", "bfloat16 720.0 TFLOP/s", "float32 51.00 TFLOP/s"):
        assert f">{label}</text>" in markup
    assert "flop per byte" in markup
    assert len(roofs(markup, "memory read")) == 1


def test_names_of_close_roofs_stand_one_above_the_other() -> None:
    peaks = {f"dtype{number}": 7e14 + 1e12 * number for number in range(6)}
    markup = draw(make_point(1.0, 1e12), **peaks).markup
    heights = [float(y) for y in re.findall(r'y="([-\d.]+)" text-anchor="end" class="name">dtype', markup)]
    assert len(heights) == 6
    assert all(before - after >= 11.9 for before, after in pairwise(heights))
    assert min(heights) >= 11.9


@pytest.mark.parametrize(("copy", "matrix", "points"), [
    (4e12, {}, []),
    (4e12, {}, [make_point(1.0, 1e12)]),
    (None, {"float32": 1e12}, []),
    (None, {"float32": 1e12}, [make_point(1.0, 1e11)]),
    (4e12, {"float32": 1e12}, [make_point(1e-20, 1e-20), make_point(1e20, 1e20)]),
])  # fmt: skip
def test_any_ceilings_are_drawn_within_the_plot(
    copy: float | None, matrix: dict[str, float], points: list[RooflinePoint]
) -> None:
    markup = draw(*points, copy=copy, **matrix).markup
    width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', markup).groups())  # type: ignore[union-attr]
    ends = [roof for kind in ("memory copy", "s0") for roof in roofs(markup, kind)]
    assert len(ends) == (copy is not None) + len(matrix)
    for x, y in [*circles(markup), *((x, y) for a, b, c, d in ends for x, y in ((a, b), (c, d)))]:
        assert 0 < x <= width
        assert 0 < y <= height
    assert "nan" not in markup
    assert "inf" not in markup


def test_nothing_is_drawn_without_a_roof() -> None:
    roofline = Roofline(run_id="r", device="cpu", matrix_flops_per_s={"float32": math.inf}, bytes_per_s={"write": 1e9},
                        points=[make_point(1.0, 1.0)])  # fmt: skip
    assert draw_roofline(roofline, "Roofline") is None


def test_colours_follow_the_dtype_and_outlines_the_cache() -> None:
    drawn = draw(make_point(1.0, 1e12, "float32", "warm"), make_point(1.0, 1e12), float32=5e13, bfloat16=8e14)
    assert drawn.colours == {"float32": "s0", "bfloat16": "s1"}
    assert re.findall(r'<circle class="([^"]+)"', drawn.markup) == ["s0 hollow", "s1"]
    assert len(roofs(drawn.markup, "s0")) == len(roofs(drawn.markup, "s1")) == 1
    assert list(assign_colours("abcdefgha").values()) == ["s0", "s1", "s2", "s3", "s4", "s5", "rest", "rest"]


def test_a_point_tells_its_case_and_numbers_and_leads_to_it() -> None:
    case = make_op(seconds=10e-6, flops=FLOPS, moved=MOVED)
    report = build_report([make_run([*make_ceilings(copy=4e12, bfloat16=8e14), case], None)])
    page = render_html(report)
    assert '<a href="#case-3" tabindex="-1"><circle class="s0" ' in page
    assert (
        "<title>gemm/micro/forward/custom (bfloat16, cold cache): 214.7 TFLOP/s, 629.1 GB/s, 341 flop per byte, "
        "10.00 µs, 26.8 % of matmul peak, 15.7 % of copy bandwidth</title>"
    ) in page
    text = "".join(check(page).text)
    assert "The roofs are what this run measured on cuda as its peaks" in text
    assert "the plot holds 1 case." in text


def test_rooflines_stand_before_the_cases_and_name_their_run_where_there_are_several() -> None:
    page = render_html(build_report(ops_runs()))
    assert check(page).count("svg", "roofline") == 2
    first = page.index('class="plot roofline"')
    assert page.index("<table") < first < page.index('<details class="case"')
    assert "20250304-080000-aa01" not in page[page.index("Roofline of cuda <small>") :].split("</h3>")[0]
    runs = [make_run(make_ceilings(copy=1e12), make_system(), name) for name in ("one", "two")]
    assert "Roofline of cuda <small>two, both axes" in render_html(build_report(runs))


def test_points_and_rooflines_are_bounded_and_the_page_says_so() -> None:
    cases = [make_op(seconds=1e-3, flops=1e6 * m, moved=1e6, parameters={"m": m}) for m in range(1, 701)]
    runs = [make_run([*make_ceilings(copy=1e12), *cases], make_system(), "many")]
    runs += [make_run(make_ceilings(copy=1e12), make_system(), f"run-{i}") for i in range(MAX_ROOFLINES + 2)]
    report = build_report(runs)
    assert len(report.systems[0].rooflines[0].points) == 700
    checker = check(render_html(report))
    assert checker.count("circle") == 600
    text = "".join(checker.text)
    assert "the plot holds 600 cases, evenly chosen, and leaves out 100." in text
    assert checker.count("svg", "roofline") == MAX_ROOFLINES
    assert "3 further rooflines are not drawn." in text


def test_details_list_kernels_times_and_what_was_observed() -> None:
    kernels = [KernelUse(name='void gemm<float, "x">(int)', count=2.0, duration_s=3e-6)]
    case = make_op(
        seconds=4e-6, flops=8e6, moved=4 << 20, wall_s=9e-6, extra_s={"graph": [3.5e-6], "kernel": [3.25e-6]},
        kernels=kernels, observed={"compile_s": 2.5, "input_sets": 32},
    )  # fmt: skip
    page = render_html(build_report([make_run([case], None)]))
    assert '<td class="mono">void gemm&lt;float, &#34;x&#34;&gt;(int)</td>' in page
    assert '<td class="number">2</td><td class="number">3.000 µs</td>' in page
    for name, value in (
        ("Wall", "9.000 µs"),
        ("Graph", "3.500 µs"),
        ("Kernel", "3.250 µs"),
        ("compile time", "2.500 s"),
        ("input sets", "32"),
        ("work", "8.000 MFLOP"),
        ("compulsory bytes", "4 MiB"),
        ("Compute rate", "2.000 TFLOP/s"),
    ):
        assert f"<dt>{name}</dt><dd>{value}</dd>" in page
    assert "<dt>Device</dt>" not in page
    assert check(page).count("table", "kernels") == 1


def test_long_lists_of_kernels_are_cut_to_the_longest() -> None:
    kernels = [KernelUse(name=f"kernel-{i:02d}", count=1.0, duration_s=1e-6 * (i + 1)) for i in range(MAX_KERNELS + 3)]
    page = render_html(build_report([make_run([make_op(seconds=1e-3, flops=1, moved=1, kernels=kernels)], None)]))
    assert f"the {MAX_KERNELS} longest, 3 more are left out" in page
    assert "kernel-02" not in page
    assert page.index(f"kernel-{MAX_KERNELS + 2:02d}") < page.index("kernel-03")
