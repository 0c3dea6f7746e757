"""The compiled scanner of Chrome traces: from text to numbers in one pass over the bytes.

It reads what writers of traces write. A record with anything unusual (another phase, a missing field, an exponent in a
time, …) is not touched: its place is noted and the tolerant parser takes it. So the two together read everything, and
this part stays small.

Most of a trace is the same text again and again: what stands between one value and the next. The scanner remembers, for
each key, the two latest texts that followed its value (up to the next value) and compares eight bytes at once instead
of reading them one by one; only what differs is taken apart.

Everything it needs lies in a workspace of 64-bit numbers (`Field` says what is where; many are addresses of arrays),
and places in the text are addresses: see the module json_text for the reason.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from stepscope.formats.machine_code import part
from stepscope.formats.nesting import walk_stack
from stepscope.formats.readers.kineto.json_text import (
    BRACE,
    BRACE_END,
    BRACKET,
    COLON,
    COMMA,
    MINUS,
    NEWLINE,
    QUOTE,
    SPACE,
    UNKNOWN_KEY,
    ZERO,
    byte_at,
    find_key,
    has_sound_escapes,
    hash_text,
    is_json,
    is_utf8,
    is_whole,
    nested_end,
    number_at,
    parse_number,
    parse_time,
    put_byte,
    put_number,
    put_real,
    record_end,
    same_bytes,
    skip_space,
    string_end,
    value_end,
    word_at,
)
from stepscope.formats.readers.kineto.scanner import (
    ARGS,
    ARGUMENTS_TEXT,
    CAT,
    DUR,
    ESCAPED_TEXT,
    FIRST_ARGUMENT,
    FORM_FLOAT,
    FORM_IGNORED,
    FORM_INT,
    FORM_TEXT,
    JSON_TEXT,
    LITERAL_BYTES,
    NAME,
    PH,
    PID,
    REAL,
    THREAD_LIMIT,
    THREAD_SLOT_COUNT,
    TID,
    TS,
    WHOLE,
    WORDS,
    Field,
)
from stepscope.formats.readers.kineto.tolerant import MEMORY_EVENT, NO_STREAM
from stepscope.formats.timeline import DEVICE_ANNOTATION, DEVICE_KINDS, INSTANT, KERNEL, MEMORY, SET, SYNC

(
    ROWS, TEXTS, POOL_USED, THREADS, ODD, LOOKED, KEY_SLOTS, KEY_MASK, KEY_BYTES, KEY_BEGIN, KEY_COLUMN, KEY_FORM,
    CATEGORY_SLOTS, CATEGORY_MASK, CATEGORY_BYTES, CATEGORY_BEGIN, CATEGORY_KIND, LITERALS, LITERAL_SIZE,
    LITERAL_KEY, SLOTS, SLOT_MASK, POOL, BOUNDS, ESCAPED, THREAD_SLOTS, THREAD_CODES, TABLE, FLOATS, ODD_LIST, WRITTEN,
) = (8 * int(field) for field in Field)  # fmt: skip
"""Bytes from the beginning of the workspace, in the order of `Field`."""
WIDTH, FLOAT_WIDTH, THREAD_MASK = len(WHOLE), len(REAL), THREAD_SLOT_COUNT - 1
START_AT, END_AT, KIND_AT, NAME_AT, THREAD_AT, DEVICE_AT, STREAM_AT, ARGUMENTS_AT, WAIT_STREAM_AT = (
    8 * WHOLE.index(name)
    for name in ("start_ns", "end_ns", "kind", "name", "thread", "device", "stream", "arguments", "wait_stream")
)
"""Bytes from the beginning of a row."""

_FIRST_DEVICE_KIND, _LAST_DEVICE_KIND = min(DEVICE_KINDS), max(DEVICE_KINDS)
assert tuple(range(KERNEL, SET + 1)) == DEVICE_KINDS

START_OF_RECORD = len(WORDS)
# Behind START_OF_RECORD: after an unknown key of a record and of its arguments, and at the start of the arguments.
START_OF_ARGUMENTS = 3

# What `_next_key` answers beside a key's number and UNKNOWN_KEY.
END, BROKEN = -2, -3

NO_TIME = 1 << 62
"""No time reaches it."""
ARROWS = (115, 116, 102)
"""Phases s, t and f."""

_MEMORY_NAME = np.uint64(int.from_bytes(MEMORY_EVENT.encode(), "little"))


@part
def _intern(work: int, begin: int, end: int, escaped: int) -> int:
    """Number of this text among all texts; new ones are checked and copied into the pool (−1: it is not sound)."""
    slots, mask = number_at(work + SLOTS), number_at(work + SLOT_MASK)
    pool, bounds, flags = number_at(work + POOL), number_at(work + BOUNDS), number_at(work + ESCAPED)
    length = end - begin
    place = (hash_text(begin, end) ^ (escaped * 7919)) & mask
    while True:
        code = number_at(slots + 8 * place) - 1
        if code < 0:
            break
        known = number_at(bounds + 8 * code)
        if (
            number_at(bounds + 8 * code + 8) - known == length
            and byte_at(flags + code) == escaped
            and same_bytes(begin, pool + known, length)
        ):
            return code
        place = (place + 1) & mask
    if (
        not is_utf8(begin, end)
        or (escaped == ESCAPED_TEXT and not has_sound_escapes(begin, end))
        or (escaped == JSON_TEXT and not is_json(begin, end))
    ):
        return -1
    code = number_at(work + TEXTS)
    used = number_at(work + POOL_USED)
    for i in range(length):
        put_byte(pool + used + i, byte_at(begin + i))
    put_number(bounds + 8 * code + 8, used + length)
    put_byte(flags + code, escaped)
    put_number(slots + 8 * place, code + 1)
    put_number(work + TEXTS, code + 1)
    put_number(work + POOL_USED, used + length)
    return code


@part
def _learn_key(work: int, place: int, size: int, before: int, in_record: int) -> tuple[int, int]:
    """As `_next_key`, byte by byte; what stood there is remembered."""
    begin = place
    place = skip_space(place, size)
    if place >= size:
        return BROKEN, place
    if byte_at(place) == BRACE_END:
        return END, place + 1
    first = before == START_OF_RECORD + (0 if in_record == 1 else START_OF_ARGUMENTS)
    if not first:
        if byte_at(place) != COMMA:
            return BROKEN, place
        place = skip_space(place + 1, size)
    if place >= size or byte_at(place) != QUOTE:
        return BROKEN, place
    key_at = place + 1
    key_end, escaped = string_end(key_at, size)
    if key_end < 0 or escaped == 1:
        return BROKEN, place
    place = skip_space(key_end + 1, size)
    if place >= size or byte_at(place) != COLON:
        return BROKEN, place
    place = skip_space(place + 1, size)
    if place >= size:
        return BROKEN, place
    key = find_key(key_at, key_end, work + KEY_SLOTS)
    if key >= 0 and (key < FIRST_ARGUMENT) != (in_record == 1):
        key = UNKNOWN_KEY
    length = place - begin
    if key >= 0 and length <= LITERAL_BYTES:
        # The latest first, the one before kept: two kinds of records often take turns.
        sizes, keys = number_at(work + LITERAL_SIZE) + 16 * before, number_at(work + LITERAL_KEY) + 16 * before
        latest = number_at(work + LITERALS) + 2 * before * LITERAL_BYTES
        put_number(sizes + 8, number_at(sizes))
        put_number(keys + 8, number_at(keys))
        for i in range(0, LITERAL_BYTES, 8):
            put_number(latest + LITERAL_BYTES + i, number_at(latest + i))
        for i in range(length):
            put_byte(latest + i, byte_at(begin + i))
        put_number(sizes, length)
        put_number(keys, key)
    return key, place


@part
def _next_key(work: int, place: int, size: int, before: int, in_record: int) -> tuple[int, int]:
    """From behind the value of key `before` to the next value: its key and its place."""
    sizes, keys = number_at(work + LITERAL_SIZE) + 16 * before, number_at(work + LITERAL_KEY) + 16 * before
    latest = number_at(work + LITERALS) + 2 * before * LITERAL_BYTES
    length = number_at(sizes)
    if length and place + length <= size and same_bytes(place, latest, length):
        return number_at(keys), place + length
    length = number_at(sizes + 8)
    if length and place + length <= size and same_bytes(place, latest + LITERAL_BYTES, length):
        return number_at(keys + 8), place + length
    return _learn_key(work, place, size, before, in_record)


@part
def _read_arguments(work: int, place: int, size: int, row: int, reals: int, record: int) -> tuple[int, int]:
    """From the opening brace to behind the closing one (−1: something unusual), and whether every key was known (1).

    `row` and `reals` are where this row's numbers are written.
    """
    known = 1
    before = START_OF_RECORD + START_OF_ARGUMENTS
    columns, forms = number_at(work + KEY_COLUMN), number_at(work + KEY_FORM)
    place += 1
    while True:
        key, place = _next_key(work, place, size, before, 0)
        if key == END:
            return place, known
        if key == BROKEN:
            return -1, known
        if key == UNKNOWN_KEY:
            known = 0
            before = START_OF_RECORD + 2
            place = value_end(place, size)
            if place < 0:
                return -1, known
            continue
        before = key
        form = number_at(forms + 8 * key)
        column = number_at(columns + 8 * key)
        cell = row + 8 * column
        fresh = True
        if form != FORM_IGNORED:
            # Of two spellings of one argument the first counts, of one key twice the last: that one is given away.
            note = number_at(work + WRITTEN) + 8 * (column if form != FORM_FLOAT else WIDTH + column)
            written = number_at(note)
            if written == 256 * record + key:
                return -1, known
            fresh = written >> 8 != record
            if fresh:
                put_number(note, 256 * record + key)
        if form == FORM_INT:
            quoted = 1 if byte_at(place) == QUOTE else 0
            number, decimals, end = parse_number(place + quoted, size)
            if end < 0 or decimals >= 0 or (quoted == 1 and byte_at(end) != QUOTE):
                return -1, known
            place = end + quoted
            if fresh:
                put_number(cell, number)
        elif form == FORM_TEXT:
            escaped = JSON_TEXT
            if byte_at(place) == QUOTE:
                begin = place + 1
                end, escaped = string_end(begin, size)
                place = end + 1
            elif byte_at(place) in (BRACE, BRACKET):
                begin = place
                end = nested_end(place, size)
                place = end
            else:
                return -1, known
            if end < 0:
                return -1, known
            if fresh:
                code = _intern(work, begin, end, escaped)
                if code < 0:
                    return -1, known
                put_number(cell, code)
        elif form == FORM_FLOAT:
            number, decimals, end = parse_number(place, size)
            if end < 0 or end - place > 16:
                return -1, known
            # Both are whole numbers that doubles hold: the quotient is the nearest double.
            scale = 1.0
            for _ in range(max(decimals, 0)):
                scale *= 10.0
            place = end
            if fresh:
                put_real(reals + 8 * column, number / scale)
        else:
            place = value_end(place, size)
            if place < 0:
                return -1, known


@part
def _clear(row: int, reals: int) -> None:
    for column in range(WIDTH):
        put_number(row + 8 * column, -1)
    for column in range(FLOAT_WIDTH):
        put_real(reals + 8 * column, np.nan)


@part
def _find_thread(work: int, pid_begin: int, pid_end: int, tid_begin: int, tid_end: int) -> int:
    """Number of a thread; −1 where there is no room for one more."""
    pid = _intern(work, pid_begin, pid_end, 0)
    tid = _intern(work, tid_begin, tid_end, 0)
    slots, mask = number_at(work + THREAD_SLOTS), THREAD_MASK
    codes = number_at(work + THREAD_CODES)
    spot = (pid * 7919 + tid * 104729) & mask
    while True:
        thread = number_at(slots + 8 * spot) - 1
        if thread < 0:
            break
        if number_at(codes + 16 * thread) == pid and number_at(codes + 16 * thread + 8) == tid:
            return thread
        spot = (spot + 1) & mask
    thread = number_at(work + THREADS)
    if thread >= THREAD_LIMIT:
        return -1
    put_number(codes + 16 * thread, pid)
    put_number(codes + 16 * thread + 8, tid)
    put_number(slots + 8 * spot, thread + 1)
    put_number(work + THREADS, thread + 1)
    return thread


@part
def _has_its_type(key: int, begin: int, end: int) -> bool:
    """Whether phase, category and name are strings, and process and thread strings or numbers; all of them UTF-8."""
    first = byte_at(begin)
    if first == QUOTE:
        return is_utf8(begin, end)
    return key in (PID, TID) and (first == MINUS or ZERO <= first <= ZERO + 9)


@part
def _place_on_device(row: int, kind: int, pid: int, pid_end: int, tid: int, tid_end: int, size: int) -> None:
    device, stream = row + DEVICE_AT, row + STREAM_AT
    if number_at(device) == -1:
        number, decimals, end = parse_number(pid, size)
        if end == pid_end and decimals < 0 and 0 <= number < 65536:
            put_number(device, number)
    if number_at(stream) == -1 and kind != SYNC:
        number, decimals, end = parse_number(tid, size)
        if end == tid_end and decimals < 0:
            put_number(stream, number)
    if number_at(stream) == NO_STREAM:
        put_number(stream, -1)
    if number_at(row + WAIT_STREAM_AT) == NO_STREAM:
        put_number(row + WAIT_STREAM_AT, -1)


@part
def _read_fields(
    work: int, record: int, size: int, row: int, reals: int
) -> tuple[int, bool, int, int, tuple[int, int, int], tuple[int, int, int, int], tuple[int, int]]:
    """From the opening brace of a record to behind its closing one; whether all that stands there is usual; its phase
    (0: none) and kind (−1: unknown); where its name begins and ends and whether that has escapes; the same of process
    and thread; its time (below the limit where it has none) and duration (−1). Arguments are written into the row."""
    start_of_record = START_OF_RECORD
    usual, skip, filled = True, False, False
    phase, kind = 0, -1
    name_begin = name_end = name_escaped = -1
    pid_begin = pid_end = tid_begin = tid_end = -1
    time_ns, duration_ns = NO_TIME, -1
    before, seen = start_of_record, 0
    place = record + 1
    while True:
        key, place = _next_key(work, place, size, before, 1)
        if key == END:
            break
        value = place
        if key >= 0:
            usual = seen & (1 << key) == 0
            seen |= 1 << key
        if key == BROKEN or not usual:
            usual = False
            break
        if key == ARGS and not skip:
            if byte_at(value) != BRACE:
                usual = False
                break
            _clear(row, reals)
            filled = True
            place, known = _read_arguments(work, value, size, row, reals, record)
            if place >= 0 and known == 0:
                code = _intern(work, value, place, ARGUMENTS_TEXT)
                put_number(row + ARGUMENTS_AT, code)
                usual = code >= 0
        elif key == TS:
            time_ns, place = parse_time(value, size)
        elif key == DUR:
            duration_ns, place = parse_time(value, size)
        elif key == NAME and byte_at(value) == QUOTE:
            name_begin = value + 1
            name_end, name_escaped = string_end(name_begin, size)
            place = name_end + 1 if name_end >= 0 else -1
        else:
            place = value_end(value, size)
            if PH <= key <= TID and place >= 0:
                usual = _has_its_type(key, value, place)
            if key == PH:
                phase = byte_at(value + 1) if place - value == 3 else 0
                skip = phase in ARROWS
            elif key == CAT and place >= 0 and usual:
                number = find_key(value + 1, place - 1, work + CATEGORY_SLOTS)
                kind = number_at(number_at(work + CATEGORY_KIND) + 8 * number) if number >= 0 else -1
            elif key == PID:
                pid_begin, pid_end = value, place
            elif key == TID:
                tid_begin, tid_end = value, place
        if place < 0 or not usual:
            usual = False
            break
        before = key if key >= 0 else start_of_record + 1
    if usual and not filled and not skip:
        _clear(row, reals)
    name, thread = (name_begin, name_end, name_escaped), (pid_begin, pid_end, tid_begin, tid_end)
    return place, usual, phase, kind, name, thread, (time_ns, duration_ns)


@part
def _finish_row(
    work: int, row: int, size: int, phase: int, kind: int,
    name: tuple[int, int, int], thread: tuple[int, int, int, int], times: tuple[int, int],
) -> bool:  # fmt: skip
    """Write what is no argument into the row; False where the record is none that is understood here."""
    name_begin, name_end, name_escaped = name
    time_ns, duration_ns = times
    instant = phase == 105 and kind == INSTANT
    if not (
        ((phase == 88 and duration_ns >= 0) or instant)
        and time_ns != NO_TIME
        and kind >= 0
        and 0 <= name_end - name_begin < 65536
        and name_begin >= 0
        and thread[0] >= 0
        and thread[2] >= 0
    ):
        return False
    if _FIRST_DEVICE_KIND <= kind <= _LAST_DEVICE_KIND or kind in (DEVICE_ANNOTATION, SYNC):
        _place_on_device(row, kind, *thread, size)
    else:
        put_number(row + STREAM_AT, -1)
        if instant and name_end - name_begin == 8 and word_at(name_begin) == _MEMORY_NAME:
            kind = MEMORY
        else:
            put_number(row + DEVICE_AT, -1)
        if not is_whole(thread[0], thread[1], size) or not is_whole(thread[2], thread[3], size):
            return False  # threads with anything but a whole number are few
        number = _find_thread(work, *thread)
        put_number(row + THREAD_AT, number)
        if number < 0:
            return False
    code = _intern(work, name_begin, name_end, name_escaped)
    put_number(row + START_AT, time_ns)
    put_number(row + END_AT, time_ns if instant else time_ns + duration_ns)
    put_number(row + KIND_AT, kind)
    put_number(row + NAME_AT, code)
    return code >= 0


def scan(work: int, begin: int, size: int) -> int:
    """Read whole records separated by commas from `begin` to `size` (addresses). Returns how far it came: `size` unless
    the text is broken there."""
    place = begin
    while True:
        while place < size and byte_at(place) in (SPACE, NEWLINE, 13, 9, COMMA):
            place += 1
        if place >= size:
            return size
        if byte_at(place) != BRACE:
            return place
        record, row_number = place, number_at(work + ROWS)
        row = number_at(work + TABLE) + 8 * row_number * WIDTH
        reals = number_at(work + FLOATS) + 8 * row_number * FLOAT_WIDTH
        place, usual, phase, kind, name, thread, times = _read_fields(work, record, size, row, reals)
        if usual and (phase in ARROWS or phase == 77):  # M: only names of threads matter
            usual = name[1] <= name[0] or (is_utf8(name[0], name[1]) and name[2] == 0)
            if usual and (phase != 77 or name[1] - name[0] != 11 or byte_at(name[0]) != 116):
                continue
            usual = False
        if usual and _finish_row(work, row, size, phase, kind, name, thread, times):
            put_number(work + ROWS, row_number + 1)
            continue
        # Not usual: give the record away whole.
        end, looked = record_end(record, size)
        if end < 0:
            put_number(work + LOOKED, looked)
            return record
        number = number_at(work + ODD)
        entry = number_at(work + ODD_LIST) + 24 * number
        put_number(entry, record - begin)
        put_number(entry + 8, end - begin)
        put_number(entry + 16, row_number)
        put_number(work + ODD, number + 1)
        place = end


_walk = part(walk_stack)


def walk_stack_at(order: Any, thread: Any, start: Any, end: Any, parent: Any, stack: Any, sizes: Any) -> int:
    """As `walk_stack`, on arrays by address; `sizes` holds the numbers of rows in `order` and in the other columns."""
    ordered, rows = sizes[0], sizes[1]
    columns = (carray(thread, rows), carray(start, rows), carray(end, rows), carray(parent, rows))
    return _walk(carray(order, ordered), *columns, carray(stack, ordered + 1))
