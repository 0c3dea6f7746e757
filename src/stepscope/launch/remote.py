"""torchrun on several hosts: one a host, started through a remote shell, watched together, ended together.

The rendezvous is static: the hosts are numbered as the file lists them, and so are the ranks.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn

import msgspec

from stepscope.core.errors import ExitCode, LaunchError, UsageError
from stepscope.core.processes import exit_code_of
from stepscope.launch.context import FIRST_PORT, LAST_PORT, SELF_LAUNCH_VARIABLE
from stepscope.launch.hosts import CLUSTER_VARIABLE, DEFAULT_RSH, Cluster, LaunchHost, check_rsh, encode_cluster
from stepscope.launch.node import DEFAULT_JOIN_LIMIT_S, HOLD, JOIN_VARIABLE, REACHED, REASON, STARTED

POLL_S = 0.05
LOADING_S = 60.0
"""For a host that has started to load torch and to try once more: on a busy machine or a slow disk it takes long."""
GRACE_S = 5.0
"""After one host failed the others get this long to notice and to report; rank 0 may be among them."""
STOP_WAIT_S = 10.0

_FORWARDED_PREFIXES = ("STEPSCOPE_", "NCCL_", "GLOO_", "UCX_", "TORCH_")
_FORWARDED = ("OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA", "PYTHONPATH", "PYTHONWARNINGS")
_NOT_FORWARDED = (SELF_LAUNCH_VARIABLE, "STEPSCOPE_RENDEZVOUS")
"""A rank that sees them believes that another launcher started it."""
_JOINS_ITS_WORDS = ("ssh", "rsh", "remsh")
"""Remote shells that make one line of their arguments and have a shell read it there."""
_LOOPBACK_NAMES = ("localhost", "ip6-localhost", "::1")


class HostCommand(msgspec.Struct, frozen=True, kw_only=True):
    """What starts the ranks of one host."""

    host: str
    ranks: int
    command: list[str]
    environment: dict[str, str]
    """Variables the ranks get there; for a remote host they are part of the command."""
    folder: str
    """Where they run; for a remote host it is part of the command too."""
    remote: bool


def forwarded_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What ranks on other hosts need of this process's environment: a remote shell brings nothing along."""
    return {
        name: value
        for name, value in environ.items()
        if (name.startswith(_FORWARDED_PREFIXES) or name in _FORWARDED) and name not in _NOT_FORWARDED
    }


