"""The worker on the CPU: what it skips and why, how it rotates, what it looks at beyond the time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.bench.ops import Operator, catalogue, find_operator, make_cases, make_peak_cases, operators
from stepscope.bench.ops.build import math_mode
from stepscope.bench.ops.families.gemm import Gemm
from stepscope.bench.ops.kernels import KERNELS_FILE, read_profiled
from stepscope.bench.ops.producer import OperatorProducer, estimate_cases
from stepscope.bench.ops.profiling import profile_cases
from stepscope.core import plugins
from stepscope.core.errors import UsageError
from stepscope.launch.worker import Session
from stepscope.measure import QUICK, MeasureSettings
from stepscope.metrics import CaseInput
from stepscope.metrics.cases import compute_share
from stepscope.records import Case, OperatorRequest, make_request
from stepscope.run.execute import execute
from stepscope.run.producer import ExtraMeasurements, Prepared, WrongResultError
from stepscope.run.ranks import CaseSkipped
from stepscope.store import MeasuredCase, StoredRun, create_run, find_ceilings

TINY = MeasureSettings(
    min_time_s=0.0, max_time_s=0.05, min_samples=3, few_samples=2, min_sample_s=1e-5, warmup_max_time_s=0.02, window=2
)


def one_case(name: str, shape: str = "", *, direction: str = "forward", dtype: str = "float32", **more: Any) -> Case:
    sets = [] if shape else ["tiny"]
    shapes = [shape] if shape else []
    (case,) = make_cases(
        names=[name], shapes=shapes, sets=sets, dtypes=[dtype], directions=[direction], device="cpu", **more
    )
    return case


def open_bench(**changes: Any) -> OperatorProducer:
    producer = OperatorProducer(Session(verb="ops", request=OperatorRequest(settings=TINY, **changes)))
    producer.open()
    return producer


def prepare(case: Case, **changes: Any) -> Prepared:
    return open_bench(**changes).prepare(case)


def measure_all(tmp_path: Path, cases: list[Case], **request: Any) -> list[MeasuredCase]:
    settings = {"settings": json.loads(json.dumps({"min_samples": 3, "few_samples": 2, "min_time_s": 0.0,
                "max_time_s": 0.05, "min_sample_s": 1e-5, "warmup_max_time_s": 0.02, "window": 2}))}  # fmt: skip
    asked = {"device": "cpu", **settings, **request}
    folder = create_run(tmp_path, verb="ops", name="x", command=["x"], request=make_request("ops", asked), cases=cases)
    return execute(StoredRun(folder)).cases()


@pytest.mark.parametrize("name", list(operators()))
def test_every_operator_runs_at_its_tiny_shape(name: str, tmp_path: Path) -> None:
    operator = find_operator(name)
    dtype = "float32" if "float32" in operator.dtypes else operator.dtypes[0]
    cases = make_cases(
        names=[name], shapes=[], sets=["tiny"], dtypes=[dtype], directions=operator.passes, device="cpu",
        caches=["warm", "cold"],
    )  # fmt: skip
    assert cases
    for measured in measure_all(tmp_path, cases):
        assert measured.result.status == "ok", measured.result.failure
        assert measured.result.score is not None
        assert measured.result.facts["moved_bytes"] > 0
        assert measured.score() is not None


@pytest.mark.parametrize("operator", list(operators().values()), ids=lambda operator: operator.name)
def test_every_operator_declares_itself(operator: Operator) -> None:
    assert operator.summary
    assert operator.unit in {"TFLOP/s", "GB/s"}
    assert set(operator.passes) <= {"forward", "backward"}
    names = [parameter.name for parameter in operator.parameters]
    assert len(set(names)) == len(names)
    assert set(operator.tiny) <= set(names)
    for parameter in operator.parameters:
        assert parameter.meaning, parameter.name
        assert not parameter.choices or parameter.default in parameter.choices
    shape = {parameter.name: parameter.default for parameter in operator.parameters}
    operator.check_shape(shape)
    dtype = next(one for one in operator.dtypes if one not in {"int4"})
    assert operator.work(shape, dtype, "forward").bytes > 0
    assert operator.footprint_bytes(shape, dtype) > 0


SKIPS = [
    (one_case("gemm", "m=1M,n=1M,k=1M"), "does_not_fit", "needs"),
    (one_case("gemm", dtype="int4"), "unsupported_dtype", "no int4 form"),
    (one_case("gemm", dtype="tf32"), "unsupported_dtype", "no tf32 mode"),
    (one_case("memset", direction="backward", dtype="int8"), "unsupported_pass", "no backward pass"),
    (one_case("gemm", dtype="float8_e4m3fn", direction="backward"), "unsupported", "not implemented"),
    (one_case("memcpy", "size=64,kind=h2d_pinned", dtype="int8"), "unsupported", "device"),
]


@pytest.mark.parametrize(("case", "kind", "words"), SKIPS, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_run_here_is_a_skip_with_its_reason(case: Case, kind: str, words: str) -> None:
    with pytest.raises(CaseSkipped, match=words) as caught:
        prepare(case)
    assert caught.value.failure.kind == kind


def test_bfloat16_is_skipped_where_it_would_kill_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.bench.ops.build.bfloat16_works", lambda: False)
    with pytest.raises(CaseSkipped, match="ends the process") as caught:
        prepare(one_case("gemm", dtype="bfloat16"))
    assert "ONEDNN_MAX_CPU_ISA" in (caught.value.failure.hint or "")


def test_a_skip_is_recorded_and_the_sweep_goes_on(tmp_path: Path) -> None:
    cases = [one_case("gemm", dtype="tf32"), one_case("gemm")]
    statuses = [(one.result.status, one.result.failure) for one in measure_all(tmp_path, cases)]
    assert [status for status, _ in statuses] == ["skipped", "ok"]
    assert statuses[0][1] is not None


def test_a_cold_case_rotates_and_flushes() -> None:
    warm, cold = prepare(one_case("gemm")), prepare(one_case("gemm", caches=["cold"]))
    assert warm.before_sample is None
    assert warm.observed.input_sets == 1
    assert cold.before_sample is not None
    assert cold.settings is not None
    assert cold.settings.iterations == cold.observed.input_sets == 4


def test_inputs_larger_than_the_cache_need_no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.bench.ops.producer.last_level_cache_bytes", lambda device: 1 << 16)
    prepared = prepare(one_case("elementwise", "rows=256,cols=64,chain=add", caches=["cold"]))
    assert prepared.before_sample is None
    # 3 × 64 KiB a set against four times 64 KiB of cache
    assert prepared.observed.input_sets == 2
    prepared = prepare(one_case("elementwise", "rows=512,cols=64,chain=add", caches=["cold"]))
    assert prepared.observed.input_sets == 1
    assert prepared.before_sample is None


def test_a_cache_of_unknown_size_is_never_called_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.bench.ops.producer.last_level_cache_bytes", lambda device: 0)
    with pytest.raises(CaseSkipped, match="nobody tells"):
        prepare(one_case("gemm", caches=["cold"]))


def test_a_wrong_result_is_a_failed_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Gemm.bind_reference
    monkeypatch.setattr(Gemm, "bind_reference", lambda *args: lambda: right(*args)() + 1)
    (measured,) = measure_all(tmp_path, [one_case("gemm")])
    assert measured.result.status == "failed"
    assert measured.result.failure is not None
    assert measured.result.failure.kind == "wrong_result"
    (unchecked,) = measure_all(tmp_path / "again", [one_case("gemm")], check=False)
    assert unchecked.result.status == "ok"


def test_kernels_are_named_and_counted(tmp_path: Path) -> None:
    (measured,) = measure_all(tmp_path, [one_case("linear", direction="backward")], kernels=True)
    uses = {use.name: use.count for use in measured.result.kernels}
    assert uses["aten::mm"] == 2
    assert measured.extra_seconds("kernel") == []  # a profiled CPU is slower: its times are not published


def test_the_profiling_process_leaves_kernels_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    cases = [one_case("gemm"), one_case("gemm", dtype="tf32"), one_case("linear")]
    request = OperatorRequest()
    folder = create_run(tmp_path, verb="ops", name="x", command=["x"], request=request, cases=cases)
    profile_cases(folder)
    found = read_profiled(folder)
    assert found.keys() == {case.key for case in cases}
    assert "aten::mm" in {use.name for use in found[cases[0].key].kernels}
    assert found[cases[1].key].kernels == []  # skipped here: the run says why
    path = folder / KERNELS_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[2][:20])
    profile_cases(folder)
    again = path.read_bytes().splitlines(keepends=True)
    assert again[0] == lines[0]
    assert read_profiled(folder).keys() == found.keys()
    bench = open_bench(kernels=True)
    bench._profiled = found
    further = ExtraMeasurements()
    bench._add_profiled(further, cases[0])
    assert further.kernels == found[cases[0].key].kernels
    bench._add_profiled(further, one_case("softmax"))
    assert [notice.kind for notice in further.notices] == ["not_profiled"]


def test_modes_are_set_for_the_case_and_put_back() -> None:
    import torch

    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (matmul.allow_tf32, cudnn.allow_tf32)
    with math_mode("tf32", "forward"):
        assert (matmul.allow_tf32, cudnn.allow_tf32) == (True, True)
        assert not torch.is_grad_enabled()
        with math_mode("float32", "backward"):
            assert (matmul.allow_tf32, cudnn.allow_tf32) == (False, False)
            assert torch.is_grad_enabled()
    assert (matmul.allow_tf32, cudnn.allow_tf32) == before
    assert torch.is_grad_enabled()


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_compiled_cases_keep_the_compiler_apart(tmp_path: Path) -> None:
    case = one_case("elementwise", "rows=64,cols=64,chain=add-mul-relu", compiled=True)
    assert case.parameters["compile"] is True
    (measured,) = measure_all(tmp_path, [case])
    assert measured.result.status == "ok", measured.result.failure
    compile_s = float(measured.result.facts["compile_s"])
    summary = measured.summary()
    assert summary is not None
    assert compile_s > 100 * summary.median_s


def test_a_compiled_sweep_goes_beyond_the_compilers_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten shapes of one operator; dynamo keeps eight. The eager backend compiles in an instant."""
    import torch

    compile_right = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **more: compile_right(call, **{**more, "backend": "eager"}))
    bench = open_bench()
    for m in range(1, 11):
        prepared = bench.prepare(one_case("gemm", f"m={m},n=3,k=2", compiled=True))
        prepared.body()
        assert prepared.check is not None
        assert prepared.check() is None


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_compiler_that_computes_wrongly_is_found(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.compile", lambda call, **more: lambda: call() * 2)
    prepared = prepare(one_case("softmax", direction=direction, compiled=True))
    assert prepared.check is not None
    with pytest.raises(WrongResultError, match="compiled"):
        prepared.check()


def test_ceilings_are_measured_and_cases_are_rated_by_them(tmp_path: Path) -> None:
    ceilings = make_peak_cases(["float32", "float32"], "cpu")
    assert [case.benchmark.model for case in ceilings] == ["gemm", "read", "memset", "memcpy"]
    sizes = {"m": 64, "n": 64, "k": 64, "size": 1 << 16}
    small = [
        msgspec.structs.replace(case, spec=msgspec.structs.replace(case.spec, shape={**case.spec.shape, **sizes}))
        for case in ceilings
    ]
    cases = measure_all(tmp_path, [*small, one_case("gemm")], check=False)
    found = find_ceilings(cases)["cpu"]
    assert found.matrix_flops_per_s.keys() == {"float32"}
    assert found.bytes_per_s.keys() == {"read", "write", "copy"}
    summary = cases[-1].summary()
    assert summary is not None
    flops = cases[-1].result.facts["flops"]
    assert compute_share(CaseInput(cases[-1], found)) == pytest.approx(
        float(flops) / summary.median_s / found.matrix_flops_per_s["float32"]
    )


def test_a_copy_moves_twice_its_size() -> None:
    case = make_peak_cases([], "cpu")[-1]
    operator = find_operator("memcpy")
    assert operator.work(case.parameters, "int8", "forward").bytes == 2 * case.parameters["size"]


def test_estimates_name_what_would_be_skipped() -> None:
    backward = one_case("memset", direction="backward", dtype="int8")
    cases = [one_case("gemm"), one_case("gemm", "m=1M,n=1M,k=1M"), backward]
    fits, large, absent = estimate_cases(cases, device="cpu", settings=QUICK, check=True)
    assert fits.skip is None
    assert 0 < fits.iteration_s < fits.case_s < 10
    # 64·32 + 32·48 + 64·48 floats, once in float32, once more for the check and once in float64
    elements = 64 * 32 + 32 * 48 + 64 * 48
    assert fits.memory_bytes == elements * (4 + 4 + 8)
    assert "needs" in (large.skip or "")
    assert "no backward pass" in (absent.skip or "")


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [("elementwise", "chain=add", "float32"), ("embedding_bag", "rows=9", "int8"), ("cast", "to=float32", "float32")],
)
def test_a_plan_with_what_has_no_gradient_is_still_a_plan(name: str, shape: str, dtype: str) -> None:
    cases = [one_case(name, shape, direction="backward", dtype=dtype), one_case("gemm")]
    absent, fits = estimate_cases(cases, device="cpu", settings=QUICK, check=False)
    assert absent.skip
    assert fits.skip is None
    with pytest.raises(CaseSkipped):
        prepare(cases[0])


