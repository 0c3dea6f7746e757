"""What goes to stdout and stderr: the same content for people and for programs."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import click
import msgspec

from stepscope.errors import StepscopeError

ANSWER_VARIABLE = "STEPSCOPE_ANSWER_FILE"
"""As in `launch.mpi`, which is not imported for it."""
LAST_WORD_S = 0.5
"""A launcher passes on what a rank printed last only if the rank does not end at the same moment."""


def emit(data: Any, text: str, *, as_json: bool) -> None:
    """`data` as the JSON envelope, or `text`; never both."""
    if as_json:
        _answer(msgspec.json.encode({"ok": True, "data": data}))
    elif text:
        click.echo(text)


def _answer(line: bytes) -> None:
    """On stdout; also in the file that who passes stdout on has asked for: launchers may lose the end of a line."""
    if asked := os.environ.get(ANSWER_VARIABLE):
        with contextlib.suppress(OSError):
            Path(asked).write_bytes(line + b"\n")
    click.echo(line.decode())
    if os.environ.get("OMPI_COMM_WORLD_RANK") and sys.stdout.isatty():
        # Open MPI reads from a terminal that it made, and was seen to lose the end when a rank ended at once.
        time.sleep(LAST_WORD_S)


def narrate(message: str) -> None:
    """A word to the person watching; stdout belongs to the result."""
    click.echo(message, err=True)


def print_error(error: StepscopeError, *, as_json: bool) -> None:
    if as_json:
        _answer(msgspec.json.encode({"ok": False, "error": error.as_dict()}))
        return
    lines = [f"error: {error.message}"]
    lines += [f"  where: {error.where}"] if error.where else []
    lines += [f"  next: {error.hint}"] if error.hint else []
    sys.stdout.flush()
    click.echo("\n".join(lines), err=True)
