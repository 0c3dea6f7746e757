"""How device work was launched: what the calls cost, how long work waited, how full the queue was."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from stepscope.analyze.section import Brief, Section, field, make_table
from stepscope.analyze.step.device_work import Window, device_label
from stepscope.analyze.step.host_waits import host_waits
from stepscope.analyze.step.intervals import StepFunction, count_open, sweep, value_at
from stepscope.analyze.step.numbers import distinct, seconds, share_of, sum_by, top_by
from stepscope.analyze.step.view import TraceView, view
from stepscope.core.units import format_duration, format_significant
from stepscope.formats.classify import short_name
from stepscope.formats.timeline import OPERATOR, Timeline

if TYPE_CHECKING:
    from stepscope.analyze.job import JobReport

LONG_CALL_NS = 50_000
"""A launch call that takes longer is listed as slow."""
LONG_DELAY_NS = 100_000
"""Work on an empty stream that starts later than this after its call is listed as late."""
BLOCKED_TIMES = 10
"""A launch is blocked when it takes so many times the median of its name while the queue is nearly at its fullest."""
NEARLY_FULL = 0.9
LEAST_FULL = 64
"""A queue that never held so many does not hold the host back, however long a call takes."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one kind."""

    count: int
    mean_s: float
    median_s: float
    p95_s: float
    min_s: float
    max_s: float


class CallStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Launch calls of one name."""

    name: str
    calls: int
    launched: int
    """Device rows they launched; a graph launches many with one call."""
    call: Spread
    """How long the host was inside the call."""
    latency: Spread | None
    """From the start of the call to the start of its work, where the stream had nothing else to do."""
    held: Spread | None
    """The same where the stream was empty too, but had been told to wait for an event before this launch."""
    queueing: Spread | None
    """The same where the stream was still busy: time in the queue."""
    started_early: int
    """Device rows that started before their call returned."""
    longer_than_work: int
    """Calls that took longer than the work they launched."""
    slow_calls: int
    """Calls of more than 50 µs."""
    late_starts: int
    """Device rows with a latency of more than 100 µs."""


class SlowLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """One launch that stands out."""

    call: str
    launched: str
    operator: str | None
    start_s: float
    """From the start of the window."""
    call_s: float
    delay_s: float
    """From the start of the call to the start of the work."""
    waited_for: str
    """nothing, event or stream: what stood before it when it was launched."""


class QueueDepth(msgspec.Struct, frozen=True, kw_only=True):
    """How many device rows were waiting, over the window."""

    device: str
    stream: int | None
    """None: all streams of the device."""
    pending_mean: float
    """Launched and not started; weighted by time."""
    pending_p95: int
    pending_max: int
    outstanding_mean: float
    """Launched and not finished."""
    outstanding_p95: int
    outstanding_max: int


class BlockedLaunches(msgspec.Struct, frozen=True, kw_only=True):
    """Launches that waited for room in the queue."""

    calls: int
    total_s: float
    share: float
    """Fraction of the time inside launch calls."""


class LaunchReport(msgspec.Struct, frozen=True, kw_only=True):
    """Launches of a step."""

    step: int | None
    calls: int
    launched: int
    without_launch: int
    """Device rows whose call is not in the trace."""
    call_s: float
    """Time inside launch calls, all threads together."""
    by_call: list[CallStatistics]
    slowest_calls: list[SlowLaunch]
    latest_starts: list[SlowLaunch]
    queue: list[QueueDepth]
    blocked: BlockedLaunches
    note: str | None = None


ALONE, HELD, QUEUED = range(3)
"""On an empty stream; on an empty stream behind a wait for an event; behind other work."""
_WAITED_FOR = ("nothing", "event", "stream")


class _Launches(NamedTuple):
    """Device rows with a launch, device by device, and what belongs to each."""

    place: Any
    """In the work of its device."""
    device: Any
    call: Any
    """Row of the call."""
    called: Any
    """When the call began."""
    start: Any
    end: Any
    stream: Any

    @property
    def delay(self) -> Any:
        return self.start - self.called

    @property
    def begun(self) -> Any:
        """When the work started; clocks of host and device may disagree a little, but nothing waits for less than 0."""
        return np.maximum(self.start, self.called)


def study_launches(timeline: Timeline, step: int | None, *, top: int = 10) -> LaunchReport:
    """The launches of one step; None: of the whole trace."""
    trace = view(timeline)
    window = trace.window(step)
    launches, orphans = _known_launches(trace, step)
    state = _find_states(trace, launches)
    calls, place = _different_calls(launches)
    durations = trace.end[calls] - trace.start[calls]
    find_slowest = partial(_slowest, trace, window, launches, state, top=top)
    return LaunchReport(
        step=step,
        calls=len(calls),
        launched=len(launches.place),
        without_launch=orphans,
        call_s=seconds(int(durations.sum())),
        by_call=_by_call(trace, launches, state, calls, place),
        slowest_calls=find_slowest(by=durations[place]),
        latest_starts=find_slowest(by=launches.delay * (state == ALONE)),
        queue=_queue_depths(launches, window),
        blocked=_blocked(trace, calls, durations, sweep(launches.called, launches.begun)),
        note=None if trace.works else "no device rows in this trace: launches do not apply",
    )


def launch_statistics(timeline: Timeline, step: int | None) -> list[CallStatistics]:
    """Only `by_call` of `study_launches`, sooner."""
    trace = view(timeline)
    launches, _ = _known_launches(trace, step)
    calls, place = _different_calls(launches)
    return _by_call(trace, launches, _find_states(trace, launches), calls, place)


def queue_depths(timeline: Timeline, step: int | None) -> list[QueueDepth]:
    """Only `queue` of `study_launches`, sooner."""
    trace = view(timeline)
    launches, _ = _known_launches(trace, step)
    return _queue_depths(launches, trace.window(step))


def _different_calls(launches: _Launches) -> tuple[Any, Any]:
    """The calls, ascending, each once, and for each launch which of them it is of."""
    # With an index the sort is stable: cheap, as they are nearly in order already.
    calls, _, place = np.unique(launches.call, return_index=True, return_inverse=True)
    return calls, place


def _known_launches(trace: TraceView, step: int | None) -> tuple[_Launches, int]:
    """Device rows with a launch, and the number of those without."""
    trace.check(step)
    parts: list[tuple[Any, ...]] = []
    orphans = 0
    for work in trace.works:
        columns: tuple[Any, ...] = (work.launch, work.called, work.start, work.end, work.stream)
        if step is None and work.has_launches:
            place = np.arange(len(work.rows))
        else:
            known = work.launch >= 0
            if step is not None:
                orphans -= int((work.step != step).sum())
                known &= work.step == step
            place = np.flatnonzero(known)
            orphans += len(known) - len(place)
            columns = tuple(column[place] for column in columns)
        parts.append((place, np.full(len(place), work.device, np.int32), *columns))
    if not parts:
        nothing = np.zeros(0, np.int64)
        return _Launches(*[nothing] * 7), 0
    joined = parts[0] if len(parts) == 1 else (np.concatenate(column) for column in zip(*parts, strict=True))
    return _Launches(*joined), orphans


def _find_states(trace: TraceView, launches: _Launches) -> Any:
    """ALONE, HELD or QUEUED for each launch."""
    state = np.full(len(launches.place), ALONE, np.int8)
    for work in trace.works:
        mine = np.flatnonzero(launches.device == work.device)
        place = launches.place[mine]
        queued = trace.order_on_streams(work).free_from[place] > launches.called[mine]
        state[mine[queued]] = QUEUED
        alone = np.flatnonzero(~queued)
        state[mine[alone[host_waits(trace).waited(work, place[alone])]]] = HELD
    return state


def _spread(values: Any) -> Spread | None:
    if not len(values):
        return None
    last = len(values) - 1
    positions = [q * last for q in (0.5, 0.95)]
    # Only these places need be in order.
    places = sorted({min(int(position) + more, last) for position in positions for more in (0, 1)})
    ordered = np.partition(values, places)
    middle, p95 = (_between(ordered, position) for position in positions)
    return Spread(
        count=len(values),
        mean_s=seconds(int(values.sum()) / len(values)),
        median_s=seconds(middle),
        p95_s=seconds(p95),
        min_s=seconds(int(values.min())),
        max_s=seconds(int(values.max())),
    )


def _between(ordered: Any, position: float) -> float:
    """Linear between order statistics, as in `stepscope.stats`, whose form for lists would be slow on arrays."""
    below = int(position)
    low, high = int(ordered[below]), int(ordered[min(below + 1, len(ordered) - 1)])
    return low + (high - low) * (position - below)


def _by_call(trace: TraceView, launches: _Launches, state: Any, calls: Any, place: Any) -> list[CallStatistics]:
    """`place` says for each launch which of the calls it is of."""
    returned = trace.end[calls]
    took = returned - trace.start[calls]
    work = sum_by(place, launches.end - launches.start, len(calls))
    early = launches.start < returned[place]
    name = trace.name[calls]
    delay = launches.delay
    found = []
    codes = trace.codes_in(calls)
    for code in codes:
        # Nearly all launches are of one name in most traces; with only one there is nothing to choose.
        of_name = name == code if len(codes) > 1 else slice(None)
        mine = np.flatnonzero(of_name[place]) if isinstance(of_name, np.ndarray) else slice(None)
        delays, states, times = delay[mine], state[mine], took[of_name]
        latency = delays[states == ALONE]
        call = _spread(times)
        assert call is not None
        found.append(
            CallStatistics(
                name=trace.text(code),
                calls=call.count,
                launched=len(delays),
                call=call,
                latency=_spread(latency),
                held=_spread(delays[states == HELD]),
                queueing=_spread(delays[states == QUEUED]),
                started_early=int(early[mine].sum()),
                longer_than_work=int((times > work[of_name]).sum()),
                slow_calls=int((times > LONG_CALL_NS).sum()),
                late_starts=int((latency > LONG_DELAY_NS).sum()),
            )
        )
    return sorted(found, key=lambda one: -one.calls)


def _slowest(
    trace: TraceView, window: Window, launches: _Launches, state: Any, *, by: Any, top: int
) -> list[SlowLaunch]:
    rows_of = {work.device: work.rows for work in trace.works}
    found = []
    for place in (place for place in top_by(by, top) if by[place] > 0):
        call = int(launches.call[place])
        row = rows_of[int(launches.device[place])][launches.place[place]]
        operator = int(trace.enclosing(launches.call[place : place + 1], trace.is_kind(OPERATOR))[0])
        found.append(
            SlowLaunch(
                call=trace.text(int(trace.name[call])),
                launched=short_name(trace.text(int(trace.name[row]))),
                operator=trace.label(operator),
                start_s=seconds(int(trace.start[call]) - window.start_ns),
                call_s=seconds(int(trace.end[call] - trace.start[call])),
                delay_s=seconds(int(launches.start[place] - launches.called[place])),
                waited_for=_WAITED_FOR[int(state[place])],
            )
        )
    return found


def _queue_depths(launches: _Launches, window: Window) -> list[QueueDepth]:
    """For each device, and for its streams where there are several."""
    times = launches.called, launches.begun, np.maximum(launches.end, launches.called)
    devices = distinct(launches.device)
    depths: list[QueueDepth] = []
    for device in devices:
        here: Any = np.flatnonzero(launches.device == device) if len(devices) > 1 else slice(None)
        of_device, stream = [time[here] for time in times], launches.stream[here]
        streams = distinct(stream)
        for one in [None, *streams] if len(streams) > 1 else [None]:
            mine: Any = slice(None) if one is None else np.flatnonzero(stream == one)
            called, begun, finished = (time[mine] for time in of_device)
            pending = count_open(called, begun, *window, share=0.95)
            outstanding = count_open(called, finished, *window, share=0.95)
            depths.append(
                QueueDepth(
                    device=device_label(device),
                    stream=one,
                    pending_mean=pending.mean,
                    pending_p95=pending.quantile,
                    pending_max=pending.most,
                    outstanding_mean=outstanding.mean,
                    outstanding_p95=outstanding.quantile,
                    outstanding_max=outstanding.most,
                )
            )
    return depths


def _blocked(trace: TraceView, calls: Any, durations: Any, pending: StepFunction) -> BlockedLaunches:
    deepest = int(pending.value.max()) if len(pending.value) else 0
    is_blocked = np.zeros(len(calls), bool)
    if deepest >= LEAST_FULL:
        # Calls that wait for their own copy to end do not wait for room.
        full = value_at(pending, trace.start[calls]) >= NEARLY_FULL * deepest
        full &= ~host_waits(trace).is_blocking(calls)
        for code in trace.codes_in(calls):
            mine = trace.name[calls] == code
            is_blocked |= mine & full & (durations >= BLOCKED_TIMES * np.median(durations[mine]))
    spent = int(durations[is_blocked].sum())
    return BlockedLaunches(
        calls=int(is_blocked.sum()), total_s=seconds(spent), share=share_of(spent, int(durations.sum()))
    )


def launches_section(job: JobReport) -> Section:
    launches = job.detail.launches
    caption = "How long the host was inside, and how long until the work began"
    calls = make_table("Launch calls", caption, launches.by_call, [
        field("Call", "name", brief=1),
        field("Calls", "calls", "count", brief=1),
        field("Launched", "launched", "count"),
        field("Median", "call.median_s", "s", brief=1),
        field("p95", "call.p95_s", "s", brief=1),
        field("Longest", "call.max_s", "s"),
        field("To empty stream", "latency.median_s", "s", "From the call to the start of its work, median", brief=1),
        field("Behind an event", "held.median_s", "s"),
        field("In queue", "queueing.median_s", "s", brief=1),
        field("Longer than work", "longer_than_work", "count", "Calls longer than what they launched"),
        field("Over 50 µs", "slow_calls", "count"),
    ], is_folded=False)  # fmt: skip
    queues = make_table("Queues", "Device activities launched and not started, weighted by time", launches.queue, [
        field("Device", "device"),
        field("Stream", lambda one: "all" if one.stream is None else str(one.stream)),
        field("Waiting, mean", "pending_mean", "number"),
        field("p95", "pending_p95", "count"),
        field("Most", "pending_max", "count"),
        field("Not finished, mean", "outstanding_mean", "number"),
        field("Most", "outstanding_max", "count"),
    ])  # fmt: skip
    single = [
        make_table(title, "Single launches that stand out", rows, [
            field("At", "start_s", "s", "From the start of the step"),
            field("In the call", "call_s", "s"),
            field("Until its start", "delay_s", "s"),
            field("Waited for", "waited_for"),
            field("Call", "call"),
            field("Launched", "launched"),
            field("Operator", "operator"),
        ])
        for title, rows in (("Slowest calls", launches.slowest_calls), ("Latest starts", launches.latest_starts))
    ]  # fmt: skip
    if not launches.calls:
        return Section(id="launches", title="Launches", tables=[calls, *single, queues])
    what = f"{launches.calls} calls for {launches.launched} device activities"
    blocked = launches.blocked
    summary: list[str | Brief] = [Brief(f"Launches: {what}, {format_duration(launches.call_s)}", calls, 2)]
    whole = next((one for one in launches.queue if one.stream is None), None)
    if whole is not None:
        full = f"; {blocked.calls} launches waited for room" if blocked.calls else ""
        mean = format_significant(whole.pending_mean, 3)
        summary.append(f"  waiting in the device's queues: {mean} on average, {whole.pending_max} at most{full}")
    return Section(
        id="launches",
        title="Launches",
        summary=summary,
        facts=[
            ("Launches", what),
            ("Time inside", format_duration(launches.call_s)),
            ("Work without a launch in the trace", str(launches.without_launch)),
            ("Waited for room in the queue", f"{blocked.calls} ({format_duration(blocked.total_s)})"),
        ],
        tables=[calls, *single, queues],
    )
