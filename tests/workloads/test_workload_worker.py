"""Workload cases from the plan to the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from suite_runs import SERVED, SMALL, measure, tiny

from stepscope.bench.workloads import find_workload, list_workloads, steps
from stepscope.bench.workloads.catalogue import Declared, parse_model, read_catalogue
from stepscope.bench.workloads.facts import count_flops
from stepscope.bench.workloads.feed import make_batches
from stepscope.bench.workloads.producer import ModelCase, open_step
from stepscope.bench.workloads.request import SEED
from stepscope.bench.workloads.user import hash_file
from stepscope.compare.views import compare_implementations
from stepscope.core.errors import BadInputError, UsageError
from stepscope.metrics import CaseInput, NotApplicable
from stepscope.metrics.cases import input_share, mfu
from stepscope.records import Case, LatencyTarget
from stepscope.store import MeasuredCase


def test_a_training_score_counts_examples(tmp_path: Path) -> None:
    (case,) = measure(tmp_path, tiny(SMALL), loader_workers=0).cases()
    summary = case.summary()
    assert summary is not None
    batch = case.result.case.batch_size
    assert batch is not None
    assert case.score() == pytest.approx(batch / summary.median_s)
    assert case.result.facts["peak_memory_bytes"] > 0
    assert case.result.facts["model_flops"] > 0
    assert case.loader_score() is not None
    assert input_share(CaseInput(case)) is not None
    assert case.missed_latency() is None
    assert isinstance(mfu(CaseInput(case)), NotApplicable)  # nobody states the peak of this CPU


def limit_latency(monkeypatch: pytest.MonkeyPatch, limit_s: float) -> None:
    target = LatencyTarget(limit_s=limit_s, percentile=99.0)
    monkeypatch.setattr(Declared, "latency_target", property(lambda self: target))


def test_a_latency_is_that_of_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_latency(monkeypatch, 3600.0)
    (case,) = measure(tmp_path, tiny(SERVED)).cases()
    assert all(count == 1 for one in case.samples for count in one.iterations)
    assert {"p50", "p95", "p99"} <= set(case.latency_s())
    assert case.missed_latency() is False


def test_a_limit_below_what_is_possible_marks_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_latency(monkeypatch, 1e-9)
    run = measure(tmp_path, tiny(SERVED))
    (case,) = run.cases()
    assert case.result.status == "ok"
    assert case.missed_latency() is True


def test_a_step_that_trains_nothing_has_no_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.optim.SGD, "step", lambda self: None)
    (case,) = measure(tmp_path, tiny(SMALL)).cases()
    assert case.result.failure is not None
    assert case.result.failure.kind == "wrong_result"
    assert "weights do not change" in case.result.failure.message
    assert case.score() is None


def test_what_does_not_fit_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def refuse(self: object, batches: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 TiB.")

    monkeypatch.setattr(steps.TrainStep, "_step", refuse)
    (case,) = measure(tmp_path, tiny(SMALL)).cases()
    assert case.result.status == "skipped"
    assert case.result.failure is not None
    assert case.result.failure.kind == "does_not_fit"
    assert "--find-batch" in str(case.result.failure.hint)


def test_a_search_records_every_try_and_ends_with_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose memory ends at 20 examples, and on which larger batches are better."""
    import torch

    def step(self: Any, batches: Any) -> None:
        examples = len(next(iter(batches[0].values())))
        if examples > 20:
            raise torch.OutOfMemoryError("out of memory")
        self.loss = torch.tensor(1.0)
        self._before[0] += 1

    monkeypatch.setattr(steps.TrainStep, "_step", step)
    # Larger batches are better, on however busy a machine this runs.
    monkeypatch.setattr(MeasuredCase, "score", lambda self: self.summary() and float(self.result.case.batch_size))
    search = {"goal": "throughput", "first": 1, "largest": None, "resolution": 1e-9}
    run = measure(tmp_path, tiny(SMALL, batch_size=1, search="throughput"), find_batch=search)
    tries = [case for case in run.cases() if case.result.case.spec.is_try]
    finals = [case.result.case.batch_size for case in run.cases() if not case.result.case.spec.is_try]
    assert finals == [20]
    assert [one.result.case.batch_size for one in tries][:6] == [1, 2, 4, 8, 16, 32]
    assert {one.result.case.batch_size for one in tries if one.result.status == "skipped"} >= {32, 21}


def test_a_search_takes_forms_that_nobody_checks(tmp_path: Path) -> None:
    fast = SMALL.replace("/ootb/", "/optimized/")
    search = {"goal": "throughput", "first": 1, "largest": 2, "resolution": 1e-9}
    run = measure(tmp_path, tiny(fast, batch_size=1, search="throughput"), find_batch=search, check=False)
    *tries, final = run.cases()
    assert all(one.score() for one in tries)
    assert final.score() is None
    assert final.result.case.batch_size in {1, 2}


