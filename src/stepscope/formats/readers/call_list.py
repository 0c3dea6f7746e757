"""Plain lists of communication calls: PARAM's two JSON forms and this project's own.

Own form: an object `{"communication_calls": 1, "rank": 0, "world_size": 8, "groups": [{"name": "dp", "ranks": [0, 1]}],
"calls": [{"collective": "all_reduce", "elements": 1024, "dtype": "float32", "group": "dp"}]}`. A call may add
`out_elements`, `in_splits`, `out_splits`, `root`, `peer`, `sequence`, `start_s` and `duration_s`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from stepscope.core.dtypes import dtype_bytes
from stepscope.core.errors import BadInputError
from stepscope.formats.readers import TraceFormat
from stepscope.formats.source import decode_json, describe_group, list_of, rank_in_name, read_bounded, text_of, whole_of
from stepscope.formats.timeline import OPERATOR, Timeline, TimelineBuilder

OWN_FORM = "communication_calls"
OWN_VERSION = 1
_LONGEST_TEXT = 1024
_WITHOUT_DATA = ("wait", "barrier", "init")
_COMPUTE_ONLY = ("compute", "markers")
_SEE_FORM = "see docs/trace-formats.md for the form of a list of calls"


def sniff(head: bytes, path: Path) -> bool:
    """Whether it is a list of objects that speak of `comms` or `compute`, or the own form."""
    start = head.lstrip()
    if start[:1] == b"{":
        return b'"' + OWN_FORM.encode() + b'"' in head[:4096]
    if start[:1] != b"[" or b'"ph"' in head:
        return False
    return any(word in head for word in (b'"comms"', b'"in_msg_size"', b'"msg_size"', b'"collective"'))


def read(path: Path) -> list[Timeline]:
    """One unfinished timeline of operator rows in the order of the file.

    Without times every row is an instant, one nanosecond after the row before, and metadata say `untimed`.
    """
    data, cut_short = read_bounded(path)
    hint = f"copy or write the file again; {_SEE_FORM}"
    content = decode_json(data, what="is no JSON", hint=hint, path=path, cut_short=cut_short)
    if not isinstance(content, list | dict):
        raise BadInputError("is neither a list of calls nor an object that holds one", hint=_SEE_FORM, where=str(path))
    reader = _ListReader(path, content if isinstance(content, dict) else {})
    if cut_short:
        reader.builder.count_repair(f"the packed file ends too early ({cut_short}): its content was whole")
    return [reader.read_own() if isinstance(content, dict) else reader.read_param(content)]


class _ListReader:
    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path = path
        self.header = header
        self.builder = TimelineBuilder()
        self.groups: dict[str, list[int]] = {}
        self._written: dict[str, tuple[list[int], str]] = {}
        self.world_size = whole_of(header.get("world_size"))
        self.starts = 0
        self.durations = 0

    # --- the own form ----------------------------------------------------------------------------------------------

    def read_own(self) -> Timeline:
        if self.header.get(OWN_FORM) != OWN_VERSION:
            raise BadInputError(
                f"has no key {OWN_FORM} with the value {OWN_VERSION}",
                hint=_SEE_FORM,
                where=str(self.path),
            )
        for group in list_of(self.header.get("groups")):
            if isinstance(group, dict) and (name := text_of(group.get("name"), _LONGEST_TEXT)):
                self.groups[name] = [rank for rank in list_of(group.get("ranks")) if whole_of(rank) is not None]
        calls = self.header.get("calls")
        if not isinstance(calls, list):
            raise BadInputError("`calls` is no list", hint=_SEE_FORM, where=str(self.path))
        for place, call in enumerate(calls):
            name = text_of(call.get("collective"), _LONGEST_TEXT) if isinstance(call, dict) else None
            if not name:
                self.builder.count_repair("calls without a collective were left out")
                continue
            elements, out = whole_of(call.get("elements")), whole_of(call.get("out_elements"))
            self._add(
                call,
                place,
                name,
                in_elements=elements,
                out_elements=elements if out is None else out,
                group=text_of(call.get("group"), _LONGEST_TEXT),
                start_ns=_nanoseconds(call.get("start_s")),
                duration_ns=_nanoseconds(call.get("duration_s")),
                in_splits=call.get("in_splits"),
                out_splits=call.get("out_splits"),
                sequence=whole_of(call.get("sequence")),
                peer=whole_of(call.get("peer")),
            )
        return self._finish("calls", whole_of(self.header.get("rank")))

    # --- PARAM -----------------------------------------------------------------------------------------------------

    def read_param(self, entries: list[Any]) -> Timeline:
        for place, entry in enumerate(entries):
            if not isinstance(entry, dict):
                self.builder.count_repair("entries that are no objects were left out")
            elif isinstance(entry.get("comms") or entry.get("collective"), str):
                self._add_param(entry, place)
            elif isinstance(entry.get("compute"), str):
                self._add_compute(entry, place)
            else:
                self.builder.count_repair("entries that are neither communication nor computation were left out")
        return self._finish("param-calls", None)

    def _add_param(self, entry: Mapping[str, Any], place: int) -> None:
        name = str(entry.get("comms") or entry.get("collective"))[:_LONGEST_TEXT].lower()
        number = entry.get("pg_id")
        group = str(number)[:_LONGEST_TEXT] if isinstance(number, int | str) else None
        if name == "init" and group is not None:
            self.groups[group] = [rank for rank in list_of(entry.get("global_ranks")) if whole_of(rank) is not None]
        world = whole_of(entry.get("world_size"))
        self.world_size = max(self.world_size or 0, world or 0) or None
        sent, got = self._elements(entry, name)
        self._add(
            entry,
            place,
            name,
            in_elements=sent,
            out_elements=got,
            group=group,
            group_size=world,
            start_ns=whole_of(entry.get("startTime_ns")),
            duration_ns=None,
            in_splits=entry.get("in_split"),
            out_splits=entry.get("out_split"),
            sequence=whole_of(entry.get("req")),
            peer=_peer(entry, name),
        )

    def _elements(self, entry: Mapping[str, Any], name: str) -> tuple[int | None, int | None]:
        sent, got = whole_of(entry.get("in_msg_size")), whole_of(entry.get("out_msg_size"))
        if sent is not None or "msg_size" not in entry:
            if sent is None and name not in _WITHOUT_DATA:
                self.builder.count_repair("calls without a size")
            return sent, got
        # The DLRM benchmark's dump counts bytes.
        width = dtype_bytes(str(entry.get("dtype")))
        size = whole_of(entry.get("msg_size"))
        if width is None or size is None:
            self.builder.count_repair("sizes in bytes of an unknown element type were left out")
            return None, None
        return size // width, size // width

    def _add_compute(self, entry: Mapping[str, Any], place: int) -> None:
        kept = {key: value for key, value in entry.items() if key not in _COMPUTE_ONLY and isinstance(value, str | int)}
        name = str(entry["compute"])[:_LONGEST_TEXT].lower()
        start_ns = whole_of(entry.get("startTime_ns"))
        self.starts += start_ns is not None
        at = place if start_ns is None else start_ns
        text = msgspec.json.encode(kept).decode()[: 4 * _LONGEST_TEXT]
        self.builder.add(OPERATOR, name, at, at, thread=("calls", "compute"), arguments=text)

    # --- both ------------------------------------------------------------------------------------------------------

    def _add(
        self,
        call: Mapping[str, Any],
        place: int,
        name: str,
        *,
        group: str | None,
        start_ns: int | None,
        duration_ns: int | None,
        in_splits: object,
        out_splits: object,
        sequence: int | None,
        group_size: int | None = None,
        **columns: int | None,
    ) -> None:
        self.starts += start_ns is not None
        self.durations += duration_ns is not None
        at = place if start_ns is None else start_ns
        ranks = self.groups.get(group or "")
        kept = {
            key: value
            for key in ("root", "markers", "use_batch", "req")
            if isinstance(value := call.get(key), str | int) or (key == "markers" and isinstance(value, list))
        }
        self.builder.add(
            OPERATOR,
            name,
            at,
            at + (duration_ns or 0),
            thread=("calls", group or ""),
            collective=name,
            group=group,
            group_ranks=self._members(group, ranks) if ranks else None,
            group_size=group_size or (len(ranks) if ranks else self.world_size),
            dtype=text_of(call.get("dtype"), _LONGEST_TEXT),
            in_splits=_splits(in_splits),
            out_splits=_splits(out_splits),
            collective_sequence=sequence,
            arguments=msgspec.json.encode(kept).decode()[: 4 * _LONGEST_TEXT] if kept else None,
            **columns,
        )

    def _members(self, group: str | None, ranks: list[int]) -> str:
        """Written out once for each list, not for each call: groups can be large."""
        known = self._written.get(group or "")
        if known is None or known[0] is not ranks:
            known = self._written[group or ""] = (ranks, str(ranks))
        return known[1]

    def _finish(self, form: str, rank: int | None) -> Timeline:
        if not len(self.builder):
            raise BadInputError(
                "holds no call",
                hint="a call has `comms` (PARAM) or `collective` (own form); see docs/trace-formats.md",
                where=str(self.path),
            )
        if 0 < self.starts < len(self.builder):
            self.builder.count_repair("calls without a start among calls with one", len(self.builder) - self.starts)
        groups = [describe_group(*group) for group in self.groups.items()]
        found = rank_in_name(self.path) if rank is None else rank
        metadata = {
            "format": form,
            "source": str(self.path),
            "rank_from": "name" if rank is None else "content",
            "distributed": {"rank": found, "world_size": self.world_size, "pg_config": groups},
            "untimed": self.starts == 0,
            "durations": self.durations,
        }
        return self.builder.build(rank=found, world_size=self.world_size, metadata=metadata)


def _nanoseconds(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return round(value * 1e9) if math.isfinite(value) and 0 <= value < 4e9 else None


def _splits(value: object) -> str | None:
    shares = [share for share in list_of(value) if whole_of(share) is not None]
    return str(shares) if shares else None


def _peer(entry: Mapping[str, Any], name: str) -> int | None:
    return whole_of(entry.get("dst_rank" if name == "send" else "src_rank")) if name in ("send", "recv") else None


FORMAT = TraceFormat("call_list", sniff, read)
