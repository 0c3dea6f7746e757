"""One execution of one or more cases on one system: what was asked (plan) and what came of it (run)."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from stepscope.records.case import Case, Failure
from stepscope.records.seal import SCHEMA_VERSION

RunKind = Literal["measured", "predicted"]


class Plan(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="plan"):
    """Written before the first case, so that an interrupted run can be continued without its command line."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    created_at: str
    """UTC, ISO 8601."""
    tool_version: str
    command: list[str]
    """As typed, for people; nothing is parsed out of it."""
    verb: str
    """Which worker continues it: `ops`, `comms`, `workload` …"""
    request: dict[str, Any]
    """The worker's own description of the work; plain values."""
    cases: list[Case]
    kind: RunKind = "measured"
    launcher: str = "inline"
    world_size: int = 1


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    size_bytes: int
    sha256: str


class Run(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="run"):
    """Written last, by rename: a folder that has it is complete."""

    schema_version: int = SCHEMA_VERSION
    id: str
    kind: RunKind = "measured"
    created_at: str
    finished_at: str
    tool_version: str
    verb: str
    command: list[str]
    launcher: str
    world_size: int
    system_fingerprint: str
    cases_ok: int
    cases_failed: int
    cases_skipped: int
    resumed: int = 0
    """How often it was continued after an interruption."""
    failures: list[Failure] = []
    """What ended the attempts before the last one."""
    files: dict[str, FileEntry] = {}
    """Every file of evidence with its hash; logs of ranks are not evidence."""


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    host: str
    pid: int
    local_rank: int
    device: str
    name: str | None = None
    """Name of the device, where it has one."""


class Communication(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="communication"):
    """Written by rank 0 when all have joined."""

    schema_version: int = SCHEMA_VERSION
    backend: str
    library: dict[str, str]
    """As loaded: `name`, `version`, and `file` where it is known."""
    settings: dict[str, str] = {}
    """Environment variables that choose algorithms, protocols and interfaces."""
    ranks: list[RankPlace] = []
    cluster: dict[str, Any] | None = None
    """The cluster file or host file the ranks were started by."""
