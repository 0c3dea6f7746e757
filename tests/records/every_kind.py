"""Cases of every kind with usual and unusual options, as the commands plan them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from stepscope.bench.comms.cases import make_cases, make_sweep
from stepscope.bench.comms.overlap import make_overlap_cases
from stepscope.bench.comms.pairs import make_pair_cases
from stepscope.bench.comms.patterns.registry import PATTERNS, make_case, read_options
from stepscope.bench.comms.process_group import make_process_group_cases
from stepscope.bench.ops.cases import call_cases, make_peak_cases
from stepscope.bench.ops.cases import make_cases as make_operator_cases
from stepscope.bench.ops.suites import MICRO
from stepscope.bench.workloads import find_workload
from stepscope.bench.workloads.user import make_user_case
from stepscope.formats.nccl_import import prepare_import
from stepscope.records import Case

NCCL_OUTPUTS = Path(__file__).parents[1] / "store" / "nccl_outputs"
WORLD = {"backend": "gloo", "world_size": 4, "device": "cpu"}
OPERATIONS = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gatherv", "reduce_scatter", "reduce_scatterv", "all_to_all",
    "all_to_allv", "gather", "scatter", "barrier", "send_recv", "incast", "multicast", "all_gather_object",
    "gather_object", "broadcast_object_list", "scatter_object_list",
)  # fmt: skip
COLLECTIVES: tuple[dict[str, object], ...] = (
    {"collective": "all_reduce"},
    {"collective": "all_reduce", "dtype": "float16", "reduction": "max", "placement": "out_of_place"},
    {"collective": "all_reduce", "device": "cuda", "backend": "nccl", "mode": "graph"},
    {"collective": "all_reduce", "mode": "nonblocking", "depth": 4, "coalesce": 2},
    {"collective": "all_reduce", "wire": "int8", "groups": "split:2"},
    {"collective": "all_reduce", "groups": "colours:0,1,0,-", "round": 3},
    {"collective": "all_reduce", "groups": "split:2", "one_group_at_a_time": True},
    {"collective": "all_gather", "form": "list"},
    {"collective": "all_gather", "placement": "in_place"},
    {"collective": "broadcast", "root": 2},
    {"collective": "all_to_allv", "skew": 1.0},
    {"collective": "all_to_allv", "matrix": [3.0, 1.0, 0.0, 2.5]},
    {"collective": "all_to_allv", "matrix": [3, 1, 0, 2]},
    {"collective": "barrier"},
    {"collective": "send_recv", "pattern": "ping_pong"},
    {"collective": "send_recv", "pattern": "bidirectional", "window": 16, "sources": [0, 2], "targets": [1, 3]},
)
PATTERN_OPTIONS = {
    "dlrm": {"top": "4-2-1", "batch": "64", "random_lookups": "true"},
    "ddp": {"scale": "0.1", "flops": "1000"},
    "tp": {"degree": "2"},
    "sp": {"regather": "false"},
}


def list_operators() -> Iterator[Case]:
    yield from make_operator_cases(
        names=["gemm"], shapes=["m=8,n=4,k=2"], dtypes=["float32", "bfloat16"], directions=["forward", "backward"],
        device="cpu", caches=("warm", "cold"),
    )  # fmt: skip
    yield from make_operator_cases(
        names=["all"], shapes=[], sets=["tiny"], dtypes=[], directions=[], device="cuda:1", compiled=True
    )
    yield from call_cases("torch.softmax", "float32[16,32] dim=1", device="cpu", directions=["backward"])
    yield from call_cases("torch.nn.Linear", "[4,8]", device="cpu", build="8 3 bias=false", caches=["cold"])
    yield from make_peak_cases(["float32", "bfloat16"], "cpu")
    for row in MICRO:
        yield from row.cases(dtype="float32", device="cuda", compiled=row.published)


def list_communication() -> Iterator[Case]:
    for options in COLLECTIVES:
        yield from make_cases(**{"sizes": [1024, 4096], "dtype": "float32", **WORLD, **options})  # type: ignore[arg-type]
    yield from make_sweep(
        collectives=OPERATIONS, sizes=[1 << 12], dtypes=["float32", "int8"], reductions=["all"], roots=["all"], **WORLD
    ).cases
    yield from make_sweep(collectives=["send_recv"], sizes=[64], dtypes=["float32"], pattern="all", **WORLD).cases
    yield from make_overlap_cases(
        collectives=["all_reduce", "device_copy"], sizes=[4096], computes=["gemm:m=16", "add:size=4K"], **WORLD
    )
    yield from make_overlap_cases(
        collectives=["all_gather"], sizes=[4096], computes=[None, "gemm:m=16"], dtype="float16", repeat=3,
        groups="split:2", beside=["all_reduce:64K:split:2", "broadcast:1K"], **WORLD,
    )  # fmt: skip
    for pattern in PATTERNS.values():
        yield make_case(pattern, read_options(pattern, {}), overlap=True, **WORLD)
        unusual = read_options(pattern, PATTERN_OPTIONS.get(pattern.name, {"flops": "2.5"}))
        yield make_case(pattern, unusual, overlap=False, backend="nccl", world_size=8, device="cuda")
    yield from make_pair_cases(ranks=[0, 2, 3], sizes=[8, 1 << 20], **WORLD)
    yield from make_process_group_cases(backend="gloo", world_size=4, device="cpu")
    yield from make_process_group_cases(backend="nccl", world_size=4, device="cuda")


def list_models() -> Iterator[Case]:
    dlrm = find_workload("dlrm/ootb/train/A.1dev-embed32-fp32")
    yield dlrm.make_case(device="cpu")
    yield dlrm.make_case(device="cuda", scale="tiny", batch_size=4, precision="bf16", accumulate=2)
    yield dlrm.make_case(device="cpu", search="throughput", accumulate=None, data="0123abcd")
    yield dlrm.make_case(device="cpu", parallel="ddp", accumulate=2, world_size=2)
    yield find_workload("gpt2/optimized/infer/small-1dev-fp32").make_case(device="cpu", scale="tiny")


def list_imported() -> Iterator[Case]:
    for path in sorted(NCCL_OUTPUTS.iterdir()):
        named = {"all_gather_unnamed.txt": "all_gather"}.get(path.name)
        yield from prepare_import(path, operation=named, partial=True).cases


def list_user_models(folder: Path) -> Iterator[Case]:
    file = folder / "step.py"
    file.write_text("def build(device, batch_size=4, precision='fp32'):\n    return lambda: None\n")
    yield make_user_case(f"{file}:build", device="cpu", batch_size=None, precision=None)
    yield make_user_case(str(file), device="cuda", batch_size=2, precision="bf16")


def list_every_kind(folder: Path) -> list[Case]:
    """`folder` is where a user's file is written; its path is part of the cases that it makes."""
    return [
        *list_operators(), *list_communication(), *list_models(), *list_imported(), *list_user_models(folder)
    ]  # fmt: skip
