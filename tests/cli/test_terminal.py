"""What people see on terminals of 80, 100 and 140 columns, which are real pseudo-terminals here."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

WIDTHS = (80, 100, 140)
SHORT = ["--max-time", "20ms", "--min-samples", "2", "--warmup", "1"]
MEASURED = {
    "ops": ["bench", "ops", "--op", "gemm", "--shape", "m=64,n=64,k=64", *SHORT],
    "ops-twice": ["bench", "ops", "--op", "gemm", "--shape", "m=64,n=64,k=64", "--shape", "m=32,n=64,k=64", *SHORT],
    "comms": ["bench", "comms", "--backend", "fake", "--ranks", "2", "--collective", "all_reduce,broadcast",
              "--sizes", "1K:4K:x4", "--per-rank", *SHORT],
    "overlap": ["bench", "overlap", "--backend", "fake", "--ranks", "2", "--collective", "all_reduce", "--sizes", "4K",
                "--compute", "gemm:m=16,n=16,k=16", "--repeat", "1", *SHORT],
    "pattern": ["bench", "pattern", "ddp", "--backend", "fake", "--ranks", "2", "--set", "model=resnet50", "--set",
                "scale=0.001", *SHORT],
    "workload": ["bench", "workload", "dlrm/ootb/infer/A.1dev-embed4-fp32", "--scale", "tiny", "--no-loader", *SHORT],
}  # fmt: skip
"""In this order, so that the last one is `latest`."""
SHOWN = {
    "ops": ["report", "latest~5"],
    "ops-twice": ["runs", "show", "latest~4"],
    "comms": ["report", "latest~3", "--format", "nccl"],
    "comms-text": ["report", "latest~3"],
    "overlap": ["bench", "overlap", "--show", "latest~2"],
    "pattern": ["bench", "pattern", "--show", "latest~1"],
    "workload": ["report", "latest"],
    "report": ["report"],
    "compare": ["compare", "latest~5", "latest~4"],
    "check": ["check", "latest", "--baseline", "latest~1"],
    "list": ["runs", "list"],
    "verify": ["runs", "verify", "latest", "latest~1"],
    "doctor": ["doctor", "--no-probe"],
    "workloads": ["bench", "list", "--model", "dlrm"],
}
KEPT = {
    "ops": {"gemm", "m=64", "n=64", "k=64", "Median", "Interval", "n", "Score"},
    "ops-twice": {"gemm", "m=64", "m=32", "Median", "Interval", "n", "Score"},
    "comms": {"size", "float32", "p50", "algbw", "busbw", "#wrong", "1024", "4096"},
    "comms-text": {"Median", "Interval", "n", "all_reduce", "broadcast", "AlgBW", "BusBW", "Wrong"},
    "overlap": {"all_reduce", "alone", "beside", "together", "efficiency", "[low", "n", "#wrong"},
    "pattern": {"reduce", "all_reduce", "steps", "bytes", "median", "p95", "busbw", "waited"},
    "workload": {"dlrm", "infer", "A.1dev-embed4-fp32", "ex/s", "Median", "Interval", "n"},
    "report": {"gemm", "all_reduce", "overlap", "pattern_ddp", "Median", "Interval", "n", "Run"},
    "compare": {"Case", "B/A", "Interval", "n", "Verdict"},
    "check": {"undecided:"},
    "list": {"Run", "Status", "complete", "Cases"},
    "verify": {"intact"},
    "doctor": {"cpu", "python"},
    "workloads": {"ID", "precisions", "batch", "limit"},
}
"""Words that each shows at every width: what identifies a row, median, interval and n among them."""

SCRIPT = """
import json, sys
from stepscope.cli.main import run
for name, words in json.loads(sys.argv[1]).items():
    print("=====", name, flush=True)
    run(words)
"""


class Seen(NamedTuple):
    stdout: str
    stderr: str


def on_terminal(width: int, command: Sequence[str], store: Path, *, both: bool = False) -> Seen:
    """Run it with stdout (with `both` stderr too) on a terminal of that width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    environment = {**os.environ, "STEPSCOPE_STORE": str(store), "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    environment.pop("COLUMNS", None)
    error_file = store.parent / f"stderr-{width}"
    with error_file.open("wb") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs if both else errors, env=environment
        )
    os.close(theirs)
    parts = []
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:
            break
        if not part:
            break
        parts.append(part)
    os.close(ours)
    process.wait()
    return Seen(b"".join(parts).decode().replace("\r\n", "\n"), error_file.read_text())


