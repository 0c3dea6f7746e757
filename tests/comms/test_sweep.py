"""Lists of operations, dtypes, reductions and roots in one command, and `all` of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from comms_runs import measure_cases

from stepscope.bench.comms.cases import Sweep, make_sweep
from stepscope.bench.comms.data import DTYPE_BYTES, REDUCTIONS
from stepscope.bench.comms.operations import operations
from stepscope.core.errors import UsageError

RANKS = 3
ROOTED = [name for name, operation in operations().items() if operation.rooted]
REDUCING = [name for name, operation in operations().items() if operation.reduces]


def sweep(*collectives: str, ranks: int = RANKS, **options: Any) -> Sweep:
    chosen: dict[str, Any] = {"sizes": [4096], "dtypes": ["float32"], **options}
    return make_sweep(collectives=collectives, world_size=ranks, backend="gloo", device="cpu", **chosen)


def points(made: Sweep) -> list[tuple[Any, ...]]:
    return [
        (
            case.benchmark.model,
            case.parameters["dtype"],
            case.parameters.get("reduction", "sum"),
            case.parameters.get("root", 0),
        )
        for case in made.cases
    ]


def test_every_dtype_of_a_list_is_measured_in_the_order_given() -> None:
    made = sweep("all_reduce", dtypes=["float32,float16", "int8", "float32"], sizes=[4096, 64])
    assert [case.parameters["dtype"] for case in made.cases] == ["float32"] * 2 + ["float16"] * 2 + ["int8"] * 2
    assert made.left_out == []


def test_all_dtypes_reductions_and_roots_are_every_combination_that_exists() -> None:
    made = sweep("all", dtypes=["all"], reductions=["all"], roots=["all"])
    found = points(made)
    assert len(found) == len(set(found))
    for name in operations():
        own = [point for point in found if point[0] == name]
        only = {"barrier": {"float64"}, **{one.name: {"uint8"} for one in operations().values() if one.objects}}
        assert {dtype for _, dtype, _, _ in own} == only.get(name, set(DTYPE_BYTES)), name
        assert {reduction for _, _, reduction, _ in own} == (set(REDUCTIONS) if name in REDUCING else {"sum"}), name
        assert {root for _, _, _, root in own} == (set(range(RANKS)) if name in ROOTED else {0}), name
    assert made.left_out == ["bool has no average"]
    assert not any(dtype == "bool" and reduction == "avg" for _, dtype, reduction, _ in found)


def test_all_operations_are_those_that_take_the_other_options() -> None:
    made = sweep("all", reductions=["max"])
    assert [name for name, *_ in points(made)] == REDUCING
    assert "broadcast reduces nothing" in made.left_out


def test_all_patterns_are_of_the_same_pairs() -> None:
    made = sweep("all", ranks=5, pattern="all")
    assert {case.benchmark.model for case in made.cases} == {"send_recv"}
    kinds = [(case.parameters.get("pattern"), case.parameters.get("window", 1)) for case in made.cases]
    assert kinds == [(None, 1), ("ping_pong", 1), (None, 16), ("bidirectional", 16)]
    assert all(case.parameters["sources"] == [0, 2] and case.parameters["targets"] == [1, 3] for case in made.cases)


def test_roots_are_members_of_the_smallest_group() -> None:
    made = sweep("broadcast", ranks=4, roots=["all"], groups="split:2")
    assert [root for *_, root in points(made)] == [0, 1]


@pytest.mark.parametrize(
    ("collectives", "options", "where"),
    [
        (["all_reduce", "broadcast"], {"reductions": ["max"]}, "--reduction"),
        (["all"], {"reductions": ["median"]}, "--reduction"),
        (["all"], {"dtypes": ["float31"]}, "--dtype"),
        (["all"], {"roots": ["0,3"]}, "--root"),
        (["broadcast"], {"roots": ["one"]}, "--root"),
        (["all_reduce"], {"roots": ["1"]}, "--root"),
        (["all"], {"dtypes": ["all"], "sizes": [4]}, "--sizes"),
        (["all_sum"], {}, "--collective"),
        (["all_reduce"], {"pattern": "all"}, "--pattern"),
        (["send_recv"], {"pattern": "all", "groups": "split:1"}, "--src-ranks"),
    ],
)
def test_what_was_named_and_does_not_exist_is_refused(
    collectives: list[str], options: dict[str, Any], where: str
) -> None:
    with pytest.raises(UsageError) as caught:
        sweep(*collectives, **options)
    assert caught.value.where == where


@pytest.mark.ranks
def test_two_ranks_measure_a_sweep_right(tmp_path: Path) -> None:
    made = sweep("all_reduce", "broadcast", ranks=2, dtypes=["float32,bfloat16,int8"], roots=["all"])
    _, cases = measure_cases(tmp_path, made.cases, ranks=2)
    assert len(cases) == 3 + 3 * 2
    assert all(case.result.status == "ok" and case.result.facts["wrong"] == 0 for case in cases)
