"""Tests leave no caches beside the traces they read, and none of them fails because a machine is busy."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from rank_reports import plain_environ
from slurm_cluster import SlurmCluster, running_cluster, why_no_cluster

from warm_processes import WarmStarter

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling
    from xdist.workermanage import WorkerController

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""A second thread per process makes milliseconds of microseconds on a busy machine."""
os.environ.setdefault("STEPSCOPE_TRACE_CACHE", tempfile.mkdtemp(prefix="stepscope-test-traces-"))
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

LONGEST_FIRST = (
    "workloads/test_ranks.py",
    "cli/test_bench_comms.py",
    "workloads/test_suite.py",
    "cli/test_launch_hosts.py",
    "cli/test_bench_slurm.py",
    "comms/test_gloo_ranks.py",
    "cli/test_verdict_commands.py",
    "launch/test_local.py",
    "analyze/test_pairs.py",
    "house/test_recipes.py",
    "traces/test_chakra_convert.py",
    "traces/test_kineto.py",
)
"""Files that take most of the time: begun last, one of them would keep one worker busy after the others are done."""

RANKS_LOAD = ("test_ranks.py", "test_dlrm_sharded.py")
"""Files of workloads whose ranks load what they need: another worker may have them."""

COLLECTED = tempfile.TemporaryDirectory(prefix="stepscope-test-collection-")

Reporting = Generator[None, pytest.TestReport, pytest.TestReport]
CPU_BEFORE = pytest.StashKey[float]()
CPU_S: dict[str, float] = {}
"""By file: what its tests and the processes that they waited for took."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-files", type=int, default=0, help="List the N files that take most processor time.")


def read_cpu_s() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[CPU_BEFORE] = read_cpu_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "teardown":
        report.user_properties.append(("cpu_s", read_cpu_s() - item.stash[CPU_BEFORE]))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """With several workers, the process that prints the summary gets the reports of all."""
    file = report.nodeid.split("::", maxsplit=1)[0]
    for name, value in report.user_properties:
        if name == "cpu_s" and report.when == "teardown":
            CPU_S[file] = CPU_S.get(file, 0.0) + float(str(value))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    count = config.getoption("--cpu-files")
    if count:
        terminalreporter.section(f"processor time by file, of {sum(CPU_S.values()):.0f} s")
        for file, cpu_s in sorted(CPU_S.items(), key=lambda one: -one[1])[:count]:
            terminalreporter.write_line(f"{cpu_s:7.1f} s  {file}")


def order(item: pytest.Item) -> int:
    path = item.path.as_posix()
    return next((place for place, name in enumerate(LONGEST_FIRST) if path.endswith(name)), len(LONGEST_FIRST))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=order)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """In a new clone all workers would compile all tests at once, which takes twice as long as collecting them."""
    if not any((Path(__file__).parent / "__pycache__").glob("test_*.pyc")):
        node.workerinput["first_has_collected"] = f"{COLLECTED.name}/yes"


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """In a new clone the first worker writes what it compiles, and the others wait for it."""
    worker = getattr(session.config, "workerinput", {})
    done, deadline_s = Path(worker.get("first_has_collected", "")), time.monotonic() + 120
    if worker.get("workerid") != "gw0":
        while not done.exists() and time.monotonic() < deadline_s:
            time.sleep(0.1)
    gc.disable()  # nothing that is collected becomes garbage
    try:
        return (yield)
    finally:
        gc.enable()
        done.touch()


def pytest_collection_finish() -> None:
    atexit.register(gc.unfreeze)


@pytest.fixture(autouse=True, scope="module")
def short_collections() -> None:
    """Measurements collect garbage first: what libraries, collected tests and earlier files hold is passed over."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def short_collections_after_loading() -> Iterator[None]:
    """The same for large libraries that a test loads, or all that follow in its file would pay for them."""
    before = len(sys.modules)
    yield
    if len(sys.modules) - before >= 100:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """A file stays on one worker, as its tests share what they measured; so do files that load the same."""
    from xdist.scheduler import LoadScopeScheduling

    class FileScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", maxsplit=1)[0]
            if "/workloads/" in file and not file.endswith(RANKS_LOAD):
                return "workloads"  # transformers and the compiler take three seconds to load
            return "slurm" if "slurm" in file else file  # one cluster serves them all

    config.option.loadscopereorder = False  # or the files with most tests would go first
    return FileScheduling(config, log)


WARM_STARTER = WarmStarter()


@pytest.fixture(autouse=True, scope="module")
def warm_rank_servers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Commands in the process of the tests load torch for their ranks once per worker; `tests/launch` tests loading."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.parent.name != "launch":
            patch.setattr("stepscope.launch.local.start_child", WARM_STARTER)
        yield


@pytest.fixture
def warm_starter() -> WarmStarter:
    return WARM_STARTER


@pytest.fixture
def warm_rank_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of `tests/launch` that are about what becomes of ranks and not about how they are started."""
    monkeypatch.setattr("stepscope.launch.local.start_child", WARM_STARTER)


@pytest.fixture
def forked_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh processes load torch once per worker: for tests of what is done with their results."""
    monkeypatch.setattr("stepscope.run.processes.start_child", WARM_STARTER)


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """One for all files that need it."""
    reason = why_no_cluster()
    if reason is not None:
        pytest.skip(reason)
    with running_cluster(plain_environ()) as cluster:
        yield cluster
