"""`stepscope costs`: what things cost, fitted to what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from stepscope.cli.options import FILE, json_option, store_option
from stepscope.cli.output import emit, suggest_for_file, terminal_width
from stepscope.cli.report import chosen_runs
from stepscope.cli.trace_options import require_numpy
from stepscope.core.errors import UsageError
from stepscope.core.units import count_of, format_bandwidth, format_bytes, format_duration, format_share
from stepscope.store import find_run

if TYPE_CHECKING:
    from stepscope.costs.collective import CollectiveCost, CollectiveFit, MeasuredSize


@click.group("costs")
def command() -> None:
    """Fit cost models to measured runs."""


@command.command("fit-collective")
@click.argument("names", nargs=-1, metavar="[RUN]...")
@click.option("--output", "-o", type=FILE, metavar="FILE.json", help="Write the fitted costs to this file.")
@store_option
@json_option
def fit_collective(*, names: tuple[str, ...], output: Path | None, store: Path) -> None:
    """Fit curves of time against message size to communication runs (all of the store where none is named).

    RUN may also be a table: a .csv with the columns system, nranks, bytes, time_us. Each operation, group size,
    backend, dtype and system gets its own curve, chosen of three forms by its error on sizes that were held out.

    Example: stepscope costs fit-collective all_reduce.csv --output costs.json
    """
    from stepscope.costs.collective import fit_collectives, group_curves, require_table_name, write_collective_table

    require_numpy("fitting")
    if output is not None:
        require_table_name(output)
    fit = fit_collectives(group_curves(_measurements(names, store)))
    if not fit.costs:
        reasons = "; ".join(f"{one.label}: {one.reason}" for one in fit.refused)
        raise UsageError(
            f"no curve could be fitted: {reasons or 'the runs have no measured collective'}",
            hint="measure more sizes: stepscope bench comms --collective all_reduce --sizes 1K:64M:x4 --ranks 2",
        )
    if output is not None:
        write_collective_table(output, fit.costs)
    costs = [_describe(cost) for cost in fit.costs]
    data = {"costs": costs, "refused": fit.refused, "output": str(output) if output else None}
    emit(data, lambda: _format(fit, output))
    if output is not None:
        suggest_for_file(output)


def _measurements(names: Sequence[str], store: Path) -> Iterator[MeasuredSize]:
    from stepscope.costs.collective import COMMUNICATION_VERBS, measurements_of_run, read_published_table

    if not names:
        for run in chosen_runs((), store):
            if run.plan.verb in COMMUNICATION_VERBS:
                yield from measurements_of_run(run)
    for name in names:
        is_table = name.endswith(".csv")
        yield from read_published_table(Path(name)) if is_table else measurements_of_run(find_run(store, name))


def _describe(cost: CollectiveCost) -> dict[str, Any]:
    """The record, and what a reader would have to compute from it."""
    derived = {"model": cost.model, "latency_s": cost.latency_s, "bandwidth_bytes_per_s": cost.bandwidth_bytes_per_s}
    return {**msgspec.to_builtins(cost), **derived}


def _format(fit: CollectiveFit, output: Path | None) -> str:
    from stepscope.report.table import plain

    lines = []
    for system in dict.fromkeys((cost.system, cost.fingerprint, cost.configuration) for cost in fit.costs):
        same = [cost for cost in fit.costs if (cost.system, cost.fingerprint, cost.configuration) == system]
        lines += [f"# system: {plain(system[0])} ({system[1] or 'no record of it'})", *_format_table(same), "#"]
    lines += [
        "# errors: median (worst) of |predicted − measured| / measured on sizes held out, for each form",
        "# beyond: worst error of the chosen form on the largest quarter of the sizes, fitted without them",
        "# bandwidth: bytes of the message over its time, for a very large one; 1 GB/s = 10⁹ bytes per second",
    ]
    lines += [f"# refused: {plain(one.label)} on {plain(one.system)}: {one.reason}" for one in fit.refused]
    curves = count_of(len(fit.costs), "curve")
    lines.append(f"# {curves}: {output.resolve()}" if output else f"# {curves}; --output FILE.json keeps them")
    return "\n".join(lines)


def _format_table(costs: Sequence[CollectiveCost]) -> list[str]:
    from stepscope.costs.curves import FITS
    from stepscope.report.table import align

    titles = ["operation", "ranks", "backend", "dtype", "sizes", "from", "to", "form", "latency", "bandwidth"]
    titles += [*FITS, "beyond"]
    numeric = [title not in {"operation", "backend", "dtype", "form"} for title in titles]
    head, *rows = align([titles, *(_cells(cost) for cost in costs)], numeric, width=terminal_width())
    return [f"# {head}", *(f"  {row}" for row in rows)]


def _cells(cost: CollectiveCost) -> list[str]:
    from stepscope.report.table import show

    bandwidth, beyond = cost.bandwidth_bytes_per_s, cost.candidates[cost.model].extrapolation
    errors = [one.held_out for one in cost.candidates.values()]
    return [
        cost.call,
        str(cost.members),
        cost.backend,
        cost.dtype,
        str(cost.sizes),
        format_bytes(cost.smallest_bytes),
        format_bytes(cost.largest_bytes),
        cost.model,
        format_duration(cost.latency_s),
        show(bandwidth, format_bandwidth, "–"),
        *(f"{format_share(held.median)} ({format_share(held.worst)})" for held in errors),
        show(beyond, lambda found: format_share(found.errors.worst), "–"),
    ]
