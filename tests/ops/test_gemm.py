from __future__ import annotations

from typing import Any

import pytest
from op_checks import count_by_hand, full_shape, run_and_check, traffic_is_that_of_the_tensors

from stepscope.bench.ops import Work, find_operator
from stepscope.bench.ops.build import build
from stepscope.bench.ops.families.gemm import (
    LAYOUTS,
    LEARNING_RATE,
    AddMm,
    Bmm,
    Gemm,
    Linear,
    Mlp,
    MlpTrain,
    _require_served,
)
from stepscope.bench.ops.inputs import Maker
from stepscope.bench.ops.operator import UnsupportedError
from stepscope.bench.ops.reference import check_close
from stepscope.run.producer import WrongResultError

GEMM = {"m": 7, "n": 5, "k": 3}
BMM = {"batch": 2, "m": 7, "n": 5, "k": 3}
LINEAR = {"batch": 4, "in": 6, "out": 3}
MLP = {"batch": 4, "widths": "6-5-3"}

HAND_COUNTED: list[tuple[Any, dict[str, Any], str, str, Work]] = [
    (Gemm, GEMM, "float32", "forward", Work(2 * 7 * 5 * 3, 4 * (7 * 3 + 3 * 5 + 7 * 5))),
    (Gemm, GEMM, "float32", "backward", Work(4 * 7 * 5 * 3, 4 * (7 * 5 + 2 * 7 * 3 + 2 * 3 * 5))),
    (Gemm, GEMM, "tf32", "forward", Work(210, 4 * 71)),
    (Gemm, GEMM, "bfloat16", "forward", Work(210, 2 * 71)),
    # float8 in, bfloat16 out; int8 in, int32 out
    (Gemm, GEMM, "float8_e4m3fn", "forward", Work(210, (21 + 15) + 2 * 35)),
    (Gemm, GEMM, "int8", "forward", Work(210, (21 + 15) + 4 * 35)),
    (AddMm, GEMM, "float32", "forward", Work(210 + 35, 4 * (21 + 15 + 35 + 35))),
    (AddMm, GEMM, "float32", "backward", Work(420, 4 * (35 + 2 * 21 + 2 * 15))),
    (Bmm, BMM, "float16", "forward", Work(2 * 210, 2 * 2 * 71)),
    (Bmm, BMM, "float16", "backward", Work(2 * 420, 2 * 2 * (35 + 42 + 30))),
    (Linear, LINEAR, "float32", "forward", Work(2 * 4 * 6 * 3 + 12, 4 * (24 + 18 + 3 + 12))),
    (Linear, LINEAR, "float32", "backward", Work(4 * 4 * 6 * 3 + 12, 4 * (12 + 48 + 36 + 3))),
    # layers 6→5 and 5→3: 45 weights, 8 biases; an addition for each of 8 outputs a row, a ReLU for each of 5
    (Mlp, MLP, "float32", "forward", Work(2 * 4 * 45 + 4 * 8 + 4 * 5, 4 * (4 * 6 + 45 + 8 + 4 * 3))),
    # upstream, input twice (read, and its gradient), weights twice, bias gradients, kept hidden outputs
    (Mlp, MLP, "float32", "backward", Work(4 * 4 * 45 + 4 * 8 + 4 * 5, 4 * (12 + 48 + 90 + 8 + 20))),
    (MlpTrain, MLP, "float32", "forward", Work(6 * 4 * 45, 4 * (24 + 2 * (45 + 8)) + 8 * 4)),
]


@pytest.mark.parametrize(("kind", "shape", "dtype", "direction", "work"), HAND_COUNTED)
def test_work_is_what_a_hand_counts(kind: Any, shape: Any, dtype: str, direction: str, work: Work) -> None:
    count_by_hand(kind, shape, dtype, direction, work)


@pytest.mark.parametrize("kind", [Gemm, AddMm, Bmm, Linear, Mlp])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_declared_traffic_is_that_of_the_tensors(kind: Any, dtype: str) -> None:
    traffic_is_that_of_the_tensors(kind, dtype)


