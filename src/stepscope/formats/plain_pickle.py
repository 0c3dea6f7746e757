"""Pickles from strangers, read as plain data.

A pickle is a program: Python's own reader would import and call whatever it names. Here a small machine runs the few
instructions that build lists, tuples, dictionaries, texts and numbers, and refuses everything else with its place.
Nothing is imported and nothing is called. Sizes are bounded, since a few bytes can ask for any amount of memory.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable
from itertools import repeat
from typing import Any, NamedTuple, NoReturn

from stepscope.core.errors import BadInputError
from stepscope.formats.gc_pause import gc_paused

DEEPEST = 64
_LONGEST_NUMBER = 64

_OPCODES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
_LIST_MAKERS = frozenset(f"build_{kind}list" for kind in ("int", "double", "bool", "tensor"))
"""Functions of torch.jit._pickle that hand back the list they are given; no other name is understood."""


class Limits(NamedTuple):
    """The most that is read: the time and memory of reading grow with them."""

    bytes: int = 256 << 20
    objects: int = 8_000_000
    containers: int = 2_000_000
    remembered: int = 4_000_000


STANDARD = Limits()


class _Mark:
    pass


class _ListMaker:
    pass


_MARK = _Mark()
_LIST_MAKER = _ListMaker()


def load(data: bytes, *, where: str, most: Limits = STANDARD) -> Any:
    """The object in a pickle of builtin containers and scalars; a BadInputError names the byte of anything else."""
    if len(data) > most.bytes:
        raise BadInputError(f"is larger than {most.bytes} bytes, the most that is read of a pickle", where=where)
    with gc_paused():
        return _Machine(data, where, most).run()


class _Machine:
    def __init__(self, data: bytes, where: str, most: Limits) -> None:
        self.data = data
        self.most = most
        self.where = where
        self.place = 0
        self.begin = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.objects = 0
        self.depth_of: dict[int, int] = {}
        self.containers: list[Any] = []
        """Keeps every container alive, so that its id stays its own."""

    def run(self) -> Any:
        while True:
            self.begin = self.place
            code = self.byte()
            if code == 0x2E:  # STOP
                return self.pop()
            step = _STEPS.get(code)
            if step is None:
                self.refuse(f"the pickle wants to run {_OPCODES.get(code, f'unknown instruction {code}')}")
            step(self)

    def refuse(self, why: str) -> NoReturn:
        raise BadInputError(
            f"{why}: refused, only plain lists, dictionaries, texts and numbers are read",
            hint="dumps of the flight recorder and memory snapshots need nothing else; take the file from where it was "
            "written",
            where=f"{self.where}: byte {self.begin}",
        )

    def refuse_end(self) -> NoReturn:
        raise BadInputError(
            f"the pickle ends too early: at byte {len(self.data)}, inside the instruction at byte {self.begin}",
            hint="copy the file again; a dump that was cut while it was written cannot be read",
            where=f"{self.where}: byte {len(self.data)}",
        )

    # --- bytes and stack -------------------------------------------------------------------------------------------

    def take(self, count: int) -> bytes:
        end = self.place + count
        if end > len(self.data):
            self.refuse_end()
        piece = self.data[self.place : end]
        self.place = end
        return piece

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.place)
        if end < 0:
            self.refuse_end()
        piece = self.data[self.place : end]
        self.place = end + 1
        return piece

    def byte(self) -> int:
        if self.place >= len(self.data):
            self.refuse_end()
        self.place += 1
        return self.data[self.place - 1]

    def number(self, size: int, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(size), "little", signed=signed)

    def push(self, value: Any) -> None:
        self.objects += 1
        if self.objects > self.most.objects:
            self.refuse(f"the pickle holds more than {self.most.objects} objects")
        self.stack.append(value)

    def pop(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            self.refuse("the pickle takes more from its stack than it put there")
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        place = len(self.stack) - 1
        while place >= 0 and self.stack[place] is not _MARK:
            place -= 1
        if place < 0:
            self.refuse("the pickle goes back to a mark that is not there")
        items = self.stack[place + 1 :]
        del self.stack[place:]
        return items

    def top(self, kind: type) -> Any:
        if not self.stack or not isinstance(self.stack[-1], kind):
            self.refuse(f"the pickle puts something into what is no {kind.__name__}")
        return self.stack[-1]

    # --- containers ------------------------------------------------------------------------------------------------

    def new(self, container: Any, items: list[Any]) -> None:
        if len(self.containers) >= self.most.containers:
            self.refuse(f"the pickle holds more than {self.most.containers} lists and dictionaries")
        self.containers.append(container)
        self.depth_of[id(container)] = 1
        self._deepen(container, items)
        self.push(container)

    def _deepen(self, container: Any, items: list[Any]) -> None:
        # Marks themselves never leave the stack with what lies above them.
        if _LIST_MAKER in items:
            self.refuse("the pickle stores one of its own marks")
        deepest = max(map(self.depth_of.get, map(id, items), repeat(0)), default=0)
        if deepest >= DEEPEST:
            self.refuse(f"the pickle is nested deeper than {DEEPEST} levels")
        self.depth_of[id(container)] = max(self.depth_of[id(container)], deepest + 1)

    def append(self, items: list[Any]) -> None:
        target = self.top(list)
        self._deepen(target, items)
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.top(dict)
        if len(items) % 2:
            self.refuse("the pickle gives a key without a value")
        self._deepen(target, items)
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Hashing a deep tuple can overflow the interpreter's stack: scalars are keys enough.
            if not isinstance(key, str | int | float | bytes | None):
                self.refuse("the pickle has a key that is no text or number")
            target[key] = value

    def remember(self, index: int) -> None:
        if len(self.memo) >= self.most.remembered:
            self.refuse(f"the pickle remembers more than {self.most.remembered} objects")
        if not self.stack or self.stack[-1] is _MARK:
            self.refuse("the pickle remembers what is not there")
        self.memo[index] = self.stack[-1]

    def recall(self, index: int) -> None:
        if index not in self.memo:
            self.refuse("the pickle recalls what it never remembered")
        self.push(self.memo[index])

    # --- instructions ----------------------------------------------------------------------------------------------

    def text(self, length: int) -> None:
        try:
            self.push(_whole_characters(self.take(length).decode("utf-8", errors="surrogatepass")))
        except UnicodeDecodeError:
            self.refuse("the pickle holds a text that is no UTF-8")

    def long(self, length: int) -> None:
        if not 0 <= length <= _LONGEST_NUMBER:
            self.refuse("the pickle holds a number that is too long")
        self.push(int.from_bytes(self.take(length), "little", signed=True))

    def written_number(self, make: Callable[[bytes], Any]) -> None:
        line = self.line()
        try:
            if len(line) > _LONGEST_NUMBER:
                raise ValueError("too long")
            self.push(make(line))
        except ValueError:
            self.refuse("the pickle holds a number that is none")

    def global_name(self) -> None:
        module, name = self.line(), self.line()
        if module != b"torch.jit._pickle" or name.decode("ascii", errors="replace") not in _LIST_MAKERS:
            shown = b".".join((module, name))[:100].decode("utf-8", errors="replace")
            self.refuse(f"the pickle names {shown!r}, something to import")
        self.push(_LIST_MAKER)

    def reduce(self) -> None:
        arguments, function = self.pop(), self.pop()
        if function is not _LIST_MAKER or not (isinstance(arguments, tuple) and len(arguments) == 1):
            self.refuse("the pickle wants to call something")
        if not isinstance(arguments[0], list):
            self.refuse("the pickle makes a list of what is none")
        self.push(arguments[0])

    def tuple_of(self, count: int) -> None:
        items = [self.pop() for _ in range(count)][::-1]
        self.new(tuple(items), items)

    def skip(self, count: int) -> None:
        self.take(count)

    def take_bytes(self, count: int) -> None:
        self.push(bytes(self.take(count)))

    def drop(self) -> None:
        if not self.stack:
            self.refuse("the pickle takes more from its stack than it put there")
        self.stack.pop()

    def old_text(self, length: int) -> None:
        self.push(self.take(length).decode("latin-1"))

    def real(self) -> None:
        self.push(struct.unpack(">d", self.take(8))[0])

    def index(self) -> int:
        self.written_number(int)
        return int(self.pop())

    def escaped_text(self) -> None:
        try:
            self.push(_whole_characters(self.line().decode("raw-unicode-escape")))
        except UnicodeDecodeError:
            self.refuse("the pickle holds a text that is none")


def _whole_characters(text: str) -> str:
    """Halves of pairs, which no file can be written with, become replacement characters."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", errors="surrogatepass").decode("utf-16-le", errors="replace")


