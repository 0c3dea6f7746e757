"""A job whose late rank, clocks and step numbers are planted: the report names the right rank, step and path."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from stepscope.analyze.answers.compose import answer
from stepscope.analyze.critical.model import graph_of_job
from stepscope.analyze.critical.path import describe_path
from stepscope.analyze.job import JobReport, explain_job
from stepscope.analyze.ranks.digest import PAIRED_BY_ORDER
from stepscope.core.errors import UsageError
from stepscope.traces import read_traces


class Planted(NamedTuple):
    """What is planted; times in microseconds. The late rank computes `late` longer before each of three all-reduces."""

    ranks: int = 4
    steps: int = 6
    late_rank: int = 2
    late: int = 200
    ahead: Callable[[int], int] = lambda rank: 0
    """How far a rank's clock is ahead."""
    first_step: Callable[[int], int] = lambda rank: 0


def write_job(folder: Path, planted: Planted) -> Path:
    for rank in range(planted.ranks):
        (folder / f"rank{rank}.json").write_text(json.dumps(_rank(rank, planted)))
    return folder


def _rank(rank: int, planted: Planted) -> dict[str, Any]:
    events: list[dict[str, Any]] = []
    shift = planted.ahead(rank)

    def add(category: str, name: str, start: float, length: float, *, pid: int = 1, tid: int = 1, **args: Any) -> None:
        cells = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "args": args}
        events.append({**cells, "ts": start + shift, "dur": length})

    def launch(name: str, at: float, start: float, length: float, stream: int, **args: Any) -> None:
        number = len(events)
        add("cuda_runtime", "cudaLaunchKernel", at, 4, correlation=number)
        place = {"device": 0, "stream": stream, "correlation": number}
        add("kernel", name, start, length, pid=0, tid=stream, **place, **args)

    for step in range(planted.steps):
        begin = 10_000 + step * 3_000
        add("user_annotation", f"ProfilerStep#{step + planted.first_step(rank)}", begin, 2_500)
        host, free = begin + 10, begin + 30
        for call in range(3):
            busy = 300 + (planted.late if rank == planted.late_rank else 0)
            end = free + 300 + planted.late + 3 + 100
            add("cpu_op", "aten::mm", host, 20)
            launch("ampere_sgemm_128x64_nn", host + 2, free, busy, 7)
            comm = {
                "Collective name": "allreduce", "In msg nelems": 1 << 20, "Out msg nelems": 1 << 20, "dtype": "Float",
                "Group size": planted.ranks, "Process Group Name": "0", "Seq": 3 * step + call,
                "Process Group Ranks": str(list(range(planted.ranks))),
            }  # fmt: skip
            add("cuda_runtime", "cudaEventRecord", host + 22, 1)
            add("cuda_runtime", "cudaStreamWaitEvent", host + 24, 1)
            add("cpu_op", "record_param_comms", host + 26, 15, **comm)
            launch(
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL", host + 29, free + busy + 3, end - free - busy - 3, 20, **comm
            )
            add("cuda_runtime", "cudaEventRecord", host + 50, 1)
            add("cuda_runtime", "cudaStreamWaitEvent", host + 52, 1)
            host, free = host + 55, end + 3
        add("cuda_runtime", "cudaDeviceSynchronize", host + 5, free - host)
    info = {"backend": "nccl", "rank": rank, "world_size": planted.ranks}
    return {"distributedInfo": info, "traceEvents": events}


def explain(folder: Path, planted: Planted, **options: Any) -> JobReport:
    return explain_job(read_traces(write_job(folder, planted), cache=False), workers=1, **options)


def test_clocks_that_are_off_do_not_hide_the_late_rank(tmp_path: Path) -> None:
    planted = Planted(ranks=12, late_rank=7, ahead=lambda rank: rank * 37 % 101 * 10)
    report = explain(tmp_path, planted)
    assert report.across is not None
    assert report.across.clocks == "aligned"
    assert report.across.stragglers.stragglers == [7]
    assert "look at rank 7" in answer(report).try_first.action


def test_equally_long_steps_are_told_by_who_computes_longest(tmp_path: Path) -> None:
    report = explain(tmp_path, Planted())
    assert len({summary.step_s for summary in report.ranks}) == 1
    assert report.telling_rank == 2
    assert "about as long on all 4 ranks" in answer(report).sentence


def test_a_small_job_has_its_path_through_all_ranks(tmp_path: Path) -> None:
    report = explain(tmp_path, Planted(ahead=lambda rank: 5_000 * rank))
    assert report.critical is not None
    assert report.critical.ranks == [0, 1, 2, 3]
    assert max(range(4), key=lambda rank: report.critical.by_rank_s[rank]) == 2  # type: ignore[union-attr]
    assert report.own_critical is not None
    assert report.own_critical.ranks == [2]
    assert report.own_critical.length_s == pytest.approx(report.detail.breakdown.step_s)
    told = next(point.text for point in answer(report).points if point.text.startswith("critical path"))
    assert told.startswith("critical path through 4 ranks (")
    assert "on rank 2)" in told


