"""Records of what memory held: torch.profiler's memory timelines and snapshots of the CUDA allocator."""

from pathlib import Path

from stepscope.formats.memory import profiler, snapshot
from stepscope.formats.memory.history import MemoryHistory


def looks_like_memory(head: bytes, path: Path) -> bool:
    """Whether it says what memory held, and no timeline of events."""
    return profiler.sniff(head, path) or snapshot.sniff(head, path)


def read_memory(path: Path, head: bytes) -> list[MemoryHistory]:
    """One history per device."""
    return profiler.read(path) if profiler.sniff(head, path) else snapshot.read(path)
