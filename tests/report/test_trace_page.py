"""The page of a traced job: well-formed, complete in itself, harmless and small whatever the trace."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import msgspec
import pytest
from page_structure import Checker
from page_structure import check as check_structure

from stepscope.analyze.answers.compose import answer
from stepscope.analyze.critical.of_job import graph_of_job
from stepscope.analyze.critical.path import describe_path
from stepscope.analyze.job import JobReport
from stepscope.analyze.step.device_work import Window
from stepscope.report.trace_blocks import Events, put_together
from stepscope.report.trace_overview import COLOURS, MOST_RECTANGLES, draw_overview
from stepscope.report.trace_page import render_page, write_page
from stepscope.traces.timeline import ANNOTATION, Timeline
from trace_jobs import TraceDraft, compute_bound, host_bound, on_cpu, report_job, straggling

MOST_BYTES = 3_000_000


def check(page: str) -> Checker:
    assert len(page.encode()) < MOST_BYTES
    return check_structure(page)


def render(*drafts: TraceDraft) -> str:
    timelines = [draft.build() for draft in drafts]
    return render_job(report_job(timelines), timelines)


def render_job(job: JobReport, timelines: list[Timeline]) -> str:
    return render_page(job, answer(job), next(one for one in timelines if one.rank == job.telling_rank))


def read_overview(page: str) -> dict[str, list[int]]:
    found = re.search(r'<script type="application/json" id="overview">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, list[int]] = json.loads(found[1])
    return data


@pytest.mark.parametrize(
    "drafts", [[host_bound()], [compute_bound()], straggling(), [on_cpu()]], ids=["host", "compute", "ranks", "cpu"]
)
def test_page_is_well_formed_and_complete_in_itself(drafts: list[TraceDraft]) -> None:
    page = render(*drafts)
    checker = check(page)
    for reference in ("http://", "https://", "src=", "@import", "url("):
        assert reference not in page
    links = [attrs["href"] or "" for _, attrs in checker.found if "href" in attrs]
    assert {link for link in links if not link.startswith("#")} == {"data:,"}
    ids = [attrs["id"] for _, attrs in checker.found if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)
    assert all(attrs.get("scope") == "col" for tag, attrs in checker.found if tag == "th")
    assert all(attrs.get("aria-label") for tag, attrs in checker.found if tag in ("svg", "canvas"))
    assert checker.count("caption") == checker.count("table")
    assert "nan" not in page.split("<script")[0].split("</style>")[1].lower().split()


def test_the_timeline_shows_the_path_of_its_own_rank() -> None:
    """The path in the tables runs through all ranks; what is drawn on one rank's timeline must be of that rank."""
    timelines = [draft.build() for draft in straggling()]
    job = report_job(timelines)
    through_all = describe_path(graph_of_job(timelines))
    both = msgspec.structs.replace(job, critical=through_all, own_critical=job.critical)
    drawn, alone = (render_page(one, answer(one), timelines[job.telling_rank]) for one in (both, job))
    overview = re.compile(r'<script type="application/json"[^>]*>(.*?)</script>', re.DOTALL)
    assert overview.findall(drawn)
    assert overview.findall(drawn) == overview.findall(alone)
    text = "".join(check(drawn).text)
    assert "rank 3" in text
    assert f"rank {job.telling_rank} alone" not in text


def test_page_says_the_answer_and_its_provenance() -> None:
    page = render(*straggling())
    text = "".join(check(page).text).replace("\N{NO-BREAK SPACE}", " ")
    for expected in (
        "Profiled step 1 takes 4.000 ms on rank 0, and about as long on all 4 ranks",
        "bound by stragglers",
        "look at rank 3",
        "rank3.json",
        "later than noise, throughout",
        "92.52 GB/s",
        "Critical path by name",
        "T2, T3 and T5",
        "step 1, the only one",
    ):
        assert expected in text


