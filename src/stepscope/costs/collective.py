"""What a collective costs: a curve fitted to one operation in one group on one system; where its points come from."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from stepscope.core.errors import BadInputError, UsageError
from stepscope.core.files import write_output
from stepscope.core.units import count_of
from stepscope.costs.curves import (
    FEWEST_SIZES,
    FITS,
    Curve,
    CurvePoint,
    Extrapolation,
    HeldOut,
    HeldOutSize,
    ModelName,
    bandwidth_of,
    choose_model,
    fit_best,
    hold_out,
    hold_out_largest,
    hold_out_models,
    model_of,
    steepness,
    summarize_trials,
)
from stepscope.records import Parameter, System, parse_document
from stepscope.records.kinds import CollectiveObserved, CollectiveSpec
from stepscope.stats import median
from stepscope.store import MeasuredCase, StoredRun, utc_now

LEVEL = 0.9
"""Share of unseen sizes that an interval is meant to cover."""


class CollectiveSetting(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same for all points of a curve; only the message size differs."""

    operation: str
    members: int
    """Ranks of the group that communicates."""
    hosts: int | None = None
    """None: not known."""
    backend: str
    dtype: str
    device: str
    """Where the buffers lie: `cpu`, `cuda`."""
    variant: dict[str, str] = {}
    """Further parameters of the cases (`reduction`, `placement`, `pattern` …); those at their default are not named."""
    timing: str = "slowest_rank"
    """Whose time it is, as the cases' results say it; `published` for tables, which seldom do."""
    version: int = 1
    """Version of the benchmark: what two versions measure is not one curve."""
    system: str
    """What a person calls the machine."""
    fingerprint: str | None = None
    """Fingerprint of the system record; None for a table that came without one."""
    configuration: str | None = None
    """Hash of the variables and settings that change results, such as `NCCL_ALGO`."""

    @property
    def call(self) -> str:
        """The operation and what is unusual about it: `all_reduce[reduction=max]`."""
        unusual = [f"{name}={value}" for name, value in self.variant.items()]
        unusual += ["device time"] if "device" in self.timing else []
        return f"{self.operation}[{', '.join(unusual)}]" if unusual else self.operation

    @property
    def label(self) -> str:
        return f"{self.call}, {self.members} ranks, {self.backend}, {self.dtype}"


class CollectiveCurve(CollectiveSetting, frozen=True, kw_only=True):
    """Measured points that belong together."""

    points: list[CurvePoint]
    """By size, each size once."""
    sources: list[str] = []
    """Ids of the runs, or what a table says of its origin."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """How one form did. The one to use is chosen by these errors, so the chosen one's are a little flattering."""

    held_out: HeldOut
    extrapolation: Extrapolation | None = None
    """None where there are too few sizes to try."""


class CostEstimate(NamedTuple):
    value_s: float
    low_s: float
    high_s: float
    inside_range: bool
    """False: the size lies outside those the curve was fitted on, and the value is an extrapolation."""


