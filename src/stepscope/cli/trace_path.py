"""`stepscope trace critical-path`: what the step could not do without, and what if something were faster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from stepscope.cli.options import FILE, json_option
from stepscope.cli.output import emit
from stepscope.cli.trace_options import open_traces, source_argument, step_options
from stepscope.core.units import format_duration, format_share

if TYPE_CHECKING:
    from stepscope.analyze.critical.path import CriticalPath
    from stepscope.analyze.critical.what_if import Limit, WhatIf

SHOWN_NAMES = 12


@click.command("critical-path")
@source_argument
@step_options
@click.option(
    "--rank", "ranks", type=int, multiple=True, metavar="N", help="Only this rank; may be given several times."
)
@click.option("--what-if", "what_if_text", metavar="EDITS",
              help="For example 'kernels:*gemm*=0.5', 'launches=0', 'communication=0'; join with commas.")  # fmt: skip
@click.option("--overlay", type=FILE, metavar="FILE.json",
              help="Write a trace with the path as a track of its own, for Perfetto.")  # fmt: skip
@click.option("--clocks-as-recorded", is_flag=True, help="Do not put the ranks' times on one clock.")
@click.option("--segments", is_flag=True, help="With --json: list every stretch of the path.")
@json_option
def critical_path(
    *,
    ranks: tuple[int, ...],
    what_if_text: str | None,
    overlay: Path | None,
    clocks_as_recorded: bool,
    segments: bool,
    **options: Any,
) -> None:
    """Find the chain of host work, launches, device work, waits and collectives that made the step as long as it was.

    Several ranks are one graph: where one waited for another in a collective, the path changes rank. --what-if runs the
    whole schedule again with edited times.

    Example: stepscope trace critical-path traces/ --what-if 'kernels=0.5' --json
    """
    from stepscope.analyze.critical.model import graph_of_job
    from stepscope.analyze.critical.path import describe_path, path_events
    from stepscope.analyze.critical.what_if import find_limits, parse_what_if, what_if

    edits = parse_what_if(what_if_text, where="--what-if") if what_if_text else None
    traces = open_traces(options)
    timelines = [traces.timeline(rank) for rank in (ranks or traces.ranks)]
    graph = graph_of_job(timelines, options["step"], align_clocks=not clocks_as_recorded)
    path = describe_path(graph)
    changed = what_if(graph, edits) if edits else None
    limits = find_limits(graph)
    written = None
    if overlay is not None:
        from stepscope.formats.chrome import write_chrome

        written = write_chrome(timelines, overlay, extra=path_events(path))
    data = {
        **msgspec.to_builtins(path if segments else msgspec.structs.replace(path, segments=[])),
        "what_if_s": changed.after_s if changed else None,
        "what_if": msgspec.to_builtins(changed) if changed else None,
        "limits": msgspec.to_builtins(limits),
        "overlay": written.path if written else None,
    }
    emit(data, lambda: _format(path, changed, limits, overlay))


def _format(path: CriticalPath, changed: WhatIf | None, limits: list[Limit], overlay: Path | None) -> str:
    which = f"step {path.step}" if path.step is not None else "whole trace"
    where = f", {len(path.ranks)} ranks" if len(path.ranks) > 1 else ""
    lines = [f"critical path of the profiled {which}{where}: {format_duration(path.length_s)}"]
    for kind, spent in sorted(path.by_kind_s.items(), key=lambda item: -item[1]):
        if spent > 0:
            lines.append(f"  {kind:14} {format_duration(spent):>10}  {format_share(spent / path.length_s):>7}")
    lines.append("by name:")
    lines += [
        f"  {format_duration(entry.time_s):>10}  {format_share(entry.share):>7}  {entry.kind:13} {entry.name[:70]}"
        for entry in path.by_name[:SHOWN_NAMES]
    ]
    if changed is not None:
        lines.append(
            f"what if {', '.join(edit.text for edit in changed.edits)}: {format_duration(changed.before_s)} → "
            f"{format_duration(changed.after_s)} (profiled step)"
        )
    lines.append("limits (the step if …):")
    lines += [f"  {format_duration(limit.step_s):>10}  {limit.meaning}" for limit in limits]
    lines += [f"note: {note}" for note in path.notes]
    if overlay is not None:
        lines.append(f"the path is drawn in {overlay}: open it in https://ui.perfetto.dev or chrome://tracing")
    return "\n".join(lines)
