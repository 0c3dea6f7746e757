"""Writing a run: samples first, then the journal line that vouches for them, and run.json last of all."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

import msgspec

from stepscope._version import __version__
from stepscope.core.errors import CorruptRunError, UsageError
from stepscope.core.files import write_file_atomically
from stepscope.records import (
    Case,
    CaseResult,
    Communication,
    Failure,
    Notice,
    Plan,
    RankSamples,
    Request,
    Run,
    SampleSlice,
    System,
    add_seal,
    encode_document,
    find_unstorable,
    read_seal,
)
from stepscope.store import folder as layout
from stepscope.store.folder import AppendFile
from stepscope.store.reader import StoredRun
from stepscope.store.verify import describe_run, hash_files


def create_run(
    store: Path,
    *,
    verb: str,
    name: str,
    command: Sequence[str],
    request: Request,
    cases: Sequence[Case],
    launcher: str = "inline",
    world_size: int = 1,
    hold: bool = False,
) -> Path:
    """Make the folder and write the plan into it; nothing is measured yet. Returns the folder.

    `hold`: this process will measure it; see `hold_run`.
    """
    keys = [case.key for case in cases]
    if len(set(keys)) != len(keys):
        doubled = next(case for i, case in enumerate(cases) if case.key in keys[:i])
        raise UsageError(f"the case {doubled.label} is asked for twice", hint="remove one of them")
    plan = Plan(
        run_id="",
        created_at=layout.utc_now(),
        tool_version=__version__,
        command=list(command),
        verb=verb,
        request=request,
        cases=list(cases),
        launcher=launcher,
        world_size=world_size,
    )
    encode_document(plan)  # refuses what cannot be stored, before there is a folder
    folder = layout.make_run_folder(store, name)
    plan = msgspec.structs.replace(plan, run_id=folder.name)
    if hold:
        layout.hold_run(folder)
    _write_record(folder / layout.PLAN_FILE, plan)
    return folder


class RunWriter:
    """The one process that writes a run. Opens a folder made by `create_run`, new or interrupted."""

    def __init__(self, folder: Path, *, measures: bool = True) -> None:
        """`measures` is False for who only notes how a run ended: that continues nothing."""
        self.folder = folder
        self._open = ExitStack()
        if (folder / layout.RUN_FILE).exists():
            raise UsageError(
                f"run {folder.name} is complete", hint="start a new one without --resume", where=str(folder)
            )
        layout.require_plain_folder(folder)
        self._open.enter_context(layout.hold_lock(folder))
        stored = StoredRun(folder)
        self.plan, self._plan_seal = stored.plan, stored.plan_seal
        continued = (folder / layout.JOURNAL_FILE).exists()
        self._journal = self._open_append(layout.JOURNAL_FILE)
        self._samples: dict[str, AppendFile] = {}
        self._take_up(stored)
        self._keeps_note = False
        self._deaths = _read_deaths(folder / layout.BEGUN_FILE)
        if continued and measures:
            message = f"continued after an interruption, {len(self._results)} of {len(self.plan.cases)} cases done"
            record_failure(folder, Failure(kind="interrupted", message=message, where=layout.utc_now()))

    def _take_up(self, stored: StoredRun) -> None:
        """Continue behind the last whole line; what a crash left after it was never evidence."""
        self._journal.cut(stored.journal.end)
        self._seal = stored.journal.seal or self._plan_seal
        self._results = {result.case.key: result for result in stored.results}
        for path in sorted((self.folder / layout.SAMPLES_FOLDER).glob("*.jsonl")):
            name = f"{layout.SAMPLES_FOLDER}/{path.name}"
            vouched = stored.vouched_bytes(name)
            if path.stat().st_size < vouched:
                raise CorruptRunError(
                    f"{name} is shorter than the journal says",
                    hint=f"stepscope runs verify {self.folder.name}",
                    where=str(path),
                )
            self._samples_file(name).cut(vouched)

    def _open_append(self, name: str) -> AppendFile:
        try:
            (self.folder / name).parent.mkdir(exist_ok=True)
            file = AppendFile(self.folder / name)
        except OSError as error:
            raise layout.cannot_write(self.folder / name, error) from error
        self._open.callback(file.close)
        return file

    def _samples_file(self, name: str) -> AppendFile:
        if name not in self._samples:
            self._samples[name] = self._open_append(name)
        return self._samples[name]

    def remaining(self) -> list[Case]:
        """The cases that are still to be measured."""
        return [case for case in self.plan.cases if case.key not in self._results]

    def begin(self, case: Case) -> int:
        """Note that the case is being measured now. Returns how often a process was killed in the middle of it.

        A case that kills every process would otherwise keep the others from ever being measured.
        """
        deaths = self._deaths.pop(case.key, 0)
        with suppress(OSError):  # a note for the next process, no evidence
            (self.folder / layout.BEGUN_FILE).write_bytes(msgspec.json.encode({case.key: deaths + 1}))
        return deaths

    def write_system(self, system: System) -> None:
        """On resume the machine must be the same one: cases of two systems never share a run."""
        path = self.folder / layout.SYSTEM_FILE
        if path.exists():
            before = StoredRun(self.folder).system or system
            then, now = (f"{one.fingerprint}/{one.configuration}" for one in (before, system))
            if then != now and self._results:
                raise UsageError(
                    f"this is not the system, or not the settings, the run began with ({then} then, {now} now)",
                    hint="start a new run without --resume; `stepscope compare` sets two systems side by side",
                    where=str(path),
                )
            return
        _write_record(path, system, after=self._plan_seal)

    def write_communication(self, communication: Communication) -> None:
        """For the ranks that are here now: a resumed run has others than before."""
        _write_record(self.folder / layout.COMMUNICATION_FILE, communication, after=self._plan_seal)

    def append(self, result: CaseResult, samples: Sequence[RankSamples] = ()) -> CaseResult:
        """Put one finished case on disk; when this returns, it survives anything."""
        result, samples = _storable(result, samples)
        slices = [self._append_samples(rank) for rank in samples]
        stored = msgspec.structs.replace(result, samples=slices)
        line = add_seal(encode_document(stored), self._seal)
        self._journal.append(line)
        self._seal = read_seal(line)
        self._results[result.case.key] = stored
        return stored

    def _append_samples(self, samples: RankSamples) -> SampleSlice:
        line = encode_document(samples)
        name = f"{layout.SAMPLES_FOLDER}/rank-{samples.rank}.jsonl"
        offset = self._samples_file(name).append(line)
        return SampleSlice(file=name, offset=offset, length=len(line), sha256=hashlib.sha256(line).hexdigest())

    def finish(self) -> Run:
        """Seal the run: hash every file, then write run.json by rename."""
        run = describe_run(StoredRun(self.folder), finished_at=layout.utc_now(), files=hash_files(self.folder))
        _write_record(self.folder / layout.RUN_FILE, run)
        return run

    def note_death(self) -> None:
        """Another process, without which the case cannot be measured, was killed: what `begin` has noted stays."""
        self._keeps_note = True

    def close(self) -> None:
        """A process that gets here was not killed."""
        if not self._keeps_note:
            with suppress(OSError):
                (self.folder / layout.BEGUN_FILE).unlink(missing_ok=True)
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _read_deaths(path: Path) -> dict[str, int]:
    """By case; empty where the last process ended by itself, or was killed while it wrote this."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, int])
    except (OSError, msgspec.DecodeError):
        return {}


