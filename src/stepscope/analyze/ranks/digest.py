"""What the comparison of ranks needs from one rank, in a few kilobytes: its collective calls, a few numbers per step.

A digest is made where the trace is, in a process of its own; the report is made from the digests alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from stepscope.analyze.ranks.collectives import CALL_FIELDS, collective_calls
from stepscope.analyze.ranks.groups import TracedGroup
from stepscope.analyze.step.device_work import Window, exclusive_windows
from stepscope.analyze.step.intervals import union_lengths
from stepscope.analyze.step.numbers import Whole
from stepscope.analyze.step.view import view
from stepscope.formats.classify import COMMUNICATION
from stepscope.formats.nesting import look_up
from stepscope.formats.timeline import DEVICE_KINDS, Timeline

DIGEST_VERSION = 1


class StepDigest(msgspec.Struct, frozen=True, kw_only=True):
    """One step on one rank, as profiled. Times in nanoseconds on the rank's own clock."""

    number: int
    start_ns: int
    end_ns: int
    """End of the step's interval on the host, or of the last device work launched in it where that is later."""
    busy_ns: int | None = None
    """Union of computing, copying and setting; several devices are added up. None: no device work in the trace."""
    communication_ns: int = 0
    """Union of the collectives' intervals, waiting included."""
    is_empty: bool = False
    """Whether it holds far fewer events than the fullest step of the rank."""


class RankDigest(msgspec.Struct, frozen=True, kw_only=True):
    """One rank in small. Encodes with msgspec (JSON or MessagePack)."""

    version: int = DIGEST_VERSION
    rank: int | None
    world_size: int | None
    source: str
    step_marker: str
    resolution_ns: int
    """The largest unit that all times are multiples of, 1,000 for a clock of microseconds."""
    steps: list[StepDigest]
    groups: list[TracedGroup]
    dtypes: list[str]
    calls: bytes
    """Packed rows, see `calls_of`."""
    left_out: dict[str, int]
    extra: bytes = b""
    """Free: other reports of the same rank."""


def calls_of(digest: RankDigest) -> Any:
    """The calls as a structured array (CALL_FIELDS), in order of start."""
    return np.frombuffer(digest.calls, np.dtype(list(CALL_FIELDS)))


def step_times_ns(digest: RankDigest) -> dict[int, int]:
    """Step → its step time: without the time in which the device still worked on the steps before."""
    windows = {entry.number: Window(entry.start_ns, entry.end_ns) for entry in digest.steps}
    return {number: window.length_ns for number, window in exclusive_windows(windows).items()}


def digest(timeline: Timeline) -> RankDigest:
    """The digest of all steps."""
    found = collective_calls(timeline)
    return RankDigest(
        rank=timeline.rank,
        world_size=timeline.world_size,
        source=str(timeline.metadata.get("source", "")),
        step_marker=timeline.step_marker,
        resolution_ns=_resolution(timeline),
        steps=_digest_steps(timeline, found.calls),
        groups=list(found.groups),
        dtypes=list(found.dtypes),
        calls=found.calls.tobytes(),
        left_out=found.left_out,
    )


def _resolution(timeline: Timeline) -> int:
    """Looks at a sample: a clock of nanoseconds shows itself in the first few times."""
    sample = np.concatenate([timeline.core["start_ns"][:4096], timeline.core["end_ns"][:4096]]).astype(np.int64)
    # Relative times have a base of whole seconds or none: the differences tell, whatever it is.
    return max(1, int(np.gcd.reduce(sample - sample[0]))) if len(sample) else 1


def _digest_steps(timeline: Timeline, calls: Any) -> list[StepDigest]:
    core, spans = timeline.core, timeline.steps
    device = np.flatnonzero(np.isin(core["kind"], DEVICE_KINDS))
    numbers = np.array([span.number for span in spans], np.int64)
    place = look_up(core["step"][device], numbers, np.arange(len(spans)))
    device, place = device[place >= 0], place[place >= 0]
    working = core["category"][device] != COMMUNICATION
    busy = _union_by_device(timeline, device[working], place[working], len(spans))
    called = look_up(calls["step"], numbers, np.arange(len(spans)))
    inside = called >= 0
    communicated = union_lengths(calls["start_ns"][inside], calls["end_ns"][inside], called[inside], len(spans))
    empty, windows = view(timeline).empty_steps, view(timeline).completion_windows
    return [
        StepDigest(
            number=span.number,
            start_ns=span.start_ns,
            end_ns=windows[span.number].end_ns,
            busy_ns=int(busy[index]) if len(device) else None,
            communication_ns=int(communicated[index]),
            is_empty=span.number in empty,
        )
        for index, span in enumerate(spans)
    ]


def _union_by_device(timeline: Timeline, rows: Whole, place: Whole, steps: int) -> Whole:
    devices, index = np.unique(timeline.core["device"][rows], return_inverse=True)
    lengths = union_lengths(
        timeline.core["start_ns"][rows], timeline.core["end_ns"][rows], index * steps + place, len(devices) * steps
    )
    total: Whole = lengths.reshape(len(devices), steps).sum(axis=0)
    return total


PAIRED_BY_ORDER = (
    "the ranks number their steps differently and have no number in common: the n-th step of each rank was taken for "
    "the same one"
)
MOST_LISTED = 12


def common_numbers(by_rank: Sequence[Sequence[int]]) -> list[int]:
    """Numbers of the steps that every rank has, in the first rank's order."""
    if not by_rank:
        return []
    shared = set.intersection(*(set(numbers) for numbers in by_rank))
    return [number for number in dict.fromkeys(by_rank[0]) if number in shared]


def pair_numbers(by_rank: Sequence[Sequence[int]]) -> list[dict[int, int]] | None:
    """For each rank its own number → that of the first rank, by order. None: they count alike, or one has no steps."""
    if len(by_rank) < 2 or not all(by_rank) or common_numbers(by_rank):
        return None
    return [dict(zip(numbers, by_rank[0], strict=False)) for numbers in by_rank]


def pair_steps(digests: Sequence[RankDigest]) -> tuple[list[RankDigest], bool]:
    """Digests that all count steps as the first one does, and whether any had to be changed for that."""
    pairs = pair_numbers([[entry.number for entry in item.steps] for item in digests])
    if pairs is None:
        return list(digests), False
    return [_renumber_steps(item, mapping) for item, mapping in zip(digests, pairs, strict=True)], True


def _renumber_steps(item: RankDigest, mapping: Mapping[int, int]) -> RankDigest:
    """Steps without a partner are left out; their calls lie outside of all steps then."""
    calls = calls_of(item).copy()
    calls["step"] = [mapping.get(number, -1) for number in calls["step"].tolist()]
    steps = [
        msgspec.structs.replace(entry, number=mapping[entry.number]) for entry in item.steps if entry.number in mapping
    ]
    return msgspec.structs.replace(item, steps=steps, calls=calls.tobytes())


def list_numbers(numbers: Sequence[int]) -> str:
    """For a hint: `3, 4, 5`, shortened where there are many."""
    return ", ".join(map(str, numbers[:MOST_LISTED])) + (" …" if len(numbers) > MOST_LISTED else "") or "none"
