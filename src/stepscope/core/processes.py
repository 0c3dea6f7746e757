"""Programs that are run for what they print, and how processes end."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def run_program(command: Sequence[str], *, limit_s: float | None, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and capture its output; it has no input unless `options` of `subprocess.run` give one.

    Raises OSError where it cannot be started, TimeoutExpired where it takes longer than `limit_s`.
    """
    options = {"stdin": subprocess.DEVNULL} | options if "input" not in options else options
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=False, timeout=limit_s, **options
    )


def find_program(name: str) -> str | None:
    """Its path; also beside this Python: an environment that is not activated still has its programs."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def last_line(text: str, otherwise: str = "") -> str:
    """The last line that is not blank; programs that fail say there why."""
    return next(reversed(text.strip().splitlines()), otherwise)


def exit_code_of(code: int) -> int:
    """The exit code of a process that was ended by a signal, as a shell reports it: 137 for SIGKILL."""
    return 128 - code if code < 0 else code


def name_signal(number: int) -> str:
    """`SIGKILL`; `signal 99` for a number that has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