def test_script_matches_the_policy_of_the_page() -> None:
    page = render(host_bound(3))
    script = re.search(r"<script>(.*)</script>", page, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    policy = next(a["content"] for t, a in check(page).found if t == "meta" and "http-equiv" in a)
    assert policy is not None
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")


def test_hostile_names_stay_text() -> None:
    attack = '"></script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;<!--'
    draft = TraceDraft()
    draft.step(0, 1000)
    draft.host(ANNOTATION, attack, 0, 900)
    draft.operator(attack, 10, 800, shapes=attack, types=attack)
    draft.call(attack, 20, 30)
    draft.work(attack, 40, 700, at=34, collective=attack, group=attack, group_description=attack)
    timeline = draft.build()
    job = report_job([timeline], devices=[attack])
    hostile = msgspec.structs.replace(job, source=attack, format=attack, chosen=attack, notes=[attack])
    page = render_page(hostile, answer(hostile), timeline)
    checker = check(page)
    assert checker.count("script") == 2
    assert checker.count("img") == 0
    assert "<script>alert" not in page
    assert attack[:40] in "".join(str(name) for name in read_overview(page)["names"])


def test_rectangles_tell_lanes_names_and_times() -> None:
    draft = compute_bound()
    timeline = draft.build()
    job = report_job([timeline])
    overview = draw_overview(timeline, job)
    data = overview.to_data()
    labels = [label for label, _ in data["lanes"]]
    assert labels[:2] == ["critical path", "main thread: annotations"]
    assert labels[-1] == "stream 7"
    assert data["length"] == 1_000_000
    rows = [data["blocks"][i : i + 7] for i in range(0, len(data["blocks"]), 7)]
    kernels = [row for row in rows if row[0] == len(labels) - 1]
    assert [row[1] for row in kernels] == [(20 + number * 108) * 1000 for number in range(9)]
    assert {row[2] for row in kernels} == {108_000}
    assert {data["names"][row[3]] for row in kernels} == {"ampere_sgemm_128x64_nn"}
    assert {COLOURS[row[4]] for row in kernels} == {"matrix"}
    assert {(row[5], row[6]) for row in kernels} == {(1, 108_000)}
    path = [row for row in rows if row[0] == 0]
    assert sum(row[2] for row in path) == data["length"]
    assert len(labels) - 1 in data["marks"][::3]


def test_short_neighbours_become_blocks_that_say_what_they_hold() -> None:
    import numpy as np

    start = np.array([0, 10, 20, 500, 990], np.int64)
    end = np.array([5, 18, 22, 800, 995], np.int64)
    zeros = np.zeros(5, np.int64)
    blocks = put_together(Events(zeros, start, end, np.array([3, 4, 3, 5, 6]), zeros), 100, Window(0, 1000))
    assert blocks.start.tolist() == [0, 500, 990]
    assert blocks.end.tolist() == [22, 800, 995]
    assert blocks.count.tolist() == [3, 1, 1]
    assert blocks.busy.tolist() == [15, 300, 5]
    assert blocks.name.tolist() == [4, 5, 6]


def test_a_large_trace_makes_a_small_page(tmp_path: Path) -> None:
    draft = TraceDraft()
    kernels = 8_000
    draft.step(0, kernels * 10)
    for number in range(kernels):
        at = number * 10
        draft.operator(f"operator_{number % 3000}_" + "long" * 100, at, at + 9)
        draft.work(f"kernel_{number % 3000}_" + "x" * 60, at + 5, at + 9, at=at + 1, stream=number % 40)
    timeline = draft.build()
    job = report_job([timeline])
    summary = job.ranks[0]
    many = [msgspec.structs.replace(summary, rank=rank, source=f"rank{rank}" * 20) for rank in range(3000)]
    job = msgspec.structs.replace(job, ranks=many, notes=[f"note {n} " + "y" * 300 for n in range(500)])
    path = tmp_path / "folder" / "page.html"
    size = write_page(job, answer(job), timeline, path)
    assert size == path.stat().st_size < MOST_BYTES
    page = path.read_text(encoding="utf-8")
    check(page)
    data = read_overview(page)
    assert len(data["blocks"]) / 7 + len(data["marks"]) / 3 <= MOST_RECTANGLES
    assert sum(data["blocks"][5::7]) > 3 * kernels
    assert "slowest: " in page
    assert "2936 more are left out" in page


def test_memory_is_drawn_where_recorded() -> None:
    draft = host_bound(10)
    for number in range(5):
        draft.memory(20 + number * 40, 1 << 20, number, (number + 1) << 20)
    draft.memory(300, -(1 << 20), 0, 4 << 20)
    page = render(draft)
    check(page)
    assert 'class="plot memory"' in page
    assert "peak 5 MiB" in page


def test_roofline_or_the_reason_why_not() -> None:
    with_shapes = render(compute_bound())
    assert 'class="plot roofline"' in with_shapes
    assert 'id="rate-0"' in with_shapes
    assert "NVIDIA H200 data sheet" in with_shapes
    assert "No roofline: shapes were not recorded" in render(host_bound(3))
    timeline = compute_bound().build()
    unknown = render_job(report_job([timeline], devices=["Some Device"]), [timeline])
    assert "are not in the catalogue" in unknown
    check(unknown)
