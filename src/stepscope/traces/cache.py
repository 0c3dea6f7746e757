"""A trace that was read once is read from Parquet the second time.

The cache lies beside the source (`.stepscope/NAME.cache/`), or in the user's cache folder where that cannot be written.
It holds the columns as numbers (texts by their code) and is made for loading; `trace convert` writes tables for people.
"""

from __future__ import annotations

import glob
import hashlib
import shutil
import tempfile
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from stepscope.core.errors import BadInputError, MissingDependencyError
from stepscope.formats.classify import find_classifier
from stepscope.formats.source import cache_folders
from stepscope.formats.timeline import Array, Block, Span, Thread, Timeline

CACHE_VERSION = 2
"""Raised whenever a reader, the classifier or the layout changes what is stored."""
ABANDONED_S = 3600.0
_KEY = "key.json"
_EVENTS, _TEXTS = "events", "texts"


class CacheKey(msgspec.Struct, frozen=True, kw_only=True):
    """What a cached trace was made from; anything else here means that it is stale."""

    cache_version: int
    classifier: str
    size_bytes: int
    modified_ns: int
    step_marker: str | None


class _Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of a timeline that is no column."""

    key: CacheKey
    sha256: str
    rank: int | None
    world_size: int | None
    steps: list[tuple[int, int, int]]
    step_marker: str
    threads: list[tuple[str, str, str]]
    metadata: dict[str, Any]
    repairs: dict[str, int]
    tables: dict[str, int]
    """Its files by name, each with its CRC-32: a flipped bit is not an event that took longer."""


class _Sealed(msgspec.Struct, frozen=True):
    crc32: int
    facts: msgspec.Raw


def make_key(path: Path, step_marker: str | None) -> CacheKey:
    status = path.stat()
    return CacheKey(
        cache_version=CACHE_VERSION,
        classifier=find_classifier().identity,
        size_bytes=status.st_size,
        modified_ns=status.st_mtime_ns,
        step_marker=step_marker,
    )


def find_cached(path: Path, key: CacheKey, place: int = 0) -> Path | None:
    """The folder of a cache that was made from this very file; None where there is none."""
    for folder in cache_folders(path, place):
        facts = _read_facts(folder)
        if facts is not None and facts.key == key:
            return folder
    return None


def _read_facts(folder: Path) -> _Facts | None:
    try:
        sealed = msgspec.json.decode((folder / _KEY).read_bytes(), type=_Sealed)
        facts = msgspec.json.decode(sealed.facts, type=_Facts)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None  # absent, damaged or of another version: made anew
    return facts if zlib.crc32(sealed.facts) == sealed.crc32 else None


def load_cached(folder: Path) -> Timeline | None:
    """None where a part is missing or damaged: the source is then read again."""
    import polars as pl

    facts = _read_facts(folder)
    if facts is None:
        return None
    try:
        tables = {name: _read_table(folder / f"{name}.parquet", crc32) for name, crc32 in facts.tables.items()}
    except (OSError, pl.exceptions.PolarsError):
        return None
    texts = tables.pop(_TEXTS)["text"].to_list()
    core = _columns(tables.pop(_EVENTS))
    blocks = {}
    for name, table in tables.items():
        columns = _columns(table)
        blocks[name] = Block(rows=columns.pop("row"), columns=columns)
    return Timeline(
        rank=facts.rank,
        world_size=facts.world_size,
        core=core,
        blocks=blocks,
        texts=texts,
        threads=[Thread(*thread) for thread in facts.threads],
        steps=tuple(Span(*step) for step in facts.steps),
        step_marker=facts.step_marker,
        metadata=facts.metadata,
        repairs=facts.repairs,
    )


def _read_table(path: Path, crc32: int) -> Any:
    import polars as pl

    content = path.read_bytes()
    if zlib.crc32(content) != crc32:
        raise OSError(f"{path} is damaged")
    return pl.read_parquet(content)


def _columns(frame: Any) -> dict[str, Array]:
    return {name: frame[name].to_numpy() for name in frame.columns}


def write_cache(path: Path, key: CacheKey, timeline: Timeline, place: int = 0) -> Path | None:
    """Keep a timeline for the next time; None where no folder can be written. A half-written cache never shows."""
    for folder in cache_folders(path, place):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            aside = Path(tempfile.mkdtemp(prefix=f"{folder.name[:60]}.", suffix=".part", dir=folder.parent))
            _remove_abandoned(folder)
        except OSError:
            continue
        try:
            _write(aside, path, key, timeline)
            shutil.rmtree(folder, ignore_errors=True)
            aside.rename(folder)
        except OSError:
            # A full disk, or another process that was quicker.
            shutil.rmtree(aside, ignore_errors=True)
            if folder.exists():
                return folder
            continue
        return folder
    return None


def _remove_abandoned(folder: Path) -> None:
    """Halves that killed writers left: nobody writes a cache for an hour."""
    for part in folder.parent.glob(f"{glob.escape(folder.name[:60])}.*.part"):
        if time.time() - part.stat().st_mtime > ABANDONED_S:
            shutil.rmtree(part, ignore_errors=True)


def _write(folder: Path, path: Path, key: CacheKey, timeline: Timeline) -> None:
    tables: dict[str, Mapping[str, Any]] = {_EVENTS: timeline.core, _TEXTS: {"text": list(timeline.texts)}}
    for name, block in timeline.blocks.items():
        tables[name] = {"row": block.rows, **block.columns}
    facts = _Facts(
        key=key,
        sha256=hash_file(path),
        rank=timeline.rank,
        world_size=timeline.world_size,
        steps=[(step.number, step.start_ns, step.end_ns) for step in timeline.steps],
        step_marker=timeline.step_marker,
        threads=[(thread.process, thread.thread, thread.name) for thread in timeline.threads],
        metadata=dict(timeline.metadata),
        repairs=dict(timeline.repairs),
        tables={name: _write_table(folder / f"{name}.parquet", columns) for name, columns in tables.items()},
    )
    encoded = msgspec.json.encode(facts)
    (folder / _KEY).write_bytes(msgspec.json.encode(_Sealed(zlib.crc32(encoded), msgspec.Raw(encoded))))


def _write_table(path: Path, columns: Mapping[str, Any]) -> int:
    """Returns the CRC-32 of what was written."""
    import polars as pl

    frame = pl.DataFrame(dict(columns))
    try:
        frame.write_parquet(path, compression="lz4", statistics=False)
    except pl.exceptions.PolarsError as error:
        raise OSError(str(error)) from error
    return zlib.crc32(path.read_bytes())


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify_cache(path: Path) -> tuple[str, str]:
    """Whether the cache of a trace belongs to its content: an outcome (fresh, stale, outdated, absent) and a sentence.

    A stale one (other content under the same size and time) is removed, so that the next reading makes it anew.
    """
    found = [(folder, facts) for folder in cache_folders(path) if (facts := _read_facts(folder)) is not None]
    if not found:
        return "absent", "nothing is cached"
    content = hash_file(path)
    for folder, facts in found:
        if facts.sha256 != content:
            if facts.key == make_key(path, facts.key.step_marker):
                shutil.rmtree(folder, ignore_errors=True)
                return "stale", f"{folder} was made from other content of the same size and time: removed"
            return "outdated", f"{folder} was made from other content; it is not used and will be replaced"
        if facts.key != make_key(path, facts.key.step_marker):
            return "outdated", f"{folder} holds this content, but the file's time or the reader has changed: not used"
    return "fresh", f"{found[0][0]} holds what was read from this content"


def require_polars() -> None:
    try:
        import polars  # noqa: F401
    except ImportError:
        raise MissingDependencyError(
            "tables of traces need the package polars", hint="pip install 'stepscope[read]'"
        ) from None


def check_file(path: Path) -> None:
    if not path.exists():
        raise BadInputError(
            "there is no such file", hint="give a trace, a folder of traces or a pattern", where=str(path)
        )
