"""Launching on several hosts: the commands, how they are watched, and what is left when they fail."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import make_case
from stepscope.core.errors import LaunchError, MissingDependencyError, UsageError
from stepscope.core.processes import exit_code_of
from stepscope.launch.evidence import Evidence, find_open_run, store_of
from stepscope.launch.hosts import CLUSTER_VARIABLE, DEFAULT_RSH, Cluster, LaunchHost, encode_cluster
from stepscope.launch.mpi import (
    ANSWER_VARIABLE,
    MpiCommand,
    Mpirun,
    find_mpirun,
    parse_version,
    plan_mpirun,
    run_mpirun,
)
from stepscope.launch.node import HOLD, REACHED, REASON, STARTED, describe_code, reach
from stepscope.launch.remote import (
    HostCommand,
    forwarded_variables,
    is_local,
    plan_torchrun,
    remote_command,
    run_on_hosts,
)
from stepscope.launch.watchdog import Heartbeat, failure_path, log_path, write_rank_failure
from stepscope.records import make_request
from stepscope.store import StoredRun, create_run

TWO = Cluster(
    hosts=(LaunchHost(name="a", slots=2, address="192.0.2.1"), LaunchHost(name="b", slots=1, interface="ib0")),
    interface="eth0",
    environment={"WORD": 'it\'s $HOME; "x"'},
)
COMMS = ["bench", "comms", "--note", "two words; $HOME 'single' \"double\" `tick`", "", "*"]
WORDS = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=10), min_size=1, max_size=4)


@pytest.fixture
def joining_shell(tmp_path: Path) -> str:
    """Plays ssh: makes one line of its words after the host's name and has a shell read it in another folder."""
    script = tmp_path / "ssh"
    script.write_text('#!/bin/sh\nshift\ncd /\nexec env -i PATH="$PATH" sh -c "$*"\n')
    script.chmod(0o755)
    return f"{script} {{host}}"


# The commands of torchrun


def test_one_torchrun_a_host_in_the_order_of_the_file() -> None:
    first, second = plan_torchrun(TWO, COMMS, port=29500, python="py", folder=Path("/work dir"), environ={})
    assert (first.host, first.ranks, first.remote) == ("a", 2, True)
    line = first.command[-1]
    assert first.command == [*shlex.split(DEFAULT_RSH.replace("{host}", "a")), line]
    place, _, rest = line.partition(" && exec ")
    assert place == "cd '/work dir'"
    words = shlex.split(rest)
    assert 'WORD=it\'s $HOME; "x"' in words
    assert f"{CLUSTER_VARIABLE}={encode_cluster(TWO)}" in words
    node = words[words.index("py") :]
    assert node[:8] == [
        "py", "-m", "stepscope.launch.node", "--nnodes=2", "--node-rank=0", "--nproc-per-node=2",
        "--master-addr=192.0.2.1", "--master-port=29500",
    ]  # fmt: skip
    assert node[-len(COMMS) - 2 :] == ["-m", "stepscope", *COMMS]
    assert "--node-rank=1" in second.command[-1]
    assert "--nproc-per-node=1" in second.command[-1], "uneven hosts are fine"
    assert first.environment["GLOO_SOCKET_IFNAME"] == "eth0"
    assert second.environment["GLOO_SOCKET_IFNAME"] == "ib0"


def test_the_remote_shell_of_the_option_comes_before_that_of_the_file() -> None:
    cluster = Cluster(hosts=TWO.hosts, rsh="enter {host}")
    assert plan_torchrun(cluster, COMMS, environ={})[0].command[:3] == ["enter", "a", "sh"]
    assert plan_torchrun(cluster, COMMS, rsh="other -x {host}", environ={})[0].command[:3] == ["other", "-x", "a"]
    with pytest.raises(UsageError, match=r"has no \{host\}"):
        plan_torchrun(cluster, COMMS, rsh="ssh", environ={})


