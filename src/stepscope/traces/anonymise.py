"""A trace that can be shared: what its program, its people and its machines are called is replaced; what ran and how
long it took stays.

A text stays only where it is known to belong to public software (public_names.toml); everything else is replaced by a
hash under a key. The same text gets the same hash wherever it stands, in all ranks, and in other traces under the same
key, so that two anonymised traces can still be compared.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import resources
from typing import Any, NamedTuple

import msgspec
import numpy as np

from stepscope.core.errors import UsageError
from stepscope.formats.classify import CATEGORIES, classify_names
from stepscope.formats.readers.kineto.tolerant import COLUMN_OF_ARGUMENT
from stepscope.formats.timeline import (
    ANNOTATION,
    COLUMN,
    DEVICE_ANNOTATION,
    KERNEL,
    KINDS,
    MISSING,
    OPERATOR,
    RUNTIME,
    Array,
    Block,
    Thread,
    Timeline,
)

_PUBLIC = tomllib.loads(resources.files(__package__).joinpath("public_names.toml").read_text(encoding="utf-8"))
_PATTERNS = {what: re.compile("|".join(parts)) for what, parts in _PUBLIC["patterns"].items()}
_KERNEL_STEMS: dict[str, str] = _PUBLIC["kernel_stems"]
EVALUATE = "autograd::engine::evaluate_function: "
"""Stands before the name of a backward function."""

LEAST_KEY_BYTES = 16
HASH_BYTES = 8
PROCESS_NUMBERS = 1000
"""Threads of a process are numbered from the process's own number."""

NAMELESS = "(no name)"

_SHAPE_COLUMNS = ("shapes", "types", "strides", "values")

_REPORTED_AS = {"values": "scalar inputs", "types": "input types", "arguments": "other arguments"}


class AnonymiseReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was done; it repeats nothing of what was there."""

    replaced: dict[str, int]
    """Different texts replaced, by what they were."""
    kept: dict[str, int]
    """Different texts that stayed, because public software uses them or because it was asked for."""
    removed_metadata: list[str]
    """Facts about the file and the run that were taken out."""
    times_from_zero: bool
    notes: list[str]


class Anonymised(NamedTuple):
    timelines: list[Timeline]
    report: AnonymiseReport
    names: dict[str, str]
    """From each replaced text to what stands for it now. For the owner of the trace: not to be shared with it."""


def anonymise(
    timelines: Timeline | Sequence[Timeline],
    *,
    key: bytes | None = None,
    kernels: bool = False,
    operators: bool = False,
    shapes: bool = False,
    keep_times: bool = False,
) -> Anonymised:
    """Replace what could tell whose trace this is.

    Names of kernels and of public operators stay unless `kernels` and `operators` ask to replace them too; `shapes`
    takes the inputs' sizes, types and values out. Times are counted from the first event of all ranks unless
    `keep_times`. Without a key a new one is made and forgotten: nobody can then test whether a name was in the trace,
    and no other trace gets the same hashes.
    """
    given = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    if key is not None and len(key) < LEAST_KEY_BYTES:
        raise UsageError(
            f"a key of {len(key)} bytes can be guessed", hint=f"use at least {LEAST_KEY_BYTES} random bytes"
        )
    firsts = [int(timeline.core["start_ns"].min()) for timeline in given if len(timeline)]
    hider = _Hider(key or secrets.token_bytes(32), kernels=kernels, operators=operators)
    shift_ns = 0 if keep_times else min(firsts, default=0)
    hidden = [_anonymise_one(timeline, hider, shift_ns, drop_shapes=shapes) for timeline in given]
    report = AnonymiseReport(
        replaced=hider.counts(hider.replaced),
        kept=hider.counts(hider.kept),
        removed_metadata=sorted(hider.removed_metadata),
        times_from_zero=not keep_times,
        notes=_notes(kernels=kernels, operators=operators, shapes=shapes, keep_times=keep_times),
    )
    return Anonymised(timelines=hidden, report=report, names=hider.names)


def describe_report(report: AnonymiseReport) -> str:
    """The report as lines to keep beside the trace."""
    lines = ["Replaced (different texts):"]
    lines += [f"  {what}: {count}" for what, count in report.replaced.items()] or ["  nothing"]
    lines += ["Kept as they were (different texts):"]
    lines += [f"  {what}: {count}" for what, count in report.kept.items()] or ["  nothing"]
    if report.removed_metadata:
        lines.append(f"Removed from the metadata: {', '.join(report.removed_metadata)}")
    return "\n".join([*lines, *report.notes]) + "\n"


def _notes(*, kernels: bool, operators: bool, shapes: bool, keep_times: bool) -> list[str]:
    notes = {
        "Names of kernels stay: those a program has compiled for itself may say what it computes.": not kernels,
        "Names of public operators stay.": not operators,
        "Sizes of tensors stay: together they can tell which model ran.": not shapes,
        "Times stay: they tell when it ran.": keep_times,
    }
    return [note for note, is_true in notes.items() if is_true]


class _Hider:
    """Decides text by text, and remembers what it did."""

    def __init__(self, key: bytes, *, kernels: bool, operators: bool) -> None:
        self._key = key[:64]
        self._hide_kernels = kernels
        self._hide_operators = operators
        self.names: dict[str, str] = {}
        self.replaced: dict[str, set[str]] = {}
        self.kept: dict[str, set[str]] = {}
        self.removed_metadata: set[str] = set()

    @staticmethod
    def counts(texts: dict[str, set[str]]) -> dict[str, int]:
        return {what: len(found) for what, found in sorted(texts.items()) if found}

    def hash(self, text: str) -> str:
        encoded = text.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(encoded, key=self._key, digest_size=HASH_BYTES).hexdigest()

    def hide(self, text: str, what: str, stem: str | None = None) -> str:
        hidden = f"{stem or what.replace(' ', '_')}_{self.hash(text)}"
        self.replaced.setdefault(what, set()).add(text)
        self.names[text] = hidden
        return hidden

    def keep(self, text: str, what: str) -> str:
        self.kept.setdefault(what, set()).add(text)
        return text

    def name(self, text: str, kind: int) -> str:
        """The name of an event of this kind."""
        if kind == OPERATOR:
            return self._operator(text)
        if kind == KERNEL:
            return self._kernel(text)
        # The same annotation on host and device stays the same text.
        what = "annotation" if kind == DEVICE_ANNOTATION else KINDS[kind]
        return self._by_pattern(text, what if kind in (RUNTIME, ANNOTATION, DEVICE_ANNOTATION) else "profiler", what)

    def _operator(self, text: str) -> str:
        if text.startswith(EVALUATE):
            return EVALUATE + self._operator(text[len(EVALUATE) :])
        if self._hide_operators:
            return self.hide(text, "operator")
        return self._by_pattern(text, "operator", "operator")

    def _kernel(self, text: str) -> str:
        if not self._hide_kernels:
            return self.keep(text, "kernel")
        category = CATEGORIES[int(classify_names([text])[0])]
        return self.hide(text, "kernel", _KERNEL_STEMS.get(category, "kernel"))

    def _by_pattern(self, text: str, pattern: str, what: str) -> str:
        return self.keep(text, what) if _PATTERNS[pattern].fullmatch(text) else self.hide(text, what)

    def cell(self, text: str, column: str) -> str:
        """A text of another column than the name."""
        what = _REPORTED_AS.get(column, column.replace("_", " "))
        if column in ("types", "values"):
            return self._members(text, _PATTERNS["type" if column == "types" else "number"], what)
        if column == "arguments":
            return self._arguments(text)
        return self._by_pattern(text, _PUBLIC["columns"][column], what)

    def _members(self, text: str, pattern: Any, what: str) -> str:
        """Each text of a JSON list by itself."""
        try:
            content = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return self.hide(text, what)
        return json.dumps(self._walk(content, pattern, what))

    def _walk(self, value: Any, pattern: Any, what: str) -> Any:
        if isinstance(value, list):
            return [self._walk(member, pattern, what) for member in value]
        if isinstance(value, str):
            fine = pattern.fullmatch(value) or _PATTERNS["numbers"].fullmatch(value)
            return self.keep(value, what) if fine else self.hide(value, what)
        if isinstance(value, dict):
            return self.hide(json.dumps(value), what)
        return value

    def _arguments(self, text: str) -> str:
        """Those without a column; numbers stay, texts and what is nested do not. Empty where nothing is left."""
        what = _REPORTED_AS["arguments"]
        try:
            content = msgspec.json.decode(text, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return json.dumps({"argument": self.hide(text, what, "text")})
        left: dict[str, Any] = {}
        for argument, value in content.items():
            if argument in COLUMN_OF_ARGUMENT:
                continue  # the column is the truth
            known = argument in _PUBLIC["kept_arguments"]
            named = self.keep(argument, what) if known else self.hide(argument, what, "argument")
            if isinstance(value, bool | int | float) or value is None:
                left[named] = value
            else:
                left[named] = self.hide(value if isinstance(value, str) else json.dumps(value), what, "text")
        return json.dumps(left) if left else ""


def _anonymise_one(timeline: Timeline, hider: _Hider, shift_ns: int, *, drop_shapes: bool) -> Timeline:
    texts = _NewTexts(timeline.texts)
    core: dict[str, Any] = dict(timeline.core)
    core["name"] = _new_names(timeline, texts, hider)
    for column in ("start_ns", "end_ns"):
        core[column] = core[column] - shift_ns
    for column in ("shapes", "types"):
        core[column] = _new_cells(core[column], column, texts, hider, drop=drop_shapes)
    blocks = {name: _new_block(block, texts, hider, drop_shapes=drop_shapes) for name, block in timeline.blocks.items()}
    return replace(
        timeline,
        core=core,
        blocks={name: block for name, block in blocks.items() if block is not None},
        texts=texts.texts,
        threads=_new_threads(timeline.threads, hider),
        steps=tuple(
            span._replace(start_ns=span.start_ns - shift_ns, end_ns=span.end_ns - shift_ns) for span in timeline.steps
        ),
        step_marker=_new_marker(timeline.step_marker, hider),
        metadata=_new_metadata(timeline, hider),
        repairs={},
    )


class _NewTexts:
    """The texts of the new timeline, numbered as they come."""

    def __init__(self, old: Sequence[str]) -> None:
        self.old = old
        self._codes: dict[str, int] = {}

    @property
    def texts(self) -> list[str]:
        return list(self._codes)

    def recode(self, codes: Any, change: Callable[[str], str]) -> Any:
        """Codes of the changed texts; MISSING where nothing is left of one."""
        new_code = np.full(len(self.old) + 1, MISSING, np.int64)
        for code in np.unique(codes).tolist():
            if code != MISSING:
                text = change(self.old[code])
                new_code[code] = self._codes.setdefault(text, len(self._codes)) if text else MISSING
        return new_code[codes]


def _new_names(timeline: Timeline, texts: _NewTexts, hider: _Hider) -> Array:
    names: Any = timeline.core["name"]
    kinds: Any = timeline.core["kind"]
    new = np.full(len(timeline), MISSING, np.int32)
    for kind in np.unique(kinds).tolist():
        mine = kinds == kind
        new[mine] = texts.recode(names[mine], partial(_new_name, hider, kind))
    return new


def _new_name(hider: _Hider, kind: int, text: str) -> str:
    return hider.name(text, kind) if text else NAMELESS


def _new_cells(codes: Any, column: str, texts: _NewTexts, hider: _Hider, *, drop: bool) -> Any:
    if drop:
        return np.full(len(codes), MISSING, np.int32)
    return texts.recode(codes, lambda text: hider.cell(text, column))


def _new_block(block: Block, texts: _NewTexts, hider: _Hider, *, drop_shapes: bool) -> Block | None:
    columns: dict[str, Any] = {}
    for name, values in block.columns.items():
        if COLUMN[name].form == "text":
            drop = drop_shapes and name in _SHAPE_COLUMNS
            columns[name] = _new_cells(values, name, texts, hider, drop=drop)
        elif name == "address":
            addresses: Any = values
            _, ordinal = np.unique(addresses, return_inverse=True)
            columns[name] = np.where(addresses == MISSING, MISSING, ordinal + 1)
        else:
            columns[name] = values
    if all(COLUMN[name].form == "text" and (values == MISSING).all() for name, values in columns.items()):
        return None
    return Block(rows=block.rows, columns=columns)


def _new_threads(threads: Sequence[Thread], hider: _Hider) -> list[Thread]:
    """Numbered anew; the main thread keeps the number of its process, which is how viewers find it."""
    processes: dict[str, int] = {}
    new = []
    for place, thread in enumerate(threads, 1):
        number = processes.setdefault(thread.process, PROCESS_NUMBERS * (len(processes) + 1))
        own = number if thread.thread == thread.process else number + place
        new.append(
            Thread(
                _thread_text(thread.process, str(number)),
                _thread_text(thread.thread, str(own)),
                _thread_name(thread.name, own, hider),
            )
        )
    return new


def _thread_text(text: str, number: str) -> str:
    """Headings of the profiler itself are no numbers and stay."""
    return text if _PATTERNS["profiler"].fullmatch(text) else number


def _thread_name(name: str, number: int, hider: _Hider) -> str:
    if not name:
        return ""
    said = name.rpartition("(")[2].removesuffix(")")
    if _PATTERNS["thread"].fullmatch(said):
        return f"thread {number} ({said})"
    return hider.hide(name, "thread")


def _new_marker(marker: str, hider: _Hider) -> str:
    kind, _, name = marker.partition(" ")
    return f"{kind} {hider.name(name, ANNOTATION)}" if name else kind


def _new_metadata(timeline: Timeline, hider: _Hider) -> dict[str, Any]:
    """Only what is on the list; everything else is named in the report by its key alone."""
    old = timeline.metadata
    new: dict[str, Any] = {name: old[name] for name in _PUBLIC["kept_metadata"] if _is_plain(old.get(name))}
    devices = old.get("devices")
    if isinstance(devices, list):
        new["devices"] = [_plain_members(device, ("name",)) for device in devices if isinstance(device, dict)]
    versions = old.get("versions")
    if isinstance(versions, dict):
        new["versions"] = {name: value for name, value in versions.items() if _is_plain(value)}
    distributed = old.get("distributed")
    if isinstance(distributed, dict):
        kept = (name for name in _PUBLIC["kept_distributed"] if _is_plain(distributed.get(name)))
        new["distributed"] = {name: distributed[name] for name in kept}
        groups = distributed.get("pg_config")
        if isinstance(groups, list):
            new["distributed"]["pg_config"] = [_new_group(group, hider) for group in groups if isinstance(group, dict)]
        hider.removed_metadata |= {f"distributed.{name}" for name in distributed if name not in new["distributed"]}
    hider.removed_metadata |= {name for name in old if name not in new}
    if timeline.repairs:
        hider.removed_metadata.add("repairs")
    return new


def _is_plain(value: object) -> bool:
    """A number, or a word that everybody has."""
    if isinstance(value, str):
        return bool(_PATTERNS["metadata"].fullmatch(value))
    return isinstance(value, bool | int | float)


def _plain_members(content: dict[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    return {
        name: value for name, value in content.items() if _is_plain(value) or (name in texts and isinstance(value, str))
    }


def _new_group(group: dict[str, Any], hider: _Hider) -> dict[str, Any]:
    new = _plain_members(group, ())
    ranks = group.get("ranks")
    if isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks):
        new["ranks"] = ranks
    for name, column in (("pg_name", "group"), ("pg_desc", "group_description")):
        if isinstance(group.get(name), str):
            new[name] = hider.cell(group[name], column)
    return new
