"""What a call of any operator names: found in torch, built, and bound. Only what computes with tensors is found."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from stepscope.core.errors import first_line
from stepscope.core.lazy_torch import torch
from stepscope.traces.calls.arguments import (
    ELEMENT_BYTES,
    FLOAT_NAMES,
    TensorSpec,
    fill,
    find_tensors,
    read_list,
    read_object,
)

ATEN, FUNCTIONAL, MODULE, FUNCTION = "aten::", "torch.nn.functional.", "torch.nn.", "torch."
MODULE_PREFIX = "module."
"""Begins the names of inputs that are a module's parameters and buffers."""

_NAME = re.compile(r"[A-Za-z_][\w.:+-]*")
_SCHEMA = re.compile(r"(aten::[A-Za-z_]\w*(?:\.\w+)?)\s*\((.*)\)\s*->\s*.+", re.DOTALL)
_ATEN = re.compile(r"aten::([A-Za-z_]\w*)(?:\.(\w+))?")
_DEVICE = re.compile(r"(?:cpu|cuda|meta)(?::\d+)?")
_MAX_TARGET = 2000

_ELSEWHERE = {
    "pytorch:": "is a whole model, not one operator",
    "pytorch.model.": "is a whole model, not one operator",
    "SplitTableBatchedEmbedding": "is FBGEMM's: the operator embedding_bags measures tables in one call",
    "split_table_batched_embedding": "is FBGEMM's: the operator embedding_bags measures tables in one call",
}
"""PARAM's names for what is not one operator of torch."""


class UnsupportedCallError(NotImplementedError):
    """This torch cannot make the call, or it does not compute with tensors; the text is the reason."""


class TensorSource(Protocol):
    """Where tensors are made, and by which random numbers."""

    dtype: torch.dtype
    """The dtype of tensors that name none."""
    device: str
    generator: torch.Generator


class CallPlan(NamedTuple):
    """A call's texts, read."""

    target: str
    args: list[Any]
    kwargs: dict[str, Any]
    build_args: list[Any]
    build_kwargs: dict[str, Any]

    def tensors(self) -> dict[str, TensorSpec]:
        """By name: `arg0` or `kwarg.out`; `arg0.1` inside a list."""
        named = {f"arg{i}": value for i, value in enumerate(self.args)}
        named |= {f"kwarg.{name}": value for name, value in self.kwargs.items()}
        return dict(pair for name, value in named.items() for pair in find_tensors(value, name))

    def built_with(self) -> list[Any]:
        """What a module is made with."""
        return [*self.build_args, *self.build_kwargs.values()]


def read_plan(shape: Mapping[str, Any]) -> CallPlan:
    """Raises ValueError with the rule that a text breaks."""
    target = str(shape["target"])
    if len(target) > _MAX_TARGET or not (_NAME.fullmatch(target) or _SCHEMA.fullmatch(target)):
        raise ValueError(f"target={target[:40]!r} is no name such as aten::mm or torch.nn.functional.relu")
    return CallPlan(
        target=target,
        args=read_list(str(shape["args"]), "args"),
        kwargs=read_object(str(shape["kwargs"]), "kwargs"),
        build_args=read_list(str(shape["build"]), "build"),
        build_kwargs=read_object(str(shape["build_kwargs"]), "build_kwargs"),
    )


def base_name(target: str) -> str:
    """`add` of `aten::add.Tensor(Tensor self, …) -> Tensor`, `add_` of `torch.add_`."""
    aten = _ATEN.match(target)
    return aten[1] if aten else target.rpartition(".")[2]


def is_module(target: str) -> bool:
    return target.startswith(MODULE) and not target.startswith(FUNCTIONAL)


def make_tensor(spec: TensorSpec, source: TensorSource) -> torch.Tensor:
    """Its own memory: a call may write to what it is given."""
    drawn = _draw(spec, spec.size if spec.strides is None else (spec.span,), source)
    if spec.host:
        drawn = drawn.cpu()
    return drawn if spec.strides is None else drawn.as_strided(spec.size, spec.strides)


