from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepscope.bench.ops import cases as cases_module
from stepscope.bench.ops import catalogue
from stepscope.bench.ops.case_files import read_case_file
from stepscope.bench.ops.cases import call_cases, cases_of_requests, make_cases, parse_shape
from stepscope.bench.ops.families.call import OPERATOR as CALL
from stepscope.bench.ops.families.gemm import Gemm, Linear
from stepscope.bench.ops.language import CaseRequest
from stepscope.bench.ops.operator import Operator
from stepscope.core.errors import UsageError
from stepscope.records import Case


class ForwardOnly(Gemm):
    name = "forward_only"
    passes = ("forward",)
    dtypes = ("int8",)


class Step(Gemm):
    name = "step"
    passes = ("forward", "step")


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> dict[str, Operator]:
    """A few operators, so that nothing here depends on how many there are."""
    few: dict[str, Operator] = {one.name: one for one in (Gemm(), Linear(), ForwardOnly(), Step(), CALL)}
    for module in (catalogue, cases_module):
        monkeypatch.setattr(module, "operators", lambda: few)
    return few


def make(*names: str, **options: Any) -> list[Case]:
    asked: dict[str, Any] = {"shapes": [], "dtypes": ["float32"], "directions": ["forward"], "device": "cpu", **options}
    return make_cases(names=names, **asked)


def refuse(*names: str, **options: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        make(*names, **options)
    assert caught.value.hint
    return caught.value


def test_a_case_holds_all_that_it_was_asked_for() -> None:
    (case,) = make("linear", shapes=["batch=4,in=6,out=3"], device="cuda:1", caches=["cold"])
    assert case.benchmark.id == "linear/micro/forward/custom"
    assert case.benchmark.owner == "operators"
    assert case.benchmark.description == Linear.summary
    assert case.parameters == {
        "batch": 4, "in": 6, "out": 3, "dtype": "float32", "device": "cuda:1", "cache": "cold",
    }  # fmt: skip
    assert case.batch_size == 4
    assert make("gemm")[0].batch_size is None
    (compiled,) = make("gemm", compiled=True)
    assert compiled.parameters["compile"] is True
    assert "compile" not in make("gemm")[0].parameters


def test_everything_is_combined_and_nothing_stands_twice() -> None:
    listed = make(
        "gemm", "linear", shapes=[""], sets=["tiny"], dtypes=["float32", "float64"],
        directions=["forward", "backward"], caches=["warm", "cold"],
    )  # fmt: skip
    assert len(listed) == 2 * 2 * 2 * 2 * 2
    assert len({case.key for case in listed}) == len(listed)
    assert {case.benchmark.config for case in listed} == {"custom", "tiny"}
    # the same shape in two texts, and two equal dtypes
    assert len(make("gemm", shapes=["m=8/16", "m=16/32"], dtypes=["float32", "float32"])) == 3


def test_sets_give_their_name_and_what_they_are_meant_for() -> None:
    listed = make("gemm", sets=["A"])
    assert len(listed) == 15
    assert listed[0].benchmark.id == "gemm/micro/forward/A"
    meant = make("gemm", sets=["llama3-8b"], dtypes=[], directions=[])
    assert {case.parameters["dtype"] for case in meant} == {"bfloat16"}
    asked = make("gemm", sets=["llama3-8b"], dtypes=["float16"])
    assert {case.parameters["dtype"] for case in asked} == {"float16"}
    both = make("linear", sets=["ml_perf_model"], dtypes=[], directions=[])
    assert len(both) == 2 * 5000


def test_what_nobody_asks_for_is_the_usual() -> None:
    assert [case.label for case in make("linear", dtypes=[], directions=[], caches=[])] == [
        "linear/micro/forward/custom[batch=512,in=1024,out=1024,dtype=float32,device=cpu,cache=warm]"
    ]
    assert make("forward_only", dtypes=[])[0].parameters["dtype"] == "int8"


def test_all_are_those_that_have_the_set() -> None:
    assert [case.benchmark.model for case in make("all", sets=["tiny"])] == [
        "gemm", "linear", "forward_only", "step", "call",
    ]  # fmt: skip
    assert {case.benchmark.model for case in make("all", sets=["B"])} == {"gemm"}
    assert "llama3-8b" in (refuse("all", sets=["llama3-8"]).hint or "")
    refuse("all", shapes=["batch=8"])


def test_draws_are_repeated() -> None:
    drawn = make("gemm", shapes=["m=32~4096,n=m"], draws=5, seed=1)
    assert len(drawn) == 5
    assert make("gemm", shapes=["m=32~4096,n=m"], draws=5, seed=1) == drawn
    assert make("gemm", shapes=["m=32~4096,n=m"], draws=5, seed=2) != drawn
    assert "draws are for shapes" in refuse("gemm", sets=["tiny"], draws=5).message


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"dtypes": ["float31"]}, "--dtype"),
        ({"directions": ["sideways"]}, "--pass"),
        ({"caches": ["hot"]}, "--cache"),
        ({"sets": ["Z"]}, "--set Z"),
        ({"shapes": ["q=1"]}, "--shape q=1"),
    ],
)
def test_unknown_names_are_refused(options: dict[str, Any], where: str) -> None:
    assert refuse("gemm", **options).where == where
    assert refuse("gemm", "linear", **options).where == where


