"""Runs in every Python process below `stepscope trace record`, before its program: short, silent, and without torch.

Nothing of Stepscope is loaded until the program loads torch; processes that never do are left alone.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

VARIABLE = "STEPSCOPE_RECORDING"
HERE = os.path.dirname(os.path.abspath(__file__))


class AfterTorch(MetaPathFinder):
    """Finds torch as everybody else does, and is told when it has been loaded.

    It stays until then: many programs look for torch before they load it.
    """

    def __init__(self) -> None:
        self._is_looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch" or self._is_looking:
            return None
        self._is_looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_looking = False
        if spec is not None and spec.loader is not None:
            spec.loader = TellingLoader(spec.loader, self)
        return spec


class TellingLoader(Loader):
    """Loads a module, then begins to watch the program."""

    def __init__(self, loader: Loader, finder: AfterTorch) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Whoever asks the module for its loader gets the real one: resources are found through it.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
            begin()


def begin() -> None:
    """A program must not fail because it cannot be recorded."""
    try:
        try:
            from stepscope.traces.recording import program
        except ImportError:
            import json

            sys.path.append(str(json.loads(os.environ[VARIABLE])["package"]))
            from stepscope.traces.recording import program
        program.begin()
    except Exception as error:  # noqa: BLE001 (the border to somebody else's program)
        sys.stderr.write(f"stepscope: this process cannot be recorded: {type(error).__name__}: {error}\n")


def run_hidden() -> None:
    """This file stands before another of its name, which the program may need."""
    sys.path[:] = [one for one in sys.path if os.path.abspath(one or ".") != HERE]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if VARIABLE in os.environ:
    sys.meta_path.insert(0, AfterTorch())
run_hidden()