class CollectiveCost(CollectiveSetting, frozen=True, kw_only=True):
    """Time of one call against message size, as `bench comms` counts both. Use `predict`."""

    curve: Curve
    smallest_bytes: int
    largest_bytes: int
    """The sizes it was fitted on lie between these."""
    sizes: int
    held_out: HeldOut
    """Errors of the whole procedure: each size was kept from the choice of the form too, not from its fit alone."""
    level: float
    """Share of the held-out sizes that the interval covers, counted so that it holds for a new one."""
    log_spread: float
    """The interval is the value divided and multiplied by e to this power."""
    candidates: dict[ModelName, Candidate]
    sources: list[str] = []

    def __post_init__(self) -> None:
        if not 0 < self.smallest_bytes < self.largest_bytes:
            raise ValueError(f"{self.smallest_bytes} to {self.largest_bytes} bytes is no range of sizes")
        if not 0 <= self.log_spread < math.inf:
            raise ValueError(f"log_spread {self.log_spread} is not a number of 0 or more")
        if self.model not in self.candidates:
            raise ValueError(f"the candidates have no {self.model}, which the curve is")

    @property
    def model(self) -> ModelName:
        return model_of(self.curve)

    @property
    def latency_s(self) -> float:
        return self.curve.latency_s

    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        """Size over time of a very large message (algorithm bandwidth); None where no size mattered."""
        return bandwidth_of(self.curve)

    def predict(self, size_bytes: float) -> CostEstimate:
        """Raises ValueError for a size below 0."""
        if not 0 <= size_bytes < math.inf:
            raise ValueError(f"a message of {size_bytes} bytes cannot be")
        value = self.curve.predict(size_bytes)
        inside = self.smallest_bytes <= size_bytes <= self.largest_bytes
        if inside:
            factor = math.exp(self.log_spread)
            low, high = value / factor, value * factor
        else:
            low, high = self._bounds_outside(size_bytes)
        return CostEstimate(value, min(low, value), max(high, value), inside)

    def _bounds_outside(self, size_bytes: float) -> tuple[float, float]:
        """What holds without trusting the form: time never falls as messages grow, and time per byte never rises.

        Above the range also: where size already counts it will not count less, so time goes on rising at least as
        steeply (both axes logarithmic) as it did at the end.
        """
        factor = math.exp(self.log_spread)
        if size_bytes < self.smallest_bytes:
            at_edge = self.curve.predict(self.smallest_bytes)
            return at_edge * size_bytes / self.smallest_bytes / factor, at_edge * factor
        at_edge = self.curve.predict(self.largest_bytes)
        ratio = size_bytes / self.largest_bytes
        return at_edge * ratio ** steepness(self.curve, self.largest_bytes) / factor, at_edge * ratio * factor


class UnfittedCurve(msgspec.Struct, frozen=True, kw_only=True):
    """A curve that was not fitted, and why."""

    label: str
    system: str
    reason: str
    sources: list[str] = []


class CollectiveFit(NamedTuple):
    costs: list[CollectiveCost]
    refused: list[UnfittedCurve]


def fit_collectives(curves: Iterable[CollectiveCurve]) -> CollectiveFit:
    """Each curve by itself: one that cannot be fitted does not affect the others."""
    costs, refused = [], []
    for curve in curves:
        reason = find_refusal(curve)
        if reason is None:
            costs.append(fit_collective(curve))
        else:
            refused.append(UnfittedCurve(label=curve.label, system=curve.system, reason=reason, sources=curve.sources))
    return CollectiveFit(costs, refused)


def find_refusal(curve: CollectiveCurve) -> str | None:
    count = len(curve.points)
    if count == 0:
        return "none of its messages has a size, so there is no curve over sizes"
    if count < FEWEST_SIZES:
        return f"{count_of(count, 'size')} measured, and a curve needs at least {FEWEST_SIZES}"
    return None


def fit_collective(curve: CollectiveCurve) -> CollectiveCost:
    """Choose a form by held-out sizes, fit it on all of them. Raises ValueError for fewer than `FEWEST_SIZES`."""
    reason = find_refusal(curve)
    if reason is not None:
        raise ValueError(f"{curve.label}: {reason}")
    points = curve.points
    trials = hold_out_models(points)
    candidates = {
        model: Candidate(held_out=summarize_trials(trials[model]), extrapolation=hold_out_largest(points, fit))
        for model, fit in FITS.items()
    }
    # The errors that chose the form cannot also vouch for it: here each size is kept from that choice too.
    honest = hold_out(points, fit_best)
    log_spread, level = spread_of(honest)
    setting = {name: getattr(curve, name) for name in CollectiveSetting.__struct_fields__}
    return CollectiveCost(
        **setting,
        curve=FITS[choose_model(trials)](points),
        smallest_bytes=points[0].size_bytes,
        largest_bytes=points[-1].size_bytes,
        sizes=len(points),
        held_out=summarize_trials(honest),
        level=level,
        log_spread=log_spread,
        candidates=candidates,
        sources=curve.sources,
    )


def spread_of(trials: Sequence[HeldOutSize], level: float = LEVEL) -> tuple[float, float]:
    """The log error that a further size stays below with chance `level`, and the chance that it really is.

    A new size is as likely to fall between any two of n held-out errors, or beyond them all, so the k-th smallest
    covers k/(n+1). With fewer than nine there is none for 90 %: the worst is taken with the chance it has.
    """
    ordered = sorted(trial.log_error for trial in trials)
    count = len(ordered)
    rank = min(count, math.ceil((count + 1) * level))
    return ordered[rank - 1], rank / (count + 1)