def test_unknown_operators_are_refused() -> None:
    error = refuse("gem")
    assert (error.where, error.hint) == ("--op", "did you mean gemm?")


def test_what_an_operator_lacks_is_kept_for_the_run_to_record() -> None:
    (alone,) = make("forward_only", dtypes=["float32"], directions=["backward"])
    assert (alone.benchmark.mode, alone.parameters["dtype"]) == ("backward", "float32")
    kept = make("forward_only", "gemm", directions=["backward"])
    assert [case.benchmark.model for case in kept] == ["forward_only", "gemm"]
    # a pass that any operator has is known
    assert len(make("gemm", "step", directions=["step"])) == 2


def test_more_cases_than_allowed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases_module, "MAX_CASES", 10)
    assert len(make("gemm", shapes=["m=1:10:+1"])) == 10
    assert "more than 10 cases" in refuse("gemm", shapes=["m=1:10:+1"], dtypes=["float32", "float64"]).message


def test_a_single_shape_is_read() -> None:
    assert parse_shape("m=1K", Gemm()) == {"m": 1024, "n": 1024, "k": 1024, "layout": "nn"}
    with pytest.raises(UsageError, match="stands for 2 shapes"):
        parse_shape("m=1/2", Gemm())


def test_requests_go_before_what_is_asked_for_all() -> None:
    requests = [
        CaseRequest(op="gemm", shape="m=8/16", dtypes=("float16",), caches=("cold",), where="f: cases[0]"),
        CaseRequest(op="linear", shape={"batch": [1, 2]}, passes=("backward",), where="f: cases[1]"),
        CaseRequest(op="gemm", shape="m=1~99", draws=2, seed=3, config="drawn", where="f: cases[2]"),
        CaseRequest(op="all", set="tiny", where="f: cases[3]"),
    ]
    listed = cases_of_requests(requests, device="cpu", dtypes=["float64"], directions=["forward"])
    first, second, third, fourth = listed[:2], listed[2:4], listed[4:6], listed[6:]
    assert {(c.parameters["dtype"], c.parameters["cache"], c.benchmark.mode) for c in first} == {
        ("float16", "cold", "forward")
    }
    assert {(c.parameters["dtype"], c.parameters["cache"], c.benchmark.mode) for c in second} == {
        ("float64", "warm", "backward")
    }
    assert [c.benchmark.config for c in third] == ["drawn", "drawn"]
    assert len(fourth) == 5


@pytest.mark.parametrize(
    ("request_", "where"),
    [
        (CaseRequest(op="gem", where="f: cases[0]"), "f: cases[0].op"),
        (CaseRequest(op="gemm", dtypes=("x",), where="f: cases[0]"), "f: cases[0].dtypes"),
        (CaseRequest(op="gemm", passes=("x",), where="f: cases[0]"), "f: cases[0].passes"),
        (CaseRequest(op="gemm", caches=("x",), where="f: cases[0]"), "f: cases[0].caches"),
        (CaseRequest(op="gemm", set="x", where="f: cases[0]"), "f: cases[0]"),
        (CaseRequest(op="gemm", set="tiny", draws=3, where="f: cases[0]"), "f: cases[0]"),
        (CaseRequest(op="gemm", shape="q=1", where="f: cases[0]"), "f: cases[0]"),
        (CaseRequest(op="gemm", shape={"m": 1.5}, where="f: cases[0]"), "f: cases[0]"),
        (CaseRequest(op="call", shape={"args": "float32[2"}, where="f: cases[0]"), "f: cases[0]"),
    ],
)
def test_bad_requests_are_refused_with_their_place(request_: CaseRequest, where: str) -> None:
    with pytest.raises(UsageError) as caught:
        cases_of_requests([request_], device="cpu")
    assert caught.value.where == where
    assert caught.value.hint


def test_calls_are_cases() -> None:
    (case,) = call_cases("aten::mm", "tensor[8,4] tensor[4,2]", device="cpu", dtypes=["bfloat16"])
    assert case.benchmark.id == "call/micro/forward/custom"
    assert case.parameters == {
        "target": "aten::mm", "args": '[{"tensor":[8,4]},{"tensor":[4,2]}]', "kwargs": "{}", "build": "[]",
        "build_kwargs": "{}", "dtype": "bfloat16", "device": "cpu", "cache": "warm",
    }  # fmt: skip
    (module,) = call_cases("torch.nn.Linear", "tensor[8,4]", build="4 2 bias=false", device="cpu")
    assert (module.parameters["build"], module.parameters["build_kwargs"]) == ("[4,2]", '{"bias":false}')
    with pytest.raises(UsageError):
        call_cases("mm", "", device="cpu")


