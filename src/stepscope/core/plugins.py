"""Entry points of installed packages, without the cost of `importlib.metadata` where a group has none.

Importing that module and parsing what every package declares takes longer than making the table of a run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

from stepscope.core.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def entry_points(group: str) -> Iterable[EntryPoint]:
    """Those of `importlib.metadata`."""
    if not _may_be_declared(group.encode()):
        return ()
    from importlib import metadata

    return metadata.entry_points(group=group)


def add_plugins(
    known: dict[str, Any], group: str, what: str, make: Callable[[Any], Any] = lambda loaded: loaded
) -> None:
    """Add what other packages declare in a group, by its own `name`, which must be new; `make` gets each value."""
    for entry in entry_points(group):
        made = make(entry.load())
        if made.name in known:
            raise UsageError(
                f"the {what} {made.name!r} of {entry.value} is already taken",
                hint="rename it in the package that declares it",
                where=f"entry point {entry.name}",
            )
        known[made.name] = made


def _may_be_declared(group: bytes) -> bool:
    """Whether a package names the group; True also where packages are found in another way than in folders."""
    if any(hasattr(finder, "find_distributions") and finder is not PathFinder for finder in sys.meta_path):
        return True
    for place in sys.path:
        try:
            names = os.listdir(place or ".")
        except NotADirectoryError:  # an archive
            return True
        except OSError:
            continue
        for name in names:
            if name.lower().endswith((".dist-info", "egg-info")):
                try:
                    with open(os.path.join(place, name, "entry_points.txt"), "rb") as file:
                        declared = file.read()
                except OSError:
                    continue
                if group in declared:
                    return True
    return False
