"""What the variables do not say and has to be asked: of MPI, of the process tree, of the resolver, of Slurm."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import NamedTuple

from stepscope.launch.slurm import read_enclosing_step, read_node_address

LOOPBACK = "127.0.0.1"


class MpiWorld(NamedTuple):
    """What the MPI library itself says, after all ranks talked to each other."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    """Rank 0's host."""
    port: int
    """Was free on rank 0's host a moment ago."""


def read_mpi_world() -> MpiWorld | None:
    """Asks MPI through mpi4py; None where mpi4py or its MPI library cannot be loaded.

    Starts MPI in this process and waits for all other ranks to do the same. On one host the variables of the
    launcher are enough, so this is only called where they are not.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    world = MPI.COMM_WORLD
    local = world.Split_type(MPI.COMM_TYPE_SHARED)
    meeting_point = (_read_own_address(), _read_free_port()) if world.rank == 0 else None
    address, port = world.bcast(meeting_point, root=0)
    return MpiWorld(world.rank, world.size, local.rank, local.size, address, port)


def read_hydra_proxy() -> str | None:
    """A name for the MPICH (hydra) job on this host: hydra puts none into the variables.

    All ranks of one job on one host are children of one proxy process; its id and start time name the job.
    """
    import psutil

    try:
        for process in psutil.Process().parents():
            if "pmi_proxy" in process.name():
                return f"hydra-{process.pid}-{process.create_time():.0f}"
    except psutil.Error:
        return None
    return None


def name_resolves(host: str) -> bool:
    """Whether this host knows an address for the name; may ask a name server."""
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


class Lookups(NamedTuple):
    """What environment variables do not say and has to be looked up; tests put their own answers here."""

    name_resolves: Callable[[str], bool] = name_resolves
    node_address: Callable[[str], str | None] = read_node_address
    enclosing_step: Callable[[], str | None] = read_enclosing_step
    hydra_proxy: Callable[[], str | None] = read_hydra_proxy
    mpi_world: Callable[[], MpiWorld | None] = read_mpi_world


def _read_own_address() -> str:
    """An address other hosts can reach: what the host's name stands for, else that of the outgoing interface."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = LOOPBACK
    if not address.startswith("127."):
        return address
    # Connecting a datagram socket sends nothing; it only makes the kernel choose the interface. The address is
    # from the block reserved for documentation, so it belongs to nobody.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return address


def _read_free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
