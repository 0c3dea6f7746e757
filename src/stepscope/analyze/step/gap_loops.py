"""Idle time by reason in two passes over the work of a device, without a list of the gaps.

Plain enough to be compiled (`stepscope.analyze.step.native`); only then are they faster than `find_gaps` of module idle
and `LaunchSurvey`, which say the same in array operations. `rows` are those of one device in order of start; threads
are counted from 1, and those that are not known are 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from stepscope.analyze.step.row_passes import NEVER, Columns

HOST_LAUNCH, SYNCHRONISING, EVENT_WAIT, COLLECTIVE_PEER, STREAM_ORDER, UNKNOWN = range(6)
"""Reasons of a gap; what they mean: REASONS of module idle."""
LONGEST_HANDOVER_NS = 30_000
"""From the end of one kernel to the start of the next that waits on its stream takes one or two microseconds; what
takes far longer has another reason."""


class Copies(NamedTuple):
    kind: int
    is_pageable: Any
    """By code of the name."""


class ByThread(NamedTuple):
    """Times of all threads, ascending in each: those of thread t begin at place `first[t]`."""

    start: Any
    end: Any
    first: Any


class Launches(NamedTuple):
    """What `survey_launches` finds, device by device."""

    least: Any
    """By code of a call's name: the least latency on an empty stream."""
    has_launched: Any
    """By thread."""
    following: Any
    """For each wait for an event the first launch after it on its thread, unless another wait stands before that."""
    blocking: Any
    """Calls of copies that returned only when their copy had ended, or begun, where memory is pageable."""


def survey_launches(rows: Any, columns: Columns, copies: Copies, waits: ByThread, found: Launches) -> int:
    """Returns how many calls are in `found.blocking`. Its `following` has a place for every wait."""
    kind, start, end, name, thread, stream, parent = columns
    least, has_launched, following, blocking = found
    next_wait = waits.first.copy()
    streams, free_from = [stream[row] for row in rows[:1]], [-NEVER]
    here = blocked = 0
    mine, is_free_from = streams[here], free_from[here]
    for row in rows:
        if stream[row] != mine:
            free_from[here] = is_free_from
            here = 0
            while here < len(streams) and streams[here] != stream[row]:
                here += 1
            if here == len(streams):
                streams.append(stream[row])
                free_from.append(-NEVER)
            mine, is_free_from = streams[here], free_from[here]
        launch = parent[row]
        if launch >= 0:
            called, lane = start[launch], thread[launch] + 1
            has_launched[lane] = True
            # What is seldom true is asked first: processors foresee that.
            latency = max(start[row] - called, 0)
            if latency < least[name[launch]] and is_free_from <= called:
                least[name[launch]] = latency
            # Launches come nearly in order: the last wait before this one is near the last one before the last launch.
            one = next_wait[lane]
            while one < waits.first[lane + 1] and waits.start[one] <= called:
                one += 1
            while one > waits.first[lane] and waits.start[one - 1] > called:
                one -= 1
            next_wait[lane] = one
            if one > waits.first[lane] and called < following[one - 1]:
                following[one - 1] = called
            returned = end[launch]
            is_late = returned >= min(start[row], end[row]) and kind[row] == copies.kind
            if is_late and returned >= (start[row] if copies.is_pageable[name[row]] else end[row]):
                blocking[blocked] = launch
                blocked += 1
        is_free_from = max(is_free_from, end[row])
    return blocked


class Asked(NamedTuple):
    low: int
    high: int
    main_thread: int
    least: Any
    """Of `Launches`."""


class GapSums(NamedTuple):
    by_reason: Any
    """Nanoseconds."""
    crossing: Any
    """Gaps that end with work launched for another stream, which are counted as UNKNOWN: place of that work, length."""


def sum_gaps(rows: Any, columns: Columns, asked: Asked, held: ByThread, sums: GapSums) -> tuple[int, int]:  # noqa: PLR0912  # what it would call must be compiled too
    """Add up the gaps in [low, high). Returns how many there are, and how many of them are crossing.

    `held` has two lists a thread, of times inside blocking calls and of times with peers; each ends with NEVER.
    """
    _, start, end, name, thread, stream, parent = columns
    low, high, main_thread, least = asked
    by_reason, crossing = sums
    next_held = held.first.copy()
    latest, holder = -NEVER, -1
    gaps = crossings = 0
    for place in range(len(rows) + 1):
        is_last = place == len(rows) or start[rows[place]] >= high
        begin = max(latest, low)
        finish = high if is_last else start[rows[place]]
        if finish > begin:
            gaps += 1
            launch = parent[rows[place]] if place < len(rows) else -1
            called = start[launch] if launch >= 0 else finish
            reason = UNKNOWN
            if place == len(rows):
                reason = HOST_LAUNCH
            elif launch >= 0:
                # A call that has not returned by the end of the gap has not done its work before either.
                if called + least[name[launch]] > begin or end[launch] >= finish:
                    reason = HOST_LAUNCH
                elif holder >= 0 and latest == begin:
                    before = rows[holder]
                    if stream[before] != stream[rows[place]] and parent[before] != launch:
                        crossing[crossings, 0], crossing[crossings, 1] = place, finish - begin
                        crossings += 1
                    elif finish - begin < LONGEST_HANDOVER_NS:
                        reason = STREAM_ORDER
            by_reason[reason] += finish - begin
            if reason == HOST_LAUNCH:
                not_launched = min(max(called, begin), finish)
                lane = 2 * ((thread[launch] if launch >= 0 else main_thread) + 1)
                for which in range(lane, lane + 2):
                    one = next_held[which]
                    while held.end[one] <= begin:
                        one += 1
                    next_held[which] = one
                    while held.start[one] < not_launched:
                        taken = min(held.end[one], not_launched) - max(held.start[one], begin)
                        by_reason[COLLECTIVE_PEER if which & 1 else SYNCHRONISING] += taken
                        by_reason[HOST_LAUNCH] -= taken
                        one += 1
        if is_last:
            break
        if end[rows[place]] >= latest:
            latest, holder = end[rows[place]], place
    return gaps, crossings
