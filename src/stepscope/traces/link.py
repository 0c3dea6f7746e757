"""A graph joined to the timeline of the same run: each call with its host event, its device work and their times.

Three generations of profilers left three kinds of ids; which one a pair of files has is found by looking at the ids,
and is checked by the names on both sides. Two files of different runs are told as such, not joined by accident.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from stepscope.core.errors import BadInputError
from stepscope.formats.graph import PROFILER_STEP, Graph, Node
from stepscope.formats.nesting import climb, look_up
from stepscope.formats.timeline import (
    ANNOTATION,
    DEVICE_KINDS,
    MISSING,
    OPERATOR,
    RUNTIME,
    Integers,
    LinkSummary,
    Timeline,
)

RECORD_FUNCTION, EXTERNAL_ID, ORDER, NONE = "record-function", "external-id", "order", "none"
"""Generations: host events carry the calls' own ids (2024 on); their external ids are those ids; neither, but the order
on each thread is the same (2023); nothing that joins the two files was found."""

MINIMUM_SHARE = 0.5
_NAMES_MUST_AGREE = 0.9
"""Ids of different runs coincide, names then do not."""

Reasons = Mapping[str, int]


@dataclass(frozen=True)
class GraphLink:
    """Places are indices into `graph.nodes`, rows are rows of the timeline, −1 is none."""

    graph: Graph
    timeline: Timeline
    generation: str
    host_row: Integers
    """By place: the host event of the call."""
    node_of_row: Integers
    """By row: of a host event, its own call; of runtime calls and device work, the innermost call that made it."""
    reasons: Reasons = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @cached_property
    def summary(self) -> LinkSummary:
        devices = self._device_rows
        linked = int((self.node_of_row[devices] >= 0).sum())
        is_operator = np.fromiter(self.graph.operator_flags, bool, len(self.graph))
        is_root = np.fromiter((node.is_root for node in self.graph), bool, len(self.graph))
        has_row = self.host_row >= 0
        operators, operators_linked = int(is_operator.sum()), int((is_operator & has_row).sum())
        device_share = linked / len(devices) if len(devices) else None
        operator_share = operators_linked / operators if operators else None
        shares = [share for share in (device_share, operator_share) if share is not None]
        return LinkSummary(
            generation=self.generation,
            linked_share=min(shares, default=0.0),
            device_share=device_share,
            operator_share=operator_share,
            device_events=len(devices),
            device_events_linked=linked,
            operators=operators,
            operators_linked=operators_linked,
            nodes=int((~is_root).sum()),
            nodes_linked=int(has_row.sum()),
            reasons=dict(self.reasons),
            warnings=list(self.warnings),
        )

    @property
    def linked_share(self) -> float:
        return self.summary.linked_share

    @cached_property
    def _device_rows(self) -> Integers:
        return np.flatnonzero(np.isin(self.timeline.core["kind"], DEVICE_KINDS))

    @cached_property
    def _rows_by_preorder(self) -> tuple[Integers, Integers]:
        """Linked device rows ordered by the pre-order position of their node, and those positions."""
        rows = self._device_rows[self.node_of_row[self._device_rows] >= 0]
        position = self.graph.position[self.node_of_row[rows]]
        order = np.argsort(position, kind="stable")
        return rows[order], position[order]

    def rows_of(self, node: Node | int) -> Integers:
        """Device rows that the call itself launched, not those of calls inside it. Takes a node or its place."""
        return self._rows_from(self._place(node), 1)

    def rows_under(self, node: Node | int) -> Integers:
        """Device rows that the call, and all calls inside it, launched."""
        place = self._place(node)
        return self._rows_from(place, int(self.graph.nesting.size[place]))

    def _rows_from(self, place: int, calls: int) -> Integers:
        """Rows of a call and of those that follow it in the pre-order, `calls` in all."""
        rows, positions = self._rows_by_preorder
        begin, end = np.searchsorted(positions, self.graph.position[place] + np.array([0, calls]))
        return rows[begin:end]

    def node_for(self, row: int) -> Node | None:
        """The call of a row of the timeline."""
        place = int(self.node_of_row[row])
        return None if place < 0 else self.graph.nodes[place]

    def host_s(self, node: Node | int) -> float | None:
        """How long the call took on the host, profiled; None where its event was not found."""
        row = int(self.host_row[self._place(node)])
        core = self.timeline.core
        return None if row < 0 else (int(core["end_ns"][row]) - int(core["start_ns"][row])) / 1e9

    def device_s(self, node: Node | int) -> float:
        """Sum of the durations of all device work under the call."""
        rows = self.rows_under(node)
        core = self.timeline.core
        return float((core["end_ns"][rows] - core["start_ns"][rows]).sum()) / 1e9

    def device_ns(self, *, inclusive: bool = True) -> Integers:
        """`device_s` of all nodes at once, in nanoseconds, by place; without the calls inside where not inclusive."""
        rows, positions = self._rows_by_preorder
        core = self.timeline.core
        spent = (core["end_ns"][rows] - core["start_ns"][rows]).astype(np.int64)
        own = np.zeros(len(self.graph) + 1, np.int64)
        np.add.at(own, positions, spent)
        begin = self.graph.position
        if not inclusive:
            return own[begin]
        total = np.concatenate([[0], np.cumsum(own[:-1])])
        inside: Integers = total[begin + self.graph.nesting.size] - total[begin]
        return inside

    def _place(self, node: Node | int) -> int:
        return self.graph.place(node.id) if isinstance(node, Node) else node


def link(
    graph: Graph, timeline: Timeline, *, minimum_share: float = MINIMUM_SHARE, operators_suffice: bool = False
) -> GraphLink:
    """Join a graph to a finished timeline. BadInputError where less than `minimum_share` of either could be joined;
    0 takes whatever there is. `operators_suffice`: device events may stay without a call, however many there are."""
    found = _join_hosts(graph, timeline)
    reasons = dict(found.reasons)
    node_of_row = _join_rest(graph, timeline, found, reasons)
    result = GraphLink(
        graph=graph,
        timeline=timeline,
        generation=found.generation,
        host_row=found.host_row,
        node_of_row=node_of_row,
        reasons=reasons,
        warnings=tuple(_doubts(graph, timeline)),
    )
    share = result.summary.operator_share or 0.0 if operators_suffice else result.linked_share
    if share < minimum_share:
        raise _not_a_pair(result, minimum_share)
    return result


class _Hosts(NamedTuple):
    generation: str
    host_row: Integers
    reasons: dict[str, int]


def _join_hosts(graph: Graph, timeline: Timeline) -> _Hosts:
    core = timeline.core
    rows = np.flatnonzero(np.isin(core["kind"], (OPERATOR, ANNOTATION)))
    if (core["record_function_id"][rows] > 0).any():
        return _join_by_id(graph, timeline, rows, "record_function_id", RECORD_FUNCTION)
    if not _external_is_correlation(timeline) and (core["external_id"][rows] > 0).any():
        by_id = _join_by_id(graph, timeline, rows, "external_id", EXTERNAL_ID)
        if by_id.generation == EXTERNAL_ID:
            return by_id
    return _join_by_order(graph, timeline, rows)


def _external_is_correlation(timeline: Timeline) -> bool:
    """The sign of 2023: device events repeat their correlation where later ones name the call."""
    core = timeline.core
    devices = np.flatnonzero(np.isin(core["kind"], DEVICE_KINDS))
    external = core["external_id"][devices]
    return bool(len(devices)) and bool((external == core["correlation"][devices]).all())


_OTHER_NAME = "calls whose id belongs to an event of another name"
_NO_EVENT = "calls without a host event"


def _join_by_id(graph: Graph, timeline: Timeline, rows: Integers, column: str, generation: str) -> _Hosts:
    rows = rows[timeline.core[column][rows] > 0]
    wanted = graph.column("rf_id")
    candidate = look_up(wanted, timeline.core[column][rows].astype(np.int64), rows)
    found = candidate >= 0
    same = _same_names(graph, timeline, candidate)
    reasons: dict[str, int] = {}
    count_reason(reasons, _OTHER_NAME, int((found & ~same).sum()))
    count_reason(reasons, _NO_EVENT, int((~found & (wanted > 0)).sum()))
    host_row: Integers = np.where(found & same, candidate, MISSING)
    agree = int((host_row >= 0).sum())
    if agree < _NAMES_MUST_AGREE * int(found.sum()):
        # Small numbers coincide in any two runs; what agrees then agrees by accident.
        count_reason(reasons, "calls whose id and name agree by accident", agree)
        agree = 0
    if not agree:
        return _Hosts(NONE, np.full(len(wanted), MISSING), reasons)
    return _Hosts(generation, host_row, reasons)


def _same_names(graph: Graph, timeline: Timeline, candidate: Integers) -> Integers:
    code_of = {text: code for code, text in enumerate(timeline.texts)}
    codes = np.fromiter((code_of.get(node.name, -2) for node in graph), np.int64, len(graph))
    names = timeline.core["name"]
    if not len(names):
        return np.zeros(len(codes), bool)
    same: Integers = (candidate >= 0) & (names[candidate] == codes)
    return same


def _join_by_order(graph: Graph, timeline: Timeline, rows: Integers) -> _Hosts:
    """Per thread, calls in the order of their ids are events in the order of theirs, name by name; all of them or none.

    Half a thread would join just as well to any other run of the same program.
    """
    host_row = np.full(len(graph), MISSING, np.int64)
    reasons: dict[str, int] = {}
    calls = _calls_by_thread(graph)
    events = _events_by_thread(timeline, rows)
    for place, names in calls:
        thread = next((thread for thread, (_, other) in events.items() if other == names), None)
        if thread is None:
            count_reason(reasons, "calls on threads whose order of names no thread of the timeline has", len(place))
            continue
        host_row[place] = events.pop(thread)[0]
    joined = int((host_row >= 0).sum())
    if joined and _doubts(graph, timeline):
        # Every rank of a job runs the same names in the same order: here the process is the only evidence.
        count_reason(reasons, "calls in the same order, but of another process (another rank?)", joined)
        host_row[:] = MISSING
        joined = 0
    return _Hosts(ORDER if joined else NONE, host_row, reasons)


def _calls_by_thread(graph: Graph) -> list[tuple[list[int], list[str]]]:
    threads: dict[int, list[int]] = {}
    for place, node in enumerate(graph.nodes):
        if not node.is_root and not PROFILER_STEP.match(node.name):
            threads.setdefault(node.tid, []).append(place)
    return [(places, [graph.nodes[place].name for place in places]) for places in threads.values()]


def _events_by_thread(timeline: Timeline, rows: Integers) -> dict[int, tuple[Integers, list[str]]]:
    """Rows and names of host events by thread, in order of creation."""
    core = timeline.core
    steps = [code for code, text in enumerate(timeline.texts) if PROFILER_STEP.match(text)]
    rows = rows[~np.isin(core["name"][rows], steps)]
    index, external = core["event_index"][rows], core["external_id"][rows]
    # Times of a microsecond's clock have ties; creation order has none.
    created = external if (external > 0).all() else index
    rows = rows[np.lexsort((core["start_ns"][rows], created, core["thread"][rows]))]
    found: dict[int, tuple[Integers, list[str]]] = {}
    threads = core["thread"][rows]
    for thread in np.unique(threads).tolist():
        of_thread = rows[threads == thread]
        found[thread] = (of_thread, [timeline.texts[code] for code in core["name"][of_thread].tolist()])
    return found


def _join_rest(graph: Graph, timeline: Timeline, found: _Hosts, reasons: dict[str, int]) -> Integers:
    """Calls of runtime and device rows: by external id where it names the host event, else by what holds the launch."""
    core = timeline.core
    node_of_row = np.full(len(timeline), MISSING, np.int64)
    linked = found.host_row >= 0
    node_of_row[found.host_row[linked]] = np.flatnonzero(linked)
    kind, parent = core["kind"], core["parent"].astype(np.int64)
    calls = np.flatnonzero(kind == RUNTIME)
    node_of_row[calls] = climb(node_of_row, parent, parent[calls])
    devices = np.flatnonzero(np.isin(kind, DEVICE_KINDS))
    launches = parent[devices]
    launched = launches >= 0
    node_of_row[devices[launched]] = node_of_row[launches[launched]]
    if found.generation in (RECORD_FUNCTION, EXTERNAL_ID):
        named = _by_external_id(timeline, devices)
        hosts = climb(node_of_row, parent, named)
        use = hosts >= 0
        node_of_row[devices[use]] = hosts[use]
    if found.generation != NONE:
        missed = node_of_row[devices] < 0
        count_reason(reasons, "device events without a launch in the file", int((missed & ~launched).sum()))
        outside = missed & launched
        covered = climb(np.where(np.isin(kind, (OPERATOR,)), 0, MISSING), parent, launches) >= 0
        count_reason(reasons, "device events launched outside every operator", int((outside & ~covered).sum()))
        count_reason(reasons, "device events of operators that the graph does not hold", int((outside & covered).sum()))
    else:
        count_reason(reasons, "device events, since no call could be joined", len(devices))
    return node_of_row


def _by_external_id(timeline: Timeline, devices: Integers) -> Integers:
    """Host row with the same external id as each device row; the innermost where several have it."""
    core = timeline.core
    hosts = np.flatnonzero(np.isin(core["kind"], (OPERATOR, ANNOTATION)) & (core["external_id"] > 0))
    hosts = hosts[np.argsort(-core["start_ns"][hosts], kind="stable")]
    return look_up(core["external_id"][devices], core["external_id"][hosts], hosts)


def _doubts(graph: Graph, timeline: Timeline) -> list[str]:
    """What speaks against a pair although ids or names agree."""
    doubts: list[str] = []
    processes = {thread.process for thread in timeline.threads if thread.process.isdigit()}
    if graph.process_id and processes and str(graph.process_id) not in processes:
        doubts.append(
            f"the graph was recorded in process {graph.process_id}, the timeline in {', '.join(sorted(processes))}"
        )
    return doubts


def count_reason(reasons: dict[str, int], reason: str, count: int) -> None:
    """Reasons that hold for nothing are not listed."""
    if count:
        reasons[reason] = reasons.get(reason, 0) + count


def _not_a_pair(result: GraphLink, minimum_share: float) -> BadInputError:
    summary = result.summary
    device = "no device events"
    if summary.device_share is not None:
        device = f"{summary.device_events_linked} of {summary.device_events} device events"
    reasons = "; ".join(f"{count} {reason}" for reason, count in summary.reasons.items())
    doubts = "".join(f"; {doubt}" for doubt in summary.warnings)
    return BadInputError(
        f"the graph and the timeline do not belong together: {device} and {summary.operators_linked} of "
        f"{summary.operators} operators were joined (ids: {summary.generation}), at least {minimum_share:.0%} of each "
        f"are needed. {reasons}{doubts}",
        hint="give two files of the same run and the same rank: pass the observer to the profiler "
        "(torch.profiler.profile(execution_trace_observer=…)) so that both record the same steps",
        where=f"{result.graph.where or 'graph'} and {result.timeline.metadata.get('source', 'timeline')}",
    )
