"""What a complete run vouches for: the hashes of its files, its counts, and the check of both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from stepscope.core.errors import CorruptRunError, StepscopeError
from stepscope.core.files import hash_file
from stepscope.records import FileEntry, Run
from stepscope.store import folder as layout
from stepscope.store.folder import whole_lines
from stepscope.store.reader import StoredRun


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong with a run folder."""

    file: str
    message: str


def verify_run(stored: StoredRun) -> list[Damage]:
    """Everything in a run's folder that is not as it was written; an empty list where all of it is.

    `stored`: the run, as `find_run` gives it.

    >>> stepscope.verify_run(stepscope.find_run("latest"))
    []
    """
    damage = {one.file: one for one in _verify_records(stored)}
    if layout.RUN_FILE not in damage and stored.run is not None:
        damage = {one.file: one for one in _verify_files(stored, stored.run)} | damage
    if not damage:
        damage = {one.file: one for one in (*_verify_samples(stored), *_verify_counts(stored))}
    return list(damage.values())


def _verify_records(stored: StoredRun) -> Iterator[Damage]:
    for name in ("run", "plan", "system", "communication", "journal", "failures"):
        try:
            getattr(stored, name)
        except StepscopeError as error:
            yield _damage(stored, error)
            if name == "plan":
                return  # the others are bound to it


def _verify_files(stored: StoredRun, run: Run) -> Iterator[Damage]:
    found = hash_files(stored.folder)
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


def _verify_samples(stored: StoredRun) -> Iterator[Damage]:
    for result in stored.results:
        try:
            stored.samples(result)
        except StepscopeError as error:
            yield _damage(stored, error)


def _verify_counts(stored: StoredRun) -> Iterator[Damage]:
    """What one file says twice over, or of another: the counts of run.json, and how far the samples reach."""
    if stored.run is not None:
        told = msgspec.structs.asdict(stored.run)
        for name, value in msgspec.structs.asdict(describe_run(stored, finished_at="", files={})).items():
            if name not in {"finished_at", "files"} and told[name] != value:
                yield Damage(
                    file=layout.RUN_FILE, message=f"{name} is {told[name]!r}, and the other files say {value!r}"
                )
        return
    for path in sorted((stored.folder / layout.SAMPLES_FOLDER).glob("*.jsonl")):
        name = f"{layout.SAMPLES_FOLDER}/{path.name}"
        vouched = stored.vouched_bytes(name)
        data = layout.read_evidence(path, offset=vouched, where=str(path)) or b""
        cases = {line.partition(b'"case":"')[2][:16] for _, line in whole_lines(data)}
        if len(cases) > 1:  # a writer puts the samples of one case down, then its line into the journal
            yield Damage(file=layout.JOURNAL_FILE, message=f"has lost lines: {name} holds {len(cases)} cases more")


def _damage(stored: StoredRun, error: StepscopeError) -> Damage:
    file = (error.where or "").removeprefix(f"{stored.folder}/") or stored.id
    return Damage(file=file, message=error.message)


def hash_files(folder: Path) -> dict[str, FileEntry]:
    """Every file of evidence: all but run.json, the locks, and what ranks write of themselves while they end."""
    entries = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        passing = {layout.RUN_FILE, layout.LOCK_FILE, layout.RUNNER_LOCK_FILE, layout.BEGUN_FILE}
        of_the_run = name not in passing and not path.name.endswith(".tmp")
        if path.is_file() and of_the_run and not name.startswith(f"{layout.RANKS_FOLDER}/"):
            entries[name] = FileEntry(size_bytes=path.stat().st_size, sha256=hash_file(path))
    return entries


def describe_run(stored: StoredRun, *, finished_at: str, files: dict[str, FileEntry]) -> Run:
    """The record of a run that is complete, from its other records."""
    plan, system, failures = stored.plan, stored.system, stored.failures
    if system is None:
        raise CorruptRunError(f"{layout.SYSTEM_FILE} is missing", where=str(stored.folder / layout.SYSTEM_FILE))
    states = [result.status for result in {result.case.key: result for result in stored.results}.values()]
    return Run(
        id=plan.run_id,
        kind=plan.kind,
        created_at=plan.created_at,
        finished_at=finished_at,
        tool_version=plan.tool_version,
        verb=plan.verb,
        command=plan.command,
        launcher=plan.launcher,
        world_size=plan.world_size,
        system_fingerprint=system.fingerprint,
        cases_ok=states.count("ok"),
        cases_failed=states.count("failed"),
        cases_skipped=states.count("skipped"),
        resumed=sum(failure.kind == "interrupted" for failure in failures),
        failures=failures,
        files=files,
    )
