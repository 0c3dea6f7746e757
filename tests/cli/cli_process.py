"""Calling the command from tests: as users do, or without a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from stepscope.cli.main import run


class Answer(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        content = json.loads(self.out)
        assert content["ok"] is True, content
        return content["data"]

    @property
    def error(self) -> dict[str, Any]:
        content = json.loads(self.out)
        assert content["ok"] is False, content
        found: dict[str, Any] = content["error"]
        return found


Stepscope = Callable[..., Answer]


def stepscope_in(store: Path) -> Stepscope:
    """The real command, each call in a process of its own."""

    def call(*arguments: str, timeout: float = 120, **variables: str) -> Answer:
        done = subprocess.run(
            [sys.executable, "-m", "stepscope", *arguments],
            env={**os.environ, "STEPSCOPE_STORE": str(store), "PYTHONWARNINGS": "default", **variables},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert "Traceback" not in done.stderr + done.stdout, done.stderr
        return Answer(done.returncode, done.stdout, done.stderr)

    return call


def stepscope_here(capfd: pytest.CaptureFixture[str]) -> Stepscope:
    """The command in this process, which loads nothing again; what its own children print is caught too."""

    def call(*arguments: str) -> Answer:
        capfd.readouterr()
        code = run(list(arguments))
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err, err
        return Answer(code, out, err)

    return call
