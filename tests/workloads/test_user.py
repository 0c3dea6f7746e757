"""A user's own model through the small protocol."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from suite_runs import measure

from stepscope.bench.workloads.user import is_user_model, make_user_case, prepare_user_model
from stepscope.cli.main import run
from stepscope.cli.resume import rehearse
from stepscope.core.errors import BadInputError, UsageError
from stepscope.formats.timeline import OPERATOR
from stepscope.measure import open_device
from stepscope.run.recorded import TRACED_STEPS
from stepscope.store import MeasuredCase, StoredRun, create_run
from stepscope.traces import read_traces

EXAMPLE = """
import torch

def build(device, batch_size=64):
    model = torch.nn.Linear(32, 10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = torch.randn(batch_size, 32, device=device), torch.randint(10, (batch_size,), device=device)
    def step():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return step
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_model.py"
    path.write_text(EXAMPLE)
    return path


def test_a_function_that_builds_a_step_is_measured(file: Path, tmp_path: Path) -> None:
    assert is_user_model(f"{file}:build")
    case = make_user_case(f"{file}:build", device="cpu", batch_size=16, precision=None)
    assert case.benchmark.id == "my-model/ootb/step/build"
    (found,) = measure(tmp_path / "runs", case).cases()
    summary = found.summary()
    assert summary is not None
    assert found.score() == pytest.approx(16 / summary.median_s)
    assert found.result.facts["peak_memory_bytes"] > 0


def test_examples_are_those_of_the_functions_own_batch(file: Path, tmp_path: Path) -> None:
    case = make_user_case(f"{file}:build", device="cpu", batch_size=None, precision=None)
    (found,) = measure(tmp_path / "runs", case).cases()
    summary = found.summary()
    assert summary is not None
    assert found.score() == pytest.approx(64 / summary.median_s)
    file.write_text("def build(device):\n    return lambda: sum(range(1000))\n")
    (found,) = measure(
        tmp_path / "more", make_user_case(str(file), device="cpu", batch_size=None, precision=None)
    ).cases()
    assert found.result.score is not None
    assert found.result.score.unit == "step/s"


def test_a_file_is_executed_once(file: Path, tmp_path: Path) -> None:
    """It may load data, or register what can be registered once."""
    traces = tmp_path / "executed"
    file.write_text(
        f"with open({str(traces)!r}, 'a') as out:\n    out.write('x')\n"
        "def build(device, batch_size=4):\n    return lambda: None\n"
    )
    case = make_user_case(str(file), device="cpu", batch_size=None, precision=None)
    (found,) = measure(tmp_path / "runs", case).cases()
    assert found.result.score is not None
    assert found.result.score.work == 4
    assert traces.read_text() == "x"


def test_objects_with_a_step_may_say_more(file: Path, tmp_path: Path) -> None:
    file.write_text(
        "class Own:\n"
        "    examples = 5\n"
        "    def step(self):\n"
        "        return sum(range(1000))\n"
        "    def check(self):\n"
        "        raise ValueError('two and two are five')\n"
        "def make(**given):\n"
        "    assert given['device'] == 'cpu'\n"
        "    return Own()\n"
    )
    case = make_user_case(f"{file}:make", device="cpu", batch_size=None, precision=None)
    (found,) = measure(tmp_path / "runs", case).cases()
    assert found.result.failure is not None
    assert "two and two are five" in found.result.failure.message


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (EXAMPLE, "construct", "there is no function construct"),
        ("def build(device):\n    return 3\n", "build", "returned int, which has no step"),
        ("def build(device, batch_size):\n    return print\n", "build", r"build needs batch_size \(--batch-size\)"),
        ("def build(device:\n", "build", "SyntaxError|was never closed|invalid syntax"),
    ],
)
def test_what_is_wrong_with_it_is_said(file: Path, tmp_path: Path, text: str, name: str, message: str) -> None:
    file.write_text(text)
    case = make_user_case(f"{file}:{name}", device="cpu", batch_size=None, precision=None)
    (found,) = measure(tmp_path / "runs", case).cases()
    assert found.result.failure is not None
    assert re.search(message, f"{found.result.failure.kind} {found.result.failure.message}")


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(UsageError, match="no such file"):
        make_user_case("nowhere.py:build", device="cpu", batch_size=None, precision=None)


