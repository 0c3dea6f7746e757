"""Operators of a trace: which calls are chosen, what is rebuilt of their inputs, what is refused and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.bench.ops.build import read_case
from stepscope.bench.ops.from_trace import (
    TracedCall,
    TracedCalls,
    calls_of_graph,
    calls_of_timeline,
    cases_of_trace,
    find_schemas,
    find_trace_files,
    read_traced_calls,
)
from stepscope.bench.ops.inputs import Maker
from stepscope.bench.ops.trace_comparison import compare_with_trace, format_calls, format_comparison
from stepscope.core.errors import BadInputError, UsageError
from stepscope.formats.graph import Graph, Node
from stepscope.formats.tensors import Arguments, parse_schema
from stepscope.formats.timeline import ANNOTATION, COPY, KERNEL, OPERATOR, RUNTIME, Timeline, TimelineBuilder
from stepscope.traces.calls.arguments import TensorSpec, read_list
from stepscope.traces.calls.rebuild import is_contiguous, make_call_arguments
from stepscope.traces.calls.torch_calls import CallPlan, bind_plan, make_tensor, read_plan
from stepscope.traces.calls.traced import (
    NOT_RECORDED,
    CannotRebuildError,
    TracedTensor,
    bind_inputs,
    choose_schema,
    parse_number,
    read_graph_inputs,
    read_timeline_inputs,
)
from stepscope.traces.calls.units import COMMUNICATION, HOST_COPY, NO_OPERATOR, NO_WORK, find_units
from stepscope.traces.finish import finish

H200 = Path(__file__).parents[2].parent / "shared" / "data" / "traces" / "h200"
MODELS = [
    "bert_base_b16_s128",
    "dlrm_26t_b2048",
    "dlrm_8t_pool32_b4096",
    "gpt2_bf16_b8_s1024",
    "resnet50_b64",
    "vit_b_16_b32",
]


class Trace:
    """A small timeline, written call by call."""

    def __init__(self) -> None:
        self.builder = TimelineBuilder()
        self._correlation = 0

    def call(
        self, name: str, start: int, end: int, inputs: list[tuple[str, Any, Any, str]] | None = None, **more: Any
    ) -> None:
        """`inputs`: type, shape, strides and scalar of each."""
        texts: dict[str, Any] = {}
        if inputs is not None:
            types, shapes, strides, values = (list(one) for one in zip(*inputs, strict=True)) if inputs else ([],) * 4
            texts = {
                "types": json.dumps(types),
                "shapes": json.dumps(shapes),
                "strides": json.dumps(strides),
                "values": json.dumps(values),
            }
        kind = more.pop("kind", OPERATOR)
        self.builder.add(kind, name, start, end, thread=(1, 1), **texts, **more)

    def launch(self, at: int, device_start: int, device_end: int, name: str = "kernel", kind: int = KERNEL) -> None:
        self._correlation += 1
        self.builder.add(RUNTIME, "cudaLaunchKernel", at, at + 1, thread=(1, 1), correlation=self._correlation)
        self.builder.add(kind, name, device_start, device_end, device=0, stream=7, correlation=self._correlation)

    def finish(self) -> Timeline:
        return finish(self.builder.build())


def tensor(*size: int, dtype: str = "float", strides: list[int] | None = None) -> tuple[str, Any, Any, str]:
    dense = [1] * len(size)
    for i in range(len(size) - 2, -1, -1):
        dense[i] = dense[i + 1] * size[i + 1]
    return (dtype, list(size), strides if strides is not None else dense, "")


def number(text: str) -> tuple[str, Any, Any, str]:
    return ("Scalar", [], [], text)


NONE = ("", [], [], "")
ADD = [tensor(4, 4), tensor(4, 4), number("1")]


def find_call(calls: list[TracedCall], operator: str) -> TracedCall:
    (found,) = [call for call in calls if call.operator == operator]
    return found


# Which calls


def test_the_innermost_call_that_launches_is_chosen() -> None:
    trace = Trace()
    trace.call("ProfilerStep#0", 0, 100, kind=ANNOTATION)
    trace.call("aten::linear", 1, 20, [tensor(4, 4)])
    trace.call("aten::mm", 2, 10, [tensor(4, 4), tensor(4, 4)])
    trace.launch(3, 200, 230)
    trace.call("aten::mm", 30, 40, [tensor(4, 4), tensor(4, 4)])
    trace.launch(31, 240, 280)
    trace.call("aten::t", 50, 60, [tensor(4, 4)])
    found = calls_of_timeline(trace.finish(), device="cpu")
    (call,) = found.calls
    assert (call.operator, call.count, call.trace_s) == ("aten::mm", 2, pytest.approx(70e-9))
    assert call.kernels == ["kernel"]
    assert found.on_device is True
    assert found.busy_s == pytest.approx(70e-9)
    assert found.profiled_step_s == pytest.approx(100e-9)


def test_work_is_counted_once_where_calls_that_launch_are_nested() -> None:
    trace = Trace()
    trace.call("aten::sort", 0, 50, [tensor(8), NONE])
    trace.launch(1, 100, 110)
    trace.call("aten::copy_", 10, 20, [tensor(8), tensor(8), number("False")])
    trace.launch(11, 120, 140)
    units = find_units(trace.finish())
    assert len(units.rows) == 1
    assert units.time_ns.tolist() == [30]


def test_what_no_operator_launched_is_told_apart() -> None:
    trace = Trace()
    trace.call("autograd::engine::evaluate_function: XBackward0", 0, 10, [])
    trace.launch(1, 100, 110)
    trace.call("c10d::allreduce_", 20, 30, [])
    trace.launch(21, 120, 150, name="ncclDevKernel_AllReduce_Sum_f32_RING_LL")
    trace.call("aten::copy_", 40, 50, [tensor(8), tensor(8), number("False")])
    trace.launch(41, 160, 170, name="Memcpy HtoD (Pageable -> Device)", kind=COPY)
    found = calls_of_timeline(trace.finish(), device="cpu")
    assert found.left_s == {COMMUNICATION: pytest.approx(30e-9), NO_OPERATOR: pytest.approx(10e-9)}
    assert [(call.operator, call.skip) for call in found.calls] == [("aten::copy_", HOST_COPY)]


def test_on_the_host_calls_that_only_hand_on_are_not_chosen() -> None:
    trace = Trace()
    trace.call("aten::linear", 0, 100, [tensor(4, 4), tensor(4, 4), tensor(4)])
    trace.call("aten::t", 1, 10, [tensor(4, 4)])
    trace.call("aten::addmm", 20, 90, [tensor(4), tensor(4, 4), tensor(4, 4), number("1"), number("1")])
    trace.call("aten::copy_", 30, 40, [tensor(4, 4), tensor(4, 4), number("False")])
    found = calls_of_timeline(trace.finish(), device="cpu")
    (call,) = found.calls
    assert (call.operator, call.trace_s) == ("aten::addmm", pytest.approx(70e-9))
    assert found.on_device is False
    assert found.left_s[NO_WORK] == pytest.approx(9e-9)


def test_a_timeline_without_inputs_is_refused() -> None:
    trace = Trace()
    trace.call("aten::mm", 0, 10)
    with pytest.raises(BadInputError, match="does not hold the inputs"):
        calls_of_timeline(trace.finish(), device="cpu")


def test_an_empty_timeline_has_no_calls() -> None:
    assert calls_of_timeline(Trace().finish(), device="cpu").calls == []


# What is rebuilt of their inputs


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("2.", 2.0), ("True", True), ("-inf", float("-inf")), ("[1, 1]", [1, 1]), ("[True]", [True]), ("[]", []),
     ("", NOT_RECORDED), ("cuda:0", NOT_RECORDED), ("'word'", NOT_RECORDED), ("[[1]]", NOT_RECORDED)],
)  # fmt: skip
def test_numbers_as_a_profiler_writes_them(text: str, value: Any) -> None:
    assert parse_number(text) == value


@given(st.text(max_size=30))
def test_any_text_is_a_number_or_not_recorded(text: str) -> None:
    value = parse_number(text)
    assert value is NOT_RECORDED or isinstance(value, int | float | list)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), max_size=4))
def test_strides_that_torch_calls_contiguous(dimensions: list[tuple[int, int]]) -> None:
    import torch

    size, strides = [one for one, _ in dimensions], [one for _, one in dimensions]
    made = torch.empty(max(TensorSpec(size=tuple(size), strides=tuple(strides)).span, 1)).as_strided(size, strides)
    assert is_contiguous(size, strides) == made.is_contiguous()


def overload(operator: str, inputs: list[tuple[str, Any, Any, str]]) -> str:
    types, shapes, strides, values = (list(one) for one in zip(*inputs, strict=True))
    read = read_timeline_inputs(shapes, types, strides, values)
    return bind_inputs(choose_schema(find_schemas(operator), read), read).target


def test_overloads_are_found_by_number_and_type_of_inputs() -> None:
    assert overload("aten::add", ADD) == "aten::add.Tensor"
    assert overload("aten::add", [tensor(4), number("2."), number("1")]) == "aten::add.Scalar"
    assert overload("aten::sum", [tensor(4), ("ScalarList", [], [], "[0]"), number("True"), NONE]) == (
        "aten::sum.dim_IntList"
    )
    gather = [tensor(9, 4), number("0"), tensor(2, 4, dtype="long int"), number("False"), tensor(2, 4)]
    assert overload("aten::gather", gather) == "aten::gather.out"
    assert overload("aten::pow", [tensor(4), number("2.")]) == "aten::pow.Tensor_Scalar"
    with pytest.raises(CannotRebuildError, match="no overload"):
        overload("aten::mm", [tensor(4)])
    with pytest.raises(CannotRebuildError, match="no such operator"):
        overload("aten::there_is_no_such_thing", [tensor(4)])


def rebuild(operator: str, inputs: list[tuple[str, Any, Any, str]], device: str = "cpu") -> TracedCall:
    trace = Trace()
    trace.call(operator, 0, 10, inputs)
    (call,) = calls_of_timeline(trace.finish(), device=device).calls
    return call


def arguments(call: TracedCall) -> list[Any]:
    assert call.shape is not None, call.skip
    return read_list(call.shape["args"], "args")


def test_layouts_are_kept_where_they_matter() -> None:
    made = arguments(rebuild("aten::mm", [tensor(4, 8, strides=[1, 4]), tensor(8, 2)]))
    assert made == [
        {"tensor": [4, 8], "dtype": "float32", "strides": [1, 4]},
        {"tensor": [8, 2], "dtype": "float32"},
    ]


def run(call: TracedCall) -> Any:
    assert call.shape is not None, call.skip
    plan: CallPlan = read_plan(call.shape)
    maker = Maker("float32", "cpu")
    return bind_plan(plan, {name: make_tensor(spec, maker) for name, spec in plan.tensors().items()})()


def test_indices_stay_inside_what_they_index() -> None:
    lookup = [tensor(50, 4), tensor(1000, dtype="long int"), number("-1"), number("False"), number("False")]
    made = arguments(rebuild("aten::embedding", lookup))
    assert made[1] == {"tensor": [1000], "dtype": "int64", "high": 50}
    loss = [tensor(6, 3), tensor(6, dtype="long int"), NONE, number("1"), number("-100")]
    assert arguments(rebuild("aten::nll_loss_forward", loss))[1]["high"] == 3
    run(rebuild("aten::embedding", lookup))
    run(rebuild("aten::nll_loss_forward", loss))


def test_bags_of_one_length_are_rebuilt() -> None:
    long = "long int"
    forward = [tensor(50, 4), tensor(12, dtype=long), tensor(3, dtype=long), number("False"), number("0"),
               number("False"), NONE, number("False"), number("-1")]  # fmt: skip
    made = arguments(rebuild("aten::_embedding_bag", forward))
    assert made[2] == {"tensor": [3], "dtype": "int64", "ramp": [4, 1]}
    run(rebuild("aten::_embedding_bag", forward))
    backward = [tensor(3, 4), tensor(12, dtype=long), tensor(12, dtype=long), tensor(3, dtype=long),
                tensor(0, dtype=long), number("50"), number("False"), number("0"), NONE, number("-1")]  # fmt: skip
    gradient = rebuild("aten::_embedding_bag_dense_backward", backward)
    assert run(gradient).shape == (50, 4)
    plan = read_plan(gradient.shape or {})
    inputs = [make_tensor(spec, Maker("float32", "cpu")) for spec in plan.tensors().values()]
    assert inputs[2].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert inputs[3].tolist() == [4, 4, 4]
    uneven = [*forward[:1], tensor(13, dtype=long), *forward[2:]]
    assert "steer what it does" in str(rebuild("aten::_embedding_bag", uneven).skip)


def test_whole_numbers_that_nobody_knows_are_not_guessed() -> None:
    unknown = rebuild("aten::kron", [tensor(4, dtype="int"), tensor(4, dtype="int")])
    assert "which whole numbers self may hold" in str(unknown.skip)
    split = rebuild("aten::repeat_interleave", [tensor(4, dtype="long int"), NONE])
    assert "steer what it does" in str(split.skip)
    plain = rebuild("aten::add", [tensor(4, dtype="long int"), tensor(4, dtype="long int"), number("1")])
    assert plain.skip is None


@pytest.mark.parametrize(
    ("operator", "inputs", "reason"),
    [
        ("fbgemm::lookup", [tensor(4)], "belongs to fbgemm"),
        ("aten::_foreach_add_", [("TensorList", [], [], ""), number("1")], "does not hold long lists"),
        ("aten::cat", [("TensorList", [[2, 2], [2, 2]], [[2, 1], [2, 1]], ""), number("0")], "dtypes of a list"),
        ("aten::fill_", [tensor(4), ("Scalar", [], [], "")], "its input value .* was not recorded"),
        ("aten::add", [tensor(4, dtype="c10::complex<float>"), tensor(4), number("1")], "complex64"),
        ("aten::arange", [number("8"), number("4"), number("0"), NONE, NONE], "takes no tensor"),
    ],
)
def test_what_cannot_be_rebuilt_says_why(operator: str, inputs: list[Any], reason: str) -> None:
    import re

    call = rebuild(operator, inputs)
    assert call.shape is None
    assert re.search(reason, str(call.skip))


def test_words_that_a_timeline_leaves_out_are_assumed_aloud() -> None:
    call = rebuild("aten::gelu", [tensor(4), NONE])
    assert call.shape is not None
    assert call.assumed == ["approximate=none"]


def test_numbers_beside_tensors_stay_numbers() -> None:
    """On a GPU a number that torch has wrapped lives on the host; as a tensor there it would be another kernel."""
    made = arguments(rebuild("aten::mul", [tensor(4), tensor(dtype="double")], device="cuda"))
    assert made[1] == 0.5


# Execution traces

SCHEMA = "aten::addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"
CAT = "aten::cat(Tensor[] tensors, int dim=0) -> Tensor"


def make_node(number: int, name: str, schema: str, inputs: Arguments, parent: int = 1, **more: Any) -> Node:
    return Node(id=number, name=name, parent=parent, op_schema=schema, inputs=inputs, tid=1, rf_id=number, **more)


def value(number: int, device: str = "cpu") -> list[Any]:
    return [number, number, 0, 4, 4, device]


def cat_inputs(device: str = "cpu") -> Arguments:
    return Arguments.of(
        [[value(5, device), value(6, device)], 0], [[[2, 2], [2, 2]], []],
        ["GenericList[Tensor(float),Tensor(float)]", "Int"], [[[2, 1], [1, 2]], []],
    )  # fmt: skip


def test_an_execution_trace_knows_lists_and_overloads() -> None:
    nodes = (
        Node(id=1, name="[pytorch|profiler|execution_trace|process]"),
        make_node(2, "aten::cat", CAT, cat_inputs()),
        make_node(3, "aten::cat", CAT, cat_inputs()),
        make_node(
            4, "aten::t", "aten::t(Tensor(a) self) -> Tensor(a)", Arguments.of([value(7)], [[2, 2]], ["Tensor(float)"])
        ),
    )
    found = calls_of_graph(Graph(nodes), device="cpu")
    call = find_call(found.calls, "aten::cat")
    assert (call.count, call.trace_s) == (2, None)
    assert arguments(call)[0] == [
        {"tensor": [2, 2], "dtype": "float32"},
        {"tensor": [2, 2], "dtype": "float32", "strides": [1, 2]},
    ]
    assert find_call(found.calls, "aten::t").skip == NO_WORK


def test_what_ran_on_the_host_is_not_measured_on_a_device() -> None:
    schema = parse_schema(CAT)
    assert schema is not None
    call = bind_inputs(schema, read_graph_inputs(cat_inputs().parsed()))
    with pytest.raises(CannotRebuildError, match="ran on the host"):
        make_call_arguments(call, "cuda")


def test_ranges_that_were_recorded_go_before_bounds() -> None:
    schema = parse_schema("aten::cumsum(Tensor self, int dim, *, ScalarType? dtype=None) -> Tensor")
    assert schema is not None
    call = bind_inputs(schema, [TracedTensor((9,), "int64"), 0, None])
    made, _ = make_call_arguments(call, "cpu", {0: (3, 11)})
    assert made[0] == {"tensor": [9], "dtype": "int64", "low": 3, "high": 12}


def test_exact_scalars_come_from_the_timeline() -> None:
    assert read_graph_inputs([0.0, 3, "none"], [1e-12, 3, NOT_RECORDED]) == [1e-12, 3, "none"]


# Cases and what is said of them


def test_cases_run_and_are_compared() -> None:
    trace = Trace()
    trace.call("aten::add", 0, 10, ADD)
    trace.call("aten::add", 20, 40, ADD)
    trace.call("aten::cat", 50, 60, [("TensorList", [[2, 2]], [[2, 1]], ""), number("0")])
    traced = calls_of_timeline(trace.finish(), device="cpu")
    (case,) = cases_of_trace(traced, device="cpu")
    assert read_case(case).dtype == "float32"
    assert case.benchmark.config == "trace"
    assert [(call.key, call.count) for call in traced.calls if call.key] == [(case.key, 2)]
    stored = traced.record()
    assert "2 × aten::add float32[4,4] float32[4,4] 1: 15.00 ns in the trace" in format_calls(stored)
    comparison = compare_with_trace(stored, [])
    assert comparison.covered_share == 0.0
    text = format_comparison(comparison)
    assert "not measured yet" in text
    assert "dtypes of a list" in text


def test_fractions_that_change_from_step_to_step_are_one_case() -> None:
    trace = Trace()
    for i, text in enumerate(["0.001234", "-0.0056", "1e-05", "2.", "0.5"]):
        trace.call("aten::add", 20 * i, 20 * i + 10, [tensor(4), tensor(4), number(text)])
    calls = calls_of_timeline(trace.finish(), device="cpu").calls
    assert sorted((call.count, str(call.shape and call.shape["kwargs"])) for call in calls) == [
        (1, '{"alpha":0.5}'),
        (1, '{"alpha":2.0}'),
        (3, '{"alpha":0.001234}'),
    ]


def test_only_those_that_take_most() -> None:
    trace = Trace()
    trace.call("aten::add", 0, 10, ADD)
    trace.call("aten::mul", 20, 90, ADD[:2])
    traced = calls_of_timeline(trace.finish(), device="cpu")
    cases = cases_of_trace(traced, device="cpu", top=1)
    assert [case.parameters["target"] for case in cases] == ["aten::mul.Tensor"]


def test_files_are_found_by_what_they_hold(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not there"):
        find_trace_files(tmp_path / "none")
    with pytest.raises(UsageError, match="0 timelines and 0 execution traces"):
        find_trace_files(tmp_path)
    (tmp_path / "one.json").write_text('{"schemaVersion": 1, "traceEvents": []}')
    (tmp_path / "two.json").write_text('{"schema": "1.1.1-chakra.0.0.4", "nodes": []}')
    found = find_trace_files(tmp_path)
    assert (found.timeline, found.graph) == (tmp_path / "one.json", tmp_path / "two.json")
    assert find_trace_files(tmp_path / "two.json").timeline is None


@pytest.fixture(scope="module", params=MODELS)
def h200(request: pytest.FixtureRequest) -> TracedCalls:
    folder = H200 / request.param
    if not folder.exists():
        pytest.skip("the shared traces are not here")
    return read_traced_calls(find_trace_files(folder), device="cuda")


def test_all_work_of_real_steps_can_be_rebuilt(h200: TracedCalls) -> None:
    assert [call.skip for call in h200.calls if call.skip] == []
    assert sum(call.trace_s or 0.0 for call in h200.calls) == pytest.approx(h200.busy_s)
    assert h200.linked_share == 1.0
    cases = cases_of_trace(h200, device="cuda")
    assert all(call.key is not None for call in h200.calls)
    assert {case.key for case in cases} == {call.key for call in h200.calls}


def test_rebuilt_calls_fit_their_operators(h200: TracedCalls) -> None:
    """On tensors without memory: what torch has no such form of is not counted."""
    import torch

    for call in h200.calls:
        assert call.shape is not None
        plan = read_plan(call.shape)
        if "cudnn" in call.operator or "efficient_attention" in call.operator:
            continue  # no form without memory
        inputs = {}
        for name, spec in plan.tensors().items():
            made = torch.empty(spec.size, dtype=getattr(torch, str(spec.dtype)), device="meta")
            strides = made.stride() if spec.strides is None else spec.strides
            inputs[name] = torch.empty_strided(spec.size, strides, dtype=made.dtype, device="meta")
        bind_plan(plan, inputs)()
