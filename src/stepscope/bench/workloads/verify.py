"""What stands beside the score of an optimized implementation: that it computes the right thing, and what it
changed."""

from __future__ import annotations

from stepscope.bench.workloads.check import check_optimized
from stepscope.bench.workloads.findings import CheckReport, Finding
from stepscope.bench.workloads.generation import Decoder, check_generation
from stepscope.bench.workloads.protocol import Optimized, Setting
from stepscope.bench.workloads.request import ParsedCase
from stepscope.bench.workloads.shared import adds_up
from stepscope.core.errors import StepscopeError, first_line
from stepscope.measure import Device, give_back_memory
from stepscope.records import is_out_of_memory
from stepscope.records.kinds import WorkloadObserved
from stepscope.run.producer import WrongResultError

UNCHECKED = "not asked for"
"""Instead of a passed check; such a form has no score."""
CHECK_TOKENS = 16
ADDED_UP = 2
"""Batches of a step that is checked where gradients are added up: what is right for two is so for more."""
CHECK_BATCH = 16
"""Examples in a comparison on a CPU: enough to fill every path of the model."""


class Verifier:
    """Checks one case after the other; what was found in fp32 holds for the other precisions of a benchmark."""

    def __init__(self, device: Device, backend: str) -> None:
        self._device = device
        self._backend = backend
        self._strict: dict[tuple[str, str, int, int], list[Finding]] = {}

    def check(self, parsed: ParsedCase) -> WorkloadObserved:
        """Raises WrongResultError: an optimized implementation that computes something else has no score."""
        # On a GPU as many examples as are timed: what was compiled for them need not be compiled again.
        examples = parsed.batch_size if self._device.has_events else min(parsed.batch_size, CHECK_BATCH)
        while True:
            try:
                report = self._compare(parsed, examples, ADDED_UP if adds_up(parsed) else 1)
                break
            except Exception as error:
                # The ootb implementation in fp32 beside the fast one needs more than what is timed.
                if not is_out_of_memory(error):
                    raise
                if examples == 1:
                    raise StepscopeError(
                        f"no room for the ootb implementation in fp32 beside the optimized one: {first_line(error)}",
                        hint="--no-check measures without a score; a device with more memory can check it",
                    ) from error
            give_back_memory(self._device.name)
            examples //= 2
        if not report.passed:
            raise WrongResultError(
                f"not what the out-of-the-box implementation computes: {format_failures(report)}",
                hint="compare the two forms layer by layer; see docs/workloads.md#correctness",
            )
        return WorkloadObserved(
            check="passed",
            check_examples=examples if examples < parsed.batch_size else None,
            check_errors={f"{one.what.replace(' ', '_')}_{one.precision}": one.error for one in report.findings},
        )

    def _compare(self, parsed: ParsedCase, examples: int, at_once: int) -> CheckReport:
        plain, fast = parsed.workload.make_deterministic(parsed.scale)
        setting = Setting(parsed.mode, parsed.precision, self._device.name, self._backend)
        known = (parsed.case.benchmark.id, parsed.scale, examples, at_once)
        report = check_optimized(
            plain, fast, setting, batch_size=examples, at_once=at_once, strict=self._strict.get(known, ())
        )
        self._strict[known] = [one for one in report.findings if one.precision in ("fp32", "fp64")]
        if parsed.mode == "infer" and isinstance(plain, Decoder) and isinstance(fast, Decoder):
            tokens = min(CHECK_TOKENS, plain.sizes["new_tokens"])
            more = check_generation(plain, fast, setting, batch_size=examples, new_tokens=tokens)
            report = CheckReport(findings=[*report.findings, *more.findings])
        return report


def format_failures(report: CheckReport) -> str:
    return "; ".join(
        f"{one.what} in {one.precision} differ by {one.error:.3g} (limit {one.limit:.3g})"
        + (f" at {one.where}" if one.where else "")
        + (f", where rounding alone makes {one.noise:.3g}" if one.noise is not None else "")
        for one in report.failures
    )


def describe_changes(task: Optimized, parsed: ParsedCase, device: Device, backend: str) -> WorkloadObserved:
    """All that an owner of the model would have to take over. Graphs and kernels of a GPU are not there on a CPU."""
    changes = task.changes(mode=parsed.mode, precision=parsed.precision)
    listed = "; ".join(f"{one.name}: {one.what}" for one in changes)
    return WorkloadObserved(
        changes=listed if device.has_events else f"(as on a GPU) {listed}",
        compile_backend=backend if task.engine(parsed.mode).compile is not None else None,
    )