def _int_line(line: bytes) -> int | bool:
    return line == b"01" if line in (b"00", b"01") else int(line)


def _tuple_to_mark(machine: _Machine) -> None:
    items = machine.pop_to_mark()
    machine.new(tuple(items), items)


def _list_to_mark(machine: _Machine) -> None:
    items = machine.pop_to_mark()
    machine.new(list(items), items)


def _dict_to_mark(machine: _Machine) -> None:
    items = machine.pop_to_mark()
    machine.new({}, [])
    machine.set_items(items)


def _append_one(machine: _Machine) -> None:
    machine.append([machine.pop()])


def _set_one(machine: _Machine) -> None:
    value = machine.pop()
    machine.set_items([machine.pop(), value])


_STEPS: dict[int, Callable[[_Machine], Any]] = {
    0x80: lambda m: m.skip(1),  # PROTO
    0x95: lambda m: m.skip(8),  # FRAME
    ord("("): lambda m: m.push(_MARK),
    ord("0"): lambda m: m.drop(),
    ord("1"): lambda m: m.pop_to_mark(),
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("J"): lambda m: m.push(m.number(4, signed=True)),
    ord("K"): lambda m: m.push(m.byte()),
    ord("M"): lambda m: m.push(m.number(2)),
    0x8A: lambda m: m.long(m.byte()),
    0x8B: lambda m: m.long(m.number(4, signed=True)),
    ord("I"): lambda m: m.written_number(_int_line),
    ord("L"): lambda m: m.written_number(lambda line: int(line.rstrip(b"L"))),
    ord("F"): lambda m: m.written_number(float),
    ord("G"): lambda m: m.real(),
    ord("V"): lambda m: m.escaped_text(),
    ord("X"): lambda m: m.text(m.number(4)),
    0x8C: lambda m: m.text(m.byte()),
    0x8D: lambda m: m.text(m.number(8)),
    ord("T"): lambda m: m.old_text(m.number(4)),
    ord("U"): lambda m: m.old_text(m.byte()),
    ord("B"): lambda m: m.take_bytes(m.number(4)),
    ord("C"): lambda m: m.take_bytes(m.byte()),
    ord("]"): lambda m: m.new([], []),
    ord("}"): lambda m: m.new({}, []),
    ord(")"): lambda m: m.tuple_of(0),
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    ord("t"): _tuple_to_mark,
    ord("l"): _list_to_mark,
    ord("d"): _dict_to_mark,
    ord("a"): _append_one,
    ord("e"): lambda m: m.append(m.pop_to_mark()),
    ord("s"): _set_one,
    ord("u"): lambda m: m.set_items(m.pop_to_mark()),
    ord("q"): lambda m: m.remember(m.byte()),
    ord("r"): lambda m: m.remember(m.number(4)),
    ord("p"): lambda m: m.remember(m.index()),
    0x94: lambda m: m.remember(len(m.memo)),
    ord("h"): lambda m: m.recall(m.byte()),
    ord("j"): lambda m: m.recall(m.number(4)),
    ord("g"): lambda m: m.recall(m.index()),
    ord("c"): lambda m: m.global_name(),
    ord("R"): lambda m: m.reduce(),
}
