"""Every nanosecond of a step given to one name: to the work that kept the device busy, or to why it was idle.

The shares are those of a breakdown: compute first, then communication beside which nothing computed, then copies beside
which nothing else ran. Of two works of one share that run at once, the one that began first has the time.

Before that: whether a difference between two traces is more than steps of one trace differ by among themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from stepscope.analyze.step.breakdown import SHARES
from stepscope.analyze.step.device_work import (
    COMMUNICATION,
    COMPUTE,
    TRANSFER,
    DeviceWork,
    Window,
    busy_ns,
    device_label,
    reaching_in,
)
from stepscope.analyze.step.host_activity import ACTIVITY_WORDS, divide_cpu_time
from stepscope.analyze.step.idle import HOST_REASONS, OTHER_REASONS, SYNC_REASONS, find_gaps
from stepscope.analyze.step.intervals import (
    Intervals,
    complement,
    join,
    length,
    measure_within,
    no_intervals,
    subtract,
    union,
)
from stepscope.analyze.step.numbers import MAD_TO_SD, Floats, Mask, distinct, number_codes, sum_by, unique
from stepscope.analyze.step.view import TraceView, view
from stepscope.core.errors import UsageError
from stepscope.formats.classify import CATEGORIES, classify_lone_communication, normal_name
from stepscope.formats.nesting import look_up
from stepscope.formats.timeline import ANNOTATION, DEVICE_KINDS, MISSING, OPERATOR, PYTHON, RUNTIME, Integers, Timeline
from stepscope.stats import holm, t_quantile, t_two_sided

Table: TypeAlias = Floats
"""Steps down, names across. NaN: the name has no value in that step."""

LEVEL = 0.01
"""Chance of even one false alarm in a table, as long as both traces vary as their steps do."""

MIN_EFFECT = 0.01
"""A difference smaller than this share of the larger value is not called one, however sure it is."""

ENOUGH_STEPS = 3
"""Steps of each trace from which on they tell themselves how much a step varies."""

STEP_VARIATION = 0.03
DEVICE_VARIATION = 0.02
HOST_VARIATION = 0.10
"""Relative standard deviation taken at least: of a step where there are few, of device work of one name, of anything
the host decides. Steps of one trace share its clocks and its caches and may differ less than two runs of the same
program do."""

ASSUMED_FREEDOM = 4
"""Degrees of freedom where no variation can be seen, because there is one step."""

SMALL_SAMPLES = (1.0, 1.0, 1.196, 1.495, 1.363, 1.206, 1.200, 1.140, 1.129, 1.107)
"""The median deviation of few values is too small by this (Croux and Rousseeuw 1992), by number of values."""
MAD_EFFICIENCY = 0.4
"""Degrees of freedom of a median deviation over those of a standard deviation."""
MEDIAN_INEFFICIENCY = 1.2533
"""Standard error of a median over that of the mean, for normal values."""
MIDDLE_INEFFICIENCY = 1.1
"""Standard error of a mean over the middle half of all values over that of the mean of all, for normal values."""


def middle_steps(durations: Any) -> Mask:
    """The middle half by length: of three the median one, of one or two all."""
    count = len(durations)
    dropped = (count + 1) // 4 if count > 2 else 0
    order = np.argsort(durations, kind="stable")
    middle = np.zeros(count, bool)
    middle[order[dropped : count - dropped]] = True
    return middle


def spreads(values: Table) -> tuple[Table, Table]:
    """For each name a standard deviation that a few odd steps do not move, and how many steps have the name."""
    there = ~np.isnan(values)
    count = there.sum(axis=0)
    with np.errstate(invalid="ignore"):
        deviation = np.where(there, np.abs(values - _median(values, there)), np.nan)
    few = np.array(SMALL_SAMPLES)[np.minimum(count, len(SMALL_SAMPLES) - 1)]
    correction = np.where(count < len(SMALL_SAMPLES), few, count / np.maximum(count - 0.8, 1))
    return MAD_TO_SD * correction * _median(deviation, there), count.astype(np.float64)


def _median(values: Table, there: Mask) -> Table:
    """The median of each column over the steps that have a value; 0 where none has."""
    ordered = np.sort(np.where(there, values, np.inf), axis=0)
    count = there.sum(axis=0)
    columns = np.arange(values.shape[1])
    last = max(len(values) - 1, 0)
    low = ordered[np.clip((count - 1) // 2, 0, last), columns]
    high = ordered[np.clip(count // 2, 0, last), columns]
    return np.where(count > 0, (low + high) / 2, 0.0)


def p_values(a: Table, b: Table, *, level: Table, variation: float) -> list[float]:
    """For each name the chance that medians over steps differ so much from variation alone.

    `level` is how large the values are; `variation` of it is taken at least.
    """
    spread, freedom, counts = _pooled(a, b, variation * level)
    # The variance of a median of so many values, in variances of one value.
    error = spread * np.sqrt(
        sum(np.where(count > 2, MEDIAN_INEFFICIENCY**2, 1.0) / np.maximum(count, 1) for count in counts)
    )
    there = [~np.isnan(values) for values in (a, b)]
    moved = np.abs(_median(b, there[1]) - _median(a, there[0])) * (level > 0)
    return [
        (t_two_sided(distance / by_chance, df) if by_chance > 0 else 0.0) if distance > 0 else 1.0
        for distance, by_chance, df in zip(moved.tolist(), error.tolist(), freedom.tolist(), strict=True)
    ]


def _pooled(a: Table, b: Table, least: Table) -> tuple[Table, Table, tuple[Table, Table]]:
    """Variation between steps of one side, its degrees of freedom, and in how many steps of each side it was seen."""
    (spread_a, count_a), (spread_b, count_b) = spreads(a), spreads(b)
    seen_a, seen_b = np.maximum(count_a - 1, 0), np.maximum(count_b - 1, 0)
    seen = np.maximum(seen_a + seen_b, 1)
    observed = np.sqrt((seen_a * spread_a**2 + seen_b * spread_b**2) / seen)
    freedom = ASSUMED_FREEDOM + MAD_EFFICIENCY * (seen_a + seen_b)
    return np.maximum(observed, least), freedom, (count_a, count_b)


def are_clear(p: Sequence[float], change: Table, level: Table) -> list[bool]:
    """Which changes of a table stand, each with regard to how many were looked at."""
    large = (abs(change) >= MIN_EFFECT * level).tolist()
    return [adjusted <= LEVEL and enough for adjusted, enough in zip(holm(p), large, strict=True)]


class StepNoise(NamedTuple):
    """What a step may change by from variation alone."""

    noise_s: float
    assumed: bool
    """Whether it comes from an assumed variation, because too few steps were seen."""


def noise_of_step(a: Table, b: Table, level: float) -> StepNoise:
    """The smallest change of the step that would be called one.

    The steps say how much they vary, where there are enough of them: by their standard deviation or by their median
    deviation, whichever asks for less. The first needs few steps, the second does not mind odd ones.
    """
    least = MIN_EFFECT * level
    error = MIDDLE_INEFFICIENCY * math.sqrt(1 / len(a) + 1 / len(b))
    columns = a[:, None], b[:, None]
    if min(len(a), len(b)) < ENOUGH_STEPS:
        floor = STEP_VARIATION * level
        spread, freedom, _ = _pooled(*columns, np.array([floor]))
        noise_s = t_quantile(LEVEL, float(freedom[0])) * error * float(spread[0])
        return StepNoise(max(noise_s, least), bool(spread[0] <= floor))
    seen = len(a) + len(b) - 2
    deviation = math.sqrt((float(((a - a.mean()) ** 2).sum()) + float(((b - b.mean()) ** 2).sum())) / seen)
    robust = float(_pooled(*columns, np.zeros(1))[0][0])
    noise_s = error * min(
        t_quantile(LEVEL, seen) * deviation, t_quantile(LEVEL, max(MAD_EFFICIENCY * seen, 1.0)) * robust
    )
    return StepNoise(max(noise_s, least), assumed=False)


IDLE_SHARES = SHARES[3:]
_REASONS_OF_SHARE = (HOST_REASONS, SYNC_REASONS, OTHER_REASONS)

OUTSIDE = "outside recorded calls"
NO_DEVICE = "cpu"


class BusyTime(NamedTuple):
    """What kept the device busy, in order of start; without a device: what threads did, cut where it changes."""

    rows: Integers
    start: Integers
    end: Integers
    latest_end: Integers
    share: Integers
    own_start: Integers
    """From here to its end nothing that began before it, of its own share, still runs; may lie after the end."""
    covered_by: tuple[Intervals, Intervals, Intervals]
    """For each share the time that more important ones take from it."""

    def part(self, window: Window) -> slice:
        return reaching_in(self.start, self.latest_end, window)

    def exposed(self, window: Window) -> tuple[slice, Integers]:
        """For the rows that reach into the window the nanoseconds of it that are theirs alone."""
        part = self.part(window)
        begin = np.maximum(self.own_start[part], window.start_ns)
        end = np.maximum(np.minimum(self.end[part], window.end_ns), begin)
        exposed = end - begin
        for share in (COMMUNICATION, TRANSFER):
            mine = self.share[part] == share
            if mine.any():
                exposed[mine] -= measure_within(self.covered_by[share], begin[mine], end[mine])
        return part, exposed


class TraceSide:
    """One of the two traces: its steps, and where their time went."""

    def __init__(self, timeline: Timeline, steps: Sequence[int] | None) -> None:
        self.timeline = timeline
        self.trace = view(timeline)
        self.numbers = complete_steps(self.trace) if steps is None else known_steps(self.trace, steps)
        self.windows = [self.trace.windows[number] for number in self.numbers]
        whole = self.trace.completion_windows
        self.overlapping = any(self.trace.windows[number] != whole[number] for number in self.numbers)

        def busy(work: DeviceWork) -> tuple[int, int]:
            return sum(busy_ns(work, window) for window in self.windows), -work.device

        self._device = max(self.trace.works, key=busy, default=None)
        self.device = NO_DEVICE if self._device is None else device_label(self._device.device)
        one = self._device
        self.work = _cpu_work(self.trace) if one is None else _own_times(one.rows, one.start, one.end, one.share)

    @property
    def has_device(self) -> bool:
        return self._device is not None

    @cached_property
    def exposed(self) -> list[tuple[slice, Integers]]:
        """For each step the rows of `work` that reach into it, and what of its time is theirs alone."""
        return [self.work.exposed(window) for window in self.windows]

    def idle(self, window: Window) -> tuple[list[str], Integers]:
        """Idle nanoseconds of one window by label of what the host was doing, one column per share."""
        if self._device is None:
            return self._cpu_idle(window)
        gaps = find_gaps(self.trace, self._device, window)
        if not len(gaps.spans.start):
            return [], np.zeros((0, len(IDLE_SHARES)), np.int64)
        spent = np.stack([gaps.parts[:, list(reasons)].sum(axis=1) for reasons in _REASONS_OF_SHARE], axis=1)
        middle = gaps.spans.start + (gaps.spans.end - gaps.spans.start) // 2
        different, place = np.unique(self._host_activity(gaps.thread, middle), return_inverse=True)
        sums = np.stack([sum_by(place, column, len(different)) for column in spent.T], axis=1)
        return [OUTSIDE if c == MISSING else self.timeline.texts[c] for c in different.tolist()], sums

    def _cpu_idle(self, window: Window) -> tuple[list[str], Integers]:
        """Time outside operators by what the program did."""
        part = self.work.part(window)
        busy = union(self.work.start[part], self.work.end[part])
        beside = divide_cpu_time(self.trace, window).beside
        spent = {ACTIVITY_WORDS[name]: length(subtract(spans, busy)) for name, spans in beside.items()}
        spent[OUTSIDE] = length(complement(busy, *window)) - sum(spent.values())
        sums = np.zeros((len(spent), len(IDLE_SHARES)), np.int64)
        sums[:, 0] = list(spent.values())
        for label, share in ((ACTIVITY_WORDS["synchronisation"], 1), (OUTSIDE, 2)):
            place = list(spent).index(label)
            sums[place, [0, share]] = sums[place, [share, 0]]
        kept = np.flatnonzero(sums.any(axis=1))
        return [list(spent)[place] for place in kept.tolist()], sums[kept]

    def _host_activity(self, thread: Integers, time: Integers) -> Integers:
        """Name of the innermost operator or Python function on the thread; else of its annotation or call."""
        trace = self.trace
        found = trace.innermost_of(thread, time)
        named = trace.enclosing(found, trace.is_kind(OPERATOR, PYTHON))
        plain = trace.enclosing(found, trace.is_kind(ANNOTATION, RUNTIME))
        row = np.where(named >= 0, named, plain)
        codes: Integers = np.where(row >= 0, trace.name[row], MISSING)
        return codes


def complete_steps(trace: TraceView) -> list[int]:
    """Without the first and last of many. Where optimizer steps are the marks, the first began before the trace did."""
    numbers = trace.judged_steps()
    steps = trace.timeline.steps
    if trace.timeline.step_marker == "optimizer" and len(steps) > 1:
        numbers = [number for number in numbers if number != steps[0].number]
    return numbers


def known_steps(trace: TraceView, steps: Sequence[int]) -> list[int]:
    """The steps asked for, each once; an error names one that the trace does not have."""
    if not steps:
        raise UsageError("no steps to compare were given", where=trace.source)
    return [trace.span(number).number for number in dict.fromkeys(steps)]


def _own_times(rows: Integers, start: Integers, end: Integers, share: Integers) -> BusyTime:
    own_start = start.astype(np.int64)
    spans: list[Intervals] = []
    for one in (COMPUTE, COMMUNICATION, TRANSFER):
        mine = np.flatnonzero(share == one)
        spans.append(union(start[mine], end[mine]))
        if len(mine) > 1:
            reached = np.maximum.accumulate(end[mine])[:-1]
            own_start[mine[1:]] = np.maximum(start[mine[1:]], reached)
    compute, communication, _ = spans
    return BusyTime(
        rows=rows,
        start=start,
        end=end,
        latest_end=np.maximum.accumulate(end) if len(end) else end,
        share=share,
        own_start=own_start,
        covered_by=(no_intervals(), compute, join((compute, communication))),
    )


def _cpu_work(trace: TraceView) -> BusyTime:
    """What each thread's innermost operator was, from one change to the next; a collective it is inside of makes it
    communication."""
    operators = trace.is_kind(OPERATOR)
    every = trace.rows(OPERATOR)
    is_talking = np.zeros(len(trace.timeline), bool)
    is_talking[trace.named(every, classify_lone_communication)] = True
    parts: list[tuple[Any, Any, Any]] = []
    for thread in distinct(trace.thread[every]):
        rows = every[trace.thread[every] == thread]
        cuts = unique(np.concatenate((trace.start[rows], trace.end[rows])))
        inside = trace.enclosing(trace.innermost(int(thread), cuts[:-1]), operators)
        busy = inside >= 0
        parts.append((inside[busy], cuts[:-1][busy], cuts[1:][busy]))
    if not parts:
        none = np.zeros(0, np.int64)
        return _own_times(none, none, none, none)
    rows, start, end = (np.concatenate([part[place] for part in parts]) for place in range(3))
    order = np.argsort(start, kind="stable")
    rows, start, end = rows[order], start[order], end[order]
    share = np.where(trace.enclosing(rows, is_talking) >= 0, COMMUNICATION, COMPUTE)
    return _own_times(rows, start, end, share)


CPU_CATEGORY = "operators"
NO_OPERATOR = "(no operator)"


class Identity(NamedTuple):
    """What distinguishes one row of a table from another."""

    share: str
    category: str
    name: str


class NameTotals(NamedTuple):
    """What one trace's kernels, or its operators, did in each step, by name."""

    identities: list[Identity]
    calls: Table
    total_ns: Table
    """For operators: host time, without the operators inside."""
    exposed_ns: Table
    operators: list[str | None]
    """The operator that launches most of the kernels of a name."""
    device_ns: Table | None = None
    """Device time that an operator launched itself."""


