"""The network taken apart for decoding: an encoder, and the weights of a loop that fits in one kernel. Loads torch."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stepscope.bench.workloads.models.rnnt.network import ConcatJoint, Rnnt, SumJoint, stack_pairs

PERSISTENT_MULTIPLE = 128
"""Of the input's width, for cuDNN's persistent kernels."""


class _Layer(NamedTuple):
    inputs: Tensor
    recurrent: Tensor
    bias: Tensor


def _weights_of(lstm: nn.LSTM, number: int) -> _Layer:
    def one(name: str) -> Tensor:
        return getattr(lstm, f"{name}_l{number}")  # type: ignore[no-any-return]

    return _Layer(one("weight_ih"), one("weight_hh"), one("bias_ih") + one("bias_hh"))


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
        first, second = _weights_of(lstm, 0), _weights_of(lstm, 1)
        through = F.linear(F.pad(embedding, (0, 0, 0, 1)), first.inputs, first.bias)
        weights = {
            "of_encoder": of_encoder,
            "hidden_bias": bias,
            "table": through,
            "recurrent_0": first.recurrent,
            "inputs_1": second.inputs,
            "recurrent_1": second.recurrent,
            "bias_1": second.bias,
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
        inputs = getattr(lstm, f"weight_ih_l{number}")
        wide = -(-inputs.shape[1] // PERSISTENT_MULTIPLE) * PERSISTENT_MULTIPLE
        layer = nn.LSTM(wide, lstm.hidden_size, batch_first=True, device=inputs.device, dtype=inputs.dtype)
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            weight = getattr(lstm, f"{name}_l{number}")
            if name == "weight_ih":
                weight = F.pad(weight, (0, wide - weight.shape[1]))
            getattr(layer, f"{name}_l0").copy_(weight)
        layers.append(layer.train(lstm.training))
    return nn.ModuleList(layers)


def _run(layer: nn.Module, hidden: Tensor) -> Tensor:
    missing: int = cast("nn.LSTM", layer).input_size - hidden.shape[-1]
    output: Tensor = layer(F.pad(hidden, (0, missing)) if missing else hidden)[0]
    return output
