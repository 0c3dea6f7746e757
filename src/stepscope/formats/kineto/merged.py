"""Chrome traces of several ranks in one file, as `write_chrome` writes them, taken apart: one timeline per rank."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import msgspec

from stepscope.core.errors import BadInputError
from stepscope.formats.kineto.text import ChromeText
from stepscope.formats.kineto.tolerant import EventReader
from stepscope.formats.source import Source
from stepscope.formats.timeline import Timeline

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

    def add(self, event: Any) -> None:
        owner = self._owners.get(event.pid)
        if owner is not None:
            event.pid = owner.process
            self.readers[owner.place].add(event)


def sniff(head: bytes, path: Path) -> bool:
    """Whether this project wrote it, with more than one rank in it."""
    return bool(MARK.search(head)) and len(_RANK.findall(head)) > 1


def read(path: Path) -> list[Timeline]:
    """Unfinished timelines (see `finish`) in the order in which they were written."""
    ranks = _read_ranks(path)
    text = ChromeText(Source(path))
    router = _Router(path, ranks)
    for piece in text.pieces():
        router.read_piece(piece)
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
