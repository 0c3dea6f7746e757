"""One host's system record and that of several, and the software that really runs: as loaded, not as installed.

Nothing is imported to be described: what the process has not loaded took no part in what it measured.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from stepscope.core.processes import run_program
from stepscope.records import Git, Gpu, Host, Link, System
from stepscope.system.host import (
    ROOT,
    read_container,
    read_cpu,
    read_memory,
    read_nics,
    read_numa_nodes,
    read_text,
    read_virtualization,
    sample_load,
)
from stepscope.system.nvml import describe_visible_gpus, open_nvml, read_gpus, read_links

GIT_TIMEOUT_S = 5.0

_VERSIONED_MODULES = (
    *("accelerate", "apex", "deepspeed", "fbgemm_gpu", "flash_attn", "mpi4py", "numpy", "torchao", "torchrec"),
    *("torchvision", "transformer_engine", "transformers", "triton", "xformers"),
)

_RESULT_PREFIXES = (
    *("NCCL_", "RCCL_", "GLOO_", "UCX_", "UCC_", "FI_", "NVSHMEM_", "OMPI_MCA_"),
    *("OMP_", "KMP_", "GOMP_", "MKL_", "ONEDNN_", "DNNL_", "OPENBLAS_", "ATEN_"),
    *("TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "PYTORCH_", "TRITON_"),
    *("CUDA_", "CUBLAS_", "CUBLASLT_", "CUDNN_", "HIP_", "HSA_", "ROCR_", "MIOPEN_"),
    "MALLOC_",
)
_RESULT_NAMES = frozenset({"LD_PRELOAD", "GLIBC_TUNABLES", "NVIDIA_TF32_OVERRIDE"})

_JOB_PARTS = ("orte_", "ess", "pmix", "prte", "plm", "ras", "oob", "initial_wdir", "num_procs", "cpu_type", "PREFIXES")
_JOB_PREFIXES = tuple(f"OMPI_MCA_{part}" for part in _JOB_PARTS)
"""What launchers tell their ranks; another value in every job."""

_JOB_WORDS = frozenset(
    {
        *("PID", "PPID", "PORT", "PORTS", "JOB", "JOBID", "SESSION", "TMP", "TMPDIR"),
        *("TEMP", "DIR", "DIRECTORY", "PATH", "HOME", "ROOT", "ADDR", "URI", "URL"),
        *("UUID", "HOSTFILE", "HOSTS", "NODELIST", "RANK", "DUMP", "VISIBLE"),
    }
)
"""Parts of names whose values say where a job ran, not how. Visible devices are kept as a setting, by model."""

_JOB_NAMES = frozenset({"NCCL_COMM_ID", "NCCL_DEBUG_FILE"})

_SECRET_NAME = re.compile(r"TOKEN|KEY|PASSW|SECRET|CREDENTIAL|AUTH|(^|_)PASS(_|$)", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"://[^/@\s]+:[^/@\s]+@|\b(hf_|ghp_|gho_|github_pat_|glpat-|sk-|xox[bap]-|AKIA)\w{8,}")


def select_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that change results; never secrets, nor what differs between two equal jobs."""
    environment = os.environ if environment is None else environment
    return {name: value for name, value in sorted(environment.items()) if _is_kept(name, value)}


def _is_kept(name: str, value: str) -> bool:
    if not (name.startswith(_RESULT_PREFIXES) or name in _RESULT_NAMES):
        return False
    if _SECRET_NAME.search(name) or _SECRET_VALUE.search(value):
        return False
    if name in _JOB_NAMES or name.startswith(_JOB_PREFIXES) or _JOB_WORDS & set(name.upper().split("_")):
        return False
    return tempfile.gettempdir() not in value or name == "LD_PRELOAD"


def find_loaded_torch(torch_loaded: bool | None = None) -> Any | None:
    """The module, where this process has it; False leaves it out even so."""
    if torch_loaded is False:
        return None
    module = sys.modules.get("torch")
    # Another thread may be in the middle of importing it.
    return module if module is not None and hasattr(module, "__version__") else None


def read_library_versions(
    torch: Any | None = None, modules: Mapping[str, ModuleType | Any] | None = None
) -> dict[str, str]:
    modules = sys.modules if modules is None else modules
    versions = {
        name: str(version)
        for name in _VERSIONED_MODULES
        if (version := getattr(modules.get(name), "__version__", None)) is not None
    }
    mpi = modules.get("mpi4py.MPI")
    if mpi is not None:
        # MPI libraries append a date, their builder and a zero byte.
        text = mpi.Get_library_version().strip("\0 \n") or "unknown"
        versions["mpi"] = text.splitlines()[0].strip().split(", package:")[0]
    if torch is not None:
        versions |= _read_torch_versions(torch)
    return dict(sorted(versions.items()))


