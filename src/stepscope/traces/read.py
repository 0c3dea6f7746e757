"""One call for any trace: a file, a folder or a pattern of ranks; the format is found from the content."""

from __future__ import annotations

import glob
import re
import shutil
import tempfile
import time
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from stepscope.core.errors import BadInputError, UsageError
from stepscope.core.files import hash_file
from stepscope.formats.chakra import looks_like_chakra
from stepscope.formats.classify import find_classifier
from stepscope.formats.memory import looks_like_memory
from stepscope.formats.readers import TraceFormat, find_format
from stepscope.formats.source import cache_folders, read_head
from stepscope.formats.timeline import Array, Block, Span, Thread, Timeline
from stepscope.traces import KINETO_FOLDER, RECORDING_FILE
from stepscope.traces.finish import finish
from stepscope.traces.table import make_table, require_polars

if TYPE_CHECKING:
    import polars as pl


CACHE_VERSION = 3
"""Raised whenever a reader, the classifier or the layout changes what is stored."""
ABANDONED_S = 3600.0
_KEY = "key.json"
_EVENTS, _TEXTS = "events", "texts.json"


class CacheKey(msgspec.Struct, frozen=True, kw_only=True):
    """What a cached trace was made from; anything else here means that it is stale."""

    cache_version: int
    classifier: str
    size_bytes: int
    modified_ns: int
    step_marker: str | None


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A file of columns, one behind the other."""

    rows: int
    columns: list[tuple[str, str, str]]
    """Name, type and the smaller type in which it is stored; wide types come first, so that all are aligned."""
    crc32: int
    """A flipped bit is not an event that took longer."""


class _Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of a timeline that is no column."""

    key: CacheKey
    sha256: str
    rank: int | None
    world_size: int | None
    steps: tuple[Span, ...]
    step_marker: str
    threads: list[Thread]
    metadata: dict[str, Any]
    repairs: dict[str, int]
    texts_crc32: int
    tables: dict[str, _Stored]
    """Columns by the name of their file."""


_OF_TIMELINE = ("rank", "world_size", "steps", "step_marker", "threads", "metadata", "repairs")


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
    facts = _read_facts(folder)
    if facts is None:
        return None
    try:
        tables = {name: _read_columns(folder / f"{name}.columns", stored) for name, stored in facts.tables.items()}
        texts = msgspec.json.decode(_read_checked(folder / _TEXTS, facts.texts_crc32), type=list[str])
    except OSError:
        return None
    core = tables.pop(_EVENTS)
    blocks = {name: Block(rows=columns.pop("row"), columns=columns) for name, columns in tables.items()}
    return Timeline(core=core, blocks=blocks, texts=texts, **{name: getattr(facts, name) for name in _OF_TIMELINE})


def _read_checked(path: Path, crc32: int) -> bytes:
    content = path.read_bytes()
    if zlib.crc32(content) != crc32:
        raise OSError(f"{path} is damaged")
    return content


def _read_columns(path: Path, stored: _Stored) -> dict[str, Array]:
    import numpy as np

    content = _read_checked(path, stored.crc32)
    columns, offset = {}, 0
    for name, kind, small in stored.columns:
        found = np.frombuffer(content, small, stored.rows, offset)
        columns[name] = found.astype(kind, copy=False)
        offset += found.nbytes
    return columns


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
    tables: dict[str, Mapping[str, Any]] = {_EVENTS: timeline.core}
    for name, block in timeline.blocks.items():
        tables[name] = {"row": block.rows, **block.columns}
    texts = msgspec.json.encode(list(timeline.texts))
    (folder / _TEXTS).write_bytes(texts)
    facts = _Facts(
        key=key,
        sha256=hash_file(path),
        **{name: getattr(timeline, name) for name in _OF_TIMELINE},
        texts_crc32=zlib.crc32(texts),
        tables={name: _write_columns(folder / f"{name}.columns", columns) for name, columns in tables.items()},
    )
    encoded = msgspec.json.encode(facts)
    (folder / _KEY).write_bytes(msgspec.json.encode(_Sealed(zlib.crc32(encoded), msgspec.Raw(encoded))))


def _write_columns(path: Path, columns: Mapping[str, Any]) -> _Stored:
    small = {name: _shrink(column) for name, column in columns.items()}
    order = sorted(small, key=lambda name: -small[name].itemsize)
    crc32 = 0
    with path.open("wb") as file:
        for name in order:
            content = small[name].tobytes()
            crc32 = zlib.crc32(content, crc32)
            file.write(content)
    return _Stored(
        rows=max(map(len, small.values()), default=0),
        columns=[(name, columns[name].dtype.str, small[name].dtype.str) for name in order],
        crc32=crc32,
    )


def _shrink(column: Any) -> Any:
    """In the smallest type that holds all of its whole numbers."""
    import numpy as np

    if column.dtype.kind not in "iu" or not len(column):
        return column
    kind = np.promote_types(*(np.min_scalar_type(int(edge)) for edge in (column.min(), column.max())))
    return column.astype(kind) if kind.kind in "iu" else column


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


