from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from op_checks import count_by_hand, full_shape, moved_by_hand, run_and_check, traffic_is_that_of_the_tensors

from stepscope.bench.ops import Work
from stepscope.bench.ops.build import build
from stepscope.bench.ops.families.elementwise import Elementwise
from stepscope.bench.ops.families.pointwise import Activation, Cast, Reduction
from stepscope.bench.ops.inputs import Maker
from stepscope.bench.ops.operator import FLOATS
from stepscope.run.producer import WrongResultError

if TYPE_CHECKING:
    import torch

ROWS = {"rows": 7, "cols": 5}
FUNCTIONS = next(one.choices for one in Activation.parameters if one.name == "function")
REDUCTIONS = next(one.choices for one in Reduction.parameters if one.name == "function")


def activation(function: str, forward: int, backward: int) -> list[tuple[Any, dict[str, Any], str, str, Work]]:
    shape = {**ROWS, "function": function}
    return [
        (Activation, shape, "float32", "forward", Work(forward * 35, 4 * 2 * 35)),
        (Activation, shape, "float32", "backward", Work(backward * 35, 4 * 3 * 35)),
    ]


def chain(steps: str, direction: str, flops: int, passes: int) -> tuple[Any, dict[str, Any], str, str, Work]:
    return Elementwise, {**ROWS, "chain": steps}, "float32", direction, Work(flops * 35, 4 * passes * 35)


def reduction(
    function: str, over: str, direction: str, flops: int, elements: int
) -> tuple[Any, dict[str, Any], str, str, Work]:
    return Reduction, {**ROWS, "function": function, "over": over}, "float32", direction, Work(flops, 4 * elements)


HAND_COUNTED: list[tuple[Any, dict[str, Any], str, str, Work]] = [
    *activation("relu", 1, 1),
    *activation("sigmoid", 4, 3),
    *activation("gelu", 5, 11),
    *activation("silu", 5, 9),
    # two tensors in, one out
    chain("add", "forward", 1, 3),
    # one in, one out, however many steps
    chain("relu", "forward", 1, 2),
    chain("mulu-addu-tanh-neg", "forward", 4, 2),
    # input and two further tensors in
    chain("add-mul-relu", "forward", 3, 4),
    # upstream and input read, one gradient
    chain("relu", "backward", 1, 3),
    # upstream, both sides read, both gradients
    chain("mul", "backward", 2, 5),
    # upstream read, its negative for the right side written; the left side's is the upstream itself
    chain("sub", "backward", 1, 2),
    # a number's product needs no input
    chain("mulu-neg", "backward", 2, 2),
    # relu and mul: all three inputs; gradients of the product's side, and one that both sides of the sum share
    chain("add-mul-relu", "backward", 3, 1 + 3 + 2),
    # the product needs input and its own side, the sum's side is neither read nor is its gradient computed
    chain("mul-add", "backward", 2, 1 + 2 + 2),
    # input, operands of add and mul; the two sums' gradients differ by the product between them
    chain("add-mul-add-sqrt", "backward", 3, 1 + 4 + 3),
    # 7 rows, 5 columns: 7 results along rows, 5 down columns, 1 of all
    reduction("sum", "cols", "forward", 35, 35 + 7),
    reduction("sum", "rows", "forward", 35, 35 + 5),
    reduction("sum", "all", "forward", 35, 35 + 1),
    reduction("mean", "cols", "forward", 35 + 7, 35 + 7),
    reduction("mean", "cols", "backward", 35, 7 + 35),
    reduction("amax", "rows", "forward", 35, 35 + 5),
    # input, result and upstream read
    reduction("amax", "rows", "backward", 3 * 35, 35 + 5 + 5 + 35),
    # indices of 8 bytes: two elements of 4
    reduction("argmax", "cols", "forward", 35, 35 + 2 * 7),
    reduction("norm", "all", "forward", 2 * 35 + 1, 35 + 1),
    reduction("norm", "all", "backward", 2 * 35, 35 + 1 + 1 + 35),
    reduction("cumsum", "rows", "forward", 35, 35 + 35),
    reduction("cumsum", "rows", "backward", 35, 35 + 35),
    reduction("var", "cols", "forward", 4 * 35 + 7, 35 + 7),
    # input and upstream, not the result
    reduction("var", "cols", "backward", 3 * 35, 35 + 7 + 35),
    (Cast, {**ROWS, "to": "bfloat16"}, "float32", "forward", Work(0, (4 + 2) * 35)),
    (Cast, {**ROWS, "to": "float64"}, "float16", "backward", Work(0, (2 + 8) * 35)),
    (Cast, {**ROWS, "to": "float32"}, "float32", "forward", Work(0, (4 + 4) * 35)),
]


