"""Entry points of installed packages: found as `importlib.metadata` finds them, which is imported only for them."""

from __future__ import annotations

import sys
import zipfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from stepscope.core.plugins import entry_points

GROUP = "stepscope.metrics"
DECLARED = f"[{GROUP}]\nnoise = noise_package:register\n"


def install(folder: Path) -> Path:
    """A package as an installer leaves it."""
    info = folder / "noise_package-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: noise-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(DECLARED)
    return folder


def names(group: str = GROUP) -> list[str]:
    found = [entry.name for entry in entry_points(group)]
    assert found == [entry.name for entry in metadata.entry_points(group=group)]
    return found


def test_entry_points_of_folders_and_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "noise" not in names()
    folder = install(tmp_path / "folder")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(folder))
        assert "noise" in names()
        assert "noise" not in names("stepscope.trace_formats")
        patch.syspath_prepend(str(tmp_path / "is_not_there"))
        assert "noise" in names()
    egg = tmp_path / "noise_package-1.0.egg"
    egg.mkdir()
    (folder / "noise_package-1.0.dist-info").rename(egg / "EGG-INFO")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(egg))
        assert "noise" in names()
    archive = tmp_path / "packages.zip"
    packed = install(tmp_path / "packed")
    with zipfile.ZipFile(archive, "w") as file:
        for path in packed.rglob("*"):
            file.write(path, path.relative_to(packed))
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(archive))
        assert "noise" in names()
    assert "noise" not in names()


def test_other_finders_of_packages_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools that install for development may bring a finder of their own."""
    found = metadata.PathDistribution(install(tmp_path) / "noise_package-1.0.dist-info")
    finder = SimpleNamespace(find_distributions=lambda context: [found], find_spec=lambda *_: None)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder])
    assert "noise" in names()
