"""Dumps of the flight recorder: real ones, made-up ones, and pickles that want to do harm."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pickle
import pickletools
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.core.errors import BadInputError
from stepscope.formats import plain_pickle
from stepscope.formats.readers import flight_recorder
from stepscope.formats.timeline import Timeline
from stepscope.traces.finish import finish
from stepscope.traces.read import require_format

DATA = Path(__file__).parent / "data"
"""Two ranks of torch 2.13 with Gloo, dumped by `_dump_fr_trace` without stacks."""


def entry(**changes: Any) -> dict[str, Any]:
    usual = {
        "record_id": 7,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": 3,
        "p2p_seq_id": 0,
        "op_id": 3,
        "is_p2p": False,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": 1_000,
        "time_discovered_started_ns": 2_000,
        "time_discovered_completed_ns": 9_000,
        "duration_ms": 0.005,
        "input_sizes": [[4, 8]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[4, 8]],
        "output_dtypes": ["BFloat16"],
        "state": "completed",
        "retired": True,
        "timeout_ms": 600_000,
    }
    return usual | changes


def dump(*entries: Any, **more: Any) -> dict[str, Any]:
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    return {"version": "2.10", "nccl_version": "2.28.9", "pg_config": groups, "entries": list(entries)} | more


def read(tmp_path: Path, content: dict[str, Any], name: str = "nccl_trace_rank_3") -> Timeline:
    path = tmp_path / name
    path.write_bytes(pickle.dumps(content, protocol=2))
    (timeline,) = flight_recorder.read(path)
    return timeline


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("flight_recorder_gloo_rank_0.pickle", 0),
        ("flight_recorder_gloo_rank_1.pickle", 1),
        ("flight_recorder_gloo_rank_0.json", 0),
    ],
)
def test_a_real_dump(name: str, rank: int) -> None:
    path = DATA / name
    assert require_format(path).name == "flight_recorder"
    (timeline,) = flight_recorder.read(path)
    timeline = finish(timeline)
    assert timeline.rank == rank
    names = [timeline.text("collective", row) for row in range(len(timeline))]
    assert names == ["all_reduce", "all_gather", "broadcast", "all_to_all", "reduce", "barrier"]
    assert [timeline.text("group", row) for row in range(2)] == ["0", "1"]
    assert timeline.text("group_description", 1) == "data parallel"
    assert [timeline.at("out_elements", row) for row in range(6)] == [12, 24, 5, 6, 12, None]
    assert timeline.text("dtype", 2) == "BFloat16"
    # Gloo tells neither start nor end; the entries are done all the same.
    assert timeline.metadata["without_completion_time"] == 6
    assert timeline.metadata["unfinished_count"] == 0
    assert not timeline.repairs


def test_both_forms_of_a_dump_agree() -> None:
    (packed,) = flight_recorder.read(DATA / "flight_recorder_gloo_rank_0.pickle")
    (written,) = flight_recorder.read(DATA / "flight_recorder_gloo_rank_0.json")
    assert packed.core["start_ns"].tolist() == written.core["start_ns"].tolist()
    assert [packed.texts[c] for c in packed.core["name"]] == [written.texts[c] for c in written.core["name"]]


def test_a_row_is_as_long_as_the_device_says(tmp_path: Path) -> None:
    timeline = read(
        tmp_path, dump(entry(), entry(duration_ms=None), entry(duration_ms=None, time_discovered_completed_ns=None))
    )
    spans = list(zip(timeline.core["start_ns"].tolist(), timeline.core["end_ns"].tolist(), strict=True))
    assert spans == [(4_000, 9_000), (2_000, 9_000), (1_000, 1_000)]
    assert timeline.rank == 3
    assert timeline.world_size == 4
    assert timeline.text("group_ranks", 0) == "[0, 1, 2, 3]"
    assert timeline.at("group_size", 0) == 4
    assert timeline.at("in_elements", 0) == 32
    assert timeline.metadata["versions"]["nccl_version"] == "2.28.9"
    assert json.loads(timeline.text("arguments", 2) or "")["times"] == "call only"


def test_what_never_ended_is_named(tmp_path: Path) -> None:
    hung = entry(
        state="started", retired=False, time_discovered_completed_ns=None, duration_ms=None, collective_seq_id=9
    )
    timeline = read(tmp_path, dump(entry(), hung))
    assert timeline.metadata["unfinished_count"] == 1
    assert timeline.metadata["unfinished"] == [
        {"collective": "all_reduce", "group": "0", "collective_sequence": 9, "state": "started", "record": 7}
    ]


def test_sends_know_their_peer(tmp_path: Path) -> None:
    calls = dump(
        entry(profiling_name="nccl:send 0->1", is_p2p=True, p2p_seq_id=5),
        entry(profiling_name="nccl:recv 1<-0", is_p2p=True, p2p_seq_id=6),
    )
    timeline = read(tmp_path, calls)
    assert [timeline.text("collective", row) for row in range(2)] == ["send", "recv"]
    assert [timeline.at("peer", row) for row in range(2)] == [1, 0]
    assert [timeline.at("collective_sequence", row) for row in range(2)] == [5, 6]


def test_the_caller_outside_torch_is_kept(tmp_path: Path) -> None:
    frames = [
        {"filename": "/usr/lib/torch/distributed/distributed_c10d.py", "line": 1, "name": "all_reduce"},
        {"filename": "/home/me/train.py", "line": 12, "name": "step"},
    ]
    timeline = read(tmp_path, dump(entry(frames=frames)))
    assert json.loads(timeline.text("arguments", 0) or "")["called_from"] == "/home/me/train.py:12 step"


def test_entries_of_wrong_types_are_repaired_or_left_out(tmp_path: Path) -> None:
    odd = [
        5,
        {},
        entry(profiling_name=7),
        entry(time_created_ns="now"),
        entry(input_sizes="x", output_sizes=[[1, "y", -3]], process_group=None, input_dtypes=None, frames=3),
        entry(time_discovered_completed_ns=10, time_discovered_started_ns=None, duration_ms=float("nan")),
        entry(collective_seq_id=2**80, duration_ms=-1.0),
    ]
    timeline = read(tmp_path, dump(*odd, pg_config=[1]))
    assert len(timeline) == 3
    assert timeline.repairs == {
        "entries that are no objects were left out": 1,
        "entries without a name or a time of creation were left out": 3,
        "times of start or end before the call were left out": 1,
    }
    assert timeline.text("group", 0) == "0", "the number of the group stands in for its name"


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"entries": 3}', b"\x80\x02]q\x00.", b'{"entries": []}'])
def test_what_is_no_dump_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "dump"
    path.write_bytes(content)
    with pytest.raises(BadInputError) as caught:
        flight_recorder.read(path)
    assert str(path) in (caught.value.where or "")


def test_sniffing_leaves_other_files_alone() -> None:
    assert not flight_recorder.sniff(b'{"traceEvents": [], "pg_config": 1, "entries": []}', Path("x"))
    assert not flight_recorder.sniff(pickle.dumps({"a": 1}), Path("x"))


# --- pickles -------------------------------------------------------------------------------------------------------


class Harm:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch harmed",)


class Build:
    def __init__(self) -> None:
        self.state = 1


HARMFUL = {
    "a call": pickle.dumps({"entries": [Harm()]}, protocol=2),
    "a call, newest protocol": pickle.dumps({"entries": [Harm()]}, protocol=5),
    "an object with state": pickle.dumps({"entries": [Build()]}, protocol=2),
    "a set": pickle.dumps({"entries": {1, 2}}, protocol=4),
    "old instance": b"(ios\nsystem\n.",
    "old global": b"cos\nsystem\n(S'touch harmed'\ntR.",
    "global by stack": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    "extension": b"\x80\x02\x82\x01.",
    "persistent": b"\x80\x02Nq\x00Q.",
    "buffer": b"\x80\x05\x97.",
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 60) + b".",
    "text longer than the file": b"\x80\x02X" + struct.pack("<I", 1 << 31) + b"a.",
    "huge text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"a.",
    "huge number": b"\x80\x02\x8b" + struct.pack("<i", 1 << 30) + b"a.",
    "negative number length": b"\x80\x02\x8b" + struct.pack("<i", -5) + b"a.",
    "long written number": b"L" + b"9" * 1000 + b"L\n.",
    "calls a list": b"\x80\x02]]\x85R.",
    "list of what is none": b"\x80\x02ctorch.jit._pickle\nbuild_intlist\nK\x01\x85R.",
    "stores a maker": b"\x80\x02](ctorch.jit._pickle\nbuild_intlist\ne.",
    "stores a mark": b"\x80\x02]((e.",
    "pops nothing": b"\x80\x020.",
    "no mark": b"\x80\x02]e.",
    "appends to a dict": b"\x80\x02}K\x01a.",
    "sets items of a list": b"\x80\x02](K\x01K\x02u.",
    "key without value": b"\x80\x02}(K\x01u.",
    "tuple as key": b"\x80\x02})K\x01s.",
    "recalls nothing": b"\x80\x02j" + struct.pack("<I", 1 << 31) + b".",
    "remembers nothing": b"\x80\x02q\x00.",
    "ends too early": b"\x80\x02](K\x01",
    "empty": b"\x80",
    "nothing to hand back": b"\x80\x02.",
    "mark as result": b"\x80\x02(.",
    "deep": b"\x80\x02" + b"]" * 10_000 + b"a" * 9_999 + b".",
    "deep by memory": b"\x80\x02]q\x00" + b"0]h\x00aq\x00" * 10_000 + b".",
    "deep tuples": b"\x80\x02)" + b"\x85" * 100_000 + b".",
}


@pytest.mark.parametrize("what", HARMFUL)
def test_harmful_pickles_are_refused_with_their_place(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "dump.pickle"
    path.write_bytes(HARMFUL[what] if HARMFUL[what][:1] == b"\x80" else b"\x80\x02" + HARMFUL[what])
    with pytest.raises(BadInputError) as caught:
        flight_recorder.read(path)
    assert f"{path}: byte " in (caught.value.where or "")
    assert not (tmp_path / "harmed").exists(), "the pickle was run"


@pytest.mark.parametrize(
    ("data", "most", "rule"),
    [
        (pickle.dumps(list(range(1000)), protocol=2), {"objects": 100}, "more than 100 objects"),
        (pickle.dumps([[n] for n in range(20)], protocol=2), {"remembered": 5}, "remembers more than 5"),
        (b"\x80\x02" + b"]" * 10 + b".", {"containers": 5}, "more than 5 lists"),
        (b"\x80\x02]]]]]].", {"bytes": 5}, "larger than 5 bytes"),
    ],
)
def test_bounds_hold_for_counts(data: bytes, most: dict[str, int], rule: str) -> None:
    plain_pickle.load(b"\x80\x02].", where="x", most=plain_pickle.Limits(**most))
    with pytest.raises(BadInputError, match=rule):
        plain_pickle.load(data, where="x", most=plain_pickle.Limits(**most))


def test_a_long_list_named_again_and_again_is_walked_once() -> None:
    """Looked at each time it is named, two hundred thousand numbers a hundred thousand times take hours."""
    long = b"](" + b"K\x01" * 200_000 + b"eq\x00"
    begin = time.process_time()
    found = plain_pickle.load(b"\x80\x02](" + long + b"h\x00" * 100_000 + b"e.", where="x")
    assert len(found) == 100_001
    assert found[0] is found[-1]
    assert time.process_time() - begin < 10


def test_a_memory_far_away_costs_nothing() -> None:
    """Python's own reader would make room for every number below it."""
    far = b"\x80\x02]r" + struct.pack("<I", (1 << 32) - 1) + b"0j" + struct.pack("<I", (1 << 32) - 1) + b"."
    assert plain_pickle.load(far, where="x") == []


