"""The language of shapes: one line such as `m=64:8192:x2,n=m,k=4096/8192` stands for many cases.

The same text, seed and number of draws give the same cases on every machine.
"""

from __future__ import annotations

import math
import operator as compare
import random
import re
from collections.abc import Callable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import product
from typing import Any, NamedTuple, NoReturn, TypeVar

from stepscope.bench.ops.operator import Operator, Parameter, Value
from stepscope.core.errors import UsageError, unknown_name
from stepscope.core.units import parse_range, parse_size

LARGEST_SIZE = 2**40
"""Beyond any memory; a typing error rather than a shape."""
MAX_CASES = 200_000
MAX_COMBINATIONS = 5_000_000
"""Looked at where conditions throw most of them away."""
MAX_NUMBER_LENGTH = 64
"""Characters of a size as it is written: longer ones are typing errors."""
IDLE_TRIES = 10_000
MAX_IDLE_TRIES = 200_000
"""Draws in a row that give nothing new before the space counts as too small: the last cases of a small one are rare."""

_TIE = re.compile(r"(?:([^*]+)\*)?\s*([A-Za-z_]\w*)")
_COMPARISON = re.compile(r"(<=|>=|==|!=|<|>)")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<=": compare.le, ">=": compare.ge, "==": compare.eq, "!=": compare.ne, "<": compare.lt, ">": compare.gt,
}  # fmt: skip


class CaseRequest(NamedTuple):
    """One entry of what a person asks for. What is None is left to the command line, then to the defaults."""

    op: str
    shape: str | Mapping[str, Any] | None = None
    """A text of the language, or a table of parameter → value, text or list."""
    set: str | None = None
    dtypes: tuple[str, ...] | None = None
    passes: tuple[str, ...] | None = None
    caches: tuple[str, ...] | None = None
    draws: int | None = None
    seed: int | None = None
    config: str | None = None
    """Names the cases where neither a set nor `custom` does."""
    where: str = ""
    """The file and the place in it, or the option."""


class Tie(NamedTuple):
    """A multiple of another parameter."""

    factor: int
    name: str


class Draw(NamedTuple):
    """A multiple of `step`, from `low` to `high` times it, both included."""

    low: int
    high: int
    step: int


Choice = Value | Tie | Draw
_Number = TypeVar("_Number")


def expand_shape(
    given: str | Mapping[str, Any],
    operator: Operator,
    *,
    draws: int | None = None,
    seed: int = 0,
    conditions: Sequence[Condition] = (),
    where: str = "--shape",
) -> list[dict[str, Value]]:
    """The cases that a text such as `m=512,n=m` stands for; what it leaves out takes its default.

    A table of a file may say the same: texts of words may hold commas there, and lists are lists. With `draws`, so many
    different cases drawn with `seed`; without, every combination, the last parameter fastest.
    """
    reader = _Reader(operator, where)
    choices = reader.read_text(given) if isinstance(given, str) else reader.read_table(given)
    space = _Space(reader, choices, conditions)
    return space.combine() if draws is None else space.draw(draws, seed)


def write_shape(shape: Mapping[str, Value]) -> str:
    """The text of one shape; `expand_shape` reads it back."""
    return ",".join(f"{name}={value}" for name, value in shape.items())


def example_shape(operator: Operator) -> str:
    """The operator's defaults as a text; what holds a comma has no place on a command line."""
    return write_shape({one.name: one.default for one in operator.parameters if "," not in str(one.default)})


class Condition(NamedTuple):
    """Sums of products compared, such as `1500<=in*height<=15000`."""

    text: str
    sides: tuple[tuple[tuple[float | str, ...], ...], ...]
    comparisons: tuple[str, ...]

    def holds(self, shape: Mapping[str, Any]) -> bool:
        values = [
            sum(math.prod(shape[one] if isinstance(one, str) else one for one in factors) for factors in side)
            for side in self.sides
        ]
        pairs = zip(values, self.comparisons, values[1:], strict=False)
        return all(_COMPARE[comparison](left, right) for left, comparison, right in pairs)


def parse_condition(text: str, operator: Operator, *, where: str) -> Condition:
    """Names of numbers, numbers, `*`, `+` and comparisons; nothing is ever evaluated as code."""
    reader = _Reader(operator, where)
    pieces = _COMPARISON.split(text)
    if len(pieces) < 3:
        reader.refuse(f"{text!r} compares nothing", "write a condition such as 2*m<=n")
    sides = tuple(
        tuple(tuple(reader.read_factor(factor, text) for factor in term.split("*")) for term in side.split("+"))
        for side in pieces[::2]
    )
    return Condition(text, sides, tuple(pieces[1::2]))