def test_a_call_runs_in_the_dtype_that_its_tensors_name() -> None:
    """Asking for two dtypes would measure the same thing twice, once under a wrong name."""
    named = call_cases("torch.add", "float16[4] float16[4]", device="cpu", dtypes=["float32", "bfloat16"])
    assert [case.parameters["dtype"] for case in named] == ["float16"]
    tf32 = call_cases("torch.mm", "float32[4,4] float32[4,4]", device="cpu", dtypes=["float32", "tf32"])
    assert [case.parameters["dtype"] for case in tf32] == ["float32", "tf32"]


def test_a_module_runs_in_the_dtype_of_its_weights() -> None:
    """Whole numbers that it is given say nothing about them."""
    for target in ("torch.nn.Embedding", "torch.nn.EmbeddingBag"):
        asked = call_cases(target, "int64[4,8]<9", build="9 4", device="cpu", dtypes=["float32", "bfloat16"])
        assert [case.parameters["dtype"] for case in asked] == ["float32", "bfloat16"]
        (usual,) = call_cases(target, "int64[4,8]<9", build="9 4", device="cpu")
        assert usual.parameters["dtype"] == "float32"


def test_calls_are_not_drawn(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="draws are for shapes") as caught:
        call_cases("torch.sin", "tensor[8]", device="cpu", draws=3)
    assert (caught.value.where, "--draws" in (caught.value.hint or "")) == ("--draws", True)
    path = tmp_path / "ops.json"
    tensor = {"type": "tensor", "dtype": "float", "shape": [8]}
    path.write_text(json.dumps({"torch.sin": {"config": [{"input": [{"args": [tensor]}]}]}}))
    with pytest.raises(UsageError, match="draws are for shapes") as caught:
        cases_of_requests(read_case_file(path), device="cpu", draws=5)
    assert (caught.value.where or "").endswith("torch.sin.config[0].input[0]")
    assert "--draws" in (caught.value.hint or "")
    # an entry that asks for draws itself has lists to draw from
    entry = CaseRequest(op="call", shape={"target": ["torch.sin", "torch.cos"], "args": "tensor[8]"}, draws=1)
    assert len(cases_of_requests([entry], device="cpu", draws=5)) == 1


def test_a_file_of_calls_is_brought_into_one_form(tmp_path: Path) -> None:
    path = tmp_path / "calls.toml"
    path.write_text(
        """
        [[cases]]
        op = "call"
        shape = { target = ["torch.sin", "torch.cos"], args = ["tensor[8]", "float64[8]"] }
        dtypes = ["float32"]
        [[cases]]
        op = "call"
        shape = { target = "torch.sin", args = '[{"tensor": [8]}]' }
        """
    )
    listed = cases_of_requests(read_case_file(path), device="cpu")
    assert [(case.parameters["target"], case.parameters["dtype"]) for case in listed] == [
        ("torch.sin", "float32"), ("torch.sin", "float64"), ("torch.cos", "float32"), ("torch.cos", "float64"),
    ]  # fmt: skip


def test_a_file_of_params_becomes_cases(tmp_path: Path) -> None:
    tensor = {"type": "tensor", "dtype": "bfloat16", "shape": [[8, 16, 8], 4], "__range__": ["shape"]}
    path = tmp_path / "ops.json"
    path.write_text(json.dumps({"torch.nn.functional.relu": {"config": [{"input": [{"args": [tensor]}]}]}}))
    listed = cases_of_requests(read_case_file(path), device="cpu", directions=["forward", "backward"])
    assert [case.benchmark.id for case in listed] == 2 * ["call/micro/forward/param", "call/micro/backward/param"]
    assert {case.parameters["dtype"] for case in listed} == {"bfloat16"}


def test_cases_are_made_without_torch() -> None:
    """The side that only reads and plans has no torch."""
    program = """
import sys
sys.modules["torch"] = None
from stepscope.bench.ops.cases import call_cases, make_cases
from stepscope.bench.ops.case_files import read_case_file
from stepscope.bench.ops.families.call import OPERATOR
cases = make_cases(names=["gemm"], shapes=["m=32~64,n=m"], sets=["A"], dtypes=[], directions=[], device="cpu", draws=3)
call = dict(target="aten::mm", args='[{"tensor":[8,4]},{"tensor":[4,2]}]', kwargs="{}", build="[]", build_kwargs="{}")
OPERATOR.check_shape(call)
print(len(cases), OPERATOR.work(call, "float32", "forward").flops, OPERATOR.footprint_bytes(call, "float32"))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(15 + 3), str(2 * 8 * 4 * 2), str(2 * 4 * (8 * 4 + 4 * 2))]


def test_a_shape_that_fits_only_one_of_several_operators_points_to_a_case_file() -> None:
    error = refuse("gemm", "linear", shapes=["m=4,n=4,k=4", "batch=4,in=4,out=4"])
    assert "each --shape is measured with every --op" in error.message
    assert "--cases" in (error.hint or "")
    alone = refuse("gemm", shapes=["rows=4"])
    assert "--cases" not in (alone.hint or "")
