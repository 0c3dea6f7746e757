from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import make_case, make_result, make_samples, make_system
from reference_tables import RECORDS, make_schema
from stepscope.core.errors import BadInputError, NewerVersionError, UsageError
from stepscope.records import (
    Benchmark,
    Case,
    CaseResult,
    Failure,
    OperatorRequest,
    Plan,
    RankSamples,
    Run,
    System,
    describe_exception,
    encode_document,
    parse_document,
    parse_samples,
    slowest_rank_seconds,
)
from stepscope.records.codec import UPGRADES, current_version

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"

scalars = st.one_of(
    st.booleans(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False), st.text()
)
parameters = st.dictionaries(st.text(min_size=1), st.one_of(scalars, st.lists(scalars, max_size=3)), max_size=4)


def test_benchmark_identity() -> None:
    one = Benchmark(model="dlrm", implementation="ootb", mode="train", config="A.1dev-embed32-fp32")
    assert one.id == "dlrm/ootb/train/A.1dev-embed32-fp32"


@pytest.mark.parametrize(
    "change", [{"model": "a/b"}, {"config": ""}, {"version": 0}, {"owner": "someone@example.org"}, {"owner": ""}]
)
def test_bad_benchmarks(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="benchmark"):
        Benchmark(**{"model": "gemm", "implementation": "micro", "mode": "forward", "config": "custom", **change})


@given(parameters)
def test_a_case_key_depends_on_content_alone(content: dict[str, Any]) -> None:
    forward = make_case(**{f"p_{name}": value for name, value in content.items()})
    backward = make_case(**{f"p_{name}": value for name, value in reversed(content.items())})
    assert forward.key == backward.key
    read_back = msgspec.json.decode(msgspec.json.encode(forward), type=Case)
    assert read_back.key == forward.key
    other = msgspec.structs.replace(forward, world_size=2)
    assert other.key != forward.key
    newer = msgspec.structs.replace(forward.benchmark, version=2)
    assert msgspec.structs.replace(forward, benchmark=newer).key != forward.key


def test_a_known_key_never_changes() -> None:
    """Keys are in stored runs: if this fails, old runs can no longer be paired with new ones."""
    assert make_case(m=512, n=512, k=512, dtype="float32", device="cpu").key == "a3592a881b4cd8ad"


def test_results_need_a_cause_exactly_when_they_are_not_ok() -> None:
    with pytest.raises(ValueError, match="failure"):
        CaseResult(case=make_case(), status="failed", started_at="", elapsed_s=0)
    with pytest.raises(ValueError, match="failure"):
        CaseResult(case=make_case(), status="ok", started_at="", elapsed_s=0, failure=Failure(kind="x", message="y"))


def test_samples_keep_iterations_and_warmups() -> None:
    samples = RankSamples(
        case="k",
        duration_s=[9.0, 4.0, 6.0],
        iterations=[1, 2, 3],
        warmup=[True, False, False],
        device_s=[1.0, 1.0, 3.0],
    )
    assert samples.seconds() == [2.0, 2.0]
    assert samples.device_seconds() == [0.5, 1.0]
    assert samples.counted_iterations() == [2, 3]


def test_uneven_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        RankSamples(case="k", duration_s=[1.0], iterations=[1, 1], warmup=[False])
    with pytest.raises(ValueError, match="at least one iteration"):
        RankSamples(case="k", duration_s=[1.0], iterations=[0], warmup=[False])


def test_a_collective_takes_as_long_as_its_slowest_rank() -> None:
    case = make_case()
    ranks = [make_samples(case, [1.0, 5.0], rank=0), make_samples(case, [3.0, 2.0], rank=1)]
    assert slowest_rank_seconds(ranks) == [3.0, 5.0]


