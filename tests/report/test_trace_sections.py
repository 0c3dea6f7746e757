"""Sections: what an analysis declares stands in the summary, on the page and in the JSON, and fits any terminal."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest
from rich.cells import cell_len

from stepscope.analyze.analyses import ANALYSES, compute_more, make_sections
from stepscope.analyze.answers.compose import answer
from stepscope.analyze.critical.model import graph_of_job
from stepscope.analyze.critical.what_if import find_limits
from stepscope.analyze.job import JobReport, Timelines, explain_job
from stepscope.analyze.ranks.clocks import find_clocks
from stepscope.analyze.ranks.digest import digest
from stepscope.analyze.ranks.matching import match
from stepscope.analyze.ranks.ranks_report import explain_ranks
from stepscope.analyze.section import Analysis, Brief, Section, field, make_table
from stepscope.analyze.step.breakdown import break_down
from stepscope.analyze.step.counters import count_by_operator
from stepscope.analyze.step.idle import explain_idle
from stepscope.analyze.step.kernels import list_kernels
from stepscope.analyze.step.launches import study_launches
from stepscope.analyze.step.memory import trace_memory
from stepscope.analyze.step.operator_rates import rate_operators
from stepscope.analyze.step.overheads import measure_overheads
from stepscope.analyze.step.report import explain_step
from stepscope.analyze.step.sequences import find_sequences
from stepscope.analyze.step.variation import compare_steps
from stepscope.cli.main import run
from stepscope.formats.timeline import Timeline
from stepscope.report.trace_page import render_page
from stepscope.report.trace_text import format_job
from stepscope.traces.read import TraceSet, read_traces
from trace_jobs import communication_bound, compute_bound, host_bound, on_cpu, report_job, straggling

H200_SMALL = Path(__file__).parents[1] / "traces" / "data" / "h200_small"


class Found(msgspec.Struct, frozen=True, kw_only=True):
    calls: int
    names: list[str]


def count_names(timeline: Timeline, step: int | None) -> Found:
    return Found(calls=len(timeline), names=[f"name {number} of {step}" for number in range(7)])


def names_section(job: JobReport) -> Section:
    found: Found = job.more["names"]
    table = make_table("All names", "As recorded", found.names, [
        field("Length", len, "count", brief=1),
        field("Name", str, brief=1),
        field("Only on the page", lambda name: name.upper()),
    ])  # fmt: skip
    return Section(
        id="names",
        title="Names",
        summary=[Brief(f"Names: {found.calls} calls", table, 2, "names")],
        tables=[table],
    )


@pytest.fixture
def extended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of analyses with one more, as an entry in module `analyses` would make it."""
    analyses = (*ANALYSES, Analysis("names", names_section, count_names))
    monkeypatch.setattr("stepscope.analyze.analyses.ANALYSES", analyses)


@pytest.mark.usefixtures("extended")
def test_an_analysis_is_a_module_and_an_entry() -> None:
    timeline = host_bound(3).build()
    job = report_job([timeline])
    lines = format_job(job, answer(job)).splitlines()
    place = lines.index(f"Names: {len(timeline)} calls (first 2 of 7 names)")
    assert lines[place + 1 : place + 4] == ["  length  name", "      11  name 0 of 1", "      11  name 1 of 1"]
    page = render_page(job, answer(job), lambda _rank: timeline)
    assert '<h2 id="names">Names</h2>' in page
    assert "NAME 6 OF 1" in page
    assert msgspec.to_builtins(job)["more"]["names"]["calls"] == len(timeline)


@pytest.mark.usefixtures("extended")
def test_the_result_of_an_analysis_is_in_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path)
    assert run(["trace", "summary", str(trace), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data"]["more"]["names"]["names"][0].startswith("name 0")


def write_trace(folder: Path, rank: int = 0) -> Path:
    events = [
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1, "ts": 0, "dur": 900},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 10, "dur": 700},
    ]
    path = folder / f"rank{rank}.json"
    path.write_text(json.dumps({"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": events}))
    return path


