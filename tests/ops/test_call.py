from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.bench.ops.build import build
from stepscope.bench.ops.families.call import OPERATOR, CallAny, make_call_shape
from stepscope.bench.ops.inputs import Maker
from stepscope.bench.ops.operator import Operator, Work
from stepscope.bench.ops.reference import as_tensors
from stepscope.core.errors import UsageError
from stepscope.run.producer import WrongResultError
from stepscope.traces.calls.arguments import parse_arguments
from stepscope.traces.calls.torch_calls import build_module, read_plan

if TYPE_CHECKING:
    import torch

SCHEMA = "aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"


def run(
    target: str, arguments: str = "", build_text: str = "", direction: str = "forward", dtype: str = "float32"
) -> Any:
    """Build two sets of inputs, call both twice, check, and give back the last result."""
    import torch

    shape = make_call_shape(target, arguments, build=build_text)
    OPERATOR.check_shape(shape)
    built = build(OPERATOR, shape, dtype=dtype, device="cpu", direction=direction, sets=1)
    with torch.set_grad_enabled(direction == "backward"):
        built.calls[0]()
        result = built.calls[0]()
    built.check()
    return result


def work(target: str, arguments: str, direction: str = "forward", dtype: str = "float32", build_text: str = "") -> Work:
    return OPERATOR.work(make_call_shape(target, arguments, build=build_text), dtype, direction)


def test_the_short_form_of_arguments() -> None:
    args, kwargs = parse_arguments(
        "float32[1024,64] int64[128]<1000 tensor[] 2 -1.5 true none sum 'a b' dim=1 keep=False"
    )
    assert json.loads(args) == [
        {"tensor": [1024, 64], "dtype": "float32"},
        {"tensor": [128], "dtype": "int64", "high": 1000},
        {"tensor": []},
        2,
        -1.5,
        True,
        None,
        "sum",
        "a b",
    ]
    assert json.loads(kwargs) == {"dim": 1, "keep": False}
    args, kwargs = parse_arguments("[float32[2,3], bool[2,3]], [1, [2]] value=-inf dtype=torch.float16")
    assert json.loads(args) == [
        [{"tensor": [2, 3], "dtype": "float32"}, {"tensor": [2, 3], "dtype": "bool"}],
        [1, [2]],
    ]
    assert json.loads(kwargs) == {"value": {"number": "-inf"}, "dtype": {"dtype": "float16"}}
    assert parse_arguments("") == ("[]", "{}")


