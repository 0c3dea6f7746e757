"""`stepscope trace record`: run a program unchanged and record some of its steps."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from stepscope.cli.options import json_option
from stepscope.cli.output import emit, narrate, print_error, suggest
from stepscope.core.errors import ExitCode
from stepscope.core.units import format_bytes, format_duration, format_ratio, format_share

if TYPE_CHECKING:
    from stepscope.formats.timeline import LinkSummary
    from stepscope.traces.recording.evidence import RankRecording, RecordedFile, Recording

SHOWN_RANKS = 8
NOTABLE_CHANGE = 0.1
"""Between the steps before and after the recording."""
MARKERS = ("auto", "optimizer", "mark", "forward")


@click.command("record", context_settings={"allow_interspersed_args": False})
@click.option("--out", "-o", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Folder of the recording [default: stepscope-recordings/TIME-SCRIPT].")  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Put it in the place of a recording that is there.")
@click.option("--warmup", type=click.IntRange(0), default=2, show_default=True, help="First steps, left alone.")
@click.option("--unprofiled", type=click.IntRange(0), default=5, show_default=True,
              help="Steps timed without profiler, before it starts and again after it ended.")  # fmt: skip
@click.option("--profiler-warmup", type=click.IntRange(0), default=1, show_default=True,
              help="Steps under the profiler that are thrown away.")  # fmt: skip
@click.option("--steps", type=click.IntRange(1), default=3, show_default=True, help="Steps to record.")
@click.option("--shapes/--no-shapes", default=True, show_default=True, help="Sizes and types of operators' inputs.")
@click.option("--et/--no-et", default=True, show_default=True, help="The execution trace beside the timeline.")
@click.option("--stacks", is_flag=True, help="Python calls and their lines.")
@click.option("--memory", is_flag=True, help="Every allocation.")
@click.option("--ranges", is_flag=True, help="Smallest and largest value of whole-number inputs; slow.")
@click.option("--lean", is_flag=True, help="Also record as many later steps with the timeline alone.")
@click.option("--overheads", is_flag=True, help="Run other profiler settings too, and state what each costs.")
@click.option("--step-marker", type=click.Choice(MARKERS), default="auto", show_default=True,
              help="What ends a step: the optimizer, stepscope.step(), or a call of the outermost module.")  # fmt: skip
@click.option("--inference", is_flag=True, help="The same as --step-marker forward.")
@click.option("--every", type=click.IntRange(1), default=1, show_default=True, help="So many marks make one step.")
@click.option("--stop", is_flag=True, help="End the program when everything is recorded.")
@click.option("--no-link", is_flag=True, help="Do not join the execution trace to the timeline.")
@json_option
@click.argument("program", nargs=-1, required=True, metavar="-- COMMAND…")
def record(
    *,
    program: tuple[str, ...],
    out: Path | None,
    overwrite: bool,
    inference: bool,
    step_marker: str,
    no_link: bool,
    as_json: bool,
    **chosen: Any,
) -> int:
    """Run COMMAND unchanged and record some of its steps: timeline and execution trace, one pair a rank.

    Steps are found by themselves: the optimizer's, or the program's own marks (stepscope.step()). Launchers such as
    torchrun work too: every rank is recorded. The exit code is the program's own.

    Example: stepscope trace record --steps 3 -- python train.py --epochs 1
    """
    from stepscope.traces.recording.evidence import make_settings
    from stepscope.traces.recording.program import name_folder, record_program

    settings = make_settings(**chosen, step_marker="forward" if inference else step_marker)
    folder = out or name_folder(program)
    done = record_program(program, settings, folder, overwrite=overwrite, link=not no_link, quiet=as_json)
    if done.recording is None:
        assert done.lack is not None
        print_error(done.lack, as_json=as_json)
        return done.exit_code or done.lack.exit_code
    text = "" if as_json else format_recording(done.recording, folder)
    emit({"folder": str(folder), **describe(done.recording)}, text, as_json=as_json)
    if not as_json:
        suggest(f"stepscope trace summary {shlex.quote(str(folder))}")
    if done.exit_code:
        narrate(f"the program ended with exit code {done.exit_code}; what was recorded by then is kept")
    return done.exit_code or ExitCode.DONE


def describe(recording: Recording) -> dict[str, Any]:
    """The record as programs see it, with what follows from its times."""
    content: dict[str, Any] = msgspec.to_builtins(recording)
    for plain, rank in zip(content["ranks"], recording.ranks, strict=True):
        plain["unprofiled_s"] = rank.unprofiled_s()
        plain["overheads"] = [
            {**msgspec.to_builtins(one), "label": one.profiler.label, "ratio": one.ratio} for one in rank.overheads()
        ]
    return content


def format_recording(recording: Recording, folder: Path) -> str:
    """For people; a line or two a rank."""
    ranks = recording.ranks
    missing = recording.world_size - len(ranks)
    lines = [f"recording: {folder}"]
    if missing:
        lines.append(f"{missing} of {recording.world_size} ranks have recorded nothing here")
    for rank in ranks[:SHOWN_RANKS]:
        lines += _format_rank(rank)
    if len(ranks) > SHOWN_RANKS:
        lines.append(f"… and {len(ranks) - SHOWN_RANKS} more ranks (--json lists them all)")
    return "\n".join(lines)


def _format_rank(rank: RankRecording) -> list[str]:
    numbers = rank.recorded_steps
    steps = f"steps {numbers[0]} to {numbers[-1]}" if numbers else "no whole step"
    files = ", ".join(_format_file(one) for one in (rank.kineto, rank.et, rank.lean) if one)
    lines = [f"rank {rank.rank}: {steps} ({rank.status}, ended by {rank.step_marker}); {files}"]
    unprofiled = [one for one in rank.times if one.profiler is None]
    if unprofiled:
        parts = ", ".join(f"{format_duration(one.step_s)} {one.when} ({one.steps} steps)" for one in unprofiled)
        lines.append(f"  a step without profiler: {parts}")
        times = [one.step_s for one in unprofiled]
        if max(times) > (1 + NOTABLE_CHANGE) * min(times):
            change = format_share(max(times) / min(times) - 1, 0)
            meaning = (
                "the estimate of the profiler's overhead is unreliable by as much"
                if rank.device is None
                else "once used, the profiler's library stays attached to the device; those before count"
            )
            lines.append(f"  these differ by {change}: {meaning}")
    else:
        lines.append("  the step without profiler was not timed: its own time is not known")
    lines += [
        f"  a profiled step: {format_duration(one.profiled_s)}, {format_ratio(one.ratio)} ({one.profiler.label})"
        for one in rank.overheads()
    ]
    if rank.linked is not None:
        lines.append(f"  {_format_link(rank.linked)}")
    return lines + [f"  note: {notice}" for notice in rank.notices]


def _format_link(linked: LinkSummary) -> str:
    text = f"linked: {linked.operators_linked} of {linked.operators} operators"
    if linked.device_share is not None:
        text += f", {linked.device_events_linked} of {linked.device_events} device events"
    return f"{text} ({format_share(linked.linked_share)}, by {linked.generation})"


def _format_file(file: RecordedFile) -> str:
    return f"{file.path} {format_bytes(file.size_bytes)}"