def test_out_of_memory_is_a_skip_and_the_next_case_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    right = Gemm.make_inputs

    def make(self: Gemm, shape: Any, maker: Any) -> Any:
        if shape["m"] == 99:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5 GiB")
        return right(self, shape, maker)

    monkeypatch.setattr(Gemm, "make_inputs", make)
    large, small = measure_all(tmp_path, [one_case("gemm", "m=99,n=8,k=8"), one_case("gemm")])
    assert large.result.status == "skipped"
    assert large.result.failure is not None
    assert large.result.failure.kind == "does_not_fit"
    assert small.result.status == "ok"


def test_a_cold_backward_that_touches_little_is_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.bench.ops.producer.last_level_cache_bytes", lambda device: 1 << 16)
    shape = "rows=100000,columns=8,count=10"
    backward = prepare(one_case("scatter", shape, direction="backward", caches=["cold"]), check=False)
    assert backward.before_sample is not None
    lookups = "rows=1000,dim=64,pooling=50,batch=64,indices=zipf,alpha=2.0"
    assert prepare(one_case("embedding_bag", lookups, caches=["cold"]), check=False).before_sample is not None


def test_a_check_that_could_not_be_made_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gemm, "check", lambda *args: "nobody knows the right result")
    (measured,) = measure_all(tmp_path, [one_case("gemm")])
    assert measured.result.status == "ok"
    assert [notice.kind for notice in measured.result.notices if notice.kind == "not_checked"] == ["not_checked"]


def test_operators_of_other_packages_are_found_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(Gemm):
        name = "other_gemm"

    class Entry:
        name, value = "other", "package:Other"

        def __init__(self, kind: type[Operator]) -> None:
            self._kind = kind

        def load(self) -> type[Operator]:
            return self._kind

    monkeypatch.setattr(plugins, "entry_points", lambda group: [Entry(Other)])
    catalogue.operators.cache_clear()
    assert "other_gemm" in catalogue.operators()
    monkeypatch.setattr(plugins, "entry_points", lambda group: [Entry(Gemm)])
    catalogue.operators.cache_clear()
    with pytest.raises(UsageError, match="already taken"):
        catalogue.operators()
    catalogue.operators.cache_clear()
    monkeypatch.undo()


def test_unknown_operators_are_refused_with_a_suggestion() -> None:
    with pytest.raises(UsageError) as caught:
        find_operator("gem")
    assert "gemm" in (caught.value.hint or "")