def test_this_machine_needs_no_remote_shell() -> None:
    own = socket.gethostname()
    for name in ("localhost", "127.0.0.1", own):
        (only,) = plan_torchrun(Cluster(hosts=(LaunchHost(name=name, slots=2),)), COMMS, python="py", environ={})
        assert not only.remote
        assert only.command[:3] == ["py", "-m", "stepscope.launch.node"]
    assert is_local(LaunchHost(name="anything", address="127.0.0.1"))
    assert not is_local(LaunchHost(name=own, address="192.0.2.1")), "an address says more than a name"
    assert not is_local(LaunchHost(name="node-without-address"))


def test_a_first_host_that_only_it_can_reach_is_refused() -> None:
    cluster = Cluster(hosts=(LaunchHost(name="localhost"), LaunchHost(name="b")))
    with pytest.raises(UsageError, match="takes for itself"):
        plan_torchrun(cluster, COMMS, environ={})


def test_variables_that_matter_travel_and_those_of_other_launchers_stay() -> None:
    environ = {
        "HOME": "/root",
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "3",
        "STEPSCOPE_STORE": "runs",
        "STEPSCOPE_SELF_LAUNCH": "1",
        "STEPSCOPE_RENDEZVOUS": "inline",
        "RANK": "0",
    }
    assert forwarded_variables(environ).keys() == {"NCCL_DEBUG", "OMP_NUM_THREADS", "STEPSCOPE_STORE"}


@settings(deadline=None, max_examples=30)
@given(WORDS, st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=10))
def test_words_and_values_survive_every_kind_of_remote_shell(words: list[str], value: str) -> None:
    command = ["sh", "-c", 'printf "[%s]" "$V" "$@"', "sh"]
    expected = "".join(f"[{word}]" for word in (value, *words)).encode()
    joining = ["sh", "-c", 'shift; exec sh -c "$*"', "ssh"]
    for template, shell in (
        ("ssh {host}", joining),
        ("env H={host}", ["env"]),
        ("sh -c {command} {host}", ["sh"]),
    ):
        made = remote_command(template, "h", [*command, *words], {"V": value}, Path("/"))
        # The name decides how the words are given; what stands in for the program behaves like it.
        done = subprocess.run([*shell, *made[1:]], capture_output=True, check=True)
        assert done.stdout == expected


def test_a_shell_that_joins_its_words_gets_one_line(joining_shell: str) -> None:
    made = remote_command(joining_shell, "b", ["printenv", "V"], {"V": "a  b"}, Path("/tmp"))
    assert subprocess.run(made, capture_output=True, text=True, check=True).stdout == "a  b\n"


# Watching them


