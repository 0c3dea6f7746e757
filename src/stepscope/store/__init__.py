"""Run folders: journal, resume, hashes, index and SQL."""

from stepscope.store.folder import RANKS_FOLDER, resolve_store, utc_now
from stepscope.store.reader import (
    Damage,
    JournalTail,
    RunStatus,
    StoredRun,
    find_run,
    list_runs,
    remove_run,
    run_folders,
    verify_run,
)
from stepscope.store.sql import TABLES, QueryResult, format_tables_markdown, query_runs
from stepscope.store.view import MeasuredCase
from stepscope.store.writer import RunWriter, create_run, record_failure

__all__ = [
    "RANKS_FOLDER",
    "TABLES",
    "Damage",
    "JournalTail",
    "MeasuredCase",
    "QueryResult",
    "RunStatus",
    "RunWriter",
    "StoredRun",
    "create_run",
    "find_run",
    "format_tables_markdown",
    "list_runs",
    "query_runs",
    "record_failure",
    "remove_run",
    "resolve_store",
    "run_folders",
    "utc_now",
    "verify_run",
]
