"""`stepscope trace`: read traces, explain a step, compare, convert, link and record."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from stepscope.cli.options import FILE, json_option
from stepscope.cli.output import emit, narrate, suggest_for_file, terminal_width
from stepscope.cli.trace_diff import diff
from stepscope.cli.trace_files import convert, link
from stepscope.cli.trace_options import Progress, engine_options, open_traces, source_argument, step_options
from stepscope.cli.trace_path import critical_path
from stepscope.cli.trace_record import record
from stepscope.cli.trace_summaries import show_memory, show_sums
from stepscope.core.errors import ExitCode

if TYPE_CHECKING:
    from stepscope.analyze.answers.compose import Answer
    from stepscope.analyze.job import JobReport
    from stepscope.api import Explanation

CLOCKS = ("auto", "as recorded", "aligned", "durations")


@click.group("trace")
def command() -> None:
    """Read traces of any kind, explain where the step went, compare, convert, link and record."""


@command.command("summary")
@source_argument
@step_options
@click.option("--clocks", type=click.Choice(CLOCKS), default="auto",
              help="How ranks' times are compared; aligned takes off offsets found from collectives, auto does so "
              "where the clocks allow it.")  # fmt: skip
@engine_options
@json_option
def summary(**options: Any) -> None:
    """Say where a step of the traced job went: the answer first, then the evidence.

    PATH is a trace, a folder with one trace per rank, or a quoted pattern. Without --step the median step is explained.
    Step times from a trace are profiled times. A memory timeline of torch.profiler or a CUDA memory snapshot gets its
    peak, what was held then, growth from step to step and fragmentation.

    Example: stepscope trace summary traces/ --json
    """
    if show_sums(options["source"]) or show_memory(options["source"]):
        return
    from stepscope.report.trace_text import WIDTH, format_job

    answer, job, _ = _explain(options)
    emit(_as_data(job, answer), lambda: format_job(job, answer, terminal_width() or WIDTH))


@command.command("report")
@source_argument
@click.option("--output", "-o", type=FILE, default=Path("trace-report.html"), metavar="FILE.html",
              help="The page to write.")  # fmt: skip
@step_options
@click.option("--clocks", type=click.Choice(CLOCKS), default="auto", help="How times of different ranks are compared.")
@engine_options
@json_option
def report(*, output: Path, **options: Any) -> None:
    """Write one HTML page about a step: timeline, breakdown, tables. It needs no network and opens anywhere.

    Example: stepscope trace report traces/ -o step.html
    """
    explanation = _explain(options)
    answer, job, _ = explanation
    size = explanation.write_page(output)
    data = {**_as_data(job, answer), "page": str(output), "page_bytes": size}
    said = [job.damage, answer.sentence] if job.damage is not None else [answer.sentence]
    emit(data, "\n".join([*said, f"the page is in {output}"]))
    suggest_for_file(output)


@command.command("verify")
@source_argument
@json_option
def verify(*, source: str) -> int:
    """Check whether cached traces still belong to the content of their files.

    The cache is keyed by size and time of a file; this compares the hash of its content.
    """
    from stepscope.traces.read import read_traces, verify_cache

    checked = [(str(path), *verify_cache(path)) for path in dict.fromkeys(read_traces(source).paths)]
    data = [{"path": path, "outcome": outcome, "message": message} for path, outcome, message in checked]
    emit({"files": data}, "\n".join(f"{outcome:7} {path}: {message}" for path, outcome, message in checked))
    return ExitCode.FAILED if any(outcome == "stale" for _, outcome, _ in checked) else ExitCode.DONE


def _explain(options: dict[str, Any]) -> Explanation:
    from stepscope import api

    traces = open_traces(options)
    for name, reason in traces.left_out.items():
        narrate(f"left out {name}: {reason}")
    how = {name: options[name] for name in ("step", "clocks", "engine", "workers")}
    with Progress("ranks read") as progress:
        return api.explain(traces, on_rank=progress.show, **how)


def _as_data(job: JobReport, answer: Answer) -> dict[str, Any]:
    """The report without what only pictures need."""
    paths = {name: getattr(job, name) for name in ("critical", "own_critical")}
    bare = {name: path and msgspec.structs.replace(path, segments=[]) for name, path in paths.items()}
    short = msgspec.structs.replace(job, **bare)
    return {"damage": job.damage, "answer": msgspec.to_builtins(answer), **msgspec.to_builtins(short)}


for verb in (critical_path, diff, convert, link, record):
    command.add_command(verb)
