"""Reading runs back: complete, interrupted or being written."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec

from stepscope.errors import BadInputError, CorruptRunError, RunBusyError, RunNotFoundError, StepscopeError
from stepscope.records import (
    CaseResult,
    Communication,
    Failure,
    Plan,
    RankSamples,
    Run,
    System,
    parse_document,
    parse_samples,
)
from stepscope.store import folder as layout
from stepscope.store.journal import whole_lines
from stepscope.store.view import MeasuredCase

RunStatus = Literal["complete", "interrupted", "running"]


def read_journal(data: bytes, *, where: str) -> tuple[list[CaseResult], int]:
    """The finished cases, and where the last whole line ends. A torn last line is no error: it was never finished."""
    results = [parse_document(line, CaseResult, where=f"{where}:{number}") for number, line in whole_lines(data)]
    return results, data.rfind(b"\n") + 1


def parse_failures(folder: Path) -> list[Failure]:
    path = folder / layout.FAILURES_FILE
    if not path.exists():
        return []
    try:
        return [msgspec.json.decode(line, type=Failure) for _, line in whole_lines(path.read_bytes())]
    except msgspec.MsgspecError as error:
        raise CorruptRunError(f"a failure cannot be read: {error}", where=str(path)) from error


class StoredRun:
    """A run folder. Files are read when asked for; damage is said with the file and the place."""

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
    def plan(self) -> Plan:
        return parse_document(self._read(layout.PLAN_FILE), Plan, where=str(self.folder / layout.PLAN_FILE))

    @cached_property
    def run(self) -> Run | None:
        """None for a run that has not been completed."""
        if not (self.folder / layout.RUN_FILE).exists():
            return None
        return parse_document(self._read(layout.RUN_FILE), Run, where=str(self.folder / layout.RUN_FILE))

    @property
    def status(self) -> RunStatus:
        if self.run is not None:
            return "complete"
        return "running" if layout.is_locked(self.folder) else "interrupted"

    @cached_property
    def system(self) -> System | None:
        """None where the run ended before its machine was written down."""
        path = self.folder / layout.SYSTEM_FILE
        if not path.exists():
            return None
        return parse_document(self._read(layout.SYSTEM_FILE), System, where=str(path))

    @cached_property
    def communication(self) -> Communication | None:
        """Who took part and what carried the data; None for runs of one process."""
        path = self.folder / layout.COMMUNICATION_FILE
        if not path.exists():
            return None
        return parse_document(self._read(layout.COMMUNICATION_FILE), Communication, where=str(path))

    @cached_property
    def results(self) -> list[CaseResult]:
        path = self.folder / layout.JOURNAL_FILE
        if not path.exists():
            return []
        return read_journal(self._read(layout.JOURNAL_FILE), where=str(path))[0]

    @cached_property
    def failures(self) -> list[Failure]:
        return parse_failures(self.folder)

    def samples(self, result: CaseResult) -> list[RankSamples]:
        """The raw samples of one case, each line checked against the hash the journal has of it."""
        return [parse_samples(line, where=where) for line, where in self._sample_lines(result)]

    def _sample_lines(self, result: CaseResult) -> Iterator[tuple[bytes, str]]:
        for piece in result.samples:
            path = self.folder / piece.file
            where = f"{path} at byte {piece.offset}"
            try:
                with path.open("rb") as file:
                    file.seek(piece.offset)
                    line = file.read(piece.length)
            except OSError as error:
                raise CorruptRunError(f"samples are missing: {error.strerror}", where=where) from error
            if hashlib.sha256(line).hexdigest() != piece.sha256:
                raise CorruptRunError(
                    f"the samples of {result.case.label} are not what was measured",
                    hint=f"stepscope runs verify {self.id}",
                    where=where,
                )
            yield line, where

    def measured(self, result: CaseResult) -> MeasuredCase:
        return MeasuredCase(result, self.samples(result))

    def cases(self) -> list[MeasuredCase]:
        return [self.measured(result) for result in self.results]

    def _read(self, name: str) -> bytes:
        path = self.folder / name
        try:
            return path.read_bytes()
        except OSError as error:
            raise CorruptRunError(
                f"cannot read {name}: {error.strerror}",
                hint=f"stepscope runs verify {self.id} lists every damaged file",
                where=str(path),
            ) from error


class JournalTail:
    """Follows a run that another process writes: each call returns the cases finished since the last."""

    def __init__(self, stored: StoredRun) -> None:
        self._stored = stored
        self._path = stored.folder / layout.JOURNAL_FILE
        self._offset = self._path.stat().st_size if self._path.exists() else 0

    def read_new(self) -> list[MeasuredCase]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        results, end = read_journal(data, where=str(self._path))
        self._offset += end
        return [self._stored.measured(result) for result in results]


def find_run(store: Path, name: str) -> StoredRun:
    """RUN as people write it: a folder, or the beginning of an id that only one run has."""
    as_path = Path(name)
    if (as_path / layout.PLAN_FILE).exists() or (as_path.is_dir() and ("/" in name or as_path.parent != Path())):
        return StoredRun(as_path)
    matches = [path for path in run_folders(store) if path.name.startswith(name)]
    if len(matches) == 1:
        return StoredRun(matches[0])
    exact = [path for path in matches if path.name == name]
    if exact:
        return StoredRun(exact[0])
    if matches:
        names = ", ".join(path.name for path in matches[:5])
        raise RunNotFoundError(
            f"{name!r} begins the id of {len(matches)} runs: {names}", hint="write more of the id", where=str(store)
        )
    raise RunNotFoundError(f"no run {name!r} in {store}", hint=f"stepscope runs list --store {store}", where=str(store))


def run_folders(store: Path) -> list[Path]:
    """Oldest first; ids begin with their time."""
    if not store.is_dir():
        return []
    return sorted(path for path in store.iterdir() if (path / layout.PLAN_FILE).exists())


def list_runs(store: Path) -> tuple[list[StoredRun], list[StepscopeError]]:
    """Every run that can be read, and what is wrong with the others."""
    runs: list[StoredRun] = []
    damaged: list[StepscopeError] = []
    for folder in run_folders(store):
        try:
            run = StoredRun(folder)
            _ = run.plan, run.run, run.results
        except BadInputError as error:
            damaged.append(error)
        else:
            runs.append(run)
    return runs, damaged


def remove_run(stored: StoredRun) -> None:
    """Gone in one step for every other process: renamed first, then deleted."""
    if stored.status == "running":
        raise RunBusyError(f"run {stored.id} is being written", hint="stop its process first", where=str(stored.folder))
    aside = stored.folder.with_name(f".removed-{stored.id}")
    stored.folder.rename(aside)
    shutil.rmtree(aside)


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong with a run folder."""

    file: str
    message: str