@pytest.mark.parametrize(("kind", "shape", "dtype", "direction", "work"), HAND_COUNTED)
def test_work_is_what_a_hand_counts(kind: Any, shape: Any, dtype: str, direction: str, work: Work) -> None:
    count_by_hand(kind, shape, dtype, direction, work)


@pytest.mark.parametrize("kind", [Activation, Elementwise, Reduction, Cast])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_declared_traffic_is_that_of_the_tensors(kind: Any, dtype: str) -> None:
    traffic_is_that_of_the_tensors(kind, dtype)


@pytest.mark.parametrize("function", REDUCTIONS)
@pytest.mark.parametrize("over", ["rows", "cols", "all"])
def test_declared_traffic_of_reductions(function: str, over: str) -> None:
    changes = {"function": function, "over": over}
    work = Reduction().work(full_shape(Reduction(), **changes), "float16", "forward")
    assert moved_by_hand(Reduction(), "float16", **changes) == work.bytes


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_activations_agree_with_their_formulas(function: str, dtype: str) -> None:
    for direction in ("forward", "backward"):
        run_and_check(Activation(), direction, dtype, function=function, rows=40)


def test_a_spoiled_activation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch, "relu", torch.nn.functional.leaky_relu)
    for direction in ("forward", "backward"):
        with pytest.raises(WrongResultError):
            run_and_check(Activation(), direction, function="relu")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "steps",
    [
        "add", "sub", "mul", "div", "pow", "addu", "subu", "mulu", "divu", "powu", "relu", "gelu", "tanh", "sigmoid",
        "exp", "sqrt", "abs", "neg", "square", "add-mul-relu", "mul-add-relu", "sub-sqrt-div-tanh", "neg-exp-subu-powu",
        "add-add-square-exp", "pow-pow-pow-pow", "square-square-sqrt-sub", "exp-exp-sigmoid-tanh", "div-add-neg-abs",
    ],
)  # fmt: skip
def test_chains_agree_with_float64(steps: str, dtype: str) -> None:
    run_and_check(Elementwise(), "forward", dtype, chain=steps)
    if steps not in ("add", "addu", "subu"):
        run_and_check(Elementwise(), "backward", dtype, chain=steps)


def test_a_value_carried_across_zero_by_rounding_is_no_error() -> None:
    """A million elements: some products round so that the sum changes its sign, and relu its branch."""
    run_and_check(Elementwise(), "backward", "bfloat16", chain="mul-add-relu", rows=1000, cols=1000)


def test_chains_do_what_their_names_say() -> None:
    import torch

    operator = Elementwise()
    shape = full_shape(operator, chain="sub-div-mulu-relu")
    inputs = operator.make_inputs(shape, Maker("float64", "cpu"))
    expected = ((inputs["input"] - inputs["operand0"]) / inputs["operand1"] * 0.75).clamp(min=0)
    torch.testing.assert_close(operator.bind(shape, inputs)(), expected)
    assert 0.1 < float((expected > 0).double().mean()) < 0.9, "relu meets both signs"


