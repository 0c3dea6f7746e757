"""Which communication library really runs: as loaded, not as installed."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

SETTING = re.compile(r"(NCCL|RCCL|MSCCL|MSCCLPP|GLOO|UCX|UCC|OMPI_MCA|MPICH|FI|TORCH_NCCL)_\w+")
"""Environment variables that choose algorithms, protocols and interfaces."""
_CARRIERS = ("librccl", "libmscclpp", "libnccl", "libucc", "libmpi", "libccl")


def describe_torch_library(backend: str) -> dict[str, str]:
    """Name, version and file. NCCL's own functions may be served by RCCL or MSCCL++: the loaded file tells."""
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
    """The number the loaded file itself gives: 22809 is 2.28.9."""
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL(str(file)).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    if failed or number.value <= 0:
        return None
    thousands = 10_000 if number.value >= 10_000 else 1_000
    major, rest = divmod(number.value, thousands)
    return f"{major}.{rest // 100}.{rest % 100}"


def read_communication_settings() -> dict[str, str]:
    """What the environment tells the library; secrets do not have such names."""
    return {name: value for name, value in sorted(os.environ.items()) if SETTING.fullmatch(name)}