def shared_variables(cluster: Cluster, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of every rank of a launch, before what belongs to single hosts."""
    return {**forwarded_variables(environ), CLUSTER_VARIABLE: encode_cluster(cluster)}


def meeting_address(cluster: Cluster) -> str:
    """Where the ranks of all hosts reach the first one."""
    address = cluster.hosts[0].reached_at
    if len(cluster.hosts) > 1 and (address in _LOOPBACK_NAMES or address.startswith("127.")):
        raise UsageError(
            f"the first host is {address}, which every other host takes for itself",
            hint="write the name or the address under which the others reach it",
            where=cluster.hosts[0].name,
        )
    return address


def choose_port(cluster: Cluster) -> int:
    """A port for the ranks to meet at: free where it can be tried out, else one of 12,768."""
    for _ in range(20):
        port = random.randint(FIRST_PORT, LAST_PORT)
        if not is_local(cluster.hosts[0]) or _is_free(port):
            return port
    raise LaunchError(f"no free port between {FIRST_PORT} and {LAST_PORT} was found", hint="choose --master-port")


def is_local(host: LaunchHost) -> bool:
    """Whether the host is this machine: by its address where the file gives one, else by its name."""
    if host.address is not None and _is_numeric(host.address):
        return _has_address(host.address)
    if host.name in _LOOPBACK_NAMES or host.name.startswith("127."):
        return True
    own = socket.gethostname()
    return host.name in (own, own.partition(".")[0]) or host.name.partition(".")[0] == own or _has_address(host.name)


def _is_numeric(address: str) -> bool:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(address)
        return True
    return False


def _has_address(address: str) -> bool:
    """Only one's own address can be bound. Nothing is sent, and no name is looked up."""
    if not _is_numeric(address):
        return False
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return True
    return False


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


# What to start


def plan_torchrun(
    cluster: Cluster,
    arguments: Sequence[str],
    *,
    rsh: str | None = None,
    port: int | None = None,
    python: str = sys.executable,
    folder: Path | None = None,
    join_limit_s: float = DEFAULT_JOIN_LIMIT_S,
    environ: Mapping[str, str] | None = None,
) -> list[HostCommand]:
    """One command a host that together run `stepscope ARGUMENTS` on all ranks; nothing is started."""
    environ = os.environ if environ is None else environ
    template = rsh or cluster.rsh or DEFAULT_RSH
    check_rsh(template, "--rsh")
    address, port = meeting_address(cluster), port or choose_port(cluster)
    # The hosts may be uneven: each node sends the others its number of ranks, unless this says they are all alike.
    shared = {**shared_variables(cluster, environ), "TORCH_ELASTIC_WORKER_IDENTICAL": "0"}
    shared |= {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3", JOIN_VARIABLE: f"{join_limit_s:g}"}
    place = folder or Path.cwd()
    planned = []
    for number, host in enumerate(cluster.hosts):
        variables = {**shared, **cluster.variables_of(host)}
        options = [
            f"--nnodes={len(cluster.hosts)}",
            f"--node-rank={number}",
            f"--nproc-per-node={host.slots}",
            f"--master-addr={address}",
            f"--master-port={port}",
            # Longer than everybody else waits: torchrun knows how many are missing, but not who.
            f"--rdzv-conf=timeout={round(join_limit_s) + 60}",
            "--max-restarts=0",
            "--monitor-interval=0.1",
        ]
        words = [python, "-m", "stepscope.launch.node", *options, "-m", "stepscope", *arguments]
        remote = not is_local(host)
        if remote:
            words = remote_command(template, host.name, words, variables, place)
        planned.append(
            HostCommand(
                host=host.name, ranks=host.slots, command=words, environment=variables, folder=str(place), remote=remote
            )
        )
    return planned


def remote_command(
    template: str, host: str, words: Sequence[str], variables: Mapping[str, str], folder: Path
) -> list[str]:
    """The words that run `words` on a host, in `folder` and with `variables`, through a remote shell.

    `{command}` in the template stands for the command, as a line for a shell in one word. Without it the command comes
    last: as one line for ssh and its like, which have a shell read it there, and as single words for programs that
    run what they are given (`ip netns exec`, `docker exec`).
    """
    settings = [f"{name}={value}" for name, value in variables.items()]
    line = f"cd {shlex.quote(str(folder))} && exec {shlex.join(['env', *settings, *words])}"
    return shell_words(shlex.split(template), host, line)


def shell_words(template: Sequence[str], host: str, line: str) -> list[str]:
    """The words that have a shell on the host read a line."""
    shell = [word.replace("{host}", host) for word in template]
    if any("{command}" in word for word in shell):
        return [word.replace("{command}", line) for word in shell]
    if Path(shell[0]).name in _JOINS_ITS_WORDS:
        return [*shell, line]
    return [*shell, "sh", "-c", line]


# Running it


class HostEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How the launch on one host ended."""

    host: str
    code: int
    """Exit code; 128 + N after signal N."""
    started: bool
    """Whether torchrun's process began there at all."""
    reason: str
    """What it said of the failure; the remote shell's last word where torchrun did not begin."""


class LaunchEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a launch ended as a whole."""

    code: int
    failed: HostEnd | None
    """The first host that failed."""
    first_host_answered: bool
    """Whether the first host wrote to standard output: then rank 0 has told the result, or its error."""


def run_on_hosts(commands: Sequence[HostCommand], *, join_limit_s: float = DEFAULT_JOIN_LIMIT_S) -> LaunchEnd:
    """Start all, pass the first host's output on, and wait for the end; the first failure ends the others.

    Raises LaunchError when a host has not joined within `join_limit_s`. Whatever happens, nothing that was started
    here outlives this call.
    """
    hosts: list[_RunningHost] = []
    try:
        for number, command in enumerate(commands):
            hosts.append(_RunningHost(command, is_first=number == 0))
        failed = _watch(hosts, join_limit_s)
        # Rank 0 lives on the first host: where that ended by itself, its code says most.
        code = (hosts[0].code() or failed.code) if failed else ExitCode.DONE
        if failed and not failed.started:
            # What a remote shell or an interpreter that is not there ends with means nothing to a script.
            code = ExitCode.FAILED
    finally:
        _stop_all(hosts)
    return LaunchEnd(code=code, failed=failed, first_host_answered=hosts[0].has_answered)


def _watch(hosts: Sequence[_RunningHost], join_limit_s: float) -> HostEnd | None:
    """Returns when all have ended, or some time after the first failed; the failure that explains the others."""
    begin_s = time.monotonic()
    deadline_s = float("inf")
    failed: list[_RunningHost] = []
    while any(host.code() is None for host in hosts) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        failed += [host for host in hosts if host.code() and host not in failed]
        if failed and deadline_s == float("inf"):
            # Hosts that never met have nothing more to say about each other.
            deadline_s = time.monotonic() + (GRACE_S if all(host.joined for host in hosts) else 0)
        if not failed:
            _require_all(hosts, join_limit_s, time.monotonic() - begin_s)
    failed += [host for host in hosts if host.code() and host not in failed]
    if failed and all(host.started for host in failed) and not hosts[0].started:
        # The others could not reach it because it was not there.
        _refuse_absent(hosts[:1], join_limit_s)
    # A rank ended by a signal explains the broken connections of the others, not the reverse; of the others, rank 0
    # on the first host knows most.
    killed = [host for host in failed if (host.code() or 0) > 128 and host.started]
    first = [host for host in failed if host is hosts[0] and host.started]
    return next((host.end() for host in [*killed, *first, *failed]), None)


def _require_all(hosts: Sequence[_RunningHost], join_limit_s: float, waited_s: float) -> None:
    """A host that has started says itself why it cannot join, once it has loaded what it needs for trying."""
    absent = [
        host for host in hosts if not host.joined and waited_s > join_limit_s + (LOADING_S if host.started else GRACE_S)
    ]
    if absent:
        _refuse_absent(absent, join_limit_s)


def _refuse_absent(absent: Sequence[_RunningHost], join_limit_s: float) -> NoReturn:
    silent = [host.command.host for host in absent if not host.started]
    names = ", ".join(silent or [host.command.host for host in absent])
    what = "did not start its ranks" if silent else "did not reach the first host"
    raise LaunchError(
        f"{names} {what} within {join_limit_s:.0f} s",
        hint="try the remote shell by hand: " + shlex.join([*absent[0].command.command[:4], "…"])
        if silent
        else "does a firewall or a wrong address or interface stand between?",
        where=names,
    )


def _stop_all(hosts: Sequence[_RunningHost]) -> None:
    """First the far ends end their ranks in order; then what is left here is asked, then forced."""
    for host in hosts:
        host.let_go()
    deadline_s = time.monotonic() + STOP_WAIT_S
    for host in hosts:
        # Where nothing has started there is nobody who could end in order.
        host.wait(deadline_s if host.started else 0.0)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for host in hosts:
            host.send_signal(number)
        deadline_s = time.monotonic() + 1.0
        for host in hosts:
            host.wait(deadline_s)
    for host in hosts:
        host.finish_reading()


class _RunningHost:
    """The local end of one host's launch: the remote shell, and what comes through it."""

    def __init__(self, command: HostCommand, *, is_first: bool) -> None:
        self.command = command
        self.started = False
        self.joined = False
        self.has_answered = False
        self._is_first = is_first
        self._last_line = ""
        self._reason = ""
        inherited = {name: value for name, value in os.environ.items() if name not in _NOT_FORWARDED}
        environment = {**inherited, **command.environment}
        try:
            self._process = subprocess.Popen(
                command.command,
                env=environment,
                cwd=None if command.remote else command.folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # An interrupt from the keyboard reaches this process alone, which ends the others in order.
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(
                f"cannot start {command.command[0]} for {command.host}: {error.strerror}",
                hint="choose another remote shell with --rsh",
                where=command.host,
            ) from error
        self._readers = [
            self._read(self._process.stdout, self._pass_output),
            self._read(self._process.stderr, self._hear),
        ]
        self._hold()

    def code(self) -> int | None:
        code = self._process.poll()
        return None if code is None else exit_code_of(code)

    def end(self) -> HostEnd:
        self.finish_reading()
        code = self.code() or 0
        reason = self._reason or ("" if self.started else self._last_line) or f"exit code {code}"
        return HostEnd(host=self.command.host, code=code, started=self.started, reason=reason)

    def let_go(self) -> None:
        """The far end notices that its input ends, and ends its ranks."""
        with contextlib.suppress(OSError):
            if self._process.stdin:
                self._process.stdin.close()

    def wait(self, deadline_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline_s - time.monotonic()))

    def send_signal(self, number: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def finish_reading(self) -> None:
        """A process that escaped may hold the pipes open for ever; what it says is of no use now."""
        for reader in self._readers:
            reader.join(1.0)

    def _hold(self) -> None:
        # A shell that ended at once has closed its side; its exit code says why.
        with contextlib.suppress(OSError):
            if self._process.stdin:
                self._process.stdin.write(HOLD)
                self._process.stdin.flush()

    @staticmethod
    def _read(pipe: IO[bytes] | None, take: Callable[[bytes], None]) -> threading.Thread:
        def read() -> None:
            if pipe is None:
                return
            with contextlib.suppress(ValueError, OSError), pipe:
                for line in pipe:
                    take(line)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread

    def _pass_output(self, line: bytes) -> None:
        if self._is_first:
            self.has_answered = True
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        else:
            self._forward(line)

    def _hear(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text == STARTED:
            self.started = True
        elif text == REACHED:
            self.joined = True
        elif text.startswith(REASON):
            self._reason = text.removeprefix(REASON)
        else:
            self._forward(line)

    def _forward(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            self._last_line = text
        prefix = "" if self._is_first else f"[{self.command.host}] "
        sys.stderr.write(f"{prefix}{text}\n")
        sys.stderr.flush()
