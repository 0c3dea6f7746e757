"""RNN-T made fast: a fused joint and loss, half-precision recurrent layers, decoding in one kernel, captured steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import LSTM
from torch.nn import functional as F  # noqa: N812

from stepscope.bench.workloads.models.rnnt.fast_loss import Transcripts, joint_transducer_costs
from stepscope.bench.workloads.models.rnnt.lamb import ForeachLamb
from stepscope.bench.workloads.models.rnnt.ootb import (
    ConcatJoint,
    Rnnt,
    RnntTask,
    SumJoint,
    encoded_lengths,
    mask_frames,
    stack_pairs,
)
from stepscope.bench.workloads.protocol import Batch, Change, Engine, Mode, Optimized, Outputs, Precision

PERSISTENT_MULTIPLE = 128
"""Multiple of the input's width that cuDNN's persistent kernels want."""


class Transcriber(nn.Module):
    """For inference only. Names of its buffers are those that `decode` takes."""

    def __init__(self, network: Rnnt, *, single_layers: bool) -> None:
        super().__init__()
        before, after = network.encoder.before, network.encoder.after
        self.before = _split(before) if single_layers else nn.ModuleList([before])
        self.after = _split(after) if single_layers else nn.ModuleList([after])
        self._prepare(network)

    @torch.no_grad()
    def _prepare(self, network: Rnnt) -> None:
        of_encoder, bias, of_prediction = split_joint(network.joint)
        lstm = network.prediction.recurrent
        if lstm.num_layers != 2:
            raise ValueError("the decoding loop is written for a prediction network of two layers")
        embedding = network.prediction.embedding.weight
        # A label changes the first layer's gates by a vector of its own; zeros stand before the first label.
        (inputs_0, recurrent_0, bias_0, more_0), (inputs_1, recurrent_1, bias_1, more_1) = lstm.all_weights
        through = F.linear(F.pad(embedding, (0, 0, 0, 1)), inputs_0, bias_0 + more_0)
        weights = {
            "of_encoder": of_encoder,
            "hidden_bias": bias,
            "table": through,
            "recurrent_0": recurrent_0,
            "inputs_1": inputs_1,
            "recurrent_1": recurrent_1,
            "bias_1": bias_1 + more_1,
            "projection": of_prediction,
            "output": network.joint.output.weight,
            "output_bias": network.joint.output.bias,
        }
        for name, weight in weights.items():
            self.register_buffer(name, weight.clone(memory_format=torch.contiguous_format))

    def encode(self, features: Tensor) -> Tensor:
        hidden = features
        for layer in self.before:
            hidden = _run(layer, hidden)
        hidden = stack_pairs(hidden)
        for layer in self.after:
            hidden = _run(layer, hidden)
        return hidden

    def decode(
        self, encoded: Tensor, lengths: Tensor, *, most_a_frame: int, most: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = dict(self.named_buffers(recurse=False))
        # The encoder's share of the joint, of all frames at once.
        projected = F.linear(encoded, weights.pop("of_encoder"), weights.pop("hidden_bias"))
        if not encoded.is_cuda:
            return decode(projected, lengths, weights, most_a_frame=most_a_frame, most=most)
        from stepscope.bench.workloads.models.rnnt import kernels

        return kernels.decode(projected, lengths, weights, most_a_frame=most_a_frame, most=most)


def split_joint(joint: SumJoint | ConcatJoint) -> tuple[Tensor, Tensor, Tensor]:
    """Weight of the encoder's side, bias of both together, weight of the prediction's side."""
    if isinstance(joint, SumJoint):
        return joint.encoder.weight, joint.encoder.bias + joint.prediction.bias, joint.prediction.weight
    encoder = joint.encoder_width
    return joint.hidden.weight[:, :encoder], joint.hidden.bias, joint.hidden.weight[:, encoder:]


def decode(
    encoded: Tensor, lengths: Tensor, weights: dict[str, Tensor], *, most_a_frame: int, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Labels and logits [batch, most] and counts [batch], as floats. Each utterance has its own place in time: in a
    turn it writes a label or goes on by a frame, whatever the others do."""
    weights = {name: one.float() for name, one in weights.items()}
    encoded = encoded.float()
    batch, frames, _ = encoded.shape
    each = torch.arange(batch, device=encoded.device)
    blank = weights["output"].shape[0] - 1
    labels, scores = encoded.new_full((batch, most), -1.0), encoded.new_zeros(batch, most)
    frame, here, count = (torch.zeros_like(lengths) for _ in range(3))
    width = weights["recurrent_0"].shape[1]
    states = [encoded.new_zeros(batch, width) for _ in range(4)]
    states = _advance(torch.full_like(lengths, blank), states, weights)
    while bool((frame < lengths).any()):
        known = states[2] @ weights["projection"].t()
        hidden = torch.relu(encoded[each, frame.clamp(max=frames - 1)] + known)
        score, best = F.linear(hidden, weights["output"], weights["output_bias"]).max(dim=-1)
        writes = (frame < lengths) & (best != blank) & (count < most)
        place = count.clamp(max=most - 1)
        labels[each, place] = torch.where(writes, best.float(), labels[each, place])
        scores[each, place] = torch.where(writes, score, scores[each, place])
        after = _advance(best, states, weights)
        states = [torch.where(writes[:, None], new, old) for new, old in zip(after, states, strict=True)]
        count, here = count + writes, here + writes
        leaves = ~writes | (here == most_a_frame)
        frame, here = frame + leaves, here.masked_fill(leaves, 0)
    return labels, scores, count.float()


