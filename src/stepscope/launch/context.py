"""Which rank this process is, whoever started it: nobody, Stepscope itself, torchrun, mpirun or srun.

Only variables that the launcher of *this* process sets may decide. A process often carries several sets at once:
mpirun starts its daemons through srun, so its ranks carry the daemon's Slurm task number; srun speaks PMI to MPI
libraries, so its ranks carry PMI_RANK; a batch script carries SLURM_NTASKS although it is one process.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import msgspec

from stepscope.core.errors import UsageError
from stepscope.launch.hostlist import first_host, parse_tasks_per_node
from stepscope.launch.lookups import LOOPBACK, Lookups, MpiWorld

Launcher = Literal["inline", "self", "torchrun", "mpirun", "slurm"]

SELF_LAUNCH_VARIABLE = "STEPSCOPE_SELF_LAUNCH"
"""Set to 1 by Stepscope in the processes it starts itself."""

_EXPORTED_VARIABLE = "STEPSCOPE_RENDEZVOUS"
"""Left by `export_rendezvous`, so that asking twice gives the same answer for a process without a launcher."""


# Below the range from which Linux takes the ports of outgoing connections (32768 and up), so that a port derived
# from a job's name is not in use by chance.
FIRST_PORT, LAST_PORT = 20000, 32767

# Slurm numbers the batch script, the interactive shell and the container of external processes from the top down.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_STEPS_WITHOUT_RANKS = ("batch", "interactive", "extern")


class RankContext(msgspec.Struct, frozen=True, kw_only=True):
    """Where this process stands among the processes of one run, and where they meet."""

    rank: int
    world_size: int
    local_rank: int
    """Among the ranks on this host; the number of the device to use, where each rank has one."""
    local_world_size: int
    launcher: Launcher
    master_addr: str
    """Rank 0's host, as this process can reach it."""
    master_port: int
    """0 for a single process without a launcher: any free port, since nobody else has to find it."""
    job: str | None
    """The launcher's name for the whole run, the same on all ranks; None where it has none."""
    source: str
    """The variables that decided, for the record."""


ALONE = RankContext(
    rank=0, world_size=1, local_rank=0, local_world_size=1, launcher="inline", master_addr=LOOPBACK, master_port=0,
    job=None, source="no launcher",
)  # fmt: skip
"""A single process without a launcher."""


def detect_rank_context(environ: Mapping[str, str] | None = None, *, lookups: Lookups | None = None) -> RankContext:
    """Finds out which rank this process is; a process without a launcher is rank 0 of 1.

    Cheap, except for MPI on several hosts without MASTER_ADDR and MASTER_PORT: then all ranks must call this, and
    it waits for them. Variables that contradict each other are an error, never a guess.
    """
    environ = os.environ if environ is None else environ
    ask = Lookups() if lookups is None else lookups
    if "RANK" in environ and (environ.get(SELF_LAUNCH_VARIABLE) == "1" or "TORCHELASTIC_RUN_ID" in environ):
        return _from_torchrun(environ)
    for family in _MPI_FAMILIES:
        if family.rank in environ and family.marker in environ:
            return _from_mpi(environ, family, ask)
    if _is_slurm_step(environ, ask):
        return _from_slurm(environ, ask)
    for family in (_BARE_PMI, _BARE_PMIX):
        if family.rank in environ:
            return _from_mpi(environ, family, ask)
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _from_plain_variables(environ)
    return _inline(environ)


def export_rendezvous(context: RankContext) -> None:
    """Sets the variables of torch.distributed's `env://` in this process, whoever launched it.

    Call it before `init_process_group`. Processes started from here inherit the variables.
    """
    place = _Place(context.rank, context.world_size, context.local_rank, context.local_world_size)
    os.environ.update(rendezvous_variables(place, context.master_addr, context.master_port))
    os.environ[_EXPORTED_VARIABLE] = context.launcher


def rendezvous_variables(place: tuple[int, int, int, int], address: str, port: int) -> dict[str, str]:
    """What `env://` reads. `place`: rank and size of the world, then those on this host."""
    return {**dict(zip(_TORCH, map(str, place), strict=False)), "MASTER_ADDR": address, "MASTER_PORT": str(port)}


