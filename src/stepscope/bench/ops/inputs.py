"""Inputs: seeded random numbers, made once a process and handed out in slices, so that a sweep never waits for them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stepscope.core.lazy_torch import torch

SEED = 20211013
CHUNK_ELEMENTS = 1 << 20
"""The arena's content is drawn chunk by chunk, each with its own seed: what stands at a place never depends on how
large the arena had to become."""
ALIGN_BYTES = 512
WHOLE_LOW, WHOLE_HIGH = -100, 100
"""Integers are drawn from here, low included."""

_STORAGE = {"tf32": "float32", "int4": "int8"}
_NARROW_FLOATS = frozenset({"float8_e4m3fn"})
"""No random numbers are drawn in these: they are rounded from bfloat16."""


def storage_dtype(dtype: str) -> torch.dtype:
    """The torch dtype that holds values of a dtype of this room."""
    found = getattr(torch, _STORAGE.get(dtype, dtype))
    assert isinstance(found, torch.dtype)
    return found


class Arena:
    """Random values of one dtype on one device, in pieces; what is taken from it must not be written to.

    What stands at a place never depends on the pieces. A piece that is too short is not made longer: slices of it are
    in use, and keep it in memory beside its longer copy.
    """

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self._dtype = dtype
        self._device = device
        self._pieces: list[tuple[int, torch.Tensor]] = []
        self._next = 0
        self._expected = 0
        self._align = max(1, ALIGN_BYTES // dtype.itemsize)

    def rewind(self) -> None:
        """Begin anew: called between cases. Several pieces give way to one that is as long as all of them."""
        self._next = 0
        if len(self._pieces) > 1:
            self._expected = max(first + len(values) for first, values in self._pieces)
            self._pieces.clear()

    def take(self, count: int) -> torch.Tensor:
        """`count` values that no other slice since the last rewind shares."""
        start = self._next
        self._next = start + -(-count // self._align) * self._align
        first, values = next(
            (piece for piece in self._pieces if piece[0] <= start and self._next <= piece[0] + len(piece[1])),
            None,
        ) or self._add_piece(start)
        return values[start - first : start - first + count]

    def _add_piece(self, start: int) -> tuple[int, torch.Tensor]:
        low = start // CHUNK_ELEMENTS
        high = -(-max(self._next, self._expected) // CHUNK_ELEMENTS)
        values = torch.empty((high - low) * CHUNK_ELEMENTS, dtype=self._dtype, device=self._device)
        for chunk in range(low, high):
            generator = torch.Generator(self._device).manual_seed(SEED + chunk)
            part = values[(chunk - low) * CHUNK_ELEMENTS : (chunk - low + 1) * CHUNK_ELEMENTS]
            if self._dtype.is_floating_point:
                part.normal_(generator=generator)
            else:
                part.random_(WHOLE_LOW, WHOLE_HIGH, generator=generator)
        self._pieces.append((low * CHUNK_ELEMENTS, values))
        return self._pieces[-1]

    @property
    def size_bytes(self) -> int:
        return sum(values.nbytes for _, values in self._pieces)


class Arenas:
    """The arenas of a process."""

    def __init__(self) -> None:
        self._arenas: dict[tuple[torch.dtype, str], Arena] = {}

    def get(self, dtype: torch.dtype, device: str) -> Arena:
        return self._arenas.setdefault((dtype, device), Arena(dtype, device))

    def rewind(self) -> None:
        for arena in self._arenas.values():
            arena.rewind()

    def release(self) -> None:
        """Give all memory back: a large case needs it more than the next small one."""
        self._arenas.clear()

    def size_bytes(self, device: str) -> int:
        return sum(arena.size_bytes for (_, place), arena in self._arenas.items() if place == device)


class Maker:
    """Makes one case's inputs in its dtype on its device. Two makers with the same seed make the same inputs."""

    def __init__(self, dtype: str, device: str, arenas: Arenas | None = None) -> None:
        self.dtype_name = dtype
        self.dtype = storage_dtype(dtype)
        self.device = device
        self.generator = torch.Generator(device).manual_seed(SEED)
        self._arenas = arenas or Arenas()

    def values(self, *size: int, scale: float = 1.0) -> torch.Tensor:
        """Normal for floats (times `scale`), whole numbers of −100…99 for integers. Read-only: see `own`."""
        narrow = self.dtype_name in _NARROW_FLOATS
        source = torch.bfloat16 if narrow else self.dtype
        taken = self._arenas.get(source, self.device).take(math.prod(size)).view(size)
        if scale != 1.0:
            taken = taken * scale
        return taken.to(self.dtype) if narrow else taken

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that may be written to."""
        return tensor.clone()

    def empty(self, *size: int) -> torch.Tensor:
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def uniform(self, *size: int) -> torch.Tensor:
        """0…1, in the case's dtype."""
        return torch.rand(size, device=self.device, generator=self.generator).to(self.dtype)

    def indices(self, high: int, *size: int) -> torch.Tensor:
        """Uniform over 0 … high − 1, int64."""
        return torch.randint(high, size, device=self.device, generator=self.generator)

    def permutation(self, count: int) -> torch.Tensor:
        """0 … count − 1 in random order, int64."""
        return torch.randperm(count, device=self.device, generator=self.generator)

    def tensor(self, numbers: Sequence[int], dtype: str = "int64") -> torch.Tensor:
        return torch.tensor(numbers, dtype=storage_dtype(dtype), device=self.device)