def test_a_loader_that_fails_costs_no_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, *given: Any) -> None:
        raise RuntimeError("unable to mmap 1024 bytes from file: Cannot allocate shared memory")

    monkeypatch.setattr(ModelCase, "_time_with_loader", fail)
    (found,) = measure(tmp_path, tiny(SMALL), loader_workers=1).cases()
    assert found.score()
    assert found.loader_score() is None
    (notice,) = [one for one in found.result.notices if one.kind == "incomplete"]
    assert "no score with a loader: RuntimeError: unable to mmap" in notice.message
    assert "--loader-workers" in str(notice.hint)


def test_outputs_that_are_no_numbers_have_no_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = type(find_workload(SERVED).make_ootb("tiny"))
    original = task.infer
    monkeypatch.setattr(task, "infer", lambda self, module, batch: original(self, module, batch) / 0)
    (found,) = measure(tmp_path, tiny(SERVED)).cases()
    assert found.result.failure is not None
    assert (found.result.failure.kind, found.result.failure.message) == ("wrong_result", "outputs are not finite")


def test_memory_that_a_host_lacks_is_a_skip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, *given: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 TB")

    monkeypatch.setattr(ModelCase, "_open", fail)
    (found,) = measure(tmp_path, tiny(SMALL)).cases()
    assert found.result.status == "skipped"
    assert found.result.failure is not None
    assert found.result.failure.kind == "does_not_fit"
    assert "--find-batch" in str(found.result.failure.hint)


def test_rules_of_a_benchmark_are_kept() -> None:
    small = find_workload(SMALL)
    with pytest.raises(UsageError, match="does not allow int8"):
        small.make_case(device="cpu", precision="int8")
    with pytest.raises(UsageError, match="does not allow fp8"):
        find_workload("xlmr/ootb/infer/fb-1dev-A").make_case(device="cpu", precision="fp8")
    assert find_workload("xlmr/optimized/infer/fb-1dev-A").make_case(device="cpu", precision="fp8")
    with pytest.raises(UsageError, match="not known to converge"):
        small.make_case(device="cpu", batch_size=1 << 30)
    with pytest.raises(UsageError, match="there is no benchmark") as refused:
        find_workload("dlrm/ootb/train/small.1dev-embed32-fp23")
    assert f"did you mean {SMALL}?" in str(refused.value.hint)


def test_own_examples_are_read_or_refused(tmp_path: Path) -> None:
    import torch

    task = find_workload(SERVED).make_task("tiny")
    size = tiny(SERVED).batch_size
    assert size is not None
    path = tmp_path / "examples.pt"

    def find_failure(case: Case) -> str:
        (found,) = measure(tmp_path / "runs", case, data=str(path)).cases()
        return found.result.failure.message if found.result.failure else found.result.status

    torch.save([task.make_batch(size, seed=seed, mode="infer") for seed in (1, 2)], path)
    planned = tiny(SERVED, data=hash_file(path))
    assert find_failure(planned) == "ok"
    torch.save([{"x": torch.zeros(3)}], path)
    with pytest.raises(BadInputError, match="has changed since the run was planned"):
        find_failure(planned)
    assert "must hold the inputs" in find_failure(tiny(SERVED, data=hash_file(path)))
    path.unlink()
    with pytest.raises(BadInputError, match="is gone since the run was planned"):
        find_failure(planned)


def test_steps_can_be_made_outside_a_run() -> None:
    step = open_step(tiny(SMALL))
    step()
    step()


def test_every_benchmark_has_both_forms_and_one_owner() -> None:
    listed = [one.benchmark for one in list_workloads()]
    assert len({one.id for one in listed}) == len(listed)
    assert {one.implementation for one in listed} == {"ootb", "optimized"}
    for model in read_catalogue().values():
        assert {declared.mode for declared in model.benchmark} == {"train", "infer"}


LAYERED = """
model = "m"
domain = "d"
task = "t:T"
optimized = "t:F"

precision = "fp32"
precisions = ["fp32"]
source = "a book"

[sizes]
width = 8
cut = { low = 1, high = 2 }

[tiny]
batch_size = 2
sizes = { width = 4 }

[train]
max_batch_size = 64

[[benchmark]]
mode = "train"
config = "a"
description = "the first"
batch_size = 32
sizes = { width = 16, cut = { low = 0 } }

[[benchmark]]
mode = "train"
config = "b"
like = "a"
description = "the second"
tiny.sizes = { depth = 3 }
"""


def test_a_benchmark_says_only_how_it_differs() -> None:
    first, second = parse_model(LAYERED).benchmark
    assert (first.source, first.max_batch_size, first.batch_size) == ("a book", 64, 32)
    assert first.sizes_at("full") == {"width": 16, "cut": {"low": 0}}
    assert first.sizes_at("tiny") == {"width": 4, "cut": {"low": 0}}
    assert (second.config, second.description, second.batch_size) == ("b", "the second", 32)
    assert second.sizes == first.sizes
    assert second.sizes_at("tiny") == {"width": 4, "cut": {"low": 0}, "depth": 3}
    assert second.batch_size_at("tiny") == 2
    with pytest.raises(msgspec.ValidationError, match="colour"):
        parse_model(LAYERED.replace("[sizes]", 'colour = "red"\n\n[sizes]', 1))


