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
from cli_process import Stepscope

from builders import make_case, make_result, make_samples, make_system
from stepscope.records import make_request
from stepscope.store import RunWriter, create_run

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
    "overlap-text": ["report", "latest~2"],
    "pattern": ["bench", "pattern", "--show", "latest~1"],
    "pattern-text": ["report", "latest~1"],
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
    "overlap-text": {"collective=all_reduce", "dtype=float32", "device=cpu", "Median", "Interval", "n"},
    "pattern": {"reduce", "all_reduce", "steps", "bytes", "median", "p95", "busbw", "waited"},
    "pattern-text": {"pattern_ddp", "scale=0.001000", "Median", "Interval", "n"},
    "workload": {"dlrm", "infer", "A.1dev-embed4-fp32", "ex", "Median", "Interval", "n"},
    "report": {"gemm", "all_reduce", "overlap", "pattern_ddp", "Median", "Interval", "n", "Run"},
    "compare": {"Case", "Interval", "n", "Verdict"},
    "check": {"undecided:"},
    "list": {"Run", "Status", "complete", "Cases"},
    "verify": {"intact"},
    "doctor": {"cpu", "python"},
    "workloads": {"ID", "A.16dev-embed32-fp32", "precisions", "batch", "limit"},
}
"""Words that each shows at every width: what identifies a row, median, interval and n among them."""

SCRIPT = """
import json, sys
from stepscope.cli.main import run
for name, words in json.loads(sys.argv[1]).items():
    print("=====", name, flush=True)
    run(words)
"""


FORKED_SCRIPT = """
import json, os, sys
import torch._dynamo
from stepscope.cli.main import run
for terminal in json.loads(sys.argv[2]):
    pid = os.fork()
    if pid == 0:
        os.dup2(terminal, 1)
        os.dup2(terminal, 2)
        os.environ["STEPSCOPE_STORE"] += f"-{terminal}"
        for name, words in json.loads(sys.argv[1]).items():
            print("=====", name, flush=True)
            run(words)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    os.close(terminal)
    if os.waitpid(pid, 0)[1] != 0:
        sys.exit("a verb was killed")
"""


class Seen(NamedTuple):
    stdout: str
    stderr: str


def on_terminal(width: int, command: Sequence[str], store: Path, *, both: bool = False) -> Seen:
    """Run it with stdout (with `both` stderr too) on a terminal of that width."""
    ours, theirs = open_terminal(width)
    error_file = store.parent / f"stderr-{width}"
    with error_file.open("wb") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs if both else errors, env=environment(store)
        )
    os.close(theirs)
    shown = read_terminal(ours)
    process.wait()
    return Seen(shown, error_file.read_text())


def on_terminals(verbs: dict[str, list[str]], store: Path) -> list[str]:
    """stdout and stderr of the verbs on terminals of all widths: forks of one process that has loaded all they need."""
    ours, theirs = zip(*(open_terminal(width) for width in WIDTHS), strict=True)
    command = [sys.executable, "-c", FORKED_SCRIPT, json.dumps(verbs), json.dumps(theirs)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=theirs, env=environment(store))
    for terminal in theirs:
        os.close(terminal)
    shown = [read_terminal(terminal) for terminal in ours]
    assert process.wait() == 0
    return shown


