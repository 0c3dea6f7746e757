"""Which rank this process is, as cheaply as can be: it is asked inside other people's programs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
"""Of torchrun and env://, Open MPI, MVAPICH, MPICH and Intel MPI, srun."""


class Place(NamedTuple):
    rank: int
    world_size: int
    local_rank: int


def find_place() -> Place:
    """torch.distributed knows best where it is initialised; else what the launcher has left in the environment."""
    from_environment = read_place(os.environ)
    try:
        import torch.distributed as dist
    except ImportError:
        return from_environment
    if dist.is_available() and dist.is_initialized():
        rank = dist.get_rank()
        same = rank == from_environment.rank
        return Place(rank, dist.get_world_size(), from_environment.local_rank if same else rank)
    return from_environment


def read_place(environ: Mapping[str, str]) -> Place:
    """Rank 0 of 1 where nobody says otherwise. Variables that are no numbers are somebody else's."""
    for names in _VARIABLES:
        values = [environ.get(name, "") for name in names]
        if values[0].isdecimal() and values[1].isdecimal() and int(values[0]) < int(values[1]):
            rank = int(values[0])
            return Place(rank, int(values[1]), int(values[2]) if values[2].isdecimal() else rank)
    return Place(0, 1, 0)