def host(name: str, script: str, *, joined: bool = True) -> HostCommand:
    said = f"echo '{STARTED}' >&2; echo '{REACHED}' >&2; " if joined else ""
    return HostCommand(host=name, ranks=1, command=["sh", "-c", said + script], environment={}, folder="/", remote=True)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For hosts that are played by a shell, which does not notice that its input ends."""
    monkeypatch.setattr("stepscope.launch.remote.GRACE_S", 0.2)
    monkeypatch.setattr("stepscope.launch.remote.LOADING_S", 0.2)
    monkeypatch.setattr("stepscope.launch.remote.STOP_WAIT_S", 0.3)
    monkeypatch.setattr("stepscope.launch.mpi._STOP_WAIT_S", 0.3)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_first_host_is_passed_through_and_the_others_are_prefixed(capfd: pytest.CaptureFixture[str]) -> None:
    end = run_on_hosts([host("a", "echo out; echo err >&2"), host("b", "echo out; echo err >&2")])
    assert (end.code, end.failed, end.first_host_answered) == (0, None, True)
    out, err = capfd.readouterr()
    assert out == "out\n"
    assert sorted(err.splitlines()) == ["[b] err", "[b] out", "err"]


@pytest.mark.usefixtures("impatient")
def test_the_first_failure_ends_the_others_and_is_named(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    end = run_on_hosts([host("a", f"echo $$ > {pid}; exec sleep 1000"), host("b", f"echo '{REASON}why' >&2; exit 3")])
    assert end.failed is not None
    assert (end.code, end.failed.host, end.failed.reason) == (3, "b", "why")
    assert not end.first_host_answered
    assert not is_alive(int(pid.read_text()))


def test_the_others_may_tell_their_side_first(capfd: pytest.CaptureFixture[str]) -> None:
    end = run_on_hosts([host("a", "sleep 1; echo told; exit 2"), host("b", "exit 1")])
    assert capfd.readouterr().out == "told\n"
    assert end.code == 2, "rank 0's host says most"


def test_a_rank_ended_by_a_signal_explains_the_others() -> None:
    end = run_on_hosts([host("a", "exit 1"), host("b", "sleep 0.5; exit 137")])
    assert end.failed is not None
    assert (end.failed.host, end.failed.code) == ("b", 137)


@pytest.mark.usefixtures("impatient")
def test_a_shell_that_fails_ends_the_launch_at_once_with_its_words() -> None:
    end = run_on_hosts([host("a", "exec sleep 1000"), host("b", "echo no route >&2; exit 255", joined=False)])
    assert end.failed is not None
    assert (end.failed.host, end.failed.started, end.failed.reason) == ("b", False, "no route")
    assert end.code == 1


def test_a_shell_that_is_not_there_is_named() -> None:
    nowhere = HostCommand(host="b", ranks=1, command=["/nowhere/ssh"], environment={}, folder="/", remote=True)
    with pytest.raises(LaunchError, match="cannot start /nowhere/ssh for b"):
        run_on_hosts([host("a", "exec sleep 1000", joined=False), nowhere])


@pytest.mark.usefixtures("impatient")
def test_hosts_that_never_come_are_named(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    silent = host("b", f"echo $$ > {pid}; exec sleep 1000", joined=False)
    with pytest.raises(LaunchError, match=r"^b did not start its ranks within 0 s") as caught:
        run_on_hosts([host("a", "exec sleep 1000"), silent, host("c", "exec sleep 1000")], join_limit_s=0.4)
    assert caught.value.where == "b"
    assert not is_alive(int(pid.read_text()))
    started = host("b", f"echo '{STARTED}' >&2; exec sleep 1000", joined=False)
    with pytest.raises(LaunchError, match=r"^b did not reach the first host"):
        run_on_hosts([host("a", "exec sleep 1000"), started], join_limit_s=0.4)


def test_a_first_host_that_is_not_there_is_named_rather_than_those_who_look_for_it() -> None:
    absent = host("a", "exec sleep 1000", joined=False)
    with pytest.raises(LaunchError, match=r"^a did not start"):
        run_on_hosts([absent, host("b", "exit 1")])


# On each host


def test_the_first_host_is_waited_for_and_missed_with_a_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        reach("127.0.0.1", server.getsockname()[1], 5)
        port = server.getsockname()[1]
    with pytest.raises(LaunchError, match=f"127.0.0.1:{port} within 0 s: Connection refused"):
        reach("127.0.0.1", port, 0.2)


@pytest.mark.parametrize(
    ("code", "shell_code", "says"),
    [(2, 2, "exit code 2"), (-9, 137, "SIGKILL"), (-63, 191, "signal 63")],
)
def test_exit_codes(code: int, shell_code: int, says: str) -> None:
    assert exit_code_of(code) == shell_code
    assert says in describe_code(code)


def start_node(tmp_path: Path, script: str, stdin: int) -> subprocess.Popen[bytes]:
    file = tmp_path / "rank.py"
    file.write_text(script)
    options = ["--nnodes=1", "--nproc-per-node=2", "--master-port=0"]
    return subprocess.Popen(
        [sys.executable, "-m", "stepscope.launch.node", *options, str(file)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"},
        stdin=stdin,
        stderr=subprocess.PIPE,
    )  # fmt: skip


SLEEPING_RANK = """
import os, pathlib, time
folder = pathlib.Path(__file__).parent
(folder / f"pid-{os.environ['RANK']}.tmp").write_text(str(os.getpid()))
(folder / f"pid-{os.environ['RANK']}.tmp").rename(folder / f"pid-{os.environ['RANK']}")
time.sleep(1000)
"""


@pytest.mark.ranks
def test_a_node_ends_its_ranks_when_its_starter_goes_away(tmp_path: Path) -> None:
    node = start_node(tmp_path, SLEEPING_RANK, subprocess.PIPE)
    assert node.stdin is not None
    node.stdin.write(HOLD)
    node.stdin.flush()
    files = [tmp_path / "pid-0", tmp_path / "pid-1"]
    deadline = time.monotonic() + 60
    while not all(file.exists() for file in files):
        assert node.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pids = [int(file.read_text()) for file in files]
    node.stdin.close()
    assert node.wait(30) == 128 + signal.SIGTERM
    assert not any(is_alive(pid) for pid in pids)
    assert node.stderr is not None
    assert STARTED.encode() in node.stderr.read()
    node.stderr.close()


@pytest.mark.ranks
def test_a_node_without_input_keeps_running_and_passes_the_exit_code_on(tmp_path: Path) -> None:
    script = "import os, sys, time\ntime.sleep(1 if os.environ['RANK'] == '1' else 100)\nsys.exit(3)\n"
    node = start_node(tmp_path, script, subprocess.DEVNULL)
    _, err = node.communicate(timeout=60)
    assert node.returncode == 3
    assert f"{REASON}rank 1 ended with exit code 3" in err.decode()
    assert "Traceback" not in err.decode()


# mpirun

OPENMPI = Mpirun("/opt/mpirun", "openmpi", 5)
MPICH = Mpirun("/opt/mpiexec", "mpich", 4)
EVEN = Cluster(
    hosts=(LaunchHost(name="a", slots=4, address="192.0.2.1"), LaunchHost(name="b", slots=4)), interface="eth0"
)


def test_open_mpi_gets_hosts_variables_and_interface() -> None:
    plan = plan_mpirun(EVEN, COMMS, OPENMPI, port=29500, python="py", folder=Path("/w"), environ={}, as_root=True)
    assert plan.command[:10] == [
        "/opt/mpirun", "-n", "8", "--allow-run-as-root", "--host", "a:4,b:4", "--map-by", "slot", "--bind-to", "none",
    ]  # fmt: skip
    exported = [word for before, word in zip(plan.command, plan.command[1:], strict=False) if before == "-x"]
    assert {"MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", CLUSTER_VARIABLE} <= set(exported)
    assert (plan.environment["MASTER_ADDR"], plan.environment["MASTER_PORT"]) == ("192.0.2.1", "29500")
    assert plan.command[plan.command.index("btl_tcp_if_include") + 1] == "eth0"
    assert plan.command[-len(COMMS) - 3 :] == ["py", "-m", "stepscope", *COMMS]
    assert "--allow-run-as-root" not in plan_mpirun(EVEN, COMMS, OPENMPI, environ={}, as_root=False).command


def test_words_of_the_user_replace_the_usual_mapping_and_come_last() -> None:
    plan = plan_mpirun(EVEN, ["x"], OPENMPI, extra=["--map-by", "node", "--bind-to=core"], environ={})
    assert plan.command.count("--map-by") == 1
    assert "none" not in plan.command
    assert plan.command[-7:-4] == ["--map-by", "node", "--bind-to=core"]


def test_a_meeting_place_set_by_hand_wins_and_one_host_needs_none() -> None:
    given_place = plan_mpirun(EVEN, ["x"], OPENMPI, environ={"MASTER_ADDR": "c", "MASTER_PORT": "1"}).environment
    assert (given_place["MASTER_ADDR"], given_place["MASTER_PORT"]) == ("c", "1")
    alone = Cluster(hosts=(LaunchHost(name="localhost", slots=2),))
    assert "MASTER_ADDR" not in plan_mpirun(alone, ["x"], OPENMPI, environ={}).environment


def test_a_remote_shell_of_ones_own_reaches_open_mpi_through_the_agent() -> None:
    cluster = Cluster(hosts=EVEN.hosts, rsh="enter {host}")
    plan = plan_mpirun(cluster, ["x"], OPENMPI, environ={})
    agent = plan.command[plan.command.index("plm_ssh_agent") + 1]
    assert agent.endswith("-m stepscope.launch.agent")
    assert plan.environment["STEPSCOPE_RSH"] == "enter {host}"
    old = plan_mpirun(cluster, ["x"], OPENMPI._replace(major=4), environ={}).command
    assert old[old.index("plm_rsh_agent") - 1] == "--mca"
    with pytest.raises(UsageError, match="cannot use the cluster file's rsh"):
        plan_mpirun(cluster, ["x"], MPICH, environ={})


def test_the_agent_runs_a_line_on_the_host(joining_shell: str) -> None:
    agent = [sys.executable, "-m", "stepscope.launch.agent"]
    for template in (joining_shell, "env HOST={host}"):
        environ = {**os.environ, "STEPSCOPE_RSH": template}
        done = subprocess.run(
            [*agent, "b", "A='x  y';", "export A;", "printenv A"],
            env=environ,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == "x  y\n"
    lost = subprocess.run(
        [*agent, "b", "true"], env={**os.environ, "STEPSCOPE_RSH": ""}, capture_output=True, text=True, check=False
    )
    assert lost.returncode == 1
    assert "started by mpirun" in lost.stderr


def test_mpich_gets_its_own_words() -> None:
    plan = plan_mpirun(EVEN, ["x"], MPICH, folder=Path("/w"), environ={})
    assert plan.command[:7] == ["/opt/mpiexec", "-n", "8", "-hosts", "a:4,b:4", "-iface", "eth0"]


def test_one_mpirun_cannot_serve_two_interfaces() -> None:
    with pytest.raises(UsageError, match="a: eth0, b: ib0"):
        plan_mpirun(TWO, ["x"], OPENMPI, environ={})


@pytest.mark.parametrize(
    ("text", "family", "major"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs", "openmpi", 5),
        ("mpirun (Open MPI) 4.1.4", "openmpi", 4),
        ("prterun (PRRTE) 3.0.2", "openmpi", 3),
        ("HYDRA build details:\n    Version:                                 5.0.2\n", "mpich", 5),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11", "mpich", 0),
    ],
)
def test_versions(text: str, family: str, major: int) -> None:
    assert parse_version("mpirun", text)[1:] == (family, major)


def test_programs_that_are_no_mpirun(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="says 'GNU'"):
        parse_version("mpirun", "GNU\nthings")
    with pytest.raises(MissingDependencyError, match="not on this machine's PATH"):
        find_mpirun("no-such-mpirun")
    mute = tmp_path / "mpirun"
    mute.write_text("neither")
    mute.chmod(0o755)
    with pytest.raises((LaunchError, UsageError)):
        find_mpirun(str(mute))


def test_an_answer_that_mpirun_cut_is_taken_from_the_ranks_file(capfd: pytest.CaptureFixture[str]) -> None:
    from stepscope.cli import output

    assert output.ANSWER_VARIABLE == ANSWER_VARIABLE
    cut = f"""echo '{{"ok": true}}' > "${ANSWER_VARIABLE}"; printf '{{"ok": tr'"""
    assert run_mpirun(MpiCommand(command=["sh", "-c", cut], environment={}, folder="/"), only_json=True) == (0, True)
    assert capfd.readouterr().out == '{"ok": true}\n'


def test_mpirun_speaks_on_stdout_only_what_was_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    plan = MpiCommand(command=["sh", "-c", "echo help; echo '{}'; exit 4"], environment={}, folder="/")
    assert run_mpirun(plan, only_json=True) == (4, True)
    assert capfd.readouterr() == ("{}\n", "help\n")
    killed = MpiCommand(command=["sh", "-c", "kill -9 $$"], environment={}, folder="/")
    assert run_mpirun(killed) == (137, False)
    with pytest.raises(LaunchError, match="cannot start"):
        run_mpirun(MpiCommand(command=["/nowhere/mpirun"], environment={}, folder="/"))


@pytest.mark.usefixtures("impatient")
def test_an_mpirun_that_waits_for_a_lost_host_is_ended_with_what_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = f"trap '' INT TERM; sleep 1000 & echo $! > {pid}; wait; wait"
    plan = MpiCommand(command=["sh", "-c", script], environment={}, folder="/")
    assert run_mpirun(plan, has_failed=pid.exists) == (1, False)
    assert not is_alive(int(pid.read_text()))


# What is left


def beat(folder: Path, rank: int, phase: str, case: str | None) -> None:
    heart = Heartbeat(rank=rank, limit_s=1000, log=sys.stderr)
    log = log_path(folder / "ranks", rank)
    with log.open("a") as file:
        heart.move_to(folder / "ranks", file)
        heart.beat(phase, case)
        heart.disarm()


def ring_alarm(folder: Path, rank: int, *, after_s: float) -> None:
    """As faulthandler leaves it: the stacks, written when the limit of 5 s had passed."""
    log = log_path(folder / "ranks", rank)
    log.write_text("Timeout (0:00:05)!\nThread 0x1:\n  File x\n")
    at_s = time.time() + after_s
    os.utime(log, (at_s, at_s))


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A run of three ranks on two hosts that was left in the middle of its first case."""
    folder = create_run(
        tmp_path / "runs", verb="comms", name="x", command=[], request=make_request("comms", {}),
        cases=[make_case(m=1)], launcher="torchrun", world_size=3,
    )  # fmt: skip
    (folder / "ranks").mkdir()
    return folder