class _Reader:
    """Reads values for one operator's parameters; every refusal carries an example."""

    def __init__(self, operator: Operator, where: str) -> None:
        self.operator = operator
        self.parameters = {one.name: one for one in operator.parameters}
        self._where = where

    def refuse(self, message: str, hint: str = "") -> NoReturn:
        raise self.error(message, hint)

    def error(self, message: str, hint: str = "") -> UsageError:
        example = f"write for example {example_shape(self.operator)}"
        return UsageError(message, hint=f"{hint}; {example}" if hint else example, where=self._where)

    def read_text(self, text: str) -> dict[str, list[Choice]]:
        items: dict[str, str] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = (part.strip() for part in item.partition("="))
            if not equals:
                self.refuse(f"{item!r} is not name=value")
            if name in items:
                self.refuse(f"{name} is given twice")
            items[name] = value
        return {name: self._read_value(self.find(name), value) for name, value in items.items()}

    def read_table(self, table: Mapping[str, Any]) -> dict[str, list[Choice]]:
        return {str(name): self._read_entry(self.find(str(name)), value) for name, value in table.items()}

    def find(self, name: str) -> Parameter:
        if name not in self.parameters:
            near = unknown_name("parameter", name, self.parameters)
            self.refuse(f"{self.operator.name} has no shape parameter {name!r}", near.hint or "")
        return self.parameters[name]

    def _read_entry(self, parameter: Parameter, value: object) -> list[Choice]:
        """A value of a table: itself, a text of the language, or a list of those."""
        items = value if isinstance(value, list) else [value]
        if not items:
            self.refuse(f"{parameter.name} is an empty list")
        choices = [choice for one in items for choice in self._read_entry_item(parameter, one)]
        return self._require_different(parameter, choices)

    def _read_entry_item(self, parameter: Parameter, value: object) -> list[Choice]:
        if isinstance(value, str):
            return self._read_value(parameter, value)
        # Larger ones cannot even be printed.
        if isinstance(value, int) and abs(value) > LARGEST_SIZE:
            self.refuse(f"{parameter.name} is beyond {LARGEST_SIZE}")
        if not isinstance(value, bool):
            if isinstance(parameter.default, float) and isinstance(value, int | float):
                return [self._require_finite(parameter, repr(value))]
            if isinstance(parameter.default, int) and isinstance(value, int):
                return [self._require_size(parameter, value, str(value))]
        kind = {int: "a whole number", float: "a number", str: "a text (in quotes)"}[type(parameter.default)]
        raise self.error(f"{parameter.name} is {kind}, not {_kind(value)}")

    def _read_value(self, parameter: Parameter, text: str) -> list[Choice]:
        is_text = isinstance(parameter.default, str)
        if is_text and (not parameter.choices or text in parameter.choices):
            return [text]
        choices: list[Choice] = []
        for item in (part.strip() for part in text.split("/")):
            if is_text:
                choices.append(self._require_word(parameter, item))
            elif not item:
                self.refuse(f"{parameter.name}={text} lacks a value")
            elif isinstance(parameter.default, float):
                choices.append(self._require_finite(parameter, item))
            else:
                choices += self._read_sizes(parameter, item)
            if len(choices) > MAX_CASES:
                self.refuse(f"{parameter.name} has more than {MAX_CASES:,} values", "use larger steps")
        return self._require_different(parameter, choices)

    def _require_word(self, parameter: Parameter, word: str) -> str:
        if word not in parameter.choices:
            near = unknown_name(parameter.name, word, parameter.choices)
            self.refuse(f"{self.operator.name} has no {parameter.name} {word!r}", near.hint or "")
        return word

    def _read_sizes(self, parameter: Parameter, item: str) -> list[Choice]:
        tie = _TIE.fullmatch(item)
        if tie is not None:
            return [self._read_tie(parameter, tie[1], tie[2])]
        if len(item) > MAX_NUMBER_LENGTH:
            self.refuse(f"{parameter.name} has a value of {len(item)} characters")
        if "~" in item:
            return [self._read_draw(parameter, item)]
        points = self._read_number(parameter, item, parse_range)
        return [self._require_size(parameter, point, item) for point in points]

    def _read_number(self, parameter: Parameter, text: str, parse: Callable[[str], _Number]) -> _Number:
        try:
            return parse(text)
        except UsageError as error:
            self.refuse(f"{parameter.name}: {error.message}", error.hint or "")
        except OverflowError:
            self.refuse(f"{parameter.name}={text} is too large")

    def _read_tie(self, parameter: Parameter, factor: str | None, name: str) -> Tie:
        if name not in self.parameters:
            self.refuse(f"{parameter.name}={name} is neither a size nor another parameter")
        if not isinstance(self.parameters[name].default, int):
            self.refuse(f"{parameter.name} cannot follow {name}, which is no size")
        multiple = 1 if factor is None else self._read_number(parameter, factor[:MAX_NUMBER_LENGTH], parse_size)
        if not 1 <= multiple <= LARGEST_SIZE:
            self.refuse(f"{parameter.name} is {multiple} times another parameter", "write a factor such as 4*m")
        return Tie(multiple, name)

    def _read_draw(self, parameter: Parameter, item: str) -> Draw:
        pieces = item.split("~")
        hint = "write least~most or least~most~multiple, for example 32~4096~8"
        if len(pieces) not in {2, 3}:
            self.refuse(f"{parameter.name}={item} is not a draw", hint)
        low, high, *rest = (self._read_number(parameter, piece, parse_size) for piece in pieces)
        step = rest[0] if rest else 1
        self._require_size(parameter, low, item)
        self._require_size(parameter, high, item)
        if low < 1 or step < 1:
            self.refuse(f"{parameter.name}={item} starts below 1, where no logarithm is", hint)
        first, last = -(-low // step), high // step
        if first > last:
            self.refuse(f"{parameter.name}={item} leaves nothing to draw", hint)
        return Draw(first, last, step)

    def _require_size(self, parameter: Parameter, size: int, text: str) -> int:
        if not parameter.least <= size <= LARGEST_SIZE:
            self.refuse(
                f"{parameter.name}={text} cannot be: it is at least {parameter.least} and at most {LARGEST_SIZE}"
            )
        return size

    def _require_finite(self, parameter: Parameter, text: str) -> float:
        try:
            value = float(text)
        except (ValueError, OverflowError):
            value = math.nan
        if not math.isfinite(value):
            self.refuse(f"{parameter.name}={text[:MAX_NUMBER_LENGTH]} is not a number")
        return value

    def _require_different(self, parameter: Parameter, choices: list[Choice]) -> list[Choice]:
        seen: set[Choice] = set()
        for choice in choices:
            if choice in seen:
                named = f"{choice.factor}*{choice.name}" if isinstance(choice, Tie) else choice
                self.refuse(f"{parameter.name} names {named} twice")
            seen.add(choice)
        return choices

    def read_factor(self, factor: str, condition: str) -> float | str:
        text = factor.strip()
        if text in self.parameters:
            if isinstance(self.parameters[text].default, str):
                self.refuse(f"{text} in {condition!r} is no number")
            return text
        try:
            return parse_size(text[:MAX_NUMBER_LENGTH])
        except UsageError:
            self.refuse(f"{text!r} in {condition!r} is neither a parameter nor a number")


def _kind(value: object) -> str:
    return {bool: "true or false", dict: "a table", list: "a list", type(None): "nothing"}.get(
        type(value), f"a {type(value).__name__}"
    )


class _Space:
    """Everything one text stands for."""

    def __init__(self, reader: _Reader, given: Mapping[str, list[Choice]], conditions: Sequence[Condition]) -> None:
        self._reader = reader
        self._conditions = conditions
        self.choices: dict[str, list[Choice]] = {
            one.name: given.get(one.name, [one.default]) for one in reader.operator.parameters
        }
        self._tied = self._order_ties()

    def _order_ties(self) -> list[str]:
        """The parameters that follow others, after those they follow."""
        follows = {
            name: {choice.name for choice in choices if isinstance(choice, Tie)}
            for name, choices in self.choices.items()
        }
        try:
            order = list(TopologicalSorter(follows).static_order())
        except CycleError as error:
            # graphlib closes the circle: its first and last name are the same.
            circle: list[str] = error.args[1]
            self._reader.refuse(f"{' and '.join(sorted(set(circle)))} follow each other", "give one of them a size")
        return [name for name in order if follows[name]]

    def count(self) -> int:
        """Combinations, impossible ones included."""
        return math.prod(
            sum(one.high - one.low + 1 if isinstance(one, Draw) else 1 for one in choices)
            for choices in self.choices.values()
        )

    def combine(self) -> list[dict[str, Value]]:
        """Every combination that keeps the conditions, each once."""
        reader, conditions = self._reader, self._conditions
        for name, choices in self.choices.items():
            if any(isinstance(one, Draw) for one in choices):
                reader.refuse(f"{name} is drawn at random: say how many cases", "give --draws 100 (`draws` in a file)")
        limit, hint = MAX_COMBINATIONS if conditions else MAX_CASES, "use larger steps, or --draws 1000"
        if self.count() > limit:
            reader.refuse(f"these are {self.count():,} cases, {limit:,} are allowed", hint)
        # Parameters that follow others can make two combinations the same.
        found: dict[tuple[Value, ...], dict[str, Value]] = {}
        for values in product(*self.choices.values()):
            shape = self._resolve(dict(zip(self.choices, values, strict=True)))
            if all(condition.holds(shape) for condition in conditions):
                self._require(shape)
                found.setdefault(tuple(shape.values()), shape)
            if len(found) > MAX_CASES:
                reader.refuse(f"these are more than {MAX_CASES:,} cases", hint)
        if not found:
            reader.refuse(f"no case is left by {' and '.join(condition.text for condition in conditions)}")
        return list(found.values())

    def draw(self, draws: int, seed: int) -> list[dict[str, Value]]:
        """So many different combinations."""
        reader, size = self._reader, self.count()
        if not 1 <= draws <= MAX_CASES:
            reader.refuse(f"{draws:,} draws cannot be: at least 1 and at most {MAX_CASES:,} are allowed")
        if seed < 0:
            reader.refuse(f"the seed {seed} is below 0")
        if draws > size:
            reader.refuse(f"{draws:,} draws were asked for, there are only {size:,} different cases")
        generator, idle = random.Random(seed), 0
        found: dict[tuple[Value, ...], dict[str, Value]] = {}
        while len(found) < draws:
            shape, known = self._draw_one(generator), len(found)
            if shape is not None:
                found.setdefault(tuple(shape.values()), shape)
            idle = 0 if len(found) > known else idle + 1
            if idle > (min(IDLE_TRIES + 20 * size, MAX_IDLE_TRIES) if found else IDLE_TRIES):
                reader.refuse(
                    f"{draws:,} different cases were asked for, only {len(found):,} turned up in {idle:,} more tries",
                    "ask for fewer draws, or widen the ranges",
                )
        return list(found.values())

    def _draw_one(self, generator: random.Random) -> dict[str, Any] | None:
        """One combination; None for one that cannot be."""
        shape: dict[str, Any] = {}
        for name, choices in self.choices.items():
            choice = choices[0] if len(choices) == 1 else choices[int(generator.random() * len(choices))]
            shape[name] = _draw_size(choice, generator) if isinstance(choice, Draw) else choice
        shape = self._resolve(shape)
        if not all(condition.holds(shape) for condition in self._conditions):
            return None
        try:
            self._require(shape)
        except UsageError:
            return None
        return shape

    def _resolve(self, shape: dict[str, Any]) -> dict[str, Any]:
        for name in self._tied:
            tie = shape[name]
            if isinstance(tie, Tie):
                shape[name] = tie.factor * shape[tie.name]
        return shape

    def _require(self, shape: dict[str, Any]) -> None:
        """Sizes that follow others may leave the bounds; the operator may know more."""
        try:
            for name in self._tied:
                least = self._reader.parameters[name].least
                if not least <= shape[name] <= LARGEST_SIZE:
                    raise ValueError(f"{name} is at least {least} and at most {LARGEST_SIZE}")
            self._reader.operator.check_shape(shape)
        except ValueError as error:
            raise self._reader.error(f"{write_shape(shape)} cannot be: {error}") from None


def _draw_size(draw: Draw, generator: random.Random) -> int:
    """Log-uniform.

    A power by square roots of its bits: roots and products are rounded alike on every machine, exp and log are not.
    """
    bits = int(generator.random() * 2**53)
    value, root = float(draw.low), (draw.high + 1) / draw.low
    for place in range(52, -1, -1):
        root = math.sqrt(root)
        if bits >> place & 1:
            value *= root
    return min(int(value), draw.high) * draw.step
