"""The metrics of measured cases, in the order of their columns.

t is the median of the case's own times; F, B and U are its operations, its bytes and its unique bytes; S is the size of
a message.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from stepscope.core.units import format_share
from stepscope.metrics.registry import (
    COLLECTIVES,
    EXCHANGES,
    GROUPS,
    MESSAGES,
    MODELS,
    OPERATORS,
    WORKLOADS,
    CaseInput,
    NotApplicable,
    Outcome,
    Unit,
    metric,
)
from stepscope.records import CaseResult
from stepscope.records.kinds import (
    CallSpec,
    CollectiveObserved,
    ModelObserved,
    OperatorObserved,
    OperatorSpec,
    Serving,
    WorkloadObserved,
)
from stepscope.stats import drift, median
from stepscope.store import TPOT, TTFT

NO_PEAK = NotApplicable("the run measured no such peak of this device (--measured-peaks)")


def _positive(value: float | None) -> float | None:
    return value if value is not None and value > 0 and math.isfinite(value) else None


def _per_second(work: float | None, case: CaseInput) -> float | None:
    """Over the median."""
    return _positive(work / case.summary.median_s) if _positive(work) and case.summary and work else None


# Score and fractions of measured peaks


@metric("score", "Score", "score", "work of one iteration / t; over whole rounds where iterations differ",
        better="higher", column="shown", hint="Work per second at the median time; more is better",
        mark=lambda case: "*" if case.measured.missed_latency() else "")  # fmt: skip
def score(case: CaseInput) -> float | None:
    return case.measured.score(case.summary)


@metric("missed_latency", "Missed latency", "yes/no", "whether the percentile of the latency target is over its limit",
        column="none")  # fmt: skip
def missed_latency(case: CaseInput) -> bool | None:
    return case.measured.missed_latency()


@metric("compute_share", "% of matmul peak", "fraction", "F / t / matmul peak; operators scored in TFLOP/s",
        kinds=OPERATORS, better="higher", column="shown",
        hint="Fraction of the rate of a large matmul in the same dtype, measured on this machine in the same run",
        )  # fmt: skip
def compute_share(case: CaseInput) -> Outcome | None:
    rule = case.result.score
    if case.peaks is None:
        return NO_PEAK
    if rule is None or rule.unit != "TFLOP/s":
        return NotApplicable("the operator mostly moves data")
    rate, peak = flops_per_s(case), case.peaks.matrix_flops_per_s.get(str(case.result.case.spec.dtype))
    return rate / peak if isinstance(rate, float) and peak else NO_PEAK


def is_cached(case: CaseInput) -> bool:
    """Faster than a copy since warm caches hold some of the data."""
    fraction, spec = memory_share(case), case.result.case.spec
    is_cold = isinstance(spec, OperatorSpec | CallSpec) and spec.cache == "cold"
    return isinstance(fraction, float) and fraction > 1 and not is_cold


@metric("memory_share", "% of copy bandwidth", "fraction", "U / t / copy bandwidth; above 1 with warm caches",
        kinds=OPERATORS, better="higher", column="shown", mark=lambda case: " (cache)" if is_cached(case) else "",
        hint="Fraction of the bandwidth of a large copy, measured on this machine in the same run; (cache) marks what "
        "warm caches lift above it")  # fmt: skip
def memory_share(case: CaseInput) -> Outcome | None:
    observed, copy = case.result.observed, case.peaks.bytes_per_s.get("copy") if case.peaks is not None else None
    if copy is None or not isinstance(observed, OperatorObserved):
        return NO_PEAK
    rate = _per_second(observed.moved_bytes if observed.unique_bytes is None else observed.unique_bytes, case)
    return rate / copy if rate is not None else None


# Times


@metric("wall_median_s", "Wall", "s", "median by the host's clock, launching included", better="lower",
        hint="Time of one iteration by the host's clock, launching included; the median beside it is device time",
        )  # fmt: skip
def wall_median_s(case: CaseInput) -> Outcome | None:
    if case.result.timing not in {"device", "slowest_rank_device"}:
        return NotApplicable("the case's own times are those of the host's clock")
    return median(case.measured.wall_seconds())


@metric("graph_median_s", "Graph", "s", "median replayed as a graph, without launches", better="lower",
        hint="Time of one iteration replayed as a graph, without launches")  # fmt: skip
def graph_median_s(case: CaseInput) -> float | None:
    return median(case.measured.extra_seconds("graph"))


@metric("kernel_median_s", "Kernel", "s", "median of the kernels of one iteration, by the profiler", better="lower",
        hint="Time of the kernels of one iteration alone, by the profiler")  # fmt: skip
def kernel_median_s(case: CaseInput) -> float | None:
    return median(case.measured.extra_seconds("kernel"))


# Messages


@metric("size_bytes", "Size", "B", "S as it was measured, else as it was asked for", needs_times=False, column="none")
def size_bytes(case: CaseInput) -> float | None:
    return case.result.size_bytes


def bandwidth_of(result: CaseResult, t_s: float | None, *, bus: bool) -> float | None:
    """As another tool printed it, else from size and time."""
    observed = result.observed
    if observed is None:
        return None
    printed = None
    if isinstance(observed, CollectiveObserved):
        printed = observed.busbw_bytes_per_s if bus else observed.algbw_bytes_per_s
    if printed is not None or observed.size_bytes is None or observed.bus_factor is None or not t_s or t_s < 0:
        return printed
    return observed.size_bytes / t_s * (observed.bus_factor if bus else 1.0)


@metric("algbw_bytes_per_s", "AlgBW", "B/s", "S / t", kinds=MESSAGES, better="higher", column="shown",
        hint="Message size over time")  # fmt: skip
def algbw_bytes_per_s(case: CaseInput) -> float | None:
    return bandwidth_of(case.result, case.summary.median_s if case.summary else None, bus=False)


@metric("busbw_bytes_per_s", "BusBW", "B/s", "S / t × bus factor", kinds=MESSAGES, better="higher", column="shown",
        hint="Rate each link has to carry; comparable between numbers of ranks")  # fmt: skip
def busbw_bytes_per_s(case: CaseInput) -> float | None:
    return bandwidth_of(case.result, case.summary.median_s if case.summary else None, bus=True)


@metric("wrong", "Wrong", "count", "elements that are not what they must be", kinds=EXCHANGES, better="lower",
        needs_times=False, column="shown", hint="Elements that did not have the right value")  # fmt: skip
def wrong(case: CaseInput) -> int | None:
    return case.result.wrong


# Statistics of the case's own times


def _has_latency(case: CaseInput) -> bool:
    return case.result.latency_target is not None


def _declare_statistic(name: str, title: str, formula: str, unit: Unit = "s", **more: object) -> None:
    metric(name, title, unit, formula, **{"column": "none", **more})(  # type: ignore[arg-type]
        lambda case: getattr(case.summary, name)
    )


_LATENCY = "Latency of one batch or iteration; of generation from the prompts to the last token"
_declare_statistic("n", "n", "samples without warm-ups", "count")
_declare_statistic("median_s", "Median", "median of tᵢ", better="lower")
_declare_statistic("ci_low_s", "Interval low", "lower end of the interval of the median")
_declare_statistic("ci_high_s", "Interval high", "upper end of the interval of the median")
_declare_statistic("level", "Level", "coverage that the interval really has", "fraction")
_declare_statistic("mean_s", "Mean", "mean of tᵢ", better="lower")
_declare_statistic("stdev_s", "Standard deviation", "standard deviation of tᵢ", better="lower")
_declare_statistic("min_s", "Min", "smallest tᵢ", better="lower")
_declare_statistic("max_s", "Max", "largest tᵢ", better="lower")
_declare_statistic("p95_s", "P95", "95th percentile of tᵢ", better="lower", column="detail", hint=_LATENCY,
                   only_for=lambda case: _has_latency(case) or case.measured.skew_s() is not None)  # fmt: skip
_declare_statistic("p99_s", "P99", "99th percentile of tᵢ", better="lower", column="detail", hint=_LATENCY,
                   only_for=_has_latency)  # fmt: skip
_declare_statistic("outliers", "Outliers", "samples beyond three interquartile ranges of the quartiles", "count")


@metric("drift", "Drift", "fraction", "median of the later half / median of the earlier half − 1", column="none")
def drift_of(case: CaseInput) -> float:
    return drift(case.times_s)


@metric("device_median_s", "Device", "s", "median between two device events", better="lower", column="none")
def device_median_s(case: CaseInput) -> float | None:
    return median(case.measured.device_seconds() or [])


# When ranks began


@metric("skew_s", "Skew", "s", "median over iterations of the last rank's beginning − the first one's",
        needs_times=False, better="lower",
        hint="From the first rank's beginning to the last one's, in the median over the iterations")  # fmt: skip
def skew_s(case: CaseInput) -> float | None:
    return case.measured.skew_s()


def _name_share(case: CaseInput) -> str:
    found = case.measured.straggler()
    return f" ({format_share(found[1], 0)})" if found is not None else ""


@metric("straggler_rank", "Straggler", "rank", "the rank that began last most often", needs_times=False,
        mark=_name_share,
        hint="The rank that began last most often, and in which fraction of the iterations")  # fmt: skip
def straggler_rank(case: CaseInput) -> int | None:
    return case.measured.straggler_rank()


@metric("straggler_share", "Straggler fraction", "fraction", "iterations in which that rank began last / iterations",
        needs_times=False, better="lower", column="none")  # fmt: skip
def straggler_share(case: CaseInput) -> float | None:
    found = case.measured.straggler()
    return found[1] if found is not None else None


# Parts of a case that ranks do together


def _declare_part(name: str, part: str, title: str, what: str, kinds: tuple[str, ...], **more: object) -> None:
    """Median of one part's time, on the rank where it is longest."""
    metric(name, title, "s", f"median over iterations of {what}, on the slowest rank", kinds=kinds, better="lower",
           **more)(lambda case: case.measured.parts_s().get(part))  # type: ignore[arg-type]  # fmt: skip


