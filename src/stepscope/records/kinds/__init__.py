"""The kinds of cases: what each was asked (`Spec`) and what was found (`Observed`), as tagged structs.

A new kind is one Spec and one Observed here, and a producer; readers ask for the type, never for the names of fields.
"""

from stepscope.records.kinds.base import Number, OtherObserved, OtherSpec, Parameter, Scalar
from stepscope.records.kinds.communication import (
    COMM,
    COMMUNICATION_OWNER,
    COMPUTE,
    LATER_PHASES,
    POINT_TO_POINT,
    SETUP_PHASES,
    TOGETHER,
    WORLD,
    CollectiveObserved,
    CollectiveSpec,
    ExchangeObserved,
    MessageObserved,
    OverlapObserved,
    OverlapSide,
    OverlapSpec,
    PairObserved,
    PairSpec,
    PatternLookup,
    PatternObserved,
    PatternSpec,
    PatternStep,
    PointToPointObserved,
    PointToPointSpec,
    ProcessGroupObserved,
    ProcessGroupSpec,
)
from stepscope.records.kinds.compute import (
    CALL,
    CallObserved,
    CallSpec,
    ModelObserved,
    OperatorObserved,
    OperatorSpec,
    Serving,
    UserModelObserved,
    UserModelSpec,
    WorkloadObserved,
    WorkloadSpec,
)

Spec = (
    OperatorSpec | CallSpec | CollectiveSpec | PointToPointSpec | PairSpec | OverlapSpec | PatternSpec
    | ProcessGroupSpec | WorkloadSpec | UserModelSpec | OtherSpec
)  # fmt: skip
Observed = (
    OperatorObserved | CallObserved | CollectiveObserved | PointToPointObserved | PairObserved | OverlapObserved
    | PatternObserved | ProcessGroupObserved | WorkloadObserved | UserModelObserved | OtherObserved
)  # fmt: skip

__all__ = [
    "CALL", "COMM", "COMMUNICATION_OWNER", "COMPUTE", "LATER_PHASES", "POINT_TO_POINT", "SETUP_PHASES",
    "TOGETHER", "WORLD", "CallObserved", "CallSpec", "CollectiveObserved",
    "CollectiveSpec", "ExchangeObserved", "MessageObserved", "ModelObserved", "Number", "Observed",
    "OperatorObserved", "OperatorSpec", "OtherObserved", "OtherSpec", "OverlapObserved", "OverlapSide",
    "OverlapSpec", "PairObserved", "PairSpec", "Parameter", "PatternLookup", "PatternObserved", "PatternSpec",
    "PatternStep", "PointToPointObserved", "PointToPointSpec", "ProcessGroupObserved", "ProcessGroupSpec", "Scalar",
    "Serving", "Spec", "UserModelObserved", "UserModelSpec", "WorkloadObserved", "WorkloadSpec",
]  # fmt: skip