@pytest.mark.parametrize("verb", ["summary", "report"])
def test_every_timeline_is_read_once(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def count(path: Path, **options: Any) -> Timeline:
        read.append(Path(path).name)
        return load(path, **options)

    from stepscope.traces.read import load_timeline as load

    monkeypatch.setattr("stepscope.traces.read.load_timeline", count)
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank in range(2):
        write_trace(folder, rank)
    more = ["-o", str(tmp_path / "page.html")] if verb == "report" else []
    assert run(["trace", verb, str(folder), *more]) == 0
    assert sorted(read) == ["rank0.json", "rank1.json"]


PER_RANK = (
    break_down, explain_idle, study_launches, measure_overheads, find_sequences, list_kernels, compare_steps,
    count_by_operator, trace_memory, explain_step, digest,
)  # fmt: skip
PER_JOB = (explain_job, find_limits, rate_operators, answer)
ACROSS = (explain_ranks, match, find_clocks, graph_of_job)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("verb", ["summary", "report"])
def test_every_analysis_is_computed_once(verb: str, ranks: int, tmp_path: Path) -> None:
    """Counted by the code that runs, whoever calls it under whatever name."""
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank in range(ranks):
        write_trace(folder, rank)
    codes = {one.__code__: one.__name__ for one in (*PER_RANK, *PER_JOB, *ACROSS)}
    counted: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in codes:
            counted[codes[frame.f_code]] += 1

    more = ["-o", str(tmp_path / "page.html")] if verb == "report" else []
    sys.setprofile(count)
    try:
        assert run(["trace", verb, str(folder), "--no-cache", "--workers", "1", *more]) == 0
    finally:
        sys.setprofile(None)
    per_job = (*PER_JOB, *ACROSS) if ranks > 1 else PER_JOB
    expected = {one.__name__: ranks for one in PER_RANK} | {one.__name__: 1 for one in per_job}
    assert counted == expected


def test_large_jobs_keep_one_timeline_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(2):
        write_trace(tmp_path, rank)
    traces = read_traces(tmp_path, cache=False)
    small = Timelines(traces)
    assert small(0) is small(0)
    assert small(1) is small(1)
    kept = small(0)
    assert small(0) is kept
    monkeypatch.setattr("stepscope.analyze.job.report.JOB_PATH_BYTES", 1)
    large = Timelines(traces)
    first = large(0)
    assert large(0) is first
    large(1)
    assert large(0) is not first


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("name", ["host", "compute", "communication", "ranks", "cpu"])
def test_the_summary_fits_any_terminal(name: str, width: int) -> None:
    drafts = {"host": [host_bound()], "compute": [compute_bound()], "communication": [communication_bound()],
              "ranks": straggling(), "cpu": [on_cpu()]}[name]  # fmt: skip
    timelines = [draft.build() for draft in drafts]
    job = report_job(timelines)
    lines = format_job(job, answer(job), width).splitlines()
    assert max(map(cell_len, lines)) <= width
    if len(job.ranks) == 1:
        assert len(lines) <= 60
    if name == "ranks":
        assert any("all_reduce" in line for line in lines), "what identifies a row stays"
        assert any(line.rstrip().endswith("throughout") for line in lines)


def test_real_traces_fit_a_narrow_terminal() -> None:
    paths = [path for path in sorted(H200_SMALL.glob("*.json.gz")) if ".et." not in path.name][:5]
    assert paths
    for path in paths:
        traces: TraceSet = read_traces(path, cache=False)
        job = explain_job(traces)
        lines = format_job(job, answer(job), 80).splitlines()
        assert len(lines) <= 60
        assert max(map(cell_len, lines)) <= 80


def test_sections_are_plain_data() -> None:
    timelines = [draft.build() for draft in straggling()]
    job = report_job(timelines)
    sections = list(make_sections(job))
    assert {"breakdown", "path", "device", "idle", "collectives", "launches"} <= {one.id for one in sections}
    assert len({one.id for one in sections}) == len(sections)
    for section in sections:
        for table in section.tables:
            assert all(len(row) == len(table.columns) for row in table.rows)
            for row in table.rows:
                for value, column in zip(row, table.columns, strict=True):
                    assert value is None or isinstance(value, (int, float) if column.is_numeric else str)
    assert set(compute_more(timelines[0], 1)) == {one.name for one in ANALYSES if one.compute is not None}
