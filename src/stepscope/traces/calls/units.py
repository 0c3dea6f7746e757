"""Which calls of a timeline are worth running again: each piece of work once, in the smallest call that does it."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stepscope.core.lazy_torch import torch
from stepscope.formats.classify import COMMUNICATION as COMMUNICATES
from stepscope.formats.classify import does_no_work
from stepscope.formats.nesting import nearest
from stepscope.formats.timeline import COPY, DEVICE_KINDS, KERNEL, MISSING, OPERATOR, Timeline

if TYPE_CHECKING:
    from stepscope.formats.timeline import Integers

COMMUNICATION = "communication: `stepscope bench comms` measures it"
NO_OPERATOR = "launched outside every operator (compiled kernels, custom functions)"
NO_WORK = "views and allocations, which do no work"
BETWEEN = "time of calls between the calls inside them"
HOST_COPY = "it moves data between host and device"

_OPERATOR = re.compile(r"(?!autograd::|torch::|c10d::|nccl:|gloo:|profiler::)\w+::\w+(?:\.\w+)?$")
_HOST_COPY = re.compile(r"\b(?:HtoD|DtoH|HtoH)\b|Host", re.IGNORECASE)


class CallUnits(NamedTuple):
    """Rows of one timeline; arrays are of one length."""

    rows: Integers
    """Operators."""
    time_ns: Integers
    """Device time of all they launched; on a timeline without device work their own time on the host."""
    group: Integers
    """Equal for calls of the same operator with the same inputs, as far as the timeline tells."""
    refused: dict[int, str]
    """Group → why it is not run again."""
    kernels: dict[int, list[str]]
    """Group → what ran on the device, by time."""
    left_ns: dict[str, int]
    """Time that belongs to no unit, by reason."""
    on_device: bool


def find_units(timeline: Timeline) -> CallUnits:
    """The units of all steps."""
    core = timeline.core
    inside = core["step"] >= 0
    if not inside.any():
        inside = np.ones(len(timeline), bool)
    devices = np.flatnonzero(np.isin(core["kind"], DEVICE_KINDS) & inside)
    operators = _find_operators(timeline)
    parent = core["parent"].astype(np.int64)
    above = nearest(parent, parent, operators)
    if len(devices):
        return _device_units(timeline, devices, operators, above)
    return _host_units(timeline, np.flatnonzero(operators & inside), above)


def _find_operators(timeline: Timeline) -> Integers:
    """By row: whether it is a call of an operator that somebody could call again."""
    named = np.fromiter((_OPERATOR.match(text) is not None for text in timeline.texts), bool, len(timeline.texts))
    if not len(named):
        return np.zeros(len(timeline), bool)
    found: Integers = (timeline.core["kind"] == OPERATOR) & named[timeline.core["name"]]
    return found


def _outermost(chosen: Integers, above: Integers, rows: Integers) -> Integers:
    """For each row the outermost chosen operator around it, itself included."""
    top, here = rows.copy(), above[rows]
    while (inside := here >= 0).any():
        top[inside] = np.where(chosen[here[inside]], here[inside], top[inside])
        here[inside] = above[here[inside]]
    return top


def _device_units(timeline: Timeline, devices: Integers, operators: Integers, above: Integers) -> CallUnits:
    core = timeline.core
    spent = (core["end_ns"][devices] - core["start_ns"][devices]).astype(np.int64)
    parent = core["parent"].astype(np.int64)
    owner = nearest(parent[devices], parent, operators)
    communicates = (core["category"][devices] == COMMUNICATES) & (core["kind"][devices] == KERNEL)
    left_ns = {
        COMMUNICATION: int(spent[communicates].sum()),
        NO_OPERATOR: int(spent[~communicates & (owner < 0)].sum()),
    }
    kept = ~communicates & (owner >= 0)
    devices, spent, owner = devices[kept], spent[kept], owner[kept]
    launches = np.zeros(len(timeline), bool)
    launches[owner] = True
    unit = _outermost(launches, above, owner)
    rows, of_device = np.unique(unit, return_inverse=True)
    time_ns = np.bincount(of_device, spent, len(rows)).astype(np.int64)
    group = group_calls(timeline, rows)
    return CallUnits(
        rows=rows,
        time_ns=time_ns,
        group=group,
        refused=_host_copies(timeline, devices, group[of_device]),
        kernels=_kernels(timeline, devices, spent, group[of_device]),
        left_ns={reason: ns for reason, ns in left_ns.items() if ns},
        on_device=True,
    )


def _host_copies(timeline: Timeline, devices: Integers, group: Integers) -> dict[int, str]:
    codes = [code for code, text in enumerate(timeline.texts) if _HOST_COPY.search(text)]
    moving = (timeline.core["kind"][devices] == COPY) & np.isin(timeline.core["name"][devices], codes)
    return {int(one): HOST_COPY for one in np.unique(group[moving])}


def _kernels(timeline: Timeline, devices: Integers, spent: Integers, group: Integers) -> dict[int, list[str]]:
    """Kernels of each group, by time."""
    names = timeline.core["name"][devices].astype(np.int64)
    pairs, place = np.unique(np.stack([group, names], axis=1), axis=0, return_inverse=True)
    totals = np.bincount(place.ravel(), spent, len(pairs))
    found: dict[int, list[str]] = {}
    for i in np.lexsort((-totals, pairs[:, 0])):
        found.setdefault(int(pairs[i, 0]), []).append(timeline.texts[int(pairs[i, 1])])
    return found


def _host_units(timeline: Timeline, rows: Integers, above: Integers) -> CallUnits:
    """The outermost calls that do not merely hand on to others: a linear layer is the product inside it."""
    core = timeline.core
    duration = np.zeros(len(timeline), np.int64)
    duration[rows] = core["end_ns"][rows] - core["start_ns"][rows]
    has_caller = above[rows] >= 0
    inside = np.bincount(above[rows][has_caller], duration[rows][has_caller], len(timeline)).astype(np.int64)
    names = timeline.core["name"][rows]
    composite = [code for code in np.unique(names).tolist() if is_composite(timeline.texts[code])]
    works = (inside[rows] == 0) | ~np.isin(names, composite)
    chosen = np.zeros(len(timeline), bool)
    chosen[rows] = works
    unit = np.unique(_outermost(chosen, above, rows[chosen[rows]]))
    idle = _are_idle(timeline, unit)
    left_ns = {
        NO_WORK: int(duration[unit[idle]].sum()),
        BETWEEN: int(duration[rows[~has_caller]].sum() - duration[unit].sum()),
    }
    unit = unit[~idle]
    return CallUnits(
        rows=unit,
        time_ns=duration[unit],
        group=group_calls(timeline, unit),
        refused={},
        kernels={},
        left_ns={reason: ns for reason, ns in left_ns.items() if ns > 0},
        on_device=False,
    )


def _are_idle(timeline: Timeline, rows: Integers) -> Integers:
    codes = [code for code, text in enumerate(timeline.texts) if does_no_work(text)]
    return np.isin(timeline.core["name"][rows], codes)


@cache
def is_composite(name: str) -> bool:
    """Whether an operator of torch is made of others alone, whatever it is given. Of unknown ones: no."""
    found = []
    for schema in torch._C._jit_get_schemas_for_operator(name):
        if not any(one.name == "out" or "Dimname" in str(one.type) for one in schema.arguments):
            full = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
            try:
                found.append(torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd"))
            except RuntimeError:
                continue  # TorchScript's own, which the dispatcher does not know
    return bool(found) and all(found)


def group_calls(timeline: Timeline, rows: Integers) -> Integers:
    """A number for each row; equal where name, sizes, dtypes, strides and scalars are."""
    if not len(rows):
        return np.zeros(0, np.int64)
    columns = [timeline.column(name)[rows] for name in ("name", "shapes", "types", "strides", "values")]
    _, group = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    return group.ravel()


def is_recorded(timeline: Timeline, row: int) -> bool:
    """Whether the timeline knows the inputs of a call."""
    return int(timeline.core["types"][row]) != MISSING