for _part, _title, _what in (
    ("rendezvous", "Rendezvous", "the time until all ranks have met"),
    ("create", "Creation", "the time that creating the process group takes, once all ranks have met"),
    ("first_collective", "First", "the time of the first collective of 4 KiB, connections that it sets up included"),
    ("next_collective", "Next", "the time of the collective after the first one"),
    ("destroy", "Destroy", "the time that destroying the process group takes"),
):
    _declare_part(f"{_part}_s", _part, _title, _what, GROUPS, hint=f"{_what[:1].upper()}{_what[1:]}", column="shown")
for _part, _title in (("serialise", "Serialise"), ("deserialise", "Deserialise")):
    _what = f"the time that {'pickling' if _part == 'serialise' else 'unpickling'} the objects of one call takes"
    _declare_part(f"{_part}_s", _part, _title, _what, COLLECTIVES, column="none")


# Text generation


def _declare_token_times(name: str, title: str, what: str, hints: dict[str, str]) -> None:
    for point in ("p50", "p95", "p99"):
        hint = hints.get(point, "")
        shown = {"p50": title, "p99": f"{title} P99"}.get(point, "") if hint else ""
        metric(f"{name}_{point}_s", shown or f"{title} {point.upper()}", "s", f"{point} of {what}", kinds=WORKLOADS,
               better="lower", column=("shown" if point == "p50" else "detail") if hint else "none", hint=hint)(
            lambda case, point=point: case.measured.latency_s(name).get(point)  # type: ignore[misc]
        )  # fmt: skip


