"""Constructed runs: two systems, every kind of row."""

from __future__ import annotations

import random
from typing import Any

from builders import case_of
from stepscope.bench.comms import operations
from stepscope.records import (
    Benchmark,
    CaseResult,
    Cpu,
    Failure,
    Git,
    Gpu,
    Host,
    KernelUse,
    LatencyTarget,
    Link,
    Load,
    Memory,
    Nic,
    Notice,
    NumaNode,
    RankSamples,
    Reading,
    Score,
    System,
)
from stepscope.records.codec import make_observed
from stepscope.report.view import ReportRun
from stepscope.store.view import MeasuredCase


def make_system(*, gpus: int = 0, **changes: Any) -> System:
    cpu = Cpu(
        model="AMD EPYC 9554", architecture="x86_64", sockets=1, cores=64, threads=128, usable_threads=128,
        max_clock_hz=3.75e9, governor="performance", last_level_cache_bytes=256 << 20, features=["avx2", "avx512f"],
    )  # fmt: skip
    gpu_list = [
        Gpu(index=i, name="NVIDIA H100 80GB HBM3", memory_bytes=80 << 30, compute_capability="9.0",
            multiprocessors=132, max_clock_hz=1.98e9, power_limit_w=700.0, driver="570.86")
        for i in range(gpus)
    ]  # fmt: skip
    host = Host(
        name="node-1", os="Debian 12", kernel="6.1.0", cpu=cpu, memory=Memory(total_bytes=512 << 30),
        numa=[NumaNode(node=0, cpus="0-127", memory_bytes=512 << 30)], gpus=gpu_list,
        nics=[Nic(name="eth0", kind="ethernet", speed_bits_per_s=100e9, mtu=9000)],
        links=[Link(a="gpu0", b=f"gpu{i}", kind="NVLink", count=18, bytes_per_s=450e9) for i in range(1, gpus)],
        load=Load(load_1m=0.4, cpu_busy_share=0.01, memory_available_bytes=480 << 30),
    )  # fmt: skip
    fields: dict[str, Any] = {
        "collected_at": "2025-03-01T10:00:00Z",
        "hosts": [host],
        "python": "3.11.7",
        "libraries": {"torch": "2.6.0", "cuda": "12.4", "nccl": "2.21.5"} if gpus else {"torch": "2.6.0"},
        "environment": {"OMP_NUM_THREADS": "64"},
        "settings": {"torch threads": "64", "tf32": "off"},
        "git": Git(commit="0123abcd", branch="main", dirty=True),
    }
    return System(**fields | changes)


def make_case(
    benchmark: str = "dlrm/ootb/train/A.1dev-embed32-fp32",
    *,
    values_s: list[float] | None = None,
    warmups_s: list[float] | None = None,
    parameters: dict[str, Any] | None = None,
    batch_size: int | None = None,
    world_size: int = 1,
    version: int = 1,
    **changes: Any,
) -> MeasuredCase:
    """Measured with the given times; without times, failed unless `changes` say otherwise."""
    model, implementation, mode, config = benchmark.split("/")
    owner = "communication" if model in operations() else "operators"
    identity = Benchmark(
        model=model, implementation=implementation, mode=mode, config=config, version=version, owner=owner  # type: ignore[arg-type]
    )  # fmt: skip
    case = case_of(identity, parameters or {}, batch_size=batch_size, world_size=world_size)
    fields: dict[str, Any] = {"status": "ok" if values_s else "failed", "started_at": "2025-03-01T10:00:01Z"}
    if not values_s:
        fields["failure"] = Failure(kind="out_of_memory", message="needed 96 GiB, 80 GiB there")
    samples = []
    if values_s:
        warm = warmups_s or []
        columns = {"duration_s": [*warm, *values_s], "iterations": [1] * (len(warm) + len(values_s))}
        samples = [RankSamples(case=case.key, warmup=[True] * len(warm) + [False] * len(values_s), **columns)]  # type: ignore[arg-type]
    fields |= changes
    fields["observed"] = make_observed(case.spec, fields.pop("observed", {}))
    return MeasuredCase(CaseResult(case=case, elapsed_s=2.0, **fields), samples)


def spread(median_s: float, n: int, *, seed: int, sigma: float = 0.02) -> list[float]:
    source = random.Random(seed)
    return [median_s * source.lognormvariate(0, sigma) for _ in range(n)]


def make_run(
    cases: list[MeasuredCase], system: System | None, name: str = "20250301-100000-ab12", **changes: Any
) -> ReportRun:
    fields: dict[str, Any] = {
        "created_at": "2025-03-01T10:00:00Z",
        "status": "complete",
        "command": ["stepscope", "run", "dlrm/ootb/train", "--note", "two words"],
    }
    return ReportRun(id=name, system=system, cases=cases, **fields | changes)


