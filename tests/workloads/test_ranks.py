"""Models on several real ranks, in tiny form."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import failing_ranks
import msgspec
import pytest
import torch
from suite_runs import SMALL
from suite_runs import measure as measure_alone

from stepscope.bench.workloads import choose_workloads, find_workload
from stepscope.bench.workloads import producer as producing
from stepscope.bench.workloads import shared as shared_cases
from stepscope.bench.workloads.catalogue import read_catalogue
from stepscope.bench.workloads.facts import Peak
from stepscope.bench.workloads.producer import WorkloadProducer, WorkloadRankFacts
from stepscope.bench.workloads.protocol import Optimized
from stepscope.bench.workloads.request import TRAIN_SAMPLE_S, read_case
from stepscope.bench.workloads.steps import TrainStep
from stepscope.core.errors import RankDiedError, UsageError
from stepscope.launch import RankSession, launch_local
from stepscope.launch.watchdog import write_rank_failure
from stepscope.measure import QUICK, CpuDevice, Measurement, MeasureSettings, SilentProgress
from stepscope.metrics import CaseInput
from stepscope.metrics.cases import input_share
from stepscope.records import Case, Failure, WorkloadRequest
from stepscope.run.execute import execute
from stepscope.run.producer import ExtraMeasurements, RankOutcome
from stepscope.run.rank import CRASH_LIMIT, Gathered, Lead, RankLoop, fold, give_up_case
from stepscope.run.ranks import Ranks
from stepscope.run.recorded import TRACED_STEPS
from stepscope.store import RANKS_FOLDER, MeasuredCase, RunWriter, StoredRun, create_run, record_failure
from stepscope.system import collect_system
from stepscope.traces import read_traces

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]  # the ranks started once for most of these tests

SHARDED = "dlrm/ootb/train/A.8dev-embed32-fp32"
RESNET = "resnet50/ootb/train/1dev-fp32"
BRIEF = msgspec.structs.replace(QUICK, min_time_s=0.0, max_time_s=0.02, min_samples=2, few_samples=2)


def find_training(model: str, implementation: str) -> str:
    found = choose_workloads(models=[model], modes=["train"], implementations=[implementation])
    return next(one.benchmark.id for one in found if one.declared.devices == 1)


def shared(name: str, parallel: str = "ddp", **chosen: Any) -> Case:
    return find_workload(name).make_case(device="cpu", scale="tiny", parallel=parallel, world_size=2, **chosen)


def plan_cases(store: Path, cases: list[Case], *, ranks: int, **further: Any) -> Path:
    asked: dict[str, Any] = {"loader_workers": None, **further}
    request = WorkloadRequest(backend="gloo", settings=BRIEF, compile_backend="eager", **asked)
    return create_run(
        store, verb="workload", name="test", command=["test"], request=request, cases=cases,
        launcher="self", world_size=ranks,
    )  # fmt: skip


FIRST = [shared(SMALL), shared(RESNET, "fsdp"), shared(SHARDED, "sharded")]
WITHOUT_TABLES = shared(RESNET, "sharded")
WRONG = shared(find_training(failing_ranks.WRONG, "optimized"))
UNEVEN = shared(SMALL, batch_size=7)
FAST_IN = {"ddp": ("xlmr", "cvt", "rnnt"), "fsdp": ("oscar", "dlrm", "gpt2")}
"""Optimized implementations, one of each family: joined weights, weights stored channels last, kernels, tables, blocks
of a decoder."""
FAST = [
    *(shared(find_training(model, "optimized"), parallel) for parallel, models in FAST_IN.items() for model in models),
    shared("dlrm/optimized/train/A.8dev-embed32-fp32", "sharded"),
]
PLAIN = [
    # Every pair of model and way of sharing is there, in one of the implementations, and every model in ootb.
    shared(find_training(model, "ootb"), parallel)
    for parallel in ("ddp", "fsdp")
    for model in read_catalogue()
    if model not in FAST_IN[parallel]
]
CHECKED = [shared(find_training(model, "optimized")) for model in failing_ranks.CHECKED]
"""The check is of one rank alone, and the same as without ranks, where the tests of the suite ask for all models'."""

Measured = dict[str, MeasuredCase]
"""By the key of the case."""


