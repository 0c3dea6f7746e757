"""Ranks analysed here, in other processes and on clusters: the same answers, in the same order."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.analyze.job import explain_job
from stepscope.analyze.job.tasks import RankTask, choose_workers, explain_rank, run_tasks
from stepscope.core.errors import MissingDependencyError, StepscopeError, UsageError
from stepscope.traces import read_traces

RANKS = 6
STEPS = range(3, 11)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six ranks, eight steps each; rank 4 computes longer, so that the others wait for it in the all-reduce."""
    folder = tmp_path_factory.mktemp("job")
    for rank in range(RANKS):
        (folder / f"rank{rank}.json").write_text(json.dumps(make_rank(rank)))
    return folder


def make_rank(rank: int) -> dict[str, Any]:
    events: list[dict[str, Any]] = []
    for step in STEPS:
        begin = step * 10_000
        late = 900 if rank == 4 else 0
        events += [
            host("user_annotation", f"ProfilerStep#{step}", begin, 5_000),
            host("cpu_op", "aten::mm", begin + 10, 40),
            host("cuda_runtime", "cudaLaunchKernel", begin + 20, 10, correlation=10 * step),
            host("cpu_op", "record_param_comms", begin + 60, 40, **comm()),
            host("cuda_runtime", "cudaLaunchKernelExC", begin + 70, 10, correlation=10 * step + 1),
            device("ampere_sgemm_128x64_nn", begin + 100, 1_000 + late, 7, 10 * step),
            device(
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
                begin + 1_100 + late,
                1_500 - late,
                20,
                10 * step + 1,
                **comm(),
            ),
        ]
    return {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": RANKS}, "traceEvents": events}


def comm() -> dict[str, Any]:
    return {
        "Collective name": "allreduce", "In msg nelems": 1 << 20, "Out msg nelems": 1 << 20, "dtype": "Float",
        "Group size": RANKS, "Process Group Name": "0", "Process Group Ranks": str(list(range(RANKS))),
    }  # fmt: skip


def host(cat: str, name: str, start: int, length: int, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 2, "ts": start, "dur": length, "args": args}


def device(name: str, start: int, length: int, stream: int, correlation: int, **args: Any) -> dict[str, Any]:
    place = {"device": 0, "stream": stream, "correlation": correlation, **args}
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "pid": 0,
        "tid": stream,
        "ts": start,
        "dur": length,
        "args": place,
    }


def encoded(job: Path, **options: Any) -> bytes:
    return msgspec.json.encode(explain_job(read_traces(job), **options))


def test_the_job_is_explained(job: Path) -> None:
    report = explain_job(read_traces(job))
    assert [rank.rank for rank in report.ranks] == list(range(RANKS))
    assert [step.step for step in report.steps] == list(STEPS)
    for rank in report.ranks:
        shares = rank.breakdown_s
        parts = [getattr(shares, name) for name in shares.__struct_fields__]
        assert sum(parts) == pytest.approx(rank.step_s, abs=1e-12)
        late = 900e-6 if rank.rank == 4 else 0.0
        assert shares.compute == pytest.approx(1e-3 + late)
        assert shares.exposed_comm == pytest.approx(1.5e-3 - late)
        assert rank.kernels == 2
    assert report.across is not None
    late_ranks = report.across.stragglers.stragglers
    assert late_ranks == [4]
    assert report.critical is not None
    assert report.critical.length_s == pytest.approx(5e-3)


def test_a_step_that_is_not_there_is_named(job: Path) -> None:
    with pytest.raises(UsageError, match="no step 99") as caught:
        explain_job(read_traces(job), step=99)
    assert "3, 4" in (caught.value.hint or "")


def test_other_processes_give_the_same_report(job: Path) -> None:
    seen: list[tuple[int, int]] = []
    assert encoded(job, workers=2, on_done=lambda done, of: seen.append((done, of))) == encoded(job)
    assert seen == [(number, RANKS) for number in range(1, RANKS + 1)]


def test_an_error_in_another_process_is_told_as_it_is(job: Path) -> None:
    tasks = [RankTask(path=str(job / "rank0.json"), rank=0, step=step) for step in (3, 99)]
    with pytest.raises(UsageError, match="rank 0 has no step 99"):
        run_tasks(explain_rank, tasks, workers=2)


def name_of(task: RankTask) -> str:
    return task.path


def test_more_tasks_than_the_processes_of_one_pool_may_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.analyze.job.tasks.RANKS_A_PROCESS", 4)
    tasks = [RankTask(path=f"rank{number}", rank=number, step=None) for number in range(19)]
    assert run_tasks(name_of, tasks, workers=2) == [task.path for task in tasks]


def end_this_process(_task: RankTask) -> None:
    os._exit(9)


def test_a_process_that_dies_is_an_error_with_a_next_step(job: Path) -> None:
    tasks = [RankTask(path=str(job / "rank0.json"), rank=0, step=3)] * 2
    with pytest.raises(StepscopeError, match="died") as caught:
        run_tasks(end_this_process, tasks, workers=2)
    assert "--workers" in (caught.value.hint or "")


def test_workers_follow_memory_and_size(job: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = [RankTask(path=str(path), rank=0, step=None) for path in sorted(job.iterdir())]
    assert choose_workers(small, None) == 1
    assert choose_workers(small, 3) == 3
    large = []
    for number in range(4):
        path = tmp_path / f"rank{number}.json"
        with path.open("wb") as file:
            file.truncate(200 << 20)
        large.append(RankTask(path=str(path), rank=number, step=None))
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(64)))

    class Memory:
        available = 6 << 30

    monkeypatch.setattr("psutil.virtual_memory", lambda: Memory)
    assert choose_workers(large, None) == 2


@pytest.fixture
def own_variables() -> Iterator[None]:
    """Engines set variables of this process that its children read on loading, and leave them behind."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_an_unknown_engine_is_refused(job: Path) -> None:
    with pytest.raises(UsageError, match="no engine 'spark://x'"):
        encoded(job, engine="spark://x")


@pytest.mark.skipif(find_spec("distributed") is None, reason="the package distributed is not installed")
@pytest.mark.ranks
@pytest.mark.usefixtures("own_variables")
@pytest.mark.filterwarnings("ignore")  # Dask warns of its own dashboard and ports
def test_a_dask_cluster_gives_the_same_report(job: Path) -> None:
    from distributed import LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        address = cluster.scheduler_address.removeprefix("tcp://")
        assert encoded(job, engine=f"dask://{address}") == encoded(job)
        with pytest.raises(UsageError, match="no step 99"):
            encoded(job, engine=f"dask://{address}", step=99)


@pytest.mark.skipif(find_spec("ray") is None, reason="the package ray is not installed")
@pytest.mark.ranks
@pytest.mark.usefixtures("own_variables")
@pytest.mark.filterwarnings("ignore")  # Ray warns of metrics and of the memory of small machines
def test_a_ray_cluster_gives_the_same_report(job: Path) -> None:
    assert encoded(job, engine="ray://") == encoded(job)


def test_a_missing_engine_names_the_package(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match="ray"):
        encoded(job, engine="ray://")
