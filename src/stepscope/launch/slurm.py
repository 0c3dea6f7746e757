"""Slurm: a batch script that starts one rank a task, its submission, and what only Slurm knows."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence

import msgspec

from stepscope.core.errors import LaunchError, MissingDependencyError, UsageError
from stepscope.core.processes import run_program

_SUBMIT_LIMIT_S = 60
_LOOKUP_LIMIT_S = 10

_PLAIN_NAME = re.compile(r"[\w.,@:+%/-]+")
_TIME_LIMIT = re.compile(r"\d+(-\d+(:\d+){0,2}|(:\d+){0,2})|UNLIMITED|INFINITE")
_MANAGED_OPTIONS = ("--nodes", "--ntasks", "--ntasks-per-node", "--cpus-per-task", "--gpus-per-node", "--chdir")
_MANAGED_LETTERS = ("-N", "-n", "-c", "-D")

_RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "STEPSCOPE_SELF_LAUNCH",
    "STEPSCOPE_RENDEZVOUS",
)
_LAUNCHER_PREFIXES = ("OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "MPI_LOCAL", "PMI_", "PMIX_", "TORCHELASTIC_")
_KEPT_IN_A_JOB = frozenset({"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT"})


class SlurmJob(msgspec.Struct, frozen=True, kw_only=True):
    """What to ask Slurm for. Everything left as None is left to the cluster's own defaults."""

    nodes: int = 1
    ranks_per_node: int = 1
    cpus_per_rank: int | None = None
    """Also the number of OpenMP threads of each rank; 1 thread when left out."""
    gpus_per_node: int | None = None
    partition: str | None = None
    account: str | None = None
    time_limit: str | None = None
    """In Slurm's forms: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS."""
    job_name: str = "stepscope"
    extra: tuple[str, ...] = ()
    """Further sbatch options as they stand after #SBATCH, such as `--exclusive` or `--constraint=h100`."""
    setup: tuple[str, ...] = ()
    """Lines of shell that run once before the ranks start, such as `module load cuda`; used as they are."""
    workdir: str | None = None
    """Where the script runs and its output file lands; the folder of submission when left out."""

    def __post_init__(self) -> None:
        for field in ("nodes", "ranks_per_node", "cpus_per_rank", "gpus_per_node"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise UsageError(f"{field} must be at least 1, got {value}", where=field)
        for field in ("partition", "account", "job_name"):
            value = getattr(self, field)
            if value is not None and not _PLAIN_NAME.fullmatch(value):
                raise UsageError(f"{field} {value!r} is not a name that Slurm accepts in a script", where=field)
        if self.time_limit is not None and not _TIME_LIMIT.fullmatch(self.time_limit):
            raise UsageError(
                f"time limit {self.time_limit!r} is not in a form that Slurm reads",
                hint="use minutes, HH:MM:SS or D-HH:MM:SS, for example 00:30:00",
                where="time_limit",
            )
        if self.workdir is not None and not _is_one_line(self.workdir, forbidden='"\\'):
            raise UsageError(f"the folder {self.workdir!r} cannot be written into a batch script", where="workdir")
        for option in self.extra:
            _check_extra_option(option)

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def format_sbatch(job: SlurmJob, arguments: Sequence[str], python: str) -> str:
    """A batch script that runs `PYTHON -m stepscope ARGUMENTS` once a rank; every argument reaches it unchanged.

    `python` must be a path that exists on the nodes. Variables of an earlier launcher that came along with the
    submission are removed, since each rank would take them for its own place.
    """
    command = shlex.join([python, "-m", "stepscope", *arguments])
    setup = ["set +u  # module systems and activate scripts read unset variables", *job.setup, "set -u"]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in _sbatch_options(job)),
        "",
        "set -euo pipefail",
        "",
        f"unset {' '.join(_RANK_VARIABLES)}",
        'export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"',
        "export PYTHONUNBUFFERED=1",
        *(setup if job.setup else []),
        "",
        "# One rank failing ends the others, so that nobody waits for it until the time limit.",
        "srun --kill-on-bad-exit=1 --export=ALL \\",
        f"    --nodes={job.nodes} --ntasks={job.ranks} --ntasks-per-node={job.ranks_per_node} \\",
        # Since Slurm 22.05 srun no longer takes this from the allocation by itself.
        '    ${SLURM_CPUS_PER_TASK:+--cpus-per-task="${SLURM_CPUS_PER_TASK}"} \\',
        f"    {command}",
    ]
    return "\n".join(lines) + "\n"