@pytest.fixture(scope="module")
def own_workers() -> Iterator[None]:
    """Ranks find the functions of `failing_ranks` and `loaded_ranks`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        yield


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, own_workers: None) -> Measured:
    """One start of two ranks for all that is measured the same way: each failure is followed by what must succeed."""
    cases = [*FIRST, WITHOUT_TABLES, *PLAIN[:4], WRONG, *CHECKED, UNEVEN, *PLAIN[4:], *FAST]
    unique = list({case.key: case for case in cases}.values())
    folder = plan_cases(tmp_path_factory.mktemp("measured"), unique, ranks=2, check=True)
    launch_local(folder=folder, target="loaded_ranks:measure_by_case", ranks=2, hang_limit_s=60.0)
    found = StoredRun(folder).cases()
    assert [one.result.case for one in found] == unique
    return {one.result.case.key: one for one in found}


def check_shared(case: MeasuredCase) -> None:
    assert case.result.failure is None, (case.result.case.benchmark.id, case.result.failure)
    assert len(case.samples) == 2
    assert case.result.timing == "slowest_rank"


def test_two_ranks_share_a_batch(measured: Measured) -> None:
    for asked in FIRST:
        case = measured[asked.key]
        check_shared(case)
        score, summary = case.score(), case.summary()
        assert score is not None
        assert summary is not None
        assert score == pytest.approx((case.result.case.batch_size or 0) / summary.median_s)
        assert case.result.facts["model_flops"] > 0


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_every_model_is_shared_in_both_ways(measured: Measured, parallel: str) -> None:
    cases = [measured[one.key] for one in (*PLAIN, *FAST) if one.spec.parallel == parallel]
    assert {one.result.case.benchmark.model for one in cases} == set(read_catalogue())
    for case in cases:
        check_shared(case)
        if case.result.case.benchmark.model == "dlrm":
            assert ("porting" in case.result.facts) == (parallel == "fsdp")


def test_fast_forms_are_checked(measured: Measured) -> None:
    for asked in CHECKED:
        case = measured[asked.key]
        check_shared(case)
        assert case.result.facts["check"] == "passed"
        assert case.score() is not None


def test_optimized_implementations_are_shared_in_all_ways(measured: Measured) -> None:
    for asked in FAST:
        case = measured[asked.key]
        check_shared(case)
        assert case.result.facts["check"] == "not asked for"
        assert case.score() is None
        if asked.spec.parallel == "sharded":
            assert "own tables as one" in case.result.facts["changes"]
            assert "lookups as a matmul" not in case.result.facts["changes"]


@pytest.mark.parametrize(
    ("asked", "kind", "message"),
    [
        (WITHOUT_TABLES, None, "no tables to shard"),
        (WRONG, "wrong_result", "outputs in fp32 differ by 1"),
        (UNEVEN, None, "cannot be shared evenly by 2 ranks"),
    ],
    ids=["without tables", "wrong on the first rank alone", "uneven"],
)
def test_what_fails_is_one_failure_among_others(
    measured: Measured, asked: Case, kind: str | None, message: str
) -> None:
    failure = measured[asked.key].result.failure
    assert failure is not None
    assert kind in {None, failure.kind}
    assert message in failure.message
    later = list(measured)[list(measured).index(asked.key) + 1]
    assert measured[later].result.status == "ok"


@pytest.mark.parametrize(
    ("parallel", "accumulate", "is_late"), [("ddp", 1, True), ("sharded", 1, False), ("sharded", 2, True)]
)
def test_updates_that_are_not_made_in_backward_are_told(parallel: str, accumulate: int, is_late: bool) -> None:
    workload = find_workload("dlrm/optimized/train/default.1dev-fp32")
    case = workload.make_case(device="cpu", scale="tiny", parallel=parallel, world_size=2, accumulate=accumulate)
    task = workload.make_task("tiny")
    assert isinstance(task, Optimized)
    told = shared_cases.name_unused(task, read_case(case))
    assert told is not None
    assert ("update in backward" in told) == is_late


class Troubled(NamedTuple):
    """A run whose ranks failed, twice started."""

    error: RankDiedError
    """That ended the first start."""
    first: list[str]
    """What had become of its cases then."""
    run: StoredRun


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory, own_workers: None) -> Troubled:
    """In the first case all ranks fail, in the third one alone; the last one is left for a second start."""
    cases = [shared(RESNET), shared(SMALL), shared(RESNET, "fsdp"), shared(SMALL, accumulate=3)]
    further: dict[str, Any] = {"hang_timeout_s": 30.0, "trace": True, "loader_workers": 0}
    folder = plan_cases(tmp_path_factory.mktemp("troubled"), cases, ranks=2, **further)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stepscope.run.execute.RANK_FUNCTION", "failing_ranks:fail_twice")
        with pytest.raises(RankDiedError) as caught:
            execute(StoredRun(folder))
    first = [one.result.status for one in StoredRun(folder).cases()]
    (failure,) = StoredRun(folder).failures
    assert (failure.kind, failure.rank, failure.case) == ("rank_died", 1, cases[2].key)
    return Troubled(caught.value, first, execute(StoredRun(folder)))


def test_a_rank_that_fails_while_the_others_exchange_ends_the_run_with_its_own_words(troubled: Troubled) -> None:
    """Nobody takes the others for hung; what was finished stays, and the case that cannot be measured is behind it."""
    assert "no room for the third model" in str(troubled.error)
    assert "smaller" in str(troubled.error.hint)
    assert troubled.first == ["failed", "ok", "failed"]
    assert [one.result.status for one in troubled.run.cases()] == ["failed", "ok", "failed", "ok"]
    told = troubled.run.cases()[2].result.failure
    assert told is not None
    assert "no room for the third model" in told.message
    assert troubled.run.run is not None


def test_exchanges_that_a_failed_case_left_open_do_not_meet_those_of_the_next(troubled: Troubled) -> None:
    failed, following = troubled.run.cases()[:2]
    assert failed.result.failure is not None
    assert "fails after what it began" in failed.result.failure.message
    check_shared(following)
    assert not list((troubled.run.folder / "ranks").glob("*.failure.json"))


def test_steps_of_all_ranks_are_recorded_together(troubled: Troubled) -> None:
    observed = troubled.run.cases()[1].result.facts
    folder = troubled.run.folder / str(observed["trace"])
    assert "traced_ranks" not in observed
    read = read_traces(folder, cache=False)
    assert list(read.ranks) == [0, 1]
    for rank in read.ranks:
        timeline = read.timeline(rank)
        assert len(timeline.steps) == TRACED_STEPS
        assert any("all_reduce" in text for text in timeline.texts)


def test_results_of_ranks_say_what_those_of_one_device_do(troubled: Troubled, tmp_path: Path) -> None:
    case = troubled.run.cases()[3]
    asked = find_workload(SMALL).make_case(device="cpu", scale="tiny", accumulate=3)
    (alone,) = measure_alone(tmp_path, asked, loader_workers=0, trace=True).cases()
    assert case.result.failure is None
    assert case.result.score == alone.result.score
    assert case.result.facts["model_flops"] == alone.result.facts["model_flops"]
    assert case.result.facts.keys() == alone.result.facts.keys()
    assert case.loader_score() is not None
    assert input_share(CaseInput(case)) is not None


# Beside the score


def make_measured(**told: Any) -> Gathered:
    measurement = Measurement(
        start_ns=[0, 0], duration_s=[1.0, 1.0], iterations=[1, 4], device_s=None, starved=0, allocations=0,
        host_share=None, warmups=1, notices=[],
    )  # fmt: skip
    extra = ExtraMeasurements(facts=WorkloadRankFacts(**told))
    return Gathered(outcome=RankOutcome(rank=0, measurement=measurement, extra=extra))


def fold_told(case: Case, told: list[Gathered]) -> Any:
    from stepscope.launch.worker import Session

    producer = WorkloadProducer(Session(verb="workload", request=WorkloadRequest(settings=BRIEF)))
    return fold(case, told, producer, started_at="now", elapsed_s=1.0)


def test_energy_and_peaks_are_those_of_all_devices() -> None:
    case = find_workload(SMALL).make_case(
        device="cuda", batch_size=10, parallel="ddp", world_size=2, accumulate=2
    )  # fmt: skip
    large, small = Peak(3e12, "large: sheet"), Peak(1e12, "small: sheet")
    told = [
        make_measured(energy_j=140.0, peak=large, peak_memory_bytes=5, loader_s=[1.0, 4.0]),
        make_measured(energy_j=60.0, peak=large, peak_memory_bytes=9, loader_s=[2.0, 3.0]),
    ]
    result, samples = fold_told(case, told)
    assert result.facts["energy_j_per_example"] == 200 / (10 * 2)
    assert result.facts["peak_flops"] == 6e12
    assert result.facts["peak_source"] == "2 × large: sheet"
    assert result.facts["peak_memory_bytes"] == 9
    assert [one.extra_s for one in samples] == [{"loader": [2.0, 4.0]}, {}]
    facts = told[1].outcome.extra.facts
    facts.peak, facts.energy_j = small, None
    observed = fold_told(case, told)[0].facts
    assert observed["peak_source"] == "1 × large: sheet; 1 × small: sheet"
    assert "energy_j_per_example" not in observed


# One rank in this process


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[RankLoop]:
    request = WorkloadRequest(settings=BRIEF, compile_backend="eager", loader_workers=None, backend="gloo")
    session = RankSession(verb="workload", request=request, hang_limit_s=600.0, supervised=False)
    (tmp_path / "rank").mkdir()
    session.folder = tmp_path / "rank"
    (session.folder / RANKS_FOLDER).mkdir()
    producer = WorkloadProducer(session)
    control = producer.join()
    producer.ranks = Ranks(session, control)
    producer.device = CpuDevice()
    yield RankLoop(producer, producer.device)
    control.close()
    session.heartbeat.disarm()


def measure_on(loop: RankLoop, case: Case, device: CpuDevice | None = None) -> Gathered:
    loop.device = cast("WorkloadProducer", loop.producer).device = device or CpuDevice()
    return loop.measure_case(case)


def test_an_unknown_backend_is_named() -> None:
    request = WorkloadRequest(settings=BRIEF, backend="carrier-pigeon")
    session = RankSession(verb="workload", request=request, hang_limit_s=600.0, supervised=False)
    producer = WorkloadProducer(session)
    with pytest.raises(UsageError, match="this torch was built without carrier-pigeon") as caught:
        producer.join()
    session.heartbeat.disarm()
    assert "built here: gloo" in str(caught.value.hint)


def test_a_case_that_killed_ranks_too_often_is_not_tried_again(loop: RankLoop, tmp_path: Path) -> None:
    deadly, other = (shared(name).benchmark.id for name in (RESNET, SMALL))
    cases = [
        find_workload(name).make_case(device="cpu", scale="tiny", parallel="ddp", world_size=1)
        for name in (deadly, other)
    ]
    folder = plan_cases(tmp_path / "runs", cases, ranks=1)
    for deaths in range(CRASH_LIMIT):
        with RunWriter(folder) as writer:
            assert writer.begin(cases[0]) == deaths
            writer.note_death()
    with RunWriter(folder) as writer:
        Lead(loop, writer, SilentProgress()).run([collect_system()], [])
    failed, measured = StoredRun(folder).cases()
    assert failed.result.failure is not None
    assert failed.result.failure.kind == "process_died"
    assert measured.result.status == "ok"


@pytest.mark.parametrize(
    ("error", "said", "where", "message"),
    [
        (RuntimeError("no such operator"), None, "rank 0", "no such operator"),
        (RuntimeError("[a] Connection closed by peer [b]"), MemoryError("no room"), "rank 1", "no room"),
        (RuntimeError("the pair was torn down"), MemoryError("no room"), "rank 1", "no room"),
        (RuntimeError("[a] Connection closed by peer [b]"), RuntimeError("Broken pipe"), None, None),
        (RuntimeError("[a] Connection closed by peer [b]"), None, None, None),
    ],
)
def test_a_lost_rank_is_blamed_only_for_what_it_said(
    loop: RankLoop, *, error: Exception, said: Exception | None, where: str | None, message: str | None
) -> None:
    session = loop.ranks.session
    assert session.folder is not None
    both: Any = SimpleNamespace(rank=0, size=2)
    if said is not None:
        write_rank_failure(session.folder / RANKS_FOLDER, 1, said)
    lost = Ranks(session, both).explain_loss(error)
    assert (lost.where if lost else None) == where
    assert message is None or (lost is not None and message in lost.message)


def test_ranks_that_were_started_differently_are_told_apart(loop: RankLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "gather", lambda self, value: [value, {**value, "trace": "true"}])
    with pytest.raises(UsageError, match="rank 1 was started differently: trace is true there"):
        loop.ranks.require_same_request()


class QueueDevice(CpuDevice):
    has_events = True


@pytest.mark.parametrize(
    ("name", "device", "least_s", "iterations"),
    [
        (SMALL, QueueDevice(), TRAIN_SAMPLE_S, None),
        (SMALL, CpuDevice(), BRIEF.min_sample_s, None),
        ("dlrm/ootb/infer/default.1dev-fp32", QueueDevice(), BRIEF.min_sample_s, 1),
    ],
)
def test_samples_are_as_long_as_on_one_device(
    loop: RankLoop, monkeypatch: pytest.MonkeyPatch, *, name: str, device: CpuDevice, least_s: float, iterations: int
) -> None:
    class SeenError(Exception):
        pass

    def look(step: Any, *, settings: MeasureSettings, **how: Any) -> None:
        assert (settings.min_sample_s, settings.iterations) == (least_s, iterations)
        raise SeenError

    monkeypatch.setattr("stepscope.run.producer.measure", look)
    case = find_workload(name).make_case(device="cpu", scale="tiny", parallel="ddp", world_size=1)
    refusal = measure_on(loop, case, device).refusal
    assert refusal is not None
    assert "SeenError" in refusal.failure.message


def test_samples_of_unequal_batches_are_whole_rounds(loop: RankLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    sentences = find_workload("xlmr/ootb/infer/fb-1dev-A-realdist")
    case = sentences.make_case(device="cpu", scale="tiny", parallel="ddp", world_size=1, batch_size=2)
    request = msgspec.structs.replace(loop.producer.request, loader_workers=0)  # type: ignore[attr-defined]
    monkeypatch.setattr(loop.producer, "request", request)
    found = measure_on(loop, case).outcome
    assert found.measurement is not None
    assert found.extra.observed.round_steps == 4
    assert set(found.measurement.iterations) == {1}
    assert found.measurement.sampled_iterations >= 4
    assert found.extra.facts.loader_s
    # No benchmark trains with batches of different shapes.
    monkeypatch.setattr(producing, "count_round", lambda batches, at_once: 4)
    case = find_workload(SMALL).make_case(device="cpu", scale="tiny", parallel="ddp", world_size=1)
    found = measure_on(loop, case).outcome
    assert found.measurement is not None
    assert all(count % 4 == 0 for count in found.measurement.iterations)


def test_a_model_is_gone_before_the_next_is_built(loop: RankLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without luck: the collector does nothing by itself here."""
    built: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    class WatchedStep(TrainStep):
        def __init__(self, *given: Any, **how: Any) -> None:
            super().__init__(*given, **how)
            alive.append(sum(one() is not None for one in built))
            built.append(weakref.ref(self._weights[0]))

    monkeypatch.setattr(shared_cases, "TrainStep", WatchedStep)
    torch.backends.cudnn.benchmark = True
    gc.disable()
    try:
        for parallel in ("fsdp", "ddp", "fsdp"):
            case = find_workload(RESNET).make_case(device="cpu", scale="tiny", parallel=parallel, world_size=1)
            assert measure_on(loop, case).refusal is None
            assert not torch.backends.cudnn.benchmark
    finally:
        gc.enable()
        torch.backends.cudnn.benchmark = False
    assert alive == [0, 0, 0]


def test_a_case_that_is_given_up_is_no_continuation(tmp_path: Path) -> None:
    """Rank 0 may be ended before it can write that the case has failed; who then writes it has measured nothing."""
    cases = [shared(SMALL), shared(RESNET)]
    folder = plan_cases(tmp_path, cases, ranks=2)
    with RunWriter(folder) as writer:
        writer.write_system(collect_system())
    failure = Failure(kind="rank_died", message="no room", rank=1, case=cases[0].key, stack=["in a step"])
    record_failure(folder, failure)
    give_up_case(folder)
    run = StoredRun(folder)
    assert [one.kind for one in run.failures] == ["rank_died"]
    assert [(one.case.key, one.status) for one in run.results] == [(cases[0].key, "failed")]
