"""What the rooms hand to each other: plain, versioned, without torch, numpy or I/O."""

from stepscope.records.case import (
    Benchmark,
    Case,
    CaseResult,
    Failure,
    Implementation,
    KernelUse,
    LatencyTarget,
    Notice,
    RankSamples,
    Reading,
    Sample,
    SampleSlice,
    Score,
    Status,
    describe_exception,
    is_out_of_memory,
    slowest_rank_seconds,
)
from stepscope.records.codec import UNREADABLE, encode_document, find_unstorable, parse_document, parse_samples
from stepscope.records.kinds import Observed, Parameter, Scalar, Spec
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
    RunKind,
    System,
)
from stepscope.records.seal import add_seal, check_seal, ends_with_seal, read_seal

__all__ = [
    "UNREADABLE", "Benchmark", "Case", "CaseResult", "Communication", "Container", "Cpu", "Failure", "FileEntry",
    "Git", "Gpu", "Host", "Implementation", "KernelUse", "LatencyTarget", "Link", "Load", "Memory", "Nic", "Notice",
    "NumaNode", "Observed", "Parameter", "Plan", "RankPlace", "RankSamples", "Reading", "Run", "RunKind", "Sample",
    "SampleSlice", "Scalar", "Score", "Spec", "Status", "System", "add_seal", "check_seal", "describe_exception",
    "encode_document", "ends_with_seal", "find_unstorable", "is_out_of_memory", "parse_document", "parse_samples",
    "read_seal", "slowest_rank_seconds",
]  # fmt: skip
