"""Memory timelines of torch.profiler (real ones) and CUDA memory snapshots (after the documented schema)."""

from __future__ import annotations

import gzip
import json
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepscope.analyze.memory_use import MemoryUse, memory_use
from stepscope.core.errors import BadInputError
from stepscope.formats import memory as snapshot
from stepscope.formats.memory import BEFORE, looks_like_memory, read_memory
from stepscope.formats.source import read_head
from stepscope.traces.read import read_timeline, read_traces

DATA = Path(__file__).parent / "data" / "memory"
MIB = 1 << 20


def use_of(path: Path) -> list[MemoryUse]:
    head = read_head(path)
    assert looks_like_memory(head, path)
    return [memory_use(history) for history in read_memory(path, head)]


# --- torch.profiler ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["memory_timeline.json.gz", "memory_timeline.raw.json.gz", "memory_timeline.json"])
def test_real_timelines(tmp_path: Path, name: str) -> None:
    """Four training steps of two linear layers (256 → 1024 → 256) with Adam, torch 2.13 on a CPU."""
    path = DATA / name
    if name.endswith("timeline.json"):
        path = tmp_path / name
        path.write_bytes(gzip.decompress((DATA / f"{name}.gz").read_bytes()))
    (found,) = use_of(path)
    parameters = 4 * (256 * 1024 + 1024 + 1024 * 256 + 256)
    held = {one.owner: one.bytes for one in found.at_peak}
    assert held["parameter"] == parameters == found.start_bytes
    assert held["optimizer state"] == 2 * parameters + 16
    assert sum(held.values()) == found.peak_bytes
    assert found.end_bytes == 3 * parameters + 16
    assert found.growth is not None
    assert (len(found.growth.steps), found.growth.bytes_per_step, found.growth.grows) == (4, 0.0, False)
    assert 0 < (found.peak_time_s or 0) < (found.duration_s or 0) < 10


