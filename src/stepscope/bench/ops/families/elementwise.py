"""Chains of elementwise steps: sums, products, powers and functions, one after the other.

Operations are counted one for each addition, multiplication, comparison or function (exp, tanh, erf …) of an element.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from stepscope.bench.ops.families.pointwise import COLS, ROWS
from stepscope.bench.ops.inputs import Maker
from stepscope.bench.ops.operator import DTYPE_BYTES, Call, Operator, Parameter, Shape, UnsupportedError, Work
from stepscope.bench.ops.reference import check_backward, check_forward
from stepscope.core.lazy_torch import functional, torch


class _Step(NamedTuple):
    """One step of a chain, from a value v and an operand o to the next value."""

    operand: str = ""
    """`tensor`: an input of its own; `number`: the same for all elements; empty: none."""
    gradients: int = 1
    """How many its backward computes; 0: they are the upstream itself."""
    needs_value: bool = True
    """Whether backward needs v. Only linear steps do not."""
    needs_operand: bool = False
    """Whether backward needs the operand's values."""
    real_above_zero: bool = False
    """Whether v must be positive for a finite result and derivative."""


_LINEAR_NUMBER = _Step("number", gradients=0, needs_value=False)
_STEPS = {
    "add": _Step("tensor", gradients=0, needs_value=False),
    "sub": _Step("tensor", needs_value=False),
    "mul": _Step("tensor", gradients=2, needs_operand=True),
    "div": _Step("tensor", gradients=2, needs_operand=True),
    "pow": _Step("tensor", gradients=2, needs_operand=True, real_above_zero=True),
    "addu": _LINEAR_NUMBER,
    "subu": _LINEAR_NUMBER,
    "mulu": _LINEAR_NUMBER._replace(gradients=1),
    "divu": _LINEAR_NUMBER._replace(gradients=1),
    "powu": _Step("number", real_above_zero=True),
    "relu": _Step(),
    "gelu": _Step(),
    "tanh": _Step(),
    "sigmoid": _Step(),
    "exp": _Step(),
    "sqrt": _Step(real_above_zero=True),
    "abs": _Step(),
    "neg": _Step(needs_value=False),
    "square": _Step(),
}
_KEEPS_GRADIENT = ("add", "sub", "addu", "subu")
"""Steps through which the upstream reaches the value as it is."""
_NUMBERS: dict[str, float] = {"addu": 0.25, "subu": 0.125, "mulu": 0.75, "divu": 1.25, "powu": 1.5}
_LEAST_GELU = -0.17

Range = tuple[float, float]

_SIGNED: Range = (-0.5, 0.5)
_POSITIVE: Range = (0.25, 0.5)
_DIVISOR: Range = (0.5, 1.0)
"""Exponents too."""
_LARGEST_VALUE = 1024.0
"""Leaves float16 room for derivatives."""


