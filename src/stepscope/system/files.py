"""Small reads below /proc and /sys, where any file may be missing, unreadable or refuse to answer."""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path("/")
"""Every probe takes a root, so that tests can show it another machine."""


def read_text(path: Path) -> str | None:
    """None where the kernel does not tell (no file, no permission, an invalid read)."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    text = read_text(path)
    return int(text) if text is not None and re.fullmatch(r"-?\d+", text) else None


def read_natural(path: Path) -> int | None:
    """The kernel writes -1 where it does not know (a NUMA node, a link's speed)."""
    value = read_int(path)
    return value if value is not None and value >= 0 else None


def is_there(path: Path) -> bool:
    """False also where this user may not look; Path.exists would raise."""
    return os.path.exists(path)


def list_folder(path: Path, pattern: str = "*") -> list[Path]:
    """In natural order: cpu2 before cpu10."""
    try:
        return sorted(path.glob(pattern), key=_natural_key)
    except OSError:
        return []


def _natural_key(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name) if part]


def parse_cpu_list(text: str) -> list[int]:
    """The kernel's list form: `0-3,8` is [0, 1, 2, 3, 8]; parts that are not numbers are left out."""
    cpus: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        cpus.extend(range(int(first), int(last or first) + 1))
    return cpus
