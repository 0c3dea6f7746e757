"""`stepscope bench comms` under a real two-node Slurm on loopback, by srun and by the generated batch script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from cli_process import Stepscope
from slurm_cluster import SlurmCluster
from test_bench_comms import COMMS, check_rows, check_that_killing_ends_the_job

from stepscope.metrics import flatten_case, with_peaks
from stepscope.store import StoredRun, run_folders, verify_run

pytestmark = [pytest.mark.ranks, pytest.mark.services]


def test_srun_and_the_generated_script_give_the_same_rows(
    here: Stepscope, slurm_cluster: SlurmCluster, store: Path, tmp_path: Path
) -> None:
    bench = [*COMMS, "--sizes", "1K,64K", "--quick", "--json", "--store", str(store)]
    done = slurm_cluster.run(["srun", "-N2", "-n4", sys.executable, "-m", "stepscope", *bench])
    assert done.returncode == 0, done.stderr
    script = tmp_path / "job.sh"
    made = here("launch", "sbatch", "--nodes", "2", "--ranks-per-node", "2", "-o", str(script), "--", *bench)
    assert made.code == 0
    submitted = slurm_cluster.run(["sbatch", "--wait", f"--output={tmp_path / 'job.out'}", str(script)])
    assert submitted.returncode == 0, (tmp_path / "job.out").read_text() + submitted.stderr
    by_srun, by_script = (StoredRun(folder) for folder in run_folders(store))
    for run in (by_srun, by_script):
        assert run.plan.launcher == "slurm"
        assert verify_run(run) == []
        rows = [msgspec.to_builtins(flatten_case(case)) for case in with_peaks(run.cases())]
        check_rows(rows, [1024, 65536], 4)
        assert [samples.rank for samples in run.cases()[0].samples] == [0, 1, 2, 3]
        assert run.system is not None
        assert len(run.system.hosts) == 2
    assert [r.case.key for r in by_srun.results] == [r.case.key for r in by_script.results]


def test_a_killed_rank_ends_the_step(slurm_cluster: SlurmCluster, store: Path) -> None:
    process = subprocess.Popen(
        ["srun", "-N2", "-n2", "--kill-on-bad-exit=1", sys.executable, "-m", "stepscope", *COMMS,
         "--sizes", "1K:32K:x2", "--min-time", "600ms", "--max-time", "600ms", "--store", str(store)],
        env=slurm_cluster.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    check_that_killing_ends_the_job(store, process, rank=1)