def count_work(side: TraceSide) -> tuple[NameTotals, Integers]:
    """Names of what kept the device busy; and for each row of `side.work` which of them it is."""
    trace, rows = side.trace, side.work.rows
    codes = trace.name[rows].astype(np.int64)
    category = trace.column("category")[rows].astype(np.int64) if side.has_device else np.full(len(rows), MISSING)
    keys = (codes << 16) | (category + 1) << 4 | side.work.share
    different, place = np.unique(keys, return_inverse=True)
    identities, local = _identify(side, different.tolist())
    which = local[place.reshape(-1)] if len(rows) else place
    count = len(identities)
    exposed = _exposed(side, which, count)
    calls, total = exposed * 0, exposed
    if side.has_device:
        calls = _sums(side, rows, which, count)
        total = _sums(side, rows, which, count, trace.end[rows] - trace.start[rows])
    operators = _main_operators(side, which, count)
    return NameTotals(identities, calls, total, exposed, operators), which


def _identify(side: TraceSide, keys: Sequence[int]) -> tuple[list[Identity], Any]:
    """Spellings that mean the same kernel are one."""
    found: dict[Identity, int] = {}
    local = []
    for key in keys:
        text = side.timeline.texts[key >> 16]
        category = (key >> 4 & 0xFFF) - 1
        identity = Identity(
            share=SHARES[key & 15],
            category=CATEGORIES[category] if category >= 0 else CPU_CATEGORY,
            name=normal_name(text) if side.has_device else text,
        )
        local.append(found.setdefault(identity, len(found)))
    return list(found), np.array(local, np.int64)