def test_lists_that_torch_wraps_are_read() -> None:
    wrapped = b"\x80\x02ctorch.jit._pickle\nbuild_intlist\n](K\x04K\x08e\x85R."
    assert plain_pickle.load(wrapped, where="x") == [4, 8]


def test_a_list_inside_itself_ends(tmp_path: Path) -> None:
    loop = b"\x80\x02}(X\x07\x00\x00\x00entries]q\x00h\x00aX\x09\x00\x00\x00pg_config}u."
    path = tmp_path / "dump.pickle"
    path.write_bytes(loop)
    with pytest.raises(BadInputError, match="no collective"):
        flight_recorder.read(path)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=4) | st.integers(-(2**63), 2**63), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(PLAIN, st.sampled_from([0, 1, 2, 3, 4, 5]))
@settings(max_examples=150, deadline=None)
def test_plain_data_comes_back_as_it_went(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol=protocol)
    if protocol < 3 and any(op.name == "GLOBAL" for op, _, _ in pickletools.genops(data)):
        with pytest.raises(BadInputError, match="something to import"):  # bytes before protocol 3 are made by a call
            plain_pickle.load(data, where="x")
        return
    assert plain_pickle.load(data, where="x") == value


@given(st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(BadInputError):
        plain_pickle.load(b"\x80\x02" + data, where="x")


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_damaged_dumps_are_read_or_refused(data: st.DataObject) -> None:
    whole = bytearray((DATA / "flight_recorder_gloo_rank_0.pickle").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(2, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = Path(tempfile.gettempdir()) / f"damaged-{os.getpid()}.pickle"
    path.write_bytes(whole)
    try:
        with contextlib.suppress(BadInputError):
            finish(flight_recorder.read(path)[0])
    finally:
        path.unlink()


def test_nothing_is_unpickled_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("pickle was asked")

    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(pickle, "load", refuse)
    assert len(flight_recorder.read(DATA / "flight_recorder_gloo_rank_0.pickle")[0]) == 6


def recalled(inner: bytes, times: int) -> bytes:
    """The pickle of a list that holds one object again and again, two bytes a time."""
    return b"](" + inner + b"q\x00" + b"h\x00" * (times - 1) + b"e"


def with_field(name: bytes, value: bytes) -> bytes:
    field = b"\x8c" + bytes([len(name)]) + name + value
    entry = b"}(\x8c\x0eprofiling_name\x8c\x0fnccl:all_reduce\x8c\x0ftime_created_nsK\x05" + field + b"u"
    return b"\x80\x04}(\x8c\x07entries]" + entry + b"a\x8c\x09pg_config}u."


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        (b"input_sizes", recalled(b"](" + b"K\x01" * 3000 + b"e", 3000), "more than 64 dimensions|lists more than"),
        (b"output_sizes", recalled(b"](" + b"K\x01" * 65 + b"e", 2), "more than 64 dimensions"),
        (b"input_sizes", recalled(b"](" + b"K\x01" * 60 + b"e", 3000), "lists more than"),
        (b"input_dtypes", recalled(b"\x8c\x05Float", 70_000), "lists more than"),
    ],
    ids=["both", "dimensions", "sizes", "types"],
)  # fmt: skip
def test_lists_that_are_named_again_and_again_are_refused(tmp_path: Path, name: bytes, value: bytes, why: str) -> None:
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(with_field(name, value))
    with pytest.raises(BadInputError, match=why) as caught:
        flight_recorder.read(path)
    assert caught.value.where == f"{path}: entry 0"
    assert caught.value.hint


def test_all_entries_together_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "MOST_IN_FILE", 40)
    assert len(read(tmp_path, dump(*(entry() for _ in range(4))))) == 4
    with pytest.raises(BadInputError, match="lists more than 40") as caught:
        read(tmp_path, dump(*(entry() for _ in range(9))))
    assert "entry " in str(caught.value.where)