_declare_token_times(
    TTFT, "TTFT", "the time to first token of a batch",
    {"p50": "Time to first token of a batch, median", "p99": "The latency limit is on the time to first token"},
)  # fmt: skip
_declare_token_times(TPOT, "TPOT", "the time of each token after the first", {"p50": "Time of each token after the "
                     "first, median"})  # fmt: skip


@metric("tokens_per_s", "Tokens/s", "1/s", "new tokens of all sequences / time, prefill included", kinds=WORKLOADS,
        better="higher", column="shown", hint="New tokens of all sequences over time, prefill included")  # fmt: skip
def tokens_per_s(case: CaseInput) -> float | None:
    return case.result.observed.tokens_per_s if isinstance(case.result.observed, WorkloadObserved) else None


def find_serving(case: CaseInput) -> Serving | None:
    return case.result.observed.serving if isinstance(case.result.observed, WorkloadObserved) else None


def _mark_late(case: CaseInput) -> str:
    serving = find_serving(case)
    return "*" if serving is not None and serving.missed_latency else ""


def _declare_served(field: str, title: str, unit: Unit, hint: str, **more: object) -> None:
    def read(case: CaseInput) -> Outcome | None:
        serving = find_serving(case)
        found: Outcome | None = getattr(serving, field) if serving is not None else None
        return found

    metric(f"serving_{field}", title, unit, hint[:1].lower() + hint[1:], kinds=WORKLOADS, hint=hint, **more)(read)  # type: ignore[arg-type]


