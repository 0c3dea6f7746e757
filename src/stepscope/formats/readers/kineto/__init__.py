"""Chrome traces as Kineto writes them: a tolerant parser, a compiled scanner, and files of several ranks.

Files of several ranks are those that `write_chrome` wrote.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Generator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import msgspec

from stepscope.core.errors import BadInputError
from stepscope.formats.machine_code import is_made
from stepscope.formats.readers import TraceFormat
from stepscope.formats.readers.kineto.scanner import scan_kineto
from stepscope.formats.readers.kineto.text import UNREADABLE, read_records
from stepscope.formats.readers.kineto.tolerant import Event, EventReader, read_kineto
from stepscope.formats.source import Source, cache_folders, is_packed, rank_in_name
from stepscope.formats.timeline import Timeline

SCAN_FROM_BYTES = 2 << 20
"""Raw size from which the compiled scanner is used; below, the tolerant parser is done sooner."""
COMPILED_FROM_BYTES = 24 << 20
"""Raw size from which it is compiled where this machine has not done so yet."""
_PACKED_RATIO = 10
_SURELY_FITS = 256 << 20
_TABLE_SHARE = 0.3
"""Bytes of columns for a byte of text, as measured on traces with shapes."""
_HEAD_BYTES = 1 << 18
_DISTRIBUTED = re.compile(rb'"distributedInfo"\s*:\s*\{')


def sniff(head: bytes, path: Path) -> bool:
    """Whether the file may be a Chrome trace."""
    start = head.lstrip()[:1]
    return b'"traceEvents"' in head or (start == b"[" and b'"ph"' in head) or b'"schemaVersion"' in head


def read(path: Path) -> list[Timeline]:
    """One unfinished timeline (see `finish`), by the parser that is done sooner."""
    raw = path.stat().st_size * (_PACKED_RATIO if is_packed(path) else 1)
    if raw >= SCAN_FROM_BYTES and find_spec("numba") is not None and (raw >= COMPILED_FROM_BYTES or is_made("scan")):
        return [scan_kineto(path, folder=_folder_for(path, raw))]
    return [read_kineto(path)]


def _folder_for(path: Path, raw_bytes: int) -> Path | None:
    """A folder for nameless files where the columns would fill half of the free memory; usually None."""
    if raw_bytes < _SURELY_FITS:
        return None
    import psutil

    if raw_bytes * _TABLE_SHARE <= psutil.virtual_memory().available / 2:
        return None
    # Beside the cache: the temporary folder is in memory on many machines.
    for folder in cache_folders(path):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder.parent, os.W_OK):
            return folder.parent
    return Path(tempfile.gettempdir())


def find_rank(path: Path, head: bytes) -> int | None:
    """From what stands before the events (or, of a file that is not packed, after them), else from the name."""
    rank = _rank_in(head)
    if rank is None and not is_packed(path):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _HEAD_BYTES))
            rank = _rank_in(file.read())
    return rank if rank is not None else rank_in_name(path)


def _rank_in(text: bytes) -> int | None:
    found = _DISTRIBUTED.search(text)
    if found is None:
        return None
    begin = found.end() - 1
    try:
        described = msgspec.json.decode(text[begin : read_records(text, begin).end])
    except UNREADABLE:
        return None
    rank = described.get("rank") if isinstance(described, dict) else None
    return rank if isinstance(rank, int) else None


MARK = re.compile(rb'"stepscope"\s*:\s*\{"version"')
"""Stands before the events of a file that this project wrote."""
_RANK = re.compile(rb'\{"rank"\s*:\s*(?:-?\d+|null)\s*,\s*"processes"')


class _Owner(msgspec.Struct, frozen=True):
    """Whose events a process number of the file has, and what that process was called in the trace of its rank."""

    place: int
    process: int | str


class _Described(msgspec.Struct):
    """A rank in the header of the file."""

    rank: int | None
    processes: list[tuple[int | str, str]]
    devices: list[tuple[int | str, int]]
    distributedInfo: dict[str, Any] = {}  # noqa: N815


class _Router(EventReader):
    """Reads all events and hands each to the reader of its rank; added overlays belong to no rank."""

    def __init__(self, path: Path, ranks: list[_Described]) -> None:
        super().__init__(path)
        self.readers = [EventReader(path) for _ in ranks]
        self._owners: dict[int | str | float | None, _Owner] = {}
        for place, rank in enumerate(ranks):
            for number, process in rank.processes:
                self._owners[number] = _Owner(place, process)
            for number, device in rank.devices:
                self._owners[number] = _Owner(place, device if device >= 0 else str(number))

    def add(self, event: Event) -> None:
        owner = self._owners.get(event.pid)
        if owner is not None:
            event.pid = owner.process
            self.readers[owner.place].add(event)


def _is_merged(head: bytes, path: Path) -> bool:
    """Whether `write_chrome` wrote it, with more than one rank in it."""
    return bool(MARK.search(head)) and len(_RANK.findall(head)) > 1


def _read_merged(path: Path) -> list[Timeline]:
    """Taken apart: one unfinished timeline per rank, in the order in which they were written."""
    ranks = _read_ranks(path)
    router = _Router(path, ranks)
    text = router.read()
    whole = text.header
    timelines = []
    for rank, reader in zip(ranks, router.readers, strict=True):
        text.header = {**whole, "distributedInfo": rank.distributedInfo}
        if len(reader.builder):
            timelines.append(reader.finish(text))
    if not timelines:
        raise BadInputError("holds no event of any rank", hint="write it again from its traces", where=str(path))
    return timelines


def _read_ranks(path: Path) -> list[_Described]:
    """From what stands before the events, which must be known before the first of them is read."""
    head, place = b"", -1
    with closing(cast(Generator[bytes, None, None], Source(path).pieces())) as pieces:
        while place < 0 and (piece := next(pieces, b"")):
            head += piece
            place = head.find(b'"traceEvents"')
    try:
        header = msgspec.json.decode(head[: max(place, 0)].rstrip().rstrip(b",") + b"}")
        return msgspec.convert(header["stepscope"]["ranks"], list[_Described])
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError, TypeError) as error:
        raise BadInputError(
            f"says nothing usable about the ranks in it: {error}",
            hint="write it again from the traces of its ranks",
            where=str(path),
        ) from error


KINETO = TraceFormat("kineto", sniff, read, is_general=True, find_rank=find_rank)
MERGED = TraceFormat("merged_chrome", _is_merged, _read_merged)
