"""`stepscope check`: a gate for CI."""

from __future__ import annotations

from pathlib import Path

import click

from stepscope.cli.options import Share, json_option, level_option, store_option
from stepscope.cli.output import emit
from stepscope.cli.report import unverified_lines
from stepscope.core.errors import RunNotFoundError, UsageError
from stepscope.store import StoredRun, find_newest, find_run


@click.command("check")
@click.argument("name", metavar="[RUN]", required=False)
@click.option("--baseline", required=True, metavar="RUN", help="The run to compare with.")
@click.option("--max-regression", type=Share(), default="5%", help="Largest allowed increase in time.")
@level_option
@store_option
@json_option
def command(*, name: str | None, baseline: str, max_regression: float, level: float, store: Path) -> int:
    """Compare RUN (by default the newest complete one) with a baseline, for CI.

    RUN is a folder, the beginning of an id, `latest`, or `latest~1` for the run before it. The exit code is 0 if every
    case is within the limit (95 % upper bound), 3 if any case is slower, and 4 if the data cannot decide.
    """
    from stepscope import api
    from stepscope.compare.gate import check_regression

    before = find_run(store, baseline)
    after = find_run(store, name) if name else _newest(store, before)
    if max_regression <= 0:
        raise UsageError("--max-regression must be above 0 %", hint="write for example 5%", where="--max-regression")
    comparison = api.compare(before, after, level=level, resolution=max_regression)
    result = check_regression(comparison, max_regression)
    lines = [f"# baseline {before.id}, candidate {after.id}", *unverified_lines([before, after])]
    lines += [f"{row.outcome:<10}  {row.label}: {row.reason}" for row in result.rows]
    lines.append(f"{result.outcome}: exit code {result.exit_code}")
    data = {"baseline": before.id, "candidate": after.id, "outcome": result.outcome, "exit_code": result.exit_code,
            "max_regression": max_regression, "rows": result.rows}  # fmt: skip
    emit(data, "\n".join(lines))
    return result.exit_code


def _newest(store: Path, baseline: StoredRun) -> StoredRun:
    newest = find_newest(store, beside=baseline.id)
    if newest is None:
        raise RunNotFoundError(
            f"there is no complete run in {store} beside the baseline", hint="measure one, or name it", where=str(store)
        )
    return newest
