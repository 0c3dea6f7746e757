"""What the summary and the page show of the critical path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.analyze.critical.kinds import DELAYS
from stepscope.analyze.section import Section, field, make_table
from stepscope.core.units import format_duration, format_share
from stepscope.formats.classify import short_name

if TYPE_CHECKING:
    from stepscope.analyze.critical.path import CriticalPath
    from stepscope.analyze.job import JobReport

LEAD = "What the step could not do without: only what is on it makes the step shorter when it gets faster."
WITHOUT_DEVICE = (
    "Without a device it runs through the program's own thread: what that thread waited for, such as a collective of "
    "another thread or rank, is on it as the call that waited."
)
PATH_WORDS = {
    "gap": "between recorded events",
    "launch": "from launch to start",
    "launch_call": "launch calls",
    "stream": "hand-over on a stream",
    "sync": "return of a blocking call",
}
"""Kinds of time on the critical path whose names say too little."""


def spell_path_kind(kind: str) -> str:
    return PATH_WORDS.get(kind, kind.replace("_", " "))


def short_on_path(name: str, kind: str) -> str:
    """Names of kernels are shortened; what the host did keeps its name, whatever signs are in it."""
    return short_name(name) if kind in ("compute", "communication", "copy", "stream") else name


def path_section(job: JobReport) -> Section | None:
    path = job.critical
    if path is None:
        return None
    whole = path.length_s or 1.0
    delays_s = sum(path.by_kind_s.get(kind, 0.0) for kind in DELAYS)
    kinds = sorted((item for item in path.by_kind_s.items() if item[1] > 0), key=lambda item: -item[1])
    name = field("Name", lambda one: short_on_path(one.name, one.kind))
    by_name = make_table("Critical path by name", "What lies on it", path.by_name, [
        field("Time", "time_s", "s"),
        field("% of path", "share", "share"),
        field("Segments", "count", "count"),
        field("Kind", lambda one: spell_path_kind(one.kind)),
        name,
    ], is_folded=False)  # fmt: skip
    by_kind = make_table(
        "Critical path by kind", f"The {format_duration(path.length_s)} of the profiled step, each once", kinds, [
            field("Time", lambda item: item[1], "s"),
            field("% of path", lambda item: item[1] / whole, "share"),
            field("Kind", lambda item: spell_path_kind(item[0])),
        ]
    )  # fmt: skip
    slack = make_table(
        "Slack", "How much later device work could end without making the step longer", path.slack, [
            field("Least slack", "least_slack_s", "s"),
            field("On the path", "on_path_s", "s"),
            field("Time", "time_s", "s"),
            field("Count", "count", "count"),
            field("Kind", "kind"),
            name,
        ]
    )  # fmt: skip
    return Section(
        id="path",
        title="Critical path through all ranks" if len(path.ranks) > 1 else "Critical path",
        lead=LEAD if job.detail.breakdown.has_device else f"{LEAD} {WITHOUT_DEVICE}",
        facts=[
            ("Ranks", _list_ranks(path) if len(path.ranks) > 1 else f"rank {job.telling_rank} alone"),
            ("Length", format_duration(path.length_s)),
            ("On the host", f"{format_duration(path.host_s)} ({format_share(path.host_s / whole)})"),
            ("On the device", f"{format_duration(path.device_s)} ({format_share(path.device_s / whole)})"),
            ("Delays between them", f"{format_duration(delays_s)} ({format_share(delays_s / whole)})"),
        ],
        tables=[by_name, by_kind, slack],
    )


def _list_ranks(path: CriticalPath) -> str:
    whole = path.length_s or 1.0
    shares = zip(path.ranks, path.by_rank_s, strict=True)
    return ", ".join(f"rank {rank} {format_share(spent / whole)}" for rank, spent in shares if spent > 0)
