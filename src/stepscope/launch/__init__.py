"""How ranks start, on one host or several: inline, torchrun (elastic), mpirun, Slurm; how their end is noticed."""

from stepscope.launch.context import RankContext, detect_rank_context, export_rendezvous
from stepscope.launch.hosts import (
    Cluster,
    Host,
    parse_hostfile,
    read_cluster_file,
    read_cluster_from_environment,
    read_hostfile,
)
from stepscope.launch.local import launch_local
from stepscope.launch.netlab import NetLab
from stepscope.launch.slurm import SlurmJob, format_sbatch, submit
from stepscope.launch.watchdog import Heartbeat
from stepscope.launch.worker import RankSession, leave_group_behind, load_worker, rank_session

__all__ = [
    "Cluster",
    "Heartbeat",
    "Host",
    "NetLab",
    "RankContext",
    "RankSession",
    "SlurmJob",
    "detect_rank_context",
    "export_rendezvous",
    "format_sbatch",
    "launch_local",
    "leave_group_behind",
    "load_worker",
    "parse_hostfile",
    "rank_session",
    "read_cluster_file",
    "read_cluster_from_environment",
    "read_hostfile",
    "submit",
]