def test_a_fast_form_without_its_check_has_no_score(tmp_path: Path) -> None:
    (case,) = measure(tmp_path, tiny("dlrm/optimized/infer/default.1dev-fp32"), check=False).cases()
    assert case.result.status == "ok"
    assert case.score() is None
    assert case.result.facts["check"] == "not asked for"


def test_few_samples_are_a_poor_percentile(tmp_path: Path) -> None:
    (case,) = measure(tmp_path, tiny("rnnt/ootb/infer/1dev-fp32")).cases()
    kinds = {notice.kind for notice in case.result.notices}
    summary = case.summary()
    assert summary is not None
    assert ("few_for_percentile" in kinds) == (summary.n < 100)


LENGTHS = "xlmr/ootb/infer/fb-1dev-A-realdist"
"""Its batches differ in width."""


def test_operations_are_those_of_the_batches_that_are_timed(tmp_path: Path) -> None:
    (case,) = measure(tmp_path, tiny(LENGTHS, batch_size=1)).cases()
    task = find_workload(LENGTHS).make_ootb("tiny")
    timed = make_batches(task, batch_size=1, mode="infer", seed=SEED)
    counts = [count_flops(task, [batch], mode="infer", device="cpu") or 0 for batch in timed]
    assert len(set(counts)) > 1
    assert case.result.facts["model_flops"] == sum(counts) // len(counts)
    assert case.result.facts["round_steps"] == len(timed)
    assert len(case.seconds()) >= len(timed)
    rounds = case.seconds()[: len(case.seconds()) // 4 * 4]
    assert case.score() == pytest.approx(len(rounds) / sum(rounds))


def test_batches_of_one_shape_make_no_round(tmp_path: Path) -> None:
    (case,) = measure(tmp_path, tiny(SERVED)).cases()
    assert "round_steps" not in case.result.facts


def test_a_training_sample_is_whole_rounds_of_batches_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stepscope.bench.workloads.models.xlmr import Xlmr

    usual = Xlmr.make_batch

    def narrower(self: Any, count: int, *, seed: int, mode: Any) -> Any:
        return {name: one[:, : 3 + seed % 5] for name, one in usual(self, count, seed=seed, mode=mode).items()}

    monkeypatch.setattr(Xlmr, "make_batch", narrower)
    (case,) = measure(tmp_path, tiny("xlmr/ootb/train/fb-1dev-A-fp32", batch_size=2)).cases()
    assert case.result.failure is None
    assert case.result.facts["round_steps"] == 4
    assert {count % 4 for one in case.samples for count in one.iterations} == {0}


def test_a_loader_is_timed_over_whole_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch of a sample is waited for, and each is taken equally often."""
    waited: list[int] = []
    step_and_wait = ModelCase._step_and_wait
    monkeypatch.setattr(ModelCase, "_step_and_wait", lambda self: (waited.append(1), step_and_wait(self)))
    (case,) = measure(tmp_path, tiny(LENGTHS, batch_size=2), loader_workers=0).cases()
    rounds = case.result.facts["round_steps"]
    (samples,) = case.samples
    assert rounds == 4
    # One sample warms up.
    assert len(waited) == rounds * (1 + len(samples.extra_s["loader"]))


def test_tries_are_not_checked_and_count_nowhere(tmp_path: Path) -> None:
    """Both forms searched: what is compared are the sizes that the searches ended with."""
    search = {"goal": "throughput", "first": 1, "largest": 1, "resolution": 1e-9}
    names = [SERVED, SERVED.replace("ootb", "optimized")]
    cases = [tiny(name, batch_size=1, search="throughput") for name in names]
    found = measure(tmp_path, *cases, find_batch=search).cases()
    tries = [case for case in found if case.result.case.spec.is_try]
    assert [case.result.facts.get("check") for case in tries] == [None, "not made: a try"]
    assert compare_implementations(tries).any_precision is None
    table = compare_implementations(found)
    (row,) = table.comparison.rows
    assert "search" not in row.label
    assert table.unpaired == table.without_score == []
    assert bool(table.undecided) != (table.any_precision is not None), "as the noise will have it"


def test_traces_are_kept_beside_the_samples(tmp_path: Path) -> None:
    run = measure(tmp_path, tiny(SMALL), trace=True)
    (case,) = run.cases()
    folder = run.folder / str(case.result.facts["trace"])
    assert (folder / "recording.json").is_file()
    from stepscope.traces import read_traces

    assert len(read_traces(folder, cache=False).timeline()) > 10
