"""What the step would take if something took less or more time: the whole schedule computed again."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from stepscope.analyze.critical import kinds
from stepscope.analyze.critical.kinds import HOST_COSTS, WORK_COSTS
from stepscope.analyze.critical.path import CriticalPath, describe_path
from stepscope.analyze.critical.schedule import Schedule, StepGraph, retime
from stepscope.analyze.step.numbers import Floats, Mask, Whole, seconds
from stepscope.analyze.step.view import TraceView, view
from stepscope.core.errors import UsageError, unknown_name
from stepscope.formats.classify import CATEGORIES
from stepscope.formats.timeline import KERNEL, OPERATOR

NEVER_BINDS = -(1 << 60)
MOST_RANKS = 20
"""How many ranks an error lists."""


class Target(NamedTuple):
    """What the left side of an edit can name."""

    costs: tuple[int, ...]
    takes: str | None
    """What stands after the colon: name (of the event), category, stream, operator; None: nothing may."""
    needs: bool
    meaning: str


TARGETS = {
    "kernels": Target(WORK_COSTS, "kernel", False, "kernels, collectives among them; with :PATTERN those of that name"),
    "compute": Target((kinds.C_COMPUTE,), "name", False, "kernels that are no communication"),
    "communication": Target((kinds.C_COMMUNICATION,), "name", False, "communication on the device"),
    "copies": Target((kinds.C_COPY,), "name", False, "copies and fills"),
    "device": Target(WORK_COSTS, "name", False, "all work of devices"),
    "category": Target(WORK_COSTS, "category", True, "device work of a category: category:gemm"),
    "stream": Target(WORK_COSTS, "stream", True, "device work of a stream: stream:7, stream:0/7 with the device"),
    "operator": Target(WORK_COSTS, "operator", True, "device work launched inside operators of that name"),
    "launches": Target(
        (kinds.C_LAUNCH_CALL, kinds.C_LAUNCH), "call", False, "launch calls and the delay to the device"
    ),
    "host": Target(HOST_COSTS, "name", False, "all time of the host"),
    "operators": Target((kinds.C_OPERATOR,), "name", False, "the host's own time in operators"),
    "runtime": Target((kinds.C_RUNTIME,), "name", False, "calls of the runtime that launch nothing"),
    "python": Target((kinds.C_PYTHON,), "name", False, "recorded Python functions"),
    "gaps": Target((kinds.C_GAP,), "name", False, "the host's time between recorded events"),
    "data_loading": Target((kinds.C_DATA_LOADING,), "name", False, "loading data"),
    "handovers": Target((kinds.C_HANDOVER,), "name", False, "handing over between threads"),
    "stream_gaps": Target((kinds.C_STREAM,), None, False, "from one device activity to the next on a stream"),
    "sync": Target((kinds.C_SYNC,), "name", False, "from the end of work to the return of the call that waited"),
    "unexplained": Target((kinds.C_UNEXPLAINED,), None, False, "delay that no known dependency gives"),
    "blocking": Target((kinds.C_SYNC,), "name", False, "0: calls no longer wait for the device"),
}
_SPLIT = re.compile(r"[,;]\s*(?=(?:" + "|".join(TARGETS) + r")\b[^,;]*=)")
_FACTOR = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(?:e(-?\d+))?\s*(%?)", re.IGNORECASE)
_HINT = "write TARGET=FACTOR or TARGET:PATTERN=FACTOR, for example kernels:*gemm*=0.5"


class Edit(NamedTuple):
    """One change: times of what it names are multiplied."""

    text: str
    target: str
    pattern: str | None
    rank: int | None
    """The number of the rank, as its trace has it; None: all."""
    factor: float


class AppliedEdit(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    events: int
    """Delays and events it changed."""
    time_s: float
    """What they took before, whether on the path or not."""


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to an edit. Times are of the profiled step."""

    edits: list[AppliedEdit]
    before_s: float
    after_s: float
    saved_s: float
    before_by_kind_s: dict[str, float]
    path: CriticalPath
    """The path after the edit, without its segments."""


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """The step if a whole kind of time were free: no improvement of that kind can give more."""

    name: str
    meaning: str
    what_if: str
    step_s: float
    saved_s: float


LIMITS = (
    ("host-bound", "all device work takes no time: what the host alone needs", "device=0, stream_gaps=0"),
    ("device-bound", "the host and its launches take no time: what the device alone needs", "host=0, launches=0"),
    ("no communication", "collectives take no time", "communication=0"),
    ("no copies", "copies and fills take no time", "copies=0"),
    ("no launches", "launching takes no time", "launches=0"),
    ("no gaps", "the host does nothing between recorded events", "gaps=0"),
    ("no blocking", "no call waits for the device", "blocking=0"),
)