def submit(script: str, *, environ: Mapping[str, str] | None = None) -> str:
    """Hands the script to sbatch and returns the job's id at once; the job may wait in the queue for long.

    The submission's environment travels with the job, less the variables of a launcher that this process may
    itself run under: sbatch would take some of them for options and the job's shell for its own rank.
    """
    variables = dict(os.environ if environ is None else environ)
    sbatch = shutil.which("sbatch", path=variables.get("PATH"))
    if sbatch is None:
        raise MissingDependencyError(
            "sbatch is not on this machine's PATH",
            hint="submit from a login node of the cluster, or write the script to a file and submit it there",
        )
    try:
        finished = run_program(
            [sbatch, "--parsable"],
            limit_s=_SUBMIT_LIMIT_S,
            input=script,
            env=_without_launcher_variables(variables),
        )
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"sbatch did not answer within {_SUBMIT_LIMIT_S} s", hint="check that the controller is up: scontrol ping"
        ) from error
    except OSError as error:
        raise LaunchError(f"sbatch could not be started: {error}", where=sbatch) from error
    # "123" or "123;cluster"
    job_id = finished.stdout.strip().partition(";")[0]
    if finished.returncode != 0 or not job_id.isdigit():
        said = (finished.stderr.strip() or finished.stdout.strip() or f"exit status {finished.returncode}").splitlines()
        raise LaunchError(
            f"sbatch refused the job: {' / '.join(line.strip() for line in said)}",
            hint="check the partition, account and limits with: sinfo, sacctmgr show assoc",
        )
    return job_id


def read_node_address(node: str) -> str | None:
    """The address Slurm itself uses for a node, for clusters whose node names are in no DNS. Asks the controller."""
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        return None
    try:
        finished = run_program([scontrol, "--oneliner", "show", "node", node], limit_s=_LOOKUP_LIMIT_S)
    except (subprocess.TimeoutExpired, OSError):
        return None
    match = re.search(r"(?:^|\s)NodeAddr=(\S+)", finished.stdout)
    return match[1] if finished.returncode == 0 and match else None


def read_enclosing_step() -> str | None:
    """The step this process really runs in, as `JOB.STEP`; None where no slurmstepd can be seen above it.

    Variables cannot tell: a batch job that was submitted from inside a step inherits that step's variables. The
    step daemon's title can ("slurmstepd: [12.batch]"). In a container with its own process ids it is out of sight.
    """
    import psutil

    try:
        ancestors = psutil.Process().parents()
    except psutil.Error:
        return None
    for process in ancestors:
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:
            continue
        match = re.match(r"slurmstepd: \[(\S+?)\]", title)
        if match:
            return match[1]
    return None


def _sbatch_options(job: SlurmJob) -> list[str]:
    options: list[tuple[str, object]] = [
        ("job-name", job.job_name),
        ("nodes", job.nodes),
        ("ntasks-per-node", job.ranks_per_node),
        ("cpus-per-task", job.cpus_per_rank),
        ("gpus-per-node", job.gpus_per_node),
        ("partition", job.partition),
        ("account", job.account),
        ("time", job.time_limit),
        ("chdir", None if job.workdir is None else f'"{job.workdir}"'),
    ]
    return [f"--{name}={value}" for name, value in options if value is not None] + list(job.extra)


def _check_extra_option(option: str) -> None:
    if not option.startswith("-") or not _is_one_line(option):
        raise UsageError(
            f"{option!r} is not an sbatch option",
            hint="write it as it stands after #SBATCH, for example --constraint=h100",
            where="extra",
        )
    name = re.split(r"[=\s]", option, maxsplit=1)[0]
    if name in _MANAGED_OPTIONS or option[:2] in _MANAGED_LETTERS:
        raise UsageError(
            f"{name} is set from the job's own fields and cannot be given a second time",
            hint="use nodes, ranks_per_node, cpus_per_rank, gpus_per_node or workdir",
            where="extra",
        )


def _is_one_line(text: str, forbidden: str = "") -> bool:
    return bool(text.strip()) and not any(character in "\n\r\0" + forbidden for character in text)


def _without_launcher_variables(variables: Mapping[str, str]) -> dict[str, str]:
    # Outside a job, SLURM_ variables are somebody's own settings (SLURM_CPU_BIND and the like) and stay.
    inside_a_job = "SLURM_JOB_ID" in variables

    def belongs_to_a_launcher(name: str) -> bool:
        if name.startswith(("SLURM_", "SLURMD_")):
            return inside_a_job and name not in _KEPT_IN_A_JOB
        return name in _RANK_VARIABLES or name.startswith(_LAUNCHER_PREFIXES)

    return {name: value for name, value in variables.items() if not belongs_to_a_launcher(name)}
