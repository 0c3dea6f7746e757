"""What `bench workload`, `bench list` and `bench suite` refuse, in their own words."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_process import Stepscope

from stepscope.cli.resume import rehearse
from stepscope.records.kinds import WorkloadSpec

SMALL = "dlrm/ootb/train/small.1dev-embed32-fp32"
WRITER = "gpt2/ootb/infer/small-1dev-fp32"


@pytest.mark.parametrize(
    ("arguments", "said", "advice"),
    [
        ((SMALL, "--parallel", "ddp"), "without --ranks this does nothing", "torchrun"),
        ((SMALL, "--backend", "gloo"), "without --ranks this does nothing", "--ranks"),
        ((SMALL, "--largest-batch", "8"), "without --find-batch", "--find-batch"),
        ((SMALL, "--batch-resolution", "0.5"), "without --find-batch", "--find-batch"),
        ((WRITER, "--requests", "5"), "without --rate", "--rate"),
        ((WRITER, "--rate", "nan"), "nan is not a finite number", "--help"),
        ((WRITER, "--rate", "inf"), "inf is not a finite number", "--help"),
        ((SMALL, "--rate", "5"), "only decoders", "gpt2"),
        ((SMALL, "--precision", "tf32"), "a CPU has no tf32", "--device cuda"),
        ((SMALL, "--ranks", "2", "--rate", "3"), "without this", "one device"),
        ((SMALL, "--ranks", "2", "--backend", "fake"), "cannot run on the fake backend", "gloo"),
        ((SMALL, "--ranks", "2", "--find-batch", "throughput"), "without this", "one device"),
        ((SMALL, "--find-batch", "throughput", "--batch-sizes", "1,2"), "exclude each other", "--largest-batch"),
        (("resnet50/optimised/train/1dev-fp32",), "there is no benchmark", "resnet50/optimized/train/1dev-fp32"),
        ((WRITER, "--rate", "5", "--data", __file__), "synthetic prompts", "one of the two"),
        ((SMALL, "--no-check"), "neither checked nor compiled", "leave it out"),
        ((SMALL, "--compile-backend", "eager"), "neither checked nor compiled", "leave it out"),
        ((SMALL, "--no-loader", "--loader-workers", "1"), "has no workers", "one of the two"),
        ((SMALL, "--find-batch", "throughput", "--data", __file__), "the size that they have", "--find-batch"),
        (("dlrm",), "there is no benchmark", "dlrm/ootb/train/A.1dev-embed32-fp32"),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, tuple) else None,
)
def test_what_means_nothing_is_refused(here: Stepscope, arguments: tuple[str, ...], said: str, advice: str) -> None:
    answer = here("bench", "workload", *arguments, "--scale", "tiny", "--json")
    assert answer.code == 2
    assert said in answer.error["message"]
    assert advice in answer.error["hint"]


def test_a_rank_of_a_launcher_starts_no_ranks_itself(here: Stepscope, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29588"}.items():
        monkeypatch.setenv(name, value)
    answer = here("bench", "workload", "--resume", "some-run", "--json")
    assert answer.code == 2
    assert "every rank needs the whole command" in answer.err


def test_recordings_of_fresh_processes_are_kept(here: Stepscope, store: Path) -> None:
    answer = here(
        "bench", "workload", SMALL, "--scale", "tiny", "--processes", "2", "--trace", "--no-loader", "--max-time",
        "50ms", "--warmup-max-time", "1ms", "--json",
    )  # fmt: skip
    assert answer.code == 0
    (case,) = answer.data["cases"]
    assert (Path(answer.data["run"]) / case["trace"] / "recording.json").is_file()


def test_one_unknown_model_among_known_ones_is_refused(here: Stepscope) -> None:
    answer = here("bench", "list", "--model", "dlrm", "--model", "foo", "--json")
    assert answer.code == 2
    assert "foo" in answer.error["message"]
    assert "xlmr" in answer.error["hint"]


def test_a_suite_names_what_its_precision_leaves_out(here: Stepscope) -> None:
    answer = here(
        "bench", "suite", "proxy", "--precision", "fp16", "--model", "xlmr", "--model", "dlrm", "--scale", "tiny",
        "--implementation", "ootb", "--max-time", "1ms", "--warmup-max-time", "1ms", "--no-loader", "--json",
    )  # fmt: skip
    assert answer.code == 0
    assert {case["benchmark"] for case in answer.data["cases"]} == {
        "xlmr/ootb/infer/fb-1dev-A",
        "dlrm/ootb/infer/A.1dev-embed4-fp32",
    }
    assert "do not allow fp16: dlrm/ootb/train/A.1dev-embed32-fp32" in answer.err


def test_tables_that_are_not_there_cannot_be_sharded(here: Stepscope) -> None:
    answer = here(
        "bench", "workload", "resnet50/ootb/train/1dev-fp32", "--ranks", "2", "--parallel", "sharded", "--json"
    )
    assert (answer.code, answer.error["hint"]) == (2, "--parallel ddp or fsdp")


def test_ranks_shard_tables_by_default_where_a_benchmark_is_for_several_devices() -> None:
    """What two ranks make of such a case is measured in tests/workloads/test_ranks.py."""
    command = ["stepscope", "bench", "workload", "dlrm/optimized/train/A.8dev-embed32-fp32", "--ranks", "2"]
    job = rehearse([*command, "--scale", "tiny", "--no-check"])
    assert job is not None
    assert (job.launcher, job.world_size, job.request.check) == ("self", 2, False)
    assert [one.spec.parallel for one in job.cases if isinstance(one.spec, WorkloadSpec)] == ["sharded"]


PRINTING = """
import ctypes, os, sys
print("at import")
def build(device, batch_size=4):
    print("in build")
    def step():
        print("in step")
        os.write(1, b"below Python\\n")
        ctypes.CDLL(None).puts(b"buffered in C")
    return step
