"""Which modules, phases and annotations kernels come from, and times by such groups."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from stepscope.analyze.step.device_work import LONG_AGO
from stepscope.analyze.step.numbers import Floats, Mask, known_only, make_rows
from stepscope.analyze.step.view import TraceView
from stepscope.formats.timeline import ANNOTATION, DEVICE_ANNOTATION, MISSING, OPERATOR, PYTHON, Integers

_LARGEST_BITS = 62
COVERED = 0.8
"""Share of the time that the smallest set of groups has to cover."""


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of one group."""

    name: str
    count: int
    total_s: float
    """Sum of durations: more than the time passed, where several run at once."""
    share: float
    """Fraction of the sum of all groups."""
    mean_s: float
    median_s: float
    p95_s: float
    min_s: float
    max_s: float
    std_s: float | None
    """Standard deviation of the sample; None for a single one."""


class TimesTable(msgspec.Struct, frozen=True, kw_only=True):
    """Groups, longest total first."""

    rows: list[Times]
    covering: int
    """So many of the first rows cover 80 % of the time, and no smaller set does."""


def _by_group_and_length(group: Any, durations: Any, count: int) -> Any:
    """The durations, group by group, in each the shortest first."""
    bits = int(durations.max()).bit_length()
    if int(durations.min()) < 0 or bits + count.bit_length() > _LARGEST_BITS:
        return durations[np.lexsort((durations, group))]
    # Both in one number: numbers sort several times faster than places of numbers.
    together = group.astype(np.int64)
    together <<= bits
    together |= durations
    together.sort()
    together &= (1 << bits) - 1
    return together


def _quantile(ordered: Any, first: Any, counts: Any, q: float) -> Floats:
    """Linear between order statistics, as in `stepscope.stats`."""
    position = q * (counts - 1)
    below = np.floor(position).astype(np.int64)
    low, high = ordered[first + below], ordered[first + np.minimum(below + 1, counts - 1)]
    values: Floats = low + (high - low) * (position - below)
    return values


def tabulate(names: Sequence[str], group: Any, durations: Any) -> TimesTable:
    """A row a name; `group` says for each duration which of the names it has. Names without any are left out."""
    if not len(durations):
        return TimesTable(rows=[], covering=0)
    used = np.bincount(group, minlength=len(names)) > 0
    if not used.all():
        place = np.cumsum(used) - 1
        group, names = place[group], [name for name, is_used in zip(names, used.tolist(), strict=True) if is_used]
    ordered = _by_group_and_length(group, durations, len(names))
    counts = np.bincount(group)
    last = np.cumsum(counts)
    first = last - counts
    totals = np.add.reduceat(ordered, first)
    means = totals / counts
    squares = np.bincount(group, weights=(durations - means[group]) ** 2)
    deviations = np.sqrt(squares / np.maximum(counts - 1, 1))
    median, p95 = (_quantile(ordered, first, counts, q) for q in (0.5, 0.95))
    order, whole = np.argsort(-totals, kind="stable"), int(totals.sum())
    times = {"total_s": totals, "mean_s": means, "median_s": median, "p95_s": p95}
    times |= {"min_s": ordered[first], "max_s": ordered[last - 1]}
    columns: dict[str, Any] = {name: values[order] / 1e9 for name, values in times.items()}
    columns["name"] = [names[place] for place in order.tolist()]
    columns["count"], columns["share"] = counts[order], totals[order] / max(whole, 1)
    columns["std_s"] = known_only(deviations / 1e9, counts > 1)[order]
    rows = make_rows(Times, columns)
    reached = np.cumsum(totals[order])
    return TimesTable(rows=rows, covering=min(int(np.searchsorted(reached, COVERED * whole)) + 1, len(rows)))


PHASES = ("forward", "backward", "optimizer", "other")
FORWARD, BACKWARD, OPTIMIZER, OTHER = range(4)

ENGINE = "autograd::engine"
_OPTIMIZER_STEP = re.compile(r"Optimizer\.step\b")
_OUTSIDE = re.compile(r"Optimizer\.zero_grad\b|enumerate\(DataLoader\)")
_WORDS = re.compile(r"\b(forward|backward|optimi[sz]er)\b", re.IGNORECASE)
_MODULE = "nn.Module: "
_STEP = re.compile(r"ProfilerStep\s*#?\d+$")
_LOOK_BACK = 64
"""Device annotations that may have begun and ended inside the one that encloses a kernel."""