def record_failure(folder: Path, failure: Failure) -> None:
    """Keep why a run ended early beside its evidence; called by a process that survived."""
    file = AppendFile(folder / layout.FAILURES_FILE)
    try:
        file.append(add_seal(encode_document(failure)))
    finally:
        file.close()


def _storable(result: CaseResult, samples: Sequence[RankSamples]) -> tuple[CaseResult, Sequence[RankSamples]]:
    """JSON has no infinities and no NaN: a time that is none fails its case, another fact is left out with a notice."""
    for rank in samples:
        odd = find_unstorable(msgspec.to_builtins(rank))
        if odd is not None:
            failure = Failure(kind="not_finite", message=f"{odd} of rank {rank.rank} is not a finite number")
            return msgspec.structs.replace(result, status="failed", failure=failure, observed=None), []
    observed = result.observed
    fields = observed.__struct_fields__ if observed is not None else ()
    odd_fields = [name for name in fields if find_unstorable(msgspec.to_builtins(getattr(observed, name)), name)]
    if observed is None or not odd_fields:
        return result, samples
    told = ", ".join(f"{name} = {value}" for name, value in result.facts.items() if find_unstorable(value, name))
    notice = Notice(kind="not_finite", message=f"not stored, as these are not finite numbers: {told}")
    kept = observed.without(odd_fields)
    return msgspec.structs.replace(result, observed=kept, notices=[*result.notices, notice]), samples


def _write_record(path: Path, record: msgspec.Struct, *, after: str = "") -> None:
    """`after`: the seal that this one is bound to."""
    try:
        write_file_atomically(path, add_seal(encode_document(record), after))
    except OSError as error:
        raise layout.cannot_write(path, error) from error
