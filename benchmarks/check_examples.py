"""Would the check of an optimized implementation notice that examples got each other's answers?

    python benchmarks/check_examples.py [MODEL …]      # default: six models of the suite at full size; a minute

Holds the ootb implementation of each model's inference in bf16 against itself in fp32, on four examples: once as it is,
which is right, and once with every example's outputs moved to the next, which is wrong. Prints how far each is off by
the three measures of the check. A right form must be below the limits, the wrong one above one of them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from stepscope.bench.workloads import choose_workloads
from stepscope.bench.workloads.check import MOST_SIZE, _Unchanged, check_optimized
from stepscope.bench.workloads.findings import CheckReport
from stepscope.bench.workloads.protocol import Setting, Task

if TYPE_CHECKING:
    from stepscope.bench.workloads.protocol import Outputs

MODELS = ("regnety", "cvt", "oscar", "xlmr", "resnext3d", "rnnt")
"""DLRM's tables at full size do not fit a small host."""
EXAMPLES = 4
PRECISION = "bf16"


class Exchanged(_Unchanged):
    """Below fp32 each example has the answer of another."""

    def unpack(self, outputs: Outputs, batch: Any) -> Outputs:
        moved = [one.roll(1, 0) for one in (outputs if isinstance(outputs, tuple) else (outputs,))]
        return tuple(moved) if isinstance(outputs, tuple) else moved[0]


def check(plain: Task, form: _Unchanged) -> CheckReport:
    return check_optimized(plain, form, Setting("infer", PRECISION, "cpu", "eager"), batch_size=EXAMPLES)


def main() -> int:
    wrong = 0
    for model in sys.argv[1:] or MODELS:
        workload = choose_workloads(models=[model], modes=["infer"], implementations=["optimized"])[0]
        plain, _ = workload.make_deterministic("full")
        for name, form in (("right", _Unchanged(plain)), ("exchanged", Exchanged(plain))):
            report = check(plain, form)
            found = {one.what: one.error for one in report.findings if one.precision == PRECISION}
            print(f"{model:10s} {name:9s}", ", ".join(f"{what} {error:.2g}" for what, error in found.items()))
            caught = any(one.precision == PRECISION for one in report.failures)
            wrong += caught == (name == "right")
    print(f"limit of the differences: {MOST_SIZE}; {wrong} forms judged wrongly")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
