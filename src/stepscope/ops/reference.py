"""Comparing a result with a float64 reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.measure import WrongResultError

if TYPE_CHECKING:
    import torch

RELATIVE_TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}
"""Largest allowed ‖out − ref‖ / ‖ref‖. Rounding of float32 lands under 1e-6 here, a wrong element far above 1e-5."""


def check_close(name: str, result: torch.Tensor, reference: torch.Tensor) -> None:
    """`reference` is float64. NaN never passes."""
    dtype = str(result.dtype).removeprefix("torch.")
    size = float(reference.norm())
    error = float((result.double() - reference).norm()) / size if size else float(result.double().norm())
    tolerance = RELATIVE_TOLERANCE[dtype]
    if not error <= tolerance:
        raise WrongResultError(
            f"{name} in {dtype} is off by {error:.2e} relative to float64; {tolerance:.0e} is allowed",
            hint="report this with the system record: a library returns wrong numbers",
        )
