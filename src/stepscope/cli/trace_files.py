"""`stepscope trace convert` and `stepscope trace link`: traces and graphs as files."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from stepscope.cli.options import ANY_PATH, EXISTING_FILE, FILE, FiniteRange, json_option
from stepscope.cli.output import emit, narrate, suggest, suggest_for_file
from stepscope.cli.trace_options import marker_options, open_traces, parse_numbers, require_numpy, step_options
from stepscope.core.errors import StoreWriteError, UsageError
from stepscope.core.files import output_file
from stepscope.core.units import format_bytes, format_duration, format_share, parse_size

if TYPE_CHECKING:
    from stepscope.formats.graph import Graph
    from stepscope.formats.timeline import Timeline
    from stepscope.traces.read import TraceSet

FORMATS = {"chrome": (".json", ".json.gz"), "parquet": (".parquet",), "csv": (".csv", ".csv.gz"), "chakra": (".et",)}

LONGEST_S = 1e9
"""The longest time that --time takes: thirty years, so that nanoseconds stay in 64 bits."""


@click.command("convert")
@click.argument("source", metavar="IN")
@click.argument("target", type=ANY_PATH, metavar="OUT")
@click.option("--to", "form", type=click.Choice(list(FORMATS)), help="The format [default: by the name of OUT].")
@click.option("--steps", metavar="N,N…", help="Only these steps.")
@click.option(
    "--time", "time_text", metavar="FROM:TO", help="Only this time: seconds from the first event, such as 0.5:1.2."
)
@click.option("--ranks", "ranks_text", metavar="N,N…", help="Only these ranks.")
@click.option(
    "--max-size", metavar="SIZE", help="Chrome only: no larger than this, such as 100M; the shortest events go first."
)
@click.option("--flows", type=click.Choice(["none", "launches", "all"]), default="launches",
              help="Chrome only: arrows from launch to kernel, and from forward to backward.")  # fmt: skip
@click.option(
    "--anonymise", is_flag=True, help="Replace names that tell whose trace it is; kernels and operators stay."
)
@click.option("--et", "graph_path", type=EXISTING_FILE, metavar="FILE",
              help="Chakra only: the execution trace of the same step, for arguments and data.")  # fmt: skip
@click.option("--keep-unlinked", is_flag=True,
              help="Chakra only: keep device events whose launch is not in the trace, however many there are, as "
              "independent nodes, which wait for their stream alone. Without it, a trace with more of them than half "
              "is refused.")  # fmt: skip
@marker_options
@json_option
def convert(
    *,
    target: Path,
    form: str | None,
    steps: str | None,
    time_text: str | None,
    ranks_text: str | None,
    max_size: str | None,
    flows: str,
    anonymise: bool,
    graph_path: Path | None,
    keep_unlinked: bool,
    **options: Any,
) -> None:
    """Write traces in another form: Chrome/Perfetto (many ranks in one file), Parquet, CSV or Chakra.

    IN may also be a Chakra or execution-trace graph when OUT is a .et file. Chakra holds one rank a file: with several,
    OUT is a folder.

    Example: stepscope trace convert traces/ job.json.gz --steps 3 --max-size 200M
    """
    form = form or _form_of(target)
    if form == "parquet":
        from stepscope.traces.table import require_polars

        require_polars()
    if form == "chakra" and _is_graph(options["source"]):
        data = _convert_graph(Path(options["source"]), target)
    else:
        traces = open_traces(options)
        _refuse_input(target, [*traces.paths, *([graph_path] if graph_path else [])], "OUT")
        for name, reason in traces.left_out.items():
            narrate(f"left out {name}: {reason}")
        timelines = _cut(traces, steps, time_text, ranks_text)
        notes: dict[str, Any] = {"repairs": tell_repairs(timelines), "warnings": []}
        if anonymise:
            timelines, told = _anonymise(timelines)
            notes |= told
        if form == "chakra":
            data = notes | _write_chakra(timelines, target, graph_path, keep_unlinked=keep_unlinked)
        else:
            data = notes | _write(form, timelines, target, max_size=max_size, flows=flows)
    emit(data, f"{data['path']}: {format_bytes(data['size_bytes'])}, {data['events']} events")
    if form in {"parquet", "csv"}:
        suggest_for_file(target)
    elif not _is_graph(options["source"]):
        suggest(f"stepscope trace summary {shlex.quote(str(target))}")


def _form_of(target: Path) -> str:
    for form, suffixes in FORMATS.items():
        if target.name.endswith(suffixes):
            return form
    known = ", ".join(suffix for suffixes in FORMATS.values() for suffix in suffixes)
    raise UsageError(
        f"{target.name} does not tell a format", hint=f"end it in one of {known}, or give --to", where="OUT"
    )


def _refuse_input(target: Path, inputs: Iterable[Path], where: str) -> None:
    """Nothing that is read is written over: a conversion loses something, and the original with it."""
    for path in inputs:
        if target.exists() and path.exists() and target.samefile(path):
            raise UsageError(
                f"{target} is one of the files that are read", hint="give the result another name", where=where
            )


def tell_repairs(timelines: Iterable[Timeline]) -> dict[str, int]:
    """What was repaired in reading, over all ranks; told on stderr as well, since the result does not show it."""
    by_file: dict[str, dict[str, int]] = {}
    for timeline in timelines:
        # Each rank of a file repeats what was repaired in the file.
        of_file = by_file.setdefault(str(timeline.metadata.get("source", timeline.rank)), {})
        for what, count in timeline.repairs.items():
            of_file[what] = max(of_file.get(what, 0), count)
    repairs: dict[str, int] = {}
    for of_file in by_file.values():
        for what, count in of_file.items():
            repairs[what] = repairs.get(what, 0) + count
    for what, count in repairs.items():
        # Notes on the place of a damage are in brackets and have no count of their own.
        narrate(f"repaired: {what}" if what.startswith("(") else f"repaired: {what} ({count})")
    return repairs


def _tell_warnings(graph: Graph) -> list[str]:
    for warning in graph.warnings:
        narrate(f"warning: {graph.where or 'graph'}: {warning}")
    return list(graph.warnings)


def _is_graph(source: str) -> bool:
    from stepscope.traces.read import looks_like_graph

    path = Path(source)
    return path.is_file() and looks_like_graph(path)


def _cut(traces: TraceSet, steps: str | None, time_text: str | None, ranks_text: str | None) -> list[Timeline]:
    from stepscope.traces.cut import cut

    wanted = parse_numbers(ranks_text, "--ranks")
    numbers = parse_numbers(steps, "--steps")
    timelines = [traces.timeline(rank) for rank in (traces.ranks if wanted is None else wanted)]
    if numbers is None and time_text is None:
        return timelines
    first, last = (None, None) if time_text is None else _parse_time(time_text, timelines)
    chosen = [cut(timeline, steps=numbers, start_ns=first, end_ns=last) for timeline in timelines]
    if not any(map(len, chosen)):
        begin, end = _whole_time(timelines)
        raise UsageError(
            "no event is left: none lies in what was asked for",
            hint=f"the trace lasts {format_duration((end - begin) / 1e9)}, and times count from its first event",
            where="--steps" if time_text is None else "--time",
        )
    return chosen


def _whole_time(timelines: Sequence[Timeline]) -> tuple[int, int]:
    filled = [timeline.core for timeline in timelines if len(timeline)]
    begin = min((int(core["start_ns"].min()) for core in filled), default=0)
    return begin, max((int(core["end_ns"].max()) for core in filled), default=begin)


def _parse_time(text: str, timelines: Sequence[Timeline]) -> tuple[int | None, int | None]:
    begin, _ = _whole_time(timelines)
    first, colon, last = text.partition(":")
    try:
        bounds = [float(part) if part.strip() else None for part in (first, last)]
    except ValueError:
        bounds = []
    if not colon or not bounds or any(bound is not None and not abs(bound) < LONGEST_S for bound in bounds):
        raise UsageError(
            f"{text[:80]!r} is no time", hint="write FROM:TO in seconds, such as 0.5:1.2 or :0.1", where="--time"
        )
    start, end = bounds
    if start is not None and end is not None and end <= start:
        raise UsageError(
            f"{text[:80]!r} ends before it begins", hint="write the earlier time first, such as 0.5:1.2", where="--time"
        )
    start_ns, end_ns = (None if bound is None else begin + round(bound * 1e9) for bound in bounds)
    return start_ns, end_ns


def _anonymise(timelines: Sequence[Timeline]) -> tuple[list[Timeline], dict[str, Any]]:
    from stepscope.traces.anonymise import anonymise

    done = anonymise(timelines)
    return done.timelines, {"anonymised": msgspec.to_builtins(done.report)}


def _write(form: str, timelines: list[Timeline], target: Path, *, max_size: str | None, flows: str) -> dict[str, Any]:
    if form == "chrome":
        from stepscope.formats.chrome import write_chrome

        chosen = {"none": (), "launches": ("ac2g",), "all": ("ac2g", "fwdbwd")}[flows]
        limit = parse_size(max_size, where="--max-size") if max_size else None
        data: dict[str, Any] = msgspec.to_builtins(write_chrome(timelines, target, flows=chosen, max_bytes=limit))
        return data
    if form == "csv":
        from stepscope.traces.table import write_csv

        table = write_csv(timelines, target)
        return {**msgspec.to_builtins(table), "events": table.rows}
    return _write_parquet(timelines, target)


def _write_parquet(timelines: Sequence[Timeline], target: Path) -> dict[str, Any]:
    import polars as pl

    from stepscope.traces.table import make_table

    frames = [make_table(timeline).with_columns(pl.col(pl.Enum).cast(pl.String)) for timeline in timelines]
    frame = pl.concat(frames, how="vertical_relaxed")
    try:
        with output_file(target) as aside:
            frame.write_parquet(aside, compression="zstd")
            size_bytes = aside.stat().st_size
    except pl.exceptions.PolarsError as error:
        raise StoreWriteError(f"cannot be written: {error}", where=str(target)) from error
    return {"path": str(target), "size_bytes": size_bytes, "events": len(frame), "columns": frame.columns}


def _write_chakra(
    timelines: Sequence[Timeline], target: Path, graph_path: Path | None, *, keep_unlinked: bool
) -> dict[str, Any]:
    if len(timelines) == 1 and not target.is_dir():
        return _write_chakra_rank(timelines[0], target, graph_path, keep_unlinked=keep_unlinked)
    if graph_path is not None:
        raise UsageError(
            "an execution trace belongs to one rank", hint="convert rank by rank with --ranks N", where="--et"
        )
    target.mkdir(parents=True, exist_ok=True)
    files = [
        _write_chakra_rank(timeline, target / f"rank-{timeline.rank}.et", None, keep_unlinked=keep_unlinked)
        for timeline in timelines
    ]
    return {
        "path": str(target),
        "size_bytes": sum(file["size_bytes"] for file in files),
        "events": sum(file["events"] for file in files),
        "files": files,
    }


def _write_chakra_rank(
    timeline: Timeline, target: Path, graph_path: Path | None, *, keep_unlinked: bool
) -> dict[str, Any]:
    from stepscope.analyze.critical.model import row_edges
    from stepscope.formats.execution_trace import read_execution_trace
    from stepscope.traces.chakra_convert import MINIMUM_SHARE
    from stepscope.traces.chakra_convert import convert as to_chakra
    from stepscope.traces.link import link as join

    graph = None if graph_path is None else read_execution_trace(graph_path)
    linked = None if graph is None else join(graph, timeline, operators_suffice=keep_unlinked)
    least = 0.0 if keep_unlinked else MINIMUM_SHARE
    done = to_chakra(timeline, edges=row_edges(timeline), link=linked, minimum_share=least)
    done.write(target)
    if done.coverage.device_events_without_launch:
        narrate(
            f"{target.name}: {done.coverage.device_events_without_launch} of {done.coverage.device_events} device "
            "events have no launch in the trace and are independent nodes: they wait for their stream alone"
        )
    return {
        "path": str(target),
        "size_bytes": target.stat().st_size,
        "events": done.node_count,
        "coverage": msgspec.to_builtins(done.coverage),
        "warnings": [] if graph is None else _tell_warnings(graph),
    }


def _convert_graph(source: Path, target: Path) -> dict[str, Any]:
    """A graph without times as Chakra."""
    from stepscope.formats.chakra import write_chakra
    from stepscope.traces.chakra_graphs import chakra_of_graph

    require_numpy()
    _refuse_input(target, [source], "OUT")
    graph = read_graph(source)
    warnings = _tell_warnings(graph)
    trace = chakra_of_graph(graph)
    write_chakra(target, trace)
    return {
        "path": str(target),
        "size_bytes": target.stat().st_size,
        "events": len(trace.nodes),
        "coverage": None,
        "repairs": {},
        "warnings": warnings,
    }


def read_graph(path: Path) -> Graph:
    """An execution trace or a Chakra file."""
    from stepscope.formats.chakra import looks_like_chakra, read_chakra
    from stepscope.formats.execution_trace import read_execution_trace
    from stepscope.formats.source import read_head
    from stepscope.traces.chakra_graphs import graph_of_chakra

    if not looks_like_chakra(read_head(path), path):
        return read_execution_trace(path)
    return graph_of_chakra(read_chakra(path))


@click.command("link")
@click.argument("graph_path", type=EXISTING_FILE, metavar="ET")
@click.argument("source", metavar="KINETO")
@click.option("--minimum-share", type=FiniteRange(0, 1), default=0.5, help="Fail where less than this was joined.")
@click.option("--output", "-o", type=FILE, metavar="FILE.jsonl",
              help="Write one line a node: id, name, device events, durations.")  # fmt: skip
@step_options
@json_option
def link(*, graph_path: Path, minimum_share: float, output: Path | None, **options: Any) -> None:
    """Join an execution trace to the timeline of the same steps: each node with its kernels and durations.

    Says which generation of ids the files have, how much was joined, and why the rest was not.

    Example: stepscope trace link et.json.gz kineto.json.gz --json
    """
    from stepscope.traces.link import link as join
    from stepscope.traces.read import read_timeline

    require_numpy()
    if output is not None:
        _refuse_input(output, [graph_path, Path(options["source"])], "--output")
    timeline = read_timeline(options["source"], step_marker=options["step_marker"])
    graph = read_graph(graph_path)
    repairs, warnings = tell_repairs([timeline]), _tell_warnings(graph)
    found = join(graph, timeline, minimum_share=minimum_share)
    said = found.summary
    if output is not None:
        _write_nodes(found, output)
    data = {
        **msgspec.to_builtins(said),
        "output": str(output) if output else None,
        "repairs": repairs,
        "warnings": [*said.warnings, *warnings],
    }
    lines = [
        f"linked {format_share(said.linked_share)} ({said.generation})",
        f"  {said.device_events_linked} of {said.device_events} device events",
        f"  {said.operators_linked} of {said.operators} operators",
        *(f"  {count} not joined: {reason}" for reason, count in said.reasons.items()),
        *(f"warning: {warning}" for warning in said.warnings),
    ]
    emit(data, "\n".join(lines))
    if output is not None:
        suggest_for_file(output)


def _describe_row(timeline: Timeline, row: int) -> dict[str, Any]:
    core = timeline.core
    start_ns, end_ns = int(core["start_ns"][row]), int(core["end_ns"][row])
    return {"name": timeline.text("name", row), "start_ns": start_ns, "duration_s": (end_ns - start_ns) / 1e9}


def _write_nodes(found: Any, output: Path) -> None:
    with output_file(output) as scratch, scratch.open("wb") as file:
        for place, node in enumerate(found.graph.nodes):
            line = {
                "id": node.id,
                "name": node.name,
                "host_s": found.host_s(place),
                "device_s": found.device_s(place),
                "device_events": [_describe_row(found.timeline, row) for row in found.rows_of(place).tolist()],
            }
            file.write(msgspec.json.encode(line) + b"\n")
