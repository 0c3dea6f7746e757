"""Known numbers of real traces."""

from __future__ import annotations

import math

import msgspec
import pytest
from trace_samples import NCCL_DATA, TRACES, read_public

from stepscope.analyze.step.breakdown import break_down, break_down_steps
from stepscope.analyze.step.kernels import list_kernels
from stepscope.analyze.step.report import explain_step

H200 = {
    "dlrm_26t_b2048": (2.26, 448, 7, 43.4),
    "dlrm_8t_pool32_b4096": (4.85, 283, 86, 23.8),
    "resnet50_b64": (31.04, 735, 53, 103.6),
    "bert_base_b16_s128": (16.01, 713, 123, 204.4),
    "gpt2_bf16_b8_s1024": (44.20, 813, 119, 166.9),
    "vit_b_16_b32": (35.19, 740, 230, 149.7),
}
"""Busy milliseconds, kernels, copies and fills, profiled step in milliseconds."""

PLACES = ("h200/*/kineto.json.gz", "public/param/*kineto*.gz", "public/param/*kineto/*.gz", "public/hta/**/*.gz")
KINETO = sorted(str(path.relative_to(TRACES)) for pattern in PLACES for path in TRACES.glob(pattern))
NO_TRACES = pytest.param("public", marks=pytest.mark.skip(reason="public traces are kept outside the project"))


@pytest.mark.parametrize("name", H200)
def test_steps_on_an_h200(name: str) -> None:
    busy_ms, kernels, copies, step_ms = H200[name]
    found = break_down(read_public(f"h200/{name}/kineto.json.gz"), 3)
    assert round(found.device_busy_s * 1e3, 2) == busy_ms
    assert (found.kernels, found.copies) == (kernels, copies)
    assert round(found.step_s * 1e3, 1) == step_ms
    assert found.overlap.hidden_share is None
    # The profiler slows the host down so much that the device mostly waits for it.
    assert found.breakdown_s.host_idle > 0.5 * found.step_s


def test_overlap_of_a_whole_trace() -> None:
    found = break_down(read_public(NCCL_DATA), None)
    assert found.overlap.hidden_share == pytest.approx(0.156, abs=5e-4)
    assert round(found.overlap.exposed_s * 1e3, 1) == 39.6
    assert round(found.overlap.communication_s * 1e3, 1) == 46.9
    busy_window_s = found.device_busy_s + found.between_idle_s
    assert busy_window_s == pytest.approx(0.6606, abs=5e-5)
    assert found.overlap.communication_s / busy_window_s == pytest.approx(0.071, abs=5e-4)
    assert found.breakdown_s.exposed_copy / busy_window_s == pytest.approx(0.00346, abs=5e-6)
    (group,) = found.overlap.groups
    assert (group.group, group.description, group.kernels) == ("0", "default_pg", 21)


def test_phases_of_a_training_step() -> None:
    found = list_kernels(read_public(NCCL_DATA), 5)
    phases = {row.name: row for row in found.by_phase.rows}
    assert list(phases) == ["backward", "forward", "optimizer"]
    assert {row.name for row in found.by_annotation.rows} == {
        "## backward ##",
        "nccl:all_reduce",
        "nccl:broadcast",
        "DistributedDataParallel.forward",
        "Optimizer.step#SGD.step",
    }
    assert sum(row.count for row in found.by_operator.rows) == found.kernels + found.copies == 1258


@pytest.mark.parametrize("name", KINETO or [NO_TRACES])
def test_every_trace_gives_a_report(name: str) -> None:
    timeline = read_public(name)
    for found in break_down_steps(timeline):
        assert sum(found.breakdown_ns.values()) == found.window_end_ns - found.window_start_ns
        assert min(found.breakdown_ns.values()) >= 0
    report = explain_step(timeline)
    assert report.idle.idle_ns == sum(list(report.breakdown.breakdown_ns.values())[3:])
    assert math.isclose(sum(row.total_s for row in report.kernels.by_operator.rows), report.kernels.sum_s)
    assert b"NaN" not in msgspec.json.encode(report)