def open_terminal(width: int) -> tuple[int, int]:
    """Our end and the command's."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    return ours, theirs


def environment(store: Path) -> dict[str, str]:
    variables = {**os.environ, "STEPSCOPE_STORE": str(store), "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    variables.pop("COLUMNS", None)
    return variables


def read_terminal(ours: int) -> str:
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
    return b"".join(parts).decode().replace("\r\n", "\n")


def run_verbs(width: int, verbs: dict[str, list[str]], store: Path) -> dict[str, Seen]:
    """Several verbs in one process, since torch takes longer to load than each of them to run."""
    seen = on_terminal(width, [sys.executable, "-c", SCRIPT, json.dumps(verbs)], store)
    names = re.split(r"^===== (\S+)\n", seen.stdout, flags=re.MULTILINE)[1:]
    return {name: Seen(text, seen.stderr) for name, text in zip(names[::2], names[1::2], strict=True)}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
def test_every_table_fits_the_terminal_and_keeps_what_identifies(measured: Path, width: int) -> None:
    shown = run_verbs(width, SHOWN, measured)
    assert list(shown) == list(SHOWN)
    for name, seen in shown.items():
        assert_fits(seen.stdout, width)
        assert KEPT[name] <= words_of(seen.stdout), f"{name}: {KEPT[name] - words_of(seen.stdout)}"


FAILING = {
    "usage": ["bench", "ops", "--op", "gemm", "--op", "linear", "--shape", "batch=3"],
    "skips": ["bench", "ops", "--op", "gemm", "--shape", "m=8,n=8,k=8", "--dtype", "float8_e4m3fn", *SHORT],
    "many-skips": ["bench", "ops", "--op", "gemm", "--shape", "m=8:64:x2,n=8,k=8", "--dtype", "float8_e4m3fn", *SHORT],
    "rows": ["bench", "ops", "--call", "aten::addmm", "--args", "float32[64] float32[64,32] float32[32,64] beta=0.5",
             *SHORT],
}  # fmt: skip


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """What is shown of them, by width."""
    return dict(zip(WIDTHS, on_terminals(FAILING, tmp_path_factory.mktemp("failing") / "runs"), strict=True))


@pytest.mark.parametrize("width", WIDTHS)
def test_errors_warnings_and_finished_cases_fit_too(failed: dict[int, str], width: int) -> None:
    """Words are not broken: labels are, behind a comma."""
    text = strip_escapes(failed[width])
    shown = "\n".join(line for line in text.splitlines() if "━" not in line)
    assert_fits(shown, width)
    _, usage, one, several, call = re.split(r"^===== \S+\n", shown, flags=re.MULTILINE)
    assert "or run one command per operator" in " ".join(usage.split())
    assert "nothing was measured: the one case was skipped. The reason: layout=nn" in " ".join(one.split())
    assert "nothing was measured: all 4 cases were skipped. The first: layout=nn" in " ".join(several.split())
    assert "# skipped: 4 cases, for example gemm/micro/forward/custom [m=8 " in several
    assert several.count("# skipped:") == 1
    assert re.search(r"^ .*\bcache=warm\]: ", call, flags=re.MULTILINE), call


def test_a_pipe_gets_whole_lines(measured: Path) -> None:
    environment = {**os.environ, "STEPSCOPE_STORE": str(measured), "COLUMNS": "80"}
    command = [sys.executable, "-m", "stepscope", "report", "latest"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert max(map(len, done.stdout.splitlines())) > 100
    assert "left out" not in done.stdout


def test_the_bar_counts_the_cases_of_all_processes(tmp_path: Path) -> None:
    """The first count stands there before anything was measured."""
    words = [*MEASURED["ops"], "--processes", "2"]
    seen = on_terminal(80, [sys.executable, "-m", "stepscope", *words], tmp_path / "runs", both=True)
    counts = assert_bars(seen.stdout, 80)
    assert counts[0] == "0/2"
    assert "1/2" in counts


@pytest.mark.parametrize("width", WIDTHS)
def test_bar_count_and_clock_always_show(tmp_path: Path, width: int) -> None:
    """Also beside a label that is longer than the line."""
    script = """
import time
from builders import make_case, make_result, make_samples
from stepscope.measure.progress import open_progress
case = make_case(**{f"parameter_{number}": number for number in range(20)})
with open_progress() as progress:
    for number in (1, 2):
        progress.case_started(case, number, 2, note="process 1 of 2")
        time.sleep(0.2)
        progress.case_done(make_result(case), [make_samples(case, [1.0, 1.1])])
"""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r}){script}"]
    seen = on_terminal(width, command, tmp_path / "runs", both=True)
    assert {"0/2", "1/2"} <= set(assert_bars(seen.stdout, width))


def assert_bars(text: str, width: int) -> list[str]:
    """Counts in the order shown; each beside a bar and a clock, in a line that fits."""
    lines = [line for line in re.split(r"[\r\n]", strip_escapes(text)) if "━" in line]
    found = [re.search(r"[━╸╺]{24} +(\d+/\d+) +\d+:\d\d:\d\d", line) for line in lines]
    assert lines
    assert all(found), lines
    assert max(map(len, lines)) <= width
    return [one[1] for one in found if one is not None]


def strip_escapes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_every_verb_takes_latest_for_a_run(here: Stepscope, store_of_three: list[Path]) -> None:
    """All were made within a second: the order is that of their making, not of their names."""
    first, second, third = (folder.name for folder in store_of_three)
    assert here("runs", "show", "latest", "--json").data["id"] == third
    assert here("runs", "show", "latest~1", "--json").data["id"] == second
    for words in (["runs", "export"], ["report"], ["runs", "verify"]):
        assert here(*words, "latest~2", "--json").data
    assert here("compare", "latest~1", "latest", "--json").data["a"] == second
    gate = here("check", "latest", "--baseline", "latest~1", "--json").data
    assert (gate["candidate"], gate["baseline"]) == (third, second)
    assert "is complete" in here("runs", "resume", "latest").err
    assert here("runs", "rm", "latest", "latest~2", "--json").data["removed"] == [third, first]
    assert "holds 1 runs" in here("report", "latest~1").err


@pytest.fixture
def store_of_three(store: Path) -> list[Path]:
    folders = []
    case = make_case(m=1)
    for name in ("zebra", "middle", "ant"):
        folder = create_run(
            store, verb="ops", name=name, command=["stepscope"], request=make_request("ops", {}), cases=[case]
        )
        with RunWriter(folder) as writer:
            writer.write_system(make_system())
            writer.append(make_result(case), [make_samples(case, [1.0, 1.1])])
            writer.finish()
        folders.append(folder)
    return folders


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
