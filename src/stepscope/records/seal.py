"""A hash inside the document that it covers, as its last field: a reader needs no other file to see a change.

A seal detects damage and edits by hand, not forgery: anyone who can write the file can compute it.
"""

from __future__ import annotations

import hashlib
import re

import msgspec

from stepscope.core.errors import CorruptRunError

SCHEMA_VERSION = 3
"""Format of every record that is written."""
SEALED_FROM = 2
"""Documents of older formats have no seal."""
_SEALED = re.compile(rb'(?P<body>\{.*),"seal":"(?P<seal>[0-9a-f]{64})"\}', re.DOTALL)


class _Version(msgspec.Struct):
    schema_version: int = SEALED_FROM
    """Records without a version of their own, such as failures, came to be sealed with this one."""


def add_seal(document: bytes, after: str = "") -> bytes:
    """An encoded object with its seal; `after` binds it to another one, by that one's seal."""
    return b'%s,"seal":"%s"}' % (document[:-1], _hash(document[:-1], after).encode())


def read_seal(document: bytes) -> str:
    """The seal of what `add_seal` made."""
    return document[-66:-2].decode()


def ends_with_seal(document: bytes) -> bool:
    """Whether a seal stands at the end, right or not."""
    return _SEALED.fullmatch(document) is not None


def check_seal(document: bytes, *, where: str, after: str = "", lacking_allowed: bool = False) -> str | None:
    """The seal; None for documents of formats that had none. Raises CorruptRunError where it is broken or missing.

    `lacking_allowed`: for records without a version, where older ones without a seal may stand.
    """
    found = _SEALED.fullmatch(document)
    if found is not None and found["seal"].decode() == _hash(found["body"], after):
        return found["seal"].decode()
    try:
        version = msgspec.json.decode(document, type=_Version).schema_version
    except (msgspec.MsgspecError, ValueError, RecursionError):
        version = SEALED_FROM
    if found is None and (not SEALED_FROM <= version <= SCHEMA_VERSION or lacking_allowed):
        return None
    raise CorruptRunError(
        "this is not what was written: it was changed or cut off afterwards",
        hint="take the run from a copy; `stepscope runs verify` lists everything that is damaged",
        where=where,
    )


def _hash(body: bytes, after: str) -> str:
    return hashlib.sha256(after.encode() + body).hexdigest()
