"""Compiled functions without the compiler: numba makes their machine code once, llvmlite alone loads it.

numba takes half a second before it runs anything, even from its own cache; this takes a tenth of that. The code is kept
in the user's cache folder under a name made of the sources, the versions and the processor it was made for.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import zlib
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import msgspec

from stepscope.core.files import user_cache, write_file_atomically

P = ParamSpec("P")
R = TypeVar("R")


def part(function: Callable[P, R]) -> Callable[P, R]:
    """Compiled into a function whose machine code is kept as a whole (module machine_code). numba keeps nothing of it:
    its own cache does not notice when a part in another file changes."""
    import numba

    return cast(Callable[P, R], numba.njit(nogil=True)(function))


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """By numba, kept on disk so that only the first use on a machine pays; plain Python where numba is missing."""
    try:
        import numba
    except ImportError:
        return function
    try:
        return cast(Callable[P, R], numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:  # no folder to keep it in
        return cast(Callable[P, R], numba.njit(nogil=True)(function))


_HERE = Path(__file__).parent
_SOURCES = [
    *sorted((_HERE / "readers" / "kineto").glob("*.py")),
    *(_HERE / name for name in ("columns.csv", "timeline.py", "nesting.py")),
]


class _Code(msgspec.Struct):
    symbol: str
    unresolved: list[str]
    """Functions of numba's own, called where an exception is raised: these functions raise none."""
    machine_code: bytes


_loaded: list[Any] = []
"""Engines own the code of the functions that were handed out."""


def is_made(function: str) -> bool:
    """Whether the machine code is there: to make that of the scanner takes some ten seconds, once a machine."""
    import llvmlite.binding as llvm

    return _file_of(function, llvm).exists()


@cache
def load(module: str, function: str, arguments: str) -> Callable[..., int]:
    """A function of a module in the package of the Kineto reader that gives a whole number.

    `arguments` has a letter for each: i for a whole number, p for the address of 64-bit numbers, q of 32-bit ones.
    """
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    path = _file_of(function, llvm)
    code = _read(path)
    if code is None:
        code = _make(module, function, arguments, llvm)
        _write(path, code)
    if "numba" not in sys.modules:
        stop = ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p).value
        for name in code.unresolved:
            llvm.add_symbol(name, stop)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target(llvm))
    engine.add_object_file(llvm.ObjectFileRef.from_data(code.machine_code))
    engine.finalize_object()
    _loaded.append(engine)
    forms = [ctypes.c_int64 if letter == "i" else ctypes.c_void_p for letter in arguments]
    return ctypes.CFUNCTYPE(ctypes.c_int64, *forms)(engine.get_function_address(code.symbol))


def _target(llvm: Any) -> Any:
    features = llvm.get_host_cpu_features().flatten()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features, opt=3, jit=True
    )


def _file_of(function: str, llvm: Any) -> Path:
    versions = (llvm.llvm_version_info, sys.version_info[:2], llvm.get_host_cpu_name())
    made_from = [repr(versions).encode(), llvm.get_host_cpu_features().flatten().encode()]
    identity = hashlib.sha256(b"".join([*made_from, *(source.read_bytes() for source in _SOURCES)])).hexdigest()[:24]
    return user_cache() / "code" / f"{function}-{identity}.code"


def _make(module: str, function: str, arguments: str, llvm: Any) -> _Code:
    from numba import cfunc, types

    CPointer: Any = types.CPointer  # noqa: N806 - numba has no annotations
    forms = {"i": types.int64, "p": CPointer(types.int64), "q": CPointer(types.int32)}
    python = getattr(import_module(f"stepscope.formats.readers.kineto.{module}"), function)
    made = cfunc(types.int64(*(forms[letter] for letter in arguments)), error_model="numpy")(
        getattr(python, "py_func", python)
    )
    code = llvm.parse_assembly(made.inspect_llvm())
    unresolved = [one.name for one in code.functions if one.is_declaration and one.name.startswith(("numba_", "NRT_"))]
    machine_code = _target(llvm).emit_object(code)
    return _Code(made.native_name, unresolved, machine_code)


def _read(path: Path) -> _Code | None:
    """None where there is none, it is damaged, or it is not this user's own: it is going to be run."""
    try:
        if path.stat().st_uid != os.getuid():
            return None
        content = path.read_bytes()
    except OSError:
        return None
    if content[:4] != _checksum(content[4:]):
        return None
    return msgspec.msgpack.decode(content[4:], type=_Code)


def _checksum(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(4, "little")


def _write(path: Path, code: _Code) -> None:
    """Whole or not at all; where nothing can be kept, the next process makes it again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        content = msgspec.msgpack.encode(code)
        write_file_atomically(path, _checksum(content) + content)
    except OSError:
        return