def check_file(path: Path) -> None:
    if not path.exists():
        raise BadInputError(
            "there is no such file", hint="give a trace, a folder of traces or a pattern", where=str(path)
        )


HEAD_BYTES = 1 << 18
_TRACE_NAMES = re.compile(
    r"\.(json|sqlite|csv|pkl|pickle|pt|trace|dump)(\.gz|\.zst)?$|(^|[_-])rank[_-]?\d+$|nccl_trace_rank", re.I
)

_NAMES = (_TRACE_NAMES, re.compile(r"\.et(\.gz|\.zst)?$", re.I))


def read_timeline(path: Path | str, *, step_marker: str | None = None) -> Timeline:
    """The trace of one rank, finished, without the cache. A file of several ranks gives its first."""
    return read_timelines(Path(path), step_marker=step_marker)[0]


def read_timelines(path: Path, *, step_marker: str | None = None) -> list[Timeline]:
    """All ranks (or device processes) that one file holds, finished, without the cache."""
    check_file(path)
    found = require_format(path)
    return [finish(timeline, step_marker=step_marker) for timeline in found.read(path)]


def load_timeline(path: Path | str, *, place: int = 0, step_marker: str | None = None, cache: bool = True) -> Timeline:
    """As `read_timeline`, from the cache where the file has not changed; writes the cache after a first read.

    `place` chooses among the ranks of a file that holds several.
    """
    path = Path(path)
    check_file(path)
    if not cache:
        return read_timelines(path, step_marker=step_marker)[place]
    key = make_key(path, step_marker)
    folder = find_cached(path, key, place)
    if folder is not None and (kept := load_cached(folder)) is not None:
        return kept
    timelines = read_timelines(path, step_marker=step_marker)
    for number, timeline in enumerate(timelines):
        write_cache(path, key, timeline, number)
    return timelines[place]


@dataclass(frozen=True)
class TraceSet:
    """Traces of one job, one entry per rank; each is loaded when it is asked for and not kept."""

    paths: Sequence[Path]
    """In order of rank; a file that holds several ranks is there for each."""
    ranks: Sequence[int]
    places: Sequence[int]
    """Which of the ranks in its file each is."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Files of the folder that are no timelines, and why."""
    step_marker: str | None = None
    cache: bool = True
    recording: Path | None = None
    """The folder of `stepscope trace record` that these were taken from; None: from anywhere."""

    def __len__(self) -> int:
        return len(self.paths)

    def __iter__(self) -> Iterator[Timeline]:
        return (self.timeline(rank) for rank in self.ranks)

    def path(self, rank: int) -> Path:
        return self.paths[self._place(rank)]

    def place(self, rank: int) -> int:
        return self.places[self._place(rank)]

    def timeline(self, rank: int | None = None) -> Timeline:
        """The timeline of one rank; of the first where none is named."""
        place = 0 if rank is None else self._place(rank)
        loaded = load_timeline(
            self.paths[place], place=self.places[place], step_marker=self.step_marker, cache=self.cache
        )
        said = loaded.rank if loaded.metadata.get("rank_from") == "content" else None
        if said is not None and said != self.ranks[place] and len(self) > 1:
            raise BadInputError(
                f"says it is rank {said}, but its name says {self.ranks[place]}",
                hint="rename it, or give the traces of one job alone",
                where=str(self.paths[place]),
            )
        return (
            loaded if said is not None or loaded.rank == self.ranks[place] else replace(loaded, rank=self.ranks[place])
        )

    def _place(self, rank: int) -> int:
        if rank not in self.ranks:
            raise UsageError(f"there is no trace of rank {rank}", hint=f"ranks here: {_list_ranks(self.ranks)}")
        return self.ranks.index(rank)

    def table(self, columns: Sequence[str] | None = None, *, ranks: Collection[int] | None = None) -> pl.DataFrame:
        """Events of all (or these) ranks as one polars frame."""
        require_polars()
        import polars as pl

        chosen = self.ranks if ranks is None else [rank for rank in self.ranks if rank in ranks]
        frames = [make_table(self.timeline(rank), columns) for rank in chosen]
        if len(frames) == 1:
            return frames[0]
        # Each rank has its own list of words: as plain strings they can stand below each other.
        plain = [frame.with_columns(pl.col(pl.Enum).cast(pl.String)) for frame in frames]
        return pl.concat(plain, how="vertical_relaxed")


