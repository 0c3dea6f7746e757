"""Each addition of CONTRIBUTING.md is made in a copy of the package and tried; the files it touches are counted."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_recipes import TRAIN

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
MOST_FILES = {
    "an operator": 1,
    "a collective": 2,
    "a metric": 1,
    "an analysis with its section": 2,
    "a trace format": 1,
    "a model": 3,
}
SECTIONS = dict(re.findall(r"^## Add (.+)\n((?:(?!^## ).*\n)*)", PAGE, flags=re.MULTILINE))
BLOCK = re.compile(r"^```(\w+)(?: (title|append)=\"([^\"]+)\")?\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def apply_addition(section: str, copy: Path) -> set[str]:
    """Write new files, append to present ones, and apply patches; the files of the package that were touched."""
    touched = set()
    for language, how, name, body in BLOCK.findall(section):
        path = copy / name
        if language == "diff":
            done = subprocess.run(["git", "apply"], input=body, cwd=copy, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"the patch does not apply:\n{body}\n{done.stderr}"
            touched |= set(re.findall(r"^\+\+\+ b/(\S+)", body, flags=re.MULTILINE))
        elif how == "append":
            path.write_text(f"{path.read_text()}\n\n{body}")
            touched.add(name)
        elif how == "title":
            assert not path.exists(), f"{name} is there already"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(body)
            touched.add(name)
    return {name for name in touched if name.startswith("src/")}


def test_every_addition_is_tried() -> None:
    assert SECTIONS.keys() - {"Rules"} == MOST_FILES.keys()


@pytest.mark.ranks
@pytest.mark.parametrize("addition", MOST_FILES)
def test_an_addition_works_and_touches_few_files(addition: str, tmp_path: Path) -> None:
    """Commands in a `console` block are run; lines below a command must appear in what it prints, in that order."""
    section = SECTIONS[addition]
    shutil.copytree(ROOT / "src", tmp_path / "src")  # compiled modules too: those of changed files are compiled anew
    (tmp_path / "train.py").write_text(TRAIN)
    touched = apply_addition(section, tmp_path)
    assert 1 <= len(touched) <= MOST_FILES[addition], sorted(touched)
    commands = [body for language, _, _, body in BLOCK.findall(section) if language == "console"]
    assert commands, "an example shows that it works"
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path / "src"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "STEPSCOPE_STORE": str(tmp_path / "runs"),
        "COLUMNS": "140",
    }
    for shown in re.split(r"^\$ ", "".join(commands), flags=re.MULTILINE)[1:]:
        command, *expected = shown.splitlines()
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        pattern = r"[\s\S]*?".join(
            re.escape(line.strip()).replace("…", ".*?").replace(r"\.\.\.", ".*?") for line in expected
        )
        assert re.search(pattern, done.stdout), f"{command}\nprinted\n{done.stdout}\n{done.stderr}\nnot\n{expected}"
