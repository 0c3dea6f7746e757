"""Memory timelines of torch.profiler (`export_memory_timeline`): sizes by category, or raw changes, as JSON."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NoReturn

import numpy as np

from stepscope.core.errors import BadInputError
from stepscope.formats.memory.history import MOST_IN_SUM, MemoryHistory, Owner
from stepscope.formats.source import decode_json, read_bounded
from stepscope.formats.timeline import Integers

CATEGORIES = (
    "parameter",
    "optimizer state",
    "input",
    "temporary",
    "activation",
    "gradient",
    "autograd detail",
    "unknown",
)
"""In the order of the columns and of the raw numbers."""
OWNERS = tuple(Owner(name=name) for name in CATEGORIES)
DEVICE = "as exported"
"""The files do not name it."""
_PREEXISTING, _DESTROY = 1, 4
_NUMBERS = re.compile(rb"\s*\[\s*\[[-\d\s,]*(\]|$)")
_PICTURE = b"GPU Memory Timeline HTML"
_HINT = "export it again with prof.export_memory_timeline(path), path ending in .json.gz or .raw.json.gz"


def sniff(head: bytes, path: Path) -> bool:
    """Lists of numbers in a list, or the page that holds a picture of them."""
    return _NUMBERS.match(head) is not None or _PICTURE in head[:1024]


def read(path: Path) -> list[MemoryHistory]:
    """The one device that was exported."""
    data, cut_short = read_bounded(path)
    if _PICTURE in data[:1024]:
        raise BadInputError("holds a picture of the memory timeline, not its numbers", hint=_HINT, where=str(path))
    kind, what = list[list[int | list[int]]], "is no whole memory timeline"
    content = decode_json(data, what=what, hint=_HINT, path=path, cut_short=cut_short, kind=kind)
    is_raw = all(isinstance(value, int) for row in content for value in row)
    if not any(content) or (is_raw and any(len(row) != 4 for row in content)):
        _refuse(path, "holds no memory event of the device it was exported for")
    return [_read_raw(path, content) if is_raw else _read_sums(path, content)]


def _refuse(path: Path, why: str) -> NoReturn:
    raise BadInputError(
        why, hint=f"name the device in export_memory_timeline(path, device), or {_HINT}", where=str(path)
    )


def _columns(path: Path, content: object, shape: tuple[int, ...]) -> Integers:
    """As numbers of 64 bits; BadInputError where rows are not alike or numbers are too large."""
    try:
        found: Integers = np.array(content, np.int64)
    except (ValueError, OverflowError, TypeError):
        found = np.zeros(0, np.int64)
    if found.shape != shape:
        _refuse(path, "has rows of different lengths, or numbers beyond 64 bits")
    return found


def _read_raw(path: Path, content: list[list[int | list[int]]]) -> MemoryHistory:
    time, action, change, category = _columns(path, content, (len(content), 4)).T
    if (action < _PREEXISTING).any() or (action > _DESTROY).any() or (category < 0).any() or (category > 7).any():
        _refuse(path, "has an action beyond 1 to 4 or a category beyond 0 to 7")
    _check_sum(path, change)
    earlier = action == _PREEXISTING
    base = {int(one): int(change[earlier & (category == one)].sum()) for one in np.unique(category[earlier])}
    return MemoryHistory(
        source=str(path),
        format="raw memory timeline",
        device=DEVICE,
        owner_kind="category",
        owners=OWNERS,
        time_ns=time[~earlier],
        change_bytes=change[~earlier],
        owner=category[~earlier],
        start_bytes=base,
        counts_blocks=True,
    )


def _read_sums(path: Path, content: list[list[int | list[int]]]) -> MemoryHistory:
    """Changes between the points of time, releases before allocations: no sum is higher than the file's."""
    if len(content) != 2:
        _refuse(path, "is no pair of times and sizes")
    time = _columns(path, content[0], (len(content[0]),))
    sizes = _columns(path, content[1], (len(time), len(CATEGORIES) + 1))[:, 1:]
    if (sizes < -MOST_IN_SUM // 16).any() or (sizes > MOST_IN_SUM // 16).any():
        _refuse(path, "holds sizes that no device has")
    change = np.diff(sizes, axis=0)
    point, category = np.nonzero(change)
    value = change[point, category]
    order = np.lexsort((value, point))
    _check_sum(path, value)
    return MemoryHistory(
        source=str(path),
        format="memory timeline",
        device=DEVICE,
        owner_kind="category",
        owners=OWNERS,
        # Microseconds in this form, nanoseconds in the raw one.
        time_ns=time[point[order] + 1] * 1000,
        change_bytes=value[order],
        owner=category[order],
        start_bytes={place: int(size) for place, size in enumerate(sizes[0].tolist()) if size},
        counts_blocks=False,
    )


def _check_sum(path: Path, change: Integers) -> None:
    if sum(map(abs, change.tolist())) >= MOST_IN_SUM:
        _refuse(path, "holds sizes that no device has")
