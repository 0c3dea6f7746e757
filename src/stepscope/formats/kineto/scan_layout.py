"""What the compiled scanner and its caller agree on: the workspace, keys, and forms of columns and texts."""

from __future__ import annotations

from enum import IntEnum, auto


class Field(IntEnum):
    """What stands where in the workspace."""

    ROWS = 0
    TEXTS = auto()
    POOL_USED = auto()
    THREADS = auto()
    ODD = auto()
    LOOKED = auto()
    # known keys; slots hold numbers + 1
    KEY_SLOTS = auto()
    KEY_MASK = auto()
    KEY_BYTES = auto()
    KEY_BEGIN = auto()
    KEY_COLUMN = auto()
    KEY_FORM = auto()
    CATEGORY_SLOTS = auto()
    CATEGORY_MASK = auto()
    CATEGORY_BYTES = auto()
    CATEGORY_BEGIN = auto()
    CATEGORY_KIND = auto()
    # what followed each key lately
    LITERALS = auto()
    LITERAL_SIZE = auto()
    LITERAL_KEY = auto()
    START_OF_RECORD = auto()
    # growing text pool
    SLOTS = auto()
    SLOT_MASK = auto()
    POOL = auto()
    BOUNDS = auto()
    ESCAPED = auto()
    # threads
    THREAD_SLOTS = auto()
    THREAD_MASK = auto()
    THREAD_CODES = auto()
    THREAD_LIMIT = auto()
    # output
    TABLE = auto()
    WIDTH = auto()
    FLOATS = auto()
    FLOAT_WIDTH = auto()
    ODD_LIST = auto()
    WRITTEN = auto()
    # columns by number, −1 where not wanted
    START_AT = auto()
    END_AT = auto()
    KIND_AT = auto()
    NAME_AT = auto()
    THREAD_AT = auto()
    DEVICE_AT = auto()
    STREAM_AT = auto()
    ARGUMENTS_AT = auto()
    WAIT_STREAM_AT = auto()
    WANTS_THREADS = auto()


# Forms of columns.
FORM_INT, FORM_TEXT, FORM_FLOAT, FORM_IGNORED = range(4)

# Keys of a record itself; those of its arguments follow.
RECORD_KEYS = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args", "id", "bp", "s")
PH, CAT, NAME, PID, TID, TS, DUR, ARGS = range(8)
FIRST_ARGUMENT = len(RECORD_KEYS)

# What a text is: a string as it stands or with escapes, a JSON list or object, or arguments whose keys were all read.
PLAIN_TEXT, ESCAPED_TEXT, JSON_TEXT, ARGUMENTS_TEXT = range(4)

LITERAL_BYTES = 96
"""Longer stretches between two values are not remembered."""