@pytest.mark.parametrize("step", ["add", "relu", "tanh", "sigmoid"])
def test_a_spoiled_step_is_found(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    right = getattr(torch, step)

    def spoiled(value: torch.Tensor, *operand: Any) -> torch.Tensor:
        result: torch.Tensor = right(value, *operand)
        return result * 1.0001 if result.dtype == torch.float32 else result

    monkeypatch.setattr(torch, step, spoiled)
    for direction in ("forward", "backward"):
        with pytest.raises(WrongResultError):
            run_and_check(Elementwise(), direction, chain=f"mul-{step}")


def test_gradients_that_are_the_upstream_are_refused() -> None:
    operator = Elementwise()
    for steps in ("add", "addu", "subu", "add-addu-add"):
        shape = full_shape(operator, chain=steps)
        with pytest.raises(NotImplementedError, match="upstream itself"):
            operator.work(shape, "float32", "backward")
        with pytest.raises(NotImplementedError, match="upstream itself"):
            build(operator, shape, dtype="float32", device="cpu", direction="backward")


@pytest.mark.parametrize(
    ("steps", "rule"),
    [
        ("", "is no step; those known are add, sub"),
        ("add-", "is no step"),
        ("add-cube", "'cube' is no step; those known are"),
        ("add+mul", "is no step"),
        ("neg-sqrt", "sqrt would meet values that are not positive"),
        ("relu-neg-pow", "pow would meet"),
        ("sqrt-neg-relu-powu", "powu would meet"),
        ("exp-exp-exp-exp", "exp would make values too large"),
    ],
)
def test_chains_that_cannot_be(steps: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        Elementwise().check_shape(full_shape(Elementwise(), chain=steps))


def test_a_lost_sign_comes_back() -> None:
    for steps in ("neg-abs-sqrt", "neg-square-pow", "neg-exp-sqrt", "neg-sigmoid-powu", "neg-neg-sqrt"):
        run_and_check(Elementwise(), "backward", chain=steps)


@pytest.mark.parametrize("function", REDUCTIONS)
@pytest.mark.parametrize("over", ["rows", "cols", "all"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_reductions_agree_with_float64(function: str, over: str, dtype: str) -> None:
    run_and_check(Reduction(), "forward", dtype, function=function, over=over)
    if function not in ("sum", "argmax"):
        run_and_check(Reduction(), "backward", dtype, function=function, over=over)


@pytest.mark.parametrize(("function", "reason"), [("sum", "spread by a view"), ("argmax", "no derivative")])
def test_reductions_without_backward(function: str, reason: str) -> None:
    shape = full_shape(Reduction(), function=function)
    with pytest.raises(NotImplementedError, match=reason):
        Reduction().work(shape, "float32", "backward")
    with pytest.raises(NotImplementedError, match=reason):
        build(Reduction(), shape, dtype="float32", device="cpu", direction="backward")


@pytest.mark.parametrize("function", [one for one in REDUCTIONS if one not in ("sum", "argmax")])
def test_gradients_of_reductions_are_written_out(function: str) -> None:
    """None is a view of less memory than is declared as written."""
    for over in ("rows", "cols", "all"):
        shape = full_shape(Reduction(), function=function, over=over)
        (gradient,) = build(Reduction(), shape, dtype="float32", device="cpu", direction="backward").calls[0]()
        assert gradient.untyped_storage().nbytes() == 4 * 16 * 24


def test_long_sums_stay_in_float16() -> None:
    for function in ("sum", "cumsum", "mean"):
        run_and_check(Reduction(), "forward", "float16", function=function, over="all", rows=500, cols=400)


def test_along_which_dimension() -> None:
    import torch

    inputs = {"input": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])}
    expected = {"cols": [6.0, 15.0], "rows": [5.0, 7.0, 9.0], "all": 21.0}
    for over, sums in expected.items():
        shape = {"rows": 2, "cols": 3, "function": "sum", "over": over}
        assert Reduction().bind(shape, inputs)().tolist() == sums
        assert Reduction().bind_reference(shape, {"input": inputs["input"].double()})().tolist() == sums


@pytest.mark.parametrize("over", ["rows", "cols", "all"])
def test_a_wrong_place_is_found(over: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch, "argmax", torch.argmin)
    with pytest.raises(WrongResultError, match="not the largest"):
        run_and_check(Reduction(), function="argmax", over=over)


@pytest.mark.parametrize("function", ["sum", "cumsum"])
def test_a_wrong_reduction_is_found(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    right = getattr(torch, function)
    monkeypatch.setattr(torch, function, lambda *given, **more: right(*given, **more) * 1.0001)
    with pytest.raises(WrongResultError):
        run_and_check(Reduction(), function=function)


def test_a_variance_of_one_is_refused() -> None:
    for over, rows, cols in (("rows", 1, 5), ("cols", 5, 1), ("all", 1, 1)):
        with pytest.raises(ValueError, match="at least 2 elements"):
            Reduction().check_shape(full_shape(Reduction(), function="var", over=over, rows=rows, cols=cols))
    Reduction().check_shape(full_shape(Reduction(), function="var", over="rows", rows=2, cols=1))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("to", FLOATS)
def test_casts_are_to_the_nearest(dtype: str, to: str) -> None:
    run_and_check(Cast(), "forward", dtype, to=to, rows=200, cols=200)
    if to != dtype:
        run_and_check(Cast(), "backward", dtype, to=to, rows=200, cols=200)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_plain_copy_has_no_backward(dtype: str) -> None:
    with pytest.raises(NotImplementedError, match="plain copy"):
        Cast().work(full_shape(Cast(), to=dtype), dtype, "backward")
    with pytest.raises(NotImplementedError, match="plain copy"):
        run_and_check(Cast(), "backward", dtype, to=dtype)


def test_a_copy_is_made_even_to_the_same_dtype() -> None:
    operator = Cast()
    shape = full_shape(operator, to="float32")
    inputs = operator.make_inputs(shape, Maker("float32", "cpu"))
    assert operator.bind(shape, inputs)().data_ptr() != inputs["input"].data_ptr()


def test_a_truncated_cast_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cutting off the lower 16 bits is within the usual tolerance of bfloat16, but it is not rounding."""
    import torch

    def truncate(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.view(torch.int32) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)

    monkeypatch.setattr(Cast, "bind", lambda self, shape, inputs: lambda: truncate(inputs["input"]))
    with pytest.raises(WrongResultError, match="not the nearest"):
        run_and_check(Cast(), to="bfloat16")