def parse_what_if(text: str, *, where: str | None = None) -> list[Edit]:
    """`kernels:*gemm*=0.5, host=0`: edits in order, separated by commas or semicolons.

    A pattern with * or ? must fit the whole name, one without may stand anywhere in it; case does not matter. `@N`
    before the equals sign restricts an edit to the rank of that number.
    """
    edits = [_parse_edit(part.strip(), where) for part in _SPLIT.split(text.strip().strip(",;")) if part.strip()]
    if not edits:
        raise UsageError("the what-if is empty", hint=_HINT, where=where)
    return edits


def _parse_edit(text: str, where: str | None) -> Edit:
    left, equals, right = text.rpartition("=")
    if not equals:
        raise UsageError(f"{text!r} has no factor", hint=_HINT, where=where)
    factor = _parse_factor(right.strip(), text, where)
    left, rank = _parse_rank(left.strip(), text, where)
    name, colon, pattern = (part.strip() for part in left.partition(":"))
    target = TARGETS.get(name)
    if target is None:
        raise unknown_name("what-if target", name, TARGETS, where=where)
    if colon and target.takes is None:
        raise UsageError(f"{name} takes no pattern", hint=f"write {name}=FACTOR", where=where)
    if (colon and not pattern) or (target.needs and not pattern):
        raise UsageError(
            f"{text!r} does not say which {target.takes}", hint=f"for example {target.meaning}", where=where
        )
    if name == "blocking" and factor not in (0.0, 1.0):
        raise UsageError("calls either wait or do not", hint="write blocking=0", where=where)
    if target.takes == "category" and pattern not in CATEGORIES:
        raise unknown_name("category", pattern, CATEGORIES, where=where)
    return Edit(text, name, pattern or None, rank, factor)


def _parse_factor(text: str, edit: str, where: str | None) -> float:
    match = _FACTOR.fullmatch(text)
    if match is None:
        hint = "a factor is a number from 0 up: 0.5 is half the time, 2 twice the time, 80% also works"
        raise UsageError(f"{text!r} in {edit!r} is not a factor", hint=hint, where=where)
    value = float(match[1]) * 10.0 ** int(match[2] or 0)
    return value / 100 if match[3] else value


def _parse_rank(left: str, edit: str, where: str | None) -> tuple[str, int | None]:
    name, at, rank = left.rpartition("@")
    if not at or not re.fullmatch(r"\s*\d+\s*", rank):
        return left, None
    if not name.strip():
        raise UsageError(f"{edit!r} names a rank but no target", hint=_HINT, where=where)
    return name.strip(), int(rank)


def what_if(graph: StepGraph, edits: Sequence[Edit] | str) -> WhatIf:
    """The step with these edits. Edits that meet on one event multiply."""
    chosen = parse_what_if(edits) if isinstance(edits, str) else list(edits)
    schedule, applied = apply_edits(graph, chosen)
    before = describe_path(graph, segments=False)
    after = describe_path(graph, schedule, segments=False)
    return WhatIf(
        edits=applied,
        before_s=before.length_s,
        after_s=after.length_s,
        saved_s=seconds(graph.length_ns - schedule.length_ns),
        before_by_kind_s=before.by_kind_s,
        path=after,
    )


def find_limits(graph: StepGraph) -> list[Limit]:
    """How short the step could become if one kind of time were free; kinds that the step does not have are left out."""
    limits = []
    for name, meaning, text in LIMITS:
        schedule, applied = apply_edits(graph, parse_what_if(text), strict=False)
        if any(edit.events for edit in applied):
            step_s, saved_s = seconds(schedule.length_ns), seconds(graph.length_ns - schedule.length_ns)
            limits.append(Limit(name=name, meaning=meaning, what_if=text, step_s=step_s, saved_s=saved_s))
    return limits


def apply_edits(graph: StepGraph, edits: Sequence[Edit], *, strict: bool = True) -> tuple[Schedule, list[AppliedEdit]]:
    """`strict`: an edit that names nothing is an error."""
    factor = np.ones(len(graph.edges.weight))
    rest_factor = np.ones(len(graph.edges.weight))
    dropped = np.zeros(len(graph.edges.weight), bool)
    applied = []
    for edit in edits:
        chosen = _chosen(graph, edit)
        count = int(chosen.sum())
        if not count and strict:
            raise _nothing_named(graph, edit)
        taken = graph.edges.unexplained if edit.target == "unexplained" else graph.edges.weight
        applied.append(AppliedEdit(text=edit.text, events=count, time_s=seconds(int(taken[chosen].sum()))))
        if edit.target == "unexplained":
            rest_factor[chosen] *= edit.factor
        elif edit.target == "blocking":
            dropped |= chosen & (edit.factor == 0)
        else:
            factor[chosen] *= edit.factor
    weight, rest = _scaled(graph.edges.weight, factor), _scaled(graph.edges.unexplained, rest_factor)
    return retime(graph, np.where(dropped, NEVER_BINDS, weight), rest), applied


