"""Slurm's short spellings of many hosts and many counts, written out. Pure text; no Slurm needed."""

from __future__ import annotations

import itertools
import re

from stepscope.core.errors import UsageError

_MOST_HOSTS = 65536
"""Slurm itself refuses longer ranges; the limit keeps a mistyped number from filling the memory."""

_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\],\s]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_hostlist(text: str) -> list[str]:
    """Host names in the order Slurm numbers the nodes: `n[08-10],gpu-a01` gives n08, n09, n10, gpu-a01.

    Zero padding follows the first number of each range. Repeated names stay repeated, as Slurm keeps them.
    """
    hosts: list[str] = []
    for entry in _split_outside_brackets(text):
        hosts.extend(_expand_entry(entry, text))
        if len(hosts) > _MOST_HOSTS:
            raise _bad_list(text, f"names more than {_MOST_HOSTS} hosts")
    if not hosts:
        raise _bad_list(text, "names no host")
    return hosts


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


def _split_outside_brackets(text: str) -> list[str]:
    entries: list[str] = []
    current = ""
    depth = 0
    for character in text:
        if character == "," and depth == 0:
            entries.append(current)
            current = ""
            continue
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            raise _bad_list(text, "has brackets that do not match")
        current += character
    if depth != 0:
        raise _bad_list(text, "has brackets that do not match")
    entries.append(current)
    return [entry.strip() for entry in entries if entry.strip()]


def _expand_entry(entry: str, whole: str) -> list[str]:
    choices: list[list[str]] = []
    position = 0
    count = 1
    for match in _PIECE.finditer(entry):
        if match.start() != position:
            raise _bad_list(whole, f"has something unreadable in {entry!r}")
        position = match.end()
        choices.append([match[2]] if match[2] is not None else _expand_ranges(match[1], whole))
        count *= len(choices[-1])
        if count > _MOST_HOSTS:
            raise _bad_list(whole, f"names more than {_MOST_HOSTS} hosts")
    if position != len(entry):
        raise _bad_list(whole, f"has something unreadable in {entry!r}")
    return ["".join(parts) for parts in itertools.product(*choices)]


def _expand_ranges(text: str, whole: str) -> list[str]:
    numbers: list[str] = []
    for item in text.split(","):
        match = _RANGE.fullmatch(item.strip())
        if match is None:
            raise _bad_list(whole, f"has {item!r} where a number or a range like 3-7 belongs")
        first = int(match[1])
        last = int(match[2]) if match[2] is not None else first
        if last < first or last - first >= _MOST_HOSTS:
            raise _bad_list(whole, f"has the impossible range {item!r}")
        width = len(match[1])
        numbers.extend(f"{number:0{width}d}" for number in range(first, last + 1))
    return numbers


def _bad_list(text: str, problem: str) -> UsageError:
    shown = text if len(text) <= 80 else text[:77] + "..."
    return UsageError(
        f"the host list {shown!r} {problem}",
        hint="expected Slurm's form, for example n[0-3,7],gpu-a01; set MASTER_ADDR to do without it",
    )
