"""Reading runs back: complete, interrupted or being written. What is read is checked against what was written."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import msgspec

from stepscope.core.errors import (
    BadInputError,
    CorruptRunError,
    RunBusyError,
    RunNotFoundError,
    StepscopeError,
    StoreNotWritableError,
    first_line,
)
from stepscope.records import (
    UNREADABLE,
    CaseResult,
    Communication,
    Failure,
    Plan,
    RankSamples,
    Run,
    SampleSlice,
    System,
    check_seal,
    ends_with_seal,
    parse_document,
    parse_samples,
)
from stepscope.store import folder as layout
from stepscope.store.folder import whole_lines
from stepscope.store.view import MeasuredCase

RunStatus = Literal["complete", "interrupted", "running"]
T = TypeVar("T")
DocumentT = TypeVar("DocumentT", Plan, Run, System, Communication)

UNSHOWABLE = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""What readers raise for values that a record allows and that make no sense together."""


_LATEST = re.compile(r"latest(?:~(?P<back>\d+))?")
"""The newest run of the store, or that many before it."""


class Journal(NamedTuple):
    """The finished cases as far as their lines are whole."""

    results: list[CaseResult]
    end: int
    """Where the last whole line ends."""
    seal: str
    """Seal of the last line, which the next one is bound to; empty where there is none."""
    sealed: bool
    """Every line has a seal."""


def read_journal(data: bytes, *, where: str, after: str = "", start: int = 1, vouched: bool = False) -> Journal:
    """A torn last line is no error: it was never finished. `after` is the seal that the first line is bound to.

    `vouched`: the whole file was compared with its hash already.
    """
    results, seal, sealed = [], after, True
    require_torn(data, where=where)
    for number, line in whole_lines(data):
        place = f"{where}:{start + number - 1}"
        if not vouched:
            found = check_seal(line, where=place, after=seal)
            sealed, seal = sealed and found is not None, found or ""
        results.append(parse_document(line, CaseResult, where=place))
    return Journal(results, data.rfind(b"\n") + 1, seal, sealed)


def require_torn(data: bytes, *, where: str) -> None:
    """What stands behind the last line end was cut off by a crash, and is not a whole line whose end was changed."""
    tail = data[data.rfind(b"\n") + 1 :]
    if ends_with_seal(tail[:-1]):
        raise CorruptRunError("the end of its last line was changed", where=where)


def parse_failures(data: bytes, *, where: str, sealed: bool) -> list[Failure]:
    """`sealed`: the run is of a format in which every line has a seal."""
    failures = []
    require_torn(data, where=where)
    for number, line in whole_lines(data):
        check_seal(line, where=f"{where}:{number}", lacking_allowed=not sealed)
        try:
            failures.append(msgspec.json.decode(line, type=Failure))
        except UNREADABLE as error:
            raise CorruptRunError(
                f"a failure cannot be read: {first_line(error)}", where=f"{where}:{number}"
            ) from error
    return failures


