"""The page of a traced job: well-formed, complete in itself, harmless and small whatever the trace."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from page_structure import Checker
from page_structure import check as check_structure

from stepscope.analyze.answers.compose import answer
from stepscope.analyze.critical.model import graph_of_job
from stepscope.analyze.critical.path import describe_path
from stepscope.analyze.job import JobReport
from stepscope.analyze.step.device_work import Window
from stepscope.analyze.step.intervals import StepFunction
from stepscope.formats.timeline import ANNOTATION, Timeline
from stepscope.report.trace_blocks import Events, list_contents, put_together
from stepscope.report.trace_overview import COLOURS, MOST_RECTANGLES
from stepscope.report.trace_page import render_page, write_page
from stepscope.report.trace_ranks import MOST_POINTS, TimelineOf, choose_ranks, sample
from trace_jobs import TraceDraft, compute_bound, host_bound, on_cpu, report_job, straggling

MOST_BYTES = 2_000_000


def check(page: str) -> Checker:
    assert len(page.encode()) < MOST_BYTES
    return check_structure(page)


def render(*drafts: TraceDraft) -> str:
    timelines = [draft.build() for draft in drafts]
    return render_job(report_job(timelines), timelines)


def render_job(job: JobReport, timelines: list[Timeline]) -> str:
    return render_page(job, answer(job), find_in(timelines))


def find_in(timelines: Sequence[Timeline]) -> TimelineOf:
    return {timeline.rank or 0: timeline for timeline in timelines}.__getitem__


def read_overview(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="overview">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def unpack(flat: list[int], wide: int = 4) -> list[list[int]]:
    """Start, duration and the rest of each rectangle of a lane."""
    rows, start = [], 0
    for i in range(0, len(flat), wide):
        start += flat[i]
        rows.append([start, *flat[i + 1 : i + wide]])
    return rows


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
    drawn, alone = (render_job(one, timelines) for one in (both, job))
    assert read_overview(drawn)["ranks"] == read_overview(alone)["ranks"]
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
        "significantly late throughout",
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
    page = render_job(hostile, [timeline])
    checker = check(page)
    assert checker.count("script") == 2
    assert checker.count("img") == 0
    assert "<script>alert" not in page
    assert attack[:40] in "".join(str(name) for name in read_overview(page)["names"])


def test_rectangles_tell_lanes_names_and_times() -> None:
    data = read_overview(render(compute_bound()))
    rank = data["ranks"][0]
    labels = [label for label, _ in rank["lanes"]]
    assert labels[:2] == ["critical path of this rank", "main thread: annotations"]
    assert labels[-1] == "stream 7"
    assert rank["length"] == 1_000_000
    kernels = unpack(rank["blocks"][-1])
    assert [start for start, *_ in kernels] == [(20 + number * 108) * 1000 for number in range(9)]
    assert {row[1] for row in kernels} == {108_000}
    assert {data["names"][row[2]] for row in kernels} == {"ampere_sgemm_128x64_nn"}
    assert {COLOURS[row[3]] for row in kernels} == {"matrix"}
    assert rank["contents"] == []
    assert sum(row[1] for row in unpack(rank["blocks"][0])) == rank["length"]
    assert unpack(rank["marks"][-1], 2)


def test_launches_join_calls_and_device_activities() -> None:
    data = read_overview(render(compute_bound()))
    rank = data["ranks"][0]
    blocks = [(lane, *row) for lane, flat in enumerate(rank["blocks"]) for row in unpack(flat)]
    device = call = 0
    pairs = []
    for i in range(0, len(rank["launches"]), 2):
        device, call = device + rank["launches"][i], call + rank["launches"][i + 1]
        pairs.append((blocks[call], blocks[device]))
    assert len(pairs) == 9
    for number, (launch, kernel) in enumerate(pairs):
        assert data["names"][launch[3]] == "cudaLaunchKernel"
        assert (launch[1], kernel[1]) == ((11 + number * 10) * 1000, (20 + number * 108) * 1000)


def test_short_neighbours_become_blocks_that_say_what_they_hold() -> None:
    import numpy as np

    start = np.array([0, 10, 20, 500, 990], np.int64)
    end = np.array([5, 18, 22, 800, 995], np.int64)
    zeros = np.zeros(5, np.int64)
    events = Events(zeros, start, end, np.array([3, 4, 3, 5, 6]), zeros, np.arange(5))
    blocks = put_together(events, 100, Window(0, 1000))
    assert blocks.start.tolist() == [0, 500, 990]
    assert blocks.end.tolist() == [22, 800, 995]
    assert blocks.count.tolist() == [3, 1, 1]
    assert blocks.busy.tolist() == [15, 300, 5]
    assert blocks.name.tolist() == [4, 5, 6]
    assert list_contents(blocks, events, most=4) == [[0, 3, 15, 4, 1, 3, 2]]
    assert list_contents(blocks, events, most=1) == [[0, 3, 15, 4, 1]]


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
    size = write_page(job, answer(job), lambda _rank: timeline, path)
    assert size == path.stat().st_size < MOST_BYTES
    page = path.read_text(encoding="utf-8")
    check(page)
    first = read_overview(page)["ranks"][0]
    rectangles = sum(map(len, first["blocks"])) / 4
    assert rectangles + sum(map(len, first["marks"])) / 2 <= MOST_RECTANGLES
    # No event is lost: what is not a rectangle of its own is counted in one.
    held = sum(count for _, count, *_ in first["contents"])
    assert rectangles - len(first["contents"]) + held > 3 * kernels
    assert "of which hold several short neighbours (striped)" in page
    assert "of 3000 ranks have a timeline here" in page
    assert "slowest: " in page
    assert "2936 more are left out" in page


def test_eight_large_ranks_make_a_page_below_two_megabytes(tmp_path: Path) -> None:
    """Every rank with more events than rectangles, and no operator's name twice on any of them."""
    kernels, timelines = 3_000, []
    for rank in range(8):
        draft = TraceDraft(rank, 8)
        draft.step(0, kernels * 10)
        for number in range(kernels):
            at = number * 10
            draft.operator(f"rank{rank}::operator_{number}_" + "long" * 30, at, at + 9)
            draft.operator(f"inner{rank}::operator_{number}_" + "long" * 30, at, at + 8)
            draft.work(f"kernel_{rank}_{number % 50}_" + "x" * 90, at + 5, at + 9, at=at + 1, stream=number % 3)
        timelines.append(draft.build())
    # One rank in full is enough: explaining so many names eight times takes long.
    job = report_job(timelines[:1])
    job = msgspec.structs.replace(job, ranks=[msgspec.structs.replace(job.ranks[0], rank=rank) for rank in range(8)])
    size = write_page(job, answer(job), find_in(timelines), tmp_path / "page.html")
    assert 500_000 < size < MOST_BYTES
    ranks = read_overview((tmp_path / "page.html").read_text())["ranks"]
    assert [one["rank"] for one in ranks] == list(range(8))
    for one in ranks:
        held = sum(count for _, count, *_ in one["contents"])
        drawn = sum(map(len, one["blocks"][1:])) / 4
        assert drawn + held >= 4 * kernels
        assert one["unsearched"] > 0, "the search says that it cannot know every name"


