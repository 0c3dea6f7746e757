"""SQL over stored runs: four tables made from the evidence and the registered metrics, queried by DuckDB in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from stepscope.core.errors import MissingDependencyError, StepscopeError, UsageError
from stepscope.metrics.registry import CaseInput, evaluate_case, list_metrics, read_value, with_peaks
from stepscope.store import StoredRun, read_each

_TABLES: dict[str, dict[str, str]] = {
    "runs": {
        "run": "VARCHAR", "status": "VARCHAR", "kind": "VARCHAR", "verb": "VARCHAR", "created_at": "TIMESTAMP",
        "finished_at": "TIMESTAMP", "launcher": "VARCHAR", "world_size": "INTEGER", "command": "VARCHAR",
        "system": "VARCHAR", "tool_version": "VARCHAR", "tag": "VARCHAR",
    },
    "systems": {
        "system": "VARCHAR", "name": "VARCHAR", "cpu": "VARCHAR", "gpus": "INTEGER", "gpu": "VARCHAR",
        "memory_bytes": "BIGINT", "libraries": "JSON", "environment": "JSON",
    },
    "cases": {
        "run": "VARCHAR", "case_key": "VARCHAR", "benchmark": "VARCHAR", "model": "VARCHAR",
        "implementation": "VARCHAR", "mode": "VARCHAR", "config": "VARCHAR", "version": "INTEGER",
        "owner": "VARCHAR", "parameters": "JSON",
        "batch_size": "BIGINT", "world_size": "INTEGER", "status": "VARCHAR", "cause": "VARCHAR", "n": "INTEGER",
        "median_s": "DOUBLE", "ci_low_s": "DOUBLE", "ci_high_s": "DOUBLE", "p95_s": "DOUBLE", "p99_s": "DOUBLE",
        "score": "DOUBLE", "unit": "VARCHAR", "elapsed_s": "DOUBLE", "observed": "JSON", "notices": "INTEGER",
    },
    "samples": {
        "run": "VARCHAR", "case_key": "VARCHAR", "rank": "INTEGER", "process": "INTEGER", "i": "INTEGER",
        "duration_s": "DOUBLE", "iterations": "BIGINT", "per_iteration_s": "DOUBLE", "device_s": "DOUBLE",
        "warmup": "BOOLEAN",
    },
}  # fmt: skip
"""Table → column → type."""
_TYPES = {"count": "BIGINT", "rank": "BIGINT", "yes/no": "BOOLEAN", "text": "VARCHAR"}
"""Types of metrics by their unit; the others are numbers."""

_LIMITS = {"INTEGER": 1 << 31, "BIGINT": 1 << 63}

_SAMPLES_PER_ROW = 10_000
"""DuckDB reads rows of at most 16 MiB."""
_STORED = {
    "samples": {
        "duration_s": "DOUBLE[]", "iterations": "BIGINT[]", "per_iteration_s": "DOUBLE[]", "device_s": "DOUBLE[]",
        "warmup": "BOOLEAN[]",
    },
}  # fmt: skip
"""Columns whose type is another one in the rows that a table is made from."""
_SELECTED = {
    "systems": "SELECT DISTINCT *",
    "samples": """
        SELECT * REPLACE ((i + unnest(range(len(duration_s))))::INTEGER AS i, unnest(duration_s) AS duration_s,
        unnest(iterations) AS iterations, unnest(per_iteration_s) AS per_iteration_s, unnest(device_s) AS device_s,
        unnest(warmup) AS warmup)
    """,
}
"""How a table is made from those rows; by default as they are."""


def list_tables() -> dict[str, dict[str, str]]:
    """Table → column → type; cases have a column per metric, behind those that they always had."""
    cases = _TABLES["cases"]
    more = {name: _TYPES.get(one.unit, "DOUBLE") for name, one in list_metrics().items() if name not in cases}
    return {**_TABLES, "cases": {**cases, **more}}


class QueryResult(NamedTuple):
    columns: list[str]
    rows: list[tuple[Any, ...]]
    damaged: list[StepscopeError]
    """What is wrong with the runs that are in no table."""


def query_runs(runs: Iterable[StoredRun], query: str) -> QueryResult:
    """The rows of one SELECT over runs, with the names of its columns.

    `runs`: as `list_runs` gives them. `query`: SQL of DuckDB; only the tables `runs`, `systems`, `cases` and `samples`
    are reachable: no files, no network, nothing is written.

    >>> stepscope.query_runs([stepscope.find_run("latest")], "SELECT count(*) FROM cases").rows
    [(1,)]
    """
    try:
        import duckdb
    except ImportError:
        raise MissingDependencyError("SQL needs duckdb", hint="pip install 'stepscope[read]'") from None
    with tempfile.TemporaryDirectory(prefix="stepscope-sql-") as scratch, duckdb.connect(":memory:") as connection:
        try:
            damaged = _fill_tables(connection, runs, Path(scratch))
            connection.execute("SET enable_external_access = false")
            return QueryResult(*_execute(connection, query), damaged)
        except duckdb.Error as error:
            raise UsageError(
                f"the query failed: {error}",
                hint=f"tables: {', '.join(_TABLES)}; stepscope runs sql --tables lists their columns",
                where="SQL",
            ) from error


def _execute(connection: Any, query: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    cursor = connection.execute(query)
    if cursor is None:
        raise UsageError("there is no query in it", hint="write SELECT … FROM runs", where="SQL")
    columns = [column[0] for column in cursor.description or []]
    if any("TIME ZONE" in str(column[1]) for column in cursor.description or []):
        # As Python objects these need a library of time zones; as text they do not.
        cursor = connection.execute(f"SELECT CAST(COLUMNS(*) AS VARCHAR) FROM ({query.strip().rstrip(';')}\n)")
    return columns, cursor.fetchall()


def _fill_tables(connection: Any, runs: Iterable[StoredRun], scratch: Path) -> list[StepscopeError]:
    """Returns what is wrong with the runs that are in none of them."""
    encoder = msgspec.json.Encoder()
    damaged: list[StepscopeError] = []
    files = {table: (scratch / f"{table}.jsonl").open("wb") for table in _TABLES}
    try:
        for stored in runs:
            rows, wrong = read_each([stored.folder], _checked_rows)
            damaged += wrong
            for table, row in rows[0] if rows else []:
                files[table].write(encoder.encode(row) + b"\n")
    finally:
        for file in files.values():
            file.close()
    for table, columns in list_tables().items():
        typed = ", ".join(f"'{name}': '{kind}'" for name, kind in (columns | _STORED.get(table, {})).items())
        connection.execute(
            f"CREATE TABLE {table} AS {_SELECTED.get(table, 'SELECT *')} FROM "
            f"read_json(?, format='newline_delimited', columns={{{typed}}})",
            [str(scratch / f"{table}.jsonl")],
        )
    return damaged


def _checked_rows(stored: StoredRun) -> list[tuple[str, dict[str, Any]]]:
    """Raises ValueError for values that their column does not hold: one run must not keep the others out."""
    limited = {
        table: [(name, kind) for name, kind in columns.items() if kind in _LIMITS or kind == "TIMESTAMP"]
        for table, columns in list_tables().items()
    }
    rows = list(_rows(stored))
    for table, row in rows:
        for name, kind in limited[table]:
            value = row.get(name)
            if value is None:
                continue
            if kind == "TIMESTAMP":
                datetime.fromisoformat(value)
            elif not -_LIMITS[kind] <= (value := max(value) if isinstance(value, list) else value) < _LIMITS[kind]:
                raise ValueError(f"{name} = {value} is too large for a table")
    return rows


def _rows(stored: StoredRun) -> Iterator[tuple[str, dict[str, Any]]]:
    """Table and row; samples with many to a row."""
    plan, run, system = stored.plan, stored.run, stored.system
    fingerprint = system.fingerprint if system else None
    yield "runs", {
        "run": stored.id, "status": stored.status, "kind": plan.kind, "verb": plan.verb,
        "created_at": plan.created_at, "finished_at": run.finished_at if run else None, "launcher": plan.launcher,
        "world_size": plan.world_size, "command": " ".join(plan.command), "system": fingerprint,
        "tool_version": plan.tool_version, "tag": plan.request.tag,
    }  # fmt: skip
    if system:
        host = system.hosts[0]
        yield "systems", {
            "system": fingerprint, "name": system.name, "cpu": host.cpu.model, "gpus": len(host.gpus),
            "gpu": host.gpus[0].name if host.gpus else None, "memory_bytes": host.memory.total_bytes,
            "libraries": system.libraries, "environment": system.environment,
        }  # fmt: skip
    for one in with_peaks(stored.cases()):
        place: dict[str, Any] = {"run": stored.id, "case_key": one.result.case.key}
        yield "cases", {**_case_row(one), **place}
        for samples in one.measured.samples:
            place |= {"rank": samples.rank, "process": samples.process}
            for first in range(0, len(samples), _SAMPLES_PER_ROW):
                part = slice(first, first + _SAMPLES_PER_ROW)
                times_s, iterations = samples.duration_s[part], samples.iterations[part]
                yield "samples", {
                    **place, "i": first, "duration_s": times_s, "iterations": iterations,
                    "per_iteration_s": [time_s / number for time_s, number in zip(times_s, iterations, strict=True)],
                    "device_s": samples.device_s[part] if samples.device_s is not None else None,
                    "warmup": samples.warmup[part],
                }  # fmt: skip


def _case_row(one: CaseInput) -> dict[str, Any]:
    """What a case has; other columns are empty."""
    result, case, summary = one.result, one.result.case, one.measured.summary()
    bench = case.benchmark
    statistics = ("median_s", "ci_low_s", "ci_high_s", "p95_s", "p99_s")
    values = {name: read_value(outcome) for name, outcome in evaluate_case(one).items()}
    return {
        **{name: value for name, value in values.items() if value is not None},
        "benchmark": bench.id, "model": bench.model,
        "implementation": bench.implementation, "mode": bench.mode, "config": bench.config, "version": bench.version,
        "owner": bench.owner, "parameters": case.parameters, "batch_size": case.batch_size,
        "world_size": case.world_size, "status": result.status,
        "cause": result.failure.message if result.failure else None, "n": summary.n if summary else 0,
        **{name: getattr(summary, name) if summary else None for name in statistics},
        "score": one.measured.score(summary), "unit": result.score.unit if result.score else None,
        "elapsed_s": result.elapsed_s, "observed": result.facts, "notices": len(result.notices),
    }  # fmt: skip