def verify_run(stored: StoredRun) -> list[Damage]:
    """Everything that is not as it was written; an empty list means every byte is vouched for."""
    damage: list[Damage] = []
    run: Run | None = None
    try:
        run = stored.run
        _ = stored.plan, stored.system
    except StepscopeError as error:
        damage.append(_damage(stored, error))
    if run is not None:
        damage.extend(_verify_files(stored.folder, run))
    try:
        results = stored.results
    except StepscopeError as error:
        return [*damage, _damage(stored, error)]
    for result in results:
        try:
            stored.samples(result)
        except StepscopeError as error:
            damage.append(_damage(stored, error))
    return damage


def _verify_files(folder: Path, run: Run) -> Iterator[Damage]:
    from stepscope.store.writer import hash_files

    found = hash_files(folder)
    for name, entry in run.files.items():
        if name not in found:
            yield Damage(file=name, message="is missing")
        elif found[name] != entry:
            yield Damage(
                file=name,
                message=f"changed: {entry.size_bytes} bytes, {entry.sha256[:12]}… then; "
                f"{found[name].size_bytes} bytes, {found[name].sha256[:12]}… now",
            )
    for name in sorted(found.keys() - run.files.keys()):
        yield Damage(file=name, message="was not part of the run")


def _damage(stored: StoredRun, error: StepscopeError) -> Damage:
    file = (error.where or "").removeprefix(f"{stored.folder}/") or stored.id
    return Damage(file=file, message=error.message)
