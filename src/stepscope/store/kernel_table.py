"""Kernel tables: one row per case and pass, as the cost models read them; CSV, since producers have no Parquet.

The reader also takes tables without the columns of this project (`op, device, dtype, …parameters…, latency_s`), as the
public training split of NeuSight has been reduced to, and gives their operators and parameters this project's names.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from stepscope.core.errors import BadInputError, CorruptRunError, MissingDependencyError, UsageError
from stepscope.core.files import write_output
from stepscope.records import Parameter, Scalar, System
from stepscope.records.case import join_list
from stepscope.records.kinds import CallSpec, OperatorObserved, OperatorSpec
from stepscope.stats import median, summarize
from stepscope.store.reader import StoredRun
from stepscope.store.view import MeasuredCase

_DIGITS = 6
"""Digits of a time: far below its noise, and half of the file's size."""


class KernelRow(msgspec.Struct, frozen=True, kw_only=True, rename={"direction": "pass"}):
    """One measured operator. Times are medians in seconds; None where they were not taken.

    Its fields are the columns of the table, in their order; each parameter has one of its own.
    """

    op: str
    device: str
    """What it is, not where it is: `NVIDIA H200`, not `cuda:0`."""
    dtype: str
    parameters: dict[str, Scalar]
    direction: str = "forward"
    cache: str | None = None
    latency_s: float
    """Device time; on a CPU wall time."""
    latency_low_s: float | None = None
    latency_high_s: float | None = None
    """Ends of the median's interval."""
    samples: int | None = None
    wall_s: float | None = None
    graph_s: float | None = None
    kernel_s: float | None = None
    flops: int | None = None
    bytes: int | None = None
    unique_bytes: int | None = None
    """Without what a call touches again."""
    kernels: dict[str, float] = {}
    """Name → launches per iteration."""
    config: str | None = None
    """Config of the benchmark: `custom`, the name of a shape set, or `ceiling` for a measured peak."""
    system: str | None = None
    """Fingerprint of the system record."""


_COLUMNS = KernelRow.__struct_encode_fields__
LEADING, TRAILING = _COLUMNS[: _COLUMNS.index("parameters")], _COLUMNS[_COLUMNS.index("parameters") + 1 :]
"""Columns before those of the parameters, and behind them."""
REQUIRED = (*LEADING, "latency_s")
_COUNTS = ("samples", "flops", "bytes", "unique_bytes")


def rows_of_run(run: StoredRun) -> Iterator[KernelRow]:
    """The operator cases of a run that were measured; failed and skipped ones have no row."""
    if run.plan.verb != "ops":
        raise UsageError(
            f"run {run.id} was made by `bench {run.plan.verb}`: kernel tables are made of operator runs",
            hint="stepscope bench ops … --table FILE",
        )
    for measured in run.cases():
        spec, observed = measured.result.case.spec, measured.result.observed
        if measured.result.status == "ok" and measured.samples and isinstance(spec, OperatorSpec | CallSpec):
            if not isinstance(observed, OperatorObserved) or observed.flops is None or observed.moved_bytes is None:
                raise CorruptRunError(f"{measured.result.case.label} has no record of its work", where=str(run.folder))
            yield _row(measured, spec, observed, run.system)


def _row(
    measured: MeasuredCase, spec: OperatorSpec | CallSpec, observed: OperatorObserved, system: System | None
) -> KernelRow:
    summary = summarize(measured.seconds())
    moved = int(observed.moved_bytes or 0)
    compiled: dict[str, Parameter] = {"compile": True} if spec.compile else {}
    return KernelRow(
        op=spec.op,
        device=_device_name(str(spec.device), system),
        dtype=str(spec.dtype),
        parameters={name: join_list(value) for name, value in (spec.shape | compiled).items()},
        direction=spec.direction,
        cache=spec.cache or "warm",
        latency_s=summary.median_s,
        latency_low_s=summary.ci_low_s,
        latency_high_s=summary.ci_high_s,
        samples=summary.n,
        wall_s=median(measured.wall_seconds()),
        graph_s=median(measured.extra_seconds("graph")),
        kernel_s=median(measured.extra_seconds("kernel")),
        flops=int(observed.flops or 0),
        bytes=moved,
        unique_bytes=moved if observed.unique_bytes is None else int(observed.unique_bytes),
        kernels={use.name: use.count for use in measured.result.kernels},
        config=measured.result.case.benchmark.config,
        system=system.fingerprint if system else None,
    )


