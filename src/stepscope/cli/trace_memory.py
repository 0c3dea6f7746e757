"""Memory timelines and snapshots: what `stepscope trace summary` says of them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from stepscope.cli.output import emit
from stepscope.cli.trace_options import require_numpy
from stepscope.core.errors import ExitCode


def show_memory(source: str, *, as_json: bool) -> int | None:
    """None for anything that is no such file."""
    from stepscope.analyze.memory_use import memory_use
    from stepscope.formats.memory import looks_like_memory, read_memory
    from stepscope.formats.source import read_head
    from stepscope.report.memory_text import format_memory

    path = Path(source)
    if not path.is_file() or not looks_like_memory(head := read_head(path), path):
        return None
    require_numpy()
    found = [memory_use(history) for history in read_memory(path, head)]
    emit({"memory": msgspec.to_builtins(found)}, "" if as_json else format_memory(found), as_json=as_json)
    return ExitCode.DONE
