"""The suite: which benchmarks make the table, and in which precisions."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.bench.workloads.catalogue import PRECISIONS, SUITE, Scale, read_catalogue
from stepscope.bench.workloads.protocol import Mode, Precision
from stepscope.bench.workloads.registry import Workload, choose_workloads
from stepscope.core.errors import UsageError
from stepscope.records import Case

FASTEST: dict[Mode, tuple[Precision, ...]] = {
    "train": ("bf16", "fp8", "tf32", "fp32"),
    "infer": ("fp8", "bf16", "fp16", "tf32", "fp32"),
}
"""A fast form is measured in its reference precision and in the first of these that it allows. In training every tensor
must be brought to 8 bits in two layouts: whether that pays at the widths of the suite has not been measured."""


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
