from __future__ import annotations

from typing import Any

import pytest
from op_checks import count_by_hand, full_shape, run_and_check, traffic_is_that_of_the_tensors

from stepscope.measure import WrongResultError
from stepscope.ops import Work, find_operator
from stepscope.ops.build import build
from stepscope.ops.gemm import LAYOUTS, AddMm, Bmm, Gemm, Linear, Mlp
from stepscope.ops.reference import check_close
from stepscope.ops.training import LEARNING_RATE, MlpTrain

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
    from stepscope.ops.inputs import Maker

    operator = Gemm()
    for layout in LAYOUTS:
        inputs = operator.make_inputs(full_shape(operator, layout=layout), Maker("float32", "cpu"))
        assert [not inputs[side].is_contiguous() for side in ("left", "right")] == [one == "t" for one in layout]
    strided = Bmm().make_inputs(full_shape(Bmm(), batching="strided"), Maker("float32", "cpu"))
    assert strided["left"].shape == (3, 16, 8)
    assert strided["left"].stride() == (8, 3 * 8, 1)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_short_dtypes_multiply(dtype: str) -> None:
    run_and_check(Gemm(), "forward", dtype)


def test_short_dtypes_have_no_gradient() -> None:
    for dtype in ("int8", "float8_e4m3fn"):
        with pytest.raises(RuntimeError, match=r"not implemented|floating point dtype can require"):
            run_and_check(Gemm(), "backward", dtype)


@pytest.mark.parametrize("widths", ["64", "", "64-", "64-x-8", "64-0-8", "-3-4"])
def test_widths_that_cannot_be(widths: str) -> None:
    for operator in (Mlp(), MlpTrain()):
        with pytest.raises(ValueError, match="not a list of widths"):
            operator.check_shape({"batch": 1, "widths": widths})


def test_a_training_step_trains() -> None:
    """The first layer's bias after one step is what autograd and the rule by hand give."""
    import torch

    from stepscope.ops.inputs import Maker

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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_training_steps_agree_with_float64(dtype: str) -> None:
    run_and_check(MlpTrain(), "forward", dtype)


def test_a_step_that_moves_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.ops.training.LEARNING_RATE", 0.0)
    with pytest.raises(WrongResultError, match="moved no weight"):
        run_and_check(MlpTrain())


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
