"""How the views of a traced job call things, and the pieces of text that they share."""

from __future__ import annotations

import re
from pathlib import Path

from stepscope.analyze.answers.facts import is_cpu
from stepscope.analyze.job import JobReport, RankSummary
from stepscope.analyze.ranks.collective_table import CollectiveRow
from stepscope.analyze.step.breakdown import SHARES, Shares
from stepscope.core.units import format_bandwidth, format_bytes, format_share
from stepscope.formats.classify import short_name

SHARE_WORDS = {
    "compute": "compute",
    "exposed_comm": "exposed communication",
    "exposed_copy": "exposed copies",
    "host_idle": "waiting for the host",
    "sync_idle": "synchronisation",
    "other_idle": "other idle",
}
CPU_WORDS = {
    **SHARE_WORDS,
    "compute": "inside operators",
    "host_idle": "data loading, sleeping, Python",
    "other_idle": "outside recorded calls",
}
REASON_WORDS = {
    "host_launch": "not launched yet",
    "sync": "host in a blocking call",
    "event_wait": "stream waited for an event",
    "collective_peer": "host in a collective",
    "stream_order": "hand-over on a stream",
    "unknown": "unknown",
}

PATH_WORDS = {
    "gap": "between recorded events",
    "launch": "from launch to start",
    "launch_call": "launch calls",
    "stream": "hand-over on a stream",
    "sync": "return of a blocking call",
}
"""Kinds of time on the critical path whose names say too little."""
_UNIT = re.compile(r"(\d) (%|×|ns|µs|ms|s|GB/s|[KMGT]?i?B)(?![\w/])")


def spell_path_kind(kind: str) -> str:
    return PATH_WORDS.get(kind, kind.replace("_", " "))


def share_words(job: JobReport) -> dict[str, str]:
    return CPU_WORDS if is_cpu(job.detail) else SHARE_WORDS


def share_values(shares: Shares) -> list[float]:
    """In the order of SHARES."""
    return [getattr(shares, name) for name in SHARES]


def fractions(summary: RankSummary) -> list[float]:
    """Of the rank's step, in the order of SHARES."""
    whole = summary.step_s
    return [value / whole if whole > 0 else 0.0 for value in share_values(summary.breakdown_s)]


def by_step_time(ranks: list[RankSummary]) -> list[RankSummary]:
    """Slowest first."""
    return sorted(ranks, key=lambda one: (-one.step_s, one.rank))


def median_rank(ranks: list[RankSummary]) -> RankSummary:
    return by_step_time(ranks)[len(ranks) // 2]


def short_on_path(name: str, kind: str) -> str:
    """Names of kernels are shortened; what the host did keeps its name, whatever signs are in it."""
    return short_name(name) if kind in ("compute", "communication", "copy", "stream") else name


def format_size(row: CollectiveRow) -> str:
    if row.size_bytes is None:
        return "unknown"
    if row.size_range_bytes:
        low, high = min(row.size_range_bytes), max(row.size_range_bytes)
        return f"{format_bytes(low)}–{format_bytes(high)}"
    return format_bytes(row.size_bytes)


def format_rate(row: CollectiveRow) -> str:
    """With ≥ where waiting could not be taken out."""
    if row.busbw_bytes_per_s is None:
        return "-"
    return ("≥ " if row.includes_waiting else "") + format_bandwidth(row.busbw_bytes_per_s)


def format_optional_share(share: float | None) -> str:
    return "-" if share is None else format_share(share)


def keep_units(text: str) -> str:
    """A number and its unit stay on one line: the space between them becomes one that does not break."""
    return _UNIT.sub("\\1\N{NO-BREAK SPACE}\\2", text)


def name_source(job: JobReport) -> str:
    """A folder by its name; a single file with its folder, since many are called the same."""
    path = Path(job.source)
    is_file = len(job.ranks) == 1 and path.parent.name
    return f"{path.parent.name}/{path.name}" if is_file else path.name or job.source


def describe_job(job: JobReport) -> str:
    """Format, devices, ranks and the step: what is looked at."""
    ranks = len(job.ranks)
    of = f" of {job.world_size}" if job.world_size is not None and job.world_size != ranks else ""
    parts = [
        job.format or "unknown format",
        ", ".join(job.devices) or "no device named",
        f"{ranks} rank{'s' if ranks != 1 else ''}{of}",
        describe_choice(job),
    ]
    return "; ".join(parts)


def describe_choice(job: JobReport) -> str:
    """Which step, and why that one."""
    detail = job.detail
    if detail.step_marker == "none":
        return "no steps marked: the whole trace"
    if len(job.steps) <= 1:
        return f"step {job.step}, the only one" if job.steps else f"step {job.step}"
    if job.chosen.startswith("step "):
        return f"step {job.step}, nearest to the median step time among {len(job.steps)}"
    return f"step {job.step} of {len(job.steps)}, {job.chosen}"


def describe_clocks(job: JobReport) -> str:
    """How the ranks' times were compared, and why so; empty where there is one rank."""
    if job.across is None or len(job.ranks) < 2:
        return ""
    return f"{job.across.clocks} ({job.across.clocks_because})"


def all_notes(job: JobReport) -> list[str]:
    """Everything to know before believing a number; what was mended while reading comes first."""
    notes = [*job.notes, *job.detail.notes]
    if job.across is not None:
        notes += job.across.notes
        late = job.across.stragglers.note
        notes += [late] if late and len(job.ranks) > 1 else []
    if job.critical is not None:
        notes += job.critical.notes
    repairs = list_repairs(job)
    mended = {f"{what}: {count}" for summary in job.ranks for what, count in summary.repairs.items()}
    return list(dict.fromkeys([*repairs, *(note for note in notes if note not in mended)]))


def list_repairs(job: JobReport) -> list[str]:
    """One note at most, so that none of them is left out where room is short."""
    sums: dict[str, int] = {}
    for summary in job.ranks:
        for what, count in summary.repairs.items():
            sums[what] = sums.get(what, 0) + count
    told = "; ".join(f"{what}: {count}" for what, count in sums.items())
    return [f"mended while reading: {told}"] if told else []