def small_runs() -> list[ReportRun]:
    """Few cases with round numbers: what the golden tables show."""
    missed = make_case(
        "dlrm/ootb/infer/A.1dev-embed4-fp32", values_s=[0.020, 0.021, 0.022, 0.023, 0.024], batch_size=1024,
        score=Score(unit="ex/s", work=1024), latency_target=LatencyTarget(limit_s=0.020),
        notices=[Notice(kind="unstable", message="interval is ±9.1 % of the median", hint="measure longer")],
    )  # fmt: skip
    skipped = make_case(
        "xlmr/ootb/train/tiny", status="skipped", batch_size=8,
        failure=Failure(kind="unsupported", message="needs a GPU", hint="run it on a machine with one"),
    )  # fmt: skip
    gemms = [
        make_case(
            "gemm/micro/forward/custom", values_s=[seconds] * 6, parameters={"shape": shape, "dtype": "float32"},
            score=Score(unit="TFLOP/s", work=2.0 * shape[0] * shape[1] * shape[2]),
        )
        for shape, seconds in (([256, 1024, 1024], 1e-3), ([512, 1024, 1024], 2e-3))
    ]  # fmt: skip
    return [make_run([missed, skipped, *gemms], make_system())]


def make_comms(seed: int) -> list[MeasuredCase]:
    cases = []
    for power in range(10, 29, 2):
        size = 1 << power
        median = 18e-6 + size / 180e9
        cases.append(
            make_case(
                "all_reduce/micro/nccl/default", values_s=spread(median, 60, seed=power + seed),
                warmups_s=spread(median * 3, 5, seed=power), world_size=8,
                parameters={"size_bytes": size, "dtype": "float32", "device": "cuda"},
                score=Score(unit="GB/s", work=size * 1.75),
                observed={"size_bytes": size, "algbw_bytes_per_s": size / median,
                          "busbw_bytes_per_s": size * 1.75 / median, "wrong": 0},
            )
        )  # fmt: skip
    return cases


def rich_runs() -> list[ReportRun]:
    """Everything a page can show, for the eye and for the browser."""
    readings = [
        Reading(device="cuda:0", at=at, clock_hz=clock, memory_clock_hz=2.6e9, power_w=power, temperature_c=61.0,
                throttle=["power cap"] if at == "end" else [], load_1m=1.2)
        for at, clock, power in (("start", 1.98e9, 120.0), ("end", 1.755e9, 688.0))
    ]  # fmt: skip
    train = make_case(
        values_s=[*spread(0.0412, 180, seed=1), 0.31, 0.29], warmups_s=[1.9, 0.2, 0.05, 0.044, 0.043], batch_size=1024,
        score=Score(unit="ex/s", work=1024), readings=readings, observed={"peak_memory_bytes": 31 << 30},
        notices=[Notice(kind="throttled", message="clock fell by 11.4 % during the case",
                        hint="raise the power limit or lock the clocks: nvidia-smi -lgc 1500")],
    )  # fmt: skip
    infer = make_case(
        "dlrm/ootb/infer/A.1dev-embed4-fp32", values_s=spread(0.0166, 400, seed=2, sigma=0.12), batch_size=1024,
        warmups_s=spread(0.03, 20, seed=3), score=Score(unit="ex/s", work=1024),
        latency_target=LatencyTarget(limit_s=0.019),
    )  # fmt: skip
    gemms = [
        make_case(
            "gemm/micro/forward/custom", values_s=spread(2 * m * 4096 * 4096 / 6.2e14 + 4e-6, 3000, seed=m),
            warmups_s=spread(1e-3, 30, seed=m), parameters={"shape": [m, 4096, 4096], "dtype": dtype},
            score=Score(unit="TFLOP/s", work=2.0 * m * 4096 * 4096),
        )
        for m in (128, 1024, 8192)
        for dtype in ("bfloat16", "float32")
    ]  # fmt: skip
    failed = make_case(
        "xlmr/ootb/train/large", batch_size=64,
        failure=Failure(kind="out_of_memory", message="tried to allocate 12.00 GiB; 3.41 GiB are free",
                        hint="halve the batch size: --batch-size 32", rank=0, exit_code=1,
                        last_lines=["step 0", "step 1", "torch.OutOfMemoryError: CUDA out of memory."],
                        stack=["train.py:88 in step", "model.py:41 in forward"]),
    )  # fmt: skip
    skipped = make_case(
        "cvt/optimized/infer/fp8", status="skipped", failure=Failure(kind="unsupported", message="no FP8 kernels here")
    )
    gpu, cpu = make_system(gpus=8), make_system()
    cpu_gemm = make_case(
        "gemm/micro/forward/custom", values_s=spread(0.9e-3, 90, seed=9), parameters={"shape": [256, 1024, 1024]},
        score=Score(unit="TFLOP/s", work=2.0 * 256 * 1024 * 1024),
    )  # fmt: skip
    return [
        make_run([train, infer, *gemms, failed, skipped, *make_comms(0)], gpu),
        make_run(make_comms(100), gpu, "20250302-091500-cd34", command=["stepscope", "comms", "all_reduce"]),
        make_run([cpu_gemm], cpu, "20250303-120000-ef56", status="interrupted"),
    ]


