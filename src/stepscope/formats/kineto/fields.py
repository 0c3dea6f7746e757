"""What the fields of a Kineto (Chrome) trace mean: categories to kinds, arguments to columns. Both readers use it."""

from __future__ import annotations

import re
from enum import IntEnum, auto
from pathlib import Path

from stepscope.formats.timeline import (
    ANNOTATION,
    COPY,
    COUNTER,
    DEVICE_ANNOTATION,
    INSTANT,
    KERNEL,
    OPERATOR,
    OTHER,
    OVERHEAD,
    PYTHON,
    RUNTIME,
    SET,
    SYNC,
)

KIND_OF_CATEGORY = {
    "cpu_op": OPERATOR,
    "operator": OPERATOR,
    "cuda_runtime": RUNTIME,
    "cuda_driver": RUNTIME,
    "runtime": RUNTIME,
    "hip_runtime": RUNTIME,
    "hip_driver": RUNTIME,
    "gpu_runtime": RUNTIME,
    "xpu_runtime": RUNTIME,
    "xpu_driver": RUNTIME,
    "mtia_runtime": RUNTIME,
    "hpu_runtime": RUNTIME,
    "glow_runtime": RUNTIME,
    "privateuse1_runtime": RUNTIME,
    "privateuse1_driver": RUNTIME,
    "kernel": KERNEL,
    "mtia_ccp_events": KERNEL,
    "mtia_workloadd": OTHER,
    "hpu_op": KERNEL,
    "gpu_memcpy": COPY,
    "memcpy": COPY,
    "gpu_memset": SET,
    "memset": SET,
    "cuda_sync": SYNC,
    "cuda_event": SYNC,
    "user_annotation": ANNOTATION,
    "gpu_user_annotation": DEVICE_ANNOTATION,
    "python_function": PYTHON,
    "cpu_instant_event": INSTANT,
    "overhead": OVERHEAD,
    "cuda_profiler_range": COUNTER,
    "trace": OTHER,
}
"""Lower-cased categories of Kineto and of its older and other-vendor writers."""

MEMORY_EVENT = "[memory]"
"""Name of the instants that record an allocation or a release."""

COLUMN_OF_ARGUMENT = {
    "correlation": "correlation",
    "External id": "external_id",
    "External Id": "external_id",
    "external id": "external_id",
    "Record function id": "record_function_id",
    "Ev Idx": "event_index",
    "Sequence number": "sequence",
    "Fwd thread id": "forward_thread",
    "device": "device",
    "stream": "stream",
    "Input Dims": "shapes",
    "Input dims": "shapes",
    "Input type": "types",
    "Input Strides": "strides",
    "Concrete Inputs": "values",
    "bytes": "bytes",
    "Bytes": "bytes",
    "Collective name": "collective",
    "Process Group Name": "group",
    "Process Group Description": "group_description",
    "Process Group Ranks": "group_ranks",
    "Group size": "group_size",
    "In msg nelems": "in_elements",
    "Out msg nelems": "out_elements",
    "dtype": "dtype",
    "In split size": "in_splits",
    "Out split size": "out_splits",
    "Seq": "collective_sequence",
    "Src Rank": "peer",
    "Dst Rank": "peer",
    "Global rank start": "rank_start",
    "Global rank stride": "rank_stride",
    "cuda_sync_kind": "sync_kind",
    "wait_on_stream": "wait_stream",
    "wait_on_cuda_event_record_corr_id": "wait_correlation",
    "grid": "grid",
    "block": "block",
    "registers per thread": "registers",
    "shared memory": "shared_memory",
    "blocks per SM": "blocks_per_sm",
    "warps per SM": "warps_per_sm",
    "est. achieved occupancy %": "occupancy",
    "graph id": "graph",
    "graph node id": "graph_node",
    "Addr": "address",
    "Total Allocated": "total_allocated",
    "Total Reserved": "total_reserved",
    "Device Id": "device",
}
"""Arguments that have a column. Where two spellings stand in one event, the first one counts."""

WITHOUT_COLUMN = frozenset(
    {
        "queued",
        "context",
        "cbid",
        "memory bandwidth (GB/s)",
        "Device Type",
        "wait_on_cuda_event_id",
        "Rank",
        "Python id",
        "Python parent id",
        "Python module id",
        "Python thread",
    }
)
"""Arguments that are always the same, repeat another (bandwidth is bytes over time) or mean nothing elsewhere.
Any argument that is neither here nor above makes the whole object be kept in `arguments`."""

NO_STREAM = 4294967295
"""How older writers spell stream −1."""

_RANK_IN_NAME = (
    re.compile(r"(?:rank|worker|trace_rank)[-_.]?(\d+)", re.IGNORECASE),
    re.compile(r"[-_.](\d+)(?:_\d+)?(?:\.pt)?(?:\.trace)?(?:\.json|\.et|\.sqlite|\.csv)?(?:\.gz|\.zst)?$"),
)


def rank_in_name(path: Path) -> int | None:
    """The rank a file's name speaks of; used only where its content says nothing."""
    for pattern in _RANK_IN_NAME:
        found = pattern.search(path.name)
        if found and int(found[1]) < 1 << 20:
            return int(found[1])
    return None


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
