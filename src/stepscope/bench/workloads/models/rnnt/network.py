"""The plain network: encoder, prediction network and joint. Loads torch: import it inside functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

State = tuple[Tensor, Tensor]
"""Hidden and cell state of a recurrent stack, each [layers, batch, width]."""


class Encoder(nn.Module):
    """Acoustic features to one vector every two frames."""

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__()
        features, width = sizes["mel"] * sizes["stack"], sizes["encoder_hidden"]
        drop = sizes["encoder_dropout"]
        before, after = sizes["encoder_layers_before"], sizes["encoder_layers_after"]
        self.before = nn.LSTM(features, width, before, batch_first=True, dropout=drop if before > 1 else 0.0)
        self.after = nn.LSTM(2 * width, width, after, batch_first=True, dropout=drop if after > 1 else 0.0)
        self.dropout = nn.Dropout(drop)

    def forward(self, features: Tensor) -> Tensor:
        """[batch, frames, features] to [batch, half the frames, width]. Frames of padding come last, and the layers
        look backwards only, so that padding changes nothing before it."""
        hidden, _ = self.before(features)
        hidden = stack_pairs(self.dropout(hidden))
        hidden, _ = self.after(hidden)
        return self.dropout(hidden)  # type: ignore[no-any-return]


class Prediction(nn.Module):
    """What the labels so far make likely to come next."""

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__()
        width, layers, drop = sizes["prediction_hidden"], sizes["prediction_layers"], sizes["prediction_dropout"]
        self.embedding = nn.Embedding(sizes["labels"], width)
        self.recurrent = nn.LSTM(width, width, layers, batch_first=True, dropout=drop if layers > 1 else 0.0)
        self.dropout = nn.Dropout(drop)

    def forward(self, labels: Tensor) -> Tensor:
        """[batch, labels] to [batch, labels + 1, width]: before the first label stands a vector of zeros."""
        embedded = F.pad(self.embedding(labels), (0, 0, 1, 0))
        hidden, _ = self.recurrent(embedded)
        return self.dropout(hidden)  # type: ignore[no-any-return]

    def begin(self, count: int) -> tuple[Tensor, State]:
        """The output before any label, and the state after it."""
        weight = self.embedding.weight
        hidden, state = self.recurrent(weight.new_zeros(count, 1, weight.shape[1]))
        return hidden, state

    def advance(self, labels: Tensor, state: State) -> tuple[Tensor, State]:
        """After one more label each, [batch]."""
        hidden, state = self.recurrent(self.embedding(labels)[:, None], state)
        return hidden, state


class SumJoint(nn.Module):
    """Both sides projected and added, as in the training reference."""

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__()
        width = sizes["joint_hidden"]
        self.encoder = nn.Linear(sizes["encoder_hidden"], width)
        self.prediction = nn.Linear(sizes["prediction_hidden"], width)
        self.dropout = nn.Dropout(sizes["joint_dropout"])
        self.output = nn.Linear(width, sizes["labels"] + 1)

    def forward(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        """Logits of every pair of a frame and a label position: [batch, frames, positions, labels + 1]."""
        both = self.encoder(encoded)[:, :, None] + self.prediction(predicted)[:, None]
        return self.output(self.dropout(F.relu(both)))  # type: ignore[no-any-return]


class ConcatJoint(nn.Module):
    """Both sides next to each other through one layer, as in the inference reference."""

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__()
        width = sizes["joint_hidden"]
        self.encoder_width: int = sizes["encoder_hidden"]
        self.hidden = nn.Linear(sizes["encoder_hidden"] + sizes["prediction_hidden"], width)
        self.dropout = nn.Dropout(sizes["joint_dropout"])
        self.output = nn.Linear(width, sizes["labels"] + 1)

    def forward(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        """As SumJoint's."""
        frames, positions = encoded.shape[1], predicted.shape[1]
        both = torch.cat(
            [
                encoded[:, :, None].expand(-1, -1, positions, -1),
                predicted[:, None].expand(-1, frames, -1, -1),
            ],
            dim=-1,
        )
        return self.output(self.dropout(F.relu(self.hidden(both))))  # type: ignore[no-any-return]


class Rnnt(nn.Module):
    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__()
        self.encoder = Encoder(sizes)
        self.prediction = Prediction(sizes)
        self.joint: SumJoint | ConcatJoint = JOINTS[sizes["joint"]](sizes)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        logits: Tensor = self.joint(self.encoder(features), self.prediction(labels))
        return logits


JOINTS: dict[str, type[SumJoint] | type[ConcatJoint]] = {"sum": SumJoint, "concat": ConcatJoint}


def stack_pairs(hidden: Tensor) -> Tensor:
    """Two frames next to each other as one; a last single one gets zeros: [batch, n, w] to [batch, ⌈n/2⌉, 2w]."""
    batch, frames, width = hidden.shape
    hidden = F.pad(hidden, (0, 0, 0, frames % 2))
    return hidden.reshape(batch, (frames + 1) // 2, 2 * width)


def set_recurrent_weights(network: Rnnt, *, forget_bias: float, weight_scale: float) -> None:
    """As the training reference begins: gates that remember, and small weights."""
    with torch.no_grad():
        for lstm in (network.encoder.before, network.encoder.after, network.prediction.recurrent):
            for name, parameter in lstm.named_parameters():
                parameter.mul_(weight_scale)
                if name.startswith("bias"):
                    gate = slice(lstm.hidden_size, 2 * lstm.hidden_size)
                    parameter[gate] = forget_bias if name.startswith("bias_ih") else 0.0
