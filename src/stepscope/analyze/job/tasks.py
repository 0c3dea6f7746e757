"""What one process does for one rank: read its trace, reduce it, hand back a small answer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.analyze.ranks.digest import RankDigest
from stepscope.analyze.step.breakdown import Shares
from stepscope.analyze.step.report import StepReport

if TYPE_CHECKING:
    from stepscope.formats.timeline import Timeline


class RankTask(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    place: int = 0
    """Which of the ranks in that file."""
    rank: int
    step: int | None
    or_another: bool = False
    """Whether a rank without that step explains its own median step; else that is an error."""
    step_marker: str | None = None
    cache: bool = True
    in_full: bool = True
    """Whether the full report of the step comes back, or only its summary."""


class RankAnswer(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    source: str
    format: str
    devices: list[str]
    step: int
    summary_step_s: float
    shares: Shares
    device_busy_s: float
    kernels: int
    copies: int
    device: str
    hidden_comm_share: float | None
    repairs: dict[str, int]
    digest: RankDigest
    report: StepReport | None


def explain_rank(task: RankTask, timeline: Timeline | None = None) -> RankAnswer:
    """The same answer wherever it runs: nothing here depends on the process, the machine or other ranks.

    `timeline`: that of the task, where it has been read already.
    """
    from dataclasses import replace
    from importlib.util import find_spec

    from stepscope.analyze.ranks.digest import digest
    from stepscope.analyze.step.breakdown import break_down
    from stepscope.analyze.step.report import explain_step
    from stepscope.traces.read import load_timeline

    if timeline is None:
        if not task.in_full and find_spec("numba") is not None:
            import numba  # noqa: F401 - one of many ranks: loading the compiled scanner once pays for all of them
        timeline = load_timeline(Path(task.path), place=task.place, step_marker=task.step_marker, cache=task.cache)
    if timeline.rank != task.rank:
        timeline = replace(timeline, rank=task.rank)
    step = _own_step(timeline, task.step, or_another=task.or_another)
    report = explain_step(timeline, step) if task.in_full else None
    breakdown = report.breakdown if report is not None else break_down(timeline, step)
    return RankAnswer(
        rank=task.rank,
        source=task.path,
        format=str(timeline.metadata.get("format", "")),
        devices=_device_names(timeline),
        step=breakdown.step if breakdown.step is not None else 0,
        summary_step_s=breakdown.step_s,
        shares=breakdown.breakdown_s,
        device_busy_s=breakdown.device_busy_s,
        kernels=breakdown.kernels,
        copies=breakdown.copies,
        device=breakdown.device,
        hidden_comm_share=breakdown.overlap.hidden_share,
        repairs=dict(timeline.repairs),
        digest=digest(timeline),
        report=report,
    )


def _own_step(timeline: Timeline, step: int | None, *, or_another: bool) -> int | None:
    from stepscope.analyze.ranks.digest import list_numbers
    from stepscope.analyze.step.view import view
    from stepscope.core.errors import UsageError

    numbers = [span.number for span in timeline.steps]
    if step is None or step in numbers:
        return step
    if or_another:
        return view(timeline).median_step()
    raise UsageError(f"rank {timeline.rank} has no step {step}", hint=f"its steps: {list_numbers(numbers)}")


def _device_names(timeline: Timeline) -> list[str]:
    devices: Any = timeline.metadata.get("devices") or []
    names = (device.get("name") for device in devices if isinstance(device, dict))
    return list(dict.fromkeys(str(name) for name in names if name))
