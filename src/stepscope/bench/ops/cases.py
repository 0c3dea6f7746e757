"""From what a person asks for to cases: everything is checked before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from stepscope.bench.ops.build import CACHES
from stepscope.bench.ops.catalogue import find_set, operators, shape_sets
from stepscope.bench.ops.families.call import CallAny, make_call_shape
from stepscope.bench.ops.language import MAX_CASES, CaseRequest, expand_shape, expand_table
from stepscope.bench.ops.operator import DTYPES, Operator, Value
from stepscope.core.errors import UsageError, unknown_name
from stepscope.records import Benchmark, Case
from stepscope.records.kinds import CallSpec, OperatorSpec

OWNER = "operators"
ALL = "all"
"""Stands for every operator; with a set, for those that have it."""
DEFAULT_DTYPE, DEFAULT_PASS, DEFAULT_CACHE = "float32", "forward", "warm"
CUSTOM = "custom"


class Asked(NamedTuple):
    """What holds for every entry that does not say otherwise. Empty: as a set says, then float32 forward, warm."""

    device: str
    dtypes: Sequence[str] = ()
    directions: Sequence[str] = ()
    caches: Sequence[str] = ()
    compiled: bool = False
    draws: int | None = None
    seed: int = 0
    config: str = CUSTOM


def parse_shape(text: str, operator: Operator) -> dict[str, Value]:
    """A text that stands for one shape; parameters left out take their defaults."""
    where = f"--shape {text}"
    shapes = expand_shape(text, operator, where=where)
    if len(shapes) > 1:
        raise UsageError(f"{text} stands for {len(shapes):,} shapes", hint="write a single one", where=where)
    return shapes[0]


def make_cases(
    *,
    names: Sequence[str],
    shapes: Sequence[str],
    dtypes: Sequence[str],
    directions: Sequence[str],
    device: str,
    sets: Sequence[str] = (),
    caches: Sequence[str] = (DEFAULT_CACHE,),
    compiled: bool = False,
    draws: int | None = None,
    seed: int = 0,
    config: str = CUSTOM,
) -> list[Case]:
    """Every operator with every shape and set, dtype, pass and cache that was asked for, each case once.

    A dtype or pass that an operator lacks becomes a case too, which is skipped with the reason when it is run.
    """
    if draws is not None and not shapes:
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
    asked = Asked(device, dtypes, directions, caches, compiled, draws, seed, config)
    for name in names:
        if name != ALL:
            _find(name, "--op")
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


def cases_of_requests(
    requests: Sequence[CaseRequest],
    *,
    device: str,
    dtypes: Sequence[str] = (),
    directions: Sequence[str] = (),
    caches: Sequence[str] = (),
    compiled: bool = False,
    draws: int | None = None,
    seed: int = 0,
    config: str = CUSTOM,
) -> list[Case]:
    """The cases of a file; what an entry says itself goes before what is asked for here."""
    return _gather(requests, Asked(device, dtypes, directions, caches, compiled, draws, seed, config))


def call_cases(
    target: str,
    arguments: str,
    *,
    device: str,
    build: str = "",
    dtypes: Sequence[str] = (),
    directions: Sequence[str] = (),
    caches: Sequence[str] = (),
    compiled: bool = False,
    draws: int | None = None,
) -> list[Case]:
    """One call of any operator of torch, named on the command line."""
    if draws is not None:
        raise _no_draws_for_calls("--draws")
    request = CaseRequest(op=CallAny.name, shape=make_call_shape(target, arguments, build=build), where="--call")
    return _gather([request], Asked(device, dtypes, directions, caches, compiled))


def _gather(requests: Sequence[CaseRequest], asked: Asked) -> list[Case]:
    _require_known("dtype", asked.dtypes, DTYPES, "--dtype")
    _require_known("pass", asked.directions, _known_passes(), "--pass")
    _require_known("cache", asked.caches, CACHES, "--cache")
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


def _make_cases_of(request: CaseRequest, asked: Asked) -> Iterator[tuple[tuple[object, ...], Case]]:
    _require_known("dtype", request.dtypes or (), DTYPES, f"{request.where}.dtypes")
    _require_known("pass", request.passes or (), _known_passes(), f"{request.where}.passes")
    _require_known("cache", request.caches or (), CACHES, f"{request.where}.caches")
    for operator in _find_operators(request):
        shapes, chosen, usual_dtypes, usual_passes = _expand(request, operator, asked)
        dtypes = request.dtypes or tuple(asked.dtypes) or usual_dtypes or _usual(DEFAULT_DTYPE, operator.dtypes)
        passes = request.passes or tuple(asked.directions) or usual_passes or _usual(DEFAULT_PASS, operator.passes)
        caches = request.caches or tuple(asked.caches) or (DEFAULT_CACHE,)
        benchmarks = {direction: _make_benchmark(operator, direction, chosen) for direction in passes}
        for shape, asked_dtype, direction, cache in product(shapes, dtypes, passes, caches):
            dtype = _actual_dtype(operator, shape, asked_dtype)
            case = Case(
                benchmark=benchmarks[direction],
                spec=_make_spec(
                    operator, shape, direction=direction, dtype=dtype, device=asked.device, cache=cache,
                    compile=asked.compiled,
                ),
                batch_size=_batch_size(shape),
            )  # fmt: skip
            yield (operator.name, chosen, direction, dtype, cache, *shape.values()), case


def _make_spec(operator: Operator, shape: Mapping[str, Value], **how: Any) -> OperatorSpec | CallSpec:
    if isinstance(operator, CallAny):
        return CallSpec(**shape, **how)  # type: ignore[arg-type]
    return OperatorSpec(op=operator.name, shape=dict(shape), **how)


def _usual(wanted: str, has: Sequence[str]) -> tuple[str, ...]:
    return (wanted,) if wanted in has else (has[0],)


def _expand(
    request: CaseRequest, operator: Operator, asked: Asked
) -> tuple[list[dict[str, Value]], str, tuple[str, ...], tuple[str, ...]]:
    """Shapes, the name they run under, and the dtypes and passes that a set is meant for."""
    if request.set is not None:
        if request.draws is not None:
            raise UsageError(
                "draws are for shapes", hint="leave them out: sets draw by themselves", where=request.where
            )
        chosen = find_set(operator, request.set, where=request.where)
        return chosen.expand(operator), chosen.name, tuple(chosen.dtypes), tuple(chosen.passes)
    if isinstance(operator, CallAny) and request.draws is None and asked.draws is not None:
        raise _no_draws_for_calls(request.where)
    draws = asked.draws if request.draws is None else request.draws
    seed = asked.seed if request.seed is None else request.seed
    if isinstance(request.shape, Mapping):
        shapes = expand_table(request.shape, operator, draws=draws, seed=seed, where=request.where)
    else:
        shapes = expand_shape(request.shape or "", operator, draws=draws, seed=seed, where=request.where)
    if isinstance(operator, CallAny):
        shapes = [operator.canonical(shape) for shape in shapes]
    return shapes, request.config or asked.config, (), ()


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


def _make_benchmark(operator: Operator, direction: str, config: str) -> Benchmark:
    return Benchmark(
        model=operator.name,
        implementation="micro",
        mode=direction,
        config=config,
        owner=OWNER,
        description=operator.summary,
    )


def _batch_size(shape: Mapping[str, Value]) -> int | None:
    batch = shape.get("batch")
    return batch if isinstance(batch, int) else None


def _find_operators(request: CaseRequest) -> list[Operator]:
    if request.op != ALL:
        return [_find(request.op, f"{request.where}.op")]
    known = list(operators().values())
    having = [one for one in known if request.set is None or request.set in shape_sets(one)]
    if not having:
        names = dict.fromkeys(name for one in known for name in shape_sets(one))
        raise unknown_name("shape set", request.set or "", names, where=request.where)
    return having


def _find(name: str, where: str) -> Operator:
    known = operators()
    if name not in known:
        raise unknown_name("operator", name, known, where=where)
    return known[name]


def _known_passes() -> dict[str, None]:
    return dict.fromkeys(direction for operator in operators().values() for direction in operator.passes)


def _require_known(what: str, names: Sequence[str], known: Sequence[str] | Mapping[str, None], where: str) -> None:
    for name in names:
        if name not in known:
            raise unknown_name(what, name, known, where=where)
