"""Output of nccl-tests and rccl-tests, as text or JSON, read and made into runs. No torch."""

from stepscope.formats.nccl_tests.importing import (
    VERB,
    PreparedImport,
    find_operation,
    import_nccl_tests,
    parse_nccl_output,
    prepare_import,
    write_import,
)
from stepscope.formats.nccl_tests.json_file import parse_nccl_json
from stepscope.formats.nccl_tests.output import OPERATIONS, NcclOutput, NcclRank, NcclRow, Operation, Placement
from stepscope.formats.nccl_tests.text import parse_nccl_text

__all__ = [
    "OPERATIONS",
    "VERB",
    "NcclOutput",
    "NcclRank",
    "NcclRow",
    "Operation",
    "Placement",
    "PreparedImport",
    "find_operation",
    "import_nccl_tests",
    "parse_nccl_json",
    "parse_nccl_output",
    "parse_nccl_text",
    "prepare_import",
    "write_import",
]
