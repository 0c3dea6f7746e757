"""Two timelines column by column, and real traces to try things on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stepscope.formats.timeline import COLUMNS, Timeline
from stepscope.traces.read import read_timeline

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "traces"
GPT2 = "h200/gpt2_bf16_b8_s1024/kineto.json.gz"
NCCL = "public/hta/nccl_parser_config/nccl_data.json.gz"
ALEXNET = "public/hta/critical_path/alexnet/benchmark_result_2869224_1695835535_trace.json.gz"
SAMPLED = "public/hta/timeline_analysis/sampled_rank-0.json.gz"
DLRM = "public/param/dlrm8_kineto"

_read: dict[str, Timeline] = {}


def real_trace(name: str) -> Timeline:
    """Read once a session; tests do not change it."""
    path = SHARED / name
    if not path.exists():
        pytest.skip("the shared traces are not here")
    if name not in _read:
        _read[name] = read_timeline(path)
    return _read[name]


def dlrm_ranks(count: int) -> list[Timeline]:
    if not (SHARED / DLRM).exists():
        pytest.skip("the shared traces are not here")
    return [real_trace(f"{DLRM}/{path.name}") for path in sorted((SHARED / DLRM).glob("worker*"))[:count]]


def values(timeline: Timeline, name: str) -> list[object]:
    """A column as what it means: texts and threads, not their numbers."""
    form = next(spec.form for spec in COLUMNS if spec.name == name)
    column = timeline.column(name)
    if form == "text":
        return [None if code < 0 else timeline.texts[code] for code in column.tolist()]
    if name == "thread":
        return [None if code < 0 else timeline.threads[code] for code in column.tolist()]
    return list(column.tolist())


def assert_same(one: Timeline, other: Timeline, *, but: tuple[str, ...] = ()) -> None:
    assert len(one) == len(other)
    for spec in COLUMNS:
        if spec.name in but:
            continue
        if spec.form == "float":
            np.testing.assert_array_equal(one.column(spec.name), other.column(spec.name), err_msg=spec.name)
        else:
            assert values(one, spec.name) == values(other, spec.name), spec.name
    assert (one.rank, one.world_size) == (other.rank, other.world_size)
    assert tuple(one.steps) == tuple(other.steps)
    assert one.step_marker == other.step_marker
