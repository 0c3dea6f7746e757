"""How ranks start: inline, torchrun (elastic), mpirun, Slurm; and how their end is noticed."""

from stepscope.launch.context import RankContext, detect_rank_context, export_rendezvous
from stepscope.launch.fresh import ChildError, call_stepscope, measure_in_processes, merge_processes
from stepscope.launch.local import launch_local
from stepscope.launch.slurm import SlurmJob, format_sbatch, submit
from stepscope.launch.watchdog import Heartbeat
from stepscope.launch.worker import RankSession, load_worker, rank_session

__all__ = [
    "ChildError",
    "Heartbeat",
    "RankContext",
    "RankSession",
    "SlurmJob",
    "call_stepscope",
    "detect_rank_context",
    "export_rendezvous",
    "format_sbatch",
    "launch_local",
    "load_worker",
    "measure_in_processes",
    "merge_processes",
    "rank_session",
    "submit",
]