@pytest.mark.parametrize("kind", [Gemm, AddMm, Bmm, Linear, Mlp])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_agrees_with_float64(kind: Any, direction: str, dtype: str) -> None:
    run_and_check(kind(), direction, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_layouts(layout: str, direction: str) -> None:
    run_and_check(Gemm(), direction, layout=layout)
    run_and_check(AddMm(), direction, layout=layout)
    for batching in ("packed", "strided"):
        run_and_check(Bmm(), direction, layout=layout, batching=batching)


def test_layouts_are_what_they_say() -> None:
    operator = Gemm()
    for layout in LAYOUTS:
        inputs = operator.make_inputs(full_shape(operator, layout=layout), Maker("float32", "cpu"))
        assert [not inputs[side].is_contiguous() for side in ("left", "right")] == [one == "t" for one in layout]
    strided = Bmm().make_inputs(full_shape(Bmm(), batching="strided"), Maker("float32", "cpu"))
    assert strided["left"].shape == (3, 16, 8)
    assert strided["left"].stride() == (8, 3 * 8, 1)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_short_dtypes_multiply(dtype: str) -> None:
    run_and_check(Gemm(), "forward", dtype, layout="nt")


def test_short_dtypes_have_no_gradient() -> None:
    for dtype in ("int8", "float8_e4m3fn"):
        with pytest.raises(RuntimeError, match=r"not implemented|floating point dtype can require"):
            run_and_check(Gemm(), "backward", dtype, layout="nt")


@pytest.mark.parametrize("layout", ["nn", "tn", "tt"])
def test_float8_is_measured_only_as_it_is_laid(layout: str) -> None:
    assert Gemm().tiny["layout"] == "nt", "the set `tiny` runs in every dtype"
    with pytest.raises(UnsupportedError, match=f"layout={layout} .*: ask for layout=nt"):
        run_and_check(Gemm(), "forward", "float8_e4m3fn", layout=layout)
    run_and_check(Gemm(), "forward", "int8", layout=layout)


GPU_RULES: list[tuple[str, dict[str, int], str]] = [
    ("int8", {"m": 16, "n": 16, "k": 16}, "m above 16"),
    ("int8", {"m": 17, "n": 12, "k": 16}, "n and k that are multiples of 8"),
    ("int8", {"m": 17, "n": 16, "k": 12}, "n and k that are multiples of 8"),
    ("float8_e4m3fn", {"m": 8, "n": 16, "k": 16}, "m, n and k that are multiples of 16"),
    ("float8_e4m3fn", {"m": 16, "n": 24, "k": 16}, "m, n and k that are multiples of 16"),
    ("float8_e4m3fn", {"m": 16, "n": 16, "k": 24}, "m, n and k that are multiples of 16"),
]


@pytest.mark.parametrize(("dtype", "dims", "rule"), GPU_RULES)
def test_what_a_gpu_does_not_multiply_is_not_tried(dtype: str, dims: dict[str, int], rule: str) -> None:
    class OnGpu(Maker):
        """Only its device is asked for: nothing is made."""

        def __init__(self) -> None:
            self.dtype_name, self.device = dtype, "cuda:0"

    with pytest.raises(UnsupportedError, match=rule):
        Gemm().make_inputs({**dims, "layout": "nt"}, OnGpu())
    made = Gemm().make_inputs({**dims, "layout": "nt"}, Maker(dtype, "cpu"))
    assert made["left"].shape == (dims["m"], dims["k"]), "a CPU has no such rule"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_products_of_other_dtypes_have_no_rule(dtype: str) -> None:
    _require_served({"m": 1, "n": 3, "k": 5, "layout": "tn"}, dtype, "cuda")


@pytest.mark.parametrize("widths", ["64", "", "64-", "64-x-8", "64-0-8", "-3-4"])
def test_widths_that_cannot_be(widths: str) -> None:
    for operator in (Mlp(), MlpTrain()):
        with pytest.raises(ValueError, match="not a list of widths"):
            operator.check_shape({"batch": 1, "widths": widths})


def test_a_training_step_trains() -> None:
    """The first layer's bias after one step is what autograd and the rule by hand give."""
    import torch

    operator = MlpTrain()
    shape = full_shape(operator)
    inputs = operator.make_inputs(shape, Maker("float64", "cpu"))
    first = {name: tensor.clone() for name, tensor in inputs.items()}
    loss = operator.bind(shape, inputs)()
    bias = first["bias0"].requires_grad_()
    hidden = torch.relu(first["input"] @ first["weight0"].T + bias)
    logits = hidden @ first["weight1"].T + first["bias1"]
    expected_loss = torch.nn.functional.cross_entropy(logits, first["target"])
    (gradient,) = torch.autograd.grad(expected_loss, bias)
    assert float(loss) == pytest.approx(float(expected_loss.detach()))
    assert torch.allclose(inputs["bias0"], first["bias0"] - LEARNING_RATE * gradient)


TRAINED = ("float32", "float16", "bfloat16", "float64")
STACKS = ({}, {"batch": 96, "widths": "128-128-128-128"})


@pytest.mark.parametrize("dtype", TRAINED)
@pytest.mark.parametrize("stack", [*STACKS, {"batch": 1, "widths": "2-2"}, {"batch": 2048, "widths": "16-16-64"}])
def test_training_steps_agree_with_float64(dtype: str, stack: dict[str, Any]) -> None:
    run_and_check(MlpTrain(), "forward", dtype, **stack)


def step_otherwise(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    import torch

    right = torch.optim.SGD.step

    def steps(optimizer: Any) -> None:
        for _ in range(times):
            right(optimizer)

    monkeypatch.setattr(torch.optim.SGD, "step", steps)


@pytest.mark.parametrize("dtype", TRAINED)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("times", [0, 2])
def test_a_step_left_out_or_made_twice_is_found(
    dtype: str, stack: dict[str, Any], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 16 bits too, where most steps are smaller than the rounding of their weight."""
    step_otherwise(monkeypatch, times)
    with pytest.raises(WrongResultError, match=r"mlp_train .*: the step is off by"):
        run_and_check(MlpTrain(), "forward", dtype, **stack)


@pytest.mark.parametrize("dtype", TRAINED)
@pytest.mark.parametrize("stack", STACKS)
def test_a_wrong_gradient_is_found(dtype: str, stack: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """By a twentieth, with the right loss."""
    import torch

    right = torch.nn.functional.cross_entropy

    def steeper(*given: Any) -> torch.Tensor:
        loss = right(*given)
        return loss + 0.05 * (loss - loss.detach())

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", steeper)
    with pytest.raises(WrongResultError, match="mlp_train gradient of"):
        run_and_check(MlpTrain(), "forward", dtype, **stack)


@pytest.mark.parametrize("dtype", TRAINED)
def test_a_step_that_does_nothing_is_found(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MlpTrain, "bind", lambda *given: lambda: None)
    with pytest.raises(WrongResultError, match="no gradient"):
        run_and_check(MlpTrain(), "forward", dtype)


@pytest.mark.parametrize("dtype", TRAINED)
def test_a_value_rounded_across_zero_spoils_no_check(dtype: str) -> None:
    run_and_check(Mlp(), "backward", dtype, batch=96, widths="128-128-128-128")


@pytest.mark.parametrize("dtype", TRAINED)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_stack_that_drops_its_hidden_values_is_found(
    dtype: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    right = torch.nn.functional.relu
    # No hidden element would pass, and no gradient would be left to be compared.
    monkeypatch.setattr(torch.nn.functional, "relu", lambda value: right(value) * 0)
    with pytest.raises(WrongResultError):
        Mlp().check(full_shape(Mlp()), Mlp().make_inputs(full_shape(Mlp()), Maker(dtype, "cpu")), dtype, direction)


def test_a_gemm_of_the_reference_table_has_its_gflop() -> None:
    """PARAM's shape A1: 128 × 4096 × 4096 is 4.295 GFLOP and 71.3 MB in float32."""
    work = find_operator("gemm").work({"m": 128, "n": 4096, "k": 4096}, "float32", "forward")
    assert work.flops / 1e9 == pytest.approx(4.295, abs=5e-4)
    assert work.bytes / 1e6 == pytest.approx(71.3, abs=0.05)


def test_wrong_results_are_found() -> None:
    import torch

    reference = torch.ones(1000, dtype=torch.float64)
    check_close("x", torch.ones(1000), reference)
    for value in (1.1, float("nan")):
        result = torch.ones(1000)
        result[7] = value
        with pytest.raises(WrongResultError):
            check_close("x", result, reference)
    with pytest.raises(WrongResultError, match="shape"):
        check_close("x", torch.ones(999), reference)
    check_close("x", torch.full((1000,), 1.001), reference, "tf32")
    with pytest.raises(WrongResultError, match="tf32"):
        check_close("x", torch.full((1000,), 1.01), reference, "tf32")


class _Spoiled(Gemm):
    """A library that multiplies wrongly."""

    def bind(self, shape: Any, inputs: Any) -> Any:
        right = super().bind(shape, inputs)
        if inputs["left"].dtype.itemsize == 8:
            return right
        return lambda: right() * 1.001


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_an_operator_that_computes_wrongly_does_not_pass(direction: str) -> None:
    with pytest.raises(WrongResultError, match="gemm"):
        run_and_check(_Spoiled(), direction)


def test_sets_have_inputs_and_outputs_of_their_own() -> None:
    operator, seen = Gemm(), []

    class Watched(Gemm):
        def make_inputs(self, shape: Any, maker: Any) -> Any:
            inputs = super().make_inputs(shape, maker)
            seen.append(inputs["left"].data_ptr())
            return inputs

    build(Watched(), full_shape(operator), dtype="float32", device="cpu", direction="forward", sets=4)
    assert len(set(seen)) == 4