def test_ranks_that_matter_have_a_timeline_and_a_link() -> None:
    page = render(*straggling())
    checker = check(page)
    choices = {attrs["id"]: attrs for tag, attrs in checker.found if tag == "input" and attrs.get("name") == "rank"}
    assert list(choices) == [f"rank-{rank}" for rank in range(4)]
    assert [name for name, attrs in choices.items() if "checked" in attrs] == ["rank-0"]
    assert re.search(r'id="rank-3".*?<small>straggler', page)
    assert '<a href="#rank-3">rank 3</a>' in page.split('class="try"')[1]
    data = read_overview(page)
    assert data["telling"] == 0

    def all_reduce_starts(rank: dict[str, Any]) -> list[int]:
        lane = [label for label, _ in rank["lanes"]].index("stream 20")
        return [start for start, *_ in unpack(rank["blocks"][lane])]

    late, usual = all_reduce_starts(data["ranks"][3]), all_reduce_starts(data["ranks"][0])
    assert len(late) == 8
    assert all(one > other + 300_000 for one, other in zip(late, usual, strict=True))


def test_of_many_ranks_those_that_the_text_names_come_first() -> None:
    timelines = [draft.build() for draft in straggling(ranks=40, late=33)]
    job = report_job(timelines)
    said = answer(job)
    chosen = choose_ranks(job, said)
    assert len(chosen) <= 8
    assert chosen[job.telling_rank][0] == "representative"
    assert 33 in chosen
    reasons = [reason for one in chosen.values() for reason in one]
    assert {"longest step", "median step", "shortest step"} <= set(reasons), "stragglers leave room to compare with"
    named = {int(rank) for text in (said.sentence, said.try_first.action) for rank in re.findall(r"rank (\d+)", text)}
    assert named <= set(chosen)
    asked: list[int] = []
    render_page(job, said, lambda rank: asked.append(rank) or timelines[rank])  # type: ignore[func-returns-value]
    assert set(asked) == set(chosen), "no other trace is read again"
    large = choose_ranks(report_job(timelines[:4]), said, only_reasons=True)
    assert all(large.values())