def _exposed(side: TraceSide, which: Integers, count: int) -> Table:
    """By step and name, what of the step is its alone; `which` names each row of `side.work`."""
    exposed: Table = np.zeros((len(side.windows), count))
    for number, (part, spent) in enumerate(side.exposed):
        exposed[number] = np.bincount(which[part], weights=spent, minlength=count)
    return exposed


def _sums(side: TraceSide, rows: Integers, which: Integers, count: int, weights: Any = None) -> Table:
    """By step and name, of what each step launched: the number of rows, or their weights."""
    steps = len(side.numbers)
    place = look_up(side.trace.step[rows], np.array(side.numbers, np.int64), np.arange(steps))
    mine = place >= 0
    cells = place[mine] * count + which[mine]
    sums = np.bincount(cells, None if weights is None else weights[mine], steps * count)
    table: Table = sums.reshape(steps, count).astype(np.float64)
    return table


def _main_operators(side: TraceSide, which: Integers, count: int) -> list[str | None]:
    if not side.has_device:
        return [None] * count
    operator = innermost_operator(side, side.work.rows)
    there = operator >= 0
    names = side.trace.name[operator[there]].astype(np.int64)
    pairs, calls = np.unique((which[there] << 32) | names, return_counts=True)
    main: list[str | None] = [None] * count
    for pair in pairs[np.argsort(calls, kind="stable")].tolist():
        main[pair >> 32] = side.timeline.texts[pair & 0xFFFFFFFF]
    return main


