"""`stepscope ab`: two sides, interleaved, in repeated fresh processes."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import click
import msgspec

from stepscope.cli.execute import command_line, resumed
from stepscope.cli.options import Duration, json_option, level_option, resolution_option, resume_option, store_option
from stepscope.cli.output import emit, name_run, narrate, suggest
from stepscope.core.errors import ExitCode, UsageError
from stepscope.run.plan import Job

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*")


@click.command("ab")
@click.argument("side_a", metavar='"CASE A"')
@click.argument("side_b", metavar='"CASE B"')
@click.option("--pairs", type=click.IntRange(2), default=8, help="Fresh processes of each side.")
@click.option("--max-time", type=Duration(), default="1s", help="Sampling time per case and process.")
@level_option
@resolution_option
@resume_option
@store_option
@json_option
def command(*, side_a: str, side_b: str, max_time: float, resume: str | None, **how: Any) -> int:
    """Measure two sides interleaved, in repeated fresh processes, and say which is faster.

    A CASE is what follows `stepscope bench`, with variables in front where the sides differ in them:

    stepscope ab "OMP_NUM_THREADS=1 ops --op gemm" "OMP_NUM_THREADS=2 ops --op gemm"

    Each pair of processes is on disk when it is done; --resume continues with the next one.
    """
    from stepscope import api
    from stepscope.compare.verdict import describe, describe_comparison
    from stepscope.measure.progress import open_progress

    sides = [plan_side(parse_side(side), max_time) for side in (side_a, side_b)]
    a, b, comparison = api.ab(
        *sides, resume=resumed(resume), command=command_line(), progress=open_progress(), tell=narrate, **how
    )
    rows = comparison.rows
    lines = [*map(describe, rows), describe_comparison(comparison)]
    failed = any("failed" in {row.status_a, row.status_b} for row in rows)
    data = {"a": str(a.folder), "b": str(b.folder), "pairs": how["pairs"], "level": how["level"], "rows": rows}
    emit(data, "\n".join([*lines, f"A: {a.folder}", f"B: {b.folder}"]))
    suggest(f"stepscope report {a.id} {name_run(b.folder)} -o report.html")
    return ExitCode.FAILED if failed else ExitCode.DONE


class SideCommand(NamedTuple):
    """One of the two things compared: a `bench` command, and variables set for it alone."""

    text: str
    environment: dict[str, str]
    arguments: list[str]


def parse_side(text: str) -> SideCommand:
    """`[NAME=VALUE …] [stepscope] [bench] ops|workload|comms …`, quoted as in a shell; no shell runs it."""
    from stepscope.cli.bench import command as bench

    hint = 'write what follows `stepscope bench`, for example "OMP_NUM_THREADS=1 ops --op gemm --shape m=512"'
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"cannot read {text!r}: {error}", hint=hint) from error
    environment = {}
    while words and _ASSIGNMENT.fullmatch(words[0]):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    for optional in ("stepscope", "bench"):
        words = words[1:] if words[:1] == [optional] else words
    if not words or words[0] not in bench.list_commands(click.Context(bench)):
        raise UsageError(f"{text!r} is not a benchmark", hint=hint)
    for forbidden in ("--store", "--json", "--resume", "--list", "--processes", "--until-decided"):
        if any(word.split("=", 1)[0] == forbidden for word in words):
            raise UsageError(f"{forbidden} has no place in a side", hint="give it to `stepscope ab` itself")
    return SideCommand(text, environment, words)


def plan_side(side: SideCommand, max_time_s: float) -> Job:
    """What one side measures in each of its processes."""
    from stepscope.cli.resume import rehearse

    limited = any(word.startswith(("--max-time", "--quick", "--iterations")) for word in side.arguments)
    extra = [] if limited else ["--max-time", f"{max_time_s}s"]
    with environment_variables(side.environment):
        job = rehearse(["stepscope", "bench", *side.arguments, *extra])
    if job is None:
        raise UsageError(f"{side.text!r} measures nothing", hint="name what to measure, as for `stepscope bench`")
    if job.request.searches:
        raise UsageError("a search decides as it goes", hint="search first, then give each side its --batch-size")
    request = msgspec.structs.replace(job.request, side=side.text, environment=side.environment)
    return job._replace(request=request)


@contextmanager
def environment_variables(changes: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