def test_a_large_job_says_whose_path_it_is(tmp_path: Path) -> None:
    report = explain(tmp_path, Planted(ranks=9))
    assert report.critical is not None
    assert report.critical.ranks == [2]
    assert "the critical path is of rank 2 alone: the job has more than 8 ranks" in report.notes
    assert any(point.text.startswith("critical path of rank 2 alone: ") for point in answer(report).points)


def test_a_named_step_narrows_the_collectives(tmp_path: Path) -> None:
    planted = Planted()
    whole, one = explain(tmp_path, planted), explain(tmp_path, planted, step=3)
    assert whole.across is not None
    assert one.across is not None
    assert (one.step, one.across.step, whole.across.step) == (3, 3, None)
    assert (sum(row.count for row in whole.across.table), sum(row.count for row in one.across.table)) == (18, 3)
    assert one.across.waiting[0].wait_s == pytest.approx(3 * 200e-6)
    assert one.across.stragglers == whole.across.stragglers
    assert one.across.clock_offsets == whole.across.clock_offsets


def test_steps_that_all_ranks_have_are_chosen_from(tmp_path: Path) -> None:
    """Rank 0 has steps 0 to 5, the others 4 to 9: its median step is none of theirs."""
    planted = Planted(first_step=lambda rank: 0 if rank == 0 else 4)
    report = explain(tmp_path, planted)
    assert report.step in (4, 5)
    assert {summary.step for summary in report.ranks} == {report.step}
    assert [step.step for step in report.steps] == [4, 5]
    with pytest.raises(UsageError, match="rank 1 has no step 2") as caught:
        explain(tmp_path, planted, step=2)
    assert caught.value.hint == "steps of all ranks: 4, 5"


def test_ranks_that_count_differently_are_paired_by_order(tmp_path: Path) -> None:
    planted = Planted(first_step=lambda rank: 10 if rank == 1 else 0)
    report = explain(tmp_path, planted)
    assert PAIRED_BY_ORDER in report.notes
    assert [step.step for step in report.steps] == list(range(6))
    assert [summary.step for summary in report.ranks] == [report.step, report.step + 10, report.step, report.step]
    assert report.across is not None
    assert report.across.stragglers.stragglers == [2]
    assert len(report.across.steps) == 6
    assert report.critical is not None
    assert len(report.critical.ranks) == 4
    named = explain(tmp_path, planted, step=13)
    assert [summary.step for summary in named.ranks] == [3, 13, 3, 3]


def test_the_graph_of_ranks_that_count_differently(tmp_path: Path) -> None:
    alike, differently = tmp_path / "alike", tmp_path / "differently"
    for folder in (alike, differently):
        folder.mkdir()
    write_job(alike, Planted())
    write_job(differently, Planted(first_step=lambda rank: 10 if rank == 1 else 0))
    first, second = (
        describe_path(graph_of_job(list(read_traces(folder, cache=False)), 3)) for folder in (alike, differently)
    )
    assert second.length_s == first.length_s
    assert second.by_kind_s == first.by_kind_s
    with pytest.raises(UsageError, match="rank 0 has no step 13"):
        graph_of_job(list(read_traces(differently, cache=False)), 13)


@pytest.mark.parametrize(("ranks", "steps", "listed"), [(1, 1, "0"), (4, 6, "0, 1, 2, 3, 4, 5")])
def test_a_step_that_nobody_has_is_refused(tmp_path: Path, ranks: int, steps: int, listed: str) -> None:
    with pytest.raises(UsageError, match="there is no step 99 in the trace") as caught:
        explain(tmp_path, Planted(ranks=ranks, steps=steps), step=99)
    assert caught.value.hint == f"steps: {listed}"


def test_steps_are_not_longer_than_they_took(tmp_path: Path) -> None:
    """The host is done with all steps long before the device: the steps still add up to what they took together."""
    events: list[dict[str, Any]] = []
    for step in range(8):
        begin = 1_000 + 105 * step
        cells = {"ph": "X", "pid": 1, "tid": 1}
        events += [
            {**cells, "cat": "user_annotation", "name": f"ProfilerStep#{step}", "ts": begin, "dur": 100},
            {**cells, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": begin + 2, "dur": 4,
             "args": {"correlation": step + 1}},
            {"ph": "X", "cat": "kernel", "name": "ampere_sgemm_128x64_nn", "pid": 0, "tid": 7,
             "ts": 1_050 + 1_000 * step, "dur": 999, "args": {"device": 0, "stream": 7, "correlation": step + 1}},
        ]  # fmt: skip
    (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": events}))
    report = explain_job(read_traces(tmp_path, cache=False), workers=1)
    assert [round(step.step_s * 1e6) for step in report.steps] == [1049, *[1000] * 7]
