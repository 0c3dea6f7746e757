"""Thousands of damaged traces: each is read with its repairs counted, or refused with file, place and next step."""

from __future__ import annotations

import gzip
import runpy
import time
from pathlib import Path

import pytest
from damage import DAMAGES, variants
from same_rows import rows_of

from stepscope.core.errors import BadInputError
from stepscope.formats.readers.kineto.scanner import scan_kineto
from stepscope.formats.readers.kineto.tolerant import read_kineto
from stepscope.formats.source import describe_damage
from stepscope.formats.timeline import Timeline
from stepscope.traces.finish import finish

DATA = Path(__file__).parent / "data"
WHOLE = gzip.decompress((DATA / "event_sync_multi_stream.json.gz").read_bytes())


def small_trace() -> bytes:
    """Head, some 30 events of all kinds, tail."""
    begin = WHOLE.index(b'"traceEvents"')
    records = WHOLE[begin:].split(b"\n  {\n")
    return WHOLE[:begin] + b"\n  {\n".join(records[:12] + records[40:70] + records[-4:])


def read_both(path: Path) -> tuple[Timeline | None, Timeline | None]:
    results: list[Timeline | None] = []
    for reader in (read_kineto, scan_kineto):
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


def compare(tolerant: Timeline, compiled: Timeline) -> None:
    """Alike to the last value and the last repair."""
    assert rows_of(compiled) == rows_of(tolerant)
    assert dict(compiled.repairs) == dict(tolerant.repairs)


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_traces_are_repaired_or_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    read = 0
    for text in variants(small_trace(), name):
        path.write_bytes(text)
        tolerant, compiled = read_both(path)
        assert (tolerant is None) == (compiled is None), f"{path}: one reader refuses what the other reads"
        if tolerant is not None and compiled is not None:
            compare(tolerant, compiled)
            read += 1
    assert read > DAMAGES[name][1] * 0.3


def test_a_sound_trace_needs_no_repair(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(small_trace())
    tolerant, compiled = read_both(path)
    assert tolerant is not None
    assert compiled is not None
    assert not tolerant.repairs
    assert len(tolerant) > 20


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
    assert rows_of(scan_kineto(path)) == rows_of(timeline)


HOSTILE = {
    "a name without an end": b'{"ph":"X","name":"' + b"x" * 3_000_000,
    "a name": b'{"ph":"X","name":"' + b"x" * 3_000_000 + b'"}',
    "lists": b'{"ph":"X","a":' + b"[" * 2_000_000,
    "records in records": b'{"ph":' * 400_000,
    "records in records, closed": (b'{"ph":' * 500 + b"}" * 500 + b",") * 500,
    "lines that begin records": b"\n{" * 1_000_000,
    "empty lines": b"\n" * 3_000_000,
    "records without an end": b'{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":1,"dur":1,' * 40_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_takes_time_in_proportion_to_its_size(name: str, tmp_path: Path) -> None:
    """At most 20 times what the tolerant parser takes for a sound trace of that size, 0.05 s a megabyte, and 1 s."""
    sound = b'{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":1,"dur":1}'
    path = tmp_path / "t.json"
    path.write_bytes(b'{"traceEvents": [' + sound + b",\n" + HOSTILE[name] + b",\n" + sound + b"]}")
    begun = time.process_time()
    tolerant, compiled = read_both(path)
    assert time.process_time() - begun < 2 * (20 * 0.05 * path.stat().st_size / 1e6 + 1)
    assert tolerant is not None
    assert compiled is not None
    compare(tolerant, compiled)


def test_fuzzing_breaks_no_rule(tmp_path: Path) -> None:
    """The same as `benchmarks/trace_fuzz.py`, a few files of each kind."""
    fuzz = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "trace_fuzz.py"))["fuzz"]
    worst, failures = fuzz(WHOLE, seconds=0, seed=3, folder=tmp_path, rounds=6)
    assert not failures
    assert worst["files"] >= 50


def test_a_wrong_checksum_is_told(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(WHOLE))
    packed[-6] ^= 1
    path = tmp_path / "trace.json.gz"
    path.write_bytes(packed)
    timeline = read_kineto(path)
    assert "ends too early" in str(describe_damage(timeline.repairs))
    assert describe_damage(read_kineto(DATA / "event_sync_multi_stream.json.gz").repairs) is None