def test_the_map_of_waiting_marks_who_came_last() -> None:
    page = render(*straggling())
    drawn = page.split('class="plot heatmap waiting"')[1].split("</svg>")[0]
    assert drawn.count("<rect") == 4 * 8
    assert drawn.count("the last to come") == drawn.count('class="cell marked"') == 8
    assert "rank 0, all-reduce 4 MiB among 4: waited 340.0 µs" in drawn
    assert "rank 3, all-reduce 4 MiB among 4: waited 0 s, arrived 338.5 µs after the median rank" in drawn
    assert all(f'<a href="#rank-{rank}">' in drawn for rank in range(4))
    assert 'class="plot heatmap' not in render(host_bound())


def test_a_step_without_a_device_ends_with_no_device_work() -> None:
    assert "to the end of its device work" in render(compute_bound())
    page = render(on_cpu())
    assert "to the end of its device work" not in page
    assert "Without a device it runs through the program&#39;s own thread" in page


def test_a_recording_shows_the_step_without_the_profiler_beside_the_profiled_one() -> None:
    timeline = host_bound().build()
    job = report_job([timeline])
    assert "Breakdown with and without the profiler" not in render_job(job, [timeline])
    page = render_job(msgspec.structs.replace(job, unprofiled_step_s=0.0005), [timeline])
    check(page)
    drawn = page.split('aria-label="Breakdown with and without the profiler"')[-1].split("</svg>")[0]
    assert "profiled: compute 120.0 µs (6.0 %)" in drawn
    assert "unprofiled: compute 120.0 µs (24.0 %)" in drawn
    assert "unprofiled: launch-bound idle 380.0 µs" in drawn
    assert "Breakdown of the profiled step by rank" not in page, "one rank's bar would stand there twice"


def test_lanes_over_time_are_exact_or_say_over_what_they_are_means() -> None:
    rank = read_overview(render(compute_bound()))["ranks"][0]
    queue = rank["tracks"][0]
    assert (queue["label"], queue["unit"], queue["peak"], queue["cell_ns"]) == ("queue length", "activities", 8.0, 0)
    import numpy as np

    ups = np.arange(0, 4000)
    function = StepFunction(ups * 10, ups % 2)
    track = sample("x", "activities", function, Window(0, 40_000))
    assert len(track.points) <= 2 * MOST_POINTS
    assert track.cell_ns == 80
    assert set(track.points[1::2]) == {500}, "means of zeros and ones"
    assert track.peak == 1


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
