"""Trace formats: one module of this package per format. A file's first bytes decide which one reads it.

A module is a format when it declares a `TraceFormat`; nothing else has to be edited. Formats outside of this package
are declared the same way, in an installed package (entry point `stepscope.trace_formats`) or in a Python file that
STEPSCOPE_TRACE_FORMATS names.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from stepscope.core.errors import UsageError, first_line
from stepscope.core.plugins import entry_points
from stepscope.formats.source import read_head
from stepscope.formats.timeline import Timeline

ENTRY_POINT = "stepscope.trace_formats"
FILES_VARIABLE = "STEPSCOPE_TRACE_FORMATS"
"""Python files that declare formats, separated as in PATH."""


class TraceFormat(NamedTuple):
    """A kind of trace file."""

    name: str
    sniff: Callable[[bytes, Path], bool]
    """Whether the unpacked first bytes (64 KiB) and the path look like it."""
    read: Callable[[Path], list[Timeline]]
    """One unfinished timeline for each rank or device process in the file."""
    is_general: bool = False
    """Asked after all others: any Chrome trace looks like this one."""
    find_rank: Callable[[Path, bytes], int | None] | None = None
    """For files of one rank: its number, from the first bytes, without reading the file."""


def known_formats() -> list[TraceFormat]:
    """In the order in which they are asked: those of the user's files and of installed packages first."""
    return [*_formats_of_files(os.environ.get(FILES_VARIABLE, "")), *_installed_formats()]


@cache
def _installed_formats() -> list[TraceFormat]:
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    own = [one for module in modules for one in _declared(vars(module).values())]
    return [entry.load() for entry in entry_points(group=ENTRY_POINT)] + sorted(own, key=lambda one: one.is_general)


@cache
def _formats_of_files(paths: str) -> list[TraceFormat]:
    import runpy

    found: list[TraceFormat] = []
    for path in filter(None, paths.split(os.pathsep)):
        try:
            with redirect_stdout(sys.stderr):  # stdout is the answer of a command
                declared = _declared(runpy.run_path(path).values())
        except Exception as error:
            message = f"the trace formats of {path} cannot be loaded: {type(error).__name__}: {first_line(error)}"
            raise UsageError(message, hint=f"correct the file or unset {FILES_VARIABLE}", where=path) from error
        if not declared:
            hint = "declare one: FORMAT = TraceFormat(name=…, sniff=…, read=…)"
            raise UsageError(f"{path} declares no trace format", hint=hint, where=path)
        found += declared
    return found


def _declared(values: Iterable[object]) -> list[TraceFormat]:
    return [value for value in values if isinstance(value, TraceFormat)]


def find_format(path: Path, head: bytes | None = None) -> TraceFormat | None:
    """None for a file that is no trace. `head`: its first unpacked bytes, where they were read already."""
    head = read_head(path) if head is None else head
    return next((known for known in known_formats() if known.sniff(head, path)), None)
