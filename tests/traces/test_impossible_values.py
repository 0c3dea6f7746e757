"""Numbers that no machine has, flipped bits in the cache, and a cut file: told, never a crash or a wrong value."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from same_rows import rows_of

from stepscope.cli.trace import command
from stepscope.formats.source import cache_folders
from stepscope.formats.timeline import OPERATOR, TimelineBuilder
from stepscope.traces.finish import MOST_DEVICES, MOST_STREAMS, MOST_THREADS
from stepscope.traces.read import load_timeline, read_timeline

DATA = Path(__file__).parent / "data" / "event_sync_multi_stream.json.gz"


def launched(number: int, **arguments: Any) -> list[dict[str, Any]]:
    """A launch call and its kernel."""
    common = {"correlation": number + 1}
    call = {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernel",
        "pid": 1,
        "tid": 1,
        "ts": 10 * number,
        "dur": 1,
    }
    kernel = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 10 * number + 3, "dur": 3}
    return [call | {"args": common}, kernel | {"args": {"device": 0, "stream": 7} | common | arguments}]


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"traceEvents": events}))
    return path


@pytest.mark.parametrize("value", [2**31 - 1, 2**31, 2**62, 2**63 - 1, 2**63, -5, 10**30])
@pytest.mark.parametrize("key", ["device", "stream", "correlation", "External id"])
def test_a_summary_of_impossible_numbers(key: str, value: int, tmp_path: Path) -> None:
    events = [event for number in range(4) for event in launched(number, **{key: value})]
    path = write(tmp_path / "t.json", events)
    result = CliRunner().invoke(command, ["summary", "--no-cache", str(path)], catch_exceptions=False)
    assert result.exit_code == 0
    if key == "device":
        told = any("device numbers" in what or "64 bits" in what for what in read_timeline(path).repairs)
        assert told == (value != 2**31 - 1)


@pytest.mark.parametrize(("key", "most"), [("device", MOST_DEVICES), ("stream", MOST_STREAMS)])
def test_devices_and_streams_beyond_any_machine_are_unknown(key: str, most: int, tmp_path: Path) -> None:
    def unknown(count: int) -> int:
        events = [event for number in range(count) for event in launched(number, **{key: number})]
        timeline = read_timeline(write(tmp_path / "t.json", events))
        counted = sum(count for what, count in timeline.repairs.items() if f"on a {key}" in what)
        assert counted == int((timeline.core[key][1::2] == -1).sum())
        return counted

    assert unknown(most) == 0
    assert unknown(most + 3) == 3


def test_threads_beyond_any_machine_are_unknown(tmp_path: Path) -> None:
    """Those with most events stay; reading and the summary take time in proportion to the file."""
    count = MOST_THREADS + 5
    threads = [*range(count), *range(count - 3)]
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": thread, "ts": 10 * place, "dur": 5}
        for place, thread in enumerate(threads)
    ]
    timeline = read_timeline(write(tmp_path / "t.json", events))
    assert timeline.repairs["events on a thread beyond the 4,096 with most events: their thread is unknown"] == 7
    unknown = [threads[row] for row in range(len(threads)) if timeline.core["thread"][row] == -1]
    assert {count - 1, count - 2, count - 3} < set(unknown)


def test_steps_of_any_number(tmp_path: Path) -> None:
    """Memory goes with the number of steps, not with their numbers."""
    marks = [
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": f"ProfilerStep#{step}",
            "pid": 1,
            "tid": 1,
            "ts": 10 * place,
            "dur": 9,
        }
        for place, step in enumerate((1, 999_999_999))
    ]
    path = write(tmp_path / "t.json", [*marks, *launched(0), *launched(1)])
    result = CliRunner().invoke(command, ["summary", "--no-cache", str(path)], catch_exceptions=False)
    assert result.exit_code == 0


def test_flipped_bits_of_the_cache_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_TRACE_CACHE", str(tmp_path))
    sound = load_timeline(DATA)
    (folder,) = cache_folders(DATA)
    files = {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
    dice = random.Random(4)
    for name in [*files, *["key.json"] * 30] * 2:
        for other, content in files.items():
            (folder / other).write_bytes(content)
        changed = bytearray(files[name])
        changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
        (folder / name).write_bytes(changed)
        found = load_timeline(DATA)
        assert rows_of(found) == rows_of(sound), name
        assert (found.steps, dict(found.repairs), found.rank) == (sound.steps, dict(sound.repairs), sound.rank), name


def test_a_cut_trace_says_so_first(tmp_path: Path) -> None:
    text = gzip.decompress(DATA.read_bytes())
    path = tmp_path / "cut.json"
    path.write_bytes(text[: len(text) * 2 // 3])
    said = CliRunner().invoke(command, ["summary", "--no-cache", str(path)], catch_exceptions=False).output
    assert said.startswith("! Incomplete trace: the file is damaged or ends too early")
    shown = CliRunner().invoke(command, ["summary", "--no-cache", "--json", str(path)], catch_exceptions=False).output
    data = json.loads(shown)["data"]
    assert next(iter(data)) == "damage"
    assert "ends too early" in data["damage"]
    page = tmp_path / "page.html"
    CliRunner().invoke(command, ["report", "--no-cache", str(path), "-o", str(page)], catch_exceptions=False)
    html = page.read_text()
    assert html.index("Incomplete trace") < html.index('class="lead"')
    sound = CliRunner().invoke(command, ["summary", "--no-cache", "--json", str(DATA)], catch_exceptions=False).output
    assert json.loads(sound)["data"]["damage"] is None


def test_a_builder_repairs_times_that_cannot_be() -> None:
    """So that no reader has to: a reader of one's own hands over what its file says."""
    builder = TimelineBuilder()
    builder.add(OPERATOR, "backwards", 100, 40)
    builder.add(OPERATOR, "never", 99999999999999999999, 99999999999999999999)
    builder.add(OPERATOR, "fine", -5, 7)
    core = builder.build(rank=0, metadata={}).core
    assert core["start_ns"].tolist() == [100, 0, -5]
    assert core["end_ns"].tolist() == [100, 0, 7]
    assert builder.repairs == {
        "events that end before they start were read as instants": 1,
        "events with an impossible time were put at zero": 1,
    }