class _Family(NamedTuple):
    """The variables in which one launcher gives each rank its place."""

    rank: str
    size: str
    local_rank: str
    local_size: str
    marker: str
    """Must be there too, for names that others use as well."""


_NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "RANK")
_MPI_FAMILIES = (
    _Family(*(f"OMPI_COMM_WORLD_{name}" for name in _NAMES)),
    _Family(*(f"MV2_COMM_WORLD_{name}" for name in _NAMES)),
    # MPICH and Intel MPI. srun sets PMI_RANK as well, but never the local number.
    _Family("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
)
_BARE_PMI = _Family("PMI_RANK", "PMI_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PMI_RANK")
_BARE_PMIX = _Family("PMIX_RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PMIX_RANK")
_SLURM = _Family("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID")
_TORCH = _Family("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK")


class _Place(NamedTuple):
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def on_one_host(self) -> bool:
        return self.local_world_size == self.world_size


def _from_torchrun(environ: Mapping[str, str]) -> RankContext:
    self_launched = environ.get(SELF_LAUNCH_VARIABLE) == "1"
    run_id = environ.get("TORCHELASTIC_RUN_ID")
    return RankContext(
        **_read_place(environ, _TORCH)._asdict(),
        master_addr=_required(environ, "MASTER_ADDR"),
        master_port=_read_port(environ),
        launcher="self" if self_launched else "torchrun",
        # torchrun's own name for "no name was given"
        job=None if self_launched or run_id in ("", "none") else run_id,
        source=f"{SELF_LAUNCH_VARIABLE if self_launched else 'TORCHELASTIC_RUN_ID'}, RANK",
    )


def _from_plain_variables(environ: Mapping[str, str]) -> RankContext:
    """Variables set by hand or by a cluster manager, by the convention of `env://`."""
    if environ.get(_EXPORTED_VARIABLE) == "inline":
        return _inline(environ)
    address, port = LOOPBACK, 0
    if _read_count(environ, "WORLD_SIZE") > 1 or "MASTER_PORT" in environ:
        address, port = _required(environ, "MASTER_ADDR"), _read_port(environ)
    # Ranks that meet on loopback share one host; otherwise the convention is one process a host.
    defaults: dict[str, str] = {}
    if address in ("localhost", "::1") or address.startswith("127."):
        defaults = {"LOCAL_RANK": _required(environ, "RANK"), "LOCAL_WORLD_SIZE": environ["WORLD_SIZE"]}
    elif "LOCAL_RANK" not in environ and "LOCAL_WORLD_SIZE" not in environ:
        defaults = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return RankContext(
        **_read_place({**defaults, **environ}, _TORCH)._asdict(), master_addr=address, master_port=port,
        launcher="torchrun", job=None, source="RANK, WORLD_SIZE",
    )  # fmt: skip


def _from_mpi(environ: Mapping[str, str], family: _Family, ask: Lookups) -> RankContext:
    """Asks MPI itself at most once, and only for what the variables leave open."""
    answers: list[MpiWorld] = []

    def mpi_world(why: str) -> MpiWorld:
        if not answers:
            answers.append(_ask_mpi(environ, family, ask, why))
        return answers[0]

    if family is not _BARE_PMIX:
        # A variable that was left behind or set by hand: MPI itself would say that this is the only rank.
        _required(environ, family.size)
    if all(name in environ for name in (family.size, family.local_rank, family.local_size)):
        place = _read_place(environ, family)
    elif environ.get(family.size) == "1":
        place = _Place(_read_number(environ, family.rank), 1, 0, 1)
        _check_place(place, environ, family)
    else:
        place = _Place(*mpi_world("the launcher does not say how many ranks there are on this host")[:4])
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    if job is None and place.on_one_host:
        # Hydra has a proxy on each host, so this name is the same for all ranks on one host only.
        job = ask.hydra_proxy()
    address, port = _mpi_meeting(environ, place, job, mpi_world)
    return RankContext(
        **place._asdict(), master_addr=address, master_port=port, launcher="mpirun", job=job, source=family.rank
    )


def _mpi_meeting(
    environ: Mapping[str, str], place: _Place, job: str | None, mpi_world: Callable[[str], MpiWorld]
) -> tuple[str, int]:
    address, port = _given_meeting(environ)
    if address is None and place.on_one_host:
        address = LOOPBACK
    if address is None:
        # Address and port come from the same host, so both are taken from the answer unless they were given.
        answer = mpi_world("the ranks are on several hosts and MASTER_ADDR is not set")
        return answer.address, answer.port if port is None else port
    if port is None:
        if job is None:
            port = mpi_world("nothing names this job, and MASTER_PORT is not set").port
        else:
            # The namespace is made of host and process id, which two containers may share; the launcher's own
            # listening port they cannot share. Each host has another one, so it only helps on one host.
            port = _derive_port(job + environ.get("PMIX_SERVER_URI2", "") if place.on_one_host else job)
    return address, port


def _ask_mpi(environ: Mapping[str, str], family: _Family, ask: Lookups, why: str) -> MpiWorld:
    answer = ask.mpi_world()
    if answer is None:
        raise UsageError(
            f"started by MPI ({family.rank}={environ[family.rank]}), but {why}, and mpi4py is not there to ask",
            hint="set MASTER_ADDR and MASTER_PORT (and LOCAL_RANK, LOCAL_WORLD_SIZE) for all ranks, "
            "or install mpi4py: pip install 'stepscope[mpi]'",
            where=family.rank,
        )
    said_rank = _read_number(environ, family.rank)
    said_size = _read_count(environ, family.size) if family.size in environ else answer.world_size
    if (answer.rank, answer.world_size) != (said_rank, said_size):
        raise UsageError(
            f"the launcher says rank {said_rank} of {said_size} ({family.rank}), "
            f"but mpi4py says rank {answer.rank} of {answer.world_size}",
            hint="mpi4py must use the same MPI as the mpirun that starts the ranks; "
            "or set MASTER_ADDR and MASTER_PORT for all ranks",
            where=family.rank,
        )
    return answer


def _is_slurm_step(environ: Mapping[str, str], ask: Lookups) -> bool:
    """Whether srun started this process as a task; a batch script and an salloc shell are no tasks."""
    step = environ.get("SLURM_STEP_ID", "")
    if "SLURM_PROCID" not in environ or "SLURM_STEP_NUM_TASKS" not in environ or not step.isdigit():
        return False
    if int(step) >= _FIRST_SPECIAL_STEP:
        return False
    # A batch job submitted from inside a step inherits that step's variables; the step daemon knows better.
    enclosing = ask.enclosing_step()
    return enclosing is None or enclosing.rpartition(".")[2] not in _STEPS_WITHOUT_RANKS


def _from_slurm(environ: Mapping[str, str], ask: Lookups) -> RankContext:
    node = _read_number(environ, "SLURM_NODEID")
    counts = parse_tasks_per_node(_required(environ, "SLURM_STEP_TASKS_PER_NODE"))
    if node >= len(counts):
        raise _contradiction(environ, "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE")
    rank, world_size = _read_number(environ, _SLURM.rank), _read_count(environ, _SLURM.size)
    place = _Place(rank, world_size, _read_number(environ, _SLURM.local_rank), counts[node])
    _check_place(place, environ, _SLURM)
    job = f"{_required(environ, 'SLURM_JOB_ID')}.{environ['SLURM_STEP_ID']}"
    address, port = _given_meeting(environ)
    if address is None:
        address = LOOPBACK if place.on_one_host else _find_first_host(environ, ask)
    return RankContext(
        **place._asdict(), master_addr=address, master_port=_derive_port(job) if port is None else port,
        launcher="slurm", job=job, source="SLURM_STEP_ID, SLURM_PROCID",
    )  # fmt: skip


def _find_first_host(environ: Mapping[str, str], ask: Lookups) -> str:
    """Rank 0 runs on the first node of the step; node names need not be names that a resolver knows."""
    nodes = environ.get("SLURM_STEP_NODELIST") or _required(environ, "SLURM_JOB_NODELIST")
    first = first_host(nodes)
    if ask.name_resolves(first):
        return first
    address = ask.node_address(first)
    if address is not None:
        return address
    # The host srun was called on: the first node where a batch script called it, a login node otherwise.
    launch_address = environ.get("SLURM_LAUNCH_NODE_IPADDR")
    if launch_address:
        return launch_address
    raise UsageError(
        f"the step's first node {first!r} has no address: it does not resolve and scontrol does not know it",
        hint="set MASTER_ADDR to an address of that node for all ranks",
        where="SLURM_STEP_NODELIST",
    )


def _inline(environ: Mapping[str, str]) -> RankContext:
    slurm_job = environ.get("SLURM_JOB_ID")
    if slurm_job is None:
        return ALONE
    return msgspec.structs.replace(ALONE, source=f"no launcher (a shell of Slurm job {slurm_job})")


def _read_place(environ: Mapping[str, str], family: _Family) -> _Place:
    place = _Place(
        _read_number(environ, family.rank),
        _read_count(environ, family.size),
        _read_number(environ, family.local_rank),
        _read_count(environ, family.local_size),
    )
    _check_place(place, environ, family)
    return place


def _check_place(place: _Place, environ: Mapping[str, str], family: _Family) -> None:
    if place.rank >= place.world_size:
        raise _contradiction(environ, family.rank, family.size)
    if place.local_rank >= place.local_world_size:
        raise _contradiction(environ, family.local_rank, family.local_size)
    if place.local_world_size > place.world_size:
        raise _contradiction(environ, family.local_size, family.size)


def _contradiction(environ: Mapping[str, str], first: str, second: str) -> UsageError:
    return UsageError(
        f"{first}={environ[first]} and {second}={environ[second]} cannot both be right",
        hint="start all ranks with one launcher, or unset what an earlier one left in the environment",
        where=first,
    )


def _required(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "").strip()
    if not value:
        related = {*_TORCH, "MASTER_ADDR", "MASTER_PORT", *(name for family in _MPI_FAMILIES for name in family)}
        found = sorted(n for n in environ if n in related or n.startswith("SLURM_STEP"))
        found_text = ", ".join(f"{n}={environ[n]}" for n in found) or "nothing related"
        raise UsageError(
            f"{name} is not set, although other variables say that this is one of several ranks ({found_text})",
            hint=f"set {name} for every rank, or start the ranks with torchrun, mpirun or srun",
            where=name,
        )
    return value


def _read_number(environ: Mapping[str, str], name: str) -> int:
    text = _required(environ, name)
    # int() also takes "+1", "1_0" and digits of other scripts, which no launcher writes.
    if not (text.isascii() and text.isdigit()):
        raise UsageError(
            f"{name}={text!r} is not a whole number",
            hint=f"set {name} right, or unset it when no launcher is meant",
            where=name,
        )
    return int(text)


def _read_count(environ: Mapping[str, str], name: str) -> int:
    # "2(x3)" belongs to Slurm's own reader; here a count is a plain number.
    count = _read_number(environ, name)
    if count < 1:
        raise UsageError(f"{name}={count} must be at least 1", where=name)
    return count


def _read_port(environ: Mapping[str, str]) -> int:
    port = _read_number(environ, "MASTER_PORT")
    if not 1 <= port <= 65535:
        raise UsageError(f"MASTER_PORT={port} is not a port number (1 to 65535)", where="MASTER_PORT")
    return port


def _given_meeting(environ: Mapping[str, str]) -> tuple[str | None, int | None]:
    """What somebody set by hand; either one may stand alone."""
    if environ.get(_EXPORTED_VARIABLE) == "inline":
        # Inherited from a single process that started this launcher: its port 0 means nothing here.
        return None, None
    return environ.get("MASTER_ADDR") or None, _read_port(environ) if environ.get("MASTER_PORT") else None


def _derive_port(job: str) -> int:
    """The same number on all ranks without talking, and another one for another job (nearly always)."""
    return FIRST_PORT + zlib.crc32(job.encode()) % (LAST_PORT - FIRST_PORT + 1)