def evidence_of(folder: Path) -> Evidence:
    return Evidence(["bench", "--store", str(folder.parent)], TWO, Path("/"))


def test_ranks_whose_alarm_rang_are_named_with_host_and_case(broken: Path) -> None:
    evidence = evidence_of(broken)
    case = StoredRun(broken).plan.cases[0]
    assert not evidence.has_failed()
    for rank in range(3):
        beat(broken, rank, "measuring", case.key)
    assert not evidence.has_failed()
    for rank in (1, 2):
        ring_alarm(broken, rank, after_s=5)
    assert evidence.has_failed()
    found = evidence.complete_record()
    assert found is not None
    assert found.failure.message == (
        f"ranks 1 on a, 2 on b sent no heartbeat for 5 s (last seen in measuring of {case.label})"
    )
    assert (found.failure.kind, found.failure.case) == ("rank_hung", case.key)
    assert StoredRun(broken).failures == [found.failure]
    assert evidence.complete_record() is None, "what was told once is not told again"


def test_the_alarm_of_the_last_time_does_not_count(broken: Path) -> None:
    evidence = evidence_of(broken)
    ring_alarm(broken, 0, after_s=0)
    beat(broken, 0, "measuring", None)
    assert not evidence.has_failed()


def test_a_rank_that_left_an_error_is_named(broken: Path) -> None:
    evidence = evidence_of(broken)
    beat(broken, 2, "joining", None)
    assert evidence.complete_record() is None
    write_rank_failure(broken / "ranks", 2, ValueError("nobody there"))
    assert failure_path(broken / "ranks", 2).exists()
    found = evidence.complete_record()
    assert found is not None
    assert found.failure.message == "rank 2 on b died in joining: ValueError: nobody there"


def test_runs_of_others_are_left_alone(broken: Path, tmp_path: Path) -> None:
    beat(broken, 0, "measuring", None)
    store, since_s = broken.parent, time.time() - 5
    assert find_open_run(store, 3, time.time() + 5) is None, "it stopped before this launch"
    assert find_open_run(store, 2, since_s) is None, "another number of ranks"
    assert find_open_run(tmp_path / "nothing", 3, 0) is None
    found = find_open_run(store, 3, since_s)
    assert found is not None
    assert found.folder == broken
    (broken / "plan.json").write_text("{")
    assert find_open_run(store, 3, since_s) is None


def test_the_store_is_found_as_the_ranks_find_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STEPSCOPE_STORE", raising=False)
    assert store_of(["bench", "--store"], Path("/w")) == Path("/w/stepscope-runs")
    assert store_of(["--store", "x", "--store=y"], Path("/w")) == Path("/w/y")
    monkeypatch.setenv("STEPSCOPE_STORE", "/elsewhere")
    assert store_of([], Path("/w")) == Path("/elsewhere")
