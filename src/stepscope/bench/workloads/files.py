"""Files of a user that a case names, known by their content: they may change between planning and measuring."""

from __future__ import annotations

import hashlib
from pathlib import Path

from stepscope.core.errors import BadInputError

_LENGTH = 12


def hash_content(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_LENGTH]


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:_LENGTH]


def require_unchanged(path: Path, known: str) -> None:
    """Results of one run are of one content."""
    if not path.is_file():
        raise BadInputError("the file is gone since the run was planned", hint="put it back", where=str(path))
    if hash_file(path) != known:
        raise BadInputError(
            "the file has changed since the run was planned",
            hint="put the old one back, or start a new run",
            where=str(path),
        )