def _device_name(device: str, system: System | None) -> str:
    kind, _, index = device.partition(":")
    if system is None:
        return device
    host = system.hosts[0]
    if kind == "cpu":
        return host.cpu.model
    return host.gpus[int(index or 0)].name if int(index or 0) < len(host.gpus) else device


_FORMATS = {
    "table": (
        (".csv", ".csv.gz"),
        "a kernel table is a .csv or .csv.gz file",
        "name it so; `stepscope runs export --format parquet` makes Parquet",
    ),
    "parquet": (
        (".parquet",),
        "a Parquet file is named .parquet",
        "name it so; `stepscope runs export --format table` makes a .csv or .csv.gz",
    ),
}
"""Endings of a format's files, what is said of another ending, and the next step."""


def require_table_name(path: Path, kind: str = "table") -> None:
    """Refuse a name that says the file is something else than a table (CSV), or than Parquet."""
    endings, rule, hint = _FORMATS[kind]
    if not path.name.endswith(endings):
        raise UsageError(rule, hint=hint, where=str(path))


def write_kernel_table(path: Path, rows: Iterable[KernelRow]) -> int:
    """Write by rename; `.gz` is compressed, always to the same bytes. Returns the number of rows."""
    require_table_name(path)
    listed = list(rows)
    names = _parameter_names(listed)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*LEADING, *names, *TRAILING])
    writer.writerows(_cells(row, names) for row in listed)
    data = text.getvalue().encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    write_output(path, data, hint="the run itself is kept; choose another file", make_folders=True)
    return len(listed)


def _parameter_names(rows: Iterable[KernelRow]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row.parameters))


def _cells(row: KernelRow, names: Sequence[str]) -> list[str]:
    plain = _list_columns(row)
    return [
        *(_print_plain(plain[name]) for name in LEADING),
        *(_print_scalar(row.parameters[name]) if name in row.parameters else "" for name in names),
        *(_print_plain(plain[name]) for name in TRAILING),
    ]


def _list_columns(row: KernelRow) -> dict[str, str | int | float | None]:
    """Those that every table has."""
    columns: dict[str, Any] = msgspec.to_builtins(row)
    del columns["parameters"]
    return columns | {"kernels": msgspec.json.encode(row.kernels).decode() if row.kernels else None}


def _print_plain(value: str | int | float | None) -> str:
    """A cell of a column whose type is known."""
    if value is None:
        return ""
    return f"{value:.{_DIGITS}g}" if isinstance(value, float) else str(value)


def _print_scalar(value: Scalar) -> str:
    """A parameter's cell: `_parse_scalar` gives the same value back. Words that would come back as another one, such as
    the order 1032 of a permutation, are written in the quotes of JSON."""
    text = str(value)
    if isinstance(value, str) and (text == "" or text.startswith('"') or _parse_scalar(text) != value):
        return msgspec.json.encode(value).decode()
    return text


def read_kernel_table(path: Path) -> list[KernelRow]:
    """Every row; the first that does not keep the rules is named with its line."""
    try:
        with _open_text(path) as file:
            reader = csv.reader(file)
            header = next(reader, [])
            missing = [name for name in REQUIRED if name not in header]
            if missing:
                raise BadInputError(
                    f"the table has no column {', '.join(missing)}",
                    hint=f"a kernel table has at least the columns {', '.join(REQUIRED)}",
                    where=f"{path}:1",
                )
            parse = _own_row if "pass" in header else _foreign_row
            return [_parse_line(path, reader.line_num, header, cells, parse) for cells in reader if cells]
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise BadInputError(
            f"the table cannot be read: {error}", hint="is it whole, and a CSV (or .csv.gz)?", where=str(path)
        ) from error


def _open_text(path: Path) -> IO[str]:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rt", encoding="utf-8", newline="") if packed else path.open(encoding="utf-8", newline="")


RowParser = Callable[[Mapping[str, str]], KernelRow]


def _parse_line(path: Path, line: int, header: Sequence[str], cells: Sequence[str], parse: RowParser) -> KernelRow:
    try:
        if len(cells) != len(header):
            raise ValueError(f"{len(cells)} cells instead of {len(header)}")
        row = parse(dict(zip(header, cells, strict=True)))
        if not row.latency_s > 0:
            raise ValueError(f"latency_s {row.latency_s} is not above 0")
    except (ValueError, KeyError) as error:
        raise BadInputError(
            f"this is not a row of a kernel table: {error}", hint="fix or remove the line", where=f"{path}:{line}"
        ) from error
    return row


