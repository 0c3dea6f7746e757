"""A fresh process of a run: `python -m stepscope.run RUN_FOLDER SEAL`.

It measures the plan in the folder, which must be the one that the starting process wrote.
"""

from __future__ import annotations

import sys
from pathlib import Path

from stepscope.core.errors import UsageError
from stepscope.records import describe_exception
from stepscope.run.execute import execute
from stepscope.store import StoredRun, record_failure


def main() -> int:
    folder, seal = Path(sys.argv[1]), sys.argv[2]
    try:
        stored = StoredRun(folder)
        if stored.plan_seal != seal:
            raise UsageError("the plan is not the one that the starting process wrote", where=str(folder))
        execute(stored)
    except Exception as error:  # noqa: BLE001 - the process border: whoever started this one passes it on
        record_failure(folder, describe_exception(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
