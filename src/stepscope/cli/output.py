"""What goes to stdout and stderr: the same content for people and for programs."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import click
import msgspec

from stepscope.core.errors import StepscopeError
from stepscope.core.files import is_stdout, write_output
from stepscope.core.units import escape_controls, escape_json, wrap_line

ANSWER_VARIABLE = "STEPSCOPE_ANSWER_FILE"
"""As in `launch.mpi`, which is not imported for it."""
LAST_WORD_S = 0.5
"""A launcher passes on what a rank printed last only if the rank does not end at the same moment."""


_reserved: tuple[TextIO, TextIO, int] | None = None
"""While stdout is reserved: where answers go, `sys.stdout` as it was, and a copy of descriptor 1."""


def reserve_stdout() -> None:
    """Until `release_stdout`, stdout carries the answer alone: what else is printed, in Python or below it, by threads
    or at the exit of the process, goes to stderr."""
    global _reserved  # noqa: PLW0603 - a process has one stdout
    if _reserved is not None:
        return
    before, kept, is_own = sys.stdout, os.dup(1), sys.stdout is sys.__stdout__
    before.flush()
    answers: TextIO = before
    if is_own:  # it writes to descriptor 1
        answers = os.fdopen(kept, "w", encoding=before.encoding, errors=before.errors, closefd=False)
    _reserved = answers, before, kept
    os.dup2(2, 1)
    sys.stdout = sys.stderr


def release_stdout() -> None:
    global _reserved  # noqa: PLW0603
    if _reserved is not None:
        _, sys.stdout, kept = _reserved
        _reserved = None
        os.dup2(kept, 1)
        os.close(kept)


def answer_stream() -> TextIO:
    return _reserved[0] if _reserved is not None else sys.stdout


_JSON = "stepscope.json"


def choose_json(context: click.Context, _option: click.Parameter, value: bool) -> None:
    context.meta[_JSON] = value


def wants_json() -> bool:
    """Whether the command that runs was given `--json`."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(_JSON))


def emit(data: Any, text: str | Callable[[], str]) -> None:
    """`data` as the JSON envelope, or `text` (or what it returns); never both."""
    if wants_json():
        _answer(msgspec.json.encode({"ok": True, "data": data}))
    elif shown := text if isinstance(text, str) else text():
        show_text(shown)


def show_text(text: str) -> None:
    """On stdout. Names and messages in it may come from somebody else's files: they do not control the terminal."""
    click.echo(_fit(text, terminal_width()), file=answer_stream(), nl=not text.endswith("\n"))


def terminal_width(stream: TextIO | None = None) -> int | None:
    """Columns of the terminal that the stream (stdout) is; None for a file or a pipe, which get lines of any length."""
    return shutil.get_terminal_size().columns if (stream or answer_stream()).isatty() else None


def _fit(text: str, width: int | None) -> str:
    return "\n".join(part for line in escape_controls(text).split("\n") for part in wrap_line(line, width))


def suggest(command: str) -> None:
    """The next command to type, on stderr, behind what a command made; programs need none."""
    if not wants_json():
        click.echo(escape_controls(f"next: {command}"), err=True)  # on one line, to be copied


def suggest_for_file(path: Path) -> None:
    """How to look at a file that was written."""
    quoted = shlex.quote(str(path))
    if path.suffix in {".html", ".htm"}:
        suggest(f"{Path(sys.executable).name} -m webbrowser {quoted}")
    elif path.suffix == ".parquet":
        suggest(f'{Path(sys.executable).name} -c "import polars; print(polars.read_parquet({str(path)!r}))"')
    else:
        suggest(f"less {quoted}")


def name_run(folder: Path) -> str:
    """A run as commands take it, with the store where that is not the usual one."""
    from stepscope.store import resolve_store

    usual = folder.parent.absolute() == resolve_store(None).absolute()
    return folder.name if usual else f"{folder.name} --store {shlex.quote(str(folder.parent))}"


def write_text(path: Path, content: str, about: dict[str, Any]) -> None:
    """`content` as the file that the user named; then say where it is."""
    write_output(path, content.encode("utf-8", "backslashreplace"), hint="choose another file with --output")
    if is_stdout(path) and not wants_json():
        return
    emit({"output": str(path), **about}, str(path.resolve()))
    if path.is_file():
        suggest_for_file(path)


def _answer(line: bytes) -> None:
    """On stdout; also in the file that who passes stdout on has asked for: launchers may lose the end of a line."""
    if asked := os.environ.get(ANSWER_VARIABLE):
        with contextlib.suppress(OSError):
            Path(asked).write_bytes(line + b"\n")
    click.echo(escape_json(line.decode()), file=answer_stream())
    if os.environ.get("OMPI_COMM_WORLD_RANK") and answer_stream().isatty():
        # Open MPI reads from a terminal that it made, and was seen to lose the end when a rank ended at once.
        time.sleep(LAST_WORD_S)


def narrate(message: str) -> None:
    """A word to the person watching; stdout belongs to the result."""
    click.echo(_fit(message, terminal_width(sys.stderr)), err=True)


def print_error(error: StepscopeError, *, as_json: bool) -> None:
    if as_json:
        _answer(msgspec.json.encode({"ok": False, "error": error.as_dict()}))
        return
    lines = [f"error: {error.message}"]
    lines += [f"  where: {error.where}"] if error.where else []
    lines += [f"  next: {error.hint}"] if error.hint else []
    sys.stdout.flush()
    narrate("\n".join(lines))
