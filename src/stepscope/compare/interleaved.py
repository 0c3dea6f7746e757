"""Two sides measured turn by turn in fresh processes: how any claim of a ratio is made.

Each process of a side is an ordinary benchmark run, kept aside until its partner is done. The sides change order with
every pair (AB, BA, AB …), so that a machine that slowly changes speed favours neither. In the end each side is one
stored run whose samples say which process took them.
"""

from __future__ import annotations

import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from stepscope.compare.verdict import DEFAULT_FAMILY_LEVEL, DEFAULT_RESOLUTION, Comparison, Pair, compare_pairs
from stepscope.core.errors import UsageError
from stepscope.launch import call_stepscope, merge_processes
from stepscope.store import MeasuredCase, StoredRun, create_run

KINDS = ("ops", "workload", "comms")
CHILD_TIMEOUT_S = 600.0
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*")


class Side(NamedTuple):
    """One of the two things compared: a `bench` command, and variables set for it alone."""

    text: str
    environment: dict[str, str]
    arguments: list[str]

    @property
    def verb(self) -> str:
        return self.arguments[0]


def parse_side(text: str) -> Side:
    """`[NAME=VALUE …] [stepscope] [bench] ops|workload|comms …`, quoted as in a shell; no shell runs it."""
    hint = 'write what follows `stepscope bench`, for example "OMP_NUM_THREADS=1 ops --op gemm --shape m=512"'
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"cannot read {text!r}: {error}", hint=hint) from error
    environment = {}
    while words and _ASSIGNMENT.fullmatch(words[0]):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    for optional in ("stepscope", "bench"):
        words = words[1:] if words[:1] == [optional] else words
    if not words or words[0] not in KINDS:
        raise UsageError(f"{text!r} is not a benchmark", hint=hint)
    for forbidden in ("--store", "--json", "--resume", "--list"):
        if any(word.split("=", 1)[0] == forbidden for word in words):
            raise UsageError(f"{forbidden} has no place in a side", hint="give it to `stepscope ab` itself")
    if any(word.split("=", 1)[0] == "--find-batch" for word in words):
        raise UsageError("a search decides as it goes", hint="search first, then give each side its --batch-size")
    return Side(text, environment, words)


def run_child(side: Side, extra: Sequence[str], store: Path) -> StoredRun:
    """One fresh process of one side; raises ChildError with what the process said."""
    arguments = ["bench", *side.arguments, *extra, "--store", str(store)]
    return call_stepscope(arguments, environment=side.environment, name=repr(side.text), timeout_s=CHILD_TIMEOUT_S)


RunChild = Callable[[Side, Sequence[str], Path], StoredRun]


def measure_interleaved(
    sides: tuple[Side, Side],
    *,
    pairs: int,
    store: Path,
    command: Sequence[str],
    extra: Sequence[str] = (),
    start: RunChild = run_child,
    on_pair: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[StoredRun, StoredRun]:
    """Measure `pairs` fresh processes of each side in turn, and keep each side as one run.

    Stopped early (a failing process, the user), the finished pairs are kept before the error goes on.
    """
    finished: list[tuple[StoredRun, StoredRun]] = []
    scratch = Path(tempfile.mkdtemp(prefix="stepscope-ab-"))
    try:
        try:
            for number in range(pairs):
                order = (0, 1) if number % 2 == 0 else (1, 0)
                made = {index: start(sides[index], extra, scratch) for index in order}
                finished.append((made[0], made[1]))
                on_pair(number + 1, pairs)
        finally:
            kept = _keep(sides, finished, store, command) if finished else None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if kept is None:
        raise UsageError("no pair was asked for", hint="use --pairs 5 or more", where="--pairs")
    return kept


def _keep(
    sides: tuple[Side, Side], finished: Sequence[tuple[StoredRun, StoredRun]], store: Path, command: Sequence[str]
) -> tuple[StoredRun, StoredRun]:
    first = _merge(sides[0], "A", [pair[0] for pair in finished], store, command)
    return first, _merge(sides[1], "B", [pair[1] for pair in finished], store, command)


def _merge(side: Side, letter: str, children: Sequence[StoredRun], store: Path, command: Sequence[str]) -> StoredRun:
    plan = children[0].plan
    folder = create_run(
        store,
        verb=plan.verb,
        name=f"ab-{letter}",
        command=command,
        request={**plan.request, "side": side.text, "environment": side.environment, "processes": len(children)},
        cases=plan.cases,
        launcher=plan.launcher,
        world_size=plan.world_size,
    )
    return merge_processes(children, folder)


def compare_interleaved(
    a: StoredRun, b: StoredRun, *, level: float = DEFAULT_FAMILY_LEVEL, resolution: float = DEFAULT_RESOLUTION
) -> Comparison:
    """Verdicts from pairs of processes; the cases of the two sides pair up by key, else by their order.

    Only differences inside the pairs count: what the machine did to both at that hour cancels.
    """
    cases_a, cases_b = a.cases(), b.cases()
    keys_b = {case.key: case for case in cases_b}
    if all(case.key in keys_b for case in cases_a):
        pairs = [(case, keys_b[case.key]) for case in cases_a]
    elif len(cases_a) == len(cases_b):
        pairs = list(zip(cases_a, cases_b, strict=True))
    else:
        raise UsageError(
            f"side A has {len(cases_a)} cases and side B has {len(cases_b)}, and they do not pair up",
            hint="give both sides the same number of shapes or sizes",
        )
    labelled = [Pair(one, other, _label(one, other)) for one, other in pairs]
    return compare_pairs(labelled, level=level, resolution=resolution, same_system=False, paired=True)


def _label(a: MeasuredCase, b: MeasuredCase) -> str:
    return a.result.case.label if a.key == b.key else f"{a.result.case.label} | {b.result.case.label}"
