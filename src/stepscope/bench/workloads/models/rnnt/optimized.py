"""RNN-T made fast: a fused joint and loss, half-precision recurrent layers, decoding in one kernel, captured steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from stepscope.bench.workloads.models.rnnt.ootb import encoded_lengths
from stepscope.bench.workloads.protocol import Change, Engine, Mode, Optimized, Precision

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn

    from stepscope.bench.workloads.models.rnnt.fast_decoding import Transcriber
    from stepscope.bench.workloads.models.rnnt.network import Rnnt
    from stepscope.bench.workloads.protocol import Outputs


class FastRnnt(Optimized):
    def adopt(self, module: nn.Module, *, mode: Mode, precision: Precision) -> nn.Module:
        from torch.nn import LSTM

        from stepscope.bench.workloads.models.rnnt.fast_decoding import Transcriber

        network = cast("Rnnt", module)
        if mode == "infer":
            network = cast("Rnnt", Transcriber(network, single_layers=precision == "fp16").train(module.training))
        for part in network.modules():
            if isinstance(part, LSTM):
                part.flatten_parameters()
        return network

    def loss(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        from stepscope.bench.workloads.models.rnnt.fast_layers import encode, predict
        from stepscope.bench.workloads.models.rnnt.fast_loss import Transcripts, joint_transducer_costs
        from stepscope.bench.workloads.models.rnnt.network import SumJoint

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

    def infer(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> Outputs:
        from stepscope.bench.workloads.models.rnnt.decoding import mask_frames

        transcriber = cast("Transcriber", module)
        lengths = encoded_lengths(batch["frames"])
        encoded = transcriber.encode(batch["features"])
        labels, scores, counts = transcriber.decode(
            encoded, lengths, most_a_frame=self.sizes["max_symbols_a_frame"], most=self.sizes["max_output"]
        )
        return mask_frames(encoded, lengths), labels, scores, counts

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        from stepscope.bench.workloads.models.rnnt.lamb import ForeachLamb

        sizes = self.sizes
        return ForeachLamb(
            module.parameters(),
            lr=sizes["learning_rate"],
            weight_decay=sizes["weight_decay"],
            max_norm=sizes["max_gradient_norm"],
        )

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """None: the loss reads weights of its parts from outside."""
        return []

    def engine(self, mode: Mode) -> Engine:
        """Captured, not compiled: cuDNN's layers and the kernels written here are opaque to a compiler, and what is
        left between them is little."""
        return Engine(graph=True)

    def changes(self, *, mode: Mode, precision: Precision) -> list[Change]:
        return [*(_of_training(precision) if mode == "train" else _of_inference(precision)), CAPTURED]


CAPTURED = Change("CUDA graph", "the whole step is captured once and replayed; batches keep the declared padded shapes")


def _of_training(precision: Precision) -> list[Change]:
    changes = [
        Change(
            "fused joint and loss",
            "one function with its own gradient; of the log-softmax only the normaliser, the blank and the label are "
            "formed; cells of padding are skipped outside of the products",
        ),
        Change(
            "own lattice kernel",
            "sums over alignments in float64, forwards and backwards, by a Triton kernel with a scan over each frame",
        ),
        Change(
            "logits in place", "the gradient overwrites the logits; dropout of the joint is drawn in the same kernel"
        ),
        Change(
            "foreach LAMB", "the same update for all weights by a few kernels, with the count of steps on the device"
        ),
        Change("embedding gradient by atomics", "added up in place instead of sorted; the order of sums may vary"),
    ]
    if precision == "bf16":
        changes += [
            Change("bfloat16 joint", "the joint's products take and give bfloat16, and the logits are kept so"),
            Change(
                "float16 recurrent layers",
                "one layer a call, first input padded to a multiple of 128, so that cuDNN's persistent kernels apply; "
                "weights stay float32, gradients inside are scaled by 64",
            ),
        ]
    elif precision == "tf32":
        changes.append(Change("tf32 products", "products round their inputs to tf32"))
    return changes


def _of_inference(precision: Precision) -> list[Change]:
    changes = [
        Change(
            "decoding in one kernel",
            "each utterance is a program of a Triton kernel that walks its own frames and labels to its own end: no "
            "turn on the host, no waiting for the slowest; states, products and logits of the loop are float32",
        ),
        Change(
            "encoder's share of the joint ahead", "the joint's first layer is split; its encoder half is one product"
        ),
        Change(
            "table of embedded labels", "embedding, first input weight and biases are one table of gate inputs a label"
        ),
    ]
    if precision == "fp16":
        changes.append(
            Change(
                "single recurrent layers",
                "each layer is a call of its own, its input padded to a multiple of 128, so that cuDNN's persistent "
                "kernels apply",
            )
        )
    if precision in ("bf16", "fp16"):
        changes.append(
            Change(f"{precision} weights", f"weights, features and the encoder's states are stored as {precision}")
        )
    elif precision == "tf32":
        changes.append(Change("tf32 products", "products of the encoder round their inputs to tf32"))
    return changes