documents = [
    (make_result(make_case(m=1)), CaseResult),
    (make_system(), System),
    (Plan(run_id="r", created_at="t", tool_version="0", command=[], verb="ops", request=OperatorRequest(),
          cases=[make_case()]), Plan),
    (
        Run(
            id="r", created_at="t", finished_at="t", tool_version="0", verb="ops", command=[], launcher="inline",
            world_size=1, system_fingerprint="f", cases_ok=1, cases_failed=0, cases_skipped=0,
        ),
        Run,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("record", "kind"), documents)
def test_documents_survive_the_round_trip(record: Any, kind: Any) -> None:
    line = encode_document(record)
    assert b"\n" not in line
    assert parse_document(line, kind, where="x") == record


@pytest.mark.parametrize(("record", "kind"), documents)
def test_newer_documents_are_refused_with_the_next_step(record: Any, kind: Any) -> None:
    content = json.loads(encode_document(record))
    content["schema_version"] += 1
    content["something_new"] = 1
    with pytest.raises(NewerVersionError) as caught:
        parse_document(json.dumps(content).encode(), kind, where="run.json")
    assert "upgrade" in (caught.value.hint or "")
    assert caught.value.where == "run.json"
    assert caught.value.exit_code == 2


def test_old_documents_are_upgraded_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    old = json.loads(encode_document(make_system()))
    old["schema_version"] = current_version(System) - 2
    old["boxes"] = old.pop("hosts")
    del old["python"]
    first, second = ("system", current_version(System) - 2), ("system", current_version(System) - 1)
    monkeypatch.setitem(UPGRADES, first, lambda c: {**c, "hosts": c["boxes"]})
    monkeypatch.setitem(UPGRADES, second, lambda c: {**c, "python": "unknown"})
    read = parse_document(json.dumps(old).encode(), System, where="system.json")
    assert read == msgspec.structs.replace(make_system(), python="unknown")


def test_a_version_nobody_wrote_is_refused() -> None:
    content = {**json.loads(encode_document(make_system())), "schema_version": -5}
    with pytest.raises(BadInputError, match="no release wrote"):
        parse_document(json.dumps(content).encode(), System, where="x")


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"record":"run"}', b'{"record":"plan","schema_version":1}']
)
def test_broken_documents_name_the_place(data: bytes) -> None:
    with pytest.raises(BadInputError) as caught:
        parse_document(data, Run, where="folder/run.json")
    assert caught.value.where == "folder/run.json"


def test_wrong_types_name_the_field() -> None:
    content = {**json.loads(encode_document(make_system())), "hosts": "none"}
    with pytest.raises(BadInputError, match="hosts"):
        parse_document(json.dumps(content).encode(), System, where="x")
    with pytest.raises(BadInputError):
        parse_samples(b'{"case":"k","duration_s":[1],"iterations":[0],"warmup":[false]}', where="x")


@given(st.binary(max_size=200))
def test_no_bytes_crash_the_readers(data: bytes) -> None:
    for read in (lambda: parse_document(data, CaseResult, where="x"), lambda: parse_samples(data, where="x")):
        with pytest.raises(BadInputError):
            read()


@pytest.mark.parametrize("name", RECORDS)
def test_checked_in_schemas_are_current(name: str) -> None:
    stored = json.loads((SCHEMAS / f"{name}.schema.json").read_text())
    assert stored == make_schema(name), "run `make docs`"


@pytest.mark.parametrize(("record", "kind"), documents)
def test_documents_fit_their_schema(record: Any, kind: Any) -> None:
    schema = make_schema(kind.__struct_config__.tag)
    jsonschema.validate(json.loads(encode_document(record)), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"record": kind.__struct_config__.tag}, schema)


def test_fingerprints_tell_machines_and_software_apart() -> None:
    base = make_system()
    assert base.fingerprint == make_system(collected_at="later", environment={"OMP_NUM_THREADS": "1"}).fingerprint
    assert base.fingerprint != make_system(libraries={"torch": "2.6.0"}).fingerprint
    assert base.fingerprint == make_system(libraries={"torch": "2.13.0", "numpy": "2"}).fingerprint
    assert base.configuration != make_system(environment={"OMP_NUM_THREADS": "1"}).configuration
    assert make_system(libraries={"torch@a": "1"}).fingerprint != make_system(libraries={"torch@a": "2"}).fingerprint


def test_exceptions_become_evidence() -> None:
    assert describe_exception(UsageError("no", hint="try")).hint == "try"
    assert describe_exception(RuntimeError("CUDA out of memory. Tried to allocate")).kind == "out_of_memory"
    try:
        raise KeyError("lost")
    except KeyError as error:
        failure = describe_exception(error)
    assert failure.kind == "exception"
    assert "KeyError" in failure.message
    assert any("test_records.py" in line for line in failure.stack)
