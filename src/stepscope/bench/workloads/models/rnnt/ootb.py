"""RNN-T as a model engineer writes it with torch alone: padded batches, loss by autograd, greedy loop on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from stepscope.bench.workloads.models.rnnt.speech import make_utterances
from stepscope.bench.workloads.protocol import Mode, Task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn

    from stepscope.bench.workloads.models.rnnt.network import Rnnt
    from stepscope.bench.workloads.protocol import Outputs


class RnntTask(Task):
    """Batches are padded to the declared maxima, so that all of one size have the same shapes; lengths come along."""

    def build(self) -> nn.Module:
        from stepscope.bench.workloads.models.rnnt.network import Rnnt, set_recurrent_weights
        from stepscope.bench.workloads.models.rnnt.planted import plant

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

    def loss(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        from stepscope.bench.workloads.models.rnnt.transducer import transducer_loss

        logits = module(batch["features"], batch["labels"])
        return transducer_loss(logits, batch["labels"], encoded_lengths(batch["frames"]), batch["label_lengths"])

    def infer(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> Outputs:
        """What the encoder gives ([batch, frames, width], zeros beyond the lengths), and of the greedy transcript the
        labels ([batch, max_output], -1 beyond the end), the logit of each where it was chosen (0 beyond), and the
        length. All as floats, so that they can be compared as such: a wrong label is a large error."""
        from stepscope.bench.workloads.models.rnnt.decoding import decode_greedily, mask_frames

        network = cast("Rnnt", module)
        lengths = encoded_lengths(batch["frames"])
        encoded = network.encoder(batch["features"])
        labels, scores, counts = decode_greedily(
            network, encoded, lengths, most_a_frame=self.sizes["max_symbols_a_frame"], most=self.sizes["max_output"]
        )
        return mask_frames(encoded, lengths), labels.float(), scores.float(), counts.float()

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        from stepscope.bench.workloads.models.rnnt.lamb import Lamb

        sizes = self.sizes
        return Lamb(
            module.parameters(),
            lr=sizes["learning_rate"],
            weight_decay=sizes["weight_decay"],
            max_norm=sizes["max_gradient_norm"],
        )

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        network = cast("Rnnt", module)
        return [network.encoder.before, network.encoder.after, network.prediction, network.joint]


def encoded_lengths(frames: torch.Tensor) -> torch.Tensor:
    """The encoder gives one vector for each pair of frames."""
    return (frames + 1) // 2
