from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.bench.ops import case_files as param_files
from stepscope.bench.ops.build import build
from stepscope.bench.ops.case_files import is_param_file, read_case_file, read_param_file
from stepscope.bench.ops.families.call import OPERATOR
from stepscope.bench.ops.inputs import Maker
from stepscope.bench.ops.language import CaseRequest
from stepscope.core.errors import BadInputError, StepscopeError


def tensor(*shape: Any, dtype: Any = "float", **more: Any) -> dict[str, Any]:
    return {"type": "tensor", "dtype": dtype, "shape": list(shape), **more}


def operator(*inputs: Any, build_entries: list[Any] | None = None, **more: Any) -> dict[str, Any]:
    config: dict[str, Any] = {"input": [{"args": list(args)} for args in inputs]}
    if build_entries is not None:
        config["build"] = build_entries
    return {"input_data_generator": "PyTorch:DefaultDataGenerator", "config": [config], **more}


def read(content: dict[str, Any], seed: int = 0) -> list[CaseRequest]:
    return read_param_file(content, file="ops.json", seed=seed)


def arguments(request: CaseRequest) -> list[Any]:
    assert isinstance(request.shape, dict)
    return json.loads(request.shape["args"])


def sizes(request: CaseRequest) -> list[list[int]]:
    return [one["tensor"] for one in arguments(request)]


def test_plain_cases_are_read_in_their_order() -> None:
    requests = read({"torch.mm": operator([tensor(7, 3), tensor(3, 5)], [tensor(9, 3), tensor(3, 5)])})
    assert [sizes(one) for one in requests] == [[[7, 3], [3, 5]], [[9, 3], [3, 5]]]
    assert requests[0] == CaseRequest(
        op="call",
        shape={
            "target": "torch.mm",
            "args": '[{"dtype":"float32","tensor":[7,3]},{"dtype":"float32","tensor":[3,5]}]',
            "kwargs": "{}",
            "build": "[]",
            "build_kwargs": "{}",
        },
        dtypes=("float32",),
        config="param",
        where="ops.json: torch.mm.config[0].input[0]",
    )


def test_every_type_of_argument() -> None:
    given_args = [
        {"type": "int", "value": 3},
        {"type": "long", "value": 4},
        {"type": "float", "value": 0.5},
        {"type": "double", "value": 2},
        # one of PARAM's own files calls this an int
        {"type": "int", "value": 2.5},
        {"type": "bool", "value": False},
        {"type": "str", "value": "sum"},
        {"type": "str"},
        {"type": "none"},
        {"type": "device", "value": "cuda"},
        {"type": "genericlist", "value": [tensor(2), {"type": "int", "value": 1}]},
        {"type": "tuple", "value": [{"type": "int", "value": 128}, {"type": "int", "value": 512}]},
        tensor(2, 3, dtype="bfloat16", requires_grad=False),
    ]
    (request,) = read({"torch.x": operator(given_args)})
    assert arguments(request) == [
        3, 4, 0.5, 2, 2.5, False, "sum", "", None, {"device": "cuda"}, [{"tensor": [2], "dtype": "float32"}, 1],
        [128, 512], {"tensor": [2, 3], "dtype": "bfloat16", "grad": False},
    ]  # fmt: skip
    dtypes = ["uint8", "int8", "int16", "int", "long", "float", "double", "float16", "bfloat16", "bool"]
    (request,) = read({"torch.x": operator([tensor(1, dtype=dtype) for dtype in dtypes])})
    assert [one["dtype"] for one in arguments(request)] == (
        ["uint8", "int8", "int16", "int32", "int64", "float32", "float64", "float16", "bfloat16", "bool"]
    )


def test_ranges_include_both_ends_and_multiply() -> None:
    swept = tensor([128, 256, 64], 8, __range__=["shape"])
    (number,) = ({"type": "int", "value": [1, 5, 2], "__range__": ["value"]},)
    requests = read({"torch.x": operator([swept, number], input_iterator="RangeConfigIterator")})
    found = [(arguments(one)[0]["tensor"][0], arguments(one)[1]) for one in requests]
    assert found == [(a, b) for a in (128, 192, 256) for b in (1, 3, 5)]


