"""Collective costs as a file: one versioned JSON document that git can hold and a person can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from stepscope.core.errors import BadInputError, NewerVersionError, UsageError
from stepscope.core.files import write_output
from stepscope.costs.collective import CollectiveCost
from stepscope.store import utc_now

FORMAT_VERSION = 1
_RECORD = "collective_table"


class CollectiveTable(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag=_RECORD):
    schema_version: int = FORMAT_VERSION
    created_at: str
    """UTC, ISO 8601."""
    costs: list[CollectiveCost]


class _Header(msgspec.Struct):
    record: str
    schema_version: int


def require_table_name(path: Path) -> None:
    """Refuse a name that says the file is something else."""
    if path.suffix != ".json":
        raise UsageError("a collective table is a .json file", hint="name it so", where=str(path))


def write_collective_table(path: Path, costs: Sequence[CollectiveCost]) -> CollectiveTable:
    """By rename: the file is as it was, or whole."""
    require_table_name(path)
    table = CollectiveTable(created_at=utc_now(), costs=list(costs))
    write_output(path, msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n", make_folders=True)
    return table


def read_collective_table(path: Path) -> CollectiveTable:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _bad(f"the table cannot be read: {error.strerror}", path) from error
    try:
        header = msgspec.json.decode(data, type=_Header)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _bad(f"this is not a collective table: {error}", path) from error
    if header.record != _RECORD:
        raise _bad(f"the file holds a {header.record!r} record where a {_RECORD!r} belongs", path)
    if header.schema_version > FORMAT_VERSION:
        raise NewerVersionError(
            f"this table was written in format {header.schema_version}; this Stepscope reads up to {FORMAT_VERSION}",
            hint="upgrade Stepscope: pip install --upgrade stepscope",
            where=str(path),
        )
    if header.schema_version < 1:
        raise _bad(f"this table has format {header.schema_version}, which no release wrote", path)
    try:
        return msgspec.json.decode(data, type=CollectiveTable)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _bad(f"this table breaks its format: {error}", path) from error


def _bad(message: str, path: Path) -> BadInputError:
    return BadInputError(message, hint="stepscope costs fit-collective RUN --output FILE makes one", where=str(path))


def find_cost(
    table: CollectiveTable,
    *,
    operation: str,
    members: int,
    backend: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    timing: str | None = None,
    system: str | None = None,
    variant: Mapping[str, str] | None = None,
) -> CollectiveCost:
    """The one cost that answers; UsageError where none or several do. Nothing is guessed for another group size.

    What is left None may be anything, but `variant`: None is the operation in its usual form. `system` is a name or a
    fingerprint.
    """
    wanted = {"backend": backend, "dtype": dtype, "device": device, "timing": timing}
    found = [
        cost
        for cost in table.costs
        if (cost.operation, cost.members) == (operation, members)
        and all(value in (None, getattr(cost, name)) for name, value in wanted.items())
        and system in (None, cost.system, cost.fingerprint)
        and cost.variant == dict(variant or {})
    ]
    if len(found) == 1:
        return found[0]
    given = [value for value in (*wanted.values(), system) if value]
    given += [f"{name}={value}" for name, value in (variant or {}).items()]
    asked = ", ".join([operation, f"{members} ranks", *given])
    if not found:
        known = "; ".join(dict.fromkeys(cost.label for cost in table.costs)) or "nothing"
        raise UsageError(f"the table has no cost of {asked}", hint=f"it has: {known}")
    several = "; ".join(
        f"{cost.label} ({cost.device}, {cost.timing}) on {cost.system} ({cost.fingerprint or 'no fingerprint'})"
        for cost in found
    )
    raise UsageError(
        f"{len(found)} costs of the table answer to {asked}: {several}",
        hint="name the backend, the dtype, the device, the timing or the system too",
    )
