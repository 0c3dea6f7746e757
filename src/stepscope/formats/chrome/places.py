"""Where events stand in a Chrome trace: processes and threads of many ranks side by side, each with its own number."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stepscope.formats.timeline import DEVICE_ANNOTATION, DEVICE_KINDS, MISSING, SYNC, Integers, Thread, Timeline

ON_DEVICE = (*DEVICE_KINDS, DEVICE_ANNOTATION, SYNC)
"""Kinds shown under a device; all others stand under a host thread."""

RANK_PROCESSES = 100_000
"""Process numbers a rank has for itself in a file of many."""
FIRST_DEVICE = 50_000
"""Where its devices begin among them."""
EXACT = 1 << 53
"""Whole numbers up to here survive viewers that read every number as a double."""


@dataclass(frozen=True)
class Process:
    """A heading in the viewer."""

    number: int | str
    name: str
    label: str
    order: int


@dataclass(frozen=True)
class Places:
    """Of one rank: `fields[of_row[row]]` is the text of pid and tid of a row."""

    rank: int | None
    fields: Sequence[str]
    of_row: Integers
    processes: Sequence[Process]
    tracks: Sequence[tuple[int | str, int | str, str, int]] = field(default=())
    """Process, thread, name (may be empty) and order."""
    host_processes: dict[str, int | str] = field(default_factory=dict)
    """As the trace called them, and as they are called in the file."""
    devices: dict[int, int | str] = field(default_factory=dict)
    say_devices: bool = True
    """Whether process and thread of an event lead back to its device and stream. Not where a process of a single rank
    has the number of one of its devices."""


def plan_places(timelines: Sequence[Timeline]) -> list[Places]:
    """One rank keeps its own numbers; several get numbers that cannot meet."""
    alone = len(timelines) == 1
    return [_plan_rank(timeline, None if alone else index) for index, timeline in enumerate(timelines)]


def _plan_rank(timeline: Timeline, index: int | None) -> Places:
    core: Any = timeline.core
    on_device = np.isin(core["kind"], ON_DEVICE)
    rows = np.flatnonzero(on_device)
    queues, which = np.unique(
        np.stack([core["device"][rows], core["stream"][rows]], axis=1), axis=0, return_inverse=True
    )
    pairs: list[tuple[int, int]] = [(int(device), int(stream)) for device, stream in queues]
    hosts = _host_numbers(timeline.threads, index)
    devices = _device_numbers([device for device, _ in pairs], set(hosts.values()), index)
    threads = [(hosts[thread.process], _number(thread.thread)) for thread in timeline.threads]
    streams = [(devices[device], stream if stream >= 0 else "no stream") for device, stream in pairs]
    of_row = np.where(on_device, 0, core["thread"]).astype(np.int64)
    of_row[rows] = len(threads) + which.reshape(-1)
    return Places(
        rank=timeline.rank,
        # The last is for rows without a thread: MISSING points to it.
        fields=[
            *(
                f'"pid":{json.dumps(pid, ensure_ascii=False)},"tid":{json.dumps(tid, ensure_ascii=False)},'
                for pid, tid in [*threads, *streams]
            ),
            "",
        ],
        of_row=of_row,
        processes=list(_name_processes(timeline, index, hosts, devices)),
        tracks=[*_name_threads(timeline.threads, threads), *_name_streams(pairs, streams)],
        host_processes=hosts,
        devices=devices,
        say_devices=index is not None or all(number == device for device, number in devices.items() if device >= 0),
    )


def _number(text: str) -> int | str:
    """A number where the text is one, so that viewers sort it as one."""
    digits = text.removeprefix("-")
    if digits.isascii() and digits.isdigit() and str(int(text)) == text and abs(int(text)) < EXACT:
        return int(text)
    return text


def _host_numbers(threads: Sequence[Thread], index: int | None) -> dict[str, int | str]:
    processes = list(dict.fromkeys(thread.process for thread in threads))
    if index is None:
        return {process: _number(process) for process in processes}
    return {process: (index + 1) * RANK_PROCESSES + place for place, process in enumerate(processes)}


def _device_numbers(devices: Sequence[int], taken: set[int | str], index: int | None) -> dict[int, int | str]:
    numbers: dict[int, int | str] = {}
    for device in sorted(set(devices)):
        if device == MISSING:
            numbers[device] = "unknown device" if index is None else f"unknown device of trace {index}"
        elif index is not None:
            numbers[device] = (index + 1) * RANK_PROCESSES + FIRST_DEVICE + device
        else:
            # A process with the number of a device would be shown as that device.
            numbers[device] = device if device not in taken else RANK_PROCESSES + FIRST_DEVICE + device
    return numbers


def _name_processes(
    timeline: Timeline, index: int | None, hosts: dict[str, int | str], devices: dict[int, int | str]
) -> Iterator[Process]:
    """Ranks in order of their numbers, in each its host processes, then its devices."""
    position = index or 0
    rank = position if timeline.rank is None else timeline.rank
    first = rank * RANK_PROCESSES
    prefix = "" if index is None and timeline.rank is None else f"rank {rank}: "
    for place, (process, number) in enumerate(hosts.items()):
        yield Process(number, f"{prefix}process {process}", "CPU", first + place)
    for device, number in devices.items():
        name = "unknown device" if device == MISSING else f"device {device}"
        yield Process(number, f"{prefix}{name}", f"GPU {device}", first + FIRST_DEVICE + max(device, 0))


def _name_threads(
    threads: Sequence[Thread], numbers: Sequence[tuple[int | str, int | str]]
) -> Iterator[tuple[int | str, int | str, str, int]]:
    """The main thread (which has its process's number) first, the others as they appear."""
    for place, (thread, (pid, tid)) in enumerate(zip(threads, numbers, strict=True)):
        yield pid, tid, thread.name, 0 if thread.thread == thread.process else place + 1


def _name_streams(
    pairs: Sequence[tuple[int, int]], numbers: Sequence[tuple[int | str, int | str]]
) -> Iterator[tuple[int | str, int | str, str, int]]:
    for (_, stream), (pid, tid) in zip(pairs, numbers, strict=True):
        yield pid, tid, f"stream {stream}" if stream >= 0 else "no stream", max(stream, 0)