def count_operators(side: TraceSide) -> NameTotals:
    """Operators by name, with the device time each launched itself; work that no operator launched has a row too."""
    trace = side.trace
    rows = trace.rows(OPERATOR)
    codes, place = number_codes(trace.name[rows], len(side.timeline.texts))
    count = len(codes) + 1
    of_row = np.full(len(side.timeline) + 1, len(codes), np.int64)
    of_row[rows] = place
    calls = _sums(side, rows, place, count)
    self_ns = _sums(side, rows, place, count, _self_times(side, rows))
    exposed, device_ns = np.zeros((len(side.windows), count)), None
    if side.has_device:
        launched = trace.rows(*DEVICE_KINDS)
        launcher = of_row[innermost_operator(side, launched)]
        device_ns = _sums(side, launched, launcher, count, trace.end[launched] - trace.start[launched])
        exposed = _exposed(side, of_row[innermost_operator(side, side.work.rows)], count)
    identities = [Identity("", "", text) for text in [*map(trace.text, codes), NO_OPERATOR]]
    return NameTotals(identities, calls, self_ns, exposed, [None] * count, device_ns)


def innermost_operator(side: TraceSide, rows: Integers) -> Integers:
    return side.trace.enclosing(rows, side.trace.is_kind(OPERATOR))


def operators_around(side: TraceSide, rows: Integers) -> Integers:
    """For each operator the next one around it; −1 at the top."""
    return innermost_operator(side, side.trace.parent[rows])


def _self_times(side: TraceSide, rows: Integers) -> Integers:
    duration = side.trace.end - side.trace.start
    above = operators_around(side, rows)
    inside = np.bincount(above[above >= 0], weights=duration[rows[above >= 0]], minlength=len(side.timeline))
    own: Integers = np.maximum(duration[rows] - inside[rows], 0)
    return own


def count_idle(side: TraceSide) -> tuple[list[Identity], Table]:
    """Idle time by share and by what the host was doing."""
    idles = [side.idle(window) for window in side.windows]
    place = {label: number for number, label in enumerate(dict.fromkeys(one for labels, _ in idles for one in labels))}
    table = np.zeros((len(idles), len(place), len(IDLE_SHARES)))
    for number, (labels, spent) in enumerate(idles):
        table[number, [place[label] for label in labels]] = spent
    identities = [Identity(share, share, label) for label in place for share in IDLE_SHARES]
    return identities, table.reshape(len(idles), len(identities))