_declare_served("requests", "Requests", "count", "Requests that came, each at its own moment")
_declare_served("offered_per_s", "Offered/s", "1/s", "Requests that came per second")
_declare_served("achieved_per_s", "Reached/s", "1/s", "Requests answered per second", better="higher", column="shown")
for _field, _title, _what in (
    ("ttft", "Served TTFT", "from arrival to first token, waiting included"),
    ("tpot", "Served TPOT", "of each token after the first, waiting included"),
    ("latency", "Served", "from arrival to last token, waiting included"),
):
    for _point in ("p50", "p95", "p99"):
        _shown: Callable[[str], str] = {"ttft": "shown", "latency": "detail"}.get if _point == "p99" else {}.get  # type: ignore[assignment]
        _declare_served(f"{_field}_{_point}_s", f"{_title} {_point.upper()}", "s", f"{_point.upper()} {_what}",
                        better="lower", column=_shown(_field) or "none",
                        mark=_mark_late if _field == "ttft" else None)  # fmt: skip
_declare_served("longest_queue", "Queue", "count", "Most requests that waited at one moment", better="lower")
_declare_served("busy_share", "Busy", "fraction", "Fraction of the time in which the server worked")
_declare_served("missed_latency", "Served late", "yes/no", "Whether served requests missed the latency limit",
                column="none")  # fmt: skip


# Whole models


@metric("loader_score", "Loader", "score", "as the score, with every batch from a loader", kinds=WORKLOADS,
        better="higher", hint="The score with every batch from a loader")  # fmt: skip
def loader_score(case: CaseInput) -> float | None:
    return case.measured.loader_score()


@metric("input_share", "Input", "fraction", "1 − t / time of a step with a loader", kinds=WORKLOADS, better="lower",
        hint="Fraction of a step with a loader that waits for input")  # fmt: skip
def input_share(case: CaseInput) -> float | None:
    typical_s, fed_s = case.measured.typical_s(case.summary), case.measured.loader_s()
    return max(0.0, 1 - typical_s / fed_s) if typical_s is not None and fed_s else None


@metric("mfu", "MFU", "fraction", "operations of the model / t / stated peak of all devices; for cases with a score",
        kinds=WORKLOADS, better="higher", hint="Operations of the model per second over the device's stated peak",
        )  # fmt: skip
def mfu(case: CaseInput) -> Outcome | None:
    observed, typical_s = case.result.observed, case.measured.typical_s(case.summary)
    if score(case) is None or not typical_s or not isinstance(observed, WorkloadObserved):
        return NotApplicable("the case has no score")
    if observed.model_flops is None or not observed.peak_flops:
        return NotApplicable("the operations of the model or the peak of the device are not known")
    return observed.model_flops / typical_s / observed.peak_flops


def _of_model(field: str) -> Callable[[CaseInput], Outcome | None]:
    def read(case: CaseInput) -> Outcome | None:
        observed = case.result.observed
        found: Outcome | None = getattr(observed, field) if isinstance(observed, ModelObserved) else None
        return found

    return read


metric("peak_memory_bytes", "Memory", "B", "largest memory in use while it was timed", kinds=MODELS, better="lower",
       needs_times=False, hint="Largest in use while it was timed")(_of_model("peak_memory_bytes"))  # fmt: skip
metric("energy_j_per_example", "J/ex", "J", "energy of the devices / examples", kinds=MODELS, better="lower",
       needs_times=False, hint="Energy of the device")(_of_model("energy_j_per_example"))  # fmt: skip


@metric("check", "Check", "text", "`passed`, or why the optimized implementation was not compared", kinds=WORKLOADS,
        needs_times=False, column="shown",
        hint="Whether outputs, loss, gradients and convergence agree with the ootb implementation")  # fmt: skip
def check(case: CaseInput) -> str | None:
    return case.result.observed.check if isinstance(case.result.observed, WorkloadObserved) else None


# Rates of operators


@metric("intensity_flops_per_byte", "Intensity", "flop/B", "F / B", kinds=OPERATORS, needs_times=False, column="none")
def intensity(case: CaseInput) -> float | None:
    observed = case.result.observed
    if not isinstance(observed, OperatorObserved):
        return None
    flops, moved = _positive(observed.flops), _positive(observed.moved_bytes)
    return _positive(flops / moved) if flops is not None and moved is not None else None


@metric("flops_per_s", "Compute rate", "flop/s", "F / t", kinds=OPERATORS, better="higher", column="none")
def flops_per_s(case: CaseInput) -> Outcome | None:
    return _per_second(case.result.observed.flops, case) if isinstance(case.result.observed, OperatorObserved) else None


@metric("bytes_per_s", "Memory rate", "B/s", "B / t", kinds=OPERATORS, better="higher", column="none")
def bytes_per_s(case: CaseInput) -> Outcome | None:
    observed = case.result.observed
    return _per_second(observed.moved_bytes, case) if isinstance(observed, OperatorObserved) else None
