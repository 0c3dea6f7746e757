"""Which reader a file needs: its first bytes decide."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from stepscope.core.errors import BadInputError
from stepscope.formats.chakra.timeline import looks_like_chakra
from stepscope.formats.kineto.scanner import scan_kineto
from stepscope.formats.kineto.tolerant import read_kineto
from stepscope.formats.machine_code import is_made
from stepscope.formats.memory import looks_like_memory
from stepscope.formats.source import cache_folders, is_packed, read_head
from stepscope.formats.timeline import Timeline

ENTRY_POINT = "stepscope.trace_formats"
SCAN_FROM_BYTES = 2 << 20
"""Raw size from which the compiled scanner is used; below, the tolerant parser is done sooner."""
COMPILED_FROM_BYTES = 24 << 20
"""Raw size from which it is compiled where this machine has not done so yet."""
_PACKED_RATIO = 10
_SURELY_FITS = 256 << 20
_TABLE_SHARE = 0.3
"""Bytes of columns for a byte of text, as measured on traces with shapes."""


class TraceFormat(NamedTuple):
    """A kind of trace file. Plugins offer one under the entry point `stepscope.trace_formats`."""

    name: str
    sniff: Callable[[bytes, Path], bool]
    """Whether the unpacked first bytes (64 KiB) and the path look like it."""
    read: Callable[[Path], list[Timeline]]
    """One unfinished timeline for each rank or device process in the file."""


_BUILT_IN = {
    "nsys_sqlite": "nsys.sqlite",
    "flight_recorder": "flight_recorder",
    "nsys_stats": "nsys.stats",
    "chakra": "chakra.timeline",
    "xla": "xla.reader",
    "merged_chrome": "kineto.merged",
    "kineto": "kineto.tolerant",
    "call_list": "call_list",
}
"""Modules with `sniff` and `read`, in the order in which they are asked: the particular before the general."""


@cache
def known_formats() -> list[TraceFormat]:
    """Plugins are asked first."""
    formats = [entry.load() for entry in entry_points(group=ENTRY_POINT)]
    for name, home in _BUILT_IN.items():
        module = import_module(f"stepscope.formats.{home}")
        formats.append(TraceFormat(name, module.sniff, _read_kineto if name == "kineto" else module.read))
    return formats


def _read_kineto(path: Path) -> list[Timeline]:
    raw = path.stat().st_size * (_PACKED_RATIO if is_packed(path) else 1)
    if raw >= SCAN_FROM_BYTES and find_spec("numba") is not None and (raw >= COMPILED_FROM_BYTES or is_made("scan")):
        return [scan_kineto(path, folder=_folder_for(path, raw))]
    return [read_kineto(path)]


def _folder_for(path: Path, raw_bytes: int) -> Path | None:
    """A folder for nameless files where the columns would fill half of the free memory; usually None."""
    import tempfile

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


def find_format(path: Path, head: bytes | None = None) -> TraceFormat | None:
    """None for a file that is no trace. `head`: its first unpacked bytes, where they were read already."""
    head = read_head(path) if head is None else head
    return next((known for known in known_formats() if known.sniff(head, path)), None)


def looks_like_graph(path: Path, head: bytes | None = None) -> bool:
    """An execution trace or a Chakra graph. A Chakra file with times is a timeline as well."""
    head = read_head(path) if head is None else head
    if looks_like_chakra(head, path):
        return True
    return (
        b'"schema"' in head[:4096] and b'"traceEvents"' not in head and (b'"nodes"' in head or b'"op_schema"' in head)
    )


def why_no_timeline(path: Path, head: bytes | None = None) -> tuple[str, str]:
    """What a file without a timeline is, and what can be done with it."""
    head = read_head(path) if head is None else head
    if looks_like_graph(path, head):
        return (
            "is a graph of operators without times, not a timeline",
            "give the Kineto trace of the same steps; `stepscope trace link ET KINETO` joins both",
        )
    if looks_like_memory(head, path):
        return "says what memory held, and has no timeline of events", "`stepscope trace summary FILE` reads it"
    return "is no trace of a known format", "docs/trace-formats.md lists what can be read and how each is recognised"


def require_format(path: Path, head: bytes | None = None) -> TraceFormat:
    found = find_format(path, head)
    if found is None:
        what, hint = why_no_timeline(path, head)
        raise BadInputError(what, hint=hint, where=str(path))
    return found
