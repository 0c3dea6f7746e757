"""Which variables decide, in which order, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_reports import read_reports

from stepscope.core.errors import UsageError
from stepscope.launch.context import (
    Lookups,
    MpiWorld,
    RankContext,
    detect_rank_context,
    export_rendezvous,
)
from stepscope.launch.hostlist import first_host, parse_tasks_per_node

Environ = dict[str, str]


def place_of(context: RankContext) -> tuple[str, int, int, int, int]:
    return (context.launcher, context.rank, context.world_size, context.local_rank, context.local_world_size)


def meeting_of(context: RankContext) -> tuple[str, int]:
    return (context.master_addr, context.master_port)


def not_asked(*_: object) -> None:
    raise AssertionError("the variables were enough; nothing else should be asked")


def lookups(
    *,
    name_resolves: Callable[[str], bool] = lambda name: False,
    node_address: Callable[[str], str | None] = lambda name: None,
    enclosing_step: Callable[[], str | None] = lambda: None,
    hydra_proxy: Callable[[], str | None] = lambda: None,
    mpi_world: Callable[[], MpiWorld | None] = not_asked,
) -> Lookups:
    return Lookups(name_resolves, node_address, enclosing_step, hydra_proxy, mpi_world)


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-a-77@1",
    "PMIX_RANK": "1",
}
OPEN_MPI_ON_TWO_HOSTS = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_STEP_NODELIST": "n[08-09]",
    "SLURM_JOB_NODELIST": "n[07-09]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7",
}
SBATCH_SHELL = {
    "SLURM_JOB_ID": "42",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_NODELIST": "n[08-09]",
}


# Who decides


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("inline", 0, 1, 0, 1)),
        (SBATCH_SHELL, ("inline", 0, 1, 0, 1)),
        (TORCHRUN, ("torchrun", 5, 8, 1, 4)),
        ({**TORCHRUN, "STEPSCOPE_SELF_LAUNCH": "1"}, ("self", 5, 8, 1, 4)),
        ({"STEPSCOPE_SELF_LAUNCH": "1"}, ("inline", 0, 1, 0, 1)),
        (OPEN_MPI, ("mpirun", 1, 2, 1, 2)),
        (HYDRA, ("mpirun", 1, 2, 1, 2)),
        (SRUN, ("slurm", 3, 4, 0, 1)),
        # torchrun started once a node by srun or mpirun
        ({**SRUN, **TORCHRUN}, ("torchrun", 5, 8, 1, 4)),
        ({**OPEN_MPI, **TORCHRUN}, ("torchrun", 5, 8, 1, 4)),
        # mpirun and hydra start their daemons with srun
        ({**SRUN, **OPEN_MPI}, ("mpirun", 1, 2, 1, 2)),
        ({**SRUN, **HYDRA}, ("mpirun", 1, 2, 1, 2)),
        # srun speaks PMI or PMIx to MPI libraries
        ({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4"}, ("slurm", 3, 4, 0, 1)),
        ({**SRUN, "PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.42.0"}, ("slurm", 3, 4, 0, 1)),
        # a single process of a launcher that says little
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, ("mpirun", 0, 1, 0, 1)),
    ],
)
def test_the_launcher_of_this_process_decides(environ: Environ, expected: tuple[str, int, int, int, int]) -> None:
    found = detect_rank_context(environ, lookups=lookups(hydra_proxy=lambda: "hydra-1-2"))
    assert place_of(found) == expected


def test_mvapich_variables() -> None:
    names = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    environ = {f"MV2_COMM_WORLD_{name}": value for name, value in names.items()}
    found = detect_rank_context({**environ, "MASTER_PORT": "29501"}, lookups=lookups())
    assert place_of(found) == ("mpirun", 1, 2, 1, 2)
    assert found.source == "MV2_COMM_WORLD_RANK"


@pytest.mark.parametrize("enclosing", ["42.batch", "42.interactive", "42.extern"])
def test_step_variables_inherited_by_a_batch_shell_do_not_count(enclosing: str) -> None:
    found = detect_rank_context(SRUN, lookups=lookups(enclosing_step=lambda: enclosing))
    assert place_of(found) == ("inline", 0, 1, 0, 1)


def test_slurms_numbers_for_shells_are_no_steps() -> None:
    interactive = {**SRUN, "SLURM_STEP_ID": str(0xFFFFFFFA)}
    assert detect_rank_context(interactive, lookups=lookups()).launcher == "inline"


def test_run_id_names_the_job_unless_torchrun_had_none() -> None:
    assert detect_rank_context(TORCHRUN).job is None
    assert detect_rank_context({**TORCHRUN, "TORCHELASTIC_RUN_ID": "abc"}).job == "abc"


# Variables set by hand


def test_plain_variables_on_loopback_are_one_host() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    assert place_of(detect_rank_context(environ)) == ("torchrun", 1, 2, 1, 2)


def test_plain_variables_elsewhere_are_one_process_a_host() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node-a", "MASTER_PORT": "29500"}
    assert place_of(detect_rank_context(environ)) == ("torchrun", 1, 2, 0, 1)


@settings(deadline=None)
@given(st.integers(1, 64).flatmap(lambda world: st.tuples(st.just(world), st.integers(0, world - 1))))
def test_exported_variables_say_the_same(world_and_rank: tuple[int, int]) -> None:
    world_size, rank = world_and_rank
    before = dict(os.environ)
    context = RankContext(
        rank=rank,
        world_size=world_size,
        local_rank=0,
        local_world_size=1,
        launcher="torchrun",
        master_addr="node-a",
        master_port=29500,
        job=None,
        source="",
    )
    try:
        export_rendezvous(context)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        exported = {name: os.environ[name] for name in names}
    finally:
        os.environ.clear()
        os.environ.update(before)
    found = detect_rank_context(exported)
    assert place_of(found) == place_of(context)
    assert meeting_of(found) == meeting_of(context)


# Where the ranks meet


def test_mpi_on_one_host_meets_on_loopback_at_a_port_of_the_job() -> None:
    first = detect_rank_context(OPEN_MPI, lookups=lookups())
    other_rank = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "PMIX_RANK": "0"}
    assert meeting_of(detect_rank_context(other_rank, lookups=lookups())) == meeting_of(first)
    assert first.master_addr == "127.0.0.1"
    assert 20000 <= first.master_port <= 39999
    other_job = {**OPEN_MPI, "PMIX_NAMESPACE": "prterun-a-78@1"}
    assert detect_rank_context(other_job, lookups=lookups()).master_port != first.master_port


def test_same_namespace_in_two_containers_meets_at_two_ports() -> None:
    ports = {
        detect_rank_context({**OPEN_MPI, "PMIX_SERVER_URI2": uri}, lookups=lookups()).master_port
        for uri in ("x;tcp4://127.0.0.1:4001", "x;tcp4://127.0.0.1:4002")
    }
    assert len(ports) == 2


def test_mpi_on_several_hosts_asks_mpi() -> None:
    answer = MpiWorld(1, 2, 0, 1, "10.0.0.5", 41234)
    found = detect_rank_context(OPEN_MPI_ON_TWO_HOSTS, lookups=lookups(mpi_world=lambda: answer))
    assert meeting_of(found) == ("10.0.0.5", 41234)


def test_mpi_on_several_hosts_without_mpi4py_says_what_to_do() -> None:
    with pytest.raises(UsageError, match="several hosts") as caught:
        detect_rank_context(OPEN_MPI_ON_TWO_HOSTS, lookups=lookups(mpi_world=lambda: None))
    assert "MASTER_ADDR" in (caught.value.hint or "")
    assert "mpi4py" in (caught.value.hint or "")


def test_mpi4py_of_another_mpi_is_noticed() -> None:
    """It would see itself as the only process, and every rank would take itself for rank 0."""
    alone = MpiWorld(0, 1, 0, 1, "10.0.0.5", 41234)
    with pytest.raises(UsageError, match=r"rank 1 of 2 .* but mpi4py says rank 0 of 1"):
        detect_rank_context(OPEN_MPI_ON_TWO_HOSTS, lookups=lookups(mpi_world=lambda: alone))


@pytest.mark.parametrize(
    "environ", [{"PMIX_RANK": "1", "PMIX_NAMESPACE": "x@1"}, {"PMI_RANK": "1", "PMI_SIZE": "4"}], ids=["pmix", "pmi"]
)
def test_mpi_is_asked_for_the_place_that_variables_leave_open(environ: Environ) -> None:
    answer = MpiWorld(1, 4, 1, 2, "10.0.0.5", 41234)
    found = detect_rank_context(environ, lookups=lookups(mpi_world=lambda: answer))
    assert place_of(found) == ("mpirun", 1, 4, 1, 2)
    assert meeting_of(found) == ("10.0.0.5", 41234)


def test_port_of_a_hydra_proxy_is_not_used_across_hosts() -> None:
    """Each host has its own proxy, so ranks on different hosts would derive different ports."""
    two_hosts = {**HYDRA, "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1", "MASTER_ADDR": "node-a"}
    answer = MpiWorld(1, 2, 0, 1, "10.0.0.5", 41234)
    found = detect_rank_context(two_hosts, lookups=lookups(hydra_proxy=not_asked, mpi_world=lambda: answer))
    assert meeting_of(found) == ("node-a", 41234)
    assert found.job is None


def test_slurm_uses_the_first_node_of_the_step() -> None:
    found = detect_rank_context(SRUN, lookups=lookups(name_resolves=lambda name: name == "n08"))
    assert found.master_addr == "n08"
    assert found.job == "42.0"
    assert 20000 <= found.master_port <= 39999
    next_step = detect_rank_context({**SRUN, "SLURM_STEP_ID": "1"}, lookups=lookups())
    assert next_step.master_port != found.master_port


def test_slurm_asks_scontrol_for_a_name_that_does_not_resolve() -> None:
    found = detect_rank_context(SRUN, lookups=lookups(node_address={"n08": "10.0.0.8"}.get))
    assert found.master_addr == "10.0.0.8"


def test_slurm_falls_back_to_the_launching_node_and_then_gives_up() -> None:
    assert detect_rank_context(SRUN, lookups=lookups()).master_addr == "10.0.0.7"
    unknown = {name: value for name, value in SRUN.items() if name != "SLURM_LAUNCH_NODE_IPADDR"}
    with pytest.raises(UsageError, match="first node 'n08' has no address"):
        detect_rank_context(unknown, lookups=lookups())


def test_slurm_on_one_node_needs_no_names() -> None:
    one_node = {**SRUN, "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_LOCALID": "3"}
    found = detect_rank_context(one_node, lookups=lookups(name_resolves=lambda _: False, node_address=not_asked))
    assert found.master_addr == "127.0.0.1"


@pytest.mark.parametrize("environ", [OPEN_MPI, OPEN_MPI_ON_TWO_HOSTS, HYDRA, SRUN])
def test_given_address_and_port_always_win(environ: Environ) -> None:
    given_by_hand = {**environ, "MASTER_ADDR": "node-x", "MASTER_PORT": "1234"}
    assert meeting_of(detect_rank_context(given_by_hand, lookups=lookups())) == ("node-x", 1234)


# What cannot be


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({**TORCHRUN, "RANK": "8"}, ["RANK=8", "WORLD_SIZE=8"]),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, ["LOCAL_RANK=4", "LOCAL_WORLD_SIZE=4"]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "16"}, ["LOCAL_WORLD_SIZE=16", "WORLD_SIZE=8"]),
        ({**TORCHRUN, "WORLD_SIZE": "eight"}, ["WORLD_SIZE='eight'"]),
        ({**TORCHRUN, "RANK": "-1"}, ["RANK='-1'"]),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, ["MASTER_PORT=70000"]),
        ({n: v for n, v in TORCHRUN.items() if n != "MASTER_ADDR"}, ["MASTER_ADDR is not set"]),
        ({"RANK": "0"}, ["WORLD_SIZE is not set", "RANK=0"]),
        ({"WORLD_SIZE": "1"}, ["RANK is not set", "WORLD_SIZE=1"]),
        ({"RANK": "0", "WORLD_SIZE": "0"}, ["WORLD_SIZE=0"]),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "2"}, ["OMPI_COMM_WORLD_RANK=2", "OMPI_COMM_WORLD_SIZE=2"]),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": ""}, ["OMPI_COMM_WORLD_SIZE is not set"]),
        ({"OMPI_COMM_WORLD_RANK": "0"}, ["OMPI_COMM_WORLD_SIZE is not set", "OMPI_COMM_WORLD_RANK=0"]),
        ({"MV2_COMM_WORLD_RANK": "0"}, ["MV2_COMM_WORLD_SIZE is not set", "MV2_COMM_WORLD_RANK=0"]),
        ({"PMI_RANK": "0"}, ["PMI_SIZE is not set", "PMI_RANK=0"]),
        ({**SRUN, "SLURM_PROCID": "4"}, ["SLURM_PROCID=4", "SLURM_STEP_NUM_TASKS=4"]),
        ({**SRUN, "SLURM_NODEID": "2"}, ["SLURM_NODEID=2", "SLURM_STEP_TASKS_PER_NODE=3,1"]),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "3,x"}, ["3,x"]),
        ({**SRUN, "SLURM_STEP_NODELIST": "n[08-"}, ["n[08-"]),
    ],
)
def test_contradictions_name_the_variables_and_values(environ: Environ, named: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        detect_rank_context(environ, lookups=lookups())
    for name in named:
        assert name in caught.value.message


RANK_NAMES = [*TORCHRUN, *OPEN_MPI, *HYDRA, *SRUN, "STEPSCOPE_SELF_LAUNCH"]


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(RANK_NAMES), st.sampled_from(["", "0", "1", "2", "4", "-1", "x", "2(x2)", "n[1]"]))
)
def test_any_mixture_is_a_consistent_place_or_a_plain_error(environ: Environ) -> None:
    try:
        found = detect_rank_context(environ, lookups=lookups(mpi_world=lambda: None))
    except UsageError:
        # The other outcome that is allowed; anything else fails the test.
        return
    assert 0 <= found.rank < found.world_size
    assert 0 <= found.local_rank < found.local_world_size <= found.world_size
    assert found.master_addr


# Host lists


names = st.from_regex(r"[a-z][a-z0-9-]{0,5}[a-z]", fullmatch=True)
ranges = st.tuples(st.integers(0, 200), st.integers(0, 20), st.integers(1, 4))


@settings(deadline=None)
@given(st.lists(st.tuples(names, st.lists(ranges, max_size=3)), min_size=1, max_size=4))
def test_the_first_host_of_a_list_is_found(entries: list[tuple[str, list[tuple[int, int, int]]]]) -> None:
    folded = []
    for prefix, spans in entries:
        texts = []
        for first, length, width in spans:
            last = first + length
            texts.append(f"{first:0{width}d}" if length == 0 else f"{first:0{width}d}-{last:0{width}d}")
        folded.append(f"{prefix}[{','.join(texts)}]" if spans else prefix)
    prefix, spans = entries[0]
    assert first_host(",".join(folded)) == prefix + (f"{spans[0][0]:0{spans[0][2]}d}" if spans else "")


@pytest.mark.parametrize("text", ["", ",", "n[", "n]", "n[1-2", "n[]", "n[a-b]", "n[[1]]", "a b"])
def test_broken_host_lists_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="host list"):
        first_host(text)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 5)), min_size=1, max_size=5))
def test_task_counts_expand(runs: list[tuple[int, int]]) -> None:
    text = ",".join(str(count) if repeat == 1 else f"{count}(x{repeat})" for count, repeat in runs)
    assert parse_tasks_per_node(text) == [count for count, repeat in runs for _ in range(repeat)]


# For real


@pytest.mark.ranks
def test_a_single_process_just_works(worker: list[str], environ: Environ) -> None:
    (report,) = read_reports(
        subprocess.run(worker, env=environ, capture_output=True, text=True, check=False, timeout=60)
    )
    assert (report["launcher"], report["rank"], report["world_size"], report["sum"]) == ("inline", 0, 1, 1)
    assert report["same_again"], "exported variables do not turn a single process into a rank of torchrun"


TORCHRUN_COMMAND = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.ranks
def test_torchrun(worker: list[str], environ: Environ) -> None:
    finished = subprocess.run(
        [*TORCHRUN_COMMAND, worker[1]], env=environ, capture_output=True, text=True, check=False, timeout=120
    )
    reports = read_reports(finished)
    assert [(r["rank"], r["local_rank"], r["world_size"], r["sum"]) for r in reports] == [(0, 0, 2, 3), (1, 1, 2, 3)]
    assert {r["launcher"] for r in reports} == {"torchrun"}
    assert all(r["same_again"] for r in reports)
    assert len({r["job"] for r in reports}) == 1


@pytest.mark.ranks
def test_torchrun_that_we_started_ourselves(context_worker: list[str], environ: Environ) -> None:
    """These ranks only tell their place; that such ranks meet, every test of `launch_local` shows."""
    finished = subprocess.run(
        [*TORCHRUN_COMMAND, "--no-python", *context_worker], env={**environ, "STEPSCOPE_SELF_LAUNCH": "1"},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    reports = read_reports(finished)
    assert [(r["rank"], r["local_rank"], r["world_size"]) for r in reports] == [(0, 0, 2), (1, 1, 2)]
    assert {r["launcher"] for r in reports} == {"self"}
    assert len({r["job"] for r in reports}) == 1


def test_detecting_does_not_load_torch(environ: Environ) -> None:
    code = (
        "import sys; from stepscope.launch.context import detect_rank_context; detect_rank_context();"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'mpi4py')))"
    )
    assert subprocess.run([sys.executable, "-c", code], env=environ, check=False, timeout=60).returncode == 0
