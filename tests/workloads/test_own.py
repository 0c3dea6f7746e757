"""A user's own model through the small protocol."""

from __future__ import annotations

from pathlib import Path

import pytest
from suite_runs import measure

from stepscope.errors import UsageError
from stepscope.workloads.own import is_own, make_own_case

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
    assert is_own(f"{file}:build")
    case = make_own_case(f"{file}:build", device="cpu", batch_size=16, precision=None)
    assert case.benchmark.id == "my-model/ootb/step/build"
    (found,) = measure(tmp_path / "runs", case).cases()
    summary = found.summary()
    assert summary is not None
    assert found.score() == pytest.approx(16 / summary.median_s)
    assert found.result.observed["peak_memory_bytes"] > 0


def test_examples_are_those_of_the_functions_own_batch(file: Path, tmp_path: Path) -> None:
    case = make_own_case(f"{file}:build", device="cpu", batch_size=None, precision=None)
    (found,) = measure(tmp_path / "runs", case).cases()
    summary = found.summary()
    assert summary is not None
    assert found.score() == pytest.approx(64 / summary.median_s)
    file.write_text("def build(device):\n    return lambda: sum(range(1000))\n")
    (found,) = measure(
        tmp_path / "more", make_own_case(str(file), device="cpu", batch_size=None, precision=None)
    ).cases()
    assert found.result.score is not None
    assert found.result.score.unit == "step/s"


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
    case = make_own_case(f"{file}:make", device="cpu", batch_size=None, precision=None)
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
    case = make_own_case(f"{file}:{name}", device="cpu", batch_size=None, precision=None)
    (found,) = measure(tmp_path / "runs", case).cases()
    assert found.result.failure is not None
    import re

    assert re.search(message, f"{found.result.failure.kind} {found.result.failure.message}")


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(UsageError, match="no such file"):
        make_own_case("nowhere.py:build", device="cpu", batch_size=None, precision=None)