def _scaled(time: Whole, factor: Floats) -> Whole:
    return np.where(factor == 1, time, np.rint(time * factor).astype(np.int64))


def _chosen(graph: StepGraph, edit: Edit) -> Mask:
    target = TARGETS[edit.target]
    chosen: Mask
    if edit.target == "unexplained":
        chosen = graph.edges.unexplained != 0
    elif edit.target == "blocking":
        chosen = (graph.edges.kind == kinds.SYNC) | (graph.edges.kind == kinds.QUEUE)
    else:
        chosen = np.isin(graph.edges.cost, target.costs)
    if edit.rank is not None:
        chosen &= graph.edges.rank == _place_of_rank(graph, edit.rank, edit.text)
    if edit.pattern is not None or edit.target == "kernels":
        for index, timeline in enumerate(graph.timelines):
            mine = np.flatnonzero(chosen & (graph.edges.rank == index))
            chosen[mine] = _matches(view(timeline), graph.edges.row[mine], target.takes, edit.pattern)
    return chosen


def _place_of_rank(graph: StepGraph, rank: int, text: str) -> int:
    """Index of the timeline of a rank. Traces may be missing, so it need not be its number."""
    numbers = [place if timeline.rank is None else timeline.rank for place, timeline in enumerate(graph.timelines)]
    if rank not in numbers:
        listed = ", ".join(map(str, numbers[:MOST_RANKS])) + (", …" if len(numbers) > MOST_RANKS else "")
        several = "s" if len(numbers) > 1 else ""
        raise UsageError(f"{text!r}: there is no rank {rank}", hint=f"this path has the rank{several} {listed}")
    return numbers.index(rank)


def _matches(trace: TraceView, rows: Whole, takes: str | None, pattern: str | None) -> Mask:
    """Which rows (−1: none) fit the pattern."""
    known = rows >= 0
    fits = np.zeros(len(rows), bool)
    there = rows[known]
    if takes == "stream":
        fits[known] = _on_stream(trace, there, pattern or "")
    elif takes == "category":
        fits[known] = trace.column("category")[there] == CATEGORIES.index(pattern or "")
    elif takes == "operator":
        fits[known] = _inside_operators(trace, there, pattern or "")
    elif takes == "call":
        # The delay of a launch belongs to the work, its name to the call.
        is_host = trace.thread[there] >= 0
        calls = np.where(is_host, there, trace.parent[there])
        fits[known] = (calls >= 0) & _is_named(trace, calls, pattern or "")
    else:
        fits[known] = _is_named(trace, there, pattern) if pattern else True
        if takes == "kernel":
            fits[known] &= trace.kind[there] == KERNEL
    return fits


def _is_named(trace: TraceView, rows: Whole, pattern: str) -> Mask:
    return trace.has_name(rows, compile_pattern(pattern).search)


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """With * or ?: must fit the whole name; else any part of it."""
    if "*" in pattern or "?" in pattern:
        return re.compile(fnmatch.translate(pattern.replace("[", "[[]")), re.IGNORECASE)
    return re.compile(re.escape(pattern), re.IGNORECASE)


def _on_stream(trace: TraceView, rows: Whole, pattern: str) -> Mask:
    match = re.fullmatch(r"(?:(\d+)/)?(\d+)", pattern)
    if match is None:
        raise UsageError(f"{pattern!r} is not a stream", hint="write stream:7=0.5, or stream:0/7=0.5 with the device")
    fits: Mask = trace.column("stream")[rows] == int(match[2])
    if match[1] is not None:
        fits &= trace.column("device")[rows] == int(match[1])
    return fits


def _inside_operators(trace: TraceView, rows: Whole, pattern: str) -> Mask:
    """Device work whose launch lies inside an operator of that name, however deep."""
    operators = trace.rows(OPERATOR)
    wanted = trace.mask(operators[_is_named(trace, operators, pattern)])
    inside: Mask = trace.enclosing(trace.parent[rows], wanted) >= 0
    return inside


def _nothing_named(graph: StepGraph, edit: Edit) -> UsageError:
    target = TARGETS[edit.target]
    if edit.pattern is None or target.takes not in ("name", "kernel"):
        return UsageError(
            f"{edit.text!r} changes nothing: the step has no such time", hint="see its path by kind first"
        )
    longest = np.argsort(-graph.edges.weight, kind="stable")
    chosen = longest[np.isin(graph.edges.cost[longest], target.costs) & (graph.edges.row[longest] >= 0)][:200]
    names = [
        graph.timelines[rank].texts[int(graph.timelines[rank].core["name"][row])]
        for rank, row in zip(graph.edges.rank[chosen].tolist(), graph.edges.row[chosen].tolist(), strict=True)
    ]
    listed = "; ".join(name[:60] for name in list(dict.fromkeys(names))[:4]) or "none"
    return UsageError(f"{edit.text!r}: no name fits {edit.pattern!r}", hint=f"the longest are: {listed}")
