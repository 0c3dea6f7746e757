"""Keys of cases never change: resume and comparison pair runs of any two versions by them.

The table was written by the version that had no typed kinds, from the same calls as in `every_kind`.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from every_kind import list_every_kind

from stepscope.records import Benchmark, Case
from stepscope.records.codec import make_observed, make_spec
from stepscope.records.kinds import OtherObserved, OtherSpec, PatternObserved, WorkloadObserved

TABLE = [json.loads(line) for line in (Path(__file__).parent / "data" / "case-keys.jsonl").read_text().splitlines()]


def read_row(row: dict[str, Any]) -> Case:
    content = row["case"]
    benchmark = msgspec.convert(content["benchmark"], Benchmark)
    spec = make_spec(benchmark, content["parameters"])
    return Case(benchmark=benchmark, spec=spec, batch_size=content["batch_size"], world_size=content["world_size"])


def test_every_stored_case_keeps_its_key_label_and_parameters() -> None:
    kinds: Counter[str] = Counter()
    for row in TABLE:
        case = read_row(row)
        assert (case.key, case.label) == (row["key"], row["label"])
        assert list(case.parameters.items()) == list(row["case"]["parameters"].items())
        assert msgspec.json.decode(msgspec.json.encode(case), type=Case) == case
        kinds[str(type(case.spec).__struct_config__.tag)] += 1
    assert kinds.keys() == {
        "operator", "call", "collective", "point_to_point", "pair", "overlap", "pattern", "process_group", "workload",
        "user_model",
    }  # fmt: skip


def test_the_same_calls_make_the_same_cases(tmp_path: Path) -> None:
    made = list_every_kind(tmp_path)
    assert len(made) == len(TABLE)
    stored = [read_row(row) for row in TABLE]
    assert Counter(type(case.spec) for case in made) == Counter(type(case.spec) for case in stored)
    # The path of a file is part of the key.
    assert {(case.key, case.label, type(case.spec)) for case in made if "file" not in case.parameters} == {
        (row["key"], row["label"], type(case.spec))
        for row, case in zip(TABLE, stored, strict=True)
        if "file" not in case.parameters
    }


@pytest.mark.parametrize(
    ("owner", "model", "parameters"),
    [
        ("communication", "all_reduce", {"size_bytes": 8}),
        ("communication", "all_reduce", {"size_bytes": 8.0, "dtype": "float32", "device": "cpu"}),
        ("communication", "all_reduce", {"size_bytes": 8, "dtype": "float32", "device": "cpu", "new": 1}),
        ("communication", "pair", {"source": True, "target": 1, "size_bytes": 8, "dtype": "x", "device": "cpu"}),
        ("operators", "gemm", {"m": 1, "dtype": 3}),
        ("operators", "call", {"target": "aten::mm"}),
    ],
)
def test_what_no_kind_says_exactly_is_kept_as_it_is(owner: str, model: str, parameters: dict[str, Any]) -> None:
    benchmark = Benchmark(model=model, implementation="micro", mode="gloo", config="x", owner=owner)
    spec = make_spec(benchmark, parameters)
    assert spec == OtherSpec(parameters=parameters)
    assert Case(benchmark=benchmark, spec=spec).parameters == parameters
    assert make_observed(spec, {"wrong": 1}) == OtherObserved(other={"wrong": 1})


def test_facts_without_a_field_are_kept_under_their_names() -> None:
    case = next(case for case in map(read_row, TABLE) if case.benchmark.model == "pattern_ddp")
    odd = {"steps": 3, "bytes": "many", "sequence": "one:all_reduce:8:8 two:what:ever", "new": 1.5, "wrong": True}
    observed = make_observed(case.spec, odd)
    assert isinstance(observed, PatternObserved)
    assert (observed.steps, observed.wrong, observed.busiest_rank_bytes) == (3, None, None)
    assert observed.other == {name: value for name, value in odd.items() if name != "steps"}
    assert make_observed(case.spec, {}) is None


def test_what_is_observed_later_goes_first() -> None:
    first = WorkloadObserved(setup_s=1.0, check="not asked for", check_errors={"loss": 1.0})
    joined = first | WorkloadObserved(check="passed", model_flops=0)
    assert joined == WorkloadObserved(setup_s=1.0, check="passed", check_errors={"loss": 1.0}, model_flops=0)
    assert joined | None == joined
    assert joined.without(["check"]).facts() == {"setup_s": 1.0, "model_flops": 0, "check_loss": 1.0}
