"""`stepscope compare`: two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from stepscope.cli.options import json_option, level_option, resolution_option, store_option
from stepscope.cli.output import emit, terminal_width
from stepscope.cli.report import unverified_lines
from stepscope.core.errors import UsageError
from stepscope.store import StoredRun, find_run

if TYPE_CHECKING:
    from stepscope.compare.views import Gains

VIEWS = ("cases", "ootb-optimized")


@click.command("compare")
@click.argument("name_a", metavar="A")
@click.argument("name_b", metavar="B", required=False)
@level_option
@resolution_option
@click.option("--view", type=click.Choice(VIEWS), default="cases",
              help="What is compared: B with A, case by case; or, inside the runs, optimized with ootb.")  # fmt: skip
@click.option("--format", "kind", type=click.Choice(["text", "markdown"]), default="text", help="Output format.")
@store_option
@json_option
def command(*, name_a: str, name_b: str | None, view: str, kind: str, store: Path, **how: Any) -> None:
    """Compare two runs case by case: better, worse, no difference found, or not enough data.

    A and B are folders, beginnings of ids, `latest`, or `latest~1` for the run before it. The ratio is the time of B
    over the time of A: above 1, B is slower. The exit code is 0 whatever is found.

    Example: stepscope compare latest~1 latest
    """
    from stepscope import api
    from stepscope.compare.verdict import describe_comparison
    from stepscope.report.render import render_comparison_markdown, render_comparison_text

    a = find_run(store, name_a)
    if name_b is None and view != "ootb-optimized":
        raise UsageError("a second run is missing", hint="stepscope compare A B", where="B")
    runs = [a, *([find_run(store, name_b)] if name_b else [])]
    heading = _heading(runs)
    gains: dict[str, Gains | None] = {}
    left_out: dict[str, list[str]] = {}
    if view == "ootb-optimized":
        table = api.compare_implementations(runs, **how)
        comparison = table.comparison
        gains = {"same_precision": table.same_precision, "any_precision": table.any_precision}
        left_out = {
            "without_score": table.without_score, "not_enough_data": table.undecided, "unpaired": table.unpaired,
        }  # fmt: skip
    else:
        comparison = api.compare(runs[0], runs[1], **how)
    rendered = (
        render_comparison_markdown(comparison.rows)
        if kind == "markdown"
        else render_comparison_text(comparison.rows, width=terminal_width())
    )
    alone = [f"only in A: {label}" for label in comparison.only_a] + [f"only in B: {x}" for x in comparison.only_b]
    closing = [
        *alone,
        *_describe_gains(gains),
        *(f"in no mean, {name.replace('_', ' ')}: {label}" for name, labels in left_out.items() for label in labels),
        *(f"note: {note}" for note in comparison.notes),
        describe_comparison(comparison),
    ]
    text = "\n".join([*heading, rendered.rstrip(), *closing])
    data = {**msgspec.to_builtins(comparison), "a": runs[0].id, "b": runs[-1].id, "view": view,
            "systems": [run.system.name if run.system else None for run in runs],
            "differences": find_differences(runs[0], runs[-1]),
            **({"gains": msgspec.to_builtins(gains), **left_out} if gains else {})}  # fmt: skip
    emit(data, text)


def _describe_gains(gains: dict[str, Gains | None]) -> list[str]:
    from stepscope.core.units import format_ratio

    return [
        f"optimized over ootb, {name.replace('_', ' ')}: {format_ratio(one.geometric_mean)} in the geometric mean of "
        f"{one.benchmarks}, least {format_ratio(one.least)} ({one.least_label})"
        for name, one in gains.items()
        if one is not None
    ]


def _heading(runs: list[StoredRun]) -> list[str]:
    from stepscope.report.labels import find_coverage

    names = [run.system.name if run.system else "unknown system" for run in runs]
    lines = [f"# {letter}: {run.id} on {name}" for letter, run, name in zip("AB", runs, names, strict=False)]
    lines += unverified_lines(runs)
    coverages = dict.fromkeys(find_coverage([(run.results, run.communication)]) for run in runs)
    lines += [f"# scale: {coverage.describe()}" for coverage in coverages if coverage is not None]
    if len(runs) == 2 and len({run.system.place if run.system else None for run in runs}) == 2:
        lines.append("# the ratio is between two systems, which differ in")
        lines += [f"#   {difference}" for difference in find_differences(runs[0], runs[1])]
    return lines


def find_differences(a: StoredRun, b: StoredRun) -> list[str]:
    if a.system is None or b.system is None:
        return ["system record: missing on one side"]
    return a.system.differences(b.system)
