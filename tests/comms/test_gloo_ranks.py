"""Every operation, form and mode with real gloo ranks: right in every row, or a skip that says why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from comms_runs import cases_of, measure_cases, measure_in_turn, plan_run

from stepscope.bench.comms.data import DTYPE_BYTES, REDUCTIONS
from stepscope.bench.comms.operations import PATTERNS, operations
from stepscope.core.errors import RankDiedError, RankHungError, StepscopeError
from stepscope.launch.worker import BACKSTOP_S
from stepscope.records import Case
from stepscope.store import MeasuredCase, StoredRun, run_folders, verify_run

pytestmark = pytest.mark.ranks


REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatterv")


def sample(ranks: int, names: Sequence[str], values: Sequence[str]) -> list[tuple[str, str]]:
    """Every name with every value on two ranks; on more each value once, by a name in turn."""
    if ranks == 2:
        return [(name, value) for value in values for name in names]
    return [(names[i % len(names)], value) for i, value in enumerate(values)]


def variants(ranks: int) -> list[Case]:
    """One of each: operations, forms, placements, reductions, dtypes, patterns, modes, groups."""
    matrix = [float((i * j) % 3) for i in range(ranks) for j in range(ranks)]
    wanted: list[tuple[str, dict[str, Any]]] = [
        # One element among ranks, uneven parts, and whole parts, which all that follows on four ranks has too.
        *((name, {"sizes": (4, 40, 4096) if ranks == 2 else (40,)}) for name in operations()),
        *((name, {"form": "list"}) for name in ("all_gather", "reduce_scatter", "all_to_all", "all_to_allv")),
        *((name, {"placement": "out_of_place"}) for name in ("all_reduce", "reduce", "broadcast")),
        *((name, {"placement": "in_place"}) for name in ("all_gather", "reduce_scatter")),
        *((name, {"reduction": reduction}) for name, reduction in sample(ranks, REDUCING, REDUCTIONS[1:])),
        *((name, {"dtype": dtype}) for name, dtype in sample(ranks, ("all_reduce", "all_gather"), DTYPES)),
        *(("send_recv", {"pattern": pattern}) for pattern in PATTERNS if pattern != "ring"),
        *(("send_recv", {"pattern": pattern, "window": 5}) for pattern in PATTERNS if pattern != "ping_pong"),
        *((name, {"mode": "nonblocking", "depth": 3}) for name in operations() if name not in WAITING),
        *((name, {"coalesce": 3}) for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast")),
        *((name, {"root": 1}) for name, one in operations().items() if one.rooted),
        ("all_to_allv", {"skew": 2.0}),
        ("all_to_allv", {"matrix": matrix}),
        *(
            ("send_recv", {"sources": sources, "targets": targets, "pattern": pattern, "window": window})
            for sources, targets in (([1], [0]), ([ranks - 1, 1], [0, ranks - 2]))
            for pattern, window in ((None, 1), (None, 4), ("ping_pong", 1), ("bidirectional", 3))
            if ranks == 4 or len(sources) == 1
        ),
        *(
            (name, {"matrix": [float(rank % 3) for rank in range(ranks)], "form": form})
            for name in ("all_gatherv", "reduce_scatterv", "all_to_allv")
            for form in ("tensor", "list")
        ),
        ("all_reduce", {"sizes": (3_000_000,)}),
    ]
    if ranks == 4:
        for name in ("all_reduce", "all_to_all", "broadcast", "send_recv"):
            wanted.append((name, {"groups": "split:2"}))
            wanted.append((name, {"groups": "mesh:dp=2,tp=2/tp", "one_group_at_a_time": True}))
        wanted.append(("all_reduce", {"groups": "colours:0,1,1,1"}))
        wanted.append(("all_reduce", {"groups": "colours:0,0,-,-"}))
    return [case for name, options in wanted for case in cases_of(name, ranks=ranks, **options)]


DTYPES = [dtype for dtype in DTYPE_BYTES if dtype != "float32"]
WAITING = {one.name for one in operations().values() if one.objects or one.made_of}
"""Operations without a non-blocking mode."""
LACKING = {"int16", "float8_e4m3fn", "float8_e5m2"}
"""dtypes that gloo does not move or reduce."""


@pytest.fixture(scope="module", params=[2, 4])
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[MeasuredCase]:
    ranks = request.param
    run, cases = measure_cases(tmp_path_factory.mktemp("gloo"), variants(ranks), ranks=ranks)
    assert verify_run(run) == []
    return cases


@pytest.mark.timeout(180)
def test_every_row_is_right_or_a_skip_that_says_why(measured: list[MeasuredCase]) -> None:
    assert len(measured) > 100
    for one in measured:
        case, result = one.result.case, one.result
        if result.status == "skipped":
            assert case.parameters["dtype"] in LACKING, (case.label, result.failure)
            assert result.failure is not None
            assert result.failure.kind == "unsupported"
            continue
        assert result.status == "ok", (case.label, result.failure)
        if case.benchmark.model == "barrier":
            assert "wrong" not in result.facts
        else:
            assert result.facts["wrong"] == 0
            assert int(result.facts["checked"]) >= 3
        assert one.summary() is not None


def test_what_gloo_lacks_is_composed_and_the_row_says_so(measured: list[MeasuredCase]) -> None:
    composed = {
        one.result.case.benchmark.model
        for one in measured
        if "broadcasts" in str(one.result.facts.get("composed")) or "reduces" in str(one.result.facts.get("composed"))
    }
    assert composed == {"all_gatherv", "reduce_scatterv"}


def test_samples_are_kept_by_iteration_and_rank_with_their_arrivals(measured: list[MeasuredCase]) -> None:
    for one in measured:
        if one.result.status != "ok":
            continue
        asked = one.result.case.parameters
        messages = 2 if asked.get("pattern") == "ping_pong" else int(str(asked.get("window", 1)))
        for rank in one.samples:
            assert set(rank.iterations) == {int(str(asked.get("depth", 1))) * messages}
            assert len(rank.extra_s["arrival"]) == len(rank.seconds())
        firsts = zip(*(rank.extra_s["arrival"] for rank in one.samples), strict=True)
        assert all(min(arrivals) == 0 for arrivals in firsts)


def test_sizes_that_do_not_divide_are_rounded_and_said(measured: list[MeasuredCase]) -> None:
    rounded = [one for one in measured if "rounded" in {notice.kind for notice in one.result.notices}]
    assert rounded
    for one in rounded:
        assert one.result.facts["size_bytes"] != one.result.case.parameters["size_bytes"]


def test_one_group_at_a_time_leaves_the_others_out(measured: list[MeasuredCase]) -> None:
    alone = [one for one in measured if "group" in one.result.case.parameters]
    if not alone:
        pytest.skip("two ranks make no two groups")
    for one in alone:
        ranks = [rank.rank for rank in one.samples]
        assert ranks == ([0, 1] if one.result.case.parameters["group"] == 0 else [2, 3])
        assert one.result.facts["members"] == 2


# Planted corruption, and ranks that go astray


@pytest.fixture(autouse=True)
def workers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


PLANTED = [("all", None, True), ("sample", None, True), ("off", None, False), ("all", 4, True)]


def spoiled_cases(only_call: int | None) -> list[Case]:
    nothing = {"barrier"}
    # Rank 1 is spoiled: where only the root gets something, rank 1 is the root; where only the others do, rank 0 is.
    roots = {"reduce": 1, "gather": 1, "incast": 1, "gather_object": 1}
    names = [name for name in operations() if name not in nothing] if only_call is None else ["all_reduce"]
    cases = [case for name in names for case in cases_of(name, ranks=2, root=roots.get(name, 0))]
    if only_call is None:
        cases += cases_of("all_reduce", ranks=2, mode="nonblocking", depth=3)
        cases += cases_of("all_reduce", ranks=2, coalesce=3)
        cases += cases_of("all_reduce", ranks=2, placement="out_of_place")
    return cases


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int | None], list[MeasuredCase]]:
    """A run for each kind of check, all by the same ranks."""
    store = tmp_path_factory.mktemp("spoiled")
    keys = [(check, only_call) for check, only_call, _ in PLANTED]
    runs = [
        plan_run(store, spoiled_cases(only_call), ranks=2, check=check, tag=only_call and str(only_call))
        for check, only_call in keys
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        measured = measure_in_turn(runs, ranks=2, target="comms_runs:run_spoiled_in_turn")
    return dict(zip(keys, measured, strict=True))


@pytest.mark.parametrize(("check", "only_call", "found"), PLANTED)
def test_a_planted_corruption_is_found_by_every_check_that_claims_to(
    spoiled: dict[tuple[str, int | None], list[MeasuredCase]], check: str, only_call: int | None, found: bool
) -> None:
    measured = spoiled[check, only_call]
    assert len(measured) == len(spoiled_cases(only_call))
    for one in measured:
        assert one.result.status == ("failed" if found else "ok"), one.result.case.label
        if found:
            assert one.result.failure is not None
            assert one.result.failure.kind == "wrong_result"
            assert "rank 1" in one.result.failure.message
            assert int(one.result.facts["wrong"]) >= 1
            assert one.samples, "evidence is kept for a wrong row too"
        else:
            assert "wrong" not in one.result.facts


def failed_run(tmp_path: Path, target: str, cases: list[Case], error: type[StepscopeError], **request: object) -> str:
    with pytest.raises(error) as caught:
        measure_cases(tmp_path, cases, ranks=2, target=f"comms_runs:{target}", **request)
    return caught.value.message


def test_ranks_with_different_arguments_are_told_apart(tmp_path: Path) -> None:
    failed_run(tmp_path, "run_with_other_arguments", cases_of("all_reduce", ranks=2), RankDiedError)
    failures = StoredRun(run_folders(tmp_path)[0]).failures
    assert any("rank 1 was started differently: check" in failure.message for failure in failures), failures


def test_a_rank_that_never_joins_is_named(tmp_path: Path) -> None:
    failed_run(tmp_path, "run_without_rank_1", cases_of("all_reduce", ranks=2), RankDiedError, hang_timeout_s=3.0)
    failures = StoredRun(run_folders(tmp_path)[0]).failures
    wanted = f"rank 1 sent no heartbeat for {3 + BACKSTOP_S:.0f} s (it never joined)"
    assert any(wanted in failure.message for failure in failures), failures


def test_a_rank_that_is_lost_in_an_operation_is_named_and_finished_cases_stay(tmp_path: Path) -> None:
    cases = [*cases_of("all_reduce", ranks=2), *cases_of("all_gather", ranks=2)]
    message = failed_run(tmp_path, "run_with_rank_1_lost", cases, RankHungError, hang_timeout_s=4.0)
    run = StoredRun(run_folders(tmp_path)[0])
    assert [result.case.benchmark.model for result in run.results] == ["all_reduce"]
    assert "rank 1" in message
    (failure,) = run.failures
    assert failure.rank == 1
    assert failure.case == cases[1].key
