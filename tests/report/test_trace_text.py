"""The summary in a terminal: short, narrow, harmless, and complete."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from rich.cells import cell_len

from stepscope.analyze.answers.compose import answer
from stepscope.analyze.job import JobReport, explain_job
from stepscope.analyze.ranks.ranks_report import explain_ranks
from stepscope.report.trace_text import MARKS, format_job
from trace_jobs import TraceDraft, communication_bound, copy_bound, host_bound, on_cpu, report_job, straggling

TRACES = Path(__file__).parents[2].parent / "shared" / "data" / "traces"


def show(job: JobReport) -> list[str]:
    lines = format_job(job, answer(job)).splitlines()
    assert all(cell_len(line) <= 110 for line in lines)
    return lines


def job_of(*drafts: TraceDraft) -> JobReport:
    return report_job([draft.build() for draft in drafts])


def test_the_answer_comes_first() -> None:
    job = job_of(host_bound())
    lines = show(job)
    assert " ".join(lines).startswith(answer(job).sentence[:60])
    assert len(lines) <= 60
    text = "\n".join(lines)
    for section in ("Try first:", "# traces/rank0.json: drawn; NVIDIA H200; 1 rank", "Device work: 40 kernels", "Idle ",
                    "Launches: 40 calls", "Notes"):  # fmt: skip
        assert section in text
    assert text.index("Try first:") < text.index("Device work") < text.index("Notes")


def test_bars_are_full_and_marked() -> None:
    line = next(line for line in show(job_of(copy_bound())) if "|" in line and MARKS[2] * 9 in line)
    bar = line.split("|")[1]
    assert len(bar) == 40
    # 880 of 1000 µs are copies.
    assert bar.count(MARKS[2]) == 35


def test_collectives_and_late_ranks_are_listed() -> None:
    text = "\n".join(show(job_of(*straggling())))
    assert "all_reduce  float32" in text
    assert "92.52 GB/s" in text
    assert "Late ranks: 1 straggler" in text
    # Rank r computes 60 + r µs, the late one 400: the others wait 340, 339 and 338 µs in each of eight.
    assert "     3        8       8.136 ms" in text
    assert "times compared as recorded (no clock offset can be told from none)" in " ".join(text.split())
    alone = "\n".join(show(job_of(communication_bound())))
    assert "≥ " in alone
    assert "Late ranks" not in alone


def test_a_trace_without_a_device_shows_operators() -> None:
    text = "\n".join(show(job_of(on_cpu())))
    assert "Operators on the host" in text
    assert "inside operators" in text
    assert "no device rows in this trace" in text


def test_thousands_of_ranks_stay_few_lines() -> None:
    job = job_of(host_bound())
    first = job.ranks[0]
    ranks = [msgspec.structs.replace(first, rank=rank, step_s=first.step_s * (1 + rank / 4096)) for rank in range(4096)]
    lines = show(msgspec.structs.replace(job, ranks=ranks, telling_rank=4095))
    assert len(lines) <= 66
    text = "\n".join(lines)
    assert "4096 ranks, profiled step 2.000 ms to 4.000 ms" in text
    assert "4095 slow" in text
    assert "0 fast" in text
    assert " median  " in text


def test_names_cannot_command_the_terminal() -> None:
    draft = TraceDraft()
    draft.step(0, 100)
    draft.operator("aten::\x1b[31mred\x07", 1, 90)
    draft.work("kernel\n\x1b]0;title\x07" + "x" * 500, 20, 80, at=4)
    text = format_job(job := job_of(draft), answer(job))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\\x1b" in text
    assert all(cell_len(line) <= 110 for line in text.splitlines())


def test_memory_is_told_where_recorded() -> None:
    draft = host_bound(4)
    draft.memory(20, 1 << 20, 1, 1 << 20)
    draft.memory(30, 3 << 20, 2, 4 << 20)
    draft.memory(90, -(3 << 20), 2, 1 << 20)
    assert any(line.startswith("Memory of device 0: peak 4 MiB") for line in show(job_of(draft)))


def test_repairs_come_first() -> None:
    job = job_of(host_bound(4))
    repaired = msgspec.structs.replace(job.ranks[0], repairs={"events without an end": 3, "events twice": 2})
    many = [f"note {number}" for number in range(9)]
    lines = show(msgspec.structs.replace(job, ranks=[repaired], notes=many))
    first = lines[lines.index("Notes") + 1]
    assert first == "  repaired while reading: events without an end: 3; events twice: 2"
    assert lines[-1].endswith("more, see --json")


def test_a_named_step_is_that_of_the_collectives() -> None:
    timelines = [draft.build() for draft in straggling()]
    job = report_job(timelines)
    one = msgspec.structs.replace(job, across=explain_ranks(timelines, step=1))
    assert "Collectives in step 1" in show(one)


def test_ranks_that_are_late_by_noise_are_not_listed() -> None:
    text = "\n".join(show(job_of(*straggling(calls=2))))
    assert "Late ranks: none is significantly late, or there is too little to decide" in text


@pytest.mark.parametrize(
    ("name", "bound_by"),
    [
        ("public/param/dlrm8_kineto", "stragglers"),
        ("public/hta/nccl_parser_config/nccl_data.json.gz", "host"),
        ("public/hta/critical_path/cuda_event_sync/event_sync_trace.json.gz", "host"),
        ("h200/dlrm_8t_pool32_b4096/kineto.json.gz", "host"),
    ],
)
def test_real_traces_fit_a_screen(name: str, bound_by: str) -> None:
    if not (TRACES / name).exists():
        pytest.skip(f"{name} is not here: public traces are kept outside the project")
    from stepscope.traces.read import read_traces

    job = explain_job(read_traces(TRACES / name, cache=False), workers=1)
    assert answer(job).bound_by == bound_by
    assert len(show(job)) <= (60 if len(job.ranks) == 1 else 76)
