"""Plain lists of communication calls, with and without times."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from stepscope.core.errors import BadInputError
from stepscope.formats.readers import call_list
from stepscope.formats.timeline import Timeline
from stepscope.traces.finish import finish
from stepscope.traces.read import require_format

PARAM = [
    {"comms": "init", "pg_id": 1, "global_ranks": [0, 2], "req": 0, "world_size": 4},
    {
        "comms": "all_reduce",
        "in_msg_size": 1024,
        "out_msg_size": 1024,
        "dtype": "Float",
        "pg_id": 1,
        "req": 1,
        "world_size": 2,
    },
    {"comms": "wait", "req": 1},
    {
        "comms": "all_to_allv",
        "in_msg_size": 6,
        "out_msg_size": 5,
        "in_split": [2, 4],
        "out_split": [3, 2],
        "dtype": "Int",
        "world_size": 2,
    },
    {"comms": "send", "in_msg_size": 3, "out_msg_size": 3, "dtype": "Float", "src_rank": 0, "dst_rank": 3},
    {
        "comms": "broadcast",
        "in_msg_size": 8,
        "out_msg_size": 8,
        "dtype": "Float",
        "root": 0,
        "markers": ["## forward ##"],
    },
    {"compute": "gemm", "count": 2, "mm_dim": 512, "dtype": "Float"},
]


def read(tmp_path: Path, content: Any, name: str = "rank-2.json") -> Timeline:
    path = tmp_path / name
    path.write_text(json.dumps(content))
    assert require_format(path).name == "call_list"
    (timeline,) = call_list.read(path)
    return finish(timeline)


def test_the_basic_form_of_param(tmp_path: Path) -> None:
    timeline = read(tmp_path, PARAM)
    assert timeline.rank == 2
    assert timeline.world_size == 4
    assert [timeline.text("name", row) for row in range(7)] == [
        "init", "all_reduce", "wait", "all_to_allv", "send", "broadcast", "gemm",
    ]  # fmt: skip
    assert timeline.metadata["untimed"] is True
    assert timeline.core["start_ns"].tolist() == list(range(7))
    assert timeline.core["end_ns"].tolist() == list(range(7))
    assert timeline.text("group", 1) == "1"
    assert timeline.text("group_ranks", 1) == "[0, 2]"
    assert timeline.at("group_size", 1) == 2
    assert (timeline.at("in_elements", 3), timeline.at("out_elements", 3)) == (6, 5)
    assert timeline.text("in_splits", 3) == "[2, 4]"
    assert timeline.at("peer", 4) == 3
    assert json.loads(timeline.text("arguments", 5) or "") == {"root": 0, "markers": ["## forward ##"]}
    assert json.loads(timeline.text("arguments", 6) or "")["mm_dim"] == 512
    assert timeline.text("collective", 6) is None
    assert not timeline.repairs


def test_starts_are_kept_where_they_are_given(tmp_path: Path) -> None:
    calls = [
        {"comms": "all_reduce", "in_msg_size": 1, "out_msg_size": 1, "dtype": "Float", "startTime_ns": 50},
        PARAM[1],
    ]
    timeline = read(tmp_path, calls)
    assert timeline.metadata["untimed"] is False
    assert timeline.repairs == {"calls without a start among calls with one": 1}


def test_the_dump_of_the_dlrm_benchmark_counts_bytes(tmp_path: Path) -> None:
    timeline = read(tmp_path, [{"comms": "all_reduce", "msg_size": 4096, "dtype": "torch.float32"}])
    assert timeline.at("in_elements", 0) == 1024
    timeline = read(tmp_path, [{"comms": "all_reduce", "msg_size": 4096, "dtype": "strange"}])
    assert timeline.at("in_elements", 0) is None
    assert timeline.repairs == {"sizes in bytes of an unknown element type were left out": 1}


def test_the_own_form(tmp_path: Path) -> None:
    content = {
        "communication_calls": 1,
        "rank": 1,
        "world_size": 8,
        "groups": [{"name": "dp", "ranks": [1, 5]}],
        "calls": [
            {
                "collective": "all_reduce",
                "elements": 1024,
                "dtype": "float32",
                "group": "dp",
                "start_s": 0.5,
                "duration_s": 1e-3,
            },
            {"collective": "all_gather", "elements": 4, "out_elements": 32, "dtype": "bfloat16", "start_s": 0.6},
            {"elements": 4},
            7,
        ],
    }
    timeline = read(tmp_path, content, "calls.json")
    assert (timeline.rank, timeline.world_size) == (1, 8)
    assert timeline.core["start_ns"].tolist() == [500_000_000, 600_000_000]
    assert timeline.core["end_ns"].tolist() == [501_000_000, 600_000_000]
    assert timeline.text("group_ranks", 0) == "[1, 5]"
    assert [timeline.at("group_size", row) for row in range(2)] == [2, 8]
    assert timeline.at("out_elements", 1) == 32
    assert timeline.repairs == {"calls without a collective were left out": 2}
    assert timeline.metadata["durations"] == 1


def test_odd_values_are_left_out(tmp_path: Path) -> None:
    odd = [
        5,
        {},
        {"comms": 5},
        {"comms": "all_reduce", "in_msg_size": -4, "dtype": 7, "in_split": "x", "pg_id": [1], "world_size": True},
        {"comms": "all_reduce", "in_msg_size": 2**70, "startTime_ns": 1.5},
    ]
    timeline = read(tmp_path, odd)
    assert len(timeline) == 2
    assert timeline.repairs["entries that are neither communication nor computation were left out"] == 2
    assert timeline.repairs["calls without a size"] == 2
    assert timeline.at("in_elements", 0) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "3",
        "[]",
        '[{"a": 1}]',
        '{"calls": []}',
        '{"communication_calls": 2}',
        '{"communication_calls": 1}',
        "[" * 100_000,
    ],
)
def test_what_is_no_list_of_calls_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "calls.json"
    path.write_text(text)
    with pytest.raises(BadInputError) as caught:
        call_list.read(path)
    assert str(path) in (caught.value.where or "")


def test_sniffing_leaves_chrome_traces_alone() -> None:
    assert not call_list.sniff(b'[{"ph": "X", "name": "all_reduce", "args": {"comms": 1}}]', Path("x"))
    assert not call_list.sniff(b'{"traceEvents": []}', Path("x"))


def test_a_cut_list_says_where_it_ends_and_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.json"
    whole = json.dumps(PARAM).encode()
    path.write_bytes(whole[:100])
    with pytest.raises(BadInputError, match="is no JSON") as caught:
        call_list.read(path)
    assert caught.value.where == f"{path}: byte 100"
    assert "docs/trace-formats.md" in str(caught.value.hint)
    path.write_bytes(gzip.compress(whole)[:-12])
    with pytest.raises(BadInputError, match="the packed file ends early"):
        call_list.read(path)
    path.write_bytes(gzip.compress(whole)[:-4])
    (timeline,) = call_list.read(path)
    assert len(timeline) == len(PARAM)
    assert any("ends too early" in what for what in timeline.repairs)
