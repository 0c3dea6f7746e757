"""What the rooms hand to each other: plain, versioned, without torch, numpy or I/O.

The modules of structs evaluate their annotations when they are imported. From texts, which `from __future__ import
annotations` would leave, msgspec would have to: that takes three times as long before the first record is read.
"""

from stepscope.records.case import (
    Benchmark,
    Case,
    CaseResult,
    Failure,
    KernelUse,
    LatencyTarget,
    Notice,
    RankSamples,
    Reading,
    SampleSlice,
    Score,
    Status,
    describe_exception,
    is_out_of_memory,
    slowest_rank_seconds,
)
from stepscope.records.codec import UNREADABLE, encode_document, find_unstorable, parse_document, parse_samples
from stepscope.records.kinds import Observed, Parameter, Scalar, Spec
from stepscope.records.request import (
    QUICK,
    REQUESTS,
    BatchSearch,
    BisectionRequest,
    Check,
    CommunicationRequest,
    ImportedFile,
    ImportedRank,
    ImportRequest,
    MeasureSettings,
    OperatorRequest,
    Request,
    ToolSummary,
    TracedCallRecord,
    TracedCallsRecord,
    UntilDecided,
    WorkloadRequest,
    make_request,
)
from stepscope.records.run import (
    Communication,
    Container,
    Cpu,
    FileEntry,
    Git,
    Gpu,
    Host,
    Link,
    Load,
    Memory,
    Nic,
    NumaNode,
    Plan,
    RankPlace,
    Run,
    System,
)
from stepscope.records.seal import add_seal, check_seal, ends_with_seal, read_seal

__all__ = [
    "QUICK", "REQUESTS", "UNREADABLE", "BatchSearch", "Benchmark", "BisectionRequest", "Case", "CaseResult",
    "Check", "Communication", "CommunicationRequest", "Container", "Cpu", "Failure", "FileEntry", "Git", "Gpu", "Host",
    "ImportRequest", "ImportedFile", "ImportedRank", "KernelUse", "LatencyTarget", "Link", "Load",
    "MeasureSettings", "Memory", "Nic", "Notice", "NumaNode", "Observed", "OperatorRequest", "Parameter", "Plan",
    "RankPlace", "RankSamples", "Reading", "Request", "Run", "SampleSlice", "Scalar", "Score",
    "Spec", "Status", "System", "ToolSummary", "TracedCallRecord", "TracedCallsRecord", "UntilDecided",
    "WorkloadRequest", "add_seal", "check_seal", "describe_exception", "encode_document", "ends_with_seal",
    "find_unstorable", "is_out_of_memory", "make_request", "parse_document", "parse_samples", "read_seal",
    "slowest_rank_seconds",
]  # fmt: skip
