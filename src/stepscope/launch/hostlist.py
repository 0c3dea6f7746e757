"""Slurm's short spellings of many hosts and many counts. Pure text; no Slurm needed."""

from __future__ import annotations

import re

from stepscope.core.errors import UsageError

_MOST_HOSTS = 65536
"""Slurm itself refuses more; the limit keeps a mistyped number from filling the memory."""

_NUMBERS = r"\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
_HOSTS = rf"(?:[^\[\],\s]|{_NUMBERS})+"
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def first_host(text: str) -> str:
    """The host that Slurm numbers 0: `n08` of `n[08-10],gpu-a01`."""
    if not re.fullmatch(f"{_HOSTS}(?:,{_HOSTS})*", text):
        shown = text if len(text) <= 80 else text[:77] + "..."
        raise UsageError(
            f"the host list {shown!r} is not in Slurm's form",
            hint="expected for example n[0-3,7],gpu-a01; set MASTER_ADDR to do without it",
        )
    first, *_ = re.findall(_HOSTS, text)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)


def parse_tasks_per_node(text: str) -> list[int]:
    """Tasks on each node, in node order: `2(x3),1` gives 2, 2, 2, 1."""
    counts: list[int] = []
    for entry in text.split(","):
        match = _COUNT.fullmatch(entry.strip())
        repeat = int(match[2] or 1) if match else 0
        if match is None or len(counts) + repeat > _MOST_HOSTS:
            raise UsageError(
                f"cannot read the task counts {text!r}: {entry!r} is not a count like 4 or 4(x2)",
                where="SLURM_STEP_TASKS_PER_NODE",
            )
        counts.extend([int(match[1])] * repeat)
    return counts
