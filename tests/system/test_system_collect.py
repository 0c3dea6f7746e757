from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from system_fakes import FakeNvml, make_x86

from stepscope.records import System, encode_document, parse_document
from stepscope.system import collect_system, merge_systems
from stepscope.system.collect import (
    find_loaded_torch,
    parse_torch_build,
    read_git,
    read_library_versions,
    read_torch_settings,
    select_environment,
)


def test_a_described_machine(tmp_path: Path) -> None:
    nvml = FakeNvml()
    system = collect_system(
        root=make_x86(tmp_path), nvml=nvml, torch_loaded=False, environment={"OMP_NUM_THREADS": "4"}
    )

    host = system.hosts[0]
    assert (host.name, host.os, host.kernel) == ("node7", "Test Linux 1", "6.1.0-test")
    assert host.virtualization == "kvm"
    assert [gpu.name for gpu in host.gpus] == ["NVIDIA H200", "NVIDIA H200"]
    assert len(host.links) == 5
    assert system.environment == {"OMP_NUM_THREADS": "4"}
    assert system.settings == {"visible_gpus": "2× NVIDIA H200"}
    assert "torch" not in system.libraries
    assert nvml.opened == 0
    assert parse_document(encode_document(system), System, where="test") == system


def test_this_machine() -> None:
    system = collect_system()
    host = system.hosts[0]

    assert 1 <= host.cpu.usable_threads <= host.cpu.threads
    assert host.cpu.cores is None or 1 <= host.cpu.cores <= host.cpu.threads
    assert host.memory.total_bytes > 1 << 28
    assert host.load.load_1m is not None
    assert host.load.cpu_busy_share is None or 0 <= host.load.cpu_busy_share <= 1
    assert any(nic.kind == "loopback" for nic in host.nics)
    assert system.python == ".".join(str(part) for part in sys.version_info[:3])
    assert parse_document(encode_document(system), System, where="test") == system


def test_the_fingerprint_holds_between_two_looks() -> None:
    first, second = collect_system(), collect_system()
    assert (first.fingerprint, first.configuration) == (second.fingerprint, second.configuration)


def test_identity_ignores_the_job_and_the_configuration_sees_the_settings(tmp_path: Path) -> None:
    root = make_x86(tmp_path)

    def identity(**environment: str) -> tuple[str, str]:
        system = collect_system(root=root, nvml=FakeNvml(), torch_loaded=False, environment=environment)
        return system.fingerprint, system.configuration

    plain = identity()
    jobs = {"OMPI_MCA_orte_hnp_uri": "1", "CUDA_VISIBLE_DEVICES": "0,1", "NCCL_COMM_ID": "10.0.0.1:4000"}
    assert identity(**jobs, SLURM_JOB_ID="7") == plain
    assert identity(CUDA_VISIBLE_DEVICES="0") == identity(CUDA_VISIBLE_DEVICES="1") != plain
    assert identity(NCCL_ALGO="Ring")[1] != plain[1]
    (root / "proc/loadavg").write_text("99.0 1 1 1/1 1\n")
    assert identity() == plain


