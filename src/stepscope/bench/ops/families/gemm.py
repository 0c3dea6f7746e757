"""Matrix products: plain, with an addend, batched, as layers, and as a training step of a small stack."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import ClassVar

from stepscope.bench.ops.inputs import Maker
from stepscope.bench.ops.operator import (
    DTYPE_BYTES,
    MATRIX_FLOATS,
    Call,
    Operator,
    Parameter,
    Shape,
    Sizes,
    UnsupportedError,
    Work,
)
from stepscope.bench.ops.reference import RELATIVE_TOLERANCE, WRONG_LIBRARY, check_backward, check_close, widen
from stepscope.core.lazy_torch import functional, torch
from stepscope.run.producer import WrongResultError

LAYOUTS = ("nn", "nt", "tn", "tt")
_LAYOUT = Parameter(
    "layout", "", "nn", "how left and right lie in memory: n as multiplied, t transposed (a view turns them)", LAYOUTS
)
_M = Parameter("m", "rows", 1024, "rows of the left matrix")
_N = Parameter("n", "columns", 1024, "columns of the right matrix")
_K = Parameter("k", "elements", 1024, "inner dimension")

FLOAT8_LAYOUT = "nt"
"""cuBLASLt multiplies float8 only where the left matrix lies by rows and the right one by columns."""
FLOAT8_MULTIPLE = 16
INT8_MULTIPLE = 8
INT8_ROWS_ABOVE = 16
"""What torch's products of short numbers ask of dimensions on a GPU: multiples of these, and more rows than this."""


class _Product(Operator):
    """Products of (m, k) and (k, n) matrices: a multiplication and an addition for each element of the inner
    dimension."""

    dtypes: ClassVar[tuple[str, ...]] = MATRIX_FLOATS
    unit = "TFLOP/s"
    differentiable: ClassVar[tuple[str, ...]] = ("left", "right")

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        batch, m, n, k, size = shape.get("batch", 1), shape["m"], shape["n"], shape["k"], DTYPE_BYTES[dtype]
        if direction == "backward":
            # Two products, dC·Bᵀ and Aᵀ·dC: dC, A and B read, dA and dB written. An addend's gradient is dC itself.
            return Work(4 * batch * m * n * k, size * batch * (m * n + 2 * m * k + 2 * k * n))
        # float8 products are written as bfloat16, those of int8 as int32.
        written = {"float8_e4m3fn": 2, "int8": 4}.get(dtype, size) * m * n
        addend = m * n if "addend" in self.differentiable else 0
        return Work(2 * batch * m * n * k + addend, batch * (size * (m * k + k * n) + written) + size * addend)

    def make_inputs(self, shape: Shape, maker: Maker) -> dict[str, torch.Tensor]:
        left_turned, right_turned = (letter == "t" for letter in shape["layout"])
        return {
            "left": self._laid(shape, maker, shape["m"], shape["k"], left_turned),
            "right": self._laid(shape, maker, shape["k"], shape["n"], right_turned),
        }

    def _laid(self, shape: Shape, maker: Maker, rows: int, columns: int, turned: bool) -> torch.Tensor:
        """One or more (rows, columns) matrices; what is `turned` lies in memory as its transpose."""
        rows, columns = (columns, rows) if turned else (rows, columns)
        if shape.get("batching") == "strided":
            matrices = maker.values(rows, shape["batch"], columns).transpose(0, 1)
        else:
            matrices = maker.values(*([shape["batch"]] if "batch" in shape else []), rows, columns)
        return matrices.transpose(-1, -2) if turned else matrices


