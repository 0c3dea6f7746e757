"""Per step and name: calls, durations and exposed time of one trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from stepscope.analyze.diff.exposure import IDLE_SHARES, IdleTime, Side
from stepscope.analyze.step.breakdown import SHARES
from stepscope.analyze.step.numbers import number_codes
from stepscope.formats.timeline import DEVICE_KINDS, MISSING, OPERATOR

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from stepscope.formats.timeline import Integers

    Table = NDArray[np.float64]
    """Steps down, names across."""

CPU_CATEGORY = "operators"
NO_OPERATOR = "(no operator)"


class Identity(NamedTuple):
    """What tells one row of a table from another."""

    share: str
    category: str
    name: str


class Names(NamedTuple):
    """One trace's names and what they did in each step."""

    identities: list[Identity]
    calls: Table
    total_ns: Table
    exposed_ns: Table
    operators: list[str | None]
    """Of kernels: the operator that launches most of them."""


class OperatorNames(NamedTuple):
    identities: list[Identity]
    calls: Table
    self_ns: Table
    """On the host, without operators inside."""
    device_ns: Table
    exposed_ns: Table


def count_work(side: Side) -> tuple[Names, Integers]:
    """Names of what kept the device busy; and for each row of `side.work` which of them it is."""
    import numpy as np

    trace, rows = side.trace, side.work.rows
    codes = trace.name[rows].astype(np.int64)
    category = trace.column("category")[rows].astype(np.int64) if side.has_device else np.full(len(rows), MISSING)
    keys = (codes << 16) | (category + 1) << 4 | side.work.share
    different, place = np.unique(keys, return_inverse=True)
    identities, local = _identify(side, different.tolist())
    which = local[place.reshape(-1)] if len(rows) else place
    count = len(identities)
    exposed = np.zeros((len(side.windows), count))
    for number, (part, spent) in enumerate(side.exposed):
        exposed[number] = np.bincount(which[part], weights=spent, minlength=count)
    calls, total = _by_step(side, rows, which, count) if side.has_device else (exposed * 0, exposed)
    operators = _main_operators(side, which, count)
    return Names(identities, calls, total, exposed, operators), which


def _identify(side: Side, keys: Sequence[int]) -> tuple[list[Identity], Any]:
    """Spellings that mean the same kernel are one."""
    import numpy as np

    from stepscope.formats.classify import CATEGORIES, normal_name

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


def _by_step(side: Side, rows: Integers, which: Integers, count: int) -> tuple[Table, Table]:
    """Calls and durations of what each step launched."""
    duration = side.trace.end[rows] - side.trace.start[rows]
    return _sums(side, rows, which, count), _sums(side, rows, which, count, duration)


def _sums(side: Side, rows: Integers, which: Integers, count: int, weights: Any = None) -> Table:
    import numpy as np

    numbers = np.array(side.numbers, np.int64)
    order = np.argsort(numbers)
    step = side.trace.step[rows]
    place = np.minimum(np.searchsorted(numbers[order], step), len(numbers) - 1)
    mine = numbers[order][place] == step
    cells = order[place[mine]] * count + which[mine]
    sums = np.bincount(cells, None if weights is None else weights[mine], len(numbers) * count)
    table: Table = sums.reshape(len(numbers), count).astype(np.float64)
    return table


def _main_operators(side: Side, which: Integers, count: int) -> list[str | None]:
    import numpy as np

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


def count_operators(side: Side) -> OperatorNames:
    """Operators by name, with the device time each launched itself; work that no operator launched has a row too."""
    import numpy as np

    trace = side.trace
    rows = trace.rows(OPERATOR)
    codes, place = number_codes(trace.name[rows], len(side.timeline.texts))
    texts = [side.timeline.texts[code] for code in codes]
    of_row = np.full(len(side.timeline) + 1, len(texts), np.int64)
    of_row[rows] = place
    count = len(texts) + 1
    calls = _sums(side, rows, place, count)
    self_ns = _sums(side, rows, place, count, _self_times(side, rows))
    device_ns, exposed = np.zeros((2, len(side.windows), count))
    if side.has_device:
        launched = trace.rows(*DEVICE_KINDS)
        launcher = of_row[innermost_operator(side, launched)]
        device_ns = _sums(side, launched, launcher, count, trace.end[launched] - trace.start[launched])
        of_work = of_row[innermost_operator(side, side.work.rows)]
        for number, (part, spent) in enumerate(side.exposed):
            exposed[number] = np.bincount(of_work[part], weights=spent, minlength=count)
    identities = [Identity("", "", text) for text in [*texts, NO_OPERATOR]]
    return OperatorNames(identities, calls, self_ns, device_ns, exposed)


def innermost_operator(side: Side, rows: Integers) -> Integers:
    return side.trace.enclosing(rows, side.trace.is_kind(OPERATOR))


def operators_around(side: Side, rows: Integers) -> Integers:
    """For each operator the next one around it; −1 at the top."""
    return innermost_operator(side, side.trace.parent[rows])


def _self_times(side: Side, rows: Integers) -> Integers:
    import numpy as np

    duration = side.trace.end - side.trace.start
    above = operators_around(side, rows)
    inside = np.bincount(above[above >= 0], weights=duration[rows[above >= 0]], minlength=len(side.timeline))
    own: Integers = np.maximum(duration[rows] - inside[rows], 0)
    return own


def count_idle(side: Side) -> tuple[list[Identity], Table]:
    """Idle time by share and by what the host was doing."""
    import numpy as np

    found: dict[Identity, int] = {}
    idles: list[IdleTime] = [side.idle(window) for window in side.windows]
    for idle in idles:
        for label in idle.labels:
            for share in IDLE_SHARES:
                found.setdefault(Identity(share, share, label), len(found))
    table = np.zeros((len(idles), len(found)))
    for number, idle in enumerate(idles):
        for place, share in enumerate(IDLE_SHARES):
            columns = [found[Identity(share, share, label)] for label in idle.labels]
            table[number, columns] = idle.spent[:, place]
    return list(found), table
