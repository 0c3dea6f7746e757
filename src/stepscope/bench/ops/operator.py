"""What an operator benchmark declares. Only making inputs, binding and checking need torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

from stepscope.bench.ops.inputs import Maker
from stepscope.core.dtypes import DTYPE_BYTES as STORED_BYTES
from stepscope.core.lazy_torch import torch

Value = int | float | str
Shape = Mapping[str, Any]
"""Every declared parameter with a value of its default's type; checked before an operator sees it."""

Sizes = dict[str, tuple[int, ...]]
"""Sizes of tensors, by name."""

Call = Callable[[], Any]
"""One iteration: returns a tensor, a sequence of tensors, or nothing where it works in place."""

DTYPES = (
    "float64", "float32", "tf32", "bfloat16", "float16", "float8_e4m3fn", "int64", "int32", "int8", "int4",
)  # fmt: skip
"""Every name that may be asked for; which of them an operator has, it says itself."""
DTYPE_BYTES = {name: STORED_BYTES.get(name, 4) for name in DTYPES if name != "int4"}
"""Bytes of one element. `tf32` is float32 in memory, multiplied with the matrix units' shorter mantissa."""

FLOATS = ("float32", "bfloat16", "float16", "float64")
MATRIX_FLOATS = ("float32", "tf32", "bfloat16", "float16", "float64")
"""For what runs on matrix units: tf32 is a mode of those alone."""

INDEX_BYTES = 8


class UnsupportedError(NotImplementedError):
    """This operator cannot do what a case asks for, here or at all; the case is skipped with these words."""


class Parameter(NamedTuple):
    """Its kind is its default's type: int for a size, float for a number, str for a word or a text."""

    name: str
    unit: str
    default: Value
    meaning: str
    choices: tuple[str, ...] = ()
    """The words allowed; empty: any text."""
    least: int = 1
    """Smallest size allowed."""


class Work(NamedTuple):
    """Compulsory work of one iteration: each input read once, each output written once."""

    flops: int
    bytes: int


class Operator(ABC):
    """One operator. Subclasses are stateless: one instance serves all cases."""

    name: ClassVar[str]
    summary: ClassVar[str]
    parameters: ClassVar[tuple[Parameter, ...]]
    dtypes: ClassVar[tuple[str, ...]] = FLOATS
    passes: ClassVar[tuple[str, ...]] = ("forward", "backward")
    unit: ClassVar[str] = "GB/s"
    """The score's unit: `TFLOP/s` for what computes, `GB/s` for what moves."""
    differentiable: ClassVar[tuple[str, ...]] = ()
    """The inputs whose gradients the backward pass computes."""
    adds_gradients_by: ClassVar[Literal["row", "element"] | None] = None
    """What a repeated index adds up in a gradient; None: no gradient is such a sum."""
    tiny: ClassVar[Mapping[str, Value]]
    """The shape set `tiny`: runs anywhere in an instant; parameters left out keep their defaults."""

    def gradient_names(self, shape: Shape) -> tuple[str, ...]:
        """`differentiable`, where it does not depend on the shape."""
        return self.differentiable

    def check_shape(self, shape: Shape) -> None:  # noqa: B027 - most operators have no rule
        """Raise ValueError with the rule that a combination of parameters breaks."""

    @abstractmethod
    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        """`direction` is one of `passes`."""

    def footprint_bytes(self, shape: Shape, dtype: str) -> int:
        """Inputs and outputs of one forward call in memory; differs from its traffic where rows are looked up."""
        return self.work(shape, dtype, "forward").bytes

    def scratch_bytes(self, shape: Shape, dtype: str, direction: str) -> int:
        """What it needs beside inputs, outputs and gradients."""
        return 0

    def repeated_bytes(self, shape: Shape, dtype: str, direction: str, inputs: Mapping[str, torch.Tensor]) -> int:
        """Bytes of the traffic that touch again what the same call has touched: rows that are looked up twice.

        The rest is unique: it has to come from memory where the cache is cold.
        """
        return 0

    def added_terms(self, shape: Shape) -> int:
        """How many numbers one result adds up in its own precision; the check allows for their rounding."""
        return 1

    def sizes(self, shape: Shape) -> Sizes:
        """Sizes of the inputs by name, where all are random values that the operator only reads."""
        raise NotImplementedError(f"{self.name} declares neither `sizes` nor `make_inputs`")

    def make_inputs(self, shape: Shape, maker: Maker) -> dict[str, torch.Tensor]:
        """Seeded inputs by name; called once for each set of inputs. What is overwritten must be `maker.own`ed."""
        return {name: maker.values(*size) for name, size in self.sizes(shape).items()}

    @abstractmethod
    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        """The call to be timed, with everything it needs looked up beforehand."""

    def bind_reference(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        """The same function of the same inputs widened to float64, by another way where there is one."""
        return self.bind(shape, inputs)

    def check(self, shape: Shape, inputs: Mapping[str, torch.Tensor], dtype: str, direction: str) -> str | None:
        """Compare with the float64 reference; raises WrongResultError. Returns why nothing could be compared, if so."""
        from stepscope.bench.ops.reference import check_backward, check_forward

        (check_forward if direction == "forward" else check_backward)(self, shape, inputs, dtype)
        return None