def find_phases(trace: TraceView, rows: Integers) -> Integers:
    """For device rows an index into PHASES.

    Backward: launched under an operator that autograd's engine ran, or on a thread that runs nothing else. Optimizer:
    under `Optimizer.step`. Forward: the rest that was launched before the last backward work of its step, or in a step
    without any. Where no operators are recorded, annotations that use these words decide.
    """
    launch = trace.parent[rows]
    known = launch >= 0
    backward = known & (trace.enclosing(launch, _is_backward(trace)) >= 0)
    for thread in _engine_threads(trace):
        backward |= known & (trace.thread[launch] == thread)
    optimizer = ~backward & (trace.enclosing(launch, _is_named(trace, _OPTIMIZER_STEP)) >= 0)
    outside = trace.enclosing(launch, _is_named(trace, _OUTSIDE)) >= 0
    phase = np.full(len(rows), OTHER, np.int64)
    phase[known & ~outside & _before_backward(trace, rows, backward)] = FORWARD
    phase[optimizer] = OPTIMIZER
    phase[backward] = BACKWARD
    _name_unexplained(trace, rows, phase)
    return phase


def _before_backward(trace: TraceView, rows: Integers, backward: Mask) -> Mask:
    step = trace.step[rows] - min(int(trace.step.min()), 0) if len(rows) else rows
    called = np.where(trace.parent[rows] >= 0, trace.start[trace.parent[rows]], trace.start[rows])
    last = np.full(int(step.max()) + 1 if len(rows) else 0, LONG_AGO)
    np.maximum.at(last, step[backward], called[backward])
    early: Mask = (called < last[step]) | (last[step] == LONG_AGO)
    return early


def _is_backward(trace: TraceView) -> Mask:
    def find() -> Mask:
        operators = trace.rows(OPERATOR)
        has_forward = operators[trace.column("forward_thread")[operators] > 0]
        return trace.mask(has_forward, trace.named(operators, lambda name: name.startswith(ENGINE)))

    return trace.keep("is backward", find)


def _engine_threads(trace: TraceView) -> list[int]:
    """Threads that autograd's engine made for itself: the name says so, or most of what runs there is the engine's."""

    def find() -> list[int]:
        operators = trace.rows(OPERATOR)
        top = operators[trace.enclosing(trace.parent[operators], trace.is_kind(OPERATOR)) == MISSING]
        top = top[trace.thread[top] >= 0]
        by_engine = trace.named(top, lambda name: name.startswith(ENGINE))
        count = len(trace.timeline.threads)
        mine, all_of_it = (np.bincount(trace.thread[rows], minlength=count).tolist() for rows in (by_engine, top))
        return [
            number
            for number, thread in enumerate(trace.timeline.threads)
            if number != trace.main_thread and ("autograd" in thread.name or 2 * mine[number] > all_of_it[number])
        ]

    return trace.keep("engine threads", find)


def _is_named(trace: TraceView, pattern: re.Pattern[str]) -> Mask:
    """Annotations and operators whose name begins like this (older profilers wrote some annotations as operators)."""
    rows = trace.rows(ANNOTATION, OPERATOR)
    return trace.keep(("named", pattern), lambda: trace.mask(trace.named(rows, pattern.match)))


def _name_unexplained(trace: TraceView, rows: Integers, phase: Integers) -> None:
    """Annotations' words for work that no operator launched."""
    bare = np.flatnonzero(trace.enclosing(trace.parent[rows], trace.is_kind(OPERATOR)) == MISSING)
    if not len(bare):
        return
    annotation = find_annotations(trace, rows[bare])
    for code in trace.codes_in(annotation[annotation >= 0]):
        found = _WORDS.search(trace.text(code))
        if found and not _OUTSIDE.match(trace.text(code)):
            word = PHASES.index("optimizer" if found[1].lower().startswith("opt") else found[1].lower())
            phase[bare[(annotation >= 0) & (trace.name[annotation] == code)]] = word