def _own_row(cells: Mapping[str, str]) -> KernelRow:
    known: dict[str, Any] = {name: text for name, text in cells.items() if text != ""}
    parameters = {name: _parse_scalar(known.pop(name)) for name in [*known] if name not in _COLUMNS}
    if "kernels" in known:
        known["kernels"] = msgspec.json.decode(known["kernels"])
    return msgspec.convert({**known, "parameters": parameters}, KernelRow, strict=False)


_FOREIGN: dict[str, tuple[str, dict[str, str], dict[str, Scalar]]] = {
    # In those tables n is the reduction dimension: (b, m, n) · (b, n, k), and linear maps n features to k.
    "bmm": ("bmm", {"b": "batch", "m": "m", "n": "k", "k": "n"}, {"layout": "nn", "batching": "packed"}),
    "linear": ("linear", {"m": "batch", "n": "in", "k": "out"}, {}),
    "ln": ("layer_norm", {"rows": "rows", "cols": "cols"}, {}),
    "softmax": ("softmax", {"rows": "rows", "cols": "cols"}, {}),
    **{
        step: ("elementwise", {"rows": "rows", "cols": "cols"}, {"chain": step})
        for step in ("add", "mul", "pow", "div", "addu", "mulu", "powu", "divu")
    },
    **{
        function: ("activation", {"rows": "rows", "cols": "cols"}, {"function": function})
        for function in ("relu", "gelu", "tanh")
    },
}
"""Their operator → ours, its parameters renamed, and those they leave unsaid."""


def _foreign_row(cells: Mapping[str, str]) -> KernelRow:
    op, names, unsaid = _FOREIGN.get(cells["op"], (cells["op"], {}, {}))
    own = {name: _parse_scalar(text) for name, text in cells.items() if text != "" and name not in REQUIRED}
    parameters = {names[name]: value for name, value in own.items() if name in names} if names else own
    return KernelRow(
        op=op,
        device=cells["device"],
        dtype=cells["dtype"],
        parameters={**parameters, **unsaid},
        cache="warm",
        latency_s=float(cells["latency_s"]),
    )


def _parse_scalar(text: str) -> Scalar:
    """A number only where printing it gives the same text: 0213 is a word."""
    if text.startswith('"'):
        return msgspec.json.decode(text, type=str)
    if text in {"True", "False"}:
        return text == "True"
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if math.isfinite(number) and text in (str(number), _print_plain(number)):
            return number
    return text


def write_parquet(path: Path, rows: Iterable[KernelRow]) -> int:
    """The same table as Parquet; for readers, who have polars.

    Columns that every table has are of the same type in every table, also where they are empty.
    """
    require_table_name(path, "parquet")
    try:
        import polars as pl
    except ImportError:
        raise MissingDependencyError("Parquet needs polars", hint="pip install 'stepscope[read]'") from None
    listed = list(rows)
    kinds = _column_types(listed)
    schema = {name: getattr(pl, kind) for name, kind in kinds.items()}
    content = io.BytesIO()
    pl.DataFrame([_plain_row(row, kinds) for row in listed], schema=schema).write_parquet(content)
    write_output(path, content.getvalue(), make_folders=True)
    return len(listed)


def _column_types(rows: Sequence[KernelRow]) -> dict[str, str]:
    """By column, the name of its type in polars."""
    return {
        **dict.fromkeys(LEADING, "String"),
        **{name: _parameter_type(name, rows) for name in _parameter_names(rows)},
        **{name: "Float64" if name.endswith("_s") else "Int64" if name in _COUNTS else "String" for name in TRAILING},
    }


def _parameter_type(name: str, rows: Iterable[KernelRow]) -> str:
    """The narrowest type that holds every value; numbers and words together become words."""
    kinds = {type(row.parameters[name]) for row in rows if name in row.parameters}
    for allowed, found in (({bool}, "Boolean"), ({int}, "Int64"), ({int, float}, "Float64")):
        if kinds <= allowed:
            return found
    return "String"


def _plain_row(row: KernelRow, kinds: Mapping[str, str]) -> dict[str, Scalar | None]:
    parameters = {name: str(value) if kinds[name] == "String" else value for name, value in row.parameters.items()}
    return {**_list_columns(row), **parameters}
