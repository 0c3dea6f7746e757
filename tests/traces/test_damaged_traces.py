"""Thousands of damaged traces: each is read with its repairs counted, or refused with file, place and next step."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from damage import DAMAGES, variants
from same_rows import rows_of

from stepscope.errors import BadInputError
from stepscope.traces.finish import finish
from stepscope.traces.kineto.careful import read_kineto
from stepscope.traces.kineto.fast import read_kineto_fast
from stepscope.traces.timeline import Timeline

DATA = Path(__file__).parent / "data"
WHOLE = gzip.decompress((DATA / "event_sync_multi_stream.json.gz").read_bytes())


def small_trace() -> bytes:
    """Head, some 30 events of all kinds, tail."""
    begin = WHOLE.index(b'"traceEvents"')
    records = WHOLE[begin:].split(b"\n  {\n")
    return WHOLE[:begin] + b"\n  {\n".join(records[:12] + records[40:70] + records[-4:])


def read_both(path: Path) -> tuple[Timeline | None, Timeline | None]:
    results: list[Timeline | None] = []
    for reader in (read_kineto, read_kineto_fast):
        try:
            timeline = reader(path)
        except BadInputError as error:
            told = str(path) in (error.where or "") and bool(error.hint)
            if not told:
                raise
            results.append(None)
            continue
        finish(timeline)
        assert (timeline.core["end_ns"] >= timeline.core["start_ns"]).all()
        assert all(count > 0 for count in timeline.repairs.values())
        results.append(timeline)
    return results[0], results[1]


def compare(careful: Timeline, fast: Timeline) -> None:
    """Alike to the last value and the last repair."""
    assert rows_of(fast) == rows_of(careful)
    assert dict(fast.repairs) == dict(careful.repairs)


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_traces_are_mended_or_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    read = 0
    for text in variants(small_trace(), name):
        path.write_bytes(text)
        careful, fast = read_both(path)
        assert (careful is None) == (fast is None), f"{path}: one reader refuses what the other reads"
        if careful is not None and fast is not None:
            compare(careful, fast)
            read += 1
    assert read > DAMAGES[name][1] * 0.3


def test_a_sound_trace_needs_no_repair(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(small_trace())
    careful, fast = read_both(path)
    assert careful is not None
    assert fast is not None
    assert not careful.repairs
    assert len(careful) > 20


def test_every_event_before_a_cut_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    text = small_trace()
    path.write_bytes(text)
    whole = len(read_kineto(path))
    second = text.rindex(b"\n  },", 0, text.rindex(b"\n  },"))
    path.write_bytes(text[: second + 8])
    timeline = read_kineto(path)
    assert whole - 3 <= len(timeline) < whole
    assert any("ends too early" in what for what in timeline.repairs)


def test_a_packed_file_that_was_cut_gives_what_it_holds(tmp_path: Path) -> None:
    packed = (DATA / "event_sync_multi_stream.json.gz").read_bytes()
    whole = len(read_kineto(DATA / "event_sync_multi_stream.json.gz"))
    path = tmp_path / "trace.json.gz"
    path.write_bytes(packed[: len(packed) * 3 // 4])
    timeline = read_kineto(path)
    assert 0 < len(timeline) < whole
    assert any("ends too early" in what for what in timeline.repairs)
    assert rows_of(read_kineto_fast(path)) == rows_of(timeline)
