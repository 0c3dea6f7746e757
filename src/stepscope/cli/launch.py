"""`stepscope launch`: ranks on several hosts, scripts for a cluster's queue, and a cluster in one machine."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
import msgspec

from stepscope.cli.options import ANY_PATH, FILE, Duration, apply_options, json_option
from stepscope.cli.output import emit, print_error, suggest, wants_json
from stepscope.core.errors import ExitCode, LaunchError, StepscopeError, UsageError
from stepscope.core.files import write_output
from stepscope.core.processes import exit_code_of
from stepscope.core.units import count_of

if TYPE_CHECKING:
    from stepscope.launch.evidence import Evidence
    from stepscope.launch.hosts import Cluster
    from stepscope.launch.remote import HostEnd

F = TypeVar("F", bound=Callable[..., Any])


@click.group("launch")
def command() -> None:
    """Run a benchmark on several hosts, with mpirun, torchrun or Slurm; or on a cluster in this machine."""


@command.command("sbatch", context_settings={"ignore_unknown_options": False})
@click.option("--nodes", type=click.IntRange(1), default=1)
@click.option("--ranks-per-node", type=click.IntRange(1), default=1)
@click.option("--partition")
@click.option("--time-limit", help="As Slurm writes it, for example 00:30:00.")
@click.option("--gpus-per-node", type=click.IntRange(1))
@click.option("--account")
@click.option("--job-name", default="stepscope")
@click.option("--sbatch", "extra", multiple=True, metavar="OPTION", help="A further #SBATCH option; repeatable.")
@click.option("--setup", multiple=True, metavar="LINE", help="A shell line to run first (module load …); repeatable.")
@click.option(
    "--python", default=sys.executable, show_default=False, help="Interpreter on the nodes [default: this one]."
)
@click.option("--output", "-o", type=FILE, help="Write the script to this file.")
@click.option("--submit", "submitting", is_flag=True, help="Submit it with sbatch.")
@json_option
@click.argument("arguments", nargs=-1, required=True, metavar="-- bench comms …")
def sbatch(*, arguments: tuple[str, ...], python: str, output: Path | None, submitting: bool, **choices: Any) -> None:
    """Print a batch script that runs `stepscope bench comms …` on every rank of a Slurm job."""
    from stepscope.launch import SlurmJob, format_sbatch, submit

    chosen: dict[str, Any] = {name: value for name, value in choices.items() if value is not None}
    try:
        job = SlurmJob(**chosen)
    except ValueError as error:
        raise UsageError(str(error), hint="stepscope launch sbatch --help") from error
    script = format_sbatch(job, list(arguments), python)
    if output is not None:
        write_output(output, script.encode())
    job_id = submit(script) if submitting else None
    text = f"submitted job {job_id}" if job_id else str(output) if output else script
    emit({"script": script, "output": str(output) if output else None, "job": job_id}, text)
    if job_id or output:
        suggest(f"squeue --job {job_id}" if job_id else f"sbatch {shlex.quote(str(output))}")


HOST_OPTIONS = (
    click.option("--hostfile", type=ANY_PATH, metavar="FILE", help="Hosts and slots in MPI's form."),
    click.option("--cluster", "cluster_file", type=ANY_PATH, metavar="FILE",
                 help="Hosts with addresses, interfaces and variables, in TOML or YAML "
                 "[default: $STEPSCOPE_CLUSTER_FILE]."),
    click.option("--ranks-per-node", type=click.IntRange(1), help="Ranks on each host [default: its slots]."),
    click.option("--master-port", "port", type=click.IntRange(1, 65535),
                 help="Where the ranks meet on the first host [default: any]."),
    click.option("--python", default=sys.executable, show_default=False,
                 help="Interpreter on the hosts [default: this one]."),
    click.option("--workdir", type=ANY_PATH, help="Folder on the hosts [default: this one]."),
    click.option("--dry-run", is_flag=True, help="Print the commands and start nothing."),
)  # fmt: skip


def host_options(function: F) -> F:
    """The command gets the `cluster` that the options name, and the `folder` in which its ranks run."""

    @wraps(function)
    def run(*, workdir: Path | None, **rest: Any) -> Any:
        cluster = read_hosts(*(rest.pop(name) for name in ("hostfile", "cluster_file", "ranks_per_node")))
        return function(cluster=cluster, folder=workdir or Path.cwd(), **rest)

    return cast(F, apply_options(HOST_OPTIONS)(run))


@command.command("mpirun")
@host_options
@click.option("--mpirun", "program", metavar="PATH", help="The mpirun to use [default: the one on the PATH].")
@click.option("--mpi-argument", "extra", multiple=True, metavar="WORD", help="A further word for mpirun; repeatable.")
@json_option
@click.argument("arguments", nargs=-1, required=True, metavar="-- bench comms …")
def mpirun(
    *, arguments: tuple[str, ...], cluster: Cluster, folder: Path, program: str | None, dry_run: bool, **how: Any
) -> int:
    """Run `stepscope bench comms …` on the hosts of a file with one mpirun (Open MPI, MPICH, Intel MPI).

    Example: stepscope launch mpirun --hostfile hosts -- bench comms --collective all_reduce
    """
    from stepscope.launch.evidence import Evidence
    from stepscope.launch.mpi import find_mpirun, plan_mpirun, run_mpirun

    plan = plan_mpirun(cluster, arguments, find_mpirun(program), folder=folder, **how)
    if dry_run:
        text = _format_command(plan.command, plan.environment, plan.folder)
        emit({"cluster": cluster, "commands": [plan]}, text)
        return ExitCode.DONE
    as_json = wants_json() or "--json" in arguments
    evidence = Evidence(arguments, cluster, folder)
    end = run_mpirun(plan, only_json=as_json, has_failed=evidence.has_failed)
    if end.code:
        error = LaunchError(f"mpirun ended with exit code {end.code}", hint="its words are above")
        print_error(_complete(evidence) or error, as_json=as_json and not end.has_answered)
    return end.code


@command.command("torchrun")
@host_options
@click.option("--rsh", metavar="TEMPLATE", help="How a host is entered, with {host} for its name "
              "[default: the cluster file's, else ssh].")  # fmt: skip
@click.option("--join-timeout", type=Duration(above_zero=True), default="60s",
              help="End the launch when a host has not joined after so long.")  # fmt: skip
@json_option
@click.argument("arguments", nargs=-1, required=True, metavar="-- bench comms …")
def torchrun(
    *, arguments: tuple[str, ...], cluster: Cluster, folder: Path, join_timeout: float, dry_run: bool, **how: Any
) -> int:
    """Run `stepscope bench comms …` on the hosts of a file with one torchrun a host, started over ssh.

    Example: stepscope launch torchrun --cluster cluster.toml -- bench comms --collective all_reduce
    """
    from stepscope.launch.evidence import Evidence
    from stepscope.launch.remote import plan_torchrun, run_on_hosts

    commands = plan_torchrun(cluster, arguments, folder=folder, join_limit_s=join_timeout, **how)
    if dry_run:
        lines = []
        for one in commands:
            here = _format_command(one.command, one.environment, one.folder)
            lines += [f"# {one.host}: {count_of(one.ranks, 'rank')}", shlex.join(one.command) if one.remote else here]
        emit({"cluster": cluster, "commands": commands}, "\n".join(lines))
        return ExitCode.DONE
    evidence = Evidence(arguments, cluster, folder)
    end = run_on_hosts(commands, join_limit_s=join_timeout)
    if end.failed is not None:
        error = _complete(evidence) or _describe_host_end(end.failed)
        # One answer on standard output is enough: rank 0's own, where it could give one.
        print_error(error, as_json=(wants_json() or "--json" in arguments) and not end.first_host_answered)
    return end.code


def read_hosts(hostfile: Path | None, cluster_file: Path | None, ranks_per_node: int | None) -> Cluster:
    """The hosts of whichever file was named."""
    from stepscope.launch.hosts import CLUSTER_FILE_VARIABLE, read_cluster_file, read_hostfile, with_ranks_per_node

    if hostfile is not None and cluster_file is not None:
        raise UsageError("a hostfile and a cluster file were named", hint="name one of them", where="--hostfile")
    if hostfile is not None:
        cluster = read_hostfile(hostfile)
    else:
        named = cluster_file or os.environ.get(CLUSTER_FILE_VARIABLE)
        if not named:
            raise UsageError(
                "the hosts are not named", hint="name them with --hostfile FILE or --cluster FILE", where="--hostfile"
            )
        cluster = read_cluster_file(Path(named))
    return with_ranks_per_node(cluster, ranks_per_node)


def _format_command(words: list[str], environment: dict[str, str], folder: str) -> str:
    """A line for a shell that does the same."""
    settings = [f"{name}={value}" for name, value in environment.items()]
    return f"cd {shlex.quote(folder)} && {shlex.join(['env', *settings, *words])}"


def _complete(evidence: Evidence) -> StepscopeError | None:
    """What the run's own evidence says of its end; None where there is nothing to add."""
    from stepscope.launch.watch import as_error

    found = evidence.complete_record()
    if found is None:
        return None
    stored, failure = found
    kept = f"{count_of(len(stored.results), 'finished case is', 'finished cases are')} kept"
    hint = "; ".join(filter(None, [failure.hint, f"{kept}: continue with --resume {stored.id}"]))
    return as_error(msgspec.structs.replace(failure, hint=hint))