"""


def test_what_a_file_prints_does_not_mix_with_the_answer(here: Stepscope, tmp_path: Path) -> None:
    file = tmp_path / "my_model.py"
    file.write_text(PRINTING)
    answer = here("bench", "workload", str(file), "--quick", "--json")
    assert answer.code == 0
    assert answer.data["cases"][0]["status"] == "ok"
    for line in ("at import", "in build", "in step", "below Python", "buffered in C"):
        assert line in answer.err


SLOWER = """
import time
def build(device, batch_size=1):
    return lambda: time.sleep(0.004 + 0.0001 * batch_size**2)
"""


def test_a_search_within_a_given_limit(here: Stepscope, tmp_path: Path) -> None:
    """A step takes 4.1, 4.4, 5.6 and 10.4 ms with 1, 2, 4 and 8 examples, which is the best of those allowed."""
    file = tmp_path / "my_model.py"
    file.write_text(SLOWER)
    search_options = ("--find-batch", "throughput", "--largest-batch", "8", "--batch-resolution", "1")
    answer = here("bench", "workload", str(file), *search_options, "--quick", "--json")
    assert answer.code == 0
    search = answer.data["search"]
    assert search["best_batch_size"] in (4, 8)
    assert [one["batch_size"] for one in search["tries"]][:4] == [1, 2, 4, 8]
    assert answer.data["cases"][-1]["batch_size"] == search["best_batch_size"]


def test_a_step_that_never_returns_is_bounded(here: Stepscope, tmp_path: Path) -> None:
    file = tmp_path / "my_model.py"
    file.write_text(
        "import time\ndef build(device):\n    left = [0, 0, 0, 3600]\n    return lambda: time.sleep(left.pop(0))\n"
    )
    answer = here("bench", "workload", str(file), "--quick", "--json", "--hang-timeout", "10s")
    assert answer.code == 1
    assert "for 10 s" in answer.error["message"]
    assert "measuring" in answer.error["message"]
    assert "--hang-timeout" in answer.error["hint"]


TALKATIVE = """
import atexit, os, threading, time

print("at import")
atexit.register(lambda: print("at exit"))

def talk():
    while True:
        print("from a thread")
        os.write(1, b"below Python\\n")
        time.sleep(0.001)

def build(device):
    threading.Thread(target=talk, daemon=True).start()
    return lambda: time.sleep(0.001)
"""


@pytest.mark.parametrize("options", [("--json",), ()], ids=["json", "text"])
def test_stdout_is_the_answer_alone_whatever_a_user_model_prints(
    stepscope: Stepscope, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Also from threads and at exit, when the case is long closed."""
    file = tmp_path / "talkative.py"
    file.write_text(TALKATIVE)
    answer = stepscope("bench", "workload", str(file), "--device", "cpu", "--quick", *options)
    assert answer.code == 0
    for printed in ("at import", "at exit", "from a thread", "below Python"):
        assert printed in answer.err
        assert printed not in answer.out
    if options:
        assert answer.data["cases"][0]["status"] == "ok"
    else:
        assert "talkative" in answer.out


def test_every_option_of_every_verb_has_one_meaning() -> None:
    """Two options of one name in one verb: the second one silently takes the value of the first."""
    import click

    from stepscope.cli.main import app

    def walk(command: click.Command, path: str) -> None:
        context = click.Context(command)
        names = [name for option in command.get_params(context) for name in (*option.opts, option.name)]
        dests = [option.name for option in command.get_params(context)]
        assert len(dests) == len(set(dests)), path
        spelled = [name for name in names if name is not None and name.startswith("-")]
        assert len(spelled) == len(set(spelled)), path
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                assert found is not None
                walk(found, f"{path} {name}")

    walk(app, "stepscope")