def run_verbs(width: int, verbs: dict[str, list[str]], store: Path) -> dict[str, Seen]:
    """Several verbs in one process, since torch takes longer to load than each of them to run."""
    seen = on_terminal(width, [sys.executable, "-c", SCRIPT, json.dumps(verbs)], store)
    names = re.split(r"^===== (\S+)\n", seen.stdout, flags=re.MULTILINE)[1:]
    return {name: Seen(text, seen.stderr) for name, text in zip(names[::2], names[1::2], strict=True)}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every kind."""
    place = tmp_path_factory.mktemp("terminal") / "runs"
    shown = run_verbs(80, MEASURED, place)
    assert list(shown) == list(MEASURED)
    for name, seen in shown.items():
        assert_fits(seen.stdout, 80)
        assert KEPT[name] <= words_of(seen.stdout), name
    assert next(iter(shown.values())).stderr.count("next: stepscope report") == len(MEASURED)
    return place


def words_of(text: str) -> set[str]:
    return {word.strip(",") for word in re.split(r"[\s/]+", text)}


def assert_fits(text: str, width: int) -> None:
    """But for words that cannot be broken (paths), and commands, which are there to be copied."""
    for line in text.splitlines():
        breakable = len(line.split()) > 1 and "next: stepscope" not in line
        assert len(line) <= width or not breakable, f"{len(line)} > {width}: {line}"


@pytest.mark.parametrize("width", WIDTHS)
def test_every_table_fits_the_terminal_and_keeps_what_identifies(store: Path, width: int) -> None:
    shown = run_verbs(width, SHOWN, store)
    assert list(shown) == list(SHOWN)
    for name, seen in shown.items():
        assert_fits(seen.stdout, width)
        assert KEPT[name] <= words_of(seen.stdout), f"{name}: {KEPT[name] - words_of(seen.stdout)}"


def test_a_pipe_gets_whole_lines(store: Path) -> None:
    environment = {**os.environ, "STEPSCOPE_STORE": str(store), "COLUMNS": "80"}
    command = [sys.executable, "-m", "stepscope", "report", "latest"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert max(map(len, done.stdout.splitlines())) > 100
    assert "left out" not in done.stdout


@pytest.mark.parametrize("width", WIDTHS)
def test_the_bar_shows_count_and_clock_over_all_processes(tmp_path: Path, width: int) -> None:
    """Labels are longer than the line; the first count stands there before anything was measured."""
    words = [*MEASURED["ops"], "--processes", "2", "--quick"]
    seen = on_terminal(width, [sys.executable, "-m", "stepscope", *words], tmp_path / "runs", both=True)
    frames = re.findall(r"[━╸╺ ]{24}\S* +(\d+/\d+) +(\d+:\d\d:\d\d)", strip_escapes(seen.stdout))
    counts = [count for count, _ in frames]
    assert counts[0] == "0/2"
    assert "1/2" in counts
    for line in re.split(r"[\r\n]", strip_escapes(seen.stdout)):
        if re.search(r"\d+:\d\d:\d\d", line) and "━" in line:
            assert len(line) <= width


def strip_escapes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_measurement_leaves_nothing_behind_in_the_process(tmp_path: Path) -> None:
    """`--backend fake` measures in this very process."""
    script = """
import json, os, sys
from stepscope.cli.main import run
def files():
    return {os.path.realpath(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd")}
before, opened = dict(os.environ), files()
assert run(json.loads(sys.argv[1])) == 0
assert dict(os.environ) == before
assert not {one for one in files() - opened if "runs" in one}, files() - opened
import torch.distributed
assert not torch.distributed.is_initialized()
"""
    words = [
        "bench",
        "comms",
        "--backend",
        "fake",
        "--ranks",
        "2",
        "--collective",
        "all_reduce",
        "--sizes",
        "1K",
        *SHORT,
    ]
    environment = {**os.environ, "STEPSCOPE_STORE": str(tmp_path / "runs")}
    command = [sys.executable, "-c", script, json.dumps([*words, *SHORT])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
