"""What every trace needs after reading: classes of kernels, who launched and enclosed what, steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from stepscope.formats.timeline import (
    ANNOTATION,
    COPY,
    DEVICE_KINDS,
    HOST_KINDS,
    KERNEL,
    MISSING,
    OPERATOR,
    OTHER,
    RUNTIME,
    SET,
    SYNC,
    Array,
    Integers,
    Timeline,
)

MOST_DEVICE_NUMBER = (1 << 31) - 1
MOST_DEVICES = 128
MOST_STREAMS = 1024
"""Numbers of streams of one rank, whatever their devices."""


def finish(timeline: Timeline, *, step_marker: str | None = None) -> Timeline:
    """Fill `category`, `parent` and `step`; steps that a reader has found itself are kept."""
    from stepscope.traces.steps import assign_steps, find_steps

    repairs = dict(timeline.repairs)
    core: dict[str, Array] = dict(timeline.core)
    core["kind"] = _kinds(timeline)
    timeline = replace(timeline, core=core)
    core["category"] = _categories(timeline)
    repairs |= _limit_places(timeline, core)
    core["parent"], crossing = _parents(timeline)
    if crossing:
        repairs["host events that end after the event they began in"] = crossing
    timeline = replace(timeline, core=core, repairs=repairs)
    if timeline.steps and step_marker is None:
        spans, marker = list(timeline.steps), timeline.step_marker
    else:
        spans, marker, mended = find_steps(timeline, step_marker)
        repairs |= mended
    core["step"] = assign_steps(timeline, spans)
    return replace(timeline, core=core, steps=tuple(spans), step_marker=marker, repairs=repairs)


def _kinds(timeline: Timeline) -> Array:
    """What a name says better than the category: a wait of a device keeps no device busy, and a collective on the host
    is an operator, whatever either was recorded as."""
    from stepscope.formats.classify import is_device_wait, is_host_work

    kind, name = timeline.core["kind"], timeline.core["name"]
    for is_meant, wrong, right in ((is_device_wait, (KERNEL,), SYNC), (is_host_work, (ANNOTATION, OTHER), OPERATOR)):
        codes = [code for code, text in enumerate(timeline.texts) if is_meant(text)]
        if codes:
            kind = np.where(np.isin(name, codes) & np.isin(kind, wrong), right, kind).astype(kind.dtype)
    return kind


def _limit_places(timeline: Timeline, core: dict[str, Array]) -> dict[str, int]:
    """Devices and streams beyond any machine's are damage; analyses take time for each, so they become unknown."""
    repairs = {}
    impossible = (core["device"] > MOST_DEVICE_NUMBER) | (core["device"] < MISSING)
    if impossible.any():
        core["device"] = np.where(impossible, MISSING, core["device"])
        repairs["device numbers below 0 or beyond 32 bits: the device is unknown"] = int(impossible.sum())
    rows = np.flatnonzero(np.isin(core["kind"], (*DEVICE_KINDS, SYNC)))
    for name, most in (("device", MOST_DEVICES), ("stream", MOST_STREAMS)):
        numbers, places, counts = np.unique(core[name][rows], return_inverse=True, return_counts=True)
        if len(numbers) > most:
            left_out = np.argsort(-counts, kind="stable")[most:]
            unknown = rows[np.isin(places, left_out)]
            core[name] = core[name].copy()
            core[name][unknown] = MISSING
            repairs[f"events on a {name} beyond the {most:,} with most events: their {name} is unknown"] = len(unknown)
    return repairs


def _categories(timeline: Timeline) -> Array:
    from stepscope.formats.classify import CATEGORIES, COMMUNICATION, classify_names

    kind, name = timeline.core["kind"], timeline.core["name"]
    category = np.full(len(timeline), MISSING, np.int8)
    kernels = kind == KERNEL
    codes = np.unique(name[kernels])
    by_code = np.zeros(int(codes.max()) + 1 if len(codes) else 0, np.int8)
    by_code[codes] = classify_names([timeline.texts[code] for code in codes.tolist()])
    category[kernels] = by_code[name[kernels]]
    category[kind == COPY] = CATEGORIES.index("copy")
    category[kind == SET] = CATEGORIES.index("set")
    # What a reader knows of its own format (an operation's class in XLA, say) is kept.
    given = timeline.core["category"]
    category[given >= 0] = given[given >= 0]
    block = timeline.blocks.get("collective")
    if block is not None:
        rows = block.rows[block.columns["collective"] != MISSING]
        category[rows[kind[rows] == KERNEL]] = COMMUNICATION
    return category


def _parents(timeline: Timeline) -> tuple[Integers, int]:
    from stepscope.formats.nesting import fill_parents

    core = timeline.core
    parent = np.full(len(timeline), MISSING, np.int32)
    hosts = np.flatnonzero(np.isin(core["kind"], HOST_KINDS) & (core["thread"] >= 0)).astype(np.int32)
    crossing = fill_parents(
        hosts,
        thread=core["thread"],
        start=core["start_ns"],
        end=core["end_ns"],
        index=core["event_index"],
        parent=parent,
    )
    devices = np.flatnonzero(np.isin(core["kind"], DEVICE_KINDS))
    parent[devices] = find_launches(timeline, devices)
    return parent, crossing


def find_launches(timeline: Timeline, devices: Integers) -> Integers:
    """Row of the runtime call that launched each device row, by correlation; −1 where the file has none."""
    correlation = timeline.core["correlation"]
    calls = np.flatnonzero((timeline.core["kind"] == RUNTIME) & (correlation >= 0))
    if not len(calls):
        return np.full(len(devices), MISSING)
    # The first of several calls with one number: file order, since sorting is stable.
    calls = calls[np.argsort(correlation[calls], kind="stable")]
    numbers, first = np.unique(correlation[calls], return_index=True)
    wanted = correlation[devices]
    place = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
    found = (numbers[place] == wanted) & (wanted >= 0)
    launches: Integers = np.where(found, calls[first[place]], MISSING)
    return launches