class StoredRun:
    """A run folder. Files are read when asked for, and checked: those of a complete run against the hashes in run.json,
    those of another by their own seals. Damage is said with the file and the place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / layout.PLAN_FILE).exists():
            raise CorruptRunError(
                f"{folder} is not a run folder: it has no {layout.PLAN_FILE}",
                hint="stepscope runs list shows the runs of a store",
                where=str(folder),
            )

    @property
    def id(self) -> str:
        return self.folder.name

    @cached_property
    def run(self) -> Run | None:
        """None for a run that has not been completed."""
        return self._document(layout.RUN_FILE, Run)[0]

    @cached_property
    def _sealed_plan(self) -> tuple[Plan, str | None]:
        plan, seal = self._document(layout.PLAN_FILE, Plan)
        if plan is None:
            raise CorruptRunError(f"{layout.PLAN_FILE} is gone", where=str(self.folder / layout.PLAN_FILE))
        return plan, seal

    @property
    def plan(self) -> Plan:
        return self._sealed_plan[0]

    @property
    def plan_seal(self) -> str:
        """What the other files of the run are bound to; empty for a run of a format that had no seals."""
        return self._sealed_plan[1] or ""

    @property
    def status(self) -> RunStatus:
        if self.run is not None:
            return "complete"
        return "running" if layout.is_locked(self.folder) else "interrupted"

    @cached_property
    def system(self) -> System | None:
        """None where the run ended before its machine was written down."""
        return self._document(layout.SYSTEM_FILE, System, bound=True)[0]

    @cached_property
    def communication(self) -> Communication | None:
        """Who took part and what carried the data; None for runs of one process."""
        return self._document(layout.COMMUNICATION_FILE, Communication, bound=True)[0]

    @cached_property
    def journal(self) -> Journal:
        path = self.folder / layout.JOURNAL_FILE
        try:
            data, vouched = self._read(layout.JOURNAL_FILE)
        except CorruptRunError:
            found = layout.read_evidence(path, where=str(path))
            if self.plan_seal and found:
                read_journal(found, where=str(path), after=self.plan_seal)  # which names the line
            raise
        after = "" if vouched else self.plan_seal
        return read_journal(data or b"", where=str(path), after=after, vouched=vouched)

    @property
    def results(self) -> list[CaseResult]:
        return self.journal.results

    @cached_property
    def failures(self) -> list[Failure]:
        data, _ = self._read(layout.FAILURES_FILE)
        where = str(self.folder / layout.FAILURES_FILE)
        return parse_failures(data or b"", where=where, sealed=bool(self.plan_seal))

    @property
    def is_verified(self) -> bool:
        """Whether there are hashes to check what is read against; runs of format 1 have them only when complete."""
        return self.run is not None or (bool(self.plan_seal) and self.journal.sealed)

    def samples(self, result: CaseResult) -> list[RankSamples]:
        """The raw samples of one case, each line checked against the hash the journal has of it."""
        return self._parse_samples(result, self._read_slice)

    def _parse_samples(self, result: CaseResult, read: Callable[[SampleSlice], bytes]) -> list[RankSamples]:
        samples = []
        for piece in result.samples:
            line, end = (content := read(piece))[: piece.length], content[piece.length :]
            if end != b"\n" or hashlib.sha256(line).hexdigest() != piece.sha256:
                raise CorruptRunError(
                    f"the samples of {result.case.label} are not what was measured",
                    hint=f"stepscope runs verify {self.id}",
                    where=self._place(piece),
                )
            samples.append(parse_samples(line, where=str(self.folder / piece.file)))
        return samples

    def _read_slice(self, piece: SampleSlice) -> bytes:
        """A line of samples with its end."""
        return self._read_samples(piece, offset=piece.offset, length=piece.length + 1)

    def _read_samples(self, piece: SampleSlice, **part: int) -> bytes:
        data = layout.read_evidence(self.folder / piece.file, where=self._place(piece), **part)
        if data is None:
            raise CorruptRunError("samples are missing: there is no such file", where=self._place(piece))
        return data

    def _place(self, piece: SampleSlice) -> str:
        return f"{self.folder / piece.file} at byte {piece.offset}"

    def vouched_bytes(self, name: str) -> int:
        """How far a file of samples is evidence: what lies behind, a crash left there."""
        slices = [piece for result in self.results for piece in result.samples if piece.file == name]
        return max((piece.offset + piece.length + 1 for piece in slices), default=0)

    def measured(self, result: CaseResult) -> MeasuredCase:
        return MeasuredCase(result, self.samples(result))

    def check_records(self) -> None:
        """Read every record but the samples: what is shown of a run is shown only if the whole of it can be read."""
        _ = self.run, self.plan, self.system, self.communication, self.results, self.failures

    @cached_property
    def _measured(self) -> list[MeasuredCase]:
        self.check_records()
        files: dict[str, bytes] = {}

        def read(piece: SampleSlice) -> bytes:
            if piece.file not in files:
                files[piece.file] = self._read_samples(piece)
            return files[piece.file][piece.offset : piece.offset + piece.length + 1]

        return [MeasuredCase(result, self._parse_samples(result, read)) for result in self.results]

    def cases(self) -> list[MeasuredCase]:
        return list(self._measured)

    def _document(
        self, name: str, kind: type[DocumentT], *, bound: bool = False
    ) -> tuple[DocumentT | None, str | None]:
        """A file of one record, and its seal; None where there is none. `bound`: to the plan, by the plan's seal."""
        data, vouched = self._read(name)
        if data is None:
            return None, None
        where = str(self.folder / name)
        after = self.plan_seal if bound and not vouched else ""
        seal = None if bound and vouched else check_seal(data, where=where, after=after)
        return parse_document(data, kind, where=where), seal

    def _read(self, name: str) -> tuple[bytes | None, bool]:
        """Content, and whether it was compared with its hash in run.json."""
        path = self.folder / name
        data = layout.read_evidence(path, where=str(path))
        run = self.run if name != layout.RUN_FILE else None
        if run is None:
            return data, False
        entry = run.files.get(name)
        if entry is None and data is None:
            return None, True
        if entry is None or data is None or hashlib.sha256(data).hexdigest() != entry.sha256:
            what = "was not part of the run" if entry is None else "is gone" if data is None else "changed"
            raise CorruptRunError(
                f"{name} {what} after the run was complete",
                hint=f"stepscope runs verify {self.id} lists every damaged file",
                where=str(path),
            )
        return data, True


