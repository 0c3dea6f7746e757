"""Machine code that is kept: made once, loaded without the compiler, made again where it is damaged or another's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stepscope.formats import machine_code

LOAD = """
import sys, numpy as np
from stepscope.formats.machine_code import load
text = np.frombuffer(b"aten::addmm" + bytes(8), np.uint8)
print(load("json_text", "hash_text", "ii")(text.ctypes.data, text.ctypes.data + 11), "numba" in sys.modules)
"""


def test_code_is_made_once_and_then_loaded_without_numba(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def load() -> list[str]:
        done = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, check=True)
        return done.stdout.split()

    number, compiled = load()
    assert compiled == "True"
    assert load() == [number, "False"]
    (kept,) = (tmp_path / "stepscope" / "code").iterdir()
    sound = kept.read_bytes()
    for place in (5, len(sound) // 2, len(sound) - 10):
        kept.write_bytes(sound[:place] + bytes([sound[place] ^ 16]) + sound[place + 1 :])
        assert load() == [number, "True"]
    assert load() == [number, "False"]


def test_code_of_another_user_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine_code.load.__wrapped__("json_text", "hash_text", "ii")
    (kept,) = (tmp_path / "stepscope" / "code").iterdir()
    assert machine_code._read(kept) is not None
    monkeypatch.setattr("os.getuid", lambda: kept.stat().st_uid + 1)
    assert machine_code._read(kept) is None


def test_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    hash_text = machine_code.load.__wrapped__("json_text", "hash_text", "ii")
    text = np.frombuffer(b"aten::add" + bytes(8), np.uint8)
    assert hash_text(text.ctypes.data, text.ctypes.data + 9) == hash_text(text.ctypes.data, text.ctypes.data + 9) != 0
