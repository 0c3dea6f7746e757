"""From what a person writes to cases: shapes checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from stepscope.errors import UsageError, unknown_name
from stepscope.ops.operator import DTYPE_BYTES, Operator, Shape
from stepscope.ops.registry import find_operator
from stepscope.records import Benchmark, Case
from stepscope.units import parse_size

OWNER = "operators"
LARGEST_DIMENSION = 2**40
"""Beyond any memory; a typing error rather than a shape."""


def parse_shape(text: str, operator: Operator) -> dict[str, int]:
    """`m=512,n=512,k=512`; parameters left out take their defaults."""
    shape = {parameter.name: parameter.default for parameter in operator.parameters}
    expected = ",".join(f"{name}={value}" for name, value in shape.items())
    where = f"--shape {text}"
    seen: set[str] = set()
    for item in filter(None, text.split(",")):
        name, equals, value = item.partition("=")
        name = name.strip()
        if not equals or name not in shape:
            raise UsageError(
                f"{operator.name} has no shape parameter {name!r}", hint=f"write for example {expected}", where=where
            )
        if name in seen:
            raise UsageError(f"{name} is given twice", hint=f"write for example {expected}", where=where)
        seen.add(name)
        size = parse_size(value, where=where)
        if not 1 <= size <= LARGEST_DIMENSION:
            raise UsageError(
                f"{name}={value} cannot be: a dimension is at least 1 and below {LARGEST_DIMENSION}",
                hint=f"write for example {expected}",
                where=where,
            )
        shape[name] = size
    return shape


def make_cases(
    *,
    names: Sequence[str],
    shapes: Sequence[str],
    dtypes: Sequence[str],
    directions: Sequence[str],
    device: str,
) -> list[Case]:
    """Every operator with every shape, dtype and pass that was asked for."""
    cases = []
    for name in names:
        operator = find_operator(name)
        for shape_text, dtype, direction in product(shapes or [""], dtypes, directions):
            if dtype not in DTYPE_BYTES:
                raise unknown_name("dtype", dtype, DTYPE_BYTES, where="--dtype")
            if direction not in operator.passes:
                raise unknown_name("pass", direction, operator.passes, where="--pass")
            cases.append(_make_case(operator, parse_shape(shape_text, operator), dtype, direction, device))
    return cases


def _make_case(operator: Operator, shape: Shape, dtype: str, direction: str, device: str) -> Case:
    benchmark = Benchmark(
        model=operator.name,
        implementation="micro",
        mode=direction,
        config="custom",
        owner=OWNER,
        description=operator.summary,
    )
    return Case(
        benchmark=benchmark,
        parameters={**shape, "dtype": dtype, "device": device},
        batch_size=shape.get("batch"),
    )
