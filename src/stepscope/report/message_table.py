"""Messages between pairs of ranks: latency one way and there and back, bandwidth one way and both ways, and totals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from stepscope.core.units import format_bytes, format_significant
from stepscope.records.kinds import PointToPointSpec
from stepscope.report.text import align
from stepscope.store import MeasuredCase


class MessageFigures(NamedTuple):
    """Medians of one message size; None where it was not measured. Bandwidths in bytes per second."""

    size_bytes: int
    dtype: str
    sources: list[int]
    targets: list[int]
    one_way_s: float | None
    """One message at a time."""
    round_trip_s: float | None
    one_way_bandwidth: float | None
    """Of one pair, averaged over the pairs, with a window of messages under way."""
    both_ways_bandwidth: float | None
    """The same, both directions together."""
    one_way_total: float | None
    """Of all pairs at once."""
    both_ways_total: float | None


def read_message_figures(cases: Sequence[MeasuredCase]) -> list[MessageFigures]:
    """One entry for each size of pairs that were named; empty where none were."""
    found: dict[bytes, tuple[PointToPointSpec, dict[str, MeasuredCase]]] = {}
    for case in cases:
        spec = case.result.case.spec
        if isinstance(spec, PointToPointSpec) and spec.sources is not None:
            shared = msgspec.structs.replace(spec, pattern=None, window=1)
            found.setdefault(msgspec.json.encode(shared), (shared, {}))[1][_name_kind(spec)] = case
    return [_read_figures(spec, kinds) for spec, kinds in found.values()]


def _name_kind(spec: PointToPointSpec) -> str:
    pattern = "one_way" if spec.pattern in {None, "one_to_one", "pairwise"} else spec.pattern
    return f"{pattern}_window" if spec.window > 1 else str(pattern)


def _read_figures(spec: PointToPointSpec, kinds: dict[str, MeasuredCase]) -> MessageFigures:
    size_bytes, pairs = spec.size_bytes, len(spec.pairs)
    times = {kind: case.latency_s().get("p50") for kind, case in kinds.items()}

    def total(kind: str, messages: int) -> float | None:
        seconds = times.get(kind)
        return size_bytes * messages / seconds if seconds else None

    uni, bi = total("one_way_window", pairs), total("bidirectional_window", 2 * pairs)
    half_s = times.get("ping_pong")
    return MessageFigures(
        size_bytes=size_bytes,
        dtype=spec.dtype,
        sources=spec.sources or [],
        targets=spec.targets or [],
        one_way_s=times.get("one_way"),
        round_trip_s=2 * half_s if half_s else None,
        one_way_bandwidth=uni / pairs if uni else None,
        both_ways_bandwidth=bi / pairs if bi else None,
        one_way_total=uni,
        both_ways_total=bi,
    )


def format_message_table(figures: Sequence[MessageFigures]) -> str:
    """`#` lines, as they stand below the table of all cases."""
    if not figures:
        return ""
    titles = ["size", "dtype", "one way", "round trip", "one-way bw", "two-way bw", "one-way total", "two-way total"]
    units = ["", "", "p50 (us)", "p50 (us)", *["(GB/s)"] * 4]
    rows = [
        [
            format_bytes(one.size_bytes),
            one.dtype,
            *(_scale(value, 1e6) for value in (one.one_way_s, one.round_trip_s)),
            *(_scale(value, 1e-9) for value in one[-4:]),
        ]
        for one in figures
    ]
    pairs = ", ".join(f"{source}→{target}" for source, target in zip(*figures[0][2:4], strict=True))
    head = f"# messages {pairs}: bandwidths are averages per pair, totals of all pairs at once"
    return "\n".join([head, *(f"# {line}" for line in align([titles, units, *rows], [True, False, *[True] * 6]))])


def _scale(value: float | None, factor: float) -> str:
    return "-" if value is None else format_significant(value * factor)
