"""Weights that can hear: a network that spells out what the synthetic speech says. Loads torch.

With weights that are only random, greedy decoding would be a walk between near ties: the least rounding would change
the whole output, nothing could be compared, and how many symbols come out would be chance. So a few units of every
layer are wired by hand (one for each label) and all others stay random. Sizes and work are those of the model.
"""

from __future__ import annotations

import torch
from torch import nn

from stepscope.bench.workloads.models.rnnt.network import ConcatJoint, Rnnt
from stepscope.bench.workloads.models.rnnt.speech import LEVEL

OPEN = 6.0
"""Bias of a gate that is to be open or, negative, shut: sigmoid(6) = 0.998."""
GAIN = 3.0
"""From a carrier to the next layer's: tanh saturates, so that what was noise is gone after two layers."""
SHARP = 8.0
"""From the wired units of the joint to the logits: wide margins between the best and the second."""
REST = 0.7
"""What a carrier holds, about: tanh(tanh(GAIN * REST))."""


def plant(network: Rnnt, *, mel: int, stack: int, labels: int) -> None:
    """Carrier `s` of every layer is high while label `s` is heard, or was the last one written. The joint writes a
    label that is heard and was not the last one written, else a blank."""
    joint = network.joint
    if not isinstance(joint, ConcatJoint) or 2 * labels > mel:
        raise ValueError("only a joint of one layer is wired, and only for labels that have a band of their own")
    encoder, prediction = network.encoder, network.prediction
    one = torch.arange(labels)
    with torch.no_grad():
        bands = torch.zeros(labels, mel * stack)
        for copy in range(stack):
            bands[one, copy * mel + 2 * one] = 1.0
        _carry(encoder.before, 0, bands, bias=-stack * LEVEL / 2)
        for layer in range(1, encoder.before.num_layers):
            _carry(encoder.before, layer, GAIN * torch.eye(labels, encoder.before.hidden_size))
        pair = torch.cat([torch.eye(labels, encoder.before.hidden_size)] * 2, dim=1)
        _carry(encoder.after, 0, GAIN / 2 * pair)
        for layer in range(1, encoder.after.num_layers):
            _carry(encoder.after, layer, GAIN * torch.eye(labels, encoder.after.hidden_size))

        embedding = prediction.embedding.weight
        embedding[:, :labels] = (2 * torch.eye(labels) - 1).to(embedding)
        for layer in range(prediction.recurrent.num_layers):
            _carry(prediction.recurrent, layer, GAIN * torch.eye(labels, prediction.recurrent.hidden_size))

        joint.hidden.weight[:labels] = 0.0
        joint.hidden.weight[one, one] = 1.0
        joint.hidden.weight[one, encoder.after.hidden_size + one] = -1.0
        joint.hidden.bias[:labels] = -REST / 2
        joint.output.weight[:, :labels] = 0.0
        joint.output.weight[one, one] = SHARP
        # Between what a silent unit gives and the least that a speaking one does: the first label follows no other.
        joint.output.bias[labels] = SHARP * REST / 4


def _carry(lstm: nn.LSTM, layer: int, wiring: torch.Tensor, bias: float = 0.0) -> None:
    """The first units of a layer pass on what `wiring` takes from the layer's input, and remember nothing."""
    count, width = wiring.shape[0], lstm.hidden_size
    inputs, inner = getattr(lstm, f"weight_ih_l{layer}"), getattr(lstm, f"weight_hh_l{layer}")
    biases, more = getattr(lstm, f"bias_ih_l{layer}"), getattr(lstm, f"bias_hh_l{layer}")
    for gate, level in enumerate((OPEN, -OPEN, bias, OPEN)):
        rows = slice(gate * width, gate * width + count)
        inputs[rows] = wiring.to(inputs) if gate == 2 else 0.0
        inner[rows] = 0.0
        biases[rows], more[rows] = level, 0.0
