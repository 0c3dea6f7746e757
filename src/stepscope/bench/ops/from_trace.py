"""Exactly the operators of a trace, with its shapes: each different call once, as a case that can be measured.

The trace is a timeline (Kineto, with shapes), an execution trace, or both of the same steps, which know more together:
the timeline has times and exact scalars, the execution trace overloads, lists of tensors and words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from stepscope.bench.ops.cases import cases_of_requests
from stepscope.bench.ops.families.call import OPERATOR, make_shape
from stepscope.bench.ops.language import CaseRequest
from stepscope.core.errors import BadInputError, UsageError
from stepscope.core.lazy_torch import torch
from stepscope.formats.classify import does_no_work
from stepscope.formats.source import read_head
from stepscope.formats.tensors import Schema, parse_schema, parse_type
from stepscope.records import Case, TracedCallRecord, TracedCallsRecord
from stepscope.traces.calls.arguments import write_json
from stepscope.traces.calls.rebuild import make_call_arguments
from stepscope.traces.calls.torch_calls import ATEN
from stepscope.traces.calls.traced import (
    BoundCall,
    CannotRebuildError,
    Traced,
    TracedTensor,
    bind_inputs,
    choose_schema,
    read_graph_inputs,
    read_timeline_inputs,
)
from stepscope.traces.recording.evidence import is_recording, read_recording

if TYPE_CHECKING:
    from stepscope.formats.graph import Graph, Node
    from stepscope.formats.timeline import Timeline
    from stepscope.traces.link import GraphLink

CONFIG = "trace"
"""Under which the cases run."""
_FRACTION = re.compile(r"(?<![\w.])-?\d+(?:\.\d+(?:[eE][-+]?\d+)?|[eE][-+]?\d+)(?![\w.])")
NO_SHAPES = "its inputs were not recorded: record with shapes, or an execution trace too"


class TracedCall(TracedCallRecord, kw_only=True):
    """With what it takes to make its case."""

    count: int = 0
    shape: dict[str, Any] | None = None
    """Shape of the case of `call`; None where it cannot be run."""
    kernels: list[str] = msgspec.field(default_factory=list)
    """What ran on the device, by time."""
    time_ns: int | None = None


class TracedCalls(TracedCallsRecord, frozen=True, kw_only=True):
    """What a trace asks for."""

    calls: list[TracedCall]  # type: ignore[assignment]
    linked_share: float | None = None

    def record(self) -> TracedCallsRecord:
        """What a run keeps of it."""
        return msgspec.convert(self, TracedCallsRecord, from_attributes=True)


class TraceFiles(NamedTuple):
    """What a path stands for."""

    timeline: Path | None
    graph: Path | None
    unprofiled_step_s: float | None = None


def find_trace_files(path: Path, *, rank: int | None = None) -> TraceFiles:
    """A timeline, an execution trace, a recording, or a folder with one of each."""
    from stepscope.formats.execution_trace import sniff

    if not path.exists():
        raise UsageError(f"{path} is not there", hint="name a trace, or a folder of `stepscope trace record`",
                         where="--from-trace")  # fmt: skip
    if path.is_file():
        return TraceFiles(None, path) if sniff(read_head(path)) else TraceFiles(path, None)
    if is_recording(path):
        ranks = {one.rank: one for one in read_recording(path).ranks}
        chosen = ranks.get(rank) if rank is not None else next(iter(ranks.values()), None)
        if chosen is None or chosen.kineto is None:
            known = ", ".join(map(str, ranks)) or "none"
            raise UsageError(f"the recording holds no traces of this rank: {known}", where="--trace-rank")
        graph = path / chosen.et.path if chosen.et else None
        return TraceFiles(path / chosen.kineto.path, graph, chosen.unprofiled_s())
    files = [one for one in sorted(path.iterdir()) if one.is_file() and ".json" in one.suffixes]
    graphs = [one for one in files if sniff(read_head(one))]
    timelines = [one for one in files if one not in graphs and b'"traceEvents"' in read_head(one)]
    if len(graphs) > 1 or len(timelines) > 1 or not graphs + timelines:
        raise UsageError(
            f"{path} holds {len(timelines)} timelines and {len(graphs)} execution traces",
            hint="name one file, or a folder with one of each",
            where="--from-trace",
        )
    return TraceFiles(next(iter(timelines), None), next(iter(graphs), None))


def read_traced_calls(files: TraceFiles, *, device: str) -> TracedCalls:
    """Every different call of the trace, with its case for `device` or the reason why there is none. Loads torch."""
    from stepscope.formats.execution_trace import read_execution_trace
    from stepscope.traces.link import link
    from stepscope.traces.read import read_timeline

    sources = [str(one) for one in (files.timeline, files.graph) if one is not None]
    if files.timeline is None:
        assert files.graph is not None
        found = calls_of_graph(read_execution_trace(files.graph), device=device)
    else:
        timeline = read_timeline(files.timeline)
        joined = link(read_execution_trace(files.graph), timeline) if files.graph is not None else None
        found = calls_of_timeline(timeline, joined, device=device)
    return msgspec.structs.replace(found, sources=sources, unprofiled_step_s=files.unprofiled_step_s)


def calls_of_timeline(timeline: Timeline, joined: GraphLink | None = None, *, device: str) -> TracedCalls:
    """The calls that launched the work of a timeline; on a timeline without a device, those that did it."""
    from stepscope.traces.calls.units import find_units, is_recorded

    units = find_units(timeline)
    if joined is None and len(units.rows) and not any(is_recorded(timeline, int(row)) for row in units.rows):
        raise BadInputError(
            "the timeline does not hold the inputs of its operators",
            hint="record with record_shapes=True, or `stepscope trace record`",
            where=str(timeline.metadata.get("source", "timeline")),
        )
    reader = _TimelineReader(timeline, joined, device)
    gathered = _Gathered()
    for row, time_ns, group in zip(units.rows.tolist(), units.time_ns.tolist(), units.group.tolist(), strict=True):
        key, refusal = reader.key(row, group), units.refused.get(group)
        gathered.add(key, time_ns, partial(reader.read, row), refusal, units.kernels.get(group, []))
    spans = timeline.steps
    window_s = sum(span.end_ns - span.start_ns for span in spans) / 1e9
    return TracedCalls(
        sources=[],
        steps=max(1, len(spans)),
        calls=gathered.calls(),
        on_device=units.on_device,
        busy_s=(int(units.time_ns.sum()) + sum(units.left_ns.values())) / 1e9,
        left_s={reason: ns / 1e9 for reason, ns in units.left_ns.items()},
        profiled_step_s=window_s / len(spans) if spans else None,
        linked_share=joined.linked_share if joined is not None else None,
    )


def calls_of_graph(graph: Graph, *, device: str) -> TracedCalls:
    """The top-most operators of an execution trace, which has no times."""
    from stepscope.traces.calls.units import NO_WORK

    gathered = _Gathered()
    for node in graph.topmost_operators():
        refusal = NO_WORK if all(does_no_work(one.name) for one in graph.subtree(node)) else None
        _, shapes, types = node.inputs.texts()
        key = (node.name, node.op_schema, shapes, types, _numbers(node), node.tensor_range)
        gathered.add(key, None, partial(_read_node, node, device), refusal, [])
    return TracedCalls(sources=[], steps=max(1, len(graph.steps)), calls=gathered.calls())


def _numbers(node: Node) -> str:
    """Values that are not tensors: those of tensors are addresses."""
    kept = [
        value
        for value, kind in zip(node.inputs.values, node.inputs.types, strict=False)
        if parse_type(kind).kind not in ("Tensor", "Undefined") and "Tensor" not in kind
    ]
    return json.dumps(kept)


class _Gathered:
    """Counts calls; each different one is read once."""

    def __init__(self) -> None:
        self._by_key: dict[object, TracedCall] = {}
        self._found: dict[object, TracedCall] = {}

    def add(
        self, key: object, time_ns: int | None, read: Callable[[], TracedCall], refusal: str | None, kernels: list[str]
    ) -> None:
        if key not in self._by_key:
            call = read()
            if refusal is not None:
                call.shape, call.skip = None, refusal
            text = blur_numbers(json.dumps(call.shape, sort_keys=True))
            identity = (call.operator, text, call.skip, "" if call.shape else call.inputs)
            self._by_key[key] = self._found.setdefault(identity, call)
        call = self._by_key[key]
        call.count += 1
        if time_ns is not None:
            call.time_ns = (call.time_ns or 0) + time_ns
            call.trace_s = call.time_ns / 1e9
        call.kernels += [kernel for kernel in kernels if kernel not in call.kernels]

    def calls(self) -> list[TracedCall]:
        return sorted(
            self._found.values(), key=lambda one: (-(one.trace_s or 0.0), -one.count, one.operator, one.inputs)
        )


def blur_numbers(text: str) -> str:
    """Arguments without the fractions in them: an optimizer's change from step to step and mean the same work.

    Whole numbers and halves stay, for exponents and the like are chosen by them.
    """
    return _FRACTION.sub(lambda found: found[0] if (2 * float(found[0])).is_integer() else "~", text)


class _TimelineReader:
    def __init__(self, timeline: Timeline, joined: GraphLink | None, device: str) -> None:
        self._timeline = timeline
        self._joined = joined
        self._device = device

    def _node(self, row: int) -> Node | None:
        node = self._joined.node_for(row) if self._joined is not None else None
        return node if node is not None and node.op_schema else None

    def key(self, row: int, group: int) -> object:
        """What tells calls of one group apart: a timeline leaves out what is inside long lists."""
        node = self._node(row)
        return group if node is None else (group, node.op_schema, *node.inputs.texts()[1:], node.tensor_range)

    def read(self, row: int) -> TracedCall:
        from stepscope.traces.calls.units import is_recorded

        timeline, node = self._timeline, self._node(row)
        name = timeline.text("name", row) or ""
        try:
            inputs = self._inputs(row) if is_recorded(timeline, row) else None
        except CannotRebuildError as error:
            if node is None:
                return TracedCall(operator=name, inputs=_cut(timeline.text("shapes", row) or ""), skip=str(error))
            inputs = None
        if node is not None:
            return _read_node(node, self._device, inputs)
        if inputs is None:
            return TracedCall(operator=name, inputs="", skip=NO_SHAPES)
        found = TracedCall(operator=name, inputs=format_inputs(inputs))
        return _rebuild(found, lambda: _bind(name, None, inputs), self._device)

    def _inputs(self, row: int) -> list[Traced]:
        texts = {name: self._timeline.text(name, row) for name in ("shapes", "types", "strides", "values")}
        lists = {name: json.loads(text) if text else None for name, text in texts.items()}
        return read_timeline_inputs(lists["shapes"] or [], lists["types"] or [], lists["strides"], lists["values"])


@cache
def find_schemas(name: str) -> list[Schema]:
    """All overloads that the torch of this process has of an operator."""
    found = [parse_schema(str(one)) for one in torch._C._jit_get_schemas_for_operator(name)]
    return [one for one in found if one is not None]


def _read_node(node: Node, device: str, timeline_inputs: Sequence[Traced] | None = None) -> TracedCall:
    found = TracedCall(operator=node.name, inputs="")

    def bind() -> BoundCall:
        if node.collective is not None:
            raise CannotRebuildError("it communicates: `stepscope bench comms` measures that")
        schema = node.schema
        if schema is None:
            raise CannotRebuildError("the execution trace holds no schema of it")
        inputs = read_graph_inputs(node.inputs.parsed(), timeline_inputs)
        found.inputs = format_inputs(inputs)
        return _bind(schema.name, schema, inputs)

    return _rebuild(found, bind, device, _read_ranges(node.tensor_range))


def _bind(name: str, schema: Schema | None, inputs: Sequence[Traced]) -> BoundCall:
    """Without a schema, by the one that fits of those that the torch of this process has."""
    if not name.startswith(ATEN):
        raise CannotRebuildError(f"it belongs to {name.partition('::')[0]}, not to torch itself")
    return bind_inputs(schema or choose_schema(find_schemas(name), inputs), inputs)


def _read_ranges(text: str) -> dict[int, tuple[int, int]]:
    """`{"1": [0, 9]}`; what is none is left out."""
    try:
        found = json.loads(text) if text else {}
        return {int(place): (int(low), int(high)) for place, (low, high) in found.items()}
    except (ValueError, TypeError, AttributeError):
        return {}


def _rebuild(
    found: TracedCall,
    bind: Callable[[], BoundCall],
    device: str,
    ranges: Mapping[int, tuple[int, int]] | None = None,
) -> TracedCall:
    """The call with its case, or with the reason why there is none."""
    try:
        call = bind()
        args, kwargs = make_call_arguments(call, device, ranges)
        shape = make_shape(call.target, write_json(args), write_json(kwargs))
        OPERATOR.check_shape(shape)
        found.shape, found.assumed = shape, list(call.assumed)
    except (CannotRebuildError, ValueError) as error:
        found.skip = str(error)
    return found


def _cut(text: str) -> str:
    return text if len(text) < 80 else f"{text[:77]}…"


def format_inputs(inputs: Sequence[Traced]) -> str:
    """`float32[64,1000] int64[64] 1`, long lists cut."""
    return " ".join(_format_input(one) for one in inputs if isinstance(one, TracedTensor | list | bool | int | float))


def _format_input(value: Traced) -> str:
    if isinstance(value, TracedTensor):
        return f"{value.dtype or 'tensor'}[{','.join(map(str, value.size))}]"
    if isinstance(value, list):
        shown = ",".join(_format_input(one) for one in value[:3])
        return f"[{shown}{f',… {len(value)} in all' if len(value) > 3 else ''}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def cases_of_trace(
    traced: TracedCalls, *, device: str, caches: Sequence[str] = (), compiled: bool = False, top: int | None = None
) -> list[Case]:
    """One for each different call, which gets its key. `top`: those with most time in the trace."""
    wanted = [call for call in traced.calls if call.shape is not None]
    cases: dict[str, Case] = {}
    where = traced.sources[0] if traced.sources else "trace"
    for call in wanted[:top]:
        dtype = OPERATOR.named_dtype(call.shape or {})
        request = CaseRequest(
            op=OPERATOR.name, shape=call.shape, dtypes=(dtype,) if dtype else None, passes=("forward",),
            config=CONFIG, where=where,
        )  # fmt: skip
        for case in cases_of_requests([request], device=device, caches=caches, compiled=compiled):
            call.key = case.key
            cases[case.key] = case
    return list(cases.values())
