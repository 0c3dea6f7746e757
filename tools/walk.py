"""The modules that a command passes through, in the order in which their functions are first called.

    python tools/walk.py bench ops --op gemm --shape m=64 --quick

Child processes are followed too (ranks, fresh processes): one list per process. Names alone are printed, with how many
functions of each module were called.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

VARIABLE = "STEPSCOPE_WALK"
FOLLOW = """
import os, sys, threading
folder = os.environ["STEPSCOPE_WALK"]
seen = {}
def is_importing(frame):
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
def note(frame, event, arg):
    if event != "call":
        return
    code = frame.f_code
    name = frame.f_globals.get("__name__", "")
    if not code.co_flags & 1 or code.co_name.startswith("<") or not name.startswith("stepscope."):
        return  # bodies of classes and modules are no functions
    if (name, code.co_qualname) not in seen and not is_importing(frame):
        seen[name, code.co_qualname] = None
        with open(f"{folder}/{os.getpid()}", "a") as file:
            file.write(f"{name} {code.co_qualname}\\n")
sys.setprofile(note)
threading.setprofile(note)
"""


def follow(arguments: list[str]) -> list[dict[str, list[str]]]:
    """For each process, by when it began: functions by module, both in the order of their first call."""
    with tempfile.TemporaryDirectory() as folder:
        hook, notes = Path(folder, "hook"), Path(folder, "notes")
        hook.mkdir()
        notes.mkdir()
        (hook / "sitecustomize.py").write_text(FOLLOW)
        python_path = os.pathsep.join(filter(None, [str(hook), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, VARIABLE: str(notes), "PYTHONPATH": python_path}
        done = subprocess.run(
            [sys.executable, "-m", "stepscope", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"the command ended with exit code {done.returncode}:\n{done.stderr}")
        processes = []
        for path in sorted(notes.iterdir(), key=lambda path: path.stat().st_ctime_ns):
            called: dict[str, list[str]] = {}
            for line in path.read_text().splitlines():
                module, _, function = line.partition(" ")
                called.setdefault(module.removeprefix("stepscope."), []).append(function)
            processes.append(called)
        return processes


def main() -> None:
    for number, called in enumerate(follow(sys.argv[1:])):
        print(f"# process {number}: {len(called)} modules, {sum(map(len, called.values()))} functions")
        for module, functions in called.items():
            print(f"{module}  ({len(functions)})")


if __name__ == "__main__":
    main()
