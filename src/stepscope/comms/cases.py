"""From a sweep to cases."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.comms.collectives import DTYPE_BYTES, find_collective
from stepscope.errors import UsageError, unknown_name
from stepscope.records import Benchmark, Case

OWNER = "communication"
LARGEST_SIZE_BYTES = 2**44


def make_cases(
    *, collective: str, sizes: Sequence[int], dtype: str, backend: str, world_size: int, device: str
) -> list[Case]:
    """One case a size. Sizes that are no whole number of elements are refused: what is measured is what was asked."""
    found = find_collective(collective)
    if dtype not in DTYPE_BYTES:
        raise unknown_name("dtype", dtype, DTYPE_BYTES, where="--dtype")
    for size in sizes:
        if size < DTYPE_BYTES[dtype] or size % DTYPE_BYTES[dtype] or size > LARGEST_SIZE_BYTES:
            raise UsageError(
                f"a message of {size} bytes is no whole number of {dtype} elements ({DTYPE_BYTES[dtype]} bytes each)"
                if size <= LARGEST_SIZE_BYTES
                else f"a message of {size} bytes is beyond any memory",
                hint="write for example 1K:1M:x4",
                where="--sizes",
            )
    benchmark = Benchmark(
        model=found.name,
        implementation="micro",
        mode=backend,
        config=f"{world_size}ranks",
        owner=OWNER,
        description=found.summary,
    )
    return [
        Case(
            benchmark=benchmark,
            parameters={"size_bytes": size, "dtype": dtype, "device": device},
            world_size=world_size,
        )
        for size in sizes
    ]
