"""`stepscope bench`: measure."""

from __future__ import annotations

import click

from stepscope.cli.comms import comms
from stepscope.cli.ops import ops, suite
from stepscope.cli.overlap import overlap
from stepscope.cli.pairs import bisect, pairs
from stepscope.cli.pattern import pattern
from stepscope.cli.suite import list_benchmarks, proxy
from stepscope.cli.workload import workload


@click.group("bench")
def command() -> None:
    """Measure operators, collectives and workloads."""


command.add_command(ops)
command.add_command(suite)
command.add_command(comms)
command.add_command(overlap)
command.add_command(pairs)
command.add_command(bisect)
command.add_command(pattern)
command.add_command(workload)
command.add_command(list_benchmarks)
suite.add_command(proxy)
