"""`stepscope bench pattern`: what real jobs communicate in one step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec

from stepscope.cli.explain_comms import explain_patterns, show_explained
from stepscope.cli.options import run_options
from stepscope.cli.output import emit, terminal_width
from stepscope.cli.ranks import find_ranks, measure_cases, world_options
from stepscope.core.errors import ExitCode, UsageError
from stepscope.core.units import format_bytes

if TYPE_CHECKING:
    from stepscope.bench.comms.patterns import Pattern, Step


@click.command("pattern")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE",
              help="Parameter of every named pattern that has it, or NAME.KEY=VALUE for one; repeatable.")  # fmt: skip
@click.option("--no-overlap", is_flag=True, help="Wait for each communication before the next step begins.")
@click.option("--list", "listing", is_flag=True, help="List the patterns with their parameters.")
@click.option("--dry-run", is_flag=True, help="Show the sequence of each pattern, measure nothing.")
@click.option("--show", metavar="RUN", help="Show the patterns of a stored run, measure nothing.")
@world_options
@run_options
def pattern(
    *,
    names: tuple[str, ...],
    settings: tuple[str, ...],
    no_overlap: bool,
    listing: bool,
    dry_run: bool,
    show: str | None,
    **choices: Any,
) -> int:
    """Measure the communication of one step of a job: dlrm, ddp, fsdp, tp, sp, pp, ep, ps.

    Example: stepscope bench pattern ddp --set model=resnet50 --set scale=0.1 --ranks 4
    """
    from stepscope.bench.comms.patterns.registry import find_pattern, make_case, read_options, read_settings

    if listing:
        return list_patterns()
    if show is not None:
        return show_explained(show, explain_patterns, "patterns", choices["store"])
    if not names and choices["resume"] is None:
        raise UsageError("no pattern was named", hint="stepscope bench pattern --list", where="bench pattern")
    ranks = find_ranks(choices)
    wanted = [find_pattern(name) for name in dict.fromkeys(names)]
    chosen = read_settings([one.name for one in wanted], settings)
    options = {one.name: read_options(one, chosen[one.name]) for one in wanted}
    # Built here too: what cannot be is refused before any rank starts.
    steps = {one.name: one.make_steps(options[one.name], ranks.world_size) for one in wanted}
    cases = [
        make_case(
            one, options[one.name], overlap=not no_overlap, backend=ranks.backend, world_size=ranks.world_size,
            device=ranks.device,
        )
        for one in wanted
    ]  # fmt: skip
    if dry_run:
        parameters = {one.name: case.parameters for one, case in zip(wanted, cases, strict=True)}
        return show_sequences(wanted, steps, parameters)
    name = "-".join(["pattern", *(one.name for one in wanted)]) if len(wanted) < 4 else "patterns"
    return measure_cases(name, cases, ranks, choices, patterns=[one.name for one in wanted])


def list_patterns() -> int:
    from stepscope.bench.comms.patterns import PATTERNS

    listed, lines = [], []
    for one in PATTERNS.values():
        parameters = list_parameters(one)
        listed.append({"name": one.name, "summary": one.summary, "parameters": parameters})
        lines.append(f"{one.name:6} {one.summary}")
        for entry in parameters:
            choices = f" One of {', '.join(entry['choices'])}." if "choices" in entry else ""
            usual = entry["default"]  # as --set takes it; nothing where it is open
            value = "-".join(map(str, usual)) if isinstance(usual, list) else "" if usual is None else usual
            default = f"{entry['name']}={value}"
            lines.append(f"{'':6} {default:28} {entry['meaning']}{choices}")
    emit({"patterns": listed}, "\n".join(lines))
    return ExitCode.DONE


def list_parameters(one: Pattern) -> list[dict[str, Any]]:
    """Those of the pattern itself before those that all have."""
    schemas = msgspec.json.schema(one.options)["$defs"][one.options.__name__]["properties"]
    usual = one.list_values()
    own = [name for name in one.options.__struct_fields__ if name != "flops"]
    return [
        {
            "name": name,
            "default": usual[name],
            "meaning": schemas[name].get("description", ""),
            **({"choices": schemas[name]["enum"]} if "enum" in schemas[name] else {}),
        }
        for name in [*own, "flops"]
    ]


def show_sequences(wanted: list[Pattern], steps: dict[str, list[Step]], parameters: dict[str, Any]) -> int:
    """In the order that a run without overlap follows."""
    listed = [
        {
            "name": one.name,
            "parameters": parameters[one.name],
            "steps": [step_to_dict(step) for step in steps[one.name]],
        }
        for one in wanted
    ]
    emit({"patterns": listed}, lambda: "\n".join(format_sequence(one, steps[one.name]) for one in wanted))
    return ExitCode.DONE


def step_to_dict(step: Step) -> dict[str, Any]:
    names = ("name", "part", "size_bytes", "bus_bytes", "flops", "groups", "after")
    told = {"operation": step.operation or "compute", "dtype": step.dtype if step.communicates else None}
    return {**{name: getattr(step, name) for name in names}, **told}


def format_sequence(one: Pattern, steps: list[Step]) -> str:
    from stepscope.report.table import align

    titles = ["step", "operation", "bytes", "dtype", "groups", "after"]
    rows = [
        [
            step.name,
            step.operation or "compute",
            format_bytes(step.size_bytes) if step.communicates else f"{step.flops:g} flop" if step.flops else "-",
            step.dtype if step.communicates else "-",
            format_groups(step),
            " ".join(step.after) or "-",
        ]
        for step in steps
    ]
    lines = align([titles, *rows], [False, False, True, False, False, False], width=terminal_width())
    return "\n".join([f"# {one.name}: {one.summary}", f"# {lines[0]}", *(f"  {line}" for line in lines[1:])])


def format_groups(step: Step) -> str:
    """`0-3`, `0-1 2-3`, `2→1`; of what computes, the ranks."""
    if not step.communicates:
        return _span([rank for group in step.groups for rank in group])
    if step.operation == "send_recv":
        return " ".join("→".join(map(str, group)) for group in step.groups)
    return " ".join(_span(sorted(group)) for group in step.groups)


def _span(ranks: list[int]) -> str:
    whole = len(ranks) > 1 and ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]}-{ranks[-1]}" if whole else ",".join(map(str, ranks))
