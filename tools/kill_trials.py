"""Kill, stop and interrupt measurements in every way that must not lose or blame anything, many times over.

    python tools/kill_trials.py [--fault NAME …] [--launcher self torchrun mpirun] [--times 20]

Prints one line per fault and launcher with the number of misses, and what was missed. Exits 1 if anything was.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from stepscope.core.errors import RunBusyError, StepscopeError
from stepscope.launch.watchdog import read_beat
from stepscope.store import StoredRun, remove_run, run_folders

STEPSCOPE = [sys.executable, "-m", "stepscope"]
HANG_S = 5
SWEEP = [
    "bench", "comms", "--collective", "all_reduce", "--sizes", "1K:16M:x2", "--max-time", "1s",
    "--hang-timeout", f"{HANG_S}s", "--json",
]  # fmt: skip
LAUNCHERS = {
    "self": [*STEPSCOPE, *SWEEP, "--ranks", "2"],
    "torchrun": [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "stepscope",
        *SWEEP,
    ],
    "mpirun": [
        str(Path(sys.executable).with_name("mpirun")), "-n", "2", "--oversubscribe", "--allow-run-as-root", *STEPSCOPE,
        *SWEEP,
    ],
}  # fmt: skip
RANKS = 2
OPS = ["ops", "--op", "gemm", "--shape", "m=64,n=64,k=64", "--max-time", "1s"]
PROCESSES = [*STEPSCOPE, "bench", *OPS, "--processes", "3"]
SIDE = "ops --op gemm --shape m=64,n=64,k=64"
AB = [*STEPSCOPE, "ab", SIDE, f"OMP_NUM_THREADS=1 {SIDE}", "--pairs", "2"]
END_LIMIT_S = 90.0
LEFT_S = 3.0
"""In which every process of a measurement that was ended must be gone."""


class Miss(Exception):  # noqa: N818 - what a trial did not hold
    pass


def expect(held: object, what: str) -> None:
    if not held:
        raise Miss(what)


def wait_until(condition: Callable[[], Any], what: str, limit_s: float = 60.0, poll_s: float = 0.005) -> Any:
    deadline_s = time.monotonic() + limit_s
    while True:
        found = condition()
        if found:
            return found
        expect(time.monotonic() < deadline_s, f"waited {limit_s:.0f} s for {what}")
        time.sleep(poll_s)


class Trial:
    """One measurement in a store of its own."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.environ = {**os.environ, "STEPSCOPE_STORE": str(store), "OMP_NUM_THREADS": "1"}

    @contextmanager
    def start(self, command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
        process = subprocess.Popen(command, env=self.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            for left in self.processes():
                left.kill()

    def processes(self) -> list[psutil.Process]:
        """Everything that measures into this store."""
        found = []
        for process in psutil.process_iter():
            try:
                mine = process.environ().get("STEPSCOPE_STORE") == str(self.store)
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def folder(self) -> Path | None:
        return next(iter(run_folders(self.store)), None)

    def pid_in_case(self, rank: int, done: int = 1) -> int | None:
        """The rank's process, once it measures and so many cases are finished."""
        folder = self.folder()
        beat = read_beat(folder / "ranks", rank) if folder else None
        if folder is None or beat is None or beat.phase != "measuring":
            return None
        return beat.pid if len(StoredRun(folder).results) >= done else None

    def pid_at_start(self, rank: int, launcher: str) -> int | None:
        """The rank's process, as soon as there is one."""
        if launcher == "self":
            server = [one for one in self.processes() if "stepscope.launch.server" in " ".join(one.cmdline())]
            ranks = sorted(one.pid for one in server if one.ppid() in {other.pid for other in server})
            return ranks[rank] if len(ranks) == RANKS else None  # the first fork of all is no rank
        name = "RANK" if launcher == "torchrun" else "OMPI_COMM_WORLD_RANK"
        for process in self.processes():
            try:
                if process.environ().get(name) == str(rank) and "stepscope" in process.cmdline():
                    return process.pid
            except psutil.Error:
                continue
        return None

    def require_nothing_left(self) -> None:
        wait_until(lambda: not self.processes(), "every process to end", LEFT_S, 0.05)


def check_report(trial: Trial, out: bytes, rank: int, *, killed: bool, in_case: bool, has_run: bool = True) -> None:
    """Nothing on standard output but one object, which names the rank, and no other, in the words that every launcher
    has; and the same kept with the run."""
    try:
        error = json.loads(out)["error"]
    except (ValueError, KeyError, TypeError) as problem:
        raise Miss(f"standard output is not one error as JSON: {out[-300:]!r}") from problem
    kind, message = error["kind"], error["message"]
    words = rf"rank {rank} died in .*: " if killed else rf"rank {rank} sent no heartbeat for \d+ s \(.*"
    if in_case:
        expect(re.search(r" of all_reduce.*size_bytes=\d+", message), f"no operation and size: {message}")
    expect(re.match(words, message), f"other words: {message}")
    expect(kind == ("rank_died" if killed else "rank_hung"), f"kind {kind}: {message}")
    if has_run:
        folder = trial.folder()
        failures = StoredRun(folder).failures if folder else []
        blamed = [(one.kind, one.rank) for one in failures if one.kind != "interrupted"]
        expect(blamed and set(blamed) == {(kind, rank)}, f"failures.jsonl blames {blamed}")


def lose_rank(trial: Trial, launcher: str, rank: int, number: signal.Signals, *, joined: bool) -> None:
    with trial.start(LAUNCHERS[launcher]) as process:
        find = (lambda: trial.pid_in_case(rank)) if joined else (lambda: trial.pid_at_start(rank, launcher))

        def find_while_it_runs() -> int | None:
            expect(process.poll() is None, f"the command ended with {process.returncode} before the fault")
            return find()

        os.kill(wait_until(find_while_it_runs, f"rank {rank}", limit_s=180.0, poll_s=0.02), number)
        out, _ = process.communicate(timeout=END_LIMIT_S)
        expect(process.returncode != 0, "exit code 0")
        # Rank 0 makes the run: stopped before, there is none.
        has_run = joined or rank != 0 or launcher == "self"
        check_report(trial, out, rank, killed=number == signal.SIGKILL, in_case=joined, has_run=has_run)
        trial.require_nothing_left()


SLOW_TORCH = f"""
import builtins, sys, time
load = builtins.__import__
def slow(name, *rest, **named):
    if name.partition(".")[0] == "torch" and "torch" not in sys.modules:
        builtins.__import__ = load
        time.sleep({HANG_S + 2})
    return load(name, *rest, **named)
builtins.__import__ = slow
"""
"""A `sitecustomize` that makes torch load for longer than a rank may be silent."""


def load_torch_slowly(trial: Trial, launcher: str) -> None:
    trial.store.mkdir(parents=True)
    (trial.store.parent / "sitecustomize.py").write_text(SLOW_TORCH)
    trial.environ["PYTHONPATH"] = str(trial.store.parent)
    small = [{"1K:16M:x2": "1K"}.get(word, word) for word in LAUNCHERS[launcher]]
    with trial.start(small) as process:
        out, _ = process.communicate(timeout=END_LIMIT_S)
        expect(process.returncode == 0, f"exit code {process.returncode}: {out[-300:]!r}")


def interrupt(trial: Trial, command: list[str], number: signal.Signals) -> None:
    """The runs are listed as running from their first moment and cannot be removed; nothing is left; resume goes on."""
    with trial.start(command) as process:

        def is_measuring() -> bool:
            for folder in run_folders(trial.store):
                expect(StoredRun(folder).status == "running", f"{folder.name} was listed as {StoredRun(folder).status}")
            return any(trial.store.glob("*/processes/*/journal.jsonl"))

        wait_until(is_measuring, "a process that measures", poll_s=0.002)
        for folder in run_folders(trial.store):
            try:
                remove_run(folder)
            except RunBusyError:
                continue
            raise Miss("runs rm removed a running measurement")
        process.send_signal(number)
        process.communicate(timeout=END_LIMIT_S)
    resumed = subprocess.run([*command, "--resume"], env=trial.environ, capture_output=True, text=True, check=False)
    expect(resumed.returncode == 0, f"resume ended with {resumed.returncode}: {resumed.stderr[-200:]}")
    runs = run_folders(trial.store)
    expect(len(runs) == (2 if command == AB else 1), f"{len(runs)} runs after the resume")


def leave_nothing(trial: Trial, command: list[str], number: signal.Signals) -> None:
    with trial.start(command) as process:
        wait_until(lambda: any(trial.store.glob("*/processes/*/journal.jsonl")), "a process that measures")
        process.send_signal(number)
        process.communicate(timeout=END_LIMIT_S)
        trial.require_nothing_left()


def watch_plain_run(trial: Trial) -> None:
    with trial.start([*STEPSCOPE, "bench", *OPS]) as process:
        while process.poll() is None:
            for folder in run_folders(trial.store):
                status = StoredRun(folder).status
                expect(status in {"running", "complete"}, f"listed as {status}")
        expect(process.returncode == 0, f"exit code {process.returncode}")


RANK_FAULTS: dict[str, Callable[..., None]] = {
    "rank 1 killed": lambda trial, launcher: lose_rank(trial, launcher, 1, signal.SIGKILL, joined=True),
    "rank 0 killed": lambda trial, launcher: lose_rank(trial, launcher, 0, signal.SIGKILL, joined=True),
    "rank 1 hangs": lambda trial, launcher: lose_rank(trial, launcher, 1, signal.SIGSTOP, joined=True),
    "rank 0 hangs": lambda trial, launcher: lose_rank(trial, launcher, 0, signal.SIGSTOP, joined=True),
    "rank 1 stopped before joining": lambda trial, launcher: lose_rank(
        trial, launcher, 1, signal.SIGSTOP, joined=False
    ),
    "rank 0 stopped before joining": lambda trial, launcher: lose_rank(
        trial, launcher, 0, signal.SIGSTOP, joined=False
    ),
    "torch loads for longer than the hang limit": load_torch_slowly,
}
RUN_FAULTS: dict[str, Callable[[Trial], None]] = {
    "processes: SIGKILL, resume at once": lambda trial: interrupt(trial, PROCESSES, signal.SIGKILL),
    "processes: SIGTERM, resume at once": lambda trial: interrupt(trial, PROCESSES, signal.SIGTERM),
    "processes: SIGKILL, nothing left": lambda trial: leave_nothing(trial, PROCESSES, signal.SIGKILL),
    "processes: SIGTERM, nothing left": lambda trial: leave_nothing(trial, PROCESSES, signal.SIGTERM),
    "ab: SIGTERM, resume at once": lambda trial: interrupt(trial, AB, signal.SIGTERM),
    "ab: SIGTERM, nothing left": lambda trial: leave_nothing(trial, AB, signal.SIGTERM),
    "plain run: never interrupted": watch_plain_run,
}


def repeat(times: int, body: Callable[[Trial], None]) -> list[str]:
    missed = []
    for _ in range(times):
        place = Path(tempfile.mkdtemp(prefix="kill-trial-"))
        try:
            body(Trial(place / "runs"))
        except (Miss, subprocess.TimeoutExpired, StepscopeError, OSError, ValueError) as error:
            missed.append(f"{type(error).__name__}: {error}")
        finally:
            shutil.rmtree(place, ignore_errors=True)
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description="Misses of Stepscope when its processes are killed or stopped.")
    parser.add_argument("--fault", nargs="+", default=[*RANK_FAULTS, *RUN_FAULTS], metavar="NAME")
    parser.add_argument("--launcher", nargs="+", default=list(LAUNCHERS), choices=list(LAUNCHERS))
    parser.add_argument("--times", type=int, default=20)
    chosen = parser.parse_args()
    total = 0
    print("| fault | launcher | trials | misses |\n|---|---|---|---|", flush=True)
    for name in chosen.fault:
        for launcher in chosen.launcher if name in RANK_FAULTS else [""]:
            body = partial(RANK_FAULTS[name], launcher=launcher) if launcher else RUN_FAULTS[name]
            missed = repeat(chosen.times, body)
            total += len(missed)
            print(f"| {name} | {launcher} | {chosen.times} | {len(missed)} |", flush=True)
            for miss in missed:
                print(f"    {miss}", file=sys.stderr, flush=True)
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
