"""An estimate of a step's breakdown without the profiler, from the profiled one and a step time measured without it."""

from __future__ import annotations

import msgspec

from stepscope.analyze.step.breakdown import SHARES, Shares

BUSY_SHARES = ("compute", "exposed_comm", "exposed_copy")
IDLE_SHARES = tuple(name for name in SHARES if name not in BUSY_SHARES)


def rescale(shares: Shares, step_s: float, *, on_device: bool) -> Shares:
    """Shares that add up to `step_s`.

    The profiler slows the host and hardly touches the device. So time in which the device is busy stays as it is, and
    idle time, in proportion, fills what is left of the step. Where the busy time alone is longer than the step, it is
    scaled down and no idle time remains. Without a device everything is the host's time and scales alike.
    """
    parts: dict[str, float] = msgspec.structs.asdict(shares)
    busy_s, idle_s = (sum(parts[name] for name in names) for names in (BUSY_SHARES, IDLE_SHARES))
    if not on_device or idle_s <= 0 or busy_s >= step_s:
        kept = SHARES if not on_device or idle_s <= 0 else BUSY_SHARES
        whole = sum(parts[name] for name in kept)
        return Shares(**{name: parts[name] * step_s / whole if name in kept and whole else 0.0 for name in SHARES})
    factor = (step_s - busy_s) / idle_s
    return Shares(**{name: parts[name] * (factor if name in IDLE_SHARES else 1.0) for name in SHARES})
