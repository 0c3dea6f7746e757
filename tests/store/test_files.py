"""Files that a user names: whole or as before, and what is no regular file is written through."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from stepscope.core.errors import StoreWriteError
from stepscope.core.files import output_file, write_file_atomically, write_output


def test_a_new_file_is_made_and_its_folders_where_that_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(StoreWriteError, match="No such file"):
        write_output(tmp_path / "a" / "b.txt", b"content")
    assert list(tmp_path.iterdir()) == []
    write_output(tmp_path / "a" / "b.txt", b"content", make_folders=True)
    assert (tmp_path / "a" / "b.txt").read_bytes() == b"content"
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b.txt"]


def test_an_existing_file_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "secret.csv"
    path.touch(0o600)
    write_output(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("target_exists", [True, False])
def test_a_link_stays_and_its_target_is_written(tmp_path: Path, target_exists: bool) -> None:
    target, link = tmp_path / "elsewhere" / "target", tmp_path / "link"
    target.parent.mkdir()
    if target_exists:
        target.write_bytes(b"old")
    link.symlink_to("elsewhere/target")
    write_output(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert [path.name for path in target.parent.iterdir()] == ["target"]


def test_a_device_is_written_through(tmp_path: Path) -> None:
    link = tmp_path / "null"
    link.symlink_to("/dev/null")
    for path in (Path("/dev/null"), link):
        write_output(path, b"gone")
        assert stat.S_ISCHR(os.stat(path).st_mode)
    with pytest.raises(StoreWriteError, match="No space left"):
        write_output(Path("/dev/full"), b"too much")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_a_fifo_is_written_through(tmp_path: Path) -> None:
    fifo, got = tmp_path / "fifo", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: got.append(fifo.read_bytes()))
    reader.start()
    write_output(fifo, b"x" * 200_000)
    reader.join(10)
    assert [len(content) for content in got] == [200_000]
    assert stat.S_ISFIFO(fifo.stat().st_mode)


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link"])
@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_stdout_is_written_in_its_place(tmp_path: Path, name: str, kind: str) -> None:
    """A file that stdout was sent to is neither replaced nor begun anew: what was printed before stays before."""
    if name == "link":
        (tmp_path / "link").symlink_to("/dev/stdout")
        name = str(tmp_path / "link")
    script = (
        "import pathlib, sys\nfrom stepscope.core.files import write_output\n"
        f"print('before')\nwrite_output(pathlib.Path({name!r}), b'content\\n')\nprint('after')"
    )
    out = tmp_path / "out"
    with out.open("wb") as file:
        target = file if kind == "file" else subprocess.PIPE
        done = subprocess.run([sys.executable, "-c", script], stdout=target, check=True)
    content = out.read_bytes() if kind == "file" else done.stdout
    assert content == b"before\ncontent\nafter\n"


def write_half(path: Path, fault: Exception) -> None:
    with output_file(path) as scratch:
        scratch.write_bytes(b"half")
        raise fault


@pytest.mark.parametrize("fault", [ZeroDivisionError(), OSError(errno.EIO, "the disk is broken")])
def test_a_failure_leaves_what_was_there(tmp_path: Path, fault: Exception) -> None:
    path = tmp_path / "kept"
    path.write_bytes(b"old")
    with pytest.raises((ZeroDivisionError, StoreWriteError)):
        write_half(path, fault)
    assert path.read_bytes() == b"old"
    assert [one.name for one in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("name", ["x" * 255, "x" * 300, "folder", "file/inside", "/proc/nothing", "/sys/nothing"])
def test_names_that_cannot_be_written_are_said(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    if name == "x" * 255:  # as long as a name may be, with the scratch file beside it
        write_output(tmp_path / name, b"content")
        return
    with pytest.raises(StoreWriteError, match="cannot be written"):
        write_output(tmp_path / name, b"content")


def test_evidence_replaces_a_link_and_leaves_its_target(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "run.json"
    target.write_bytes(b"precious")
    link.symlink_to(target)
    write_file_atomically(link, b"{}")
    assert (target.read_bytes(), link.read_bytes(), link.is_symlink()) == (b"precious", b"{}", False)