def test_collecting_does_not_import_torch() -> None:
    source = (
        "import sys; from stepscope.system import collect_system; s = collect_system(); "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules, 'imported'; "
        "assert 'torch' not in s.libraries and not s.settings.get('threads')"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_torch_is_described_as_loaded() -> None:
    torch = pytest.importorskip("torch")

    system = collect_system()
    assert system.libraries["torch"] == torch.__version__
    assert system.settings["threads"] == str(torch.get_num_threads())
    assert system.settings["deterministic"] == "false"
    assert system.settings["matmul_precision"] == torch.get_float32_matmul_precision()
    assert "torch" not in collect_system(torch_loaded=False).libraries
    assert collect_system(torch_loaded=False).settings.get("threads") is None


def test_a_setting_that_torch_refuses_is_left_out() -> None:
    torch = pytest.importorskip("torch")
    settings = read_torch_settings(torch)
    assert "matmul_precision" in settings

    def refuse() -> None:
        raise RuntimeError("set through the newer name")

    odd = SimpleNamespace(**{name: getattr(torch, name) for name in dir(torch) if not name.startswith("__")})
    odd.get_float32_matmul_precision = refuse
    assert "matmul_precision" not in read_torch_settings(odd)
    assert read_torch_settings(odd)["threads"] == settings["threads"]


def test_half_imported_torch_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    assert find_loaded_torch() is None
    assert find_loaded_torch(True) is None


def test_versions_of_what_is_loaded_only() -> None:
    modules = {
        "numpy": SimpleNamespace(__version__="2.0"),
        "triton": SimpleNamespace(),
        "mpi4py.MPI": SimpleNamespace(
            Get_library_version=lambda: "Open MPI v5.0.1, package: Open MPI someone@there, Sep 1\0"
        ),
    }
    assert read_library_versions(modules=modules) == {"mpi": "Open MPI v5.0.1", "numpy": "2.0"}


def test_libraries_inside_torch() -> None:
    text = "  - Intel(R) oneAPI Math Kernel Library Version 2024.2-Product Build\n  - Intel(R) MKL-DNN v3.7.1 (Git x)\n"
    assert parse_torch_build(text) == {"mkl": "2024.2-Product", "onednn": "3.7.1"}


def test_secrets_are_not_stored() -> None:
    variables = {
        "NCCL_SECRET": "x",
        "TORCH_HUB_TOKEN": "x",
        "CUDA_API_KEY": "x",
        "UCX_PASSWORD": "x",
        "OMPI_MCA_password_file": "x",
        "TORCH_INDEX": "https://me:hunter2@example.org/simple",
        "PYTORCH_LOGIN": "hf_abcdefghijklmnop",
        "AWS_SECRET_ACCESS_KEY": "x",
        "HF_TOKEN": "x",
    }
    assert select_environment(variables) == {}


def test_variables_that_change_results_are_kept() -> None:
    variables = {
        "NCCL_ALGO": "Ring",
        "NCCL_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "4",
        "KMP_AFFINITY": "granularity=fine",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "OMPI_MCA_btl": "self,tcp",
        "MALLOC_ARENA_MAX": "2",
        "LD_PRELOAD": "/usr/lib/libtcmalloc.so",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
    }
    assert select_environment(variables) == variables


def test_noise_of_a_job_is_left_out() -> None:
    variables = {
        "OMPI_MCA_ess_base_jobid": "123",
        "OMPI_MCA_pmix_server": "x",
        "OMPI_MCA_initial_wdir": "/home/me",
        "OMPI_MCA_num_procs": "4",
        "TORCHELASTIC_RUN_ID": "abc",
        "GLOO_PORT": "4000",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/tmp/nccl_1234_",
        "CUDA_CACHE_PATH": "/home/me/.nv",
        "TORCHINDUCTOR_CACHE_DIR": "/scratch/job1",
        "NCCL_DEBUG_FILE": "nccl.%h.%p",
        "UCX_CONFIG": "/tmp/job77/ucx.conf",
        "PATH": "/bin",
    }
    assert select_environment(variables) == {}


@given(st.dictionaries(st.text(min_size=1), st.text()))
def test_any_environment_can_be_selected_from(variables: dict[str, str]) -> None:
    kept = select_environment(variables)
    assert kept.items() <= variables.items()
    assert select_environment(kept) == kept


def run_git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_git(tmp_path: Path) -> None:
    assert read_git(tmp_path) is None
    run_git(tmp_path, "init", "-b", "trunk")
    assert read_git(tmp_path) is None  # no commit yet
    (tmp_path / "file").write_text("1")
    run_git(tmp_path, "add", "file")
    run_git(tmp_path, "commit", "-m", "one")
    state = read_git(tmp_path)
    assert state is not None
    assert (state.branch, state.dirty, len(state.commit)) == ("trunk", False, 40)

    (tmp_path / "file").write_text("2")
    changed = read_git(tmp_path)
    assert changed is not None
    assert changed.dirty
    run_git(tmp_path, "checkout", "--detach")
    detached = read_git(tmp_path)
    assert detached is not None
    assert detached.branch is None


def test_git_may_be_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_git(tmp_path) is None


def make_system(root: Path, name: str, **changes: object) -> System:
    system = collect_system(root=make_x86(root), nvml=FakeNvml(driver=False), torch_loaded=False, environment={})
    host = msgspec.structs.replace(system.hosts[0], name=name)
    return msgspec.structs.replace(system, hosts=[host], **{"libraries": {}, **changes})


def test_merged_hosts_keep_their_order_and_equal_versions(tmp_path: Path) -> None:
    one = make_system(tmp_path, "b", libraries={"torch": "2.6", "nccl": "2.21"})
    two = make_system(tmp_path, "a", libraries={"torch": "2.6", "nccl": "2.22"})
    merged = merge_systems([one, two])
    assert [host.name for host in merged.hosts] == ["b", "a"]
    assert merged.libraries == {"torch": "2.6", "nccl@b": "2.21", "nccl@a": "2.22"}
    assert (merged.collected_at, merged.git) == (one.collected_at, one.git)


def test_a_library_on_one_host_only_is_named_with_it(tmp_path: Path) -> None:
    one = make_system(tmp_path, "x", libraries={"mpi": "5"}, environment={"NCCL_ALGO": "Ring"})
    two = make_system(tmp_path, "y", python="3.12.9")
    merged = merge_systems([one, two])
    assert merged.libraries == {"mpi@x": "5"}
    assert merged.environment == {"NCCL_ALGO@x": "Ring"}
    assert merged.python == f"{one.python}@x, 3.12.9@y"


def test_hosts_with_one_name_stay_apart(tmp_path: Path) -> None:
    systems = [make_system(tmp_path, "vm", libraries={"torch": version}) for version in ("2.6", "2.7")]
    assert merge_systems(systems).libraries == {"torch@vm#0": "2.6", "torch@vm#1": "2.7"}


def test_merging_one_changes_nothing_and_none_is_refused(tmp_path: Path) -> None:
    system = make_system(tmp_path, "a", libraries={"torch": "2.6"})
    assert merge_systems([system]) == system
    with pytest.raises(ValueError, match="no system"):
        merge_systems([])
