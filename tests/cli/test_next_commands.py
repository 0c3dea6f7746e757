"""What makes something ends with the next command to type, on stderr, and that command works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from stepscope.cli.main import run

TRACE = str(Path(__file__).parents[1] / "traces" / "data" / "h200_small" / "recording" / "kineto" / "rank0.json.gz")


def next_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert run(words) == 0
    last = capsys.readouterr().err.splitlines()[-1]
    found = re.fullmatch(r"next: (.+)", last)
    assert found, last
    return shlex.split(found[1])


@pytest.mark.parametrize("name", ["all.json.gz", "job.json"])
def test_a_converted_trace_can_be_summarised(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, *words = next_command(["trace", "convert", TRACE, str(tmp_path / name)], capsys)
    assert program == "stepscope"
    assert run(words) == 0


def test_tables_pages_and_scripts_name_their_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, page, script = (tmp_path / name for name in ("table.csv", "page.html", "job.sh"))
    assert next_command(["trace", "convert", TRACE, str(table)], capsys) == ["less", str(table)]
    assert next_command(["trace", "report", TRACE, "-o", str(page)], capsys)[-1] == str(page)
    batch = ["launch", "sbatch", "--nodes", "1", "-o", str(script), "--", "bench", "comms", "--collective", "barrier"]
    assert next_command(batch, capsys) == ["sbatch", str(script)]


def test_json_says_nothing_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", "convert", TRACE, str(tmp_path / "a.json"), "--json"]) == 0
    assert "next:" not in capsys.readouterr().err