class JournalTail:
    """Follows a run that another process writes: each call returns the cases finished since the last."""

    def __init__(self, stored: StoredRun) -> None:
        self._stored = stored
        self._path = stored.folder / layout.JOURNAL_FILE
        self._seen = stored.journal

    def read_new(self) -> list[MeasuredCase]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._seen.end)
            data = file.read()
        new = read_journal(data, where=str(self._path), after=self._seen.seal)
        self._seen = new._replace(end=self._seen.end + new.end)
        return [self._stored.measured(result) for result in new.results]


def find_run(store: Path, name: str) -> StoredRun:
    """RUN as people write it: a folder, the beginning of an id that only one run has, `latest`, or `latest~1` for the
    one before it."""
    return StoredRun(find_run_folder(store, name))


def find_run_folder(store: Path, name: str) -> Path:
    """The same for a run that may be too damaged to be read."""
    as_path, latest = Path(name), _LATEST.fullmatch(name)
    if latest is not None and not as_path.exists():
        return _find_latest(store, int(latest["back"] or 0), name)
    if (as_path / layout.PLAN_FILE).exists() or (as_path.is_dir() and ("/" in name or as_path.parent != Path())):
        return as_path
    matches = [path for path in run_folders(store) if path.name.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    exact = [path for path in matches if path.name == name]
    if exact:
        return exact[0]
    if matches:
        names = ", ".join(path.name for path in matches[:5])
        raise RunNotFoundError(
            f"{name!r} begins the id of {len(matches)} runs: {names}", hint="write more of the id", where=str(store)
        )
    raise RunNotFoundError(f"no run {name!r} in {store}", hint=f"stepscope runs list --store {store}", where=str(store))


def _find_latest(store: Path, back: int, name: str) -> Path:
    folders = sorted(run_folders(store), key=_age)
    if back >= len(folders):
        raise RunNotFoundError(
            f"there is no {name}: {store} holds {len(folders)} runs", hint=f"stepscope runs list --store {store}",
            where=str(store),
        )  # fmt: skip
    return folders[-1 - back]


def run_folders(store: Path) -> list[Path]:
    """Oldest first; ids begin with their time. A folder that lost its plan is one too: it has to be named."""
    if not store.is_dir():
        return []
    signs = (layout.PLAN_FILE, layout.RUN_FILE, layout.JOURNAL_FILE)
    found = (path for path in store.iterdir() if not path.name.startswith("."))
    return sorted(path for path in found if any((path / name).exists() for name in signs))


def _age(folder: Path) -> tuple[str, int, str]:
    """Runs of one second follow in the order in which their plans were written: `latest` is the last of them."""
    plan = folder / layout.PLAN_FILE
    return folder.name[: len("20261231-235959")], plan.stat().st_mtime_ns if plan.exists() else 0, folder.name


def read_each(folders: list[Path], read: Callable[[StoredRun], T]) -> tuple[list[T], list[StepscopeError]]:
    """What `read` makes of every run, and one error for each run that it cannot be made of."""
    made: list[T] = []
    damaged: list[StepscopeError] = []
    for folder in folders:
        try:
            made.append(read(StoredRun(folder)))
        except BadInputError as error:
            damaged.append(error)
        except UNSHOWABLE as error:
            said = f"its records make no sense together ({type(error).__name__}: {first_line(error)})"
            damaged.append(CorruptRunError(f"run {folder.name} cannot be used: {said}", where=str(folder)))
    return made, damaged


def list_runs(store: Path) -> tuple[list[StoredRun], list[StepscopeError]]:
    """Every run of a store whose records can be read, and what is wrong with the others; samples are not looked at.

    `store`: the folder of stored runs.

    >>> runs, damaged = stepscope.list_runs(Path("stepscope-runs"))
    >>> runs[0].status, damaged
    ('complete', [])
    """
    return read_each(run_folders(store), _with_records)


def _with_records(run: StoredRun) -> StoredRun:
    run.check_records()
    return run


def find_newest(store: Path, *, beside: str) -> StoredRun | None:
    """The newest complete run but one. Raises what is wrong with it, where it cannot be read: an older one is no
    substitute for it."""
    for folder in reversed(run_folders(store)):
        if folder.name != beside and (folder / layout.RUN_FILE).exists():
            run = StoredRun(folder)
            run.check_records()
            return run
    return None


def remove_run(folder: Path) -> None:
    """Gone in one step for every other process: renamed first, then deleted. Of a link, only the link."""
    if not folder.is_symlink() and layout.is_locked(folder):
        raise RunBusyError(f"run {folder.name} is being written", hint="stop its process first", where=str(folder))
    aside = folder.with_name(f".removed-{os.getpid()}-{folder.name}"[: layout.NAME_LIMIT])
    try:
        if folder.is_symlink():
            folder.unlink()
        else:
            folder.rename(aside)
            shutil.rmtree(aside)
    except OSError as error:
        raise StoreNotWritableError(
            f"cannot remove {folder.name}: {error.strerror}",
            hint=f"ls -ld {folder.parent} shows who may",
            where=str(folder),
        ) from error