def test_json_is_taken_as_it_is_and_written_one_way() -> None:
    once = parse_arguments('[ {"dtype": "float32", "tensor": [2, 3]}, 1 ]')
    assert once.args == '[{"dtype":"float32","tensor":[2,3]},1]'
    assert parse_arguments("float32[2,3] 1").args == once.args
    assert parse_arguments(once.args) == once


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("float31[2]", "no dtype"),
        ("float32[2", "no argument|follows"),
        ("float32[-1]", "follows|no argument"),
        ("float32[2,,3]", "no tensor"),
        ("[1,2", "not closed"),
        ("dim=1 2", "come first"),
        ("dim=1 dim=2", "twice"),
        ("2x", "without a space"),
        ("float32[2]3", "without a space"),
        ("@", "no argument"),
        ("int64[4]<0", "high is not above low"),
        ('[{"tensor": "x"}]', "Expected `array`"),
        ('[{"tensor": [2], "dtyp": "float32"}]', "unknown field `dtyp`"),
        ('[{"tensor": [2], "dtype": "float31"}]', "dtype is none of"),
        ('[{"tensor": [1099511627776, 2]}]', "more than"),
        ('[{"tensor": [2], "low": 5, "high": 5}]', "not above low"),
        ('[{"tensor": [2], "grad": 1}]', "Expected `bool`"),
        ('[{"number": "big"}]', "not inf"),
        ('[{"device": 1}]', "not a text"),
        ("[" * 40 + "1" + "]" * 40, "nested"),
        ("1" + "0" * 30, "64 bits"),
        ("9" * 100, "number of 100 characters"),
        ("x" * 70_000, "characters"),
        ("torch.float31", "dtype that is none of"),
    ],
)
def test_bad_arguments_are_refused_with_an_example(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        make_call_shape("aten::mm", text)
    assert "--args" in (caught.value.hint or "")


@settings(max_examples=400, deadline=None)
@given(
    st.one_of(
        st.text(st.sampled_from(list("float32[]int64,<=. -+e'\"{}:torchx1\n")), max_size=40), st.text(max_size=30)
    )
)
def test_bad_arguments_never_raise_anything_else(text: str) -> None:
    try:
        args, kwargs = parse_arguments(text)
    except ValueError:
        return
    assert parse_arguments(args) == (args, "{}")
    assert isinstance(json.loads(kwargs), dict)


@pytest.mark.parametrize("target", ["", "mm", "os.system", "aten:mm", "torch", "aten::mm; import os", "x" * 3000])
def test_targets_of_the_command_line_are_torchs(target: str) -> None:
    with pytest.raises(UsageError):
        make_call_shape(target)


def test_bytes_are_those_of_the_arguments() -> None:
    assert work("torch.add", "float32[7,5] float32[5]") == Work(flops=0, bytes=4 * (7 * 5 + 5))
    assert work("torch.add", "tensor[7,5] tensor[5]", dtype="bfloat16") == Work(flops=0, bytes=2 * (7 * 5 + 5))
    indices = "int64[9]<11 float16[11,4]"
    assert work("torch.nn.functional.embedding", indices).bytes == 8 * 9 + 2 * 11 * 4
    # backward writes the gradient of the table, not of the indices
    assert work("torch.nn.functional.embedding", indices, "backward").bytes == 8 * 9 + 2 * (2 * 11 * 4)


@pytest.mark.parametrize(
    ("target", "arguments", "flops"),
    [
        ("aten::mm", "tensor[7,3] tensor[3,5]", 2 * 7 * 3 * 5),
        ("torch.mm", "tensor[7,3] tensor[3,5]", 2 * 7 * 3 * 5),
        ("aten::addmm", "tensor[5] tensor[7,3] tensor[3,5]", 2 * 7 * 3 * 5),
        ("aten::bmm", "tensor[4,7,3] tensor[4,3,5]", 2 * 4 * 7 * 3 * 5),
        ("torch.baddbmm", "tensor[4,7,5] tensor[4,7,3] tensor[4,3,5]", 2 * 4 * 7 * 3 * 5),
        ("torch.matmul", "tensor[2,1,7,3] tensor[4,3,5]", 2 * 8 * 7 * 3 * 5),
        ("torch.matmul", "tensor[7,3] tensor[3]", 2 * 7 * 3),
        ("torch.matmul", "tensor[3] tensor[3]", 2 * 3),
        ("torch.nn.functional.linear", "tensor[2,7,3] tensor[5,3] tensor[5]", 2 * 14 * 3 * 5),
        (SCHEMA, "tensor[7,3] tensor[7,3]", 0),
        ("aten::mm.out", "tensor[7,3] tensor[3,5] out=tensor[7,5]", 2 * 7 * 3 * 5),
        ("torch.mm", "2", 0),
    ],
)
def test_flops_of_products(target: str, arguments: str, flops: int) -> None:
    assert work(target, arguments).flops == flops
    assert work(target, arguments, "backward").flops == 2 * flops


def test_flops_of_a_linear_module() -> None:
    assert work("torch.nn.Linear", "tensor[7,3]", build_text="3 5").flops == 2 * 7 * 3 * 5


def test_memory_is_counted_with_what_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of two thin matrices returns far more than it is given."""
    import torch

    assert torch.__version__
    thin = make_call_shape("aten::mm", "float32[1000,1] float32[1,1000]")
    assert OPERATOR.footprint_bytes(thin, "float32") == 4 * (1000 + 1000 + 1000 * 1000)
    # what torch cannot tell beforehand counts as much as is given
    unknown = make_call_shape("aten::nonzero", "float32[64]")
    assert OPERATOR.footprint_bytes(unknown, "float32") == 2 * 4 * 64
    # nor is torch loaded for it
    monkeypatch.delitem(sys.modules, "torch")
    assert OPERATOR.footprint_bytes(thin, "float32") == 2 * 4 * (1000 + 1000)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("target", "arguments", "build_text"),
    [
        ("aten::mm", "tensor[48,32] tensor[32,24]", ""),
        ("aten::add", "float32[4,4] float32[4,4] 1", ""),
        (SCHEMA, "float32[4,4] float32[4,4] 2", ""),
        ("aten::sum.dim_IntList(Tensor self, int[1]? dim, bool keepdim=False, *, int? dtype=None) -> (Tensor)",
         "float32[4,4] none", ""),
        ("aten::linear", "float32[4,4] float32[4,4] none", ""),
        ("torch.cat", "[float32[4,4],float32[4,5]] dim=1", ""),
        ("torch.reshape", "float32[4,4] [2,8]", ""),
        ("torch.mean", "float32[16,16]", ""),
        # not a number for half of its arguments, in float64 too
        ("torch.log", "float32[64]", ""),
        ("torch.max", "float32[16,16] dim=1", ""),
        ("torch.nn.functional.embedding", "int64[12]<10 float32[10,4]", ""),
        ("torch.nn.functional.max_pool2d", "float32[1,3,16,16] 3 stride=2", ""),
        ("torch.nn.functional.dropout", "float32[16,16] 0.5", ""),
        ("torch.nn.Conv2d", "float32[1,3,16,16]", "3 4 kernel_size=5 stride=2 padding=2"),
        ("torch.nn.Linear", "float32[5,6]", "6 3"),
        ("torch.nn.Dropout", "float32[16,16]", "0.5"),
        ("torch.nn.MaxPool2d", "float32[1,3,16,16]", "3 2"),
        ("torch.nn.AdaptiveAvgPool2d", "float32[1,3,16,16]", "[[6,6]]"),
        ("torch.nn.BatchNorm2d", "float32[2,3,4,4]", "3"),
        ("torch.nn.LSTM", "float32[5,3,8]", "8 6"),
    ],
)  # fmt: skip
def test_calls_run_and_agree_with_float64(target: str, arguments: str, build_text: str, direction: str) -> None:
    result = run(target, arguments, build_text, direction)
    assert as_tensors(result)


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        ("torch.add_", "float32[4,4] float32[4,4]"),
        ("torch.clamp_", "float32[4,4] 0 10"),
        (
            "aten::add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)",
            "float32[4] float32[4] 1",
        ),
    ],
)
def test_what_works_in_place_has_no_backward_pass(target: str, arguments: str) -> None:
    run(target, arguments)
    with pytest.raises(NotImplementedError, match="in place"):
        run(target, arguments, direction="backward")


def unchecked(target: str, arguments: str, direction: str = "forward", dtype: str = "float32") -> str | None:
    """What the check says after a few calls have been timed."""
    shape = make_call_shape(target, arguments)
    built = build(OPERATOR, shape, dtype=dtype, device="cpu", direction=direction)
    for _ in range(8):
        built.calls[0]()
    return OPERATOR.check(shape, built.inputs, dtype, direction)


@pytest.mark.parametrize(
    ("target", "arguments", "reason"),
    [
        ("torch.nn.functional.dropout", "float32[16,16] 0.5", "random or not deterministic"),
        ("torch.rand_like", "float32[64,64]", "random or not deterministic"),
        ("torch.argmax", "float32[8,8]", "no floats"),
        ("aten::nonzero", "float32[8]", "no floats"),
        ("torch.empty_like", "float32[64]", "nobody has written"),
        ("torch.mm", "int64[8,8] int64[8,8]", "none of its tensors are floats"),
        ("torch.mm", "float64[8,8] float64[8,8]", "nothing wider"),
        ("torch.mm", "tensor[8,8] tensor[8,8]", ""),
        ("torch.log", "float32[64]", ""),
        ("aten::item", "float32[]", ""),
        ("aten::fft_fft", "float32[64]", ""),
        ("aten::_foreach_add_", "[float32[4],float32[4]] 1", ""),
        ("torch.exp_", "float32[64]", ""),
    ],
)  # fmt: skip
def test_a_check_that_could_not_be_made_says_why(target: str, arguments: str, reason: str) -> None:
    found = unchecked(target, arguments)
    assert (found is None) == (reason == "")
    assert reason in (found or "")


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_call_without_a_float64_form_says_so(monkeypatch: pytest.MonkeyPatch, direction: str) -> None:
    import torch

    right = CallAny.bind

    def narrow_only(self: Operator, shape: Any, inputs: Any) -> Any:
        if next(iter(inputs.values())).dtype == torch.float64:
            raise RuntimeError("\"mm\" not implemented for 'Double'\nmore of it")
        return right(OPERATOR, shape, inputs)

    monkeypatch.setattr(CallAny, "bind", narrow_only)
    found = unchecked("aten::mm", "tensor[8,8] tensor[8,8]", direction)
    assert found == "torch does not make the same call in float64: \"mm\" not implemented for 'Double'"

    def out_of_memory(self: Operator, shape: Any, inputs: Any) -> Any:
        if next(iter(inputs.values())).dtype == torch.float64:
            raise torch.OutOfMemoryError("no memory")
        return right(OPERATOR, shape, inputs)

    monkeypatch.setattr(CallAny, "bind", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        unchecked("aten::mm", "tensor[8,8] tensor[8,8]", direction)


def test_the_call_is_the_one_that_was_named() -> None:
    import torch

    shape = make_call_shape("aten::add", "float32[4] float32[4] 3")
    inputs = OPERATOR.make_inputs(shape, Maker("float32", "cpu"))
    result = OPERATOR.bind(shape, inputs)()
    assert torch.equal(result, inputs["arg0"] + 3 * inputs["arg1"])
    shape = make_call_shape("torch.nn.Linear", "float32[5,6]", build="6 3 bias=false")
    inputs = OPERATOR.make_inputs(shape, Maker("float32", "cpu"))
    assert set(inputs) == {"arg0", "module.weight"}
    assert torch.allclose(OPERATOR.bind(shape, inputs)(), inputs["arg0"] @ inputs["module.weight"].T)


def test_tensors_are_as_asked_for() -> None:
    import torch

    shape = make_call_shape(
        "torch.stack",
        '[[{"tensor":[9999]},{"tensor":[9999],"dtype":"float16"},{"tensor":[9999],"dtype":"int32","low":5,"high":8},'
        '{"tensor":[9999],"dtype":"uint8"},{"tensor":[9999],"dtype":"bool"},{"tensor":[99],"dtype":"float8_e4m3fn"}]]',
    )
    inputs = OPERATOR.make_inputs(shape, Maker("bfloat16", "cpu"))
    drawn = [inputs[f"arg0.{i}"] for i in range(6)]
    assert [one.dtype for one in drawn] == [
        torch.bfloat16, torch.float16, torch.int32, torch.uint8, torch.bool, torch.float8_e4m3fn,
    ]  # fmt: skip
    assert (int(drawn[2].min()), int(drawn[2].max())) == (5, 7)
    assert (int(drawn[3].min()), int(drawn[3].max())) == (0, 9)
    # normal numbers: mean 0, variance 1
    assert abs(float(drawn[0].double().mean())) < 0.05
    assert float(drawn[0].double().var()) == pytest.approx(1, abs=0.05)
    assert OPERATOR.gradient_names(shape) == ("arg0.0", "arg0.1")
    again = OPERATOR.make_inputs(shape, Maker("bfloat16", "cpu"))
    assert torch.equal(again["arg0.1"], drawn[1])


def test_a_gradient_that_is_not_wanted_is_not_taken() -> None:
    shape = make_call_shape("torch.add", '[{"tensor":[4],"grad":false},{"tensor":[4]}]')
    assert OPERATOR.gradient_names(shape) == ("arg1",)
    with pytest.raises(NotImplementedError, match="takes a gradient"):
        OPERATOR.gradient_names(make_call_shape("torch.relu", '[{"tensor":[4],"grad":false}]'))


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        ("torch.load", "x"),
        ("torch.save", "1 x"),
        ("torch.from_file", "x"),
        ("torch.hub.load", "x y"),
        ("torch.set_num_threads", "1"),
        ("torch.Tensor.add", "1"),
        ("torch.nn.functional._x", ""),
        ("torch.nn.functional.handle_torch_function", ""),
        ("torch.nn.Nothing", ""),
        ("torch.nn.init.zeros_", ""),
        ("torch.nn.functional.nothing", ""),
        ("torch.nothing", ""),
        ("torch.__init__", ""),
        ("aten::nothing", ""),
        ("aten::__init__", ""),
        ("aten::save", "1 x"),
        ("aten::from_file", "x"),
        ("aten::manual_seed", "1"),
        ("aten::add.Nothing", "float32[2] float32[2]"),
        ("aten::add", "float32[2] x"),
        # torch's own takes a dimension that may be none
        ("aten::sum.dim_IntList(Tensor self, int[1] dim, bool keepdim=False, *, int? dtype=None) -> Tensor",
         "float32[2] [0]"),
        ("aten::mm(Tensor self, Tens) -> Tensor", "float32[2,2] float32[2,2]"),
        ("torch.zeros_like", "float32[2] device={}"),
    ],
)  # fmt: skip
def test_what_is_no_operator_here_is_skipped_with_its_reason(target: str, arguments: str) -> None:
    if arguments.endswith("device={}"):
        shape = {**make_call_shape(target, "float32[2]"), "kwargs": '{"device":{"device":"cuda"}}'}
    else:
        shape = make_call_shape(target, arguments)
    with pytest.raises(NotImplementedError) as caught:
        OPERATOR.bind(shape, OPERATOR.make_inputs(shape, Maker("float32", "cpu")))
    assert str(caught.value)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("pytorch:alex_net", "whole model"),
        ("pytorch.model.resnet", "whole model"),
        ("SplitTableBatchedEmbeddingBagsCodegen", "FBGEMM"),
        ("my_company.op", "neither"),
    ],
)
def test_names_of_param_that_are_no_operator_are_skipped_with_their_reason(target: str, reason: str) -> None:
    shape = {"target": target, "args": "[]", "kwargs": "{}", "build": "[]", "build_kwargs": "{}"}
    OPERATOR.check_shape(shape)
    with pytest.raises(NotImplementedError, match=reason):
        OPERATOR.make_inputs(shape, Maker("float32", "cpu"))


def test_wrong_results_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    right = CallAny.bind

    def spoiled(self: Operator, shape: Any, inputs: Any) -> Any:
        call = right(OPERATOR, shape, inputs)
        wide = next(iter(inputs.values())).dtype == torch.float64
        return call if wide else lambda: call() * 1.01

    monkeypatch.setattr(CallAny, "bind", spoiled)
    for direction in ("forward", "backward"):
        with pytest.raises(WrongResultError):
            run("aten::mm", "tensor[48,32] tensor[32,24]", direction=direction)


def plant(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    """`wrong` runs in place of every call that is not the float64 reference."""
    import torch

    right = CallAny.bind

    def spoiled(self: Operator, shape: Any, inputs: Any) -> Any:
        first = next(iter(inputs.values()))
        return right(OPERATOR, shape, inputs) if first.dtype == torch.float64 else lambda: wrong(first)

    monkeypatch.setattr(CallAny, "bind", spoiled)


@pytest.mark.parametrize("target", ["torch.exp_", "torch.mul_", "aten::_foreach_exp_"])
def test_a_wrong_call_in_place_is_found(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """What timing leaves behind is endless after a few calls: nothing of it could be compared."""
    arguments = {"torch.mul_": "float32[64] 1e30", "aten::_foreach_exp_": "[float32[64]]"}.get(target, "float32[64]")
    assert unchecked(target, arguments) is None
    returns = target.startswith("torch.")
    plant(monkeypatch, lambda first: [first.mul_(3)][: 1 if returns else 0])
    with pytest.raises(WrongResultError):
        unchecked(target, arguments)


@pytest.mark.parametrize(
    ("target", "wrong"),
    [
        # exp(x) is finite for all of these
        ("torch.exp", lambda first: first * float("inf")),
        ("torch.exp", lambda first: first * float("nan")),
        # no number, and endless with the wrong sign, where float64 has numbers below 0
        ("torch.sqrt", lambda first: first.abs().sqrt()),
        ("torch.reciprocal", lambda first: first / 0),
    ],
)
def test_nothing_passes_by_not_being_finite(monkeypatch: pytest.MonkeyPatch, target: str, wrong: Any) -> None:
    assert unchecked(target, "float32[64]") is None
    plant(monkeypatch, wrong)
    with pytest.raises(WrongResultError):
        unchecked(target, "float32[64]")


def test_what_is_endless_in_float64_too_is_right() -> None:
    import torch

    from stepscope.bench.ops.families.call import _take_finite

    inf, nan = float("inf"), float("nan")
    wide = torch.tensor([1.0, inf, -inf, nan, 1e300], dtype=torch.float64)
    right = torch.tensor([1.0, inf, -inf, nan, inf])
    # 1e300 is endless in float32
    assert [one.tolist() for one in _take_finite("x", right, wide)] == [[1.0], [1.0]]
    for i, other in enumerate([inf, -inf, nan, 1.0, -inf]):
        with pytest.raises(WrongResultError, match="1 places"):
            _take_finite("x", torch.where(torch.arange(5) == i, torch.tensor(other), right), wide)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("target", "arguments"), [("torch.nn.Embedding", "int64[8]<100"), ("torch.nn.EmbeddingBag", "int64[4,8]<100")]
)
def test_weights_are_floats_whatever_a_module_is_given(target: str, arguments: str, direction: str, dtype: str) -> None:
    import torch

    shape = make_call_shape(target, arguments, build="1000 16")
    assert OPERATOR.named_dtype(shape) is None
    built = build(OPERATOR, shape, dtype=dtype, device="cpu", direction=direction)
    (result,) = as_tensors(built.calls[0]())
    assert result.dtype == getattr(torch, dtype)
    assert {name: one.dtype for name, one in built.inputs.items()} == {
        "arg0": torch.int64, "module.weight": getattr(torch, dtype),
    }  # fmt: skip
    unlike = OPERATOR.check(shape, built.inputs, dtype, direction)
    assert unlike is None or dtype == "float64"


def test_weights_are_never_whole_numbers() -> None:
    shape = make_call_shape("torch.nn.Embedding", "int64[8]<100", build="1000 16")
    for ask in (
        lambda: OPERATOR.work(shape, "int64", "forward"),
        lambda: OPERATOR.footprint_bytes(shape, "int64"),
        lambda: OPERATOR.make_inputs(shape, Maker("int64", "cpu")),
    ):
        with pytest.raises(NotImplementedError, match="int64 cannot hold"):
            ask()
    # a module without weights is recorded under what it is given
    shape = make_call_shape("torch.nn.ReLU", "int64[8]")
    assert OPERATOR.make_inputs(shape, Maker("int64", "cpu"))
    with pytest.raises(NotImplementedError, match="is float32"):
        OPERATOR.make_inputs(shape, Maker("float32", "cpu"))


def test_memory_and_bytes_count_the_weights() -> None:
    def module(target: str, arguments: str, build_text: str) -> tuple[int, int, int]:
        shape = make_call_shape(target, arguments, build=build_text)
        moved = [OPERATOR.work(shape, "float32", direction).bytes for direction in ("forward", "backward")]
        return moved[0], moved[1], OPERATOR.footprint_bytes(shape, "float32")

    given, weights = 4 * 7 * 3, 4 * (3 * 5 + 5)
    assert module("torch.nn.Linear", "tensor[7,3]", "3 5") == (
        given + weights, 2 * (given + weights), given + weights + 4 * 7 * 5,
    )  # fmt: skip
    # weight, bias and running mean and variance of 3, and a counter; buffers have no gradient
    given, trained, kept = 4 * 2 * 3 * 16, 4 * 2 * 3, 4 * 2 * 3 + 8
    assert module("torch.nn.BatchNorm2d", "tensor[2,3,4,4]", "3") == (
        given + trained + kept, 2 * (given + trained) + kept, 2 * given + trained + kept,
    )  # fmt: skip
    # far beyond any memory: nothing of it is built
    table = 4 * 200_000_000 * 1024
    assert module("torch.nn.Embedding", "int64[8]<100", "200000000 1024") == (
        8 * 8 + table, 8 * 8 + 2 * table, 8 * 8 + table + 4 * 8 * 1024,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("target", "build_text", "words"),
    [
        ("torch.nn.Linear", "3", "out_features"),
        ("torch.nn.Embedding", "99999999999999999 999999", "overflow"),
        ("torch.nn.BCELoss", "weight=float32[3]", "built with a tensor"),
        ("torch.nn.Nothing", "", "no module"),
    ],
)
def test_what_torch_cannot_build_is_skipped_in_its_words(target: str, build_text: str, words: str) -> None:
    shape = make_call_shape(target, "tensor[7,3]", build=build_text)
    for direction in ("forward", "backward"):
        with pytest.raises(NotImplementedError, match=words):
            OPERATOR.work(shape, "float32", direction)
    with pytest.raises(NotImplementedError, match=words):
        OPERATOR.footprint_bytes(shape, "float32")


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_modules_that_learn_their_sizes_are_skipped() -> None:
    with pytest.raises(NotImplementedError, match="first call"):
        OPERATOR.work(make_call_shape("torch.nn.LazyLinear", "tensor[7,3]", build="4"), "float32", "forward")


@pytest.mark.parametrize("build_text", ["3 5 device=cpu", "3 5 true cpu", '[3, 5, true, {"device": "cpu"}]'])
def test_a_module_is_built_without_memory_whatever_device_it_names(build_text: str) -> None:
    shape = make_call_shape("torch.nn.Linear", "tensor[7,3]", build=build_text)
    assert {one.device.type for one in build_module(read_plan(shape)).parameters()} == {"meta"}
    assert OPERATOR.make_inputs(shape, Maker("float32", "cpu")).keys() == {"arg0", "module.weight", "module.bias"}
    elsewhere = make_call_shape("torch.nn.Linear", "tensor[7,3]", build=build_text.replace("cpu", "cuda"))
    with pytest.raises(NotImplementedError, match="names the device cuda,"):
        OPERATOR.make_inputs(elsewhere, Maker("float32", "cpu"))


def test_weights_are_the_same_every_time_and_of_the_size_of_1() -> None:
    import torch

    def weights() -> dict[str, torch.Tensor]:
        shape = make_call_shape("torch.nn.BatchNorm2d", "float32[2,3,4,4]", build="3")
        linear = make_call_shape("torch.nn.Linear", "float32[9,400]", build="400 300")
        return OPERATOR.make_inputs(shape, Maker("float32", "cpu")) | OPERATOR.make_inputs(
            linear, Maker("float32", "cpu")
        )

    first, second = weights(), weights()
    assert all(torch.equal(first[name], second[name]) for name in first)
    # a row of 400 with variance 1 / 400
    assert float(first["module.weight"].var()) * 400 == pytest.approx(1, abs=0.05)
    assert bool((first["module.running_var"] >= 0).all())
    assert int(first["module.num_batches_tracked"]) == 0


def test_the_dtype_that_all_tensors_name() -> None:
    def named(text: str) -> str | None:
        return OPERATOR.named_dtype(make_call_shape("torch.add", text))

    assert named("float16[2] float32[2]") == "float16"
    assert named("int64[2] bfloat16[2]") == "bfloat16"
    assert named("int64[2] bool[2]") == "int64"
    assert named("bool[2]") is None
    assert named("float16[2] tensor[2]") is None
    assert named("2") is None

    def module(text: str, build_text: str = "3 5") -> str | None:
        return OPERATOR.named_dtype(make_call_shape("torch.nn.Linear", text, build=build_text))

    assert module("int64[2]") is None
    assert module("float16[2]") == "float16"
    assert module("int64[2] float16[2]") == "float16"
    assert module("tensor[2] float16[2]") is None
    assert module("tensor[2]", "3 5 dtype=torch.float64") == "float64"


def test_shapes_are_brought_into_one_form() -> None:
    default = {one.name: str(one.default) for one in OPERATOR.parameters}
    short = OPERATOR.canonical(
        {**default, "target": "torch.sum", "args": "tensor[4] dim=0", "kwargs": '{"keepdim":true}'}
    )
    assert short["args"] == '[{"tensor":[4]}]'
    assert short["kwargs"] == '{"dim":0,"keepdim":true}'
    assert OPERATOR.canonical(short) == short
    assert OPERATOR.canonical(default) == default
    for wrong in (
        {"args": "dim=0", "kwargs": '{"dim":1}'}, {"args": "{"}, {"kwargs": "[]"}, {"kwargs": '{"a b":1}'},
        {"build": '{"a":1}'}, {"build_kwargs": "3"}, {"target": "a b"}, {"target": ""}, {"kwargs": "NaN"},
        {"kwargs": '{"x": 1e999}'}, {"kwargs": '{"x": NaN}'},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"\w"):
            OPERATOR.check_shape({**default, **wrong})