def test_lists_of_dtypes_words_and_booleans_sweep() -> None:
    args = [
        tensor(4, dtype=["float", "half"], __range__=["dtype"]),
        {"type": "str", "value": ["a", "b"], "__range__": ["value"]},
        {"type": "bool", "value": [True, False], "__range__": ["value"]},
        {
            "type": "tuple",
            "value": [{"type": "int", "value": [1, 2, 1], "__range__": ["value"]}],
            "__range__": ["value"],
        },
    ]
    requests = read({"torch.x": operator(args)})
    assert len(requests) == 2 * 2 * 2 * 2
    assert [one.dtypes for one in requests[::8]] == [("float32",), ("float16",)]
    assert arguments(requests[-1])[1:] == ["b", False, [2]]
    both = tensor([1, 2, 1], dtype=["float", "double"], __range__=["dtype", "shape"])
    assert len(read({"torch.x": operator([both])})) == 2 * 2


def test_dimensions_are_copied_between_arguments() -> None:
    """As in a batched product with an addend: only the batch and two sizes are given."""
    args = [
        tensor([1, 2, 1], -1, -1, __range__=["shape"], __copy__=[{"shape": [1, [1, 1]]}, {"shape": [2, [2, 2]]}]),
        tensor(-1, [5, 6, 1], [7, 8, 1], __range__=["shape"], __copy__=[{"shape": [0, [0, 0]]}]),
        tensor(-1, -1, 9, __copy__=[{"shape": [0, [0, 0]]}, {"shape": [1, [1, 2]]}]),
    ]
    requests = read({"torch.baddbmm": operator(args)})
    expected = [[[batch, m, 9], [batch, m, k], [batch, k, 9]] for batch in (1, 2) for m in (5, 6) for k in (7, 8)]
    assert [sizes(one) for one in requests] == expected


def test_a_copy_of_a_copy_is_found_in_any_order() -> None:
    args = [
        tensor(-1, __copy__=[{"shape": [0, [1, 0]]}]),
        tensor(-1, __copy__=[{"shape": [0, [2, 0]]}]),
        tensor(4),
    ]
    (request,) = read({"torch.x": operator(args)})
    assert sizes(request) == [[4], [4], [4]]
    circle = [tensor(-1, __copy__=[{"shape": [0, [1, 0]]}]), tensor(-1, __copy__=[{"shape": [0, [0, 0]]}])]
    with pytest.raises(BadInputError, match="follows itself"):
        read({"torch.x": operator(circle)})


def test_random_values_are_drawn_by_the_seed() -> None:
    content = {
        "torch.x": operator(*[[{"type": "int", "value_range": [3, 5]}, {"type": "float", "value_range": [-1, 1]}]] * 50)
    }
    drawn = [arguments(one) for one in read(content, seed=1)]
    assert {whole for whole, _ in drawn} == {3, 4, 5}
    assert all(-1 <= number < 1 and isinstance(number, float) for _, number in drawn)
    assert drawn == [arguments(one) for one in read(content, seed=1)]
    assert drawn != [arguments(one) for one in read(content, seed=2)]