def make_op(
    operator: str = "gemm",
    config: str = "custom",
    *,
    seconds: float | list[float],
    flops: float,
    moved: float,
    unit: str = "TFLOP/s",
    dtype: str = "bfloat16",
    device: str = "cuda",
    cache: str = "cold",
    wall_s: float | None = None,
    extra_s: dict[str, list[float]] | None = None,
    parameters: dict[str, Any] | None = None,
    observed: dict[str, Any] | None = None,
    **changes: Any,
) -> MeasuredCase:
    """An operator's case. With `wall_s` its own times are device times, and those by the host's clock are `wall_s`."""
    values = seconds if isinstance(seconds, list) else [seconds] * 7
    built = make_case(
        f"{operator}/micro/forward/{config}", values_s=values,
        parameters={**(parameters or {}), "dtype": dtype, "device": device, "cache": cache},
        score=Score(unit=unit, work=flops if unit == "TFLOP/s" else moved),
        observed={"flops": flops, "moved_bytes": moved, "input_sets": 1, **(observed or {})},
        timing="device" if wall_s is not None else "own", **changes,
    )  # fmt: skip
    samples = RankSamples(
        case=built.key, duration_s=values if wall_s is None else [wall_s] * len(values),
        device_s=values if wall_s is not None else None, iterations=[1] * len(values), warmup=[False] * len(values),
        extra_s=extra_s or {},
    )  # fmt: skip
    return MeasuredCase(built.result, [samples])


def make_ceilings(
    *, copy: float | None = 4e12, read: float | None = None, device: str = "cuda", **matrix: float
) -> list[MeasuredCase]:
    """Ceilings with exactly these rates; `matrix` by dtype."""
    cases = [
        make_op("gemm", "ceiling", seconds=1e12 / rate, flops=1e12, moved=1e9, dtype=dtype, device=device)
        for dtype, rate in matrix.items()
    ]
    for operator, rate, dtype in (("read", read, "float32"), ("memcpy", copy, "int8")):
        if rate is not None:
            cases.append(
                make_op(operator, "ceiling", seconds=1e9 / rate, flops=0, moved=1e9, unit="GB/s", dtype=dtype,
                        device=device)
            )  # fmt: skip
    return cases


def ops_runs() -> list[ReportRun]:
    """Operators on a GPU, whose times, rates and kernels all differ, and on a CPU."""
    peaks = {"bfloat16": 7.2e14, "float16": 7.0e14, "tf32": 3.6e14, "float32": 5.1e13}
    cases = make_ceilings(copy=3.9e12, read=4.3e12, **peaks)
    for number, (dtype, peak) in enumerate(peaks.items()):
        for power in range(5, 14):
            m, width = 1 << power, 2 if dtype.endswith("16") else 4
            flops, moved = 2.0 * m * m * m, 3.0 * width * m * m
            for cache, bandwidth in (("cold", 3.5e12), ("warm", 7.5e12)):
                device_s = max(flops / (0.9 * peak), moved / bandwidth) + 2.5e-6
                cases.append(
                    make_op(
                        seconds=spread(device_s, 40, seed=power + number), flops=flops, moved=moved, dtype=dtype,
                        cache=cache, wall_s=device_s + 4e-6, parameters={"m": m, "n": m, "k": m},
                        extra_s={"graph": [device_s - 1e-6], "kernel": [device_s - 1.5e-6]},
                        kernels=[KernelUse(name=f"void gemm<{dtype}>(int)", count=1.0, duration_s=device_s * 0.8),
                                 KernelUse(name="splitKreduce_kernel", count=0.5, duration_s=device_s * 0.1)],
                    )
                )  # fmt: skip
    for power in range(12, 29, 2):
        elements = 1 << power
        cases += [
            make_op(
                "relu", seconds=8 * elements / bandwidth + 2e-6, flops=elements, moved=8 * elements, unit="GB/s",
                dtype="float32", cache=cache, wall_s=8 * elements / bandwidth + 7e-6, parameters={"n": elements},
                observed={"compile_s": 3.25},
            )
            for cache, bandwidth in (("cold", 3.6e12), ("warm", 8e12))
        ]  # fmt: skip
    cpu_cases = [
        *make_ceilings(copy=2e10, device="cpu", float32=3e11),
        make_op(seconds=spread(1e-3, 50, seed=1), flops=1.3e8, moved=1e6, dtype="float32", device="cpu", cache="warm"),
    ]
    return [
        make_run(cases, make_system(gpus=1), "20250304-080000-aa01", command=["stepscope", "bench", "ops"]),
        make_run(cpu_cases, make_system(), "20250304-090000-bb02", command=["stepscope", "bench", "ops"]),
    ]
