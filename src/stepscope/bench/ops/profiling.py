"""The process that looks at kernels: `python -m stepscope.bench.ops.profiling FOLDER`; see `kernels`."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from stepscope.bench.ops.build import math_mode
from stepscope.bench.ops.kernels import KERNELS_FILE, ProfiledCase, profile_kernels, read_profiled
from stepscope.bench.ops.producer import OperatorProducer
from stepscope.launch.worker import Session
from stepscope.records import Case, describe_exception
from stepscope.run.ranks import CaseSkipped
from stepscope.store import StoredRun
from stepscope.store.folder import AppendFile, whole_lines

SHOWN_EVERY = 200


def profile_cases(folder: Path) -> None:
    """Every case of the run's plan that has no line yet; goes on where an earlier process stopped."""
    plan = StoredRun(folder).plan
    request = msgspec.structs.replace(plan.request, check=False, kernels=False, graph=False)
    bench = OperatorProducer(Session(verb=plan.verb, request=request))
    bench.open()
    done = read_profiled(folder)
    file = AppendFile(folder / KERNELS_FILE)
    file.cut(sum(len(line) + 1 for _, line in whole_lines((folder / KERNELS_FILE).read_bytes())))
    try:
        missing = [case for case in plan.cases if case.key not in done]
        for number, case in enumerate(missing, start=1):
            file.append(msgspec.json.encode(_profile(bench, case)))
            if number % SHOWN_EVERY == 0 or number == len(missing):
                sys.stderr.write(f"kernels of {number}/{len(missing)} cases\n")
    finally:
        file.close()


def _profile(bench: OperatorProducer, case: Case) -> ProfiledCase:
    try:
        ready = bench.build(case)
        with math_mode(ready.asked.dtype, ready.asked.direction):
            kernels, seconds = profile_kernels(
                ready.built.calls, cuda=bench.device.has_events, before_sample=ready.before_sample
            )
    except CaseSkipped:
        return ProfiledCase(case=case.key)
    except Exception as error:  # noqa: BLE001 - the border of a case, as in the run itself
        return ProfiledCase(case=case.key, failure=describe_exception(error).message)
    return ProfiledCase(case=case.key, kernels=kernels, kernel_s=seconds)


def main() -> int:
    """Its border: the run goes on without kernels, and says so for each case; why, is said once, here."""
    try:
        profile_cases(Path(sys.argv[1]))
    except Exception as error:  # noqa: BLE001 - the process border
        sys.stderr.write(f"the kernels could not be looked at: {describe_exception(error).message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