def test_modules_are_built_and_operators_of_torchscript_have_schemas() -> None:
    conv = {
        "args": [{"type": "int", "value": 3}, {"type": "int", "value": 4}],
        "kwargs": {"kernel_size": {"type": "int", "value": [1, 3, 2], "__range__": ["value"]}},
    }
    requests = read({"torch.nn.Conv2d": operator([tensor(1, 3, 8, 8)], [tensor(2, 3, 8, 8)], build_entries=[conv])})
    built = [(one.shape["build_kwargs"], sizes(one)[0][0]) for one in requests if isinstance(one.shape, dict)]
    assert sorted(built) == [(f'{{"kernel_size":{kernel}}}', batch) for kernel in (1, 3) for batch in (1, 2)]
    assert len(requests) == 4

    schema = "aten::mul.Tensor(Tensor self, Tensor other) -> Tensor"
    by_schema = operator([tensor(4), tensor(4)], build_entries=[{"args": [{"type": "str", "value": schema}]}])
    types = {"type": "genericlist", "value": [{"type": "str", "value": "Tensor"}] * 3}
    by_types = operator([tensor(4), tensor(4)], build_entries=[{"args": [types]}])
    targets = [one.shape["target"] for one in read({"aten::mul": by_schema, "aten::add": by_types})]  # type: ignore[index]
    assert targets == [schema, "aten::add"]


def test_files_run_and_what_is_no_operator_is_skipped(tmp_path: Path) -> None:
    """Every kind of name in one file: one that cannot run does not keep the others from running."""
    embedding = operator(
        [{"type": "int", "name": "batch_size", "value": [128, 256], "__list__": ["value"]}],
        build_entries=[{"args": [{"type": "int", "name": "rows", "value": [100, 200]}]}],
    )
    in_place = {"type": "bool", "value": True}
    content = {
        "torch.add_": operator([tensor(4, 4), tensor(4, 4)]),
        "torch.nn.functional.relu": operator([tensor(4, 4)]),
        "torch.nn.ReLU": operator([tensor(4, requires_grad=False)], build_entries=[{"args": [in_place]}]),
        "aten::add": operator([tensor(4), tensor(4), {"type": "int", "value": 1}]),
        "torch.cat": operator([{"type": "tuple", "value": [tensor(2, 2), tensor(2, 2)]}, {"type": "int", "value": 0}]),
        "pytorch:alex_net": operator([tensor(1, 3, 224, 224)], build_entries=[]),
        "SplitTableBatchedEmbeddingBagsCodegen": embedding,
    }  # fmt: skip
    path = tmp_path / "ops.json"
    path.write_text(json.dumps(content))
    requests = read_case_file(path)
    ran, skipped = 0, 0
    for request in requests:
        assert isinstance(request.shape, dict)
        try:
            OPERATOR.make_inputs(request.shape, Maker("float32", "cpu"))
        except NotImplementedError:
            skipped += 1
            continue
        built = build(OPERATOR, request.shape, dtype="float32", device="cpu", direction="forward")
        built.calls[0]()
        built.check()
        ran += 1
    assert (ran, skipped) == (5, 1 + 2)


def test_a_batch_file_of_one_operator_is_read() -> None:
    content = {
        "op_name": "torch.add",
        "build_id": "1:2",
        "op_info": operator([tensor(4), tensor(4)]),
        "run_options": {},
    }
    assert is_param_file(content)
    (request,) = read(content)
    assert isinstance(request.shape, dict)
    assert request.shape["target"] == "torch.add"


def test_which_files_are_params() -> None:
    assert is_param_file({"torch.mm": {"config": []}})
    for other in ({}, [], {"cases": []}, {"torch.mm": {"config": []}, "x": 1}, {"torch.mm": {}}, None):
        assert not is_param_file(other)


