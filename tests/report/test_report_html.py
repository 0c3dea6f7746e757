"""The page: well-formed, complete in itself, harmless, quick and bounded."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
from page_structure import check
from report_examples import (
    make_case,
    make_ceilings,
    make_comms,
    make_op,
    make_run,
    make_system,
    ops_runs,
    rich_runs,
    spread,
)

from stepscope.records import Failure, KernelUse, Notice, Score
from stepscope.report import ReportRun, build_report, render_html
from stepscope.report.html import MAX_FULL_PLOTS


@pytest.mark.parametrize("runs", [rich_runs, ops_runs])
def test_page_is_well_formed_and_complete_in_itself(runs: Callable[[], list[ReportRun]]) -> None:
    page = render_html(build_report(runs()))
    checker = check(page)
    for reference in ("http://", "https://", "src=", "@import", "url("):
        assert reference not in page
    links = [attrs["href"] or "" for tag, attrs in checker.found if "href" in attrs]
    assert {link for link in links if not link.startswith("#")} == {"data:,"}
    ids = [attrs["id"] for _, attrs in checker.found if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)


@pytest.mark.parametrize("runs", [rich_runs, ops_runs])
def test_page_is_accessible(runs: Callable[[], list[ReportRun]]) -> None:
    checker = check(render_html(build_report(runs())))
    assert all(attrs.get("scope") in {"col", "row"} for tag, attrs in checker.found if tag == "th")
    assert all(attrs.get("aria-label") for tag, attrs in checker.found if tag == "svg")
    assert checker.count("caption") == checker.count("table")


def test_one_results_table_a_system() -> None:
    report = build_report(rich_runs())
    checker = check(render_html(report))
    assert checker.count("table", "results") == len(report.systems) == 2
    assert sum(tag == "tr" and "data-case" in attrs for tag, attrs in checker.found) == len(report.cases)


def test_page_shows_failures_hints_and_commands() -> None:
    text = "".join(check(render_html(build_report(rich_runs()))).text)
    for expected in (
        "halve the batch size: --batch-size 32",
        "torch.OutOfMemoryError: CUDA out of memory.",
        "train.py:88 in step",
        "raise the power limit or lock the clocks",
        "stepscope run dlrm/ootb/train --note 'two words'",
        "power cap",
        "OMP_NUM_THREADS",
        "interrupted",
        "2000 of 3030 samples, evenly thinned",
    ):
        assert expected in text


def test_hostile_text_stays_text() -> None:
    attack = '"><script>alert(1)</script><img onerror=alert(2)>'
    cases = [
        make_case(
            "all_reduce/micro/x/y", values_s=[size / 1e9] * 6, parameters={"p": attack + str(group), attack: size},
            observed={"size_bytes": size, attack: attack}, notices=[Notice(kind=attack, message=attack, hint=attack)],
        )
        for group in range(2)
        for size in (1024, 2048)
    ]  # fmt: skip
    cases += make_ceilings(copy=1e9, device=attack, **{attack: 1e12})
    cases += [
        make_op(
            seconds=1e-3, flops=1e6, moved=1e6, dtype=attack, device=attack, cache=attack, parameters={"m": m},
            kernels=[KernelUse(name=attack, count=1, duration_s=1e-3)],
        )
        for m in range(2)
    ]  # fmt: skip
    failure = Failure(kind=attack, message=attack, hint=attack, where=attack, last_lines=[attack], stack=[attack])
    system = make_system(libraries={attack: attack}, environment={attack: attack}, settings={attack: attack})
    run = make_run([*cases, make_case(failure=failure)], system, attack, command=[attack], status=attack)
    page = render_html(build_report([run]))
    checker = check(page)
    assert checker.count("svg", "roofline") == 1
    assert checker.count("script") == 1
    assert checker.count("img") == 0
    assert "<script>alert" not in page


def test_script_matches_the_policy_of_the_page() -> None:
    import base64
    import hashlib

    page = render_html(build_report([]))
    script = re.search(r"<script>(.*)</script>", page, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    policy = next(a["content"] for t, a in check(page).found if t == "meta" and "http-equiv" in a)
    assert policy is not None
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")


def test_many_cases_are_quick_and_bounded() -> None:
    cases = [
        make_case("gemm/micro/forward/custom", values_s=spread(1e-3, 200, seed=i), parameters={"m": i},
                  score=Score(unit="TFLOP/s", work=1e9))
        for i in range(500)
    ]  # fmt: skip
    run = make_run(cases, make_system())
    start = time.process_time()
    page = render_html(build_report([run]))
    assert time.process_time() - start < 3
    assert len(page) < 8_000_000
    checker = check(page)
    assert checker.count("svg", "distribution") == MAX_FULL_PLOTS
    assert checker.count("svg", "spark") == 500
    assert f"Full plots are drawn for {MAX_FULL_PLOTS} of 500 measured cases" in "".join(checker.text)


def test_cases_with_notices_get_plots_first() -> None:
    plain = [make_case(values_s=[1.0] * 6, parameters={"m": i}) for i in range(MAX_FULL_PLOTS + 5)]
    noted = make_case(values_s=[1.0] * 6, parameters={"m": -1}, notices=[Notice(kind="unstable", message="wide")])
    page = render_html(build_report([make_run([*plain, noted], None)]))
    last = page[page.index(f'id="case-{MAX_FULL_PLOTS + 6}"') :]
    assert 'class="plot distribution"' in last


@pytest.mark.parametrize("values", [[0.0], [0.0, 0.0], [1e-12], [5e-324, 1.0], [1e6] * 3, [1.0, 1.0 + 1e-12]])
def test_odd_times_are_drawn(values: list[float]) -> None:
    page = render_html(build_report([make_run([make_case(values_s=values, warmups_s=[0.0])], None)]))
    assert check(page).count("svg", "timeline") == 1
    assert "nan" not in page.split("<style>")[0] + page.split("</style>")[1].split("<script>")[0]


def test_collectives_are_plotted_against_size() -> None:
    checker = check(render_html(build_report([make_run(make_comms(0), make_system(gpus=8))])))
    assert checker.count("svg", "sweep") == 2
    assert checker.count("circle") == 2 * 10
