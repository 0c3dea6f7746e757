"""Which columns a results table has and what stands in them; shared by text, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from stepscope.core.units import format_bytes, format_duration, format_share, format_significant
from stepscope.records.kinds import ModelObserved, WorkloadObserved
from stepscope.report.generation import FACTS, GenerationFact, explain_generation, is_served_late
from stepscope.report.labels import format_percent
from stepscope.report.scale import TimeScale, choose_time_scale, format_interval
from stepscope.report.view import CaseView, SystemView

NONE = "-"


class Cell(NamedTuple):
    text: str
    sort: str | float | None = None
    """What a sortable table orders by; None goes last."""


class Column(NamedTuple):
    title: str
    cell: Callable[[CaseView], Cell]
    numeric: bool = False
    unit: str = ""
    """Of every number in the column."""
    detail: bool = False
    """May be left out where there is no room."""
    hint: str = ""
    """What the column means, for those who meet it first."""


def choose_columns(system: SystemView, *, scale: TimeScale | None = None) -> list[Column]:
    """The published seven, with those added that this system's cases fill.

    With `scale` all times are in that unit, which the column names; without it each row names its own.
    """
    cases = system.cases
    columns = [
        Column("Model", lambda case: _text(case.model)),
        Column("Implementation", lambda case: _text(case.implementation)),
        Column("Mode", lambda case: _text(case.mode)),
        Column("Config", lambda case: _text(case.config)),
    ]
    if any(case.difference for case in cases):
        columns.append(Column("Case", lambda case: _text(case.difference or NONE)))
    if any(case.size_bytes is not None for case in cases):
        columns.append(Column("Size", lambda case: _number(case.size_bytes, format_bytes), numeric=True))
    columns += [
        Column("Batch Size", lambda case: _number(case.batch_size, str), numeric=True),
        Column("Score", score_cell, numeric=True, hint="Work per second at the median time; more is better"),
        Column("Units", lambda case: _text(case.unit or NONE)),
        *_share_columns(cases),
        *_time_columns(cases, scale),
        *_observed_columns(cases),
        *_arrival_columns(cases, scale),
        *_latency_columns(cases, scale),
        *_generation_columns(cases, scale),
        *_model_columns(cases),
    ]
    if any(case.notices for case in cases):
        columns.append(Column("Notices", lambda case: _number(len(case.notices), str), numeric=True, detail=True))
    if len(system.runs) > 1:
        columns.append(Column("Run", lambda case: _text(case.run_id)))
    return columns


def _time_columns(cases: Sequence[CaseView], scale: TimeScale | None) -> list[Column]:
    if all(case.timing is None for case in cases):
        return []
    unit = scale.unit if scale is not None else ""
    return [
        Column("Median", lambda case: _median(case, scale), True, unit, True, _MEDIAN_HINT),
        Column("Interval", lambda case: _interval(case, scale), True, unit, True, _INTERVAL_HINT),
        Column("n", _sample_count, True, "", True, "Samples measured, warm-ups not counted"),
        *(
            Column(title, _time_cell(read, scale), True, unit, True, hint)
            for title, read, hint in _FURTHER_TIMES
            if any(read(case) is not None for case in cases)
        ),
    ]


def _share_columns(cases: Sequence[CaseView]) -> list[Column]:
    columns = []
    if any(case.compute_share is not None for case in cases):
        columns.append(
            Column("Of matrix peak", lambda case: _number(case.compute_share, format_percent), True, hint=_MATRIX_HINT)
        )
    if any(case.memory_share is not None for case in cases):
        columns.append(Column("Of copy", _memory_share, numeric=True, hint=_COPY_HINT))
    return columns


def _observed_columns(cases: Sequence[CaseView]) -> list[Column]:
    columns = []
    for title, read, hint in _BANDWIDTHS:
        if any(read(case) is not None for case in cases):
            columns.append(Column(title, _bandwidth_cell(read), True, "GB/s", False, hint))
    if any(case.wrong is not None for case in cases):
        columns.append(Column("Wrong", _wrong, numeric=True, hint="Elements that did not have the right value"))
    return columns


def _arrival_columns(cases: Sequence[CaseView], scale: TimeScale | None) -> list[Column]:
    """For collectives, where the moments at which ranks began were taken."""
    if all(case.skew_s is None for case in cases):
        return []
    unit = scale.unit if scale is not None else ""
    return [
        Column("P95", _time_cell(_read_p95, scale), True, unit, True, "One iteration in twenty took longer"),
        Column("Skew", _time_cell(lambda case: case.skew_s, scale), True, unit, True, _SKEW_HINT),
        Column("Straggler", _straggler, False, "", True, _STRAGGLER_HINT),
    ]


def _latency_columns(cases: Sequence[CaseView], scale: TimeScale | None) -> list[Column]:
    if all(case.latency_target is None for case in cases):
        return []
    unit = scale.unit if scale is not None else ""
    return [
        Column(f"P{percent}", _time_cell(_latency(percent), scale), True, unit, True, _LATENCY_HINT)
        for percent in (95, 99)
    ]


def _generation_columns(cases: Sequence[CaseView], scale: TimeScale | None) -> list[Column]:
    """For models that write text: first token, later ones, and requests that came at their own pace."""
    return [
        Column(
            fact.title,
            _generation_cell(fact, scale),
            numeric=True,
            unit=scale.unit if scale is not None and fact.kind == "time" else "",
            detail=fact.detail,
            hint=fact.hint,
        )
        for fact in FACTS
        if fact.title and any(fact.read(case) is not None for case in cases)
    ]


def _generation_cell(fact: GenerationFact, scale: TimeScale | None) -> Callable[[CaseView], Cell]:
    formats: dict[str, Callable[[float], str]] = {
        "time": scale.format if scale is not None else format_duration,
        "rate": format_significant,
        "share": format_percent,
        "count": lambda value: str(int(value)),
    }

    def cell(case: CaseView) -> Cell:
        shown = _number(fact.read(case), formats[fact.kind])
        is_late = fact.judged and is_served_late(case) and shown.text != NONE
        return shown._replace(text=f"{shown.text}*") if is_late else shown

    return cell


def _model_columns(cases: Sequence[CaseView]) -> list[Column]:
    """For whole models: the score with a loader, share of the peak, memory, energy, and the check."""
    columns = []
    for title, read, format_value, hint in _MODEL_FACTS:
        if any(read(case) is not None for case in cases):
            columns.append(Column(title, _fact_cell(read, format_value), numeric=True, detail=True, hint=hint))
    if any(_check(case) is not None for case in cases):
        columns.append(Column("Check", lambda case: _text(_check(case) or NONE), hint=_CHECK_HINT))
    return columns


def _check(case: CaseView) -> str | None:
    return case.found.check if isinstance(case.found, WorkloadObserved) else None


def _latency(percent: float) -> Callable[[CaseView], float | None]:
    def read(case: CaseView) -> float | None:
        if case.timing is None or case.latency_target is None:
            return None
        return next((one.seconds for one in case.timing.percentiles if one.percent == percent), None)

    return read


def _fact_cell(
    read: Callable[[CaseView], float | None], format_value: Callable[[float], str]
) -> Callable[[CaseView], Cell]:
    return lambda case: _number(read(case), format_value)


def _read_p95(case: CaseView) -> float | None:
    return case.timing.summary.p95_s if case.timing is not None and case.skew_s is not None else None


_SKEW_HINT = "From the first rank's beginning to the last one's, in the median over the iterations"
_STRAGGLER_HINT = "The rank that began last most often, and in which share of the iterations"
_MEDIAN_HINT = "Time of one iteration: half of the samples took longer"
_INTERVAL_HINT = "Where the true median lies, with at least 95 % confidence where n allows"
_MATRIX_HINT = "Share of the rate of a large matrix product in the same dtype, measured on this machine in the same run"
_COPY_HINT = (
    "Share of the bandwidth of a large copy, measured on this machine in the same run; "
    "(cache) marks what warm caches lift above it"
)

Quantity = tuple[str, Callable[[CaseView], float | None], str]
"""Title, value and hint."""

_FURTHER_TIMES: tuple[Quantity, ...] = (
    (
        "Wall",
        lambda case: case.wall_median_s,
        "Time of one iteration by the host's clock, launching included; the median beside it is device time",
    ),
    ("Graph", lambda case: case.graph_median_s, "Time of one iteration replayed as a graph, without launches"),
    ("Kernel", lambda case: case.kernel_median_s, "Time of the kernels of one iteration alone, by the profiler"),
)
_LATENCY_HINT = "Latency of one batch; of generation from the prompts to the last token"
_CHECK_HINT = "Whether outputs, loss, gradients and convergence are those of the out-of-the-box form"
_MODEL_FACTS: tuple[tuple[str, Callable[[CaseView], float | None], Callable[[float], str], str], ...] = (
    ("Loader", lambda case: case.loader_score, format_significant, "The score with every batch from a loader"),
    ("Input", lambda case: case.input_share, format_percent, "Share of a step with a loader that waits for input"),
    ("MFU", lambda case: case.mfu, format_percent, "Operations of the model a second over the device's stated peak"),
    (
        "Memory",
        lambda case: case.found.peak_memory_bytes if isinstance(case.found, ModelObserved) else None,
        format_bytes,
        "Largest in use while it was timed",
    ),
    (
        "J/ex",
        lambda case: case.found.energy_j_per_example if isinstance(case.found, ModelObserved) else None,
        format_significant,
        "Energy of the device",
    ),
)
_BANDWIDTHS: tuple[Quantity, ...] = (
    ("AlgBW", lambda case: case.algbw_bytes_per_s, "Message size over time"),
    ("BusBW", lambda case: case.busbw_bytes_per_s, "Rate each link has to carry; comparable between numbers of ranks"),
)


def _text(text: str) -> Cell:
    return Cell(text, text)


def _number(value: float | None, format_value: Callable[[float], str]) -> Cell:
    return Cell(NONE) if value is None else Cell(format_value(value), value)


def score_cell(case: CaseView) -> Cell:
    if case.status != "ok":
        return Cell(case.status)
    if case.score is None:
        return Cell(NONE)
    return Cell(format_significant(case.score) + ("*" if case.missed_latency else ""), case.score)


def _median(case: CaseView, scale: TimeScale | None) -> Cell:
    if case.timing is None:
        return Cell(NONE)
    median_s = case.timing.summary.median_s
    return Cell(scale.format(median_s) if scale is not None else format_duration(median_s), median_s)


def _interval(case: CaseView, scale: TimeScale | None) -> Cell:
    if case.timing is None:
        return Cell(NONE)
    summary = case.timing.summary
    row_scale = scale or choose_time_scale(summary.median_s)
    text = format_interval(summary.ci_low_s, summary.ci_high_s, row_scale)
    return Cell(text if scale is not None else f"{text} {row_scale.unit}", summary.relative_half_width)


def _sample_count(case: CaseView) -> Cell:
    return _number(case.timing.summary.n if case.timing is not None else None, str)


def _time_cell(read: Callable[[CaseView], float | None], scale: TimeScale | None) -> Callable[[CaseView], Cell]:
    return lambda case: _number(read(case), scale.format if scale is not None else format_duration)


def _memory_share(case: CaseView) -> Cell:
    return _number(case.memory_share, lambda _: format_memory_share(case))


def format_memory_share(case: CaseView) -> str:
    """`82.1 %`; `137 % (cache)` where only a cache can have been so fast."""
    share = case.memory_share or 0.0
    return format_percent(share) + (" (cache)" if _is_cached(case) else "")


def _is_cached(case: CaseView) -> bool:
    return case.memory_share is not None and case.memory_share > 1 and case.cache != "cold"


def explain_shares(cases: Sequence[CaseView]) -> list[str]:
    """Sentences without a full stop, for below a table that has shares."""
    titles = [column.title for column in _share_columns(cases)]
    if not titles:
        return []
    lines = [f"{' and '.join(titles)}: shares of the ceilings that the same run measured on this machine"]
    if any(_is_cached(case) for case in cases):
        lines.append("(cache): faster than a copy, since warm caches hold some of the data")
    return lines


def explain(cases: Sequence[CaseView]) -> list[str]:
    """Sentences without a full stop, for below a table: what its columns mean and what its results rest on."""
    return [*explain_shares(cases), *explain_generation(cases), *disclose(cases)]


def disclose(cases: Sequence[CaseView]) -> list[str]:
    """What optimized forms changed, and what had to be changed to run at all: part of the result."""
    lines: dict[str, None] = {}
    for case in cases:
        found = case.found
        told = {"changes": found.changes, "porting": found.porting} if isinstance(found, WorkloadObserved) else {}
        for kind, text in told.items():
            if text is not None:
                lines[f"{kind} in {case.benchmark} ({case.spec.precision}): {text}"] = None
    return list(lines)


def _bandwidth_cell(read: Callable[[CaseView], float | None]) -> Callable[[CaseView], Cell]:
    return lambda case: _number(read(case), lambda value: format_significant(value / 1e9))


def _straggler(case: CaseView) -> Cell:
    if case.straggler_rank is None or case.straggler_share is None:
        return Cell(NONE)
    text = f"rank {case.straggler_rank} ({format_share(case.straggler_share, 0)})"
    return Cell(text, case.straggler_rank)


def _wrong(case: CaseView) -> Cell:
    return _number(case.wrong, lambda value: str(int(value)))
