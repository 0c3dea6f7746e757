"""Who took part in a communication run, and what carried the data."""

from __future__ import annotations

from typing import Any

import msgspec

from stepscope.records.seal import SCHEMA_VERSION


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    host: str
    pid: int
    local_rank: int
    device: str
    name: str | None = None
    """Of the device, where it has one."""


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
