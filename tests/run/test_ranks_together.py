"""What ranks must manage all or none: a thread per rank, real waiting, no processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from builders import make_case, make_folder, make_system
from stepscope.core.errors import RankDiedError
from stepscope.launch.worker import Session
from stepscope.measure import QUICK, CpuDevice, SilentProgress
from stepscope.records import Case, CommunicationRequest
from stepscope.records.kinds import OperatorObserved
from stepscope.run.control import Alone
from stepscope.run.producer import Folded, Prepared, Producer, RankOutcome
from stepscope.run.rank import Lead, RankLoop
from stepscope.run.ranks import CaseEndedError, CaseSkipped, Ranks
from stepscope.store import RunWriter, StoredRun, verify_run

T = TypeVar("T")


class Meeting:
    """Where the threads of one world exchange values."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=20)
        self.given: list[Any] = [None] * size
        self.marks: set[str] = set()
        self.renewals = 0

    def share(self, rank: int, value: Any) -> list[Any]:
        self.given[rank] = value
        self.barrier.wait()
        everybody = list(self.given)
        self.barrier.wait()
        return everybody


class ThreadControl(Alone):
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.size, self._meeting = rank, meeting.size, meeting

    def barrier(self) -> None:
        self._meeting.barrier.wait()

    def broadcast_value(self, value: T | None, source: int = 0) -> T:
        received: T = self._meeting.share(self.rank, value)[source]
        return received

    def gather_values(self, value: T) -> list[T] | None:
        everybody: list[T] = self._meeting.share(self.rank, value)
        return everybody if self.rank == 0 else None

    def set_mark(self, name: str) -> None:
        self._meeting.marks.add(name)

    def has_marks(self, names: list[str]) -> bool:
        return self._meeting.marks.issuperset(names)

    def renew(self) -> None:
        self._meeting.renewals += self.rank == 0


class PatientSession(Session):
    hang_limit_s = 1.5
    """A third of it is how long a rank that failed alone waits for the others."""

    def __init__(self, rank: int) -> None:
        super().__init__(verb="ops", request=CommunicationRequest(backend="threads"), world_size=3)
        self.rank, self.kept, self.forgotten = rank, [], 0  # type: ignore[var-annotated]

    def keep_failure(self, error: BaseException) -> None:
        self.kept.append(str(error))

    def forget_failure(self) -> None:
        self.forgotten += 1


def on_every_rank(body: Callable[[Ranks], T], size: int = 3) -> list[T | BaseException]:
    meeting = Meeting(size)

    def be_rank(rank: int) -> T | BaseException:
        try:
            return body(Ranks(PatientSession(rank), ThreadControl(meeting, rank)))
        except BaseException as error:  # noqa: BLE001 - what each rank raises is what is looked at
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(be_rank, range(size)))


def fail_on(*failing: int, error: Callable[[], Exception]) -> Callable[[Ranks], str]:
    def body(ranks: Ranks) -> str:
        def step() -> str:
            if ranks.rank in failing:
                raise error()
            return f"rank {ranks.rank}"

        return ranks.together(step)

    return body


def test_what_every_rank_manages_is_its_own() -> None:
    assert on_every_rank(fail_on(error=ValueError)) == ["rank 0", "rank 1", "rank 2"]


