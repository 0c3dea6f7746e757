"""Numbers of Holistic Trace Analysis on public traces, made once by tools/hta_numbers.py.

Where definitions agree, so do numbers; docs/trace-metrics.md says where they differ and why.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trace_samples import read_public

from stepscope.analyze.step.breakdown import break_down
from stepscope.analyze.step.kernels import list_kernels
from stepscope.analyze.step.launches import study_launches

HTA: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "hta_numbers.json").read_text())["traces"]
ROUNDED = {"nccl_data"}
"""Times with fractions of a microsecond: HTA rounds every start up and every end down."""
WITH_SYNC_ROWS = {"alexnet"}
"""HTA counts sync rows as busy time."""
EXACT = sorted(set(HTA) - ROUNDED)
TYPES = {"COMPUTATION": "compute", "COMMUNICATION": "communication", "MEMORY": "copy"}


def microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


@pytest.mark.parametrize("name", sorted(set(EXACT) - WITH_SYNC_ROWS))
def test_temporal_breakdown(name: str) -> None:
    hta = HTA[name]["temporal"]
    found = break_down(read_public(HTA[name]["file"]), None)
    assert microseconds(found.between_idle_s) == hta["idle"]
    assert microseconds(found.breakdown_s.compute) == hta["compute"]
    assert microseconds(found.breakdown_s.exposed_comm + found.breakdown_s.exposed_copy) == hta["non_compute"]
    assert microseconds(found.device_busy_s + found.between_idle_s) == hta["kernel"]


@pytest.mark.parametrize("name", EXACT)
def test_time_by_what_ran_at_once(name: str) -> None:
    found = break_down(read_public(HTA[name]["file"]), None).combinations_s
    hta = {
        "+".join(TYPES[part] for part in names.split(" overlapping ")): spent
        for names, spent in HTA[name]["types"].items()
        if spent
    }
    assert {names: microseconds(spent) for names, spent in found.items()} == hta


@pytest.mark.parametrize("name", EXACT)
def test_overlap(name: str) -> None:
    found = break_down(read_public(HTA[name]["file"]), None).overlap.hidden_share
    hta = HTA[name]["overlap_percent"]
    assert hta is None if found is None else round(100 * found, 2) == hta


@pytest.mark.parametrize("name", EXACT)
def test_top_kernels(name: str) -> None:
    rows = {row.name: row for row in list_kernels(read_public(HTA[name]["file"]), None).by_name.rows}
    for hta in HTA[name]["kernels"]:
        row = rows[hta["name"]]
        assert microseconds(row.total_s) == hta["sum"]
        assert (microseconds(row.min_s), microseconds(row.max_s)) == (hta["min"], hta["max"])
        assert row.mean_s * 1e6 == pytest.approx(hta["mean"])
        assert (row.std_s or 0) * 1e6 == pytest.approx(hta["std"])


@pytest.mark.parametrize("name", EXACT)
def test_launches(name: str) -> None:
    hta = HTA[name]["launches"]
    found = study_launches(read_public(HTA[name]["file"]), None)
    assert (found.calls, found.launched) == (hta["count"], hta["count"])
    assert microseconds(found.call_s) == hta["call_sum"]
    assert sum(one.longer_than_work for one in found.by_call) == hta["short"]


@pytest.mark.parametrize("name", sorted(HTA))
def test_longest_queues(name: str) -> None:
    queues = study_launches(read_public(HTA[name]["file"]), None).queue
    found = {str(one.stream): one.pending_max for one in queues if one.stream is not None}
    hta = HTA[name]["queue_max"]
    assert found == hta if found else queues[0].pending_max == max(hta.values())


def test_idle_time_of_a_device_with_one_stream() -> None:
    """HTA's gaps are those of each stream; they are those of the device where it has one."""
    hta = HTA["linear"]["idle_by_stream"]
    found = break_down(read_public(HTA["linear"]["file"]), None)
    assert microseconds(found.between_idle_s) == sum(hta.values())


def test_what_rounding_costs() -> None:
    """The trace with nanoseconds: HTA loses up to 1 µs at each end of each kernel."""
    hta = HTA["nccl_data"]
    found = break_down(read_public(hta["file"]), None)
    kernels = found.kernels + found.copies
    lost = found.breakdown_s.compute * 1e6 - hta["temporal"]["compute"]
    assert 0 < lost < 2 * kernels
    assert hta["overlap_percent"] == pytest.approx(15.14)
    assert found.overlap.hidden_share == pytest.approx(0.1561, abs=5e-5)


def test_what_sync_rows_cost() -> None:
    hta = HTA["alexnet"]["temporal"]
    found = break_down(read_public(HTA["alexnet"]["file"]), None)
    assert microseconds(found.breakdown_s.compute) == hta["compute"]
    assert hta["non_compute"] > microseconds(found.breakdown_s.exposed_copy)
    assert hta["kernel"] > microseconds(found.device_busy_s + found.between_idle_s)