def _draw(spec: TensorSpec, size: Sequence[int], source: TensorSource) -> torch.Tensor:
    dtype = source.dtype if spec.dtype is None else getattr(torch, spec.dtype)
    if dtype.is_floating_point:
        return _draw_normal(size, dtype, source)
    if dtype == torch.bool:
        return torch.rand(size, device=source.device, generator=source.generator) < 0.5
    if spec.ramp is not None:
        factor, divisor = spec.ramp
        places = torch.arange(math.prod(size), device=source.device)
        return (places // divisor * factor).to(dtype).view(size)
    return torch.randint(spec.low, spec.end, size, dtype=dtype, device=source.device, generator=source.generator)


def _draw_normal(size: Sequence[int], dtype: torch.dtype, source: TensorSource, *, scale: float = 1.0) -> torch.Tensor:
    values = torch.randn(size, dtype=_drawable(dtype), device=source.device, generator=source.generator)
    return (values if scale == 1.0 else values.mul_(scale)).to(dtype)


def _drawable(dtype: torch.dtype) -> torch.dtype:
    """Nothing is drawn in floats of one byte: they are rounded."""
    return dtype if dtype.itemsize > 1 else torch.float32


def require_target(target: str) -> None:
    """Raises UnsupportedCallError for what this torch does not have, whatever it were given."""
    for prefix, reason in _ELSEWHERE.items():
        if target.startswith(prefix):
            raise UnsupportedCallError(f"{target} {reason}")
    if not target.startswith((ATEN, FUNCTION)):
        raise UnsupportedCallError(f"{target} is neither aten:: nor of torch, torch.nn.functional or torch.nn")
    _find_module(target) if is_module(target) else _find_function(target)


def _find_module(target: str) -> Any:
    name = target.removeprefix(MODULE)
    found = getattr(torch.nn, name, None) if name.isidentifier() and not name.startswith("_") else None
    if not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
        raise UnsupportedCallError(f"torch {torch.__version__} has no module {target}")
    return found


def _find_function(target: str) -> Any:
    """The packet, overload or function; only what computes with tensors is ever found."""
    if target.startswith(ATEN):
        return _find_aten(target)
    owner, _, name = target.rpartition(".")
    if name.startswith("_"):
        raise UnsupportedCallError(f"{target} is private")
    if owner == "torch.nn.functional":
        found = getattr(torch.nn.functional, name, None)
        if callable(found) and getattr(found, "__module__", "") in {"torch.nn.functional", "torch", "torch._C._nn"}:
            return found
    elif owner == "torch":
        if name.endswith("_") and callable(getattr(torch.Tensor, name, None)):
            return getattr(torch.Tensor, name)
        # Not torch's every function: load and save would open files that a case file names.
        if name != "from_file" and (hasattr(torch._C._VariableFunctions, name) or name in torch.functional.__all__):
            return getattr(torch, name)
    raise UnsupportedCallError(f"torch {torch.__version__} has no function {target} that computes with tensors")


def _find_aten(target: str) -> Any:
    """An overload where one is named, else the packet of all."""
    schema = _SCHEMA.fullmatch(target)
    match = _ATEN.fullmatch(schema[1] if schema else target)
    packet = getattr(torch.ops.aten, match[1], None) if match and not match[1].startswith("__") else None
    if match is None or not isinstance(packet, torch._ops.OpOverloadPacket):
        raise UnsupportedCallError(f"torch {torch.__version__} has no operator {target}")
    overload = match[2] or ("default" if schema else None)
    if overload is None:
        return packet
    if overload not in _overloads(packet):
        raise UnsupportedCallError(
            f"torch {torch.__version__} has no overload {overload} of aten::{match[1]}: {', '.join(_overloads(packet))}"
        )
    found = getattr(packet, overload)
    _require_tensors(found)
    if schema:
        _require_schema(target, found)
    return found


def _overloads(packet: Any) -> list[str]:
    return list(packet.overloads())


def _require_schema(target: str, overload: Any) -> None:
    try:
        given = torch._C.parse_schema(target)
    except RuntimeError as error:
        raise UnsupportedCallError(f"the schema of {overload} cannot be read: {str(error).splitlines()[0]}") from None
    if given != overload._schema:
        raise UnsupportedCallError(f"the schema given is not torch {torch.__version__}'s, which is {overload._schema}")


def _require_tensors(overload: Any) -> None:
    """Some of TorchScript's operators read or write files, and some know no tensors."""
    schema = overload._schema
    types = [str(one.type) for one in (*schema.arguments, *schema.returns)]
    if any(one.name == "filename" for one in schema.arguments) or not any("Tensor" in one for one in types):
        raise UnsupportedCallError(f"{schema} does not compute with tensors")


def _resolve(packet: Any, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, list[Any], dict[str, Any]]:
    """The overload that torch takes for these arguments, looked up once instead of at every call."""
    name = packet._qualified_op_name
    candidates = [(args, kwargs), *(_fold(getattr(packet, one), args, kwargs) for one in _overloads(packet))]
    for some_args, some_kwargs in candidates:
        try:
            overload = torch._C._jit_resolve_packet(name, *some_args, **some_kwargs)
        except (RuntimeError, TypeError):
            continue
        return getattr(packet, overload or "default"), some_args, some_kwargs
    raise UnsupportedCallError(f"no overload of {name} takes these arguments: {', '.join(_overloads(packet))}")


def _fold(overload: Any, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by place beyond those a schema takes so belong to its keyword-only ones: PARAM writes them that way."""
    arguments = overload._schema.arguments
    by_place = [one for one in arguments if not one.kwarg_only]
    by_name = [one.name for one in arguments if one.kwarg_only]
    extra = dict(zip(by_name, args[len(by_place) :], strict=False))
    return args[: len(by_place)], {**extra, **kwargs}


def _same_device(name: str, inputs: Mapping[str, torch.Tensor]) -> torch.device:
    kinds = {tensor.device.type for tensor in inputs.values()} - {"meta"}
    if len(kinds) > 1:  # some tensors stay on the host
        kinds.discard("cpu")
    if kinds and name.partition(":")[0] not in kinds:
        raise UnsupportedCallError(f"the call names the device {name}, the case runs on {', '.join(kinds)}")
    return torch.device(name)


def bind_plan(plan: CallPlan, inputs: Mapping[str, torch.Tensor]) -> Callable[[], Any]:
    """The call on tensors by the names of `plan.tensors()`, a module's by those of `module_layout`."""
    special = {"dtype": lambda name: getattr(torch, name), "device": lambda name: _same_device(name, inputs)}
    args = [fill(value, f"arg{i}", inputs, special) for i, value in enumerate(plan.args)]
    kwargs = {name: fill(value, f"kwarg.{name}", inputs, special) for name, value in plan.kwargs.items()}
    if is_module(plan.target):
        module = build_module(plan)
        _put_tensors(module, inputs)
        return partial(module, *args, **kwargs)
    function = _find_function(plan.target)
    if plan.target.startswith(ATEN):
        if isinstance(function, torch._ops.OpOverloadPacket):
            function, args, kwargs = _resolve(function, args, kwargs)
            _require_tensors(function)
        else:
            args, kwargs = _fold(function, args, kwargs)
    return partial(function, *args, **kwargs)


def build_module(plan: CallPlan) -> torch.nn.Module:
    """The module without memory: its parameters have sizes and dtypes, but no values, however large they are."""
    found = _find_module(plan.target)
    if any(True for value in plan.built_with() for _ in find_tensors(value, "")):
        raise UnsupportedCallError(
            f"{plan.target} is built with a tensor here: only numbers, words and dtypes can be given"
        )
    args, kwargs = _without_device(plan.build_args), _without_device(plan.build_kwargs)
    special = {"dtype": lambda one: getattr(torch, one), "device": torch.device}
    try:
        with torch.device("meta"):
            filled = {name: fill(value, "", {}, special) for name, value in kwargs.items()}
            module: torch.nn.Module = found(*fill(args, "", {}, special), **filled)
            return module
    except Exception as error:
        raise UnsupportedCallError(f"torch cannot build {plan.target} so: {first_line(error)}") from error


def _without_device(value: Any) -> Any:
    """With `meta` in place of every device: a module that names its own would be built there at once."""
    if isinstance(value, list):
        return [_without_device(one) for one in value]
    if isinstance(value, dict) and "device" not in value:
        return {key: _without_device(one) for key, one in value.items()}
    return {"device": "meta"} if _device_name(value) else value


def _device_name(value: Any) -> str | None:
    if isinstance(value, dict) and isinstance(value.get("device"), str):
        value = value["device"]
    return value if isinstance(value, str) and _DEVICE.fullmatch(value) else None


class ModuleTensor(NamedTuple):
    """A parameter or buffer of a module."""

    name: str
    """The name of the input that takes its place."""
    size: tuple[int, ...]
    dtype: str
    takes_gradient: bool

    @property
    def bytes(self) -> int:
        return math.prod(self.size) * ELEMENT_BYTES[self.dtype]


def module_layout(plan: CallPlan, dtype: str) -> list[ModuleTensor]:
    """Parameters, then buffers; floats are of the case's dtype. Raises UnsupportedCallError where that is no float."""
    module = build_module(plan)
    layout = []
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if torch.nn.parameter.is_lazy(tensor):
            raise UnsupportedCallError(
                f"{plan.target} learns its sizes from its first call: take the module that is told"
            )
        is_float = tensor.is_floating_point()
        if is_float and dtype not in FLOAT_NAMES:
            raise UnsupportedCallError(f"the weights of {plan.target} are floats, which {dtype} cannot hold")
        own = str(tensor.dtype).removeprefix("torch.")
        takes_gradient = is_float and isinstance(tensor, torch.nn.Parameter)
        layout.append(
            ModuleTensor(f"{MODULE_PREFIX}{name}", tuple(tensor.shape), dtype if is_float else own, takes_gradient)
        )
    return layout


def make_module_tensors(plan: CallPlan, source: TensorSource) -> dict[str, torch.Tensor]:
    """Made where the case runs: what fits there need not fit into the host's memory."""
    dtype = str(source.dtype).removeprefix("torch.")
    for value in plan.built_with():
        name = _device_name(value)
        if name is not None and name.partition(":")[0] != source.device.partition(":")[0]:
            raise UnsupportedCallError(f"the module names the device {name}, the case runs on {source.device}")
    layout = module_layout(plan, dtype)
    if not any(one.dtype in FLOAT_NAMES for one in layout):
        _require_dtype_in_use(plan, dtype)
    return {one.name: _make_weight(one, source) for one in layout}


def _require_dtype_in_use(plan: CallPlan, dtype: str) -> None:
    """A module without weights whose tensors all name another dtype would be recorded under a wrong one."""
    named = [spec.dtype for spec in plan.tensors().values()]
    if named and None not in named and dtype not in named:
        raise UnsupportedCallError(f"nothing of this call of {plan.target} is {dtype}: its tensors name {named[0]}")


def _make_weight(one: ModuleTensor, source: TensorSource) -> torch.Tensor:
    """Scaled by their rows, so that results stay near 1; what has one dimension is 0 to 1, for variances are among it.

    Counters begin with 0.
    """
    dtype = getattr(torch, one.dtype)
    if not dtype.is_floating_point:
        return torch.zeros(one.size, dtype=dtype, device=source.device)
    if len(one.size) > 1:
        return _draw_normal(one.size, dtype, source, scale=max(1, math.prod(one.size[1:])) ** -0.5)
    return torch.rand(one.size, dtype=_drawable(dtype), device=source.device, generator=source.generator).to(dtype)


def _put_tensors(module: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> None:
    """In place of the parameters, so that gradients reach the inputs."""
    for place, tensor in inputs.items():
        if place.startswith(MODULE_PREFIX):
            path, _, name = place.removeprefix(MODULE_PREFIX).rpartition(".")
            owner = module.get_submodule(path)
            delattr(owner, name)
            setattr(owner, name, tensor)
