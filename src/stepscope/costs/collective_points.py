"""Where the points of collective curves come from: stored communication runs, and tables that others published."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from stepscope.core.errors import BadInputError, UsageError
from stepscope.costs.collective import CollectiveCurve, CollectiveSetting
from stepscope.costs.fitting import Point
from stepscope.records import Parameter, System
from stepscope.records.kinds import CollectiveObserved, CollectiveSpec
from stepscope.stats import median
from stepscope.store import MeasuredCase, StoredRun

TABLE_COLUMNS = ("system", "nranks", "bytes", "time_us")
"""A published table has at least these; also read are `nnodes`, `operation`, `backend`, `dtype`, `device`, `source`."""
TABLE_DEFAULTS = {"operation": "all_reduce", "backend": "nccl", "dtype": "float32", "device": "cuda"}
COMMUNICATION_VERBS = frozenset({"comms", "import"})
"""Of the plans of runs that may hold collectives: measured here, or read from what nccl-tests printed."""
_NOT_VARIANTS = frozenset({"size_bytes", "dtype", "device"})
"""Parameters of a case that the setting has a field of its own for."""


class Measurement(NamedTuple):
    """One size of one setting, measured once."""

    setting: CollectiveSetting
    size_bytes: int
    time_s: float
    source: str


def measurements_of_run(run: StoredRun) -> Iterator[Measurement]:
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
            yield Measurement(_setting_of(measured, spec, run.system), size, time_s, run.id)


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


def read_published_table(path: Path) -> list[Measurement]:
    """A CSV with one row a size; the first row that does not keep the rules is named with its line."""
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


def _parse_row(row: Mapping[str, str | None], where: str) -> Measurement:
    cells = {name: (text or "").strip() for name, text in row.items() if isinstance(name, str)}
    said = {name: cells.get(name) or default for name, default in TABLE_DEFAULTS.items()}
    try:
        setting = CollectiveSetting(
            operation=said["operation"],
            backend=said["backend"],
            dtype=said["dtype"],
            device=said["device"],
            members=_whole(cells, "nranks", least=1),
            hosts=_whole(cells, "nnodes", least=1) if cells.get("nnodes") else None,
            timing="published",
            system=cells["system"] or "unknown system",
        )
        time_us = float(cells["time_us"])
        if not 0 < time_us < math.inf:
            raise ValueError(f"time_us {cells['time_us']} is not above 0")
        source = cells.get("source") or where.rpartition(":")[0]
        return Measurement(setting, _whole(cells, "bytes", least=0), time_us * 1e-6, source)
    except ValueError as error:
        raise BadInputError(
            f"this is not a row of a collective's table: {error}", hint="mend or remove the line", where=where
        ) from error


def _whole(cells: Mapping[str, str], name: str, *, least: int) -> int:
    value = int(cells[name])
    if value < least:
        raise ValueError(f"{name} {value} is below {least}")
    return value


def group_curves(measurements: Iterable[Measurement]) -> list[CollectiveCurve]:
    """One curve a setting, in the order they are first met.

    A size that was measured more than once counts once, with the median of its times. Messages of no bytes (a barrier)
    are no points of a curve over sizes.
    """
    settings: dict[bytes, CollectiveSetting] = {}
    found: dict[bytes, list[Measurement]] = defaultdict(list)
    for measurement in measurements:
        key = msgspec.json.encode(measurement.setting, order="sorted")
        settings.setdefault(key, measurement.setting)
        found[key].append(measurement)
    return [_curve(settings[key], same) for key, same in found.items()]


def _curve(setting: CollectiveSetting, measurements: Iterable[Measurement]) -> CollectiveCurve:
    times: dict[int, list[float]] = defaultdict(list)
    sources: dict[str, None] = {}
    for measurement in measurements:
        sources[measurement.source] = None
        if measurement.size_bytes > 0:
            times[measurement.size_bytes].append(measurement.time_s)
    points = [Point(size, value) for size in sorted(times) if (value := median(times[size])) is not None]
    return CollectiveCurve(**msgspec.structs.asdict(setting), points=points, sources=list(sources))
