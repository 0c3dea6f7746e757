"""Which backends torch has is remembered: a command that starts ranks does not load it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepscope.launch.join import _place_of_backends

TRIED = """
import sys
from pathlib import Path
from stepscope.core.errors import UsageError
from stepscope.launch.join import _place_of_backends, require_backend

place = _place_of_backends()
place.parent.mkdir(parents=True)
place.write_bytes(b"[damaged")
require_backend("gloo")
assert "torch" in sys.modules, "what is damaged is asked for again"
for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
    del sys.modules[name]
require_backend("gloo")
assert "torch" not in sys.modules
place.write_bytes(b'["gloo", "carrier-pigeon"]')
require_backend("carrier-pigeon")
"""


def test_torch_is_asked_once(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", TRIED], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_another_torch_is_asked_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = set()
    for version in ("1", "2"):
        package = tmp_path / version / "torch"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "version.py").touch()
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        monkeypatch.syspath_prepend(str(package.parent))
        found.add(_place_of_backends())
    assert len(found) == 2
    assert None not in found


WATCHED = """
import sys
import stepscope.launch as launch
import stepscope.launch.worker as worker
from stepscope.cli.main import run

def watch(*arguments, **options):
    assert "torch.distributed" in sys.modules, "its seconds would count as seconds without a heartbeat"
    print("loaded before it is watched")
    raise SystemExit(7)

launch.rank_session = worker.rank_session = watch
run(sys.argv[1:])
"""


def test_a_rank_of_a_launcher_loads_torch_before_it_is_watched(tmp_path: Path) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "here"}
    words = ["bench", "comms", "--collective", "barrier", "--store", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *words],
        env={**os.environ, **place, **meeting}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "loaded before it is watched" in done.stdout, done.stdout + done.stderr