@pytest.mark.parametrize(
    ("content", "place", "message"),
    [
        ({"torch.x": {"config": {}}}, "torch.x.config", "a list is expected"),
        ({"torch.x": {"config": [], "iterator": 1}}, "torch.x", "unknown key 'iterator'"),
        ({"torch.x": {"config": [3]}}, "torch.x.config[0]", "an object is expected"),
        ({"torch.x": {"config": [{"inputs": []}]}}, "torch.x.config[0]", "unknown key 'inputs'"),
        ({"torch.x": {"config": [{}]}}, "torch.x.config[0].input", "a list is expected"),
        ({"torch.x": operator([3])}, "torch.x.config[0].input[0].args[0]", "an object is expected"),
        ({"torch.x": operator([{"type": "matrix"}])}, "torch.x.config[0].input[0]", "no type and value"),
        ({"torch.x": operator([{"type": ["int"]}])}, "torch.x.config[0].input[0]", "no type and value"),
        ({"torch.x": operator([{"type": "bool", "value": 1}])}, "torch.x.config[0].input[0]", "no type and value"),
        ({"torch.x": operator([tensor(-1)])}, "torch.x.config[0].input[0]", "whole numbers"),
        ({"torch.x": operator([tensor([1, 2, 1])])}, "torch.x.config[0].input[0]", "whole numbers"),
        ({"torch.x": operator([tensor(2, dtype="float31")])}, "torch.x.config[0].input[0]", "dtype is none of"),
        ({"torch.x": operator([tensor([1, 2, 0], __range__=["shape"])])}, "torch.x", "a range is"),
        ({"torch.x": operator([tensor([5, 2, 1], __range__=["shape"])])}, "torch.x", "a range is"),
        ({"torch.x": operator([tensor(1, __range__=["size"])])}, "torch.x", "names what is not there"),
        ({"torch.x": operator([tensor([1, 10**7, 1], __range__=["shape"])])}, "torch.x", "200,000"),
        ({"torch.x": operator([tensor([1, 999, 1], [1, 999, 1], __range__=["shape"])])}, "torch.x", "200,000"),
        ({"torch.x": operator([tensor(1, __copy__=[{"shape": [0, 1]}])])}, "torch.x", "__copy__ is"),
        ({"torch.x": operator([tensor(1, __copy__=[{"shape": [0, [9, 0]]}])])}, "torch.x", "__copy__ is"),
        ({"torch.x": operator([{"type": "int", "value_range": [1]}])}, "torch.x", "value_range"),
        ({"torch.x": operator([{"type": "int", "value": 10**40}])}, "torch.x", "no type and value"),
        ({"a b": operator([tensor(1)])}, "a b.config[0].input[0]", "no name"),
    ],
)  # fmt: skip
def test_bad_files_are_refused_with_their_place(content: dict[str, Any], place: str, message: str) -> None:
    with pytest.raises(BadInputError, match=message) as caught:
        read(content)
    assert (caught.value.where or "").startswith(f"ops.json: {place}")
    assert caught.value.hint


@pytest.mark.parametrize("target", ["torch.nn.Embedding", "torch.nn.EmbeddingBag"])
def test_weights_of_a_module_that_is_given_whole_numbers_are_floats(target: str) -> None:
    import torch

    sizes_of_table = [{"args": [{"type": "int", "value": 1000}, {"type": "int", "value": 16}]}]
    (request,) = read({target: operator([tensor(4, 8, dtype="long")], build_entries=sizes_of_table)})
    assert request.dtypes is None
    assert isinstance(request.shape, dict)
    built = build(OPERATOR, request.shape, dtype="float16", device="cpu", direction="forward")
    assert {name: one.dtype for name, one in built.inputs.items()} == {
        "arg0": torch.int64, "module.weight": torch.float16,
    }  # fmt: skip
    assert built.calls[0]().dtype == torch.float16
    assert OPERATOR.check(request.shape, built.inputs, "float16", "forward") is None


def test_more_cases_than_allowed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(param_files, "MAX_CASES", 5)
    read({"torch.x": operator(*[[tensor(1)]] * 5)})
    with pytest.raises(BadInputError, match="more than 5 cases"):
        read({"torch.x": operator(*[[tensor(1)]] * 6)})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4)
    | st.sampled_from(["tensor", "int", "genericlist", "shape", "value", "float"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["type", "value", "shape", "dtype", "__range__", "__copy__", "__list__", "value_range"]),
        inner, max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(JSON, JSON)
def test_bad_arguments_are_refused_and_nothing_else(first: Any, second: Any) -> None:
    try:
        read({"torch.x": operator([first, second], [tensor(1), first])})
    except StepscopeError as error:
        assert error.where is not None  # noqa: PT017 (most of what is drawn is refused)
