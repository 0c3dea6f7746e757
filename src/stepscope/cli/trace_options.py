"""What the verbs of `stepscope trace` share."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Self

import click

from stepscope.cli.options import apply_options
from stepscope.core.errors import MissingDependencyError, UsageError
from stepscope.core.units import format_duration

if TYPE_CHECKING:
    from stepscope.traces.read import TraceSet

_LONGEST_NUMBER = 18
_FEWER = "name only those that the trace has; `stepscope trace summary` lists them"


source_argument = click.argument("source", metavar="PATH")
marker_options = apply_options(
    (
        click.option("--step-marker", metavar="NAME", help="Each instance of this annotation is a step."),
        click.option("--no-cache", is_flag=True, help="Read the files themselves and keep nothing."),
    )
)
step_options = apply_options(
    (
        click.option("--step", type=int, metavar="N", help="The step to look at [default: the median step]."),
        marker_options,
    )
)
engine_options = apply_options(
    (
        click.option("--engine", metavar="ADDRESS",
                     help="Analyse ranks on a cluster: ray://HOST:PORT or dask://HOST:PORT."),
        click.option("--workers", type=click.IntRange(1), metavar="N",
                     help="Processes on this machine [default: as cores and memory allow]."),
    )
)  # fmt: skip


def open_traces(options: dict[str, Any]) -> TraceSet:
    """The traces a verb was given."""
    from stepscope.traces.read import read_traces

    require_numpy()
    return read_traces(
        options["source"], step_marker=options.get("step_marker"), cache=not options.get("no_cache", False)
    )


def require_numpy(what: str = "reading traces") -> None:
    try:
        import numpy  # noqa: F401
    except ImportError:
        raise MissingDependencyError(f"{what} needs numpy", hint="pip install 'stepscope[read]'") from None


def parse_numbers(text: str | None, option: str, most: int = 100_000) -> list[int] | None:
    """`3,5-7` as numbers, each once; None where nothing was given."""
    if text is None:
        return None
    numbers: dict[int, None] = {}
    for part in text.split(","):
        first, dash, last = (word.strip() for word in part.partition("-"))
        ends = [first, last] if dash else [first]
        if not all(end.isascii() and end.isdecimal() for end in ends):
            raise UsageError(
                f"{text[:80]!r} is no list of numbers", hint="write numbers and ranges: 3,5-7", where=option
            )
        if any(len(end) > _LONGEST_NUMBER for end in ends):
            raise UsageError(f"{max(ends, key=len)[:40]} is too large a number", hint=_FEWER, where=option)
        begin, end = int(ends[0]), int(ends[-1])
        if end < begin:
            raise UsageError(
                f"{part.strip()} ends before it begins", hint=f"write {end}-{begin} for all from {end}", where=option
            )
        if end - begin >= most - len(numbers):
            raise UsageError(f"{text[:80]!r} names more than {most} numbers", hint=_FEWER, where=option)
        numbers.update(dict.fromkeys(range(begin, end + 1)))
    return list(numbers)


def format_signed(seconds: float) -> str:
    return ("+" if seconds > 0 else "−" if seconds < 0 else "") + format_duration(abs(seconds))


class Progress:
    """A count on a terminal; silent elsewhere."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._shown = False

    def __enter__(self) -> Self:
        return self

    def show(self, done: int, of: int) -> None:
        if of > 1 and sys.stderr.isatty():
            self._shown = True
            click.echo(f"\r{done} of {of} {self._what}", err=True, nl=False)

    def __exit__(self, *_: object) -> None:
        if self._shown:
            click.echo("\r\033[K", err=True, nl=False)
