"""`stepscope ab`: two sides, interleaved, in repeated fresh processes."""

from __future__ import annotations

from pathlib import Path

import click

from stepscope.cli.execute import command_line
from stepscope.cli.options import Duration, Share, json_option, resolution_option, store_option
from stepscope.cli.output import emit, narrate
from stepscope.core.errors import ExitCode


@click.command("ab")
@click.argument("side_a", metavar='"CASE A"')
@click.argument("side_b", metavar='"CASE B"')
@click.option("--pairs", type=click.IntRange(2), default=8, show_default=True, help="Fresh processes of each side.")
@click.option("--max-time", type=Duration(), default="1s", show_default=True, help="Sampling time a case and process.")
@click.option("--level", type=Share(), default="1%", show_default=True, help="Chance of any false alarm.")
@resolution_option
@store_option
@json_option
def command(
    *,
    side_a: str,
    side_b: str,
    pairs: int,
    max_time: float,
    level: float,
    resolution: float,
    store: Path,
    as_json: bool,
) -> int:
    """Measure two sides interleaved, in repeated fresh processes, and say which is faster.

    A CASE is what follows `stepscope bench`, with variables in front where the sides differ in them:

    stepscope ab "OMP_NUM_THREADS=1 ops --op gemm" "OMP_NUM_THREADS=2 ops --op gemm"
    """
    from stepscope.compare import describe, describe_comparison
    from stepscope.compare.interleaved import compare_interleaved, measure_interleaved, parse_side

    sides = (parse_side(side_a), parse_side(side_b))
    limited = any(word.startswith(("--max-time", "--quick")) for side in sides for word in side.arguments)
    a, b = measure_interleaved(
        sides,
        pairs=pairs,
        store=store,
        command=command_line(),
        extra=() if limited else ("--max-time", f"{max_time}s"),
        on_pair=lambda done, total: narrate(f"[{done}/{total}] pairs"),
    )
    comparison = compare_interleaved(a, b, level=level, resolution=resolution)
    rows = comparison.rows
    lines = [*map(describe, rows), describe_comparison(comparison)]
    failed = any("failed" in {row.status_a, row.status_b} for row in rows)
    data = {"a": str(a.folder), "b": str(b.folder), "pairs": pairs, "level": level, "rows": rows}
    emit(data, "\n".join([*lines, f"A: {a.folder}", f"B: {b.folder}"]), as_json=as_json)
    return ExitCode.FAILED if failed else ExitCode.DONE
