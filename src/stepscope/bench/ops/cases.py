"""From what a person asks for to cases: everything is checked before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Required, TypedDict, Unpack

import msgspec

from stepscope.bench.ops.build import CACHES
from stepscope.bench.ops.catalogue import find_operator, find_set, operators, shape_sets
from stepscope.bench.ops.families.call import CallAny, make_call_shape
from stepscope.bench.ops.language import MAX_CASES, CaseRequest, expand_shape
from stepscope.bench.ops.operator import DTYPES, MATRIX_FLOATS, Operator, Value
from stepscope.core.errors import UsageError, unknown_name
from stepscope.measure import MeasureSettings, device_kind
from stepscope.records import Benchmark, Case, Parameter
from stepscope.records.kinds import CallSpec, OperatorSpec

OWNER = "operators"
ALL = "all"
"""Stands for every operator; with a set, for those that have it."""
DEFAULT_DTYPE, DEFAULT_PASS, DEFAULT_CACHE = "float32", "forward", "warm"
CUSTOM = "custom"


class ParsedRequest(TypedDict, total=False):
    """What holds for every entry that does not say otherwise. Left out or empty: as a set says, then float32 forward,
    warm."""

    device: Required[str]
    dtypes: Sequence[str]
    directions: Sequence[str]
    caches: Sequence[str]
    compiled: bool
    draws: int | None
    seed: int
    config: str


def parse_shape(text: str, operator: Operator) -> dict[str, Value]:
    """A text that stands for one shape; parameters left out take their defaults."""
    where = f"--shape {text}"
    shapes = expand_shape(text, operator, where=where)
    if len(shapes) > 1:
        raise UsageError(f"{text} stands for {len(shapes):,} shapes", hint="write a single one", where=where)
    return shapes[0]


def make_cases(
    *, names: Sequence[str], shapes: Sequence[str], sets: Sequence[str] = (), **asked: Unpack[ParsedRequest]
) -> list[Case]:
    """Every operator with every shape and set, dtype, pass and cache that was asked for, each case once.

    A dtype or pass that an operator lacks becomes a case too, which is skipped with the reason when it is run.
    """
    if asked.get("draws") is not None and not shapes:
        raise UsageError(
            "draws are for shapes", hint="give --shape m=32~4096, or leave --draws out: sets draw by themselves",
            where="--draws",
        )  # fmt: skip
    for text in shapes:
        if shapes.count(text) > 1:
            raise UsageError(f"the shape {text} is asked for twice", hint="remove one of them", where="--shape")
    given: list[tuple[str | None, str | None]] = [(text, None) for text in shapes] + [(None, name) for name in sets]
    requests = [
        CaseRequest(op=name, shape=text, set=wanted, where=f"--shape {text}" if wanted is None else f"--set {wanted}")
        for name in names
        for text, wanted in given or [("", None)]
    ]
    for name in names:
        if name != ALL:
            find_operator(name)
    try:
        return _gather(requests, asked)
    except UsageError as error:
        if len(names) < 2 or not shapes or not (error.where or "").startswith("--shape"):
            raise
        raise UsageError(
            f"{error.message}: each --shape is measured with every --op",
            hint="give each operator its own shapes in a file (--cases FILE), or run one command per operator",
            where=error.where,
        ) from error


def cases_of_requests(requests: Sequence[CaseRequest], **asked: Unpack[ParsedRequest]) -> list[Case]:
    """The cases of a file; what an entry says itself goes before what is asked for here."""
    return _gather(requests, asked)


def call_cases(target: str, arguments: str, *, build: str = "", **asked: Unpack[ParsedRequest]) -> list[Case]:
    """One call of any operator of torch, named on the command line."""
    if asked.get("draws") is not None:
        raise _no_draws_for_calls("--draws")
    request = CaseRequest(op=CallAny.name, shape=make_call_shape(target, arguments, build=build), where="--call")
    return _gather([request], asked)


def _gather(requests: Sequence[CaseRequest], asked: ParsedRequest) -> list[Case]:
    _require_known(asked.get("dtypes"), asked.get("directions"), asked.get("caches"), "--dtype", "--pass", "--cache")
    found: dict[tuple[object, ...], Case] = {}
    for request in requests:
        for identity, case in _make_cases_of(request, asked):
            found.setdefault(identity, case)
            if len(found) > MAX_CASES:
                raise UsageError(
                    f"these are more than {MAX_CASES:,} cases",
                    hint="use larger steps, fewer dtypes, or --draws 1000",
                    where=request.where or None,
                )
    return list(found.values())


def _make_cases_of(request: CaseRequest, asked: ParsedRequest) -> Iterator[tuple[tuple[object, ...], Case]]:
    places = (f"{request.where}.{key}" for key in ("dtypes", "passes", "caches"))
    _require_known(request.dtypes, request.passes, request.caches, *places)
    for operator in _find_operators(request):
        shapes, chosen, usual_dtypes, usual_passes = _expand(request, operator, asked)
        dtypes = request.dtypes or asked.get("dtypes") or usual_dtypes or _usual(DEFAULT_DTYPE, operator.dtypes)
        passes = request.passes or asked.get("directions") or usual_passes or _usual(DEFAULT_PASS, operator.passes)
        caches = request.caches or asked.get("caches") or (DEFAULT_CACHE,)
        benchmarks = {one: _make_benchmark(operator.name, one, chosen, operator.summary) for one in passes}
        for shape, asked_dtype, direction, cache in product(shapes, dtypes, passes, caches):
            dtype, batch = _actual_dtype(operator, shape, asked_dtype), shape.get("batch")
            case = Case(
                benchmark=benchmarks[direction],
                spec=_make_spec(
                    operator, shape, direction=direction, dtype=dtype, device=asked["device"], cache=cache,
                    compile=asked.get("compiled", False),
                ),
                batch_size=batch if isinstance(batch, int) else None,
            )  # fmt: skip
            yield (operator.name, chosen, direction, dtype, cache, *shape.values()), case


def _make_spec(operator: Operator, shape: Mapping[str, Value], **how: Any) -> OperatorSpec | CallSpec:
    if isinstance(operator, CallAny):
        return CallSpec(**shape, **how)  # type: ignore[arg-type]
    return OperatorSpec(op=operator.name, shape=dict(shape), **how)


def _usual(wanted: str, has: Sequence[str]) -> tuple[str, ...]:
    return (wanted,) if wanted in has else (has[0],)


def _expand(
    request: CaseRequest, operator: Operator, asked: ParsedRequest
) -> tuple[list[dict[str, Value]], str, tuple[str, ...], tuple[str, ...]]:
    """Shapes, the name they run under, and the dtypes and passes that a set is meant for."""
    if request.set is not None:
        if request.draws is not None:
            raise UsageError(
                "draws are for shapes", hint="leave them out: sets draw by themselves", where=request.where
            )
        chosen = find_set(operator, request.set, where=request.where)
        return chosen.expand(operator), chosen.name, tuple(chosen.dtypes), tuple(chosen.passes)
    draws = asked.get("draws") if request.draws is None else request.draws
    if isinstance(operator, CallAny) and request.draws is None and draws is not None:
        raise _no_draws_for_calls(request.where)
    seed = asked.get("seed", 0) if request.seed is None else request.seed
    shapes = expand_shape(request.shape or "", operator, draws=draws, seed=seed, where=request.where)
    if isinstance(operator, CallAny):
        shapes = [operator.canonical(shape) for shape in shapes]
    return shapes, request.config or asked.get("config", CUSTOM), (), ()


def _no_draws_for_calls(where: str) -> UsageError:
    return UsageError(
        "draws are for shapes: a call is given its arguments one by one",
        hint="leave --draws out, or measure the calls by a command of their own",
        where=where,
    )


def _actual_dtype(operator: Operator, shape: Mapping[str, Value], dtype: str) -> str:
    """A call whose tensors all name their dtype runs in that one, whatever is asked for."""
    if not isinstance(operator, CallAny):
        return dtype
    named = operator.named_dtype(shape)
    return dtype if named is None or (named, dtype) == ("float32", "tf32") else named


def _make_benchmark(model: str, direction: str, config: str, description: str) -> Benchmark:
    return Benchmark(
        model=model, implementation="micro", mode=direction, config=config, owner=OWNER, description=description
    )


def _find_operators(request: CaseRequest) -> list[Operator]:
    if request.op != ALL:
        return [find_operator(request.op, where=f"{request.where}.op")]
    known = list(operators().values())
    having = [one for one in known if request.set is None or request.set in shape_sets(one)]
    if not having:
        names = dict.fromkeys(name for one in known for name in shape_sets(one))
        raise unknown_name("shape set", request.set or "", names, where=request.where)
    return having


def _require_known(
    dtypes: Sequence[str] | None, passes: Sequence[str] | None, caches: Sequence[str] | None, *places: str
) -> None:
    """`places` say where each of the three was named."""
    every = dict.fromkeys(direction for operator in operators().values() for direction in operator.passes)
    given, known = (dtypes, passes, caches), (DTYPES, tuple(every), CACHES)
    for what, names, having, where in zip(("dtype", "pass", "cache"), given, known, places, strict=True):
        for name in names or ():
            if name not in having:
                raise unknown_name(what, name, having, where=where)


# What this machine can do at best, measured: matrix rate, and read, write and copy bandwidth, each apart. These are
# ordinary cases of a run, so that every share of them that is printed can be traced to its samples.

_BRIEF = MeasureSettings(
    target_width=0.01, min_time_s=0.1, max_time_s=1.0, min_samples=7, few_samples=3, warmup_max_time_s=0.5, window=2
)
PEAK_SETTINGS = {
    "cpu": _BRIEF,
    # What lasts, not what the first 50 ms give: a product that fills a GPU reaches its power limit, and slows down.
    "cuda": msgspec.structs.replace(
        _BRIEF, min_time_s=0.3, min_sample_s=1e-2, warmup_min_time_s=1.0, warmup_max_time_s=2.0
    ),
}

MATRIX_SIDE = {"cpu": 1536, "cuda": 8192}
"""Side of the square matmul: large enough that more makes it no faster, small enough to be done soon."""
STREAM_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}
"""Read, written or copied: many times any cache."""


_LAYOUTS = {"float8_e4m3fn": "nt"}
"""The only one that has products of this dtype."""


def make_peak_cases(dtypes: Sequence[str], device: str) -> list[Case]:
    """The matrix rate of each dtype asked for that has matrix products, and three bandwidths."""
    kind = device_kind(device)
    side, size = MATRIX_SIDE[kind], STREAM_BYTES[kind]
    cases = [
        _peak_case("gemm", {"m": side, "n": side, "k": side, "layout": _LAYOUTS.get(dtype, "nn")}, dtype, device)
        for dtype in dict.fromkeys(dtypes)
        if dtype in (*MATRIX_FLOATS, "float8_e4m3fn", "int8")
    ]
    return [
        *cases,
        _peak_case("read", {"size": size}, "float32", device),
        _peak_case("memset", {"size": size}, "int8", device),
        _peak_case("memcpy", {"size": size, "kind": "d2d"}, "int8", device),
    ]


def _peak_case(model: str, shape: dict[str, Parameter], dtype: str, device: str) -> Case:
    benchmark = _make_benchmark(model, "forward", "ceiling", "a measured peak of this machine")
    spec = OperatorSpec(
        op=model, direction="forward", shape=shape, dtype=dtype, device=device, cache="cold", measured_peak=True
    )
    return Case(benchmark=benchmark, spec=spec)