class Gemm(_Product):
    name = "gemm"
    summary = "torch.mm: (m, k) · (k, n) → (m, n); float8 by torch._scaled_mm into bfloat16, int8 into int32"
    parameters = (_M, _N, _K, _LAYOUT._replace(meaning=f"{_LAYOUT.meaning}; float8 only as nt"))
    dtypes = (*MATRIX_FLOATS, "float8_e4m3fn", "int8")
    tiny = {"m": 64, "n": 48, "k": 32, "layout": FLOAT8_LAYOUT}

    def make_inputs(self, shape: Shape, maker: Maker) -> dict[str, torch.Tensor]:
        _require_served(shape, maker.dtype_name, maker.device)
        return super().make_inputs(shape, maker)

    def scratch_bytes(self, shape: Shape, dtype: str, direction: str) -> int:
        """The bfloat16 values that float8 ones were rounded from."""
        given = int(shape["m"] * shape["k"] + shape["k"] * shape["n"])
        return DTYPE_BYTES["bfloat16"] * given if dtype == "float8_e4m3fn" else 0

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        left, right = inputs["left"], inputs["right"]
        if left.dtype == torch.float8_e4m3fn:
            one = torch.ones((), device=left.device)
            return partial(torch._scaled_mm, left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        return partial(torch._int_mm if left.dtype == torch.int8 else torch.mm, left, right)

    def bind_reference(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        left, right = inputs["left"].double(), inputs["right"].double()
        return lambda: left @ right


def _require_served(shape: Shape, dtype: str, device: str) -> None:
    """Raise UnsupportedError with the rule of torch's float8 and int8 products that a case breaks."""
    m, n, k, cuda = shape["m"], shape["n"], shape["k"], device.startswith("cuda")
    if dtype == "float8_e4m3fn":
        if shape["layout"] != FLOAT8_LAYOUT:
            raise UnsupportedError(
                f"layout={shape['layout']} cannot be in float8, where left lies by rows and right by columns: "
                f"ask for layout={FLOAT8_LAYOUT}"
            )
        if cuda and (m % FLOAT8_MULTIPLE or n % FLOAT8_MULTIPLE or k % FLOAT8_MULTIPLE):
            raise UnsupportedError(f"float8 on a GPU needs m, n and k that are multiples of {FLOAT8_MULTIPLE}")
    if dtype == "int8" and cuda and (m <= INT8_ROWS_ABOVE or n % INT8_MULTIPLE or k % INT8_MULTIPLE):
        raise UnsupportedError(
            f"int8 on a GPU needs m above {INT8_ROWS_ABOVE}, and n and k that are multiples of {INT8_MULTIPLE}"
        )


class AddMm(_Product):
    name = "addmm"
    summary = "torch.addmm: (m, n) + (m, k) · (k, n) → (m, n)"
    parameters = (_M, _N, _K, _LAYOUT)
    differentiable = ("addend", "left", "right")
    tiny = {"m": 64, "n": 48, "k": 32}

    def make_inputs(self, shape: Shape, maker: Maker) -> dict[str, torch.Tensor]:
        return {"addend": maker.values(shape["m"], shape["n"]), **super().make_inputs(shape, maker)}

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        return partial(torch.addmm, inputs["addend"], inputs["left"], inputs["right"])


class Bmm(_Product):
    name = "bmm"
    summary = "torch.bmm: batch products (m, k) · (k, n), packed or strided as in attention"
    parameters = (
        Parameter("batch", "matrices", 16, "products in one call"),
        Parameter("m", "rows", 512, "rows of a left matrix"),
        Parameter("n", "columns", 512, "columns of a right matrix"),
        Parameter("k", "elements", 64, "inner dimension"),
        _LAYOUT,
        Parameter(
            "batching", "", "packed", "packed: one matrix after the other; strided: rows of all matrices interleaved",
            ("packed", "strided"),
        ),
    )  # fmt: skip
    tiny = {"batch": 3, "m": 16, "n": 24, "k": 8}

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        return partial(torch.bmm, inputs["left"], inputs["right"])

    def bind_reference(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        return partial(torch.einsum, "bmk,bkn->bmn", inputs["left"], inputs["right"])


class Linear(Operator):
    name = "linear"
    summary = "torch.nn.functional.linear with bias: (batch, in) → (batch, out)"
    parameters = (
        Parameter("batch", "rows", 512, "rows of the input"),
        Parameter("in", "elements", 1024, "input features"),
        Parameter("out", "elements", 1024, "output features"),
    )
    dtypes = MATRIX_FLOATS
    unit = "TFLOP/s"
    differentiable = ("input", "weight", "bias")
    tiny = {"batch": 16, "in": 32, "out": 24}

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        batch, wide, out, size = shape["batch"], shape["in"], shape["out"], DTYPE_BYTES[dtype]
        # Backward, input and weight gradients are a product each; the bias gradient sums the upstream over the batch.
        passes = 1 if direction == "forward" else 2
        traffic = batch * out + passes * (batch * wide + wide * out) + out
        return Work(flops=passes * 2 * batch * wide * out + batch * out, bytes=size * traffic)

    def sizes(self, shape: Shape) -> Sizes:
        return {
            "input": (shape["batch"], shape["in"]), "weight": (shape["out"], shape["in"]), "bias": (shape["out"],),
        }  # fmt: skip

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        return partial(functional.linear, inputs["input"], inputs["weight"], inputs["bias"])

    def bind_reference(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        return lambda: inputs["input"] @ inputs["weight"].T + inputs["bias"]


class Mlp(Operator):
    name = "mlp"
    summary = "a stack of linear layers with bias, ReLU between them: (batch, first width) → (batch, last width)"
    parameters = (
        Parameter("batch", "rows", 512, "rows of the input"),
        Parameter("widths", "elements", "1024-1024-1024-1024", "input, hidden and output widths"),
    )
    dtypes = MATRIX_FLOATS
    unit = "TFLOP/s"
    tiny = {"batch": 8, "widths": "16-32-8"}

    def gradient_names(self, shape: Shape) -> tuple[str, ...]:
        layers = range(len(self.widths(shape)) - 1)
        return ("input", *(f"weight{i}" for i in layers), *(f"bias{i}" for i in layers))

    @staticmethod
    def widths(shape: Shape) -> list[int]:
        """Raises ValueError for what is no list of widths."""
        parts = str(shape["widths"]).split("-")
        if len(parts) < 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise ValueError(f"widths={shape['widths']} is not a list of widths such as 512-256-64")
        return [int(part) for part in parts]

    def check_shape(self, shape: Shape) -> None:
        self.widths(shape)

    def _weights(self, shape: Shape) -> int:
        """Elements of all weights, biases left out."""
        return sum(wide * out for wide, out in pairwise(self.widths(shape)))

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        widths, batch, size, weights = self.widths(shape), shape["batch"], DTYPE_BYTES[dtype], self._weights(shape)
        biases, hidden = sum(widths[1:]), sum(widths[1:-1])
        # Backward, two products and a bias sum per layer, and the mask of each ReLU; hidden outputs are read again.
        passes, kept = (1, 0) if direction == "forward" else (2, batch * hidden)
        flops = passes * 2 * batch * weights + batch * biases + batch * hidden
        return Work(flops, size * (passes * (batch * widths[0] + weights) + biases + batch * widths[-1] + kept))

    def scratch_bytes(self, shape: Shape, dtype: str, direction: str) -> int:
        """Hidden outputs before and after ReLU, and the values that the scaled weights were made of."""
        return (2 * int(shape["batch"]) * sum(self.widths(shape)[1:-1]) + self._weights(shape)) * DTYPE_BYTES[dtype]

    def make_inputs(self, shape: Shape, maker: Maker) -> dict[str, torch.Tensor]:
        widths = self.widths(shape)
        inputs = {"input": maker.values(shape["batch"], widths[0])}
        for i, (wide, out) in enumerate(pairwise(widths)):
            # Scaled so that a deep stack neither vanishes nor overflows.
            inputs[f"weight{i}"] = maker.values(out, wide, scale=(2 / wide) ** 0.5)
            inputs[f"bias{i}"] = maker.values(out)
        return inputs

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        linear, relu, first = functional.linear, functional.relu, inputs["input"]
        layers = [(inputs[f"weight{i}"], inputs[f"bias{i}"]) for i in range(len(self.widths(shape)) - 1)]
        *hidden, (last_weight, last_bias) = layers

        def stack() -> torch.Tensor:
            value = first
            for weight, bias in hidden:
                value = relu(linear(value, weight, bias))
            return linear(value, last_weight, last_bias)

        return stack

    def bind_reference(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        def stack() -> torch.Tensor:
            value, last = inputs["input"], len(self.widths(shape)) - 2
            for layer in range(last + 1):
                value = value @ inputs[f"weight{layer}"].T + inputs[f"bias{layer}"]
                if layer < last:
                    value = self._pass(layer, value)
            return value

        return stack

    def _pass(self, layer: int, value: torch.Tensor) -> torch.Tensor:
        """What the reference lets through after a hidden layer."""
        return value.clamp(min=0)

    def check(self, shape: Shape, inputs: Mapping[str, torch.Tensor], dtype: str, direction: str) -> None:
        if direction == "forward":
            super().check(shape, inputs, dtype, direction)
        else:
            check_backward(_MaskedMlp(relu_masks(shape, inputs, dtype)), shape, inputs, dtype)


class _MaskedMlp(Mlp):
    """Its reference lets those hidden elements pass that passed in the case's own dtype.

    A value that rounding carries across zero changes nothing in the result, but the gradients wholly: in 16 bits that
    happens to so many that no comparison would be left.
    """

    def __init__(self, masks: list[torch.Tensor]) -> None:
        self._masks = masks

    def _pass(self, layer: int, value: torch.Tensor) -> torch.Tensor:
        return value * self._masks[layer]


def relu_masks(shape: Shape, inputs: Mapping[str, torch.Tensor], dtype: str) -> list[torch.Tensor]:
    """Which elements of a stack's hidden layers pass in its own dtype; raises WrongResultError for wrong layers."""
    wide = widen(inputs)
    masks = []
    with torch.no_grad():
        value, exact = inputs["input"], wide["input"]
        for layer in range(len(Mlp.widths(shape)) - 2):
            value = functional.relu(functional.linear(value, inputs[f"weight{layer}"], inputs[f"bias{layer}"]))
            exact = (exact @ wide[f"weight{layer}"].T + wide[f"bias{layer}"]).relu()
            check_close(f"hidden layer {layer}", value, exact, dtype)
            masks.append(value > 0)
    return masks


LEARNING_RATE = 0.01

SHOWN_STEP = 8
"""A step shows where it is at least this many last digits of its weight: rounding then hides little of it."""
STEP_TOLERANCE = 0.15
"""Relative error allowed of a step that shows: half a last digit of eight, and the gradient's own tolerance."""


class MlpTrain(Mlp):
    name = "mlp_train"
    summary = (
        "a stack's training step: forward, softmax with cross-entropy, backward, plain SGD; 6 flop a weight and row"
    )
    passes = ("forward",)

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        """Three products a layer; activations, loss and optimizer are not counted, as those benchmarks do not."""
        widths, batch, size, weights = self.widths(shape), shape["batch"], DTYPE_BYTES[dtype], self._weights(shape)
        # Weights and biases are read and written, the input read, and targets are int64.
        moved = size * (batch * widths[0] + 2 * (weights + sum(widths[1:]))) + 8 * batch
        return Work(flops=6 * batch * weights, bytes=moved)

    def footprint_bytes(self, shape: Shape, dtype: str) -> int:
        """Weights, their gradients, and what the forward pass keeps."""
        kept = int(shape["batch"]) * sum(self.widths(shape)) * DTYPE_BYTES[dtype]
        return self.work(shape, dtype, "forward").bytes + 3 * kept

    def scratch_bytes(self, shape: Shape, dtype: str, direction: str) -> int:
        """The values that input, weights and biases were copied from."""
        widths = self.widths(shape)
        return (int(shape["batch"]) * widths[0] + self._weights(shape) + sum(widths[1:])) * DTYPE_BYTES[dtype]

    def make_inputs(self, shape: Shape, maker: Maker) -> dict[str, torch.Tensor]:
        inputs = {name: maker.own(tensor) for name, tensor in super().make_inputs(shape, maker).items()}
        return {**inputs, "target": maker.indices(self.widths(shape)[-1], shape["batch"])}

    def bind(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Call:
        """Weights that are leaves already are trained as they are: their gradients can be seen after a step."""
        target = inputs["target"]
        weights = {
            name: inputs[name] if inputs[name].requires_grad else inputs[name].detach().requires_grad_()
            for name in _weight_names(inputs)
        }
        stack = super().bind(shape, {**inputs, **weights})
        optimizer = torch.optim.SGD(weights.values(), lr=LEARNING_RATE)
        enable_grad, cross_entropy = torch.enable_grad, functional.cross_entropy

        def step() -> torch.Tensor:
            with enable_grad():
                optimizer.zero_grad(set_to_none=True)
                loss = cross_entropy(stack(), target)
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return loss.detach()

        return step

    def check(self, shape: Shape, inputs: Mapping[str, torch.Tensor], dtype: str, direction: str) -> None:
        """One step from fresh weights: its gradients, and that it moved the weights by them.

        The trained ones would not do: where the loss is near zero, gradients are the rounding of others. And weights
        alone would not: in 16 bits most steps are smaller than a weight's rounding.
        """
        fresh = self.make_inputs(shape, Maker(dtype, str(inputs["input"].device)))
        names = _weight_names(fresh)
        for name in names:
            if name.startswith("bias"):
                fresh[name][::2] = 0  # where a step shows whole in every dtype
        before = {name: fresh[name].clone().double() for name in names}
        # Each layer rounds what the one before has rounded.
        tolerance = RELATIVE_TOLERANCE[dtype] * (len(names) / 2) ** 0.5
        gradients = _reference_gradients(fresh, relu_masks(shape, fresh, dtype))
        for name in names:
            fresh[name].requires_grad_()
        self.bind(shape, fresh)()
        for name, expected in gradients.items():
            gradient = fresh[name].grad
            if gradient is None:
                raise WrongResultError(f"{self.name}: a step made no gradient of {name}")
            _require_near(f"{self.name} gradient of {name}", gradient, expected, tolerance)
            _check_moved(f"{self.name} {name}", before[name], fresh[name], expected)


def _weight_names(inputs: Mapping[str, torch.Tensor]) -> list[str]:
    return [name for name in inputs if name.startswith(("weight", "bias"))]


def _reference_gradients(inputs: Mapping[str, torch.Tensor], masks: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """In float64, written out, with the hidden elements that pass in the case's own dtype.

    What goes back from layer to layer is rounded to that dtype: over a large batch much of it is too small for
    float16.
    """
    wide = widen(inputs)
    layers = range(len(masks) + 1)
    value, given = wide["input"], []
    for layer in layers:
        given.append(value)
        value = value @ wide[f"weight{layer}"].T + wide[f"bias{layer}"]
        if layer < len(masks):
            value = value * masks[layer]
    targets = inputs["target"].unsqueeze(1)
    upstream = (value.softmax(1) - torch.zeros_like(value).scatter_(1, targets, 1.0)) / len(value)
    gradients = {}
    for layer in reversed(layers):
        upstream = upstream.to(inputs["input"].dtype).double()
        gradients[f"weight{layer}"] = upstream.T @ given[layer]
        gradients[f"bias{layer}"] = upstream.sum(0)
        if layer:
            upstream = upstream @ wide[f"weight{layer}"] * masks[layer - 1]
    return gradients


def _require_near(name: str, result: torch.Tensor, reference: torch.Tensor, tolerance: float) -> None:
    off, size = float((result.double() - reference).norm()), float(reference.norm())
    if not off <= tolerance * size:
        raise WrongResultError(
            f"{name} is off by {off / (size or 1.0):.2e} relative to float64; {tolerance:.0e} is allowed",
            hint=WRONG_LIBRARY,
        )


def _check_moved(name: str, before: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor) -> None:
    """Compare the step with LEARNING_RATE·gradient where the weight's dtype can show it."""
    limits = torch.finfo(weight.dtype)
    step = -LEARNING_RATE * gradient
    shown = step.abs() >= SHOWN_STEP * limits.eps * before.abs().clamp(min=limits.smallest_normal)
    moved = (weight.detach().double() - before)[shown]
    _require_near(f"{name}: the step", moved, step[shown], STEP_TOLERANCE)
