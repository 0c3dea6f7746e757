"""What every operator's test does."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.bench.ops.build import build
from stepscope.bench.ops.catalogue import operators
from stepscope.bench.ops.inputs import Maker
from stepscope.bench.ops.operator import Operator, Work
from stepscope.bench.ops.reference import as_tensors
from stepscope.system import bfloat16_works


def kinds_of(family: str) -> list[type[Operator]]:
    """The operators that a module of the families declares."""
    found = [type(one) for one in operators().values() if type(one).__module__.endswith(f".{family}")]
    assert found
    return found


def full_shape(operator: Operator, **changes: Any) -> dict[str, Any]:
    """The tiny shape with some parameters changed."""
    shape = {parameter.name: parameter.default for parameter in operator.parameters}
    unknown = changes.keys() - shape.keys()
    assert not unknown, f"{operator.name} has no {unknown}"
    return {**shape, **operator.tiny, **changes}


def run_and_check(operator: Operator, direction: str = "forward", dtype: str = "float32", **changes: Any) -> None:
    """Build two sets of inputs, call both twice, compare with float64."""
    import torch

    if dtype == "bfloat16" and not bfloat16_works():
        pytest.skip("bfloat16 ends the process here: set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16")
    shape = full_shape(operator, **changes)
    operator.check_shape(shape)
    built = build(operator, shape, dtype=dtype, device="cpu", direction=direction, sets=2)
    with torch.set_grad_enabled(direction == "backward"):
        for call in built.calls * 2:
            call()
    built.check()


def moved_by_hand(operator: Operator, dtype: str = "float32", **changes: Any) -> int:
    """Bytes of all inputs and outputs of one forward call, as torch made them."""
    import torch

    shape = full_shape(operator, **changes)
    inputs = operator.make_inputs(shape, Maker(dtype, "cpu"))
    with torch.no_grad():
        outputs = as_tensors(operator.bind(shape, inputs)())
    return sum(tensor.numel() * tensor.element_size() for tensor in [*inputs.values(), *outputs])


def count_by_hand(kind: type[Operator], shape: dict[str, Any], dtype: str, direction: str, work: Work) -> None:
    """The declared work is what the test counted."""
    assert kind().work(full_shape(kind(), **shape), dtype, direction) == work


def traffic_is_that_of_the_tensors(kind: type[Operator], dtype: str) -> None:
    operator = kind()
    assert moved_by_hand(operator, dtype) == operator.work(full_shape(operator), dtype, "forward").bytes