def read_traces(path: Path | str, *, step_marker: str | None = None, cache: bool = True) -> TraceSet:
    """The traces of a file, a folder or a pattern (`traces/rank*.json.gz`), one per rank.

    `path`: ranks come from the content of the files before their names. `step_marker`: each instance of this annotation
    is a step. `cache`: keep what was read for the next time. Only the beginnings of the files are looked at here;
    `timeline` reads one rank, and `table` gives a polars frame.

    >>> traces = stepscope.read_traces("recording/kineto")
    >>> traces.table(["name", "start_ns"]).height == len(traces.timeline())
    True
    """
    files, named = _find_files(path)
    found: list[_Entry] = []
    left_out: dict[str, str] = {}
    for file in files:
        try:
            head = read_head(file, HEAD_BYTES)
            trace_format = require_format(file, head)
        except BadInputError as error:
            if named:
                raise
            left_out[file.name] = error.message.removeprefix("is ")
        else:
            found += _list_ranks_of(file, head, trace_format)
    if not found:
        first = next(iter(left_out.items()), None)
        raise BadInputError(
            "holds no trace that can be read" + (f" ({first[0]}: {first[1]})" if first else ""),
            hint="give a trace file, a folder of traces (one per rank) or a pattern in quotes",
            where=str(path),
        )
    ranks = _number_ranks(found)
    order = sorted(range(len(found)), key=lambda number: ranks[number])
    return TraceSet(
        paths=[found[number].path for number in order],
        ranks=[ranks[number] for number in order],
        places=[found[number].place for number in order],
        left_out=left_out,
        step_marker=step_marker,
        cache=cache,
        recording=_recording_of(Path(path)),
    )


def _recording_of(path: Path) -> Path | None:
    """A recording named itself, or by the folder or a file of its timelines."""
    folders = (path, path.parent, path.parent.parent)
    return next((folder for folder in folders if (folder / RECORDING_FILE).is_file()), None)


def _find_files(path: Path | str) -> tuple[list[Path], bool]:
    """Files to look at, and whether the user named exactly these."""
    text = str(path)
    path = Path(path)
    if path.is_dir():
        inside = sorted(file for file in _timelines_of(path).iterdir() if file.is_file())
        # Chakra files beside other traces are conversions of them, mostly: the same ranks again.
        return next(filter(None, ([file for file in inside if names.search(file.name)] for names in _NAMES)), []), False
    if path.exists():
        return [path], True
    matches = [Path(match) for match in sorted(glob.glob(text, recursive=True))] if glob.has_magic(text) else []
    files = [match for match in matches if match.is_file()]
    if not files:
        raise BadInputError(
            "there is no such file, and no file matches",
            hint="quote patterns, so that the shell leaves them alone",
            where=text,
        )
    return files, False


def _timelines_of(folder: Path) -> Path:
    """Where a recording keeps its timelines; any other folder is taken as it is."""
    return folder / KINETO_FOLDER if (folder / RECORDING_FILE).is_file() else folder


def looks_like_graph(path: Path, head: bytes | None = None) -> bool:
    """An execution trace or a Chakra graph. A Chakra file with times is a timeline as well."""
    head = read_head(path) if head is None else head
    if looks_like_chakra(head, path):
        return True
    return (
        b'"schema"' in head[:4096] and b'"traceEvents"' not in head and (b'"nodes"' in head or b'"op_schema"' in head)
    )


def require_format(path: Path, head: bytes | None = None) -> TraceFormat:
    """BadInputError says what a file without a timeline is, and what can be done with it."""
    head = read_head(path) if head is None else head
    found = find_format(path, head)
    if found is not None:
        return found
    if looks_like_graph(path, head):
        what = "is a graph of operators without times, not a timeline"
        hint = "give the Kineto trace of the same steps; `stepscope trace link ET KINETO` joins both"
    elif looks_like_memory(head, path):
        what = "says what memory held, and has no timeline of events"
        hint = "`stepscope trace summary FILE` reads it"
    else:
        what = "is no trace of a known format"
        hint = "docs/trace-formats.md lists what can be read and how each is recognised"
    raise BadInputError(what, hint=hint, where=str(path))


class _Entry(NamedTuple):
    rank: int | None
    path: Path
    place: int


def _list_ranks_of(path: Path, head: bytes, found: TraceFormat) -> list[_Entry]:
    """Where the beginning of a file does not tell, it is read."""
    if found.find_rank is not None:
        return [_Entry(found.find_rank(path, head), path, 0)]
    timelines = found.read(path)
    several = len(timelines) > 1
    return [
        _Entry(number if several and t.rank is None else t.rank, path, number) for number, t in enumerate(timelines)
    ]


def _number_ranks(found: list[_Entry]) -> list[int]:
    """Every file gets a rank; two of one rank are an error that names both."""
    if len(found) == 1:
        return [found[0].rank or 0]
    seen: dict[int, Path] = {}
    for rank, path, _ in found:
        if rank is None:
            raise BadInputError(
                "says nothing of its rank, in content or name", hint="name it like trace_rank3.json", where=str(path)
            )
        if rank in seen:
            raise BadInputError(
                f"has rank {rank}, and so has {seen[rank].name}",
                hint="give one trace per rank: another folder, or a pattern that matches one step's files",
                where=str(path),
            )
        seen[rank] = path
    return [rank for rank, _, _ in found if rank is not None]


def _list_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown + (f" … {ranks[-1]} ({len(ranks)} ranks)" if len(ranks) > 8 else "")