def _read_torch_versions(torch: Any) -> dict[str, str]:
    found = {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": getattr(torch.version, "hip", None),
        **parse_torch_build(torch.__config__.show()),
    }
    if torch.cuda.is_available():
        cudnn = torch.backends.cudnn.version()
        found["cudnn"] = _split_version(cudnn) if cudnn is not None else None
        found["nccl"] = _read_nccl_version(torch)
    if torch.distributed.is_available() and torch.distributed.is_gloo_available():
        found["gloo"] = f"built in torch {torch.__version__}"
    return {name: version for name, version in found.items() if version is not None}


def parse_torch_build(text: str) -> dict[str, str]:
    """Versions of the numeric libraries inside torch, from its own description of the build."""
    patterns = {"mkl": r"Math Kernel Library Version (\S+)", "onednn": r"MKL-DNN v(\S+)", "openmp": r"OpenMP (\d+)"}
    matches = {name: re.search(pattern, text) for name, pattern in patterns.items()}
    return {name: match[1] for name, match in matches.items() if match}


def _split_version(number: int) -> str:
    """One number holds three: 8902 is cuDNN 8.9.2 and 90100 9.1.0, 2708 is NCCL 2.7.8 and 22809 2.28.9."""
    major, rest = divmod(number, 10_000 if number >= 10_000 else 1_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _read_nccl_version(torch: Any) -> str | None:
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def read_torch_settings(torch: Any | None) -> dict[str, str]:
    """What torch says it does; empty where it is not loaded."""
    if torch is None:
        return {}
    questions: dict[str, Callable[[], Any]] = {
        "threads": torch.get_num_threads,
        "interop_threads": torch.get_num_interop_threads,
        "matmul_precision": torch.get_float32_matmul_precision,
        "deterministic": torch.are_deterministic_algorithms_enabled,
        "default_dtype": lambda: str(torch.get_default_dtype()).removeprefix("torch."),
        "mkldnn": torch.backends.mkldnn.is_available,
        "cpu_capability": torch.backends.cpu.get_cpu_capability,
    }
    if torch.cuda.is_available():
        questions |= {
            "cuda_allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
            "cudnn_allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
            "cudnn_benchmark": lambda: torch.backends.cudnn.benchmark,
        }
    answers = {name: _ask_torch(question) for name, question in questions.items()}
    return {
        name: str(answer).lower() if isinstance(answer, bool) else str(answer)
        for name, answer in answers.items()
        if answer is not None
    }


def _ask_torch(question: Callable[[], Any]) -> Any | None:
    """None where this version has no such setting, or refuses since the program set it through a newer name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return question()
        except (AttributeError, RuntimeError):
            return None


def read_git(folder: Path | None = None) -> Git | None:
    """None outside a checkout, without git, or where git takes longer than 5 s (a lost network mount)."""
    commit = _ask_git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    branch = _ask_git(folder, "rev-parse", "--abbrev-ref", "HEAD")
    changes = _ask_git(folder, "status", "--porcelain", "--untracked-files=no")
    return Git(commit=commit, branch=branch if branch != "HEAD" else None, dirty=bool(changes))


def _ask_git(folder: Path | None, *arguments: str) -> str | None:
    # No optional locks: looking must not disturb a git that someone else runs in the same folder.
    command = ["git", "--no-optional-locks", *arguments]
    try:
        done = run_program(command, limit_s=GIT_TIMEOUT_S, cwd=folder)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


SETTING = re.compile(r"(NCCL|RCCL|MSCCL|MSCCLPP|GLOO|UCX|UCC|OMPI_MCA|MPICH|FI|TORCH_NCCL)_\w+")
"""Environment variables that choose algorithms, protocols and interfaces."""
_CARRIERS = ("librccl", "libmscclpp", "libnccl", "libucc", "libmpi", "libccl")


def describe_torch_library(backend: str) -> dict[str, str]:
    """Name, version and file. NCCL's own functions may be served by RCCL or MSCCL++: the loaded file decides."""
    import torch

    if backend == "gloo":
        return {"name": "gloo", "version": f"built into torch {torch.__version__}"}
    loaded = find_loaded_libraries()
    if backend == "nccl":
        name = "RCCL" if torch.version.hip else "NCCL"
        version = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
        found = {"name": name, "version": version}
        file = next((path for path in loaded if "nccl" in path.name or "rccl" in path.name), None)
        if file is not None:
            found |= {"file": str(file), "version": _ask_nccl_version(file) or version}
        preloaded = next((path for path in loaded if "mscclpp" in path.name or "msccl" in path.name), None)
        return found | ({"name": f"MSCCL++ over {name}", "preloaded": str(preloaded)} if preloaded else {})
    file = next((path for path in loaded if backend in path.name), None)
    return {"name": backend, "version": f"torch {torch.__version__}", **({"file": str(file)} if file else {})}


def find_loaded_libraries() -> list[Path]:
    """Communication libraries mapped into this process; none where the system does not tell."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    files = dict.fromkeys(line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6)
    return [Path(name) for name in files if Path(name).name.startswith(_CARRIERS)]


def _ask_nccl_version(file: Path) -> str | None:
    """As the loaded file itself says it."""
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL(str(file)).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return None if failed or number.value <= 0 else _split_version(number.value)


def read_communication_settings() -> dict[str, str]:
    """Variables that configure the library; secrets do not have such names."""
    return {name: value for name, value in sorted(os.environ.items()) if SETTING.fullmatch(name)}


def collect_system(
    *,
    torch_loaded: bool | None = None,
    root: Path = ROOT,
    nvml: Any | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> System:
    """What this host is and what this process has loaded. Takes about 0.1 s; never imports torch.

    `torch_loaded`: False leaves torch out even where the process has it; otherwise it is described if loaded, which
    starts CUDA where there is a usable GPU. `root`, `nvml` and `environment` replace the machine (for tests);
    `folder` is the checkout to describe, by default the working folder.

    >>> stepscope.collect_system(torch_loaded=False).hosts[0].cpu.threads > 0
    True
    """
    environment = os.environ if environment is None else environment
    torch = find_loaded_torch(torch_loaded)
    settings = read_torch_settings(torch)
    with open_nvml(nvml) as library:
        gpus: list[Gpu] = read_gpus(library, root=root, torch=torch) if library is not None else []
        links: list[Link] = read_links(library) if library is not None else []
        visible = describe_visible_gpus(library, gpus, environment)
    if visible is not None:
        settings["visible_gpus"] = visible
    return System(
        collected_at=datetime.now(UTC).isoformat(timespec="seconds"),
        hosts=[_read_host(root, environment, gpus, links)],
        python=platform.python_version(),
        libraries=read_library_versions(torch),
        environment=select_environment(environment),
        settings=settings,
        git=read_git(folder),
    )


def _read_host(root: Path, environment: Mapping[str, str], gpus: list[Gpu], links: list[Link]) -> Host:
    return Host(
        name=read_text(root / "proc/sys/kernel/hostname") or platform.node(),
        os=_read_os_name(root),
        kernel=read_text(root / "proc/sys/kernel/osrelease") or platform.release(),
        virtualization=read_virtualization(root),
        cpu=read_cpu(root),
        memory=read_memory(root),
        numa=read_numa_nodes(root),
        gpus=gpus,
        nics=read_nics(root),
        links=links,
        container=read_container(root, environment),
        load=sample_load(root),
    )


def _read_os_name(root: Path) -> str:
    lines = (read_text(root / "etc/os-release") or "").splitlines()
    fields = dict(line.split("=", 1) for line in lines if "=" in line)
    return fields.get("PRETTY_NAME", "").strip("\"'") or platform.system()


def merge_systems(systems: list[System]) -> System:
    """One record of several hosts, in the order given; what the first says of the software holds for all.

    A library, setting or variable that is not the same everywhere keeps every host's value under `name@host`, so
    that a mixed cluster is not taken for an even one. Raises ValueError on an empty list.
    """
    if not systems:
        raise ValueError("there is no system to merge")
    names = [system.hosts[0].name for system in systems]
    # With its position where two hosts share a name: containers often do.
    labels = [name if names.count(name) == 1 else f"{name}#{i}" for i, name in enumerate(names)]

    def merge(values: Iterable[dict[str, str]]) -> dict[str, str]:
        return _merge_values(list(zip(labels, values, strict=True)))

    python = [system.python for system in systems]
    mixed = ", ".join(f"{version}@{label}" for version, label in zip(python, labels, strict=True))
    return msgspec.structs.replace(
        systems[0],
        hosts=[host for system in systems for host in system.hosts],
        python=python[0] if len(set(python)) == 1 else mixed,
        libraries=merge(system.libraries for system in systems),
        environment=merge(system.environment for system in systems),
        settings=merge(system.settings for system in systems),
    )


def _merge_values(by_host: list[tuple[str, dict[str, str]]]) -> dict[str, str]:
    merged: dict[str, str] = {}
    for name in sorted({name for _, values in by_host for name in values}):
        found = {host: values[name] for host, values in by_host if name in values}
        if len(found) == len(by_host) and len(set(found.values())) == 1:
            merged[name] = next(iter(found.values()))
        else:
            merged |= {f"{name}@{host}": value for host, value in found.items()}
    return merged
