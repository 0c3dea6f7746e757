from __future__ import annotations

import pytest

from stepscope.errors import UsageError
from stepscope.measure import CaseSkipped, WrongResultError
from stepscope.ops import Operator, Work, find_operator, make_cases, operators, parse_shape
from stepscope.ops.gemm import Gemm
from stepscope.ops.reference import check_close
from stepscope.ops.worker import prepare_case
from stepscope.records import Case

SMALL = {
    "gemm": "m=7,n=5,k=3",
    "linear": "batch=4,in=6,out=3",
    "embedding_bag": "rows=11,dim=4,pooling=3,batch=5",
}

HAND_COUNTED = [
    ("gemm", "forward", "float32", Work(flops=2 * 7 * 5 * 3, bytes=4 * (21 + 15 + 35))),
    ("gemm", "backward", "float32", Work(flops=4 * 7 * 5 * 3, bytes=4 * (35 + 2 * 21 + 2 * 15))),
    ("gemm", "forward", "bfloat16", Work(flops=210, bytes=2 * 71)),
    ("linear", "forward", "float32", Work(flops=2 * 4 * 6 * 3 + 12, bytes=4 * (24 + 18 + 3 + 12))),
    ("linear", "backward", "float32", Work(flops=4 * 4 * 6 * 3 + 12, bytes=4 * (12 + 48 + 36 + 3))),
    # 15 lookups of 16 bytes, 15 indices and 5 offsets of 8 bytes, 5 outputs of 16 bytes
    ("embedding_bag", "forward", "float32", Work(flops=60, bytes=15 * 16 + 20 * 8 + 5 * 16)),
    # the table's gradient cleared, each lookup read and written, indices, upstream
    ("embedding_bag", "backward", "float32", Work(flops=60, bytes=11 * 16 + 2 * 15 * 16 + 20 * 8 + 5 * 16)),
]


def one_case(name: str, direction: str = "forward", dtype: str = "float32", shape: str | None = None) -> Case:
    shapes = [SMALL[name] if shape is None else shape]
    return make_cases(names=[name], shapes=shapes, dtypes=[dtype], directions=[direction], device="cpu")[0]


@pytest.mark.parametrize(("name", "direction", "dtype", "work"), HAND_COUNTED)
def test_work_is_what_a_hand_counts(name: str, direction: str, dtype: str, work: Work) -> None:
    operator = find_operator(name)
    assert operator.work(parse_shape(SMALL[name], operator), dtype, direction) == work


@pytest.mark.parametrize("name", list(operators()))
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_operators_run_and_agree_with_float64(name: str, direction: str, dtype: str) -> None:
    prepared = prepare_case(one_case(name, direction, dtype))
    prepared.body()
    prepared.body()
    assert prepared.check is not None
    prepared.check()
    assert prepared.score is not None
    assert prepared.score.work > 0


def test_a_gemm_of_the_reference_table_has_its_gflop() -> None:
    """PARAM's shape A1: 128 × 4096 × 4096 is 4.295 GFLOP and 71.3 MB in float32."""
    work = find_operator("gemm").work({"m": 128, "n": 4096, "k": 4096}, "float32", "forward")
    assert work.flops / 1e9 == pytest.approx(4.295, abs=5e-4)
    assert work.bytes / 1e6 == pytest.approx(71.3, abs=0.05)


def test_wrong_results_are_found() -> None:
    import torch

    reference = torch.ones(1000, dtype=torch.float64)
    check_close("x", torch.ones(1000), reference)
    for spoil in (lambda t: t.__setitem__(7, 1.1), lambda t: t.__setitem__(7, float("nan"))):
        result = torch.ones(1000)
        spoil(result)
        with pytest.raises(WrongResultError):
            check_close("x", result, reference)


def test_shapes_take_defaults_and_suffixes() -> None:
    assert parse_shape("m=1K", find_operator("gemm")) == {"m": 1024, "n": 1024, "k": 1024}


@pytest.mark.parametrize("shape", ["m=0", "m=-4", "m=abc", "q=3", "m", "m=1,m=2", "m=1.5", "m=9000T", "m=1;n=2"])
def test_impossible_shapes_are_refused_with_an_example(shape: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_shape(shape, find_operator("gemm"))
    assert caught.value.hint


def test_unknown_names_are_refused_with_a_suggestion() -> None:
    with pytest.raises(UsageError) as caught:
        find_operator("gem")
    assert "gemm" in (caught.value.hint or "")
    for wrong in ({"dtypes": ["float31"]}, {"directions": ["sideways"]}):
        arguments = {"names": ["gemm"], "shapes": [], "dtypes": ["float32"], "directions": ["forward"], **wrong}
        with pytest.raises(UsageError):
            make_cases(**arguments, device="cpu")  # type: ignore[arg-type]


def test_what_does_not_fit_is_skipped_before_it_is_tried() -> None:
    with pytest.raises(CaseSkipped, match="needs") as caught:
        prepare_case(one_case("gemm", shape="m=1M,n=1M,k=1M"))
    assert caught.value.failure.kind == "does_not_fit"


def test_bfloat16_is_skipped_where_it_would_kill_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.ops.worker.bfloat16_works", lambda: False)
    with pytest.raises(CaseSkipped, match="ends the process") as caught:
        prepare_case(one_case("gemm", dtype="bfloat16"))
    assert "ONEDNN_MAX_CPU_ISA" in (caught.value.failure.hint or "")


def test_operators_of_other_packages_are_found_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepscope.ops import registry

    class Other(Gemm):
        name = "other_gemm"

    class Entry:
        name, value = "other", "package:Other"

        def __init__(self, kind: type[Operator]) -> None:
            self._kind = kind

        def load(self) -> type[Operator]:
            return self._kind

    monkeypatch.setattr(registry, "entry_points", lambda group: [Entry(Other)])
    registry.operators.cache_clear()
    assert "other_gemm" in registry.operators()
    monkeypatch.setattr(registry, "entry_points", lambda group: [Entry(Gemm)])
    registry.operators.cache_clear()
    with pytest.raises(UsageError, match="already taken"):
        registry.operators()
    registry.operators.cache_clear()
    monkeypatch.undo()