def _advance(symbols: Tensor, states: list[Tensor], weights: dict[str, Tensor]) -> list[Tensor]:
    hidden_0, cell_0, hidden_1, cell_1 = states
    gates = weights["table"][symbols] + hidden_0 @ weights["recurrent_0"].t()
    hidden_0, cell_0 = _cell(gates, cell_0)
    gates = weights["bias_1"] + hidden_0 @ weights["inputs_1"].t() + hidden_1 @ weights["recurrent_1"].t()
    hidden_1, cell_1 = _cell(gates, cell_1)
    return [hidden_0, cell_0, hidden_1, cell_1]


def _cell(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    write, keep, fresh, show = gates.chunk(4, dim=-1)
    cell = keep.sigmoid() * cell + write.sigmoid() * fresh.tanh()
    return show.sigmoid() * cell.tanh(), cell


@torch.no_grad()
def _split(lstm: nn.LSTM) -> nn.ModuleList:
    """Each layer as a module of its own, its input widened with zeros: cuDNN has persistent kernels for such calls."""
    layers = []
    for number in range(lstm.num_layers):
        inputs, *others = lstm.all_weights[number]
        wide = -(-inputs.shape[1] // PERSISTENT_MULTIPLE) * PERSISTENT_MULTIPLE
        layer = nn.LSTM(wide, lstm.hidden_size, batch_first=True, device=inputs.device, dtype=inputs.dtype)
        padded = F.pad(inputs, (0, wide - inputs.shape[1]))
        for own, weight in zip(layer.all_weights[0], [padded, *others], strict=True):
            own.copy_(weight)
        layers.append(layer.train(lstm.training))
    return nn.ModuleList(layers)


def _run(layer: nn.Module, hidden: Tensor) -> Tensor:
    missing: int = cast("nn.LSTM", layer).input_size - hidden.shape[-1]
    output: Tensor = layer(F.pad(hidden, (0, missing)) if missing else hidden)[0]
    return output


GRADIENT_SCALE = 64.0
"""Scale of gradients inside of the half-precision stacks, a power of two: float16 has no very small numbers."""


def encode(network: Rnnt, features: Tensor) -> Tensor:
    """As the plain encoder."""
    encoder = network.encoder
    hidden = _run_stack(encoder.before, features)
    hidden = stack_pairs(encoder.dropout(hidden))
    return encoder.dropout(_leave_half(_run_stack(encoder.after, hidden)))  # type: ignore[no-any-return]


def predict(network: Rnnt, labels: Tensor) -> Tensor:
    """As the plain prediction network."""
    prediction = network.prediction
    embedded: Tensor = _Lookup.apply(prediction.embedding.weight, labels)  # type: ignore[no-untyped-call]
    if _in_half(embedded):
        embedded = _scale_gradient(embedded, 1 / GRADIENT_SCALE)
    hidden = _run_stack(prediction.recurrent, F.pad(embedded, (0, 0, 1, 0)))
    return prediction.dropout(_leave_half(hidden))  # type: ignore[no-any-return]


class _Lookup(torch.autograd.Function):
    """Rows of a table; the gradient is added up in place, without sorting, which a captured step could not repeat."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.like = table
        return F.embedding(indices, table)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (indices,) = ctx.saved_tensors
        gradient = torch.zeros_like(ctx.like)
        rows = upstream.reshape(-1, upstream.shape[-1]).to(gradient.dtype)
        return gradient.index_add_(0, indices.reshape(-1), rows), None


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return upstream * ctx.factor, None


def _scale_gradient(tensor: Tensor, factor: float) -> Tensor:
    scaled: Tensor = _ScaleGradient.apply(tensor, factor)  # type: ignore[no-untyped-call]
    return scaled


def _in_half(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.is_autocast_enabled("cuda")


def _leave_half(hidden: Tensor) -> Tensor:
    return _scale_gradient(hidden.float(), GRADIENT_SCALE) if _in_half(hidden) else hidden


def _run_stack(lstm: nn.LSTM, hidden: Tensor) -> Tensor:
    """[batch, time, width] through all layers."""
    if not _in_half(hidden):
        return lstm(hidden)[0]  # type: ignore[no-any-return]
    hidden = hidden.transpose(0, 1)
    for number in range(lstm.num_layers):
        if number:
            hidden = F.dropout(hidden, lstm.dropout, lstm.training)
        hidden = _run_layer(lstm, number, hidden)
    return hidden.transpose(0, 1)


def _run_layer(lstm: nn.LSTM, number: int, hidden: Tensor) -> Tensor:
    """One layer in float16 by one call, [time, batch, width]: torch takes cuDNN's persistent kernels only for a single
    layer of float16 whose input is a multiple of 128 wide (and batches that are multiples of 8, up to 128)."""
    weights = [_scale_gradient(one, 1 / GRADIENT_SCALE) for one in lstm.all_weights[number]]
    missing = -hidden.shape[-1] % PERSISTENT_MULTIPLE
    if missing:
        hidden, weights[0] = F.pad(hidden, (0, missing)), F.pad(weights[0], (0, missing))
    state = hidden.new_zeros(1, hidden.shape[1], lstm.hidden_size)
    # Autocast lays the cast weights out as cuDNN wants them.
    with torch.autocast(hidden.device.type, dtype=torch.float16, cache_enabled=False):
        output: Tensor = torch.lstm(hidden, [state, state], weights, True, 1, 0.0, lstm.training, False, False)[0]
    return output


class FastRnnt(Optimized):
    def convert(self, module: nn.Module, *, mode: Mode, precision: Precision) -> nn.Module:
        network = cast("Rnnt", module)
        if mode == "infer":
            network = cast("Rnnt", Transcriber(network, single_layers=precision == "fp16").train(module.training))
        for part in network.modules():
            if isinstance(part, LSTM):
                part.flatten_parameters()
        return network

    def loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        network = cast("Rnnt", module)
        joint = network.joint
        if not isinstance(joint, SumJoint):
            return super().loss(module, batch)
        encoded = joint.encoder(encode(network, batch["features"]))
        predicted = joint.prediction(predict(network, batch["labels"]))
        lengths = encoded_lengths(batch["frames"])
        costs = joint_transducer_costs(
            encoded,
            predicted,
            joint.output.weight,
            joint.output.bias,
            Transcripts(batch["labels"], lengths, batch["label_lengths"]),
            dropout=joint.dropout.p if joint.training else 0.0,
        )
        return costs.mean()

    def infer(self, module: nn.Module, batch: Batch) -> Outputs:
        transcriber = cast("Transcriber", module)
        lengths = encoded_lengths(batch["frames"])
        encoded = transcriber.encode(batch["features"])
        labels, scores, counts = transcriber.decode(
            encoded, lengths, most_a_frame=self.sizes["max_symbols_a_frame"], most=self.sizes["max_output"]
        )
        return mask_frames(encoded, lengths), labels, scores, counts

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return cast("RnntTask", self.plain).make_optimizer(module, ForeachLamb)

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """None: the loss reads weights of its parts from outside."""
        return []

    def engine(self, mode: Mode) -> Engine:
        """Captured, not compiled: cuDNN's layers and the kernels written here are opaque to a compiler, and what is
        left between them is little."""
        return Engine(graph=True)

    def list_changes(self, mode: Mode) -> list[Change]:
        return [*(TRAIN_CHANGES if mode == "train" else INFER_CHANGES), CAPTURED]


TRAIN_CHANGES = [
    Change(
        "fused joint and loss",
        "one function with its own gradient; of the log-softmax only the normaliser, the blank and the label are "
        "formed; cells of padding are skipped outside of the matmuls",
    ),
    Change(
        "own lattice kernel",
        "sums over alignments in float64, forwards and backwards, by a Triton kernel with a scan over each frame",
    ),
    Change("logits in place", "the gradient overwrites the logits; dropout of the joint is drawn in the same kernel"),
    Change("foreach LAMB", "the same update for all weights by a few kernels, with the count of steps on the device"),
    Change("embedding gradient by atomics", "added up in place instead of sorted; the order of sums may vary"),
    Change("bfloat16 joint", "the joint's matmuls take and give bfloat16, and the logits are kept so", ["bf16"]),
    Change(
        "float16 recurrent layers",
        "one layer a call, first input padded to a multiple of 128, so that cuDNN's persistent kernels apply; weights "
        "stay float32, gradients inside are scaled by 64",
        ["bf16"],
    ),
    Change("tf32 matmuls", "matmuls round their inputs to tf32", ["tf32"]),
]
INFER_CHANGES = [
    Change(
        "decoding in one kernel",
        "each utterance is a program of a Triton kernel that walks its own frames and labels to its own end: no turn "
        "on the host, no waiting for the slowest; states, matmuls and logits of the loop are float32",
    ),
    Change("encoder's share of the joint ahead", "the joint's first layer is split; its encoder half is one matmul"),
    Change("table of embedded labels", "embedding, first input weight and biases are one table of gate inputs a label"),
    Change(
        "single recurrent layers",
        "each layer is a call of its own, its input padded to a multiple of 128, so that cuDNN's persistent kernels "
        "apply",
        ["fp16"],
    ),
    Change("bf16 weights", "weights, features and the encoder's states are stored as bf16", ["bf16"]),
    Change("fp16 weights", "weights, features and the encoder's states are stored as fp16", ["fp16"]),
    Change("tf32 matmuls", "matmuls of the encoder round their inputs to tf32", ["tf32"]),
]
CAPTURED = Change("CUDA graph", "the whole step is captured once and replayed; batches keep the declared padded shapes")