class TableRow(
    msgspec.Struct, frozen=True, kw_only=True, rename={"members": "nranks", "hosts": "nnodes", "size": "bytes"}
):
    """One row of a published table; what it may leave out has a default."""

    system: str
    members: Annotated[int, Meta(ge=1)]
    size: Annotated[int, Meta(ge=0)]
    time_us: Annotated[float, Meta(gt=0, le=1e18)]
    hosts: Annotated[int, Meta(ge=1)] | None = None
    operation: str = "all_reduce"
    backend: str = "nccl"
    dtype: str = "float32"
    device: str = "cuda"
    source: str = ""


TABLE_COLUMNS = ("system", "nranks", "bytes", "time_us")
"""A published table has at least these."""
COMMUNICATION_VERBS = frozenset({"comms", "import"})
"""Verbs of runs that may hold collectives: measured here, or read from what nccl-tests printed."""
_NOT_VARIANTS = frozenset({"size_bytes", "dtype", "device"})
"""Parameters of a case that the setting has a field of its own for."""


class MeasuredSize(NamedTuple):
    """One size of one setting, measured once."""

    setting: CollectiveSetting
    size_bytes: int
    time_s: float
    source: str


def measurements_of_run(run: StoredRun) -> Iterator[MeasuredSize]:
    """The cases of a communication run that were measured and gave the right result; the time is the median."""
    if run.plan.verb not in COMMUNICATION_VERBS:
        raise UsageError(
            f"run {run.id} was made by `bench {run.plan.verb}`: collective costs are fitted to communication runs",
            hint="stepscope bench comms --collective all_reduce --sizes 1K:64M:x4 --ranks 2",
            where=str(run.folder),
        )
    for measured in run.cases():
        # Overlaps, pairs and patterns of whole jobs have sizes too, but no curve of one operation.
        spec, size = measured.result.case.spec, measured.result.size_bytes
        if not isinstance(spec, CollectiveSpec):
            continue
        time_s = median(measured.seconds()) if measured.result.status == "ok" else None
        if isinstance(size, int) and time_s is not None and time_s > 0:
            yield MeasuredSize(_setting_of(measured, spec, run.system), size, time_s, run.id)


def _setting_of(measured: MeasuredCase, spec: CollectiveSpec, system: System | None) -> CollectiveSetting:
    case, observed = measured.result.case, measured.result.observed
    members = observed.members if isinstance(observed, CollectiveObserved) else None
    return CollectiveSetting(
        operation=spec.operation,
        members=case.world_size if members is None else members,
        hosts=len(system.hosts) if system else None,
        backend=case.benchmark.mode,
        dtype=spec.dtype,
        device=spec.device,
        variant={name: _plain(value) for name, value in case.parameters.items() if name not in _NOT_VARIANTS},
        timing=measured.result.timing,
        version=case.benchmark.version,
        system=system.name if system else "unknown system",
        fingerprint=system.fingerprint if system else None,
        configuration=system.configuration if system else None,
    )


def _plain(value: Parameter) -> str:
    return ",".join(str(item) for item in value) if isinstance(value, list) else str(value)


