"""What an operator benchmark declares. Everything but `build` works without torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    import torch

Shape = Mapping[str, int]

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class ShapeParameter(NamedTuple):
    name: str
    unit: str
    default: int
    meaning: str


class Work(NamedTuple):
    """Compulsory work of one iteration: each input read once, each output written once."""

    flops: int
    bytes: int


class Built(NamedTuple):
    """Ready to be timed."""

    body: Callable[[], object]
    check: Callable[[], None]
    """Compares the operator's result with a float64 reference; raises WrongResultError."""


class Operator(ABC):
    name: ClassVar[str]
    summary: ClassVar[str]
    parameters: ClassVar[tuple[ShapeParameter, ...]]
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float64", "bfloat16", "float16")
    passes: ClassVar[tuple[str, ...]] = ("forward", "backward")
    unit: ClassVar[str]
    """Of the score: `TFLOP/s` for what computes, `GB/s` for what moves."""

    @abstractmethod
    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        """`direction` is one of `passes`."""

    @abstractmethod
    def memory_bytes(self, shape: Shape, dtype: str, direction: str) -> int:
        """What the case allocates, reference check included; decides whether it is tried at all."""

    @abstractmethod
    def build(self, shape: Shape, dtype: torch.dtype, device: str, direction: str) -> Built:
        """Make inputs (seeded) and outputs; `body` must not allocate more than the operator itself does."""