def test_both_forms_agree() -> None:
    (coarse,), (raw,) = (use_of(DATA / name) for name in ("memory_timeline.json.gz", "memory_timeline.raw.json.gz"))
    assert coarse.peak_bytes == raw.peak_bytes
    assert coarse.peak_time_s == pytest.approx(raw.peak_time_s, abs=2e-6)
    assert [(one.owner, one.bytes) for one in coarse.at_peak] == [(one.owner, one.bytes) for one in raw.at_peak]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("[[], []]", "no memory event"),
        ("[[1, 2], [[0, 1, 0, 0, 0, 0, 0, 0, 0]]]", "different lengths"),
        ("[[1], [[0, 1]]]", "different lengths"),
        ("[[1, 2, 3, 4], [1, 2, 3]]", "no memory event"),
        ("[[1, 9, 3, 4]]", "an action beyond"),
        ("[[1, 2, 3, 8]]", "an action beyond"),
        ("[[1, 2, 9223372036854775807, 1], [1, 2, 9223372036854775807, 1]]", "no device has"),
        ("[[1, 2, 99999999999999999999, 1]]", "memory timeline|64 bits"),
        ("[[1], [[0, 4611686018427387904, 0, 0, 0, 0, 0, 0, 0]]]", "no device has"),
        ("[[1, 2], [[0, 1, 0, 0, 0,", "no whole memory timeline"),
        ('[[1, 2, 3, 4], ["a"]]', "no whole memory timeline"),
        ("<html>\n<head><title>GPU Memory Timeline HTML</title></head><img></html>", "a picture"),
    ],
)
def test_wrong_timelines_are_refused(tmp_path: Path, text: str, rule: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(BadInputError, match=rule) as caught:
        read_memory(path, text.encode())
    assert str(path) in (caught.value.where or "")
    assert caught.value.hint


# --- snapshots -----------------------------------------------------------------------------------------------------


class Device:
    """An allocator with one segment per block, and what it would write into a snapshot."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.segments: dict[int, dict[str, Any]] = {}
        self.time_us = 10**15
        self.held: list[int] = [0]

    def frames(self, line: int) -> list[dict[str, Any]]:
        return [
            {"filename": "??", "line": 0, "name": "at::empty"},
            {"filename": "/x/site-packages/torch/nn/linear.py", "line": 7, "name": "forward"},
            {"filename": "/home/me/train.py", "line": line, "name": "step"},
        ]

    def note(self, action: str, address: int | None, size: int, line: int = 1, **more: Any) -> None:
        self.time_us += 10
        place = {} if address is None else {"addr": address}
        self.events.append(
            {"action": action, **place, "size": size, "stream": 0, "time_us": self.time_us, "frames": self.frames(line)}
            | more
        )

    def allocate(self, address: int, size: int, line: int = 1, *, recorded: bool = True) -> None:
        rounded = -(-size // 512) * 512
        block = {
            "address": address, "size": rounded, "requested_size": size, "state": "active_allocated",
            "frames": self.frames(line) if recorded else [],
        }  # fmt: skip
        segment = self.segments.get(address)
        if segment is None:
            segment = {"device": 0, "address": address, "total_size": 2 * rounded, "stream": 0, "segment_type": "large"}
            self.segments[address] = segment
            if recorded:
                self.note("segment_alloc", address, 2 * rounded)
        inactive = {"address": address + rounded, "size": segment["total_size"] - rounded, "state": "inactive"}
        segment["blocks"] = [block, inactive]
        if recorded:
            self.note("alloc", address, size, line)
            self.held.append(self.held[-1] + size)

    def free(self, address: int, *, completed: bool = True) -> None:
        block = self.segments[address]["blocks"][0]
        self.note("free_requested", address, block["requested_size"])
        block["state"] = "active_awaiting_free"
        self.held.append(self.held[-1] - block["requested_size"])
        if completed:
            self.note("free_completed", address, block["requested_size"])
            block["state"] = "inactive"

    def write(self, path: Path, protocol: int = 4, **more: Any) -> Path:
        content = {"segments": list(self.segments.values()), "device_traces": [self.events, []]} | more
        path.write_bytes(pickle.dumps(content, protocol=protocol))
        return path


def train(device: Device, steps: int, *, leak: int = 0, layers: int = 5) -> None:
    device.allocate(1 << 40, 4 * MIB, line=10)
    for step in range(steps):
        for layer in range(layers):
            device.allocate((2 << 40) + layer * (64 << 20), (layer + 1) * MIB + 1, line=20 + layer)
        if leak:
            device.allocate((3 << 40) + step * (64 << 20), leak, line=99)
        for layer in range(layers):
            device.free((2 << 40) + layer * (64 << 20))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("leak", [0, MIB])
def test_a_snapshot_of_training(tmp_path: Path, leak: int, protocol: int) -> None:
    device = Device()
    train(device, 6, leak=leak)
    (found,) = use_of(device.write(tmp_path / "s.pickle", protocol))
    assert found.peak_bytes == max(device.held)
    assert found.end_bytes == device.held[-1] == 4 * MIB + 6 * leak
    assert sum(one.bytes for one in found.at_peak) == found.peak_bytes
    held = {one.owner: (one.bytes, one.blocks) for one in found.at_peak}
    assert held["/home/me/train.py:24 step"] == (5 * MIB + 1, 1)
    assert found.at_peak[0].stack[0] == "at::empty"
    growth = found.growth
    assert growth is not None
    assert (growth.grows, growth.bytes_per_step, len(growth.steps)) == (leak > 0, leak, 6)
    if leak:
        assert [(one.owner, one.bytes) for one in growth.by_owner] == [("/home/me/train.py:99 step", 5 * leak)]
    state = found.fragmentation
    assert state is not None
    reserved = sum(segment["total_size"] for segment in device.segments.values())
    assert state.reserved_bytes == found.peak_reserved_bytes == reserved
    assert state.allocated_bytes == 4 * MIB + 6 * leak
    assert state.free_segments_bytes + state.free_in_used_segments_bytes == reserved - state.allocated_bytes
    assert state.free_in_used_segments_bytes == 4 * MIB + 6 * leak


@pytest.mark.parametrize(
    ("name", "peak", "end", "reserved", "stuck"),
    [("h200_leak", 90718216, 83901440, 106954752, 18859008), ("h200_plain", 86523912, 78658560, 102760448, 19907584)],
)
def test_real_snapshots_give_the_allocators_own_figures(
    name: str, peak: int, end: int, reserved: int, stuck: int
) -> None:
    """Training steps of two linear layers with Adam on an NVIDIA H200 (torch 2.11, CUDA 13.0), against what
    `torch.cuda.memory_stats` said there: requested bytes at the peak and at the end, reserved, inactive split."""
    (found,) = use_of(DATA / f"{name}.pickle")
    assert (found.peak_bytes, found.end_bytes) == (peak, end)
    assert found.fragmentation is not None
    assert (found.fragmentation.reserved_bytes, found.fragmentation.free_in_used_segments_bytes) == (reserved, stuck)
    if name == "h200_plain":
        assert found.growth is not None
        assert (found.growth.found_by, found.growth.grows) == ("annotations of the profiler's steps", False)


def test_what_was_there_before_the_history_counts(tmp_path: Path) -> None:
    device = Device()
    device.allocate(1 << 30, 3 * MIB, recorded=False)  # stays
    device.allocate(2 << 30, 5 * MIB, recorded=False)  # goes
    device.free(2 << 30)
    device.allocate(3 << 30, MIB, line=4)
    (found,) = use_of(device.write(tmp_path / "s.pickle"))
    assert (found.start_bytes, found.peak_bytes, found.end_bytes) == (8 * MIB, 8 * MIB, 4 * MIB)
    assert found.at_peak[0].owner == BEFORE
    assert found.growth is None


def test_releases_that_wait_for_a_stream(tmp_path: Path) -> None:
    device = Device()
    device.allocate(1 << 30, MIB)
    device.free(1 << 30, completed=False)
    (found,) = use_of(device.write(tmp_path / "s.pickle"))
    assert found.end_bytes == 0
    assert found.fragmentation is not None
    assert found.fragmentation.awaiting_free_bytes == MIB
    # Other writers note only the end of a release.
    device.events = [event for event in device.events if event["action"] != "free_requested"]
    device.note("free_completed", 1 << 30, MIB)
    assert use_of(device.write(tmp_path / "s.pickle"))[0].end_bytes == 0


def test_a_failed_allocation_is_told(tmp_path: Path) -> None:
    device = Device()
    device.allocate(1 << 30, 7 * MIB)
    device.note("oom", None, 1 << 40, line=55, device_free=123)
    (found,) = use_of(device.write(tmp_path / "s.pickle"))
    (failure,) = found.out_of_memory
    assert (failure.requested_bytes, failure.device_free_bytes, failure.allocated_bytes) == (1 << 40, 123, 7 * MIB)
    assert failure.owner == "/home/me/train.py:55 step"
    assert failure.reserved_bytes == 14 * MIB


def test_annotated_steps_come_before_guesses(tmp_path: Path) -> None:
    device = Device()
    marks = []
    for step in range(4):
        device.time_us += 5
        marks.append({"name": f"ProfilerStep#{step}", "stage": "START", "device": 0, "time_us": device.time_us})
        device.allocate((3 << 40) + step * (64 << 20), MIB + step)
        device.time_us += 5
        marks.append({"name": f"ProfilerStep#{step}", "stage": "END", "device": 0, "time_us": device.time_us})
    (found,) = use_of(device.write(tmp_path / "s.pickle", external_annotations=marks))
    assert found.growth is not None
    assert [step.step for step in found.growth.steps] == [0, 1, 2, 3]
    assert found.growth.grows
    assert found.growth.found_by.startswith("annotations")


def test_only_a_state_and_old_forms(tmp_path: Path) -> None:
    device = Device()
    device.allocate(1 << 30, MIB, recorded=False)
    segments = list(device.segments.values())
    for content in ({"segments": segments, "device_traces": []}, segments):
        path = tmp_path / "s.pickle"
        path.write_bytes(pickle.dumps(content))
        (found,) = use_of(path)
        assert (found.peak_bytes, found.peak_time_s, found.events) == (MIB, None, 0)
        assert any("no history" in note for note in found.notes)
    del segments[0]["blocks"][0]["frames"]
    segments[0]["blocks"][0]["history"] = [{"frames": device.frames(8), "real_size": MIB}]
    path.write_bytes(pickle.dumps(segments))
    assert use_of(path)[0].at_peak[0].owner == "/home/me/train.py:8 step"


def test_random_histories_against_a_plain_replay(tmp_path: Path) -> None:
    for seed in range(20):
        generator, device = random.Random(seed), Device()
        for address in range(3):
            device.allocate(address << 30, generator.randrange(1, MIB), recorded=False)
        before = sum(segment["blocks"][0]["requested_size"] for segment in device.segments.values())
        live = list(device.segments)
        for _ in range(generator.randrange(1, 200)):
            if live and generator.random() < 0.5:
                device.free(live.pop(generator.randrange(len(live))), completed=generator.random() < 0.9)
            else:
                free = [address << 30 for address in range(3, 40) if address << 30 not in live]
                address = generator.choice(free)
                device.allocate(address, device.segments[address]["blocks"][0]["requested_size"]
                                if address in device.segments else generator.randrange(1, MIB))  # fmt: skip
                live.append(address)
        (found,) = use_of(device.write(tmp_path / "s.pickle"))
        assert found.start_bytes == before
        assert found.peak_bytes == before + max(device.held)
        assert found.end_bytes == before + device.held[-1]
        assert sum(one.bytes for one in found.at_peak) == found.peak_bytes


def test_odd_values_are_left_out_and_counted(tmp_path: Path) -> None:
    device = Device()
    train(device, 3)
    odd: list[Any] = [None, 7, {}, {"action": "alloc"}, {"action": "alloc", "addr": "x", "size": -4}, {"action": []}]
    odd += [{"action": "user_defined", "addr": 0, "size": 0}, {"action": "snapshot", "addr": 0, "size": 0}]
    device.events += odd
    device.events[0]["time_us"] = 1 << 60
    (found,) = use_of(device.write(tmp_path / "s.pickle", external_annotations=[None, {"name": 4}, {"stage": "END"}]))
    assert found.peak_bytes == max(device.held)
    assert found.duration_s is None  # one time is none: the order is left
    assert "events without an action or a size were left out (6)" in found.notes


def test_one_list_named_many_times_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MOST_ENTRIES", 1000)
    device = Device()
    train(device, 3)
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [device.events] * 50}))
    with pytest.raises(BadInputError, match="more than 1000 events"):
        use_of(path)
    huge = [{"device": 0, "total_size": 1, "blocks": []}]
    taken = {"action": "alloc", "addr": 1, "size": (1 << 61) + 1, "frames": []}
    path.write_bytes(pickle.dumps({"segments": huge, "device_traces": [[taken, {**taken, "addr": 2}]]}))
    with pytest.raises(BadInputError, match="no device has"):
        use_of(path)


class Harm:
    def __reduce__(self) -> Any:
        return print, ("harmed",)


@pytest.mark.parametrize("content", [{"segments": [Harm()], "segment_type": 1}, {"segment_type": 3}, ["segment_type"]])
def test_what_is_no_snapshot_is_refused(tmp_path: Path, content: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(content))
    with pytest.raises(BadInputError):
        use_of(path)
    assert "harmed" not in capsys.readouterr().out


def test_damaged_snapshots(tmp_path: Path) -> None:
    device = Device()
    train(device, 4)
    path = device.write(tmp_path / "s.pickle")
    whole = path.read_bytes()
    generator = np.random.default_rng(5)
    refused = []
    for number in range(300):
        data = bytearray(whole)
        if number % 3:
            data[int(generator.integers(len(data)))] ^= 1 << int(generator.integers(8))
        else:
            del data[int(generator.integers(len(data))) :]
        path.write_bytes(data)
        try:
            read_memory(path, b"\x80segment_type")
        except BadInputError as error:
            refused.append(error.where or "")
    assert len(refused) > 100
    assert all(str(path) in where for where in refused)


def test_other_verbs_say_what_it_is(tmp_path: Path) -> None:
    device = Device()
    train(device, 3)
    path = device.write(tmp_path / "s.pickle")
    for one in (path, DATA / "memory_timeline.json.gz"):
        with pytest.raises(BadInputError, match="what memory held") as caught:
            read_timeline(one)
        assert "trace summary" in (caught.value.hint or "")
        with pytest.raises(BadInputError, match="what memory held"):
            read_traces(one)


def test_json_of_a_picture_page_is_not_taken_for_numbers(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps([[{"ph": "X"}]]))
    assert not looks_like_memory(read_head(path), path)