@pytest.mark.parametrize("failing", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_one_that_fails_ends_the_case_on_all_for_the_same_reason(failing: tuple[int, ...]) -> None:
    ends = on_every_rank(fail_on(*failing, error=lambda: ValueError("no such layout")))
    assert all(isinstance(end, CaseEndedError) for end in ends)
    assert {end.refusal.status for end in ends if isinstance(end, CaseEndedError)} == {"failed"}
    assert {str(end) for end in ends} == {"ValueError: no such layout"}


def test_a_skip_on_one_rank_is_a_skip_on_all() -> None:
    ends = on_every_rank(fail_on(1, error=lambda: CaseSkipped("does_not_fit", "no room", "smaller", rank=1)))
    for end in ends:
        assert isinstance(end, CaseEndedError)
        assert end.refusal.status == "skipped"
        assert (end.refusal.failure.kind, end.refusal.failure.rank) == ("does_not_fit", 1)


def test_the_cause_counts_and_not_what_the_loss_of_it_caused() -> None:
    def body(ranks: Ranks) -> None:
        def step() -> None:
            raise RuntimeError("Connection closed by peer" if ranks.rank == 0 else "out of registers")

        ranks.together(step)

    assert {str(end) for end in on_every_rank(body)} == {"RuntimeError: out of registers"}


def test_a_rank_that_leaves_an_exchange_alone_dies_with_its_own_reason() -> None:
    """The others are in the exchange: nothing but its end frees them."""
    left = threading.Event()

    def body(ranks: Ranks) -> str:
        def step() -> str:
            if ranks.rank == 1:
                raise MemoryError("no room for the gradients")
            if not left.wait(10):
                raise AssertionError("nobody left")
            raise RuntimeError("Connection closed by peer")

        try:
            return ranks.together(step, exchanges=True)
        except RankDiedError:
            ranks.control._meeting.barrier.abort()  # type: ignore[attr-defined]
            left.set()
            raise

    ends = on_every_rank(body)
    assert isinstance(ends[1], RankDiedError)
    assert "no room for the gradients" in str(ends[1])
    assert all(isinstance(end, threading.BrokenBarrierError) for end in (ends[0], ends[2])), "the loss is seen there"


def test_ranks_that_left_an_exchange_alike_get_new_groups() -> None:
    meeting = Meeting(2)

    def be_rank(rank: int) -> list[bool]:
        ranks = Ranks(PatientSession(rank), ThreadControl(meeting, rank))
        with pytest.raises(CaseEndedError):
            ranks.together(lambda: 1 / 0, exchanges=True)
        return [ranks.begin_case(), ranks.begin_case()]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(be_rank, range(2))) == [[True, False]] * 2
    assert meeting.renewals == 1


class CountingProducer(Producer):
    """A kind of its own on several ranks: it writes a producer and no rank loop."""

    settings = QUICK

    def __init__(self, session: Session, ranks: Ranks) -> None:
        super().__init__(session)
        self.ranks = ranks

    def open(self) -> CpuDevice:
        return CpuDevice()

    def prepare(self, case: Case) -> Prepared:
        self.ranks.together(lambda: self._require(case))
        return Prepared(body=lambda: None, observed=OperatorObserved(input_sets=self.ranks.rank))

    def _require(self, case: Case) -> None:
        if case.parameters["m"] == 2 and self.ranks.rank == 2:
            raise CaseSkipped("unsupported", "rank 2 has no such unit")
        if case.parameters["m"] == 3 and self.ranks.rank == 1:
            raise ValueError("rank 1 cannot")

    def fold(self, case: Case, ranks: Any, clock_error_s: float | None) -> Folded:
        folded: list[RankOutcome] = list(ranks)
        return Folded(observed=OperatorObserved(input_sets=len(folded)))


def test_a_new_kind_on_three_ranks_needs_no_loop_of_its_own(tmp_path: Path) -> None:
    cases = [make_case(m=m) for m in (1, 2, 3, 4)]
    folder = make_folder(tmp_path, cases)
    meeting = Meeting(3)

    def be_rank(rank: int) -> None:
        session = PatientSession(rank)
        ranks = Ranks(session, ThreadControl(meeting, rank))
        loop = RankLoop(CountingProducer(session, ranks), CpuDevice())
        if rank:
            loop.follow()
            return
        with RunWriter(folder) as writer:
            Lead(loop, writer, SilentProgress()).run([make_system()], [])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(be_rank, range(3)))
    run = StoredRun(folder)
    assert verify_run(run) == []
    assert [one.result.status for one in run.cases()] == ["ok", "skipped", "failed", "ok"]
    for one in (run.cases()[0], run.cases()[3]):
        assert one.result.observed == OperatorObserved(input_sets=3)
        assert one.result.timing == "slowest_rank"
        assert [samples.rank for samples in one.samples] == [0, 1, 2]
        assert len({len(samples) for samples in one.samples}) == 1
