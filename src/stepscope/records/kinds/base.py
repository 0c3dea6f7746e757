"""What the kinds have in common: how a Spec lists its parameters, and an Observed its facts, by name."""

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, ClassVar, TypeVar

import msgspec

Scalar = bool | int | float | str
Parameter = Scalar | list[Scalar]
"""A case's parameter: a shape, a dtype, a size; plain values only, so that every reader understands them."""
Number = int | float
"""Kept as it was written: 3 and 3.0 are two parameters."""

SpecT = TypeVar("SpecT", bound="BaseSpec")
ObservedT = TypeVar("ObservedT", bound="BaseObserved")


class BaseSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True,
               tag_field="kind"):  # fmt: skip
    """What was asked for. A field that is not stated has its usual value, so that adding one changes no case's key."""

    NAMELESS: ClassVar[frozenset[str]] = frozenset()
    """Fields that the benchmark's own name says already: no parameters."""
    ALWAYS: ClassVar[frozenset[str]] = frozenset()
    """Fields that are parameters even where they are usual."""

    @property
    def kind(self) -> str:
        """The name of the kind, as stored."""
        return str(self.__struct_config__.tag)

    @property
    def device(self) -> str | None:
        return None

    @property
    def dtype(self) -> str | None:
        return None

    @property
    def size_bytes(self) -> int | None:
        """Message size that was asked for."""
        return None

    @property
    def is_measured_peak(self) -> bool:
        """Measured to know what the machine can do at best."""
        return False

    @property
    def is_try(self) -> bool:
        """A step of a search, whose last case is measured in full."""
        return False

    @property
    def precision(self) -> str | None:
        """Precision of a whole model."""
        return None

    def without_precision(self: SpecT) -> SpecT:
        """As if the precision had not been chosen."""
        return self if self.precision is None else msgspec.structs.replace(self, precision=None)

    def list_parameters(self, model: str, mode: str) -> dict[str, Parameter]:
        """By name, in the order of labels; `model` and `mode` are the benchmark's."""
        unusual = list_unusual(self)
        return {
            name: getattr(self, name)
            for name in self.__struct_fields__
            if name not in self.NAMELESS and (name in self.ALWAYS or name in unusual)
        }


class BaseObserved(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True,
                   tag_field="kind"):  # fmt: skip
    """What was found beside the samples. None, or an empty collection: not observed."""

    LAST: ClassVar[tuple[str, ...]] = ("other",)
    """Fields that stand behind the others in lists of facts."""

    other: dict[str, Scalar] = {}
    """Facts of earlier formats that this one has no field for."""

    @property
    def size_bytes(self) -> Number | None:
        """What was really moved; None for what is not about messages."""
        return None

    @property
    def bus_factor(self) -> float | None:
        """Bytes on the busiest link over `size_bytes`."""
        return None

    @property
    def wrong(self) -> int | None:
        """Elements that are not what they must be; None: not compared."""
        return None

    @property
    def trace(self) -> str | None:
        """Where it was recorded, relative to the run folder."""
        return None

    def facts(self) -> dict[str, Scalar]:
        """Every fact by the one name that it has in JSON, SQL, CSV and lists; what was not observed is not there."""
        names = [name for name in self.__struct_fields__ if name not in self.LAST]
        found: dict[str, Scalar] = {}
        for name in (*names, *self.LAST):
            value = getattr(self, name)
            if value is not None:
                found |= self.name_facts(name, value)
        return found

    def name_facts(self, field: str, value: object) -> dict[str, Scalar]:
        """What one field says; those that hold several facts name each."""
        if isinstance(value, dict):
            return dict(value)
        assert isinstance(value, bool | int | float | str)
        return {field: value}

    def without(self: ObservedT, fields: Collection[str]) -> ObservedT:
        """As if these had not been observed."""
        left = {name: value for name, value in msgspec.structs.asdict(self).items() if name not in fields}
        return type(self)(**left)

    def __or__(self: ObservedT, more: "BaseObserved | None") -> ObservedT:
        """With what `more` observed; it goes first where both did."""
        return self if more is None else msgspec.structs.replace(self, **list_unusual(more))


@cache
def list_defaults(struct: type[msgspec.Struct]) -> Mapping[str, object]:
    """By field; fields without a default are not there."""
    return {
        field.name: field.default_factory() if field.default is msgspec.NODEFAULT else field.default
        for field in inspect_fields(struct)
        if not field.required
    }


def list_unusual(record: msgspec.Struct) -> dict[str, Any]:
    """Fields that have no default, or another value."""
    usual, values = list_defaults(type(record)), msgspec.structs.asdict(record)
    return {name: value for name, value in values.items() if value != usual.get(name, msgspec.NODEFAULT)}


@cache
def inspect_fields(struct: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Takes most of a millisecond, and every case asks for it."""
    return msgspec.structs.fields(struct)


class OtherSpec(BaseSpec, frozen=True, kw_only=True, tag="other"):
    """What an earlier version stored and no kind of this one describes: kept as it is, shown by its names."""

    parameters: dict[str, Parameter] = {}

    def list_parameters(self, model: str, mode: str) -> dict[str, Parameter]:
        return dict(self.parameters)


class OtherObserved(BaseObserved, frozen=True, kw_only=True, tag="other"):
    pass
