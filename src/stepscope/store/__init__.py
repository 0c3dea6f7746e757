"""Run folders: journal, resume, hashes, index and SQL."""

from stepscope.store.folder import RANKS_FOLDER, TRACES_FOLDER, resolve_store, utc_now
from stepscope.store.kernel_table import (
    KernelRow,
    read_kernel_table,
    rows_of_run,
    write_kernel_table,
    write_parquet,
)
from stepscope.store.reader import (
    JournalTail,
    StoredRun,
    find_newest,
    find_run,
    find_run_folder,
    list_runs,
    read_each,
    remove_run,
    run_folders,
)
from stepscope.store.verify import Damage, verify_run
from stepscope.store.view import TPOT, TTFT, Ceilings, MeasuredCase, find_ceilings
from stepscope.store.writer import RunWriter, create_run, record_failure

__all__ = [
    "RANKS_FOLDER", "TPOT", "TRACES_FOLDER", "TTFT", "Ceilings", "Damage", "JournalTail", "KernelRow", "MeasuredCase",
    "RunWriter", "StoredRun", "create_run", "find_ceilings", "find_newest", "find_run", "find_run_folder",
    "list_runs", "read_each", "read_kernel_table", "record_failure", "remove_run", "resolve_store", "rows_of_run",
    "run_folders", "utc_now", "verify_run", "write_kernel_table", "write_parquet",
]  # fmt: skip