class Elementwise(Operator):
    """One operation an element and step. Backward counts one an element for each gradient a step computes.

    Bytes are those of a chain in one kernel: distinct inputs and one output. Without a compiler torch runs a kernel a
    step and moves the values between them as well. Backward reads the upstream and those inputs whose values the
    derivatives need, and writes each distinct gradient; one that is the upstream itself costs nothing.
    """

    name = "elementwise"
    summary = "a chain of element-wise steps over (rows, cols), such as add-mul-relu"
    parameters = (
        ROWS,
        COLS,
        Parameter(
            "chain", "steps", "add",
            "steps joined by -: add sub mul div pow with a further tensor each, "
            "addu subu mulu divu powu with a number, relu gelu tanh sigmoid exp sqrt abs neg square",
        ),
    )  # fmt: skip
    tiny = {"rows": 16, "cols": 24, "chain": "mul-add"}

    @staticmethod
    def steps(shape: Shape) -> list[str]:
        """Raises ValueError for what is no chain of known steps."""
        steps = str(shape["chain"]).split("-")
        unknown = [step for step in steps if step not in _STEPS]
        if unknown:
            raise ValueError(f"chain={shape['chain']}: {unknown[0]!r} is no step; those known are {', '.join(_STEPS)}")
        return steps

    def check_shape(self, shape: Shape) -> None:
        self._operand_ranges(self.steps(shape))

    def gradient_names(self, shape: Shape) -> tuple[str, ...]:
        steps = self.steps(shape)
        if not any(_STEPS[step].gradients for step in steps):
            raise UnsupportedError(
                f"the gradients of {shape['chain']} are the upstream itself: its backward computes nothing"
            )
        return ("input", *_operand_names(steps))

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        steps = self.steps(shape)
        elements, size = shape["rows"] * shape["cols"], DTYPE_BYTES[dtype]
        if direction == "forward":
            passes = 2 + len(_operand_names(steps))
            return Work(len(steps) * elements, size * passes * elements)
        self.gradient_names(shape)
        computed = sum(_STEPS[step].gradients for step in steps)
        passes = 1 + _inputs_read_back(steps) + _gradients_written(steps)
        return Work(computed * elements, size * passes * elements)

    def scratch_bytes(self, shape: Shape, dtype: str, direction: str) -> int:
        """Values between steps; backward keeps all of them."""
        between = len(self.steps(shape)) if direction == "backward" else 2
        return int(between * shape["rows"] * shape["cols"] * DTYPE_BYTES[dtype])

    def make_inputs(self, shape: Shape, maker: Maker) -> dict[str, torch.Tensor]:
        ranges, places = self._operand_ranges(self.steps(shape)), _operand_names(self.steps(shape))
        bounds = {"input": ranges[0]} | {name: ranges[1 + place] for name, place in places.items()}
        return {
            name: maker.uniform(shape["rows"], shape["cols"]) * (high - low) + low
            for name, (low, high) in bounds.items()
        }

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        first, calls = inputs["input"], self._step_calls(shape, inputs)
        if len(calls) == 1:
            only = calls[0]
            return lambda: only(first)

        def chain() -> torch.Tensor:
            value = first
            for call in calls:
                value = call(value)
            return value

        return chain

    def check(self, shape: Shape, inputs: Mapping[str, torch.Tensor], dtype: str, direction: str) -> None:
        compare = check_forward if direction == "forward" else check_backward
        compare(_RoundedChain(inputs["input"].dtype), shape, inputs, dtype)

    def _step_calls(
        self, shape: Shape, inputs: Mapping[str, torch.Tensor]
    ) -> list[Callable[[torch.Tensor], torch.Tensor]]:
        steps = self.steps(shape)
        ranges = self._operand_ranges(steps)
        names = {place: name for name, place in _operand_names(steps).items()}
        calls: list[Callable[[torch.Tensor], torch.Tensor]] = []
        for place, step in enumerate(steps):
            function = functional.gelu if step == "gelu" else getattr(torch, _torch_name(step))
            operand = inputs[names[place]] if place in names else ranges[1 + place][0]
            calls.append(_with_operand(function, operand) if _STEPS[step].operand else function)
        return calls

    @staticmethod
    def _operand_ranges(steps: Sequence[str]) -> list[Range]:
        """Ranges of the input, then of each step's operand, (0, 0) where it has none.

        Chains with a root or a power get positive inputs, all others both signs. Raises ValueError where a value could
        not be made positive, or would be so large that 16 bits could not hold it or its derivative: a chain that is
        allowed can be checked in every dtype.
        """
        positive = any(_STEPS[step].real_above_zero for step in steps)
        values = _POSITIVE if positive else _SIGNED
        ranges = [values]
        for step in steps:
            if _STEPS[step].real_above_zero and values[0] <= 0:
                raise ValueError(f"chain={'-'.join(steps)}: {step} would meet values that are not positive")
            ranges.append(_operand_range(step, values[0], positive=positive))
            values = _step_range(step, values, ranges[-1])
            if max(map(abs, values)) > _LARGEST_VALUE:
                raise ValueError(f"chain={'-'.join(steps)}: {step} would make values too large for float16")
        return ranges


