"""From a benchmark's id to what is declared of it, from what was asked to cases, and which cases make the suite."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from stepscope.bench.workloads.catalogue import PRECISIONS, SUITE, Declared, DeclaredModel, Scale, read_catalogue
from stepscope.bench.workloads.protocol import Mode, Optimized, Precision, Task
from stepscope.core.errors import UsageError
from stepscope.records import Benchmark, Case
from stepscope.records.case import Implementation
from stepscope.records.kinds import WorkloadSpec

IMPLEMENTATIONS: tuple[Implementation, ...] = ("ootb", "optimized")


class Workload(NamedTuple):
    """One benchmark of the suite."""

    model: DeclaredModel
    declared: Declared
    implementation: Implementation

    @property
    def benchmark(self) -> Benchmark:
        return self.model.identify(self.declared, self.implementation)

    def make_ootb(self, scale: Scale) -> Task:
        return self.model.make_task(self.declared.sizes_at(scale))

    def make_task(self, scale: Scale, *, with_dense_gradients: bool = False) -> Task:
        plain = self.make_ootb(scale)
        if with_dense_gradients:
            plain = self.model.make_task(plain.dense())
        return plain if self.implementation == "ootb" else self.model.make_optimized(plain)

    def make_deterministic(self, scale: Scale) -> tuple[Task, Optimized]:
        """Both forms without their random parts, for comparing them."""
        plain = self.model.make_task(self.make_ootb(scale).deterministic())
        return plain, self.model.make_optimized(plain)

    def make_case(
        self,
        *,
        device: str,
        scale: Scale = "full",
        batch_size: int | None = None,
        precision: str | None = None,
        world_size: int = 1,
        **further: Any,
    ) -> Case:
        """`further` are other fields of the spec. Raises UsageError for what the benchmark does not allow."""
        chosen = self.require_precision(precision)
        if chosen == "tf32" and device == "cpu":
            raise UsageError("a CPU has no tf32", hint="--device cuda, or fp32", where="--precision")
        size = self.require_batch(batch_size, scale)
        return Case(
            benchmark=self.benchmark,
            spec=WorkloadSpec(device=device, precision=chosen, scale=scale, **further),
            batch_size=size,
            world_size=world_size,
        )

    @property
    def generates(self) -> bool:
        return "new_tokens" in self.declared.sizes

    @property
    def precisions(self) -> list[Precision]:
        """That are allowed. Matmuls in 8 bits are a change of the model's code: out of the box there are none."""
        return [one for one in self.declared.precisions if one != "fp8" or self.implementation == "optimized"]

    def require_precision(self, asked: str | None) -> Precision:
        if asked is None:
            return self.declared.precision
        for known in self.precisions:
            if known == asked:
                return known
        raise UsageError(
            f"{self.benchmark.id} does not allow {asked}",
            hint=f"allowed are {', '.join(self.precisions)}",
            where="--precision",
        )

    def require_batch(self, asked: int | None, scale: Scale) -> int:
        size = self.declared.batch_size_at(scale) if asked is None else asked
        most = self.declared.max_batch_size
        if most is not None and size > most:
            raise UsageError(
                f"{self.benchmark.id} is not known to converge with batches of more than {most}: {size} asked for",
                hint=f"use at most {most}",
                where="--batch-size",
            )
        return size


def list_workloads() -> list[Workload]:
    """All of the table, the seven models of the suite first."""
    return [
        Workload(model, declared, implementation)
        for model in read_catalogue().values()
        for declared in model.benchmark
        for implementation in IMPLEMENTATIONS
    ]


def find_workload(benchmark_id: str) -> Workload:
    known = {one.benchmark.id: one for one in list_workloads()}
    if benchmark_id not in known:
        # A model's name alone is no closer to one of its benchmarks than to another's.
        of_model = [one for one in known if one.split("/")[0] == benchmark_id]
        close = of_model or get_close_matches(benchmark_id, known, n=1)
        raise UsageError(
            f"there is no benchmark {benchmark_id!r}",
            hint=(f"did you mean {close[0]}? " if close else "") + "`stepscope bench list` shows those there are",
        )
    return known[benchmark_id]


def choose_workloads(
    *, models: Sequence[str] = (), modes: Sequence[str] = (), implementations: Sequence[str] = ()
) -> list[Workload]:
    """Those that match every choice; no choice means all."""
    return [
        one
        for one in list_workloads()
        if (not models or one.model.model in models)
        and (not modes or one.declared.mode in modes)
        and (not implementations or one.implementation in implementations)
    ]


FASTEST: dict[Mode, tuple[Precision, ...]] = {
    "train": ("bf16", "fp8", "tf32", "fp32"),
    "infer": ("fp8", "bf16", "fp16", "tf32", "fp32"),
}
"""An optimized implementation is measured in its reference precision and in the first of these that it allows. In
training every tensor must be brought to 8 bits in two layouts: whether that pays at the widths of the suite has not
been measured."""


def choose_suite(
    *, models: Sequence[str] = (), modes: Sequence[str] = (), implementations: Sequence[str] = (), everything: bool
) -> list[Workload]:
    """The first configuration of each model and mode; with `everything` all that run on one device."""
    known = read_catalogue()
    for model in models:
        if model not in known:
            raise UsageError(f"there is no model {model!r}", hint=f"one of {', '.join(known)}", where="--model")
    wanted = list(models) or (list(known) if everything else [name for name in SUITE if name in known])
    found = [
        one
        for one in choose_workloads(models=wanted, modes=modes, implementations=implementations)
        if one.declared.devices == 1
    ]
    return found if everything else [one for one in found if one.declared is _first(one)]


def _first(one: Workload) -> object:
    return next(other for other in one.model.benchmark if other.mode == one.declared.mode and other.devices == 1)


def make_suite_cases(
    chosen: Sequence[Workload], *, device: str, scale: Scale, precision: str | None = None
) -> list[Case]:
    """Out of the box in the benchmark's precision; optimized in the same, and in the fastest that is allowed."""
    if precision is not None and precision not in PRECISIONS:
        raise UsageError(f"{precision!r} is no precision", hint=f"one of {', '.join(PRECISIONS)}", where="--precision")
    cases = [
        one.make_case(device=device, scale=scale, precision=name)
        for one in chosen
        for name in ([precision] if precision else suite_precisions(one))
        if name in one.precisions
    ]
    if not cases:
        raise UsageError(
            "no benchmark is left", hint="stepscope bench list shows what each allows", where="--precision"
        )
    return cases


def suite_precisions(one: Workload) -> list[str]:
    if one.implementation == "ootb":
        return [one.declared.precision]
    fastest = next(name for name in FASTEST[one.declared.mode] if name in one.precisions)
    return list(dict.fromkeys([one.declared.precision, fastest]))
