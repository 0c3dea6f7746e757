"""RNN-T out of the box: encoder, prediction network, joint, the loss over all alignments, greedy decoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stepscope.bench.workloads.models.rnnt.lamb import Lamb
from stepscope.bench.workloads.models.rnnt.speech import LEVEL, make_utterances
from stepscope.bench.workloads.protocol import Batch, Mode, Outputs, Task

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


IMPOSSIBLE = -1e30
"""Log-probability of what cannot be. Not infinite: infinities leave gradients that are no numbers."""


def transducer_loss(logits: Tensor, labels: Tensor, frames: Tensor, label_lengths: Tensor) -> Tensor:
    """Minus the log-probability of each transcript, summed over all alignments, as a mean over the batch.

    logits: [batch, frames, labels + 1, classes], the last class is the blank; labels: [batch, labels]. What lies beyond
    the lengths is not read into the result. Gradients by autograd.
    """
    blank, label = pick_log_probs(logits.float() if logits.dtype in HALVES else logits, labels)
    return lattice_costs(blank, label, frames, label_lengths).mean()


HALVES = (torch.float16, torch.bfloat16)


def pick_log_probs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of a blank and of the next label in each cell, both [batch, frames, labels + 1]; after the last
    label no other follows."""
    log_probs = F.log_softmax(logits, dim=-1)
    frames = logits.shape[1]
    chosen = labels[:, None, :, None].expand(-1, frames, -1, 1)
    label = log_probs[:, :, :-1].gather(3, chosen).squeeze(3)
    return log_probs[..., -1], F.pad(label, (0, 1), value=IMPOSSIBLE)


def lattice_costs(blank: Tensor, label: Tensor, frames: Tensor, label_lengths: Tensor) -> Tensor:
    """α(t, u) = logaddexp(α(t−1, u) + blank(t−1, u), α(t, u−1) + label(t, u−1)), one anti-diagonal t + u at a time: its
    cells need only the one before. Cost: −(α(T−1, U) + blank(T−1, U)), [batch]."""
    blank_by_diagonal, label_by_diagonal = skew(blank), skew(label)
    alpha = torch.full_like(blank[:, 0], IMPOSSIBLE)
    alpha[:, 0] = 0.0
    alphas = [alpha]
    for diagonal in range(blank_by_diagonal.shape[1] - 1):
        stays = alpha + blank_by_diagonal[:, diagonal]
        moves = F.pad((alpha + label_by_diagonal[:, diagonal])[:, :-1], (1, 0), value=IMPOSSIBLE)
        alpha = torch.logaddexp(stays, moves)
        alphas.append(alpha)
    batch = torch.arange(len(frames), device=frames.device)
    last = frames - 1 + label_lengths
    ends = torch.stack(alphas, dim=1)[batch, last, label_lengths]
    return -(ends + blank[batch, frames - 1, label_lengths])


def skew(cells: Tensor) -> Tensor:
    """[batch, t, u] as [batch, t + u, u]; cells outside of the lattice are impossible."""
    _, frames, positions = cells.shape
    u = torch.arange(positions, device=cells.device)
    t = torch.arange(frames + positions - 1, device=cells.device)[:, None] - u
    skewed = cells[:, t.clamp(0, frames - 1), u]
    return torch.where((t >= 0) & (t < frames), skewed, IMPOSSIBLE)


