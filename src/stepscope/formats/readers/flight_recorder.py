"""Dumps of PyTorch's flight recorder: the last collectives of one rank, as pickle or JSON.

Each entry becomes an operator row. The recorder knows when a call was made; when its work began and ended it learns
later and only from some backends (Gloo: never). What a row's times mean is said in `read`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from stepscope.core.errors import BadInputError
from stepscope.formats import plain_pickle
from stepscope.formats.readers import TraceFormat
from stepscope.formats.source import (
    WHOLE_LIMIT,
    decode_json,
    describe_group,
    list_of,
    rank_in_name,
    read_bounded,
    text_of,
    whole_of,
)
from stepscope.formats.timeline import OPERATOR, Timeline, TimelineBuilder

_PICKLE = b"\x80"
_WORDS = (b"profiling_name", b"pg_config", b"pg_status", b"comm_lib_version", b"nccl_comm_state")
_PEERS = re.compile(r"^(send|recv)\w*\s+(\d{1,9})\s*(->|<-)\s*(\d{1,9})")
_MOST_NAMED = 200
"""Unfinished entries that metadata lists one by one; the others are only counted."""
MOST_DIMENSIONS = 64
"""Most dimensions of a tensor; torch allows no more."""
MOST_IN_ENTRY = 1 << 16
"""Sizes and element types that one collective may list."""
MOST_IN_FILE = 1 << 22
"""The same of all entries, and members of all groups. A pickle can name one list any number of times in two bytes each:
the size of the file bounds nothing."""
_MOST_FRAMES = 200
_LONGEST_TYPE = 64


def sniff(head: bytes, path: Path) -> bool:
    """Whether it looks like a dump: the right words in a pickle, or in a JSON object without trace events."""
    if not any(word in head for word in _WORDS):
        return False
    if head[:1] == _PICKLE:
        return True
    return head.lstrip()[:1] == b"{" and b"traceEvents" not in head and b'"entries"' in head


def read(path: Path) -> list[Timeline]:
    """The dump of one rank as one unfinished timeline.

    A row ends when its completion was noticed and is as long as the device says (`duration_ms`), else lasts from the
    noticed start (or the call) to the noticed end, else is an instant at the call. Its `arguments` say which.
    """
    dump, cut_short = _load(path)
    reader = _DumpReader(path, dump)
    if cut_short:
        reader.builder.count_repair(f"the packed file ends too early ({cut_short}): its content was whole")
    return [reader.read()]


def _load(path: Path) -> tuple[dict[str, Any], str | None]:
    """The content, and why a packed file ended too early although its content is whole."""
    data, cut_short = read_bounded(path, plain_pickle.STANDARD.bytes)
    packed = f" (the packed file ends early: {cut_short})" if cut_short else ""
    if data[:1] == _PICKLE:
        dump = plain_pickle.load(data, where=f"{path}{packed}")
    else:
        hint = "copy the file again, or dump it again with torch._C._distributed_c10d._dump_fr_trace()"
        what = "is neither a pickle nor whole JSON"
        dump = decode_json(data, what=what, hint=hint, path=path, cut_short=cut_short)
    if not isinstance(dump, dict) or not isinstance(dump.get("entries", []), list | tuple):
        raise BadInputError(
            "is no flight-recorder dump: it has no list of entries",
            hint="dump it with torch._C._distributed_c10d._dump_fr_trace(), or set TORCH_FR_BUFFER_SIZE",
            where=str(path),
        )
    return dump, cut_short


class _DumpReader:
    def __init__(self, path: Path, dump: dict[str, Any]) -> None:
        self.path = path
        self.dump = dump
        self.builder = TimelineBuilder()
        self.listed = 0
        """Sizes, types and members so far."""
        self.groups = self._read_groups()
        self.members = {name: str(group["ranks"]) for name, group in self.groups.items()}
        self.unfinished: list[dict[str, Any]] = []
        self.unfinished_count = 0
        self.untimed_count = 0

    def read(self) -> Timeline:
        seen: set[int] = set()
        for number, entry in enumerate(self.dump.get("entries", [])):
            if not isinstance(entry, dict):
                self.builder.count_repair("entries that are no objects were left out")
            elif id(entry) in seen:
                self.builder.count_repair("entries that are another one again were left out")
            else:
                seen.add(id(entry))
                self._add(entry, number)
        if not len(self.builder):
            raise BadInputError(
                "holds no collective",
                hint="set TORCH_FR_BUFFER_SIZE (or TORCH_NCCL_TRACE_BUFFER_SIZE) above 0 before the program starts",
                where=str(self.path),
            )
        rank = rank_in_name(self.path)
        world = next((group["pg_size"] for group in self.groups.values() if group["pg_name"] == "0"), None) or max(
            (group["pg_size"] for group in self.groups.values()), default=None
        )
        return self.builder.build(rank=rank, world_size=world or None, metadata=self._describe(rank, world))

    # --- groups ----------------------------------------------------------------------------------------------------

    def _read_groups(self) -> dict[str, dict[str, Any]]:
        """Groups by name, as a Kineto header lists them."""
        table = self.dump.get("pg_config")
        groups: dict[str, dict[str, Any]] = {}
        for key, told in table.items() if isinstance(table, dict) else ():
            if not isinstance(told, dict):
                continue
            name = text_of(told.get("name")) or str(key)
            ranks = self._ranks(told.get("ranks"), f"group {name[:80]}")
            if name and ranks:
                groups[name] = describe_group(name, ranks, text_of(told.get("desc")) or "")
        return groups

    def _ranks(self, value: object, place: str) -> list[int]:
        """Members, written as a list or as the text of one."""
        if isinstance(value, str):
            value = [int(found) for found in re.findall(r"\d{1,9}", value[: 1 << 20])]
        self._count(_length(value), place)
        return [rank for rank in list_of(value) if whole_of(rank) is not None]

    def _count(self, count: int, place: str) -> None:
        """Before anything of the list is copied or written out."""
        self.listed += count
        if count > MOST_IN_ENTRY or self.listed > MOST_IN_FILE:
            raise BadInputError(
                f"lists more than {MOST_IN_ENTRY if count > MOST_IN_ENTRY else MOST_IN_FILE} sizes, types and members "
                f"in {'one place' if count > MOST_IN_ENTRY else 'all'}: no recorder writes so many",
                hint="take the dump from where it was written; this one is damaged or made to do harm",
                where=f"{self.path}: {place}",
            )

    # --- entries ---------------------------------------------------------------------------------------------------

    def _add(self, entry: Mapping[str, Any], number: int) -> None:
        created = whole_of(entry.get("time_created_ns"))
        name = text_of(entry.get("profiling_name"))
        if created is None or not name:
            self.builder.count_repair("entries without a name or a time of creation were left out")
            return
        start_ns, end_ns, meaning = self._times(entry, created)
        group, description = _group_of(entry)
        known = self.groups.get(group or "")
        word = name.partition(":")[2] or name
        peers = _PEERS.match(word)
        place = f"entry {number}"
        inputs, outputs = (self._sizes(entry.get(key), place) for key in ("input_sizes", "output_sizes"))
        types = self._types(entry.get("input_dtypes"), place)
        point_to_point = entry.get("is_p2p") is True
        sequence = whole_of(entry.get("p2p_seq_id" if point_to_point else "collective_seq_id"))
        row = {
            "collective": peers[1] if peers else word,
            "group": group,
            "group_description": description or (known["pg_desc"] if known else None),
            "group_ranks": self.members[group or ""] if known else None,
            "group_size": known["pg_size"] if known else None,
            "in_elements": _elements(inputs),
            "out_elements": _elements(outputs),
            "dtype": types[0] if types else None,
            "collective_sequence": sequence,
            "peer": int(peers[4]) if peers else None,
            "event_index": whole_of(entry.get("record_id")),
            "shapes": str(inputs) if inputs else None,
            "types": msgspec.json.encode(types).decode() if types else None,
            "arguments": self._arguments(entry, meaning),
        }
        # Work of one group runs in order, that of several at once: a thread each.
        thread = ("flight recorder", f"group {group}" if group else "")
        self.builder.add(OPERATOR, name, start_ns, end_ns, thread=thread, **row)
        self.builder.name_thread(*thread, description or "")
        self._note_state(entry, row)

    def _sizes(self, value: object, place: str) -> list[list[int]]:
        self._count(_length(value), place)
        tensors = list_of(value)
        self._count(sum(min(_length(sizes), MOST_DIMENSIONS + 1) for sizes in tensors), place)
        if any(_length(sizes) > MOST_DIMENSIONS for sizes in tensors):
            raise BadInputError(
                f"has a tensor of more than {MOST_DIMENSIONS} dimensions, which torch does not allow",
                hint="take the dump from where it was written; this one is damaged or made to do harm",
                where=f"{self.path}: {place}",
            )
        return [[size for size in list_of(sizes) if whole_of(size) is not None] for sizes in tensors]

    def _types(self, value: object, place: str) -> list[str]:
        self._count(_length(value), place)
        return [text_of(kind, _LONGEST_TYPE) or "" for kind in list_of(value)]

    def _times(self, entry: Mapping[str, Any], created: int) -> tuple[int, int, str]:
        # JSON dumps write 0 where the pickle has None.
        began = whole_of(entry.get("time_discovered_started_ns")) or None
        ended = whole_of(entry.get("time_discovered_completed_ns")) or None
        duration = entry.get("duration_ms")
        measured = isinstance(duration, int | float) and math.isfinite(duration) and 0 <= duration < 1e12
        if (ended is not None and ended < created) or (began is not None and began < created):
            self.builder.count_repair("times of start or end before the call were left out")
            began = ended = None
        if measured:
            length_ns = round(float(duration) * 1e6)  # type: ignore[arg-type]
            end_ns = created + length_ns if ended is None else max(ended, created + length_ns)
            return end_ns - length_ns, end_ns, "measured on the device"
        if ended is not None:
            return (created if began is None else min(began, ended)), ended, "as noticed by the host"
        self.untimed_count += 1
        return created, created, "call only"

    def _note_state(self, entry: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        state = text_of(entry.get("state")) or "unknown"
        if state == "completed" or entry.get("retired") is True:
            return
        self.unfinished_count += 1
        if len(self.unfinished) < _MOST_NAMED:
            told = {key: row[key] for key in ("collective", "group", "collective_sequence")}
            self.unfinished.append({**told, "state": state, "record": whole_of(entry.get("record_id"))})

    def _arguments(self, entry: Mapping[str, Any], meaning: str) -> str:
        kept: dict[str, Any] = {"times": meaning, "state": text_of(entry.get("state"))}
        for key in ("retired", "time_created_ns", "timeout_ms", "op_id"):
            value = entry.get(key)
            if isinstance(value, bool) or whole_of(value) is not None:
                kept[key] = value
        if frame := _caller(entry.get("frames")):
            kept["called_from"] = frame
        return msgspec.json.encode(kept).decode()

    def _describe(self, rank: int | None, world: int | None) -> dict[str, Any]:
        versions = {
            key: text_of(self.dump.get(key))
            for key in ("version", "nccl_version", "comm_lib_version")
            if self.dump.get(key)
        }
        return {
            "format": "flight-recorder",
            "source": str(self.path),
            "rank_from": "name",
            "versions": versions,
            "distributed": {"rank": rank, "world_size": world, "pg_config": list(self.groups.values())},
            "unfinished": self.unfinished,
            "unfinished_count": self.unfinished_count,
            "without_completion_time": self.untimed_count,
        }


def _length(value: object) -> int:
    return len(value) if isinstance(value, list | tuple) else 0


def _group_of(entry: Mapping[str, Any]) -> tuple[str | None, str | None]:
    told = list_of(entry.get("process_group"), 2)
    if told:
        return text_of(told[0]), text_of(told[1]) if len(told) > 1 else None
    number = whole_of(entry.get("pg_id"))
    return (None if number is None else str(number)), None


def _elements(sizes: list[list[int]]) -> int | None:
    if not sizes:
        return None
    total = sum(math.prod(one) for one in sizes)
    return total if total < WHOLE_LIMIT else None


def _caller(frames: object) -> str | None:
    """The innermost frame outside torch."""
    for frame in list_of(frames, _MOST_FRAMES):
        if isinstance(frame, dict):
            file, line, name = text_of(frame.get("filename")), whole_of(frame.get("line")), text_of(frame.get("name"))
            if file and "/torch/" not in file and "typing_extensions" not in file:
                return f"{file}:{line} {name}"
    return None


FORMAT = TraceFormat("flight_recorder", sniff, read)
