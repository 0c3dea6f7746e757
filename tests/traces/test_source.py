"""Bytes of a file: bounded, told when they were cut, and never from what is no file."""

from __future__ import annotations

import gzip
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from stepscope.core.errors import BadInputError
from stepscope.formats.source import Source, is_packed, open_bytes, read_bounded, read_head
from stepscope.traces.read import read_traces

CONTENT = random.Random(1).randbytes(3 << 20)
Pack = Callable[[bytes], bytes]


def packers() -> list[Pack]:
    zstandard = pytest.importorskip("zstandard")
    return [gzip.compress, zstandard.ZstdCompressor().compress]


@pytest.mark.parametrize("which", [0, 1])
def test_a_cut_packed_file_gives_what_it_holds_and_says_so(tmp_path: Path, which: int) -> None:
    path = tmp_path / "packed"
    packed = packers()[which](CONTENT)
    path.write_bytes(packed)
    assert read_bounded(path) == (CONTENT, None)
    path.write_bytes(packed[: len(packed) // 2])
    data, cut_short = read_bounded(path)
    assert cut_short == "the packed file ends before its end marker"
    assert len(data) > len(CONTENT) // 3
    assert CONTENT.startswith(data)
    source = Source(path)
    assert b"".join(source.pieces(1000)) == data
    assert source.cut_short == cut_short


@pytest.mark.parametrize("which", [0, 1])
def test_packed_parts_one_after_the_other_are_one_file(tmp_path: Path, which: int) -> None:
    pack = packers()[which]
    path = tmp_path / "parts"
    path.write_bytes(pack(b"one, ") + pack(b"two") + b"rubbish")
    assert read_bounded(path) == (b"one, two", None)
    assert read_head(path, 3) == b"one"
    assert is_packed(path)


def test_parts_of_zstd_without_content_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "parts.zst"
    pack = packers()[1]
    path.write_bytes(pack(b"one, ") + b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" + pack(b"two"))
    assert read_bounded(path) == (b"one, two", None)


@pytest.mark.parametrize("which", [0, 1])
def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path: Path, which: int) -> None:
    path = tmp_path / "large.gz"
    path.write_bytes(packers()[which](bytes(64 << 20)))
    with pytest.raises(BadInputError, match="more than 16") as caught:
        read_bounded(path, 16 << 20)
    assert caught.value.where == str(path)
    assert caught.value.hint


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "nothing"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = {"device": Path("/dev/zero"), "folder": tmp_path}.get(kind, tmp_path / "trace.json")
    if kind == "pipe":
        os.mkfifo(path)
    for look in (open_bytes, read_head, is_packed, read_bounded):
        with pytest.raises(BadInputError) as caught:
            look(path)
        assert caught.value.where == str(path)
        assert caught.value.hint
    if kind == "pipe":
        with pytest.raises(BadInputError, match="is a pipe"):
            read_traces(path)
