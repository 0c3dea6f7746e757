"""What one view says twice it says with the same number: of recorded traces, and of jobs drawn by hand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from trace_samples import TRACES

from stepscope.analyze.answers.compose import answer
from stepscope.analyze.job import JobReport, explain_job
from stepscope.report.trace_text import format_job
from stepscope.traces.read import read_traces
from trace_jobs import communication_bound, compute_bound, copy_bound, host_bound, report_job, straggling, sync_bound

CPU_PROGRAMS = Path(__file__).parent / "data" / "cpu_programs"
RECORDED = (
    "h200/bert_base_b16_s128/kineto.json.gz",
    "h200/dlrm_8t_pool32_b4096/kineto.json.gz",
    "h200_runahead/convnext_tiny_b64",
    "public/param/resnet_kineto.json.gz",
    "public/param/linear_kineto.json.gz",
    "public/param/dlrm8_kineto",
    "public/hta/nccl_parser_config",
    "public/hta/timeline_analysis",
    "public/hta/critical_path/alexnet",
    "public/hta/critical_path/cuda_event_sync",
)
PATH_WORDS = {"host": "host", "compute": "compute", "copies": "copies", "communication": "communication"}


def jobs() -> Iterator[tuple[str, JobReport]]:
    for draft in (host_bound(), compute_bound(), communication_bound(), copy_bound(), sync_bound()):
        yield "drawn", report_job([draft.build()])
    yield "drawn ranks", report_job([draft.build() for draft in straggling()])
    for path in sorted(CPU_PROGRAMS.glob("*.json.gz")):
        yield path.name, explain_job(read_traces(path, cache=False))
    yield "gloo", explain_job(read_traces(CPU_PROGRAMS / "gloo", cache=False))
    for name in RECORDED:
        if (TRACES / name).exists():
            yield name, explain_job(read_traces(TRACES / name, cache=False))


def disagreements(job: JobReport) -> Iterator[str]:
    found = answer(job, limits=job.limits)
    shown = format_job(job, found, 100_000)
    detail, variation = job.detail, job.detail.variation
    # The fraction of the path that the evidence names is the one that the point about the path lists.
    told = re.search(r"([\d.]+ %) of the critical path", found.evidence)
    path = next((point.text for point in found.points if point.text.startswith("critical path: ")), None)
    if told and path and found.bound_by in PATH_WORDS and f"{told[1]} {PATH_WORDS[found.bound_by]}" not in path:
        yield f"{found.evidence!r} against {path!r}"
    # A limit is called device work only where it is the sum of the table of device work.
    if re.search(r"device work alone", found.try_first.because):
        yield found.try_first.because
    own = job.own_critical or job.critical
    if own is not None and own.length_s != pytest.approx(detail.breakdown.step_s):
        yield f"path {own.length_s} against step {detail.breakdown.step_s}"
    idle_s = sum(getattr(detail.breakdown.breakdown_s, name) for name in ("host_idle", "sync_idle", "other_idle"))
    if detail.breakdown.has_device and detail.idle.idle_s != pytest.approx(idle_s):
        yield f"idle {detail.idle.idle_s} against {idle_s}"
    for one in detail.breakdown.host_activities:
        if one.function_s > one.time_s * 1.0001:
            yield f"{one.function} takes {one.function_s} of {one.time_s}"
    for limit in job.limits:
        if limit.step_s > detail.breakdown.step_s * 1.0001:
            yield f"limit {limit.name} {limit.step_s} against step {detail.breakdown.step_s}"
    mine = next((one for one in variation.steps if one.step == detail.step), None)
    if mine is not None and mine.step_s != pytest.approx(detail.breakdown.step_s):
        yield f"step {mine.step_s} against {detail.breakdown.step_s}"
    for line in shown.splitlines():
        yield from (
            f"{line!r}" for bad in (r"\b1 (?:of \d+ )?\w+s are\b", r"\b1 copies\b", r"stretch") if re.search(bad, line)
        )


def test_numbers_that_look_alike_agree() -> None:
    found = [f"{name}: {what}" for name, job in jobs() for what in disagreements(job)]
    assert found == []