def read_published_table(path: Path) -> list[MeasuredSize]:
    """A CSV with one row per size; the first row that does not keep the rules is named with its line."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in TABLE_COLUMNS if name not in (reader.fieldnames or [])]
            if missing:
                raise BadInputError(
                    f"the table has no column {', '.join(missing)}",
                    hint=f"a table of a collective has at least the columns {', '.join(TABLE_COLUMNS)}",
                    where=f"{path}:1",
                )
            return [_parse_row(row, f"{path}:{reader.line_num}") for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInputError(
            f"the table cannot be read: {error}", hint="is the name right, and the file a CSV?", where=str(path)
        ) from error


def _parse_row(row: Mapping[str, str | None], where: str) -> MeasuredSize:
    cells = {name: text.strip() for name, text in row.items() if isinstance(text, str) and text.strip()}
    try:
        said = msgspec.convert({"system": "unknown system", **cells}, TableRow, strict=False)
    except msgspec.ValidationError as error:
        raise BadInputError(
            f"this is not a row of a collective's table: {error}", hint="fix or remove the line", where=where
        ) from error
    names = ("system", "members", "hosts", "operation", "backend", "dtype", "device")
    setting = CollectiveSetting(timing="published", **{name: getattr(said, name) for name in names})
    return MeasuredSize(setting, said.size, said.time_us * 1e-6, said.source or where.rpartition(":")[0])


def group_curves(measurements: Iterable[MeasuredSize]) -> list[CollectiveCurve]:
    """One curve per setting, in the order they are first met.

    A size that was measured more than once counts once, with the median of its times. Messages of no bytes (a barrier)
    are no points of a curve over sizes.
    """
    settings: dict[bytes, CollectiveSetting] = {}
    found: dict[bytes, list[MeasuredSize]] = defaultdict(list)
    for measurement in measurements:
        key = msgspec.json.encode(measurement.setting, order="sorted")
        settings.setdefault(key, measurement.setting)
        found[key].append(measurement)
    return [_curve(settings[key], same) for key, same in found.items()]


def _curve(setting: CollectiveSetting, measurements: Iterable[MeasuredSize]) -> CollectiveCurve:
    times: dict[int, list[float]] = defaultdict(list)
    sources: dict[str, None] = {}
    for measurement in measurements:
        sources[measurement.source] = None
        if measurement.size_bytes > 0:
            times[measurement.size_bytes].append(measurement.time_s)
    points = [CurvePoint(size, value) for size in sorted(times) if (value := median(times[size])) is not None]
    return CollectiveCurve(**msgspec.structs.asdict(setting), points=points, sources=list(sources))


FORMAT_VERSION = 1
_HINT = "stepscope costs fit-collective RUN --output FILE makes a table"


class CollectiveTable(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="collective_table"):
    schema_version: int = FORMAT_VERSION
    created_at: str
    """UTC, ISO 8601."""
    costs: list[CollectiveCost]


def require_table_name(path: Path) -> None:
    """Refuse a name that says the file is something else."""
    if path.suffix != ".json":
        raise UsageError("a collective table is a .json file", hint="name it so", where=str(path))


def write_collective_table(path: Path, costs: Sequence[CollectiveCost]) -> CollectiveTable:
    """By rename: the file is as it was, or whole."""
    require_table_name(path)
    table = CollectiveTable(created_at=utc_now(), costs=list(costs))
    write_output(path, msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n", make_folders=True)
    return table


def read_collective_table(path: Path) -> CollectiveTable:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInputError(f"the table cannot be read: {error.strerror}", hint=_HINT, where=str(path)) from error
    return parse_document(data, CollectiveTable, where=str(path), hint=_HINT)


def find_cost(
    table: CollectiveTable,
    *,
    operation: str,
    members: int,
    backend: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    timing: str | None = None,
    system: str | None = None,
    variant: Mapping[str, str] | None = None,
) -> CollectiveCost:
    """The one cost that answers; UsageError where none or several do. Nothing is guessed for another group size.

    What is left None may be anything, but `variant`: None is the operation in its usual form. `system` is a name or a
    fingerprint.
    """
    wanted = {"backend": backend, "dtype": dtype, "device": device, "timing": timing}
    found = [
        cost
        for cost in table.costs
        if (cost.operation, cost.members) == (operation, members)
        and all(value in (None, getattr(cost, name)) for name, value in wanted.items())
        and system in (None, cost.system, cost.fingerprint)
        and cost.variant == dict(variant or {})
    ]
    if len(found) == 1:
        return found[0]
    given = [value for value in (*wanted.values(), system) if value]
    given += [f"{name}={value}" for name, value in (variant or {}).items()]
    asked = ", ".join([operation, f"{members} ranks", *given])
    if not found:
        known = "; ".join(dict.fromkeys(cost.label for cost in table.costs)) or "nothing"
        raise UsageError(f"the table has no cost of {asked}", hint=f"it has: {known}")
    several = "; ".join(
        f"{cost.label} ({cost.device}, {cost.timing}) on {cost.system} ({cost.fingerprint or 'no fingerprint'})"
        for cost in found
    )
    raise UsageError(
        f"{len(found)} costs of the table answer to {asked}: {several}",
        hint="name the backend, the dtype, the device, the timing or the system too",
    )