def decode_greedily(
    network: Rnnt, encoded: Tensor, lengths: Tensor, *, most_a_frame: int, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Labels and their logits [batch, most], and how many there are [batch]. In each frame the best class is written
    until it is the blank, at most `most_a_frame` times; the whole loop waits for the slowest of the batch."""
    count, frames, _ = encoded.shape
    labels = torch.full((count, most), -1, dtype=torch.long, device=encoded.device)
    scores = encoded.new_zeros(count, most)
    written = torch.zeros(count, dtype=torch.long, device=encoded.device)
    predicted, (hidden, cell) = network.prediction.begin(count)
    for frame in range(frames):
        open_ones = frame < lengths
        for _ in range(most_a_frame):
            logits = network.joint(encoded[:, frame : frame + 1], predicted)[:, 0, 0]
            score, best = logits.max(dim=-1)
            blank = logits.shape[-1] - 1
            open_ones = open_ones & (best != blank) & (written < most)
            if not open_ones.any():
                break
            labels[open_ones, written[open_ones]] = best[open_ones]
            scores[open_ones, written[open_ones]] = score[open_ones]
            written += open_ones
            after, (new_hidden, new_cell) = network.prediction.advance(best.clamp(max=blank - 1), (hidden, cell))
            predicted = torch.where(open_ones[:, None, None], after, predicted)
            hidden = torch.where(open_ones[None, :, None], new_hidden, hidden)
            cell = torch.where(open_ones[None, :, None], new_cell, cell)
    return labels, scores, written


def mask_frames(encoded: Tensor, lengths: Tensor) -> Tensor:
    """Zeros beyond each length."""
    inside = torch.arange(encoded.shape[1], device=encoded.device) < lengths[:, None]
    return encoded * inside[..., None]


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
    inputs, inner, biases, more = lstm.all_weights[layer]
    for gate, level in enumerate((OPEN, -OPEN, bias, OPEN)):
        rows = slice(gate * width, gate * width + count)
        inputs[rows] = wiring.to(inputs) if gate == 2 else 0.0
        inner[rows] = 0.0
        biases[rows], more[rows] = level, 0.0


class RnntTask(Task):
    """Batches are padded to the declared maxima, so that all of one size have the same shapes; lengths come along."""

    parts = ("encoder.before", "encoder.after", "prediction", "joint")

    def build(self) -> nn.Module:
        sizes = self.sizes
        network = Rnnt(sizes)
        set_recurrent_weights(network, forget_bias=sizes["forget_bias"], weight_scale=sizes["weight_scale"])
        if sizes["planted"]:
            plant(network, mel=sizes["mel"], stack=sizes["stack"], labels=sizes["labels"])
        return network

    def make_batch(self, count: int, *, seed: int, mode: Mode) -> dict[str, torch.Tensor]:
        """`features` and their lengths `frames`; for training `labels` and `label_lengths`, too."""
        utterances = make_utterances(self.sizes, count, seed=seed)
        if mode == "train":
            return utterances
        return {name: utterances[name] for name in ("features", "frames")}

    def loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        logits = module(batch["features"], batch["labels"])
        return transducer_loss(logits, batch["labels"], encoded_lengths(batch["frames"]), batch["label_lengths"])

    def infer(self, module: nn.Module, batch: Batch) -> Outputs:
        """What the encoder gives ([batch, frames, width], zeros beyond the lengths), and of the greedy transcript the
        labels ([batch, max_output], -1 beyond the end), the logit of each where it was chosen (0 beyond), and the
        length. All as floats, so that they can be compared as such: a wrong label is a large error."""
        network = cast("Rnnt", module)
        lengths = encoded_lengths(batch["frames"])
        encoded = network.encoder(batch["features"])
        labels, scores, counts = decode_greedily(
            network, encoded, lengths, most_a_frame=self.sizes["max_symbols_a_frame"], most=self.sizes["max_output"]
        )
        return mask_frames(encoded, lengths), labels.float(), scores.float(), counts.float()

    def make_optimizer(self, module: nn.Module, kind: type[Lamb] = Lamb) -> torch.optim.Optimizer:
        rate, decay, norm = (self.sizes[name] for name in ("learning_rate", "weight_decay", "max_gradient_norm"))
        return kind(module.parameters(), lr=rate, weight_decay=decay, max_norm=norm)


def encoded_lengths(frames: torch.Tensor) -> torch.Tensor:
    """The encoder gives one vector for each pair of frames."""
    return (frames + 1) // 2
