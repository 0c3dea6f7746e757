"""Recurrent cells and layers: LSTM and GRU.

Operations: the two products of a step, 2·gates·batch·hidden·(in + hidden), and element by element, one for each
addition, multiplication or function (sigmoid, tanh) of the formulas below. Backward counts twice forward: each product
has two gradients, and each element's step two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import ClassVar, NamedTuple

from stepscope.bench.ops.inputs import Maker
from stepscope.bench.ops.operator import DTYPE_BYTES, MATRIX_FLOATS, Call, Operator, Parameter, Shape, Work
from stepscope.core.lazy_torch import torch

_BATCH = Parameter("batch", "sequences", 256, "sequences in one call")
_STEPS = Parameter("steps", "steps", 64, "length of a sequence")
_IN = Parameter("in", "elements", 512, "input features")
_HIDDEN = Parameter("hidden", "elements", 512, "width of the hidden state")
_LAYERS = Parameter("layers", "layers", 1, "layers on top of each other")

WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
"""A layer's weights, in torch's order and by its names."""


class _Kind(NamedTuple):
    """What distinguishes LSTM and GRU."""

    gates: int
    """Blocks of rows in the weights."""
    states: tuple[str, ...]
    flops: int
    """Element by element, a hidden element and step."""
    kept: int
    """Values a hidden element and step that backward needs and cannot have back element by element."""


_LSTM = _Kind(gates=4, states=("hidden", "cell"), flops=21, kept=4)
"""Each gate: sum of the two products, two biases, sigmoid or tanh: 16. c' = f·c + i·g: 3. h' = o·tanh(c'): 2."""
_GRU = _Kind(gates=3, states=("hidden",), flops=17, kept=4)
"""Gates r and z: 4 each. n = tanh(Wx + b + r·(Uh + b')): 5. h' = (1 − z)·n + z·h: 4. Kept are r, z, n and Uh + b'."""


class _Recurrent(Operator):
    dtypes = MATRIX_FLOATS
    unit = "TFLOP/s"
    kind: ClassVar[_Kind]

    @staticmethod
    def _extent(shape: Shape) -> tuple[int, int]:
        """Steps and layers; a cell has one of each."""
        return shape.get("steps", 1), shape.get("layers", 1)

    def gradient_names(self, shape: Shape) -> tuple[str, ...]:
        return ("input", *self.kind.states, *(name for layer in self._weight_names(shape) for name in layer))

    def _weight_names(self, shape: Shape) -> list[tuple[str, ...]]:
        """For each layer."""
        return [tuple(f"{name}_l{layer}" for name in WEIGHTS) for layer in range(self._extent(shape)[1])]

    def _widths(self, shape: Shape) -> list[int]:
        """Input features of each layer."""
        return [shape["in"]] + [shape["hidden"]] * (self._extent(shape)[1] - 1)

    def _weight_elements(self, shape: Shape) -> int:
        """Without the biases."""
        hidden = int(shape["hidden"])
        return sum(self.kind.gates * hidden * (wide + hidden) for wide in self._widths(shape))

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        kind, (steps, layers) = self.kind, self._extent(shape)
        batch, hidden, size = shape["batch"], shape["hidden"], DTYPE_BYTES[dtype]
        weights = self._weight_elements(shape)
        biases = layers * 2 * kind.gates * hidden
        flops = steps * (2 * batch * weights + layers * kind.flops * batch * hidden)
        states = len(kind.states) * layers * batch * hidden
        # A layer returns the states of all steps beside the last ones.
        given, made = steps * batch * shape["in"], steps * batch * hidden if "steps" in shape else 0
        if direction == "forward":
            return Work(flops, size * (given + states + weights + biases + made + states))
        kept = kind.kept * steps * layers * batch * hidden
        # Upstream of output and last states, input, first states, weights and kept values read; the gradients of
        # input, first states, weights and biases written.
        return Work(2 * flops, size * (made + states + 2 * (given + states + weights) + kept + biases))

    def scratch_bytes(self, shape: Shape, dtype: str, direction: str) -> int:
        """Gates of all steps, and the values that the scaled weights were made of.

        Backward keeps the gates beside the states and makes their gradients.
        """
        steps, layers = self._extent(shape)
        values = 2 * (self.kind.gates + len(self.kind.states)) if direction == "backward" else self.kind.gates
        elements = values * steps * layers * shape["batch"] * shape["hidden"] + self._weight_elements(shape)
        return int(elements * DTYPE_BYTES[dtype])

    def _step(
        self, tensor: torch.Tensor, states: list[torch.Tensor], weights: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The formulas of one step, written out: the states after it."""
        weight_in, weight_hidden, bias_in, bias_hidden = weights
        from_input = (tensor @ weight_in.T + bias_in).chunk(self.kind.gates, 1)
        from_hidden = (states[0] @ weight_hidden.T + bias_hidden).chunk(self.kind.gates, 1)
        if self.kind is _LSTM:
            keep_in, forget, new, out = (one + other for one, other in zip(from_input, from_hidden, strict=True))
            cell = torch.sigmoid(forget) * states[1] + torch.sigmoid(keep_in) * torch.tanh(new)
            return [torch.sigmoid(out) * torch.tanh(cell), cell]
        reset, update = (torch.sigmoid(from_input[i] + from_hidden[i]) for i in range(2))
        new = torch.tanh(from_input[2] + reset * from_hidden[2])
        return [(1 - update) * new + update * states[0]]

    def make_inputs(self, shape: Shape, maker: Maker) -> dict[str, torch.Tensor]:
        batch, hidden, rows = shape["batch"], shape["hidden"], self.kind.gates * shape["hidden"]
        extent = (shape["steps"],) if "steps" in shape else ()
        inputs = {"input": maker.values(*extent, batch, shape["in"])}
        depth = (shape["layers"],) if "layers" in shape else ()
        inputs |= {name: maker.values(*depth, batch, hidden) for name in self.kind.states}
        block = self._lay_weights(shape, maker)
        for names, wide in zip(self._weight_names(shape), self._widths(shape), strict=True):
            for name, size in zip(names, ((rows, wide), (rows, hidden), (rows,), (rows,)), strict=True):
                # As torch initialises: gates stay where they still have a slope.
                values = maker.values(*size, scale=float(hidden**-0.5))
                inputs[name] = block[name].copy_(values) if block else values
        return inputs

    def _lay_weights(self, shape: Shape, maker: Maker) -> dict[str, torch.Tensor]:
        """On a GPU a layer's weights lie in one block: those that lie apart cuDNN copies together in every call."""
        if "steps" not in shape:
            return {}
        kind = torch.nn.LSTM if self.kind is _LSTM else torch.nn.GRU
        module = kind(shape["in"], shape["hidden"], shape["layers"], device=maker.device, dtype=maker.dtype)
        return {name: parameter.detach() for name, parameter in module.named_parameters()}

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        tensor, states = inputs["input"], tuple(inputs[name] for name in self.kind.states)
        weights = [inputs[name] for layer in self._weight_names(shape) for name in layer]
        begin = partial(getattr(torch, self.name), tensor, states if len(states) > 1 else states[0])
        if "steps" not in shape:
            return partial(begin, *weights)
        # cuDNN keeps what backward needs only in training.
        return partial(begin, weights, True, shape["layers"], 0.0, tensor.requires_grad, False, False)

    def bind_reference(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        names = self._weight_names(shape)

        def run_layer(
            sequence: Iterable[torch.Tensor], states: list[torch.Tensor], layer: int
        ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            outputs = []
            for tensor in sequence:
                states = self._step(tensor, states, [inputs[name] for name in names[layer]])
                outputs.append(states[0])
            return outputs, states

        def layers() -> list[torch.Tensor]:
            firsts = [inputs[name] for name in self.kind.states]
            if "steps" not in shape:
                return run_layer([inputs["input"]], firsts, 0)[1]
            sequence, last = list(inputs["input"]), []
            for layer in range(len(names)):
                sequence, states = run_layer(sequence, [first[layer] for first in firsts], layer)
                last.append(states)
            return [torch.stack(sequence), *(torch.stack(one) for one in zip(*last, strict=True))]

        return layers


class LstmCell(_Recurrent):
    name = "lstm_cell"
    summary = "torch.lstm_cell: one step of (batch, in) with both states (batch, hidden)"
    kind = _LSTM
    tiny = {"batch": 3, "in": 5, "hidden": 4}
    parameters = (_BATCH, _IN, _HIDDEN)


class GruCell(LstmCell):
    name = "gru_cell"
    summary = "torch.gru_cell: one step of (batch, in) with the state (batch, hidden)"
    kind = _GRU


class Lstm(_Recurrent):
    name = "lstm"
    summary = "torch.lstm: (steps, batch, in) through layers with bias, both first states given"
    kind = _LSTM
    tiny = {"batch": 3, "steps": 4, "in": 5, "hidden": 6}
    parameters = (_BATCH, _STEPS, _IN, _HIDDEN, _LAYERS)


class Gru(Lstm):
    name = "gru"
    summary = "torch.gru: (steps, batch, in) through layers with bias, the first state given"
    kind = _GRU
