"""Each recipe of the docs, command by command, as a reader would type it."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from stepscope.cli.main import run
from stepscope.core.errors import ExitCode

RECIPES = sorted((Path(__file__).parents[2] / "docs" / "recipes").glob("*.md"))
VERDICTS = {"compare", "check"}
"""Verbs whose answer depends on the machine: any verdict will do, an error will not."""
TRAIN = """
import torch

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(60):
    optimizer.zero_grad()
    model(torch.randn(32, 64)).sum().backward()
    optimizer.step()
"""
MODEL = """
import torch


def build(device, batch_size):
    layer, batch = torch.nn.Linear(64, 64, device=device), torch.randn(batch_size, 64, device=device)
    return lambda: layer(batch)
"""


def test_there_is_a_recipe_for_each_question() -> None:
    assert len(RECIPES) == 6
    landing = (RECIPES[0].parents[1] / "index.md").read_text()
    for recipe in RECIPES:
        assert f"recipes/{recipe.stem}" in landing
        assert len(recipe.read_text().splitlines()) <= 45, "a recipe fits a screen"


@pytest.mark.ranks
@pytest.mark.usefixtures("forked_processes")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_works(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPSCOPE_STORE", str(tmp_path / "stepscope-runs"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    Path("train.py").write_text(TRAIN)
    Path("model.py").write_text(MODEL)
    commands = re.findall(r"^ {4}stepscope (.+)$", recipe.read_text(), flags=re.MULTILINE)
    assert commands
    for command in commands:
        words = shlex.split(command)
        allowed = {ExitCode.DONE, *({ExitCode.REGRESSION, ExitCode.UNDECIDED} if words[0] in VERDICTS else ())}
        assert run(words) in allowed, command