def test_members_of_a_group_are_bounded(tmp_path: Path) -> None:
    groups = {"0": {"name": "0", "desc": "", "ranks": list(range(70_000))}}
    with pytest.raises(BadInputError, match="lists more than") as caught:
        read(tmp_path, dump(entry(), pg_config=groups))
    assert "group 0" in str(caught.value.where)


def test_one_entry_named_twice_counts_once(tmp_path: Path) -> None:
    one = entry()
    timeline = read(tmp_path, dump(one, one, entry(record_id=8)))
    assert len(timeline) == 2
    assert timeline.repairs == {"entries that are another one again were left out": 1}


def test_half_a_character_is_replaced(tmp_path: Path) -> None:
    odd = entry(profiling_name="nccl:all\ud800", state="x\udc00", process_group=("0\ud800", "d"), timeout_ms=1 << 90)
    for protocol in (0, 4):
        path = tmp_path / f"nccl_trace_rank_{protocol}"
        path.write_bytes(pickle.dumps(dump(odd), protocol=protocol))
        if protocol == 0:
            assert plain_pickle.load(path.read_bytes(), where="x")["entries"][0]["state"] == "x\ufffd"
            continue
        (timeline,) = flight_recorder.read(path)
        assert timeline.text("name", 0) == "nccl:all\ufffd"
        assert timeline.text("group", 0) == "0\ufffd"
        assert '"state":"x\ufffd"' in str(timeline.text("arguments", 0))


@pytest.mark.parametrize("suffix", ["pickle", "json"])
def test_a_cut_dump_says_where_it_ends(tmp_path: Path, suffix: str) -> None:
    whole = (DATA / f"flight_recorder_gloo_rank_0.{suffix}").read_bytes()
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadInputError) as caught:
        flight_recorder.read(path)
    assert caught.value.where == f"{path}: byte {len(whole) // 2}"
    assert "copy the file again" in str(caught.value.hint)
    path.write_bytes(gzip.compress(whole)[:-40])
    with pytest.raises(BadInputError) as caught:
        flight_recorder.read(path)
    assert "ends before its end marker" in f"{caught.value} {caught.value.where}"
    path.write_bytes(gzip.compress(whole)[:-4])
    assert any("ends too early" in what for what in flight_recorder.read(path)[0].repairs)
