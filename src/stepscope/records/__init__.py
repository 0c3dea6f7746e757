"""What the rooms hand to each other: plain, versioned, without torch, numpy or I/O."""

from stepscope.records.benchmark import Benchmark, Case, Implementation
from stepscope.records.codec import UNREADABLE, encode_document, find_unstorable, parse_document, parse_samples
from stepscope.records.communication import Communication, RankPlace
from stepscope.records.failure import Failure, Notice, describe_exception, is_out_of_memory
from stepscope.records.kinds import Observed, Parameter, Scalar, Spec
from stepscope.records.result import CaseResult, KernelUse, LatencyTarget, Reading, SampleSlice, Score, Status
from stepscope.records.run import FileEntry, Plan, Run, RunKind
from stepscope.records.sample import RankSamples, Sample, slowest_rank_seconds
from stepscope.records.seal import add_seal, check_seal, ends_with_seal, read_seal
from stepscope.records.system import (
    Container,
    Cpu,
    Git,
    Gpu,
    Host,
    Link,
    Load,
    Memory,
    Nic,
    NumaNode,
    System,
)

__all__ = [
    "UNREADABLE",
    "Benchmark",
    "Case",
    "CaseResult",
    "Communication",
    "Container",
    "Cpu",
    "Failure",
    "FileEntry",
    "Git",
    "Gpu",
    "Host",
    "Implementation",
    "KernelUse",
    "LatencyTarget",
    "Link",
    "Load",
    "Memory",
    "Nic",
    "Notice",
    "NumaNode",
    "Observed",
    "Parameter",
    "Plan",
    "RankPlace",
    "RankSamples",
    "Reading",
    "Run",
    "RunKind",
    "Sample",
    "SampleSlice",
    "Scalar",
    "Score",
    "Spec",
    "Status",
    "System",
    "add_seal",
    "check_seal",
    "describe_exception",
    "encode_document",
    "ends_with_seal",
    "find_unstorable",
    "is_out_of_memory",
    "parse_document",
    "parse_samples",
    "read_seal",
    "slowest_rank_seconds",
]
