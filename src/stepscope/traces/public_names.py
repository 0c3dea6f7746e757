"""Names that belong to public software and say nothing of who wrote a program: what may stay when a trace is shared."""

from __future__ import annotations

import re

PUBLIC_NAMESPACES = (
    "aten",
    "prim",
    "prims",
    "quantized",
    "c10d",
    "c10d_functional",
    "_c10d_functional",
    "symm_mem",
    "torchvision",
    "fbgemm",
)

_OPTIMIZERS = (
    "ASGD|Adadelta|Adafactor|Adagrad|Adam|AdamW|Adamax|LBFGS|Muon|NAdam|RAdam|RMSprop|Rprop|SGD|SparseAdam"
    "|ZeroRedundancyOptimizer"
)
_WORDS = r"\w+(?:\.\w+)?"

OPERATOR_NAMES = re.compile(
    rf"(?:{'|'.join(PUBLIC_NAMESPACES)})::{_WORDS}"
    # Classes that torch generates for its own operators end in a number; those of a user's function do not.
    r"|[A-Z][A-Za-z0-9]*Backward\d+"
    r"|torch::autograd::(?:AccumulateGrad|GraphRoot|CopySlices)"
    r"|torch[.:]+distributed[.:\w]*reducer::\w+"
    r"|record_param_comms|detach_?|nccl:\w+|gloo:\w+|mpi:\w+"
)
EVALUATE = "autograd::engine::evaluate_function: "
"""Stands before the name of a backward function."""

ANNOTATION_NAMES = re.compile(
    r"ProfilerStep\s*#?\d+"
    rf"|Optimizer\.(?:step|zero_grad)#(?:{_OPTIMIZERS})\.(?:step|zero_grad)"
    r"|enumerate\(DataLoader\)#_(?:Single|Multi)Process(?:ing)?DataLoaderIter\.__next__"
    r"|(?:Distributed|FullySharded)DataParallel\.forward"
    r"|(?:nccl|gloo|mpi):\w+"
)

CALL_NAMES = re.compile(r"(?:cuda|cu|hip|hsa|nccl|ze|ur)[A-Z]\w*|INVALID")
PROFILER_NAMES = re.compile(
    r"PyTorch Profiler(?: \(\d+\))?|Trace PyTorch Profiler|Spans|Traces|Iteration Start: PyTorch Profiler"
    r"|Record Window End|\[memory\]|\[OutOfMemory\]|(?:Stream|Event|Context) Sync|Stream Wait Event|Event Record"
    r"|(?:Buffer Flush|Activity Buffer Request|Instrumentation|Resource|Command Buffer Full|Lazy Function Loading)"
    r"|(?:Memcpy|Memset)[\w ()>-]*|"
)
THREAD_KIND = re.compile(r"python[\d.]*|pt_[a-z_]+(?:_\d+)?")
"""What a thread's name says in brackets."""

COLLECTIVE_NAMES = re.compile(
    r"_?(?:all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|reduce|gather|scatter|send|recv|barrier|wait)"
    r"(?:_?(?:base|coalesced|into_tensor(?:_coalesced)?|tensor(?:_coalesced)?|single|sparse|v|s))*_?"
)
GROUP_TEXTS = re.compile(r"\d+|default_pg|undefined|")
DTYPE_NAMES = re.compile(
    r"(?:c10::)?(?:Float|Double|Half|BFloat16|Int|Long|Short|Char|Byte|Bool|ComplexFloat|ComplexDouble"
    r"|Float8_e\d\w+|QInt8|QUInt8|QInt32)|u?int\d{1,2}|b?float\d{1,2}|bool|"
)
TYPE_NAMES = re.compile(
    r"|(?:unsigned |signed )?(?:char|short|int|long|long int|long long)|float|double|bool|Scalar|ScalarList|TensorList"
    r"|GenericList(?:\[(?:Tensor|float|double|int|long|bool|half|c10::BFloat16|c10::Half|[ ,()])*\])?|Device|None"
    r"|nullptr|(?:c10::)?(?:complex<\w+>|BFloat16|Half|Float8_e\d\w+|q(?:u?int\d+))"
)
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|True|False|None|inf|-inf|nan|")
NUMBER_LIST = re.compile(r"(?:[\[\](){}\s,.\d+\-eE]|True|False|None|inf|nan)*")
"""Lists of numbers, however deep."""

KEPT_ARGUMENTS = frozenset(
    {
        "Op count",
        "Python id",
        "Python parent id",
        "Python module id",
        "Python thread",
        "queued",
        "context",
        "cbid",
        "Device Type",
        "Rank",
        "priority",
        "fromDevice",
        "inDevice",
        "toDevice",
    }
)
"""Arguments beyond the columns whose names say nothing of the program."""

KEPT_METADATA = ("format", "rank_from", "shapes_recorded", "stacks_recorded")
KEPT_DISTRIBUTED = ("backend", "rank", "world_size", "pg_count", "nccl_version")
VERSION = re.compile(r"[\d.]+|nccl|gloo|mpi|ucc|cpu:gloo,cuda:nccl|cuda:nccl|cpu:gloo|kineto|content|name")
