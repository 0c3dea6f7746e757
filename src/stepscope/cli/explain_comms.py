"""What there is to say beside the table of a communication run, by what was measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from stepscope.cli.execute import Addition, cases_to_dict
from stepscope.cli.output import emit, terminal_width
from stepscope.core.errors import ExitCode, UsageError
from stepscope.records import CommunicationRequest
from stepscope.records.kinds import (
    CollectiveObserved,
    CollectiveSpec,
    OverlapSpec,
    PairSpec,
    PatternSpec,
    ProcessGroupSpec,
)
from stepscope.store import StoredRun, find_run


def explain_run(run: StoredRun) -> Addition:
    """What there is to say beside the table, by what was measured; for runs that are continued too."""
    if run.plan.request.searches:
        return explain_bisection(run)
    explain = {
        PatternSpec: explain_patterns, PairSpec: explain_pairs, OverlapSpec: explain_overlaps,
        ProcessGroupSpec: explain_process_groups,
    }  # fmt: skip
    return explain.get(type(run.plan.cases[0].spec), explain_parts)(run)


def explain_pairs(run: StoredRun) -> Addition:
    """For programs; the report that people see has the matrix and the findings already."""
    from stepscope.analyze.network.pair_matrix import read_pair_matrix
    from stepscope.analyze.network.pairs import find_outliers, pairs_to_dict

    matrix = read_pair_matrix(run.cases())
    findings = find_outliers(matrix)
    return Addition({"pairs": pairs_to_dict(matrix, findings)}, "")


def explain_bisection(run: StoredRun) -> Addition:
    from stepscope.bench.comms.bisection import replay_search

    request = run.plan.request
    assert isinstance(request, CommunicationRequest)
    assert request.bisect is not None
    verdict = replay_search(request.bisect, run.cases(), run.plan.world_size).verdict()
    return Addition({"bisection": msgspec.to_builtins(verdict)}, f"# {verdict.sentence}\n#   next: {verdict.next_step}")


def explain_overlaps(run: StoredRun) -> Addition:
    """What is derived from the cycles of a run."""
    from stepscope.report.overlaps import format_overlap_table, read_overlap

    cases = run.cases()
    views = [view for case in cases if (view := read_overlap(case)) is not None]
    return Addition({"overlaps": views}, format_overlap_table(cases, width=terminal_width()))


def explain_patterns(run: StoredRun) -> Addition:
    """Each case's communications, derived from its samples."""
    from stepscope.report.overlaps import format_pattern_table, read_pattern

    cases = run.cases()
    listed = cases_to_dict(cases, run.folder)["cases"]
    for content, measured in zip(listed, cases, strict=True):
        view = read_pattern(measured)
        content["steps"] = view.steps if view is not None else []
        content["lookups"] = view.lookups if view is not None else []
    return Addition({"cases": listed}, format_pattern_table(cases, width=terminal_width()))


def explain_process_groups(run: StoredRun) -> Addition:
    """Each phase on its slowest rank and on every rank, and what it took the first time."""
    from stepscope.report.process_group_table import format_process_groups, read_process_groups

    views = read_process_groups(run.cases())
    return Addition({"process_groups": views}, format_process_groups(views, width=terminal_width()))


def explain_parts(run: StoredRun) -> Addition:
    """What the table has no columns for: figures of pairs, times of parts, what quantising cost."""
    from stepscope.core.units import format_bytes, format_duration, format_significant
    from stepscope.report.communication import format_message_table, format_rank_averages, read_message_figures

    request, figures = run.plan.request, read_message_figures(run.cases())
    shows_ranks = isinstance(request, CommunicationRequest) and request.per_rank
    traced = [case.result.observed.trace for case in run.cases() if case.result.observed is not None]
    lines = [format_message_table(figures, width=terminal_width())] if figures else []
    lines += [f"# next: stepscope trace summary {run.folder / str(place)}" for place in traced if place]
    lines += [format_rank_averages(run.cases(), width=terminal_width())] if shows_ranks else []
    for case in run.cases():
        parts, spec, observed = case.parts_s(), case.result.case.spec, case.result.observed
        if not parts or not isinstance(spec, CollectiveSpec) or not isinstance(observed, CollectiveObserved):
            continue
        size = format_bytes(observed.size_bytes or 0)
        times = ", ".join(f"{name} {format_duration(value)}" for name, value in parts.items())
        if observed.wire_bytes is None:
            lines.append(f"# {size} of pickled objects by {spec.operation}: {times}")
            continue
        wire = format_bytes(observed.wire_bytes)
        errors = " and ".join(
            f"{format_significant(error)} {what}"
            for error, what in ((observed.error_max, "at most"), (observed.error_l2, "in the relative L2 norm"))
            if error is not None
        )
        lines.append(f"# {size} as {spec.wire}: {wire} on the wire; {times}; off by {errors}")
    return Addition({"messages": [one._asdict() for one in figures]} if figures else {}, "\n".join(lines))


def show_explained(name: str, explain: Callable[[StoredRun], Addition], what: str, store: Path) -> int:
    """Print only what stands beside the table of a stored run; a run that has none of it is refused."""
    run = find_run(store, name)
    addition = explain(run)
    if not addition.text:
        hint = f"stepscope report {run.id} shows what it holds"
        raise UsageError(f"run {run.id} holds no {what}", hint=hint, where="--show")
    emit({"run": str(run.folder), "id": run.id, **addition.data}, addition.text)
    return ExitCode.DONE