def find_annotations(trace: TraceView, rows: Integers) -> Integers:
    """For device rows the row of the innermost annotation they were launched in, steps left out; −1: none.

    Work that another thread launched belongs to what the main thread was in then: it waits there for that thread.
    Work without a launch belongs to the annotation on its own stream that encloses it.
    """
    wanted = trace.keep("is annotation", lambda: trace.mask(_without_steps(trace, trace.rows(ANNOTATION))))
    launch = trace.parent[rows]
    found = trace.enclosing(launch, wanted)
    elsewhere = np.flatnonzero((found == MISSING) & (launch >= 0) & (trace.thread[launch] != trace.main_thread))
    if len(elsewhere):
        around = trace.innermost(trace.main_thread, trace.start[launch[elsewhere]])
        found[elsewhere] = trace.enclosing(around, wanted)
    orphans = np.flatnonzero(launch == MISSING)
    if len(orphans):
        found[orphans] = _device_annotations(trace, rows[orphans])
    return found


def _without_steps(trace: TraceView, annotations: Integers) -> Integers:
    marker = trace.timeline.step_marker.removeprefix("annotation ")
    is_step = trace.has_name(annotations, lambda name: bool(_STEP.match(name)) or name.startswith(marker))
    kept: Integers = annotations[~is_step]
    return kept


def _device_annotations(trace: TraceView, rows: Integers) -> Integers:
    found = np.full(len(rows), MISSING, np.int64)
    annotations = _without_steps(trace, trace.rows(DEVICE_ANNOTATION))
    annotations = annotations[np.argsort(trace.start[annotations], kind="stable")]
    device, stream = trace.column("device"), trace.column("stream")
    places = np.column_stack((device[annotations], stream[annotations]))
    for one, other in {(int(a), int(b)) for a, b in places}:
        mine = annotations[(places[:, 0] == one) & (places[:, 1] == other)]
        here = np.flatnonzero((device[rows] == one) & (stream[rows] == other))
        place = trace.start[mine].searchsorted(trace.start[rows[here]], side="right") - 1
        for _ in range(_LOOK_BACK):
            inside = (place >= 0) & (trace.end[mine[place]] >= trace.end[rows[here]])
            found[here[inside]] = mine[place[inside]]
            here, place = here[~inside & (place > 0)], place[~inside & (place > 0)] - 1
            if not len(here):
                break
    return found


def find_modules(trace: TraceView, rows: Integers) -> Integers | None:
    """For device rows the row of the innermost `nn.Module` they were launched in; −1: none. None: no modules recorded.

    Backward work belongs to the module of the forward operator that has its sequence number.
    """
    modules = trace.named(trace.rows(PYTHON, ANNOTATION), lambda name: name.startswith(_MODULE))
    if not len(modules):
        return None
    wanted = trace.mask(modules)
    found = trace.enclosing(trace.parent[rows], wanted)
    missing = np.flatnonzero(found == MISSING)
    forward = _forward_operators(trace, trace.parent[rows[missing]])
    found[missing] = trace.enclosing(forward, wanted)
    return found


def _forward_operators(trace: TraceView, launch: Integers) -> Integers:
    """For launches in the backward pass the forward operator whose gradient they compute; −1: not known."""
    sequence, forward_thread = trace.column("sequence"), trace.column("forward_thread")
    operators = trace.rows(OPERATOR)
    numbered = operators[(sequence[operators] >= 0) & (forward_thread[operators] <= 0)]
    numbered = numbered[~_is_backward(trace)[numbered]]
    # Of several with one number the last to begin made the node of the graph.
    numbered = numbered[np.lexsort((trace.start[numbered], sequence[numbered]))]
    found = np.full(len(launch), MISSING, np.int64)
    if not len(numbered):
        return found
    has_pair = trace.mask(operators[(sequence[operators] >= 0) & (forward_thread[operators] > 0)])
    backward = trace.enclosing(launch, has_pair)
    wanted = np.where(backward >= 0, sequence[backward], MISSING)
    place = sequence[numbered].searchsorted(wanted, side="right") - 1
    matches = (backward >= 0) & (place >= 0) & (sequence[numbered[place]] == wanted)
    found[matches] = numbered[place[matches]]
    return found
