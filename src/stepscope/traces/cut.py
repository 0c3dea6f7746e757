"""Part of a timeline: some steps, an interval of time, some kinds. Events are kept whole or left out, never clipped."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from stepscope.core.errors import UsageError, unknown_name
from stepscope.formats.chrome import launch_pairs
from stepscope.formats.nesting import nearest
from stepscope.formats.timeline import (
    COLUMN,
    DEVICE_KINDS,
    KINDS,
    MISSING,
    Array,
    Block,
    Integers,
    Span,
    Timeline,
)

MOST_STEPS_NAMED = 12
"""In a message about a step that is not there."""


def cut(
    timeline: Timeline,
    *,
    steps: Iterable[int] | None = None,
    start_ns: int | None = None,
    end_ns: int | None = None,
    ranks: Collection[int] | None = None,
    kinds: Iterable[str] | None = None,
) -> Timeline:
    """The events of these steps that overlap [start_ns, end_ns) and are of these kinds; each condition may be left out.

    A launch call and the device work it started stay together: where one is wanted by step and time, so is the other.
    `kinds` is taken literally after that. A timeline of another rank than `ranks` becomes an empty one. Row order,
    times and ids stay; texts and threads that nothing uses any more are gone. A host event whose parent was left out
    gets the nearest enclosing one that was kept; device work without its call has none.
    """
    if ranks is not None and timeline.rank not in ranks:
        return take_rows(timeline, np.zeros(0, np.int64), steps=())
    kept = np.ones(len(timeline), bool)
    spans: Sequence[Span] = timeline.steps
    if steps is not None:
        numbers = _known_steps(timeline, steps)
        kept &= np.isin(timeline.core["step"], numbers)
        spans = [span for span in spans if span.number in numbers]
    if start_ns is not None or end_ns is not None:
        first, last = _known_time(timeline, start_ns, end_ns)
        kept &= _overlaps(timeline, first, last)
        spans = [span for span in spans if span.start_ns < last and span.end_ns > first]
    kept = _with_launches(timeline, kept)
    if kinds is not None:
        kept &= np.isin(timeline.core["kind"], _known_kinds(kinds))
    return take_rows(timeline, np.flatnonzero(kept), steps=spans)


def cut_all(
    timelines: Iterable[Timeline], *, ranks: Collection[int] | None = None, **conditions: Any
) -> list[Timeline]:
    """`cut` for many ranks; those not in `ranks` are left out altogether."""
    given = list(timelines)
    chosen = [timeline for timeline in given if ranks is None or timeline.rank in ranks]
    if not chosen:
        there = ", ".join(str(timeline.rank) for timeline in given)
        raise UsageError(
            f"none of the ranks {', '.join(map(str, ranks or ()))} is there", hint=f"the traces are of ranks {there}"
        )
    return [cut(timeline, **conditions) for timeline in chosen]


def take_rows(timeline: Timeline, rows: Integers, *, steps: Sequence[Span] | None = None) -> Timeline:
    """A timeline of these rows alone (ascending); texts and threads are numbered anew in their order."""
    place = np.full(len(timeline) + 1, MISSING, np.int64)
    place[rows] = np.arange(len(rows))
    core: dict[str, Any] = {name: column[rows] for name, column in timeline.core.items()}
    core["parent"] = place[_kept_ancestors(timeline, rows, place)].astype(core["parent"].dtype)
    blocks = {
        name: block for name in timeline.blocks if (block := _take_block(timeline.blocks[name], place)) is not None
    }
    kept = [core, *(block.columns for block in blocks.values())]
    texts = (codes for columns in kept for name, codes in columns.items() if COLUMN[name].form == "text")
    new_text, used_texts = _number_anew(len(timeline.texts), texts)
    new_thread, used_threads = _number_anew(len(timeline.threads), [core["thread"]])
    core["thread"] = new_thread[core["thread"]].astype(core["thread"].dtype)
    return replace(
        timeline,
        core=_recoded(core, new_text),
        blocks={name: Block(block.rows, _recoded(block.columns, new_text)) for name, block in blocks.items()},
        texts=[timeline.texts[old] for old in used_texts],
        threads=[timeline.threads[old] for old in used_threads],
        steps=tuple(timeline.steps if steps is None else steps),
    )


def _known_steps(timeline: Timeline, steps: Iterable[int]) -> list[int]:
    wanted = list(steps)
    there = [span.number for span in timeline.steps]
    missing = sorted(set(wanted) - set(there))
    if missing:
        named = ", ".join(map(str, there[:MOST_STEPS_NAMED])) + (", …" if len(there) > MOST_STEPS_NAMED else "")
        raise UsageError(
            f"there is no step {missing[0]} in this trace",
            hint=f"its steps are {named}" if there else "it has no events",
            where=_where(timeline),
        )
    return wanted


def _known_time(timeline: Timeline, start_ns: int | None, end_ns: int | None) -> tuple[int, int]:
    limits = np.iinfo(np.int64)
    first = int(limits.min) if start_ns is None else start_ns
    last = int(limits.max) if end_ns is None else end_ns
    if last <= first:
        raise UsageError(
            "the end of the time to keep is not after its start",
            hint="give the earlier time first",
            where=_where(timeline),
        )
    return first, last


def _known_kinds(kinds: Iterable[str]) -> list[int]:
    wanted = list(kinds)
    for kind in wanted:
        if kind not in KINDS:
            raise unknown_name("kind of event", kind, KINDS)
    return [KINDS.index(kind) for kind in wanted]


def _where(timeline: Timeline) -> str | None:
    source = timeline.metadata.get("source")
    return None if source is None else str(source)


def _overlaps(timeline: Timeline, first: int, last: int) -> Array:
    """An event without duration belongs to the time it happens in; the end itself is outside."""
    start: Any = timeline.core["start_ns"]
    end: Any = timeline.core["end_ns"]
    inside: Array = (start < last) & ((end > first) | (start >= first))
    return inside


def _with_launches(timeline: Timeline, kept: Array) -> Array:
    """Launch calls of kept device work, and device work of kept launch calls."""
    calls, devices = launch_pairs(timeline)
    wanted = kept.copy()
    wanted[calls[kept[devices]]] = True
    # A graph's launch starts many kernels: wanted by one of them, it brings the others too.
    wanted[devices[wanted[calls]]] = True
    return wanted


def _kept_ancestors(timeline: Timeline, rows: Integers, place: Integers) -> Integers:
    """Row of the nearest kept ancestor; −1 (the last entry of `place`) where there is none.

    Device work has no other parent than its call: an operator above it is no stand-in.
    """
    parent: Any = timeline.core["parent"]
    above: Any = parent[rows].astype(np.int64)
    above[np.isin(timeline.core["kind"][rows], DEVICE_KINDS) & (place[above] < 0)] = MISSING
    return nearest(above, parent, place[:-1] >= 0)


def _take_block(block: Block, place: Integers) -> Block | None:
    moved = place[block.rows]
    there = moved >= 0
    if not there.any():
        return None
    columns: dict[str, Array] = {name: values[there] for name, values in block.columns.items()}
    return Block(rows=moved[there].astype(block.rows.dtype), columns=columns)


def _number_anew(count: int, columns: Iterable[Array]) -> tuple[Integers, list[int]]:
    """The new code of each old one, by their order, MISSING for those that no column holds; and the old ones kept."""
    used = np.zeros(count + 1, bool)
    for codes in columns:
        used[codes] = True
    used[-1] = False  # what MISSING points to
    new_code = np.full(count + 1, MISSING, np.int64)
    new_code[used] = np.arange(int(used.sum()))
    return new_code, np.flatnonzero(used).tolist()


def _recoded(columns: Mapping[str, Array], new_code: Integers) -> dict[str, Any]:
    """With the codes of texts replaced."""
    return {
        name: new_code[codes].astype(codes.dtype) if COLUMN[name].form == "text" else codes
        for name, codes in columns.items()
    }