# --- what is asked for and what is used ------------------------------------------------------------------------------

PLAIN = "def build(device):\n    return lambda: sum(range(1000))\n"
HIDDEN = "import functools\ndef _make(size, device):\n    return lambda: size\nbuild = functools.partial(_make, 3)\n"
"""Its parameters show only when it is executed."""


def measure_text(file: Path, text: str, **chosen: Any) -> MeasuredCase:
    file.write_text(text)
    asked = {"device": "cpu", "batch_size": None, "precision": None, **chosen}
    (found,) = measure(file.parent / "runs", make_user_case(str(file), **asked)).cases()
    return found


@pytest.mark.parametrize("asked", [{"batch_size": 1_000_000}, {"precision": "bogus"}])
def test_what_build_cannot_take_is_refused(file: Path, asked: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"build takes no {next(iter(asked))}") as refused:
        measure_text(file, PLAIN, **asked)
    assert refused.value.where == str(file)
    assert refused.value.hint is not None
    assert "leave --" in refused.value.hint
    failure = measure_text(file, HIDDEN, **asked).result.failure
    assert failure is not None
    assert f"build takes no {next(iter(asked))}" in failure.message
    assert failure.hint


def test_a_precision_is_given_to_a_function_that_takes_one(file: Path) -> None:
    text = "def build(device, precision='fp32'):\n    assert precision == 'my8'\n    return lambda: None\n"
    assert measure_text(file, text, precision="my8").result.failure is None
    failure = measure_text(file, text.replace("='fp32'", "")).result.failure
    assert failure is not None
    assert "build needs precision (--precision)" in failure.message


@pytest.mark.parametrize(
    "text",
    [
        "def build(device, batch_size=64):\n    return lambda: None\n",
        "def build(device, *, batch_size=64):\n    return lambda: None\n",
        "SIZE = 64\ndef build(device, batch_size=SIZE):\n    return lambda: None\n",
    ],
)
def test_the_case_has_the_batch_size_that_is_used(file: Path, text: str) -> None:
    found = measure_text(file, text)
    assert found.result.case.batch_size == 64
    assert found.result.score is not None
    assert found.result.score.work == 64
    assert found.result.case.key == measure_text(file, text, batch_size=64).result.case.key


@pytest.mark.parametrize(
    "text",
    [
        "def build(device, batch_size=8 * 8):\n    return lambda: None\n",
        "def make(device, batch_size=64):\n    return lambda: None\nbuild = make\n",
        "def build(device):\n    return None\ndef build(device, batch_size=64):\n    return lambda: None\n",
        "import functools\n@functools.cache\ndef build(device, batch_size=64):\n    return lambda: None\n",
    ],
)
def test_a_batch_size_that_only_running_tells_is_observed(file: Path, text: str) -> None:
    found = measure_text(file, text)
    assert found.result.case.batch_size is None
    assert found.result.facts["batch_size"] == 64
    assert found.result.score is not None
    assert found.result.score.work == 64


@pytest.mark.parametrize("told", ["0", "-3", "float('nan')", "True", "'many'"])
def test_examples_are_a_number(file: Path, told: str) -> None:
    text = f"def build(device):\n    def step():\n        pass\n    step.examples = {told}\n    return step\n"
    failure = measure_text(file, text).result.failure
    assert failure is not None
    assert "no number of examples" in failure.message


# --- checks ----------------------------------------------------------------------------------------------------------

CHECKED = """
class Own:
    def step(self):
        return 3
    def check(self):
        {}
def build(device):
    return Own()
"""