def _describe_host_end(end: HostEnd) -> LaunchError:
    if not end.started:
        return LaunchError(
            f"{end.host} could not be entered: its remote shell ended with {end.code} and said: {end.reason}",
            hint="try the remote shell by hand, or choose another with --rsh",
            where=end.host,
        )
    return LaunchError(f"{end.host} failed: {end.reason}", hint="what its ranks wrote is above", where=end.host)


@command.command("netlab", context_settings={"ignore_unknown_options": False})
@click.option("--hosts", type=click.IntRange(1), default=2)
@click.option("--slots", type=click.IntRange(1), default=1, help="Ranks on each host.")
@click.option("--rate", help="Of every link, in both directions: 1gbit, 100mbit … [default: no limit].")
@click.option("--slow", multiple=True, metavar="HOST=RATE", help="Another rate for one host, as 2=100mbit; repeatable.")
@json_option
@click.argument("words", nargs=-1, required=True, metavar="-- COMMAND…")
def netlab(*, words: tuple[str, ...], hosts: int, slots: int, rate: str | None, slow: tuple[str, ...]) -> int:
    """Make a cluster of network namespaces in this machine and run COMMAND on its first host. Needs root.

    The command finds the hosts in $STEPSCOPE_CLUSTER_FILE (which launch mpirun and launch torchrun read by themselves)
    and in $STEPSCOPE_HOSTFILE; {cluster} and {hostfile} in its words are replaced by the same paths.

    Example: stepscope launch netlab --rate 1gbit -- stepscope launch torchrun -- bench comms --collective all_reduce
    """
    from stepscope.launch.hosts import CLUSTER_FILE_VARIABLE
    from stepscope.launch.netlab import NetLab

    with NetLab(hosts, rate=rate, slow=dict(map(_parse_slow, slow)), slots=slots) as lab:
        program = [sys.executable, "-m", "stepscope"] if words[0] == "stepscope" else [words[0]]
        filled = [
            word.replace("{cluster}", str(lab.cluster_file)).replace("{hostfile}", str(lab.hostfile))
            for word in (*program, *words[1:])
        ]
        variables = {CLUSTER_FILE_VARIABLE: str(lab.cluster_file), "STEPSCOPE_HOSTFILE": str(lab.hostfile)}
        process = subprocess.Popen(lab.command(0, filled), env={**os.environ, **variables})
        return _wait_for(process)


def _parse_slow(text: str) -> tuple[int, str]:
    host, sign, rate = text.partition("=")
    number = host.removeprefix("host")
    if not sign or not (number.isascii() and number.isdigit()):
        raise UsageError(f"{text!r} is not a host and its rate", hint="write for example 1=100mbit", where="--slow")
    return int(number), rate


def _wait_for(process: subprocess.Popen[bytes]) -> int:
    """An interrupt reaches the command too; it gets the time to end in its own way."""
    while True:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            continue
        return exit_code_of(code)