class _RoundedChain(Elementwise):
    """Its reference computes each step in float64 and rounds the value to the case's dtype, as a kernel a step does.

    Without that, a value that rounding carries across zero takes the other branch of relu or abs: its gradient is then
    wholly different, though every step is right. The slopes of tanh and sigmoid are taken from their rounded results,
    as torch keeps those: where they saturate, 1 − y² in 16 bits has little to do with y before rounding.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def bind_reference(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        calls = self._step_calls(shape, inputs)
        slopes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "tanh": lambda y: 1 - y * y,
            "sigmoid": lambda y: y * (1 - y),
        }

        def chain() -> torch.Tensor:
            value = inputs["input"]
            for step, call in zip(self.steps(shape), calls, strict=True):
                before, exact = value, call(value)
                rounded = exact.detach().to(self._dtype).double()
                if step in slopes:
                    value = rounded + slopes[step](rounded) * (before - before.detach())
                else:
                    value = exact + (rounded - exact.detach())
            return value

        return chain


def _operand_names(steps: Sequence[str]) -> dict[str, int]:
    """Input names of the further tensors, each with its step's place."""
    places = [place for place, step in enumerate(steps) if _STEPS[step].operand == "tensor"]
    return {f"operand{i}": place for i, place in enumerate(places)}


def _torch_name(step: str) -> str:
    """Steps with a number end in u."""
    return step.removesuffix("u") if _STEPS[step].operand == "number" else step


def _with_operand(function: Callable[..., torch.Tensor], operand: object) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda value: function(value, operand)


def _inputs_read_back(steps: Sequence[str]) -> int:
    """How many inputs backward needs: those that make up the last value a derivative asks for, and asked operands."""
    last = max((place for place, step in enumerate(steps) if _STEPS[step].needs_value), default=None)
    if last is None:
        return 0
    tensors = {place for place, step in enumerate(steps) if _STEPS[step].operand == "tensor"}
    return 1 + len({place for place in tensors if place < last or _STEPS[steps[place]].needs_operand})


def _gradients_written(steps: Sequence[str]) -> int:
    """Distinct gradients other than the upstream: an `add` hands the same one to both of its sides."""
    shared, own = set(), 0
    changes = 0
    for step in reversed(steps):
        if step == "add":
            shared.add(changes)
        elif _STEPS[step].operand == "tensor":
            own += 1
        if step not in _KEEPS_GRADIENT:
            changes += 1
    shared.add(changes)
    return own + len(shared - {0})


def _operand_range(step: str, low: float, *, positive: bool) -> Range:
    """What is taken from a value that must stay positive is smaller than the smallest value."""
    kind = _STEPS[step].operand
    if not kind:
        return 0.0, 0.0
    if positive and low > 0 and step == "sub":
        return low / 4, low / 2
    if positive and low > 0 and step == "subu":
        # A power of two: torch rounds the number to the tensor's dtype, and the reference must use the same one.
        number = 2.0 ** math.floor(math.log2(low / 2))
        return number, number
    if kind == "number":
        return _NUMBERS[step], _NUMBERS[step]
    if step in ("div", "pow"):
        return _DIVISOR
    return _POSITIVE if positive else _SIGNED


def _gelu(value: float) -> float:
    return value * (1 + math.erf(value / 2**0.5)) / 2


_OF_ONE: dict[str, Callable[[float], float]] = {
    "relu": lambda v: max(v, 0.0),
    "gelu": _gelu,
    "tanh": math.tanh,
    "sigmoid": lambda v: 1 / (1 + math.exp(-v)),
    "exp": math.exp,
    "sqrt": math.sqrt,
    "abs": abs,
    "neg": lambda v: -v,
    "square": lambda v: v * v,
}
_OF_TWO: dict[str, Callable[[float, float], float]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "pow": operator.pow,
}  # fmt: skip
_TURNS = {"abs": 0.0, "square": 0.0, "gelu": _LEAST_GELU}
"""The least value of steps that fall before they rise: between values of both signs, of gelu among negative ones."""


def _step_range(step: str, values: Range, operands: Range) -> Range:
    """Bounds of the next value, from the ends of both ranges; divisors and exponents are positive."""
    if step in _OF_ONE:
        ends = [_OF_ONE[step](v) for v in values]
    else:
        ends = [_OF_TWO[_torch_name(step)](v, o) for v in values for o in operands]
    turns = step in _TURNS and values[0] < 0 and (values[1] >= 0 or step == "gelu")
    return _TURNS[step] if turns else min(ends), max(ends)