@pytest.mark.parametrize(
    "answer",
    ["pass", "return True", "import numpy; return numpy.bool_(True)", "import torch; return torch.tensor(3).eq(3)"],
)
def test_a_check_passes_with_none_or_true(file: Path, answer: str) -> None:
    found = measure_text(file, CHECKED.format(answer))
    assert found.result.failure is None
    assert found.result.notices == [] or "not_checked" not in {one.kind for one in found.result.notices}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("return False", r"check\(\) returned False"),
        ("return 0", r"check\(\) returned 0"),
        ("return ''", r"check\(\) returned ''"),
        ("return [False, 'far off']", r"check\(\) returned \[False"),
        ("return 0.25", r"check\(\) returned 0.25"),
        ("return 'the loss is far off'", "^the loss is far off$"),
        ("import torch; return torch.zeros(2) == 0", r"check\(\) failed: RuntimeError"),
        ("assert 2 + 2 == 5, 'sums'", r"check\(\) failed: AssertionError: sums"),
        ("raise SystemExit(3)", r"check\(\) failed: my_model.py called sys.exit\(3\)"),
    ],
)
def test_a_check_that_fails_leaves_no_score(file: Path, answer: str, message: str) -> None:
    found = measure_text(file, CHECKED.format(answer))
    assert found.result.failure is not None
    assert found.result.failure.kind == "wrong_result"
    assert re.search(message, found.result.failure.message)
    assert found.result.failure.hint
    assert found.score() is None


# --- files that raise ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("import sys\ndef build(device):\n    sys.exit(3)\n", 3, "my_model.py called sys.exit(3)"),
        ("import argparse\nargparse.ArgumentParser().parse_args(['--what'])\n", 2, "my_model.py called sys.exit(2)"),
        ("def build(device):\n    def step():\n        exit('no')\n    return step\n", 3, "called sys.exit('no')"),
        ("def build(device):\n    return 1 / 0\n", 2, "ZeroDivisionError"),
        ("import json\ndef build(device):\n    return json.loads('{')\n", 3, "JSONDecodeError"),
        ("def build(device:\n", 1, "SyntaxError"),
    ],
)
def test_a_failure_names_the_line_of_the_file(file: Path, text: str, line: int, message: str) -> None:
    failure = measure_text(file, text).result.failure
    assert failure is not None
    assert failure.kind == "exception"
    assert message in failure.message
    assert failure.where == f"{file}:{line}"
    assert failure.hint is not None
    assert f"line {line} of my_model.py: {text.splitlines()[line - 1].strip()}" in failure.hint


def test_a_failure_in_what_the_file_uses_names_both_places(file: Path) -> None:
    (file.parent / "beside_my_model.py").write_text("def halve(value):\n    return value / 0\n")
    failure = measure_text(
        file, "import beside_my_model\ndef build(device):\n    beside_my_model.halve(3)\n"
    ).result.failure
    assert failure is not None
    assert failure.where == f"{file}:3"
    assert failure.hint is not None
    assert failure.hint.endswith(f"(raised by halve, {file.parent / 'beside_my_model.py'}:2)")


def test_a_timed_step_may_fail_too(file: Path) -> None:
    text = (
        "def build(device):\n    left = [3, 2, 1]\n    def step():\n        if not left.pop():\n"
        "            pass\n    return step\n"
    )
    failure = measure_text(file, text).result.failure
    assert failure is not None
    assert failure.message == "IndexError: pop from empty list"
    assert failure.where == f"{file}:4"


def test_too_little_memory_is_still_told_apart(file: Path) -> None:
    failure = measure_text(file, "def build(device):\n    raise MemoryError('no room')\n").result.failure
    assert failure is not None
    assert failure.kind == "out_of_memory"
    assert failure.hint is not None
    assert "smaller" in failure.hint
    assert "line 2 of my_model.py" in failure.hint


