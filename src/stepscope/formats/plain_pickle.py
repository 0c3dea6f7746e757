"""Pickles of unknown origin, read as plain data.

A pickle is a program that may import and call anything. Python's own unpickler runs it here with only those
instructions that build lists, tuples, dictionaries, texts and numbers; nothing is imported and nothing is called. It is
the unpickler written in Python (as joblib uses it): the compiled one makes room for every number below the highest that
a pickle remembers an object by, so that six bytes take 69 GB. Sizes are bounded, since few bytes can ask for any
amount of memory.
"""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Callable
from typing import Any, NamedTuple

from stepscope.core.errors import BadInputError
from stepscope.formats.source import gc_paused

DEEPEST = 64
_LONGEST_NUMBER = 64
_LIST_MAKERS = frozenset(f"build_{kind}list" for kind in ("int", "double", "bool", "tensor"))
"""Functions of torch.jit._pickle that return the list they are given; no other name is understood."""


class Limits(NamedTuple):
    """The most that is read: the time and memory of reading grow with them."""

    bytes: int = 256 << 20
    objects: int = 8_000_000
    containers: int = 2_000_000
    remembered: int = 4_000_000


STANDARD = Limits()

_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
_CODES = {name: code for code, name in _NAMES.items()}
_STOP = _CODES["STOP"]
_TEXTS = "UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8"
_WRITTEN = "INT LONG FLOAT GET PUT"
_KINDS = {
    "holds more than {} objects": "NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 FLOAT BINFLOAT BINBYTES "
    "SHORT_BINBYTES BINSTRING SHORT_BINSTRING GLOBAL MARK GET BINGET LONG_BINGET " + _TEXTS,
    "holds more than {} lists and dictionaries": "EMPTY_LIST EMPTY_DICT EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 LIST "
    "DICT",
    "remembers more than {} objects": "PUT BINPUT LONG_BINPUT MEMOIZE",
    "": "PROTO FRAME POP POP_MARK REDUCE APPEND APPENDS SETITEM SETITEMS STOP",
}
"""Instructions that are run, by what each adds; in the order of Limits, from objects on."""
_KIND_OF = {_CODES[name]: kind for kind, names in enumerate(_KINDS.values()) for name in names.split()}


def load(data: bytes, *, where: str, most: Limits = STANDARD) -> Any:
    """The object in a pickle of builtin containers and scalars; a BadInputError names the byte of anything else."""
    if len(data) > most.bytes:
        raise BadInputError(f"is larger than {most.bytes} bytes, the most that is read of a pickle", where=where)
    reader = _PlainUnpickler(data)
    try:
        with gc_paused():
            content = reader.run(most)
            _require_shallow(content)
            return content
    except EOFError:
        raise BadInputError(
            f"the pickle ends too early: at byte {len(data)}, inside the instruction at byte {reader.begin}",
            hint="copy the file again; a dump that was cut while it was written cannot be read",
            where=f"{where}: byte {len(data)}",
        ) from None
    except Exception as error:
        raise BadInputError(
            f"the pickle {error if isinstance(error, pickle.UnpicklingError) else f'is damaged ({error!r})'}: refused, "
            "only plain lists, dictionaries, texts and numbers are read",
            hint="dumps of the flight recorder and memory snapshots need nothing else; take the file from where it was "
            "written",
            where=f"{where}: byte {reader.begin}",
        ) from error


_Python: Any = pickle._Unpickler


