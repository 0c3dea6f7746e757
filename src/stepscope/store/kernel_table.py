"""Kernel tables: one row a case and pass, as the cost models read them; CSV, since producers have no Parquet.

The reader also takes tables without the columns of this project (`op, device, dtype, …parameters…, latency_s`), as the
public training split of NeuSight has been reduced to, and gives their operators and parameters this project's names.
"""

from __future__ import annotations

import csv
import gzip
import io
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from stepscope.errors import BadInputError, MissingDependencyError, StoreWriteError, UsageError
from stepscope.records import Parameter, Scalar, System
from stepscope.stats import median, summarize
from stepscope.store.reader import StoredRun
from stepscope.store.view import MeasuredCase

LEADING = ("op", "device", "dtype")
TRAILING = (
    "pass",
    "cache",
    "latency_s",
    "latency_low_s",
    "latency_high_s",
    "samples",
    "wall_s",
    "graph_s",
    "kernel_s",
    "flops",
    "bytes",
    "unique_bytes",
    "kernels",
    "system",
)
REQUIRED = (*LEADING, "latency_s")
NOT_SHAPES = frozenset({"dtype", "device", "cache", "op", "pass"})
"""Parameters of a case that have a column of their own."""
_DIGITS = 6
"""Of a time: far below its noise, and half of the file's size."""


class KernelRow(msgspec.Struct, frozen=True, kw_only=True):
    """One measured operator. Times are medians in seconds; None where they were not taken."""

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
    """Name → launches an iteration."""
    system: str | None = None
    """Fingerprint of the system record."""


def rows_of_run(run: StoredRun) -> Iterator[KernelRow]:
    """The operator cases of a run that were measured; failed and skipped ones have no row."""
    if run.plan.verb != "ops":
        raise UsageError(
            f"run {run.id} was made by `bench {run.plan.verb}`: kernel tables are made of operator runs",
            hint="stepscope bench ops … --table FILE",
        )
    for measured in run.cases():
        if measured.result.status == "ok" and measured.samples:
            yield _row(measured, run.system)


def _row(measured: MeasuredCase, system: System | None) -> KernelRow:
    case, observed = measured.result.case, measured.result.observed
    summary = summarize(measured.seconds())
    parameters = case.parameters
    return KernelRow(
        op=str(parameters.get("op", case.benchmark.model)),
        device=_device_name(str(parameters["device"]), system),
        dtype=str(parameters["dtype"]),
        parameters={name: _scalar(value) for name, value in parameters.items() if name not in NOT_SHAPES},
        direction=str(parameters.get("pass", case.benchmark.mode)),
        cache=str(parameters.get("cache", "warm")),
        latency_s=summary.median_s,
        latency_low_s=summary.ci_low_s,
        latency_high_s=summary.ci_high_s,
        samples=summary.n,
        wall_s=median(measured.wall_seconds()),
        graph_s=median(measured.extra_seconds("graph")),
        kernel_s=median(measured.extra_seconds("kernel")),
        flops=int(observed["flops"]),
        bytes=int(observed["moved_bytes"]),
        unique_bytes=int(observed.get("unique_bytes", observed["moved_bytes"])),
        kernels={use.name: use.count for use in measured.result.kernels},
        system=system.fingerprint if system else None,
    )


def _scalar(value: Parameter) -> Scalar:
    return "x".join(str(item) for item in value) if isinstance(value, list) else value


def _device_name(device: str, system: System | None) -> str:
    kind, _, index = device.partition(":")
    if system is None:
        return device
    host = system.hosts[0]
    if kind == "cpu":
        return host.cpu.model
    return host.gpus[int(index or 0)].name if int(index or 0) < len(host.gpus) else device


def write_kernel_table(path: Path, rows: Iterable[KernelRow]) -> int:
    """Write by rename; `.gz` is compressed, always to the same bytes. Returns the number of rows."""
    listed = list(rows)
    names = list(dict.fromkeys(name for row in listed for name in row.parameters))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*LEADING, *names, *TRAILING])
    writer.writerows(_cells(row, names) for row in listed)
    data = text.getvalue().encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    scratch = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_bytes(data)
        os.replace(scratch, path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise StoreWriteError(
            f"cannot write the table: {error.strerror}", hint="the run itself is kept", where=str(path)
        ) from error
    return len(listed)


def _cells(row: KernelRow, names: Sequence[str]) -> list[str]:
    kernels = msgspec.json.encode(row.kernels).decode() if row.kernels else ""
    times = (row.latency_s, row.latency_low_s, row.latency_high_s)
    return [
        row.op,
        row.device,
        row.dtype,
        *(_text(row.parameters.get(name)) for name in names),
        row.direction,
        row.cache or "",
        *(_text(value) for value in times),
        _text(row.samples),
        *(_text(value) for value in (row.wall_s, row.graph_s, row.kernel_s)),
        _text(row.flops),
        _text(row.bytes),
        _text(row.unique_bytes),
        kernels,
        row.system or "",
    ]


def _text(value: Scalar | None) -> str:
    if value is None:
        return ""
    return f"{value:.{_DIGITS}g}" if isinstance(value, float) else str(value)


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
    except (ValueError, KeyError, msgspec.DecodeError) as error:
        raise BadInputError(
            f"this is not a row of a kernel table: {error}", hint="mend or remove the line", where=f"{path}:{line}"
        ) from error
    return row


def _own_row(cells: Mapping[str, str]) -> KernelRow:
    parameters = {
        name: _parse_scalar(text)
        for name, text in cells.items()
        if text != "" and name not in LEADING and name not in TRAILING
    }
    numbers: dict[str, Any] = {
        name: float(cells[name]) if cells.get(name) else None
        for name in ("latency_low_s", "latency_high_s", "wall_s", "graph_s", "kernel_s")
    }
    wholes: dict[str, Any] = {
        name: int(cells[name]) if cells.get(name) else None for name in ("samples", "flops", "bytes", "unique_bytes")
    }
    return KernelRow(
        op=cells["op"],
        device=cells["device"],
        dtype=cells["dtype"],
        parameters=parameters,
        direction=cells["pass"],
        cache=cells.get("cache") or None,
        latency_s=float(cells["latency_s"]),
        kernels=msgspec.json.decode(cells["kernels"], type=dict[str, float]) if cells.get("kernels") else {},
        system=cells.get("system") or None,
        **numbers,
        **wholes,
    )


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
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"True": True, "False": False}.get(text, text)


def write_parquet(path: Path, rows: Iterable[KernelRow]) -> int:
    """The same table as Parquet, types kept; for readers, who have duckdb."""
    try:
        import duckdb
    except ImportError:
        raise MissingDependencyError("Parquet needs duckdb", hint="pip install 'stepscope[read]'") from None
    with tempfile.TemporaryDirectory(prefix="stepscope-table-") as scratch:
        plain, made = Path(scratch) / "table.csv", path.with_name(path.name + ".tmp")
        count = write_kernel_table(plain, rows)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with duckdb.connect(":memory:") as connection:
                connection.execute(
                    "CREATE TABLE t AS SELECT * FROM read_csv(?, header=true, sample_size=-1)", [str(plain)]
                )
                connection.execute(f"COPY t TO '{str(made).replace(chr(39), chr(39) * 2)}' (FORMAT parquet)")
            os.replace(made, path)
        except (OSError, duckdb.Error) as error:
            made.unlink(missing_ok=True)
            raise StoreWriteError(f"cannot write Parquet: {error}", where=str(path)) from error
    return count
