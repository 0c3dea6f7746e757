"""What a check of a fast form found, and how far apart the forms may be."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from stepscope.bench.workloads.protocol import Precision


class Tolerance(NamedTuple):
    """Largest |a - b| / |b|, by Euclidean norm; of gradients, of any one parameter."""

    outputs: float
    loss: float
    gradients: float
    band: float
    """Of the convergence run: largest distance of the losses, as a share of how far the loss moved in all."""


TOLERANCES: dict[Precision, Tolerance] = {
    "fp32": Tolerance(1e-4, 1e-4, 2e-3, 0.05),
    "tf32": Tolerance(5e-3, 5e-3, 5e-2, 0.10),
    "fp16": Tolerance(1e-2, 1e-2, 1e-1, 0.15),
    "bf16": Tolerance(3e-2, 2e-2, 2e-1, 0.20),
    "fp8": Tolerance(2e-1, 1e-1, 5e-1, 0.30),
}


_COARSEST = Tolerance(2e-1, 1e-1, 0.9, 0.30)
"""Of gradients: one of zeros is wrong by 1."""
CEILINGS: dict[Precision, Tolerance] = {
    "fp32": TOLERANCES["tf32"], "tf32": TOLERANCES["bf16"], "fp16": _COARSEST, "bf16": _COARSEST, "fp8": _COARSEST
}  # fmt: skip
"""Up to which rounding may raise the limits of training; a network that amplifies it further cannot be checked."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison."""

    what: str
    """`outputs`, `one example`, `differences of examples`; `loss`, `gradients`, `statistics`, `convergence`,
    `size of gradients` or `update`."""
    precision: Precision | Literal["fp64"]
    error: float
    limit: float
    where: str = ""
    """The parameter or step with the largest error."""
    noise: float | None = None
    """How far rounding alone takes the plain form, where that was looked at."""

    @property
    def passed(self) -> bool:
        """False for errors that are no number, too."""
        return self.error <= self.limit


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    findings: list[Finding]

    @property
    def passed(self) -> bool:
        return bool(self.findings) and all(one.passed for one in self.findings)

    @property
    def failures(self) -> list[Finding]:
        return [one for one in self.findings if not one.passed]
