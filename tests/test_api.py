"""The functions of `stepscope`: examples run, docstrings say what is returned, names stay functions."""

from __future__ import annotations

import contextlib
import doctest
import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import stepscope
from stepscope import api
from stepscope.core.errors import StepscopeError

FUNCTIONS = {
    name: found
    for name in stepscope.__all__
    if inspect.isfunction(found := getattr(api, name, None) or getattr(stepscope, name))
}
PACKAGES = ("compare", "measure", "report", "run")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every example finds where it runs: a store with one run, and a recording."""
    place = tmp_path_factory.mktemp("examples")
    run_example("bench_op", place)
    run_example("record", place)
    return place


def run_example(name: str, folder: Path) -> None:
    known = {"stepscope": stepscope, "torch": pytest.importorskip("torch"), "Path": Path}
    (example,) = doctest.DocTestFinder(recurse=False).find(FUNCTIONS[name], name, globs=known)
    assert example.examples, f"{name} has no example"
    said: list[str] = []
    with contextlib.chdir(folder):
        result = doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert result.failed == 0, "".join(said)


@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - {"bench_op", "record"}))
def test_the_example_of_a_function_runs(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`latest` is a run of one operator in all of them: some leave runs behind."""
    monkeypatch.delenv("STEPSCOPE_STORE", raising=False)
    run_example(name, shutil.copytree(folder, tmp_path / "own"))


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_a_docstring_says_what_is_returned_and_names_every_parameter(name: str) -> None:
    text = inspect.getdoc(FUNCTIONS[name]) or ""
    first = text.split("\n\n")[0]
    assert first.endswith((".", "way.")), first
    assert not first.startswith(("Of ", "Return", "This "))
    unnamed = [one for one in inspect.signature(FUNCTIONS[name]).parameters if f"`{one}`" not in text]
    assert set(unnamed) <= SHARED, unnamed


SHARED = {"settings", "device", "processes", "store", "dtype"}
"""Parameters that mean the same in every function and are explained where they matter most."""


WRONG = {
    "level must be between": [
        lambda run: stepscope.compare(run, run, level=7),
        lambda run: stepscope.compare_implementations(run, level=0),
        lambda run: stepscope.ab(stepscope.plan("ops", run.plan.cases), stepscope.plan("ops", run.plan.cases), level=1),
    ],
    "without nope": [lambda run: stepscope.bench_collective("all_reduce", backend="nope")],
    "there is no option 'colour'": [lambda run: stepscope.plan("ops", run.plan.cases, colour="red")],
    "there is nothing that measures 'tea'": [lambda run: stepscope.plan("tea", run.plan.cases)],
    "there is no format 'pdf'": [lambda run: stepscope.report(run, kind="pdf")],
    "no run 'nowhere'": [lambda run: stepscope.compare(run, "nowhere")],
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_use_is_refused_before_anything_starts(
    message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("STEPSCOPE_STORE", raising=False)
    run = stepscope.find_run("latest")
    before = sorted(Path("stepscope-runs").iterdir())
    for call in WRONG[message]:
        with pytest.raises(StepscopeError, match=message):
            call(run)
    assert sorted(Path("stepscope-runs").iterdir()) == before


def test_runs_are_named_in_every_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("STEPSCOPE_STORE", raising=False)
    run = stepscope.find_run("latest")
    for name in (run, run.folder, str(run.folder), run.id, run.id[:-2], "latest"):
        assert stepscope.find_run(name).id == run.id
        assert len(stepscope.compare(run, name).rows) == 1


def test_the_functions_are_listed() -> None:
    assert set(FUNCTIONS) | {"record", "read_traces"} <= set(dir(stepscope))
    assert callable(stepscope.record)
    assert callable(stepscope.read_traces)


ORDERS = [
    *([f"import stepscope.{name}"] for name in PACKAGES),
    ["import stepscope.api", "import stepscope.measure"],
    ["import stepscope.measure", "import stepscope.api"],
    [
        "import stepscope.compare.verdict",
        *(f"import stepscope.{name}" for name in reversed(PACKAGES)),
    ],
]


def test_functions_stay_functions_whatever_was_imported_before() -> None:
    """Without torch, which none of them needs."""
    script = f"""
import inspect, sys
for order in {ORDERS}:
    for name in [name for name in sys.modules if name.partition(".")[0] == "stepscope"]:
        del sys.modules[name]
    for line in order:
        exec(line)
    import stepscope
    assert all(callable(getattr(stepscope, name)) for name in {PACKAGES}), order
    assert "body" in inspect.signature(stepscope.measure).parameters, order
    assert stepscope.measure.MeasureSettings is stepscope.MeasureSettings, order
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