def test_who_interrupts_a_file_is_obeyed(file: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        measure_text(file, "def build(device):\n    raise KeyboardInterrupt\n")


def test_steps_are_recorded_after_the_timed_ones(file: Path, tmp_path: Path) -> None:
    case = make_user_case(f"{file}:build", device="cpu", batch_size=8, precision=None)
    run = measure(tmp_path / "runs", case, trace=True)
    folder = run.folder / str(run.cases()[0].result.facts["trace"])
    timeline = read_traces(folder, cache=False).timeline()
    assert len(timeline.steps) == TRACED_STEPS
    assert "aten::addmm" in timeline.texts


def test_steps_that_mark_themselves_are_recorded_once(file: Path, tmp_path: Path) -> None:
    """`stepscope.step()` may stay in a program, whoever counts its steps."""
    file.write_text(
        "import stepscope, torch\ndef build(device):\n    def step():\n        torch.ones(3).relu()\n"
        "        stepscope.step()\n    return step\n"
    )
    case = make_user_case(f"{file}:build", device="cpu", batch_size=None, precision=None)
    run = measure(tmp_path / "runs", case, trace=True)
    timeline = read_traces(run.folder / str(run.cases()[0].result.facts["trace"]), cache=False).timeline()
    assert len(timeline.steps) == TRACED_STEPS
    rows = [row for row in timeline.rows(OPERATOR) if timeline.text("name", int(row)) == "aten::relu"]
    assert sorted(int(timeline.column("step")[row]) for row in rows) == [span.number for span in timeline.steps]


def test_a_run_goes_on_with_the_file_it_was_planned_with(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And is left as it was, if that is not there."""
    file.write_text(PLAIN)
    command = ["stepscope", "bench", "workload", f"{file}:build", "--quick"]
    job = rehearse(command)
    assert job is not None
    store = tmp_path / "runs"
    folder = create_run(store, verb=job.verb, name="own", command=command, request=job.request, cases=job.cases)
    resume = ["runs", "resume", folder.name, "--store", str(store), "--json"]
    assert run(resume) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert f"runs the file {file}" in error["message"]
    assert error["hint"].endswith("--trust")
    resume.append("--trust")
    file.write_text(PLAIN + "# another\n")
    assert run(resume) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert "has changed since the run was planned" in error["message"]
    assert error["where"] == str(file)
    file.write_text(PLAIN)
    assert run(resume) == 0
    assert [one.status for one in StoredRun(folder).results] == ["ok"]


def test_a_file_that_changes_during_a_run_fails_its_cases(file: Path) -> None:
    file.write_text(PLAIN)
    case = make_user_case(f"{file}:build", device="cpu", batch_size=None, precision=None)
    file.write_text(PLAIN + "# another\n")
    with pytest.raises(BadInputError, match="has changed since the run was planned"):
        prepare_user_model(case, open_device("cpu"))


# --- from the command line -------------------------------------------------------------------------------------------


def call_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    capsys.readouterr()
    code = run(["bench", "workload", *arguments, "--quick", "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "option",
    [
        ("--data", "FILE"), ("--scale", "tiny"), ("--no-check",), ("--loader-workers", "2"),
        ("--no-loader",), ("--compile-backend", "eager"), ("--largest-batch", "8"), ("--batch-resolution", "0.5"),
        ("--requests", "64"), ("--parallel", "ddp"), ("--backend", "gloo"),
        ("--largest-batch", "4", "--find-batch", "throughput"),
        ("--rate", "3"), ("--accumulate", "2"), ("--find-batch", "throughput"), ("--ranks", "2"),
        ("--batch-size", "9"), ("--batch-sizes", "1,9"), ("--precision", "bf16"),
    ],
)  # fmt: skip
def test_no_option_is_silently_without_effect(
    file: Path, option: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(PLAIN)
    given = [str(file) if part == "FILE" else part for part in option]
    code, answer = call_json(capsys, f"{file}:build", *given, "--store", str(tmp_path / "runs"))
    assert code == 2, answer
    assert answer["error"]["message"]
    assert answer["error"]["hint"]
    assert not (tmp_path / "runs").exists()


def test_a_file_that_exits_still_gets_an_answer(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("import argparse\nargparse.ArgumentParser().parse_args(['--what'])\n")
    code, answer = call_json(capsys, str(file), "--store", str(tmp_path / "runs"))
    assert code == 1
    (case,) = answer["data"]["cases"]
    assert case["status"] == "failed"
    assert "my_model.py called sys.exit(2)" in case["failure"]["message"]


def test_the_answer_has_the_batch_size_that_is_used(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for size in ("64", "8 * 8"):
        file.write_text(f"def build(device, batch_size={size}):\n    return lambda: sum(range(1000))\n")
        code, answer = call_json(capsys, str(file), "--store", str(tmp_path / "runs"))
        assert code == 0
        assert answer["data"]["cases"][0]["batch_size"] == 64
