"""How ranks start, on one host or several: inline, torchrun (elastic), mpirun, Slurm; how their end is noticed."""

from stepscope.launch.context import RankContext, detect_rank_context, export_rendezvous
from stepscope.launch.hosts import read_cluster_file, read_hostfile
from stepscope.launch.local import launch_local
from stepscope.launch.netlab import NetLab
from stepscope.launch.slurm import SlurmJob, format_sbatch, submit
from stepscope.launch.watchdog import Heartbeat
from stepscope.launch.worker import RankSession, leave_group_behind, rank_session

__all__ = [
    "Heartbeat", "NetLab", "RankContext", "RankSession", "SlurmJob", "detect_rank_context", "export_rendezvous",
    "format_sbatch", "launch_local", "leave_group_behind", "rank_session", "read_cluster_file", "read_hostfile",
    "submit",
]  # fmt: skip