class _PlainUnpickler(_Python):  # type: ignore[misc]
    """`begin` is the first byte of the instruction that is run."""

    def __init__(self, data: bytes) -> None:
        self.data, self.place, self.begin = data, 0, 0
        self.stack: list[Any] = []
        self.metastack: list[list[Any]] = []
        self.append = self.stack.append
        self.memo: dict[int, Any] = {}
        self.encoding, self.errors = "latin-1", "strict"

    def run(self, most: Limits) -> Any:
        data, dispatch = self.data, self.dispatch
        left = [*most[1:], len(data)]
        while True:
            self.begin = place = self.place
            if place >= len(data):
                raise EOFError
            code = data[place]
            self.place = place + 1
            kind = _KIND_OF.get(code)
            if kind is None:
                raise pickle.UnpicklingError(f"wants to run {_NAMES.get(code, f'unknown instruction {code}')}")
            left[kind] -= 1
            if left[kind] < 0:
                raise pickle.UnpicklingError([*_KINDS][kind].format(most[kind + 1]))
            if code == _STOP:
                return self.stack[-1]
            dispatch[code](self)

    def read(self, size: int) -> bytes:
        begin = self.place
        self.place = begin + size
        if self.place > len(self.data):
            raise EOFError
        return self.data[begin : self.place]

    def readline(self) -> bytes:
        end = self.data.find(b"\n", self.place)
        if end < 0:
            raise EOFError
        return self.read(end + 1 - self.place)

    def find_class(self, module: str, name: str) -> Any:
        if module != "torch.jit._pickle" or name not in _LIST_MAKERS:
            raise pickle.UnpicklingError(f"names {f'{module}.{name}'[:100]!r}, something to import")
        return _keep_list

    def skip_frame(self) -> None:
        self.read(8)

    def set_one(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def set_several(self) -> None:
        self._set(self.pop_mark())

    def make_dictionary(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._set(items)

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise pickle.UnpicklingError("sets keys of what is no dictionary, or a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Hashing a deep tuple can overflow the interpreter's stack: scalars are keys enough.
            if not isinstance(key, str | int | float | bytes | None):
                raise pickle.UnpicklingError("has a key that is no text or number")
            target[key] = value


def _short(step: Callable[[Any], None]) -> Callable[[Any], None]:
    def load_number(reader: _PlainUnpickler) -> None:
        step(reader)
        if reader.place - reader.begin > _LONGEST_NUMBER:
            raise pickle.UnpicklingError("holds a number that is too long")

    return load_number


def _whole(step: Callable[[Any], None]) -> Callable[[Any], None]:
    """Halves of pairs, which no file can be written with, become replacement characters."""

    def load_text(reader: _PlainUnpickler) -> None:
        step(reader)
        text = reader.stack[-1]
        if not text.isascii():
            reader.stack[-1] = text.encode("utf-16-le", errors="surrogatepass").decode("utf-16-le", errors="replace")

    return load_text


_PlainUnpickler.dispatch = {
    **_Python.dispatch,
    **{_CODES[name]: _short(_Python.dispatch[_CODES[name]]) for name in _WRITTEN.split()},
    **{_CODES[name]: _whole(_Python.dispatch[_CODES[name]]) for name in _TEXTS.split()},
    _CODES["FRAME"]: _PlainUnpickler.skip_frame,
    _CODES["SETITEM"]: _PlainUnpickler.set_one,
    _CODES["SETITEMS"]: _PlainUnpickler.set_several,
    _CODES["DICT"]: _PlainUnpickler.make_dictionary,
}


def _keep_list(items: Any) -> list[Any]:
    if not isinstance(items, list):
        raise pickle.UnpicklingError("makes a list of what is none")
    return items


def _require_shallow(content: Any) -> None:
    """UnpicklingError for containers inside each other deeper than DEEPEST, and for list makers among the values."""
    depth: dict[int, int] = {}
    """By id: 0 while what is inside is being looked at."""
    waiting: list[Any] = [(content,)]
    while waiting:
        one = waiting[-1]
        if depth.get(id(one)):
            waiting.pop()  # named several times
            continue
        values = one.values() if type(one) is dict else one
        inside = [value for value in values if type(value) in _CONTAINERS]
        if id(one) not in depth:
            if _keep_list in values:
                raise pickle.UnpicklingError("stores a function")
            depth[id(one)] = 0
            waiting += [value for value in inside if id(value) not in depth]
            if waiting[-1] is not one:
                continue
        waiting.pop()
        depth[id(one)] = 1 + max([depth[id(value)] for value in inside], default=0)
        if depth[id(one)] > DEEPEST + 1:
            raise pickle.UnpicklingError(f"is nested deeper than {DEEPEST} levels")


_CONTAINERS = frozenset((list, tuple, dict))
