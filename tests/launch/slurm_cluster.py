"""A real Slurm of two nodes on this machine's loopback, for the time of a test session.

Everything lives in one temporary folder: configuration, keys, sockets, state, logs. The system's own Slurm and munge,
where there are any, are neither used nor touched. Only the processes started here are ended.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

NODES = ("ss1", "ss2")
CPUS_PER_NODE = 4

_COMMANDS = ("munged", "mungekey", "slurmctld", "slurmd", "srun", "sbatch", "salloc", "scontrol", "sinfo", "scancel")
_DAEMON_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"))
_FINISHED_STATES = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY"})


class ClusterError(RuntimeError):
    """The cluster is installed but did not start or answer; carries the daemons' last words."""


def why_no_cluster() -> str | None:
    """The reason why a cluster cannot be started here, or None."""
    missing = [name for name in _COMMANDS if shutil.which(name, path=_DAEMON_PATH) is None]
    if missing:
        return f"Slurm is not installed (no {', '.join(missing)}); tools/setup_services.sh installs it"
    if os.geteuid() != 0:
        return "starting Slurm's daemons needs root"
    return None


@dataclass(frozen=True)
class SlurmCluster:
    folder: Path
    environ: dict[str, str]
    """Complete environment for commands that talk to this cluster."""

    def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float = 60,
        extra_environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command against this cluster; a command that fails is returned, one that hangs raises."""
        return subprocess.run(
            list(command),
            env={**self.environ, **(extra_environ or {})},
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )

    def wait_for_job(self, job_id: str, *, timeout_s: float = 60) -> dict[str, str]:
        """Waits until a batch job is over and returns what Slurm knows about it (JobState, ExitCode, ...)."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            shown = self.run(["scontrol", "--oneliner", "show", "job", job_id]).stdout
            fields = dict(re.findall(r"(\w+)=(\S*)", shown))
            if fields.get("JobState") in _FINISHED_STATES:
                return fields
            if time.monotonic() > deadline_s:
                raise ClusterError(f"job {job_id} is not over after {timeout_s} s: {shown}\n{_last_words(self.folder)}")
            time.sleep(0.1)


@contextlib.contextmanager
def running_cluster(environ: Mapping[str, str]) -> Iterator[SlurmCluster]:
    """Starts the cluster, waits until both nodes are idle, and takes it down again whatever happens."""
    # munged insists on a socket that all users can reach, so a folder of pytest's (mode 0700) will not do.
    folder = Path(tempfile.mkdtemp(prefix="stepscope-slurm-"))
    folder.chmod(0o755)
    cluster = SlurmCluster(
        folder=folder,
        environ={**environ, "PATH": _DAEMON_PATH, "SLURM_CONF": str(folder / "slurm.conf")},
    )
    daemons = _Daemons(cluster)
    try:
        daemons.start_all()
        yield cluster
    finally:
        daemons.stop_all()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class _Daemons:
    cluster: SlurmCluster
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start_all(self) -> None:
        folder = self.cluster.folder
        for name in ("munge", "state", "log"):
            (folder / name).mkdir()
        (folder / "slurm.conf").write_text(_format_configuration(folder))
        key = folder / "munge" / "key"
        subprocess.run(
            ["mungekey", "--create", f"--keyfile={key}"], env=self.cluster.environ, check=True, capture_output=True
        )
        names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        munged = [f"--{option}={folder / 'munge' / name}" for option, name in names.items()]
        self._start("munged", "--foreground", *munged)
        self._wait_for("munge's socket", (folder / "munge" / "socket").exists)
        self._start("slurmctld", "-D")
        for node in NODES:
            self._start("slurmd", "-D", "-N", node)
        self._wait_for("two idle nodes", self._all_nodes_idle)

    def stop_all(self) -> None:
        if len(self.processes) > 1 and all(process.poll() is None for process in self.processes):
            # Steps have daemons of their own, which end with their jobs.
            with contextlib.suppress(subprocess.TimeoutExpired, ClusterError):
                self.cluster.run(["scancel", f"--user={os.geteuid()}"], timeout_s=10)
                self._wait_for("an empty queue", self._queue_is_empty)
        for process in reversed(self.processes):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in reversed(self.processes):
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, *command: str) -> None:
        output = (self.cluster.folder / "log" / f"{command[0]}-{len(self.processes)}.out").open("wb")
        with output:
            self.processes.append(
                subprocess.Popen(
                    command,
                    env=self.cluster.environ,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _all_nodes_idle(self) -> bool:
        states = self.cluster.run(["sinfo", "--noheader", "--Node", "--format=%t"], timeout_s=20).stdout.split()
        return states == ["idle"] * len(NODES)

    def _queue_is_empty(self) -> bool:
        queue = self.cluster.run(["squeue", "--noheader"], timeout_s=20)
        return queue.returncode == 0 and not queue.stdout.strip()

    def _wait_for(self, what: str, is_so: Callable[[], bool], timeout_s: float = 20) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not is_so():
            dead = [process.args for process in self.processes if process.poll() is not None]
            if dead or time.monotonic() > deadline_s:
                reason = f"{dead} ended" if dead else f"waited {timeout_s} s"
                raise ClusterError(f"no {what}: {reason}\n{_last_words(self.cluster.folder)}")
            time.sleep(0.1)


def _format_configuration(folder: Path) -> str:
    host = socket.gethostname().partition(".")[0]
    controller_port, *node_ports = _read_free_ports(1 + len(NODES))
    nodes = [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS_PER_NODE} State=UNKNOWN"
        for node, port in zip(NODES, node_ports, strict=True)
    ]
    return "\n".join(
        [
            "ClusterName=stepscope",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={controller_port}",
            "AuthType=auth/munge",
            "CredType=cred/munge",
            f"AuthInfo=socket={folder}/munge/socket",
            "SlurmUser=root",
            "SlurmdUser=root",
            f"StateSaveLocation={folder}/state",
            f"SlurmdSpoolDir={folder}/spool-%n",
            f"SlurmctldPidFile={folder}/slurmctld.pid",
            f"SlurmdPidFile={folder}/slurmd-%n.pid",
            f"SlurmctldLogFile={folder}/log/slurmctld.log",
            f"SlurmdLogFile={folder}/log/slurmd-%n.log",
            # Neither control groups nor process binding: both belong to a machine that is Slurm's alone.
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none",
            "AccountingStorageType=accounting_storage/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU",
            "SchedulerType=sched/builtin",
            "MpiDefault=none",
            "ReturnToService=2",
            # Two nodes of four CPUs on a machine that may have two.
            "SlurmdParameters=config_overrides",
            "KillWait=2",
            *nodes,
            "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
            "",
        ]
    )


def _read_free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _last_words(folder: Path) -> str:
    words = []
    for log in sorted([*(folder / "log").glob("*"), folder / "munge" / "log"]):
        if log.exists():
            words.append(f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-8:]))
    return "\n".join(words)
