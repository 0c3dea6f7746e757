"""Optimized encoders: BERT's embeddings and layers made anew from `transformers` modules with their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workloads.models.encoders.fp8 import Fp8Linear, Fp8TrainedLinear, Ranges
from stepscope.bench.workloads.models.encoders.ootb import AdamWTask
from stepscope.bench.workloads.protocol import Batch, Change, Engine, Mode, Optimized, Precision

ONE_PROJECTION = Change("one projection", "Query, key and value are one matmul with their weights held as one.")
SKIPPED_LOOKUPS = Change(
    "no position look-up", "Positions are counted, not looked up from the ids: no sequence of the batch is padded."
)
COMPILED = Change("torch.compile", "Norms, sums, dropout and activations are fused by torch.compile.")
WHOLE_GRAPH = Change("CUDA graph", "The whole step is one CUDA graph; shapes must not change.")
FUSED_ADAMW = Change("fused optimizer", "AdamW updates all weights in few kernels.")

_ANY_MODE = [
    Change("tf32", "Matmuls of fp32 matrices are rounded to tf32.", ["tf32"]),
    Change("bf16", "Matmuls are taken in bf16.", ["bf16"]),
    Change("fp16", "Weights and matmuls are fp16.", ["fp16"]),
]
ROUNDINGS: dict[Mode, list[Change]] = {
    "train": [
        *_ANY_MODE,
        Change(
            "fp8",
            "Matmuls of the layers' linear parts are taken in fp8, e4m3 forward and with gradients in e5m2. Each "
            "tensor has one scale, found as it comes; weights stay fp32, all else is bf16.",
            ["fp8"],
        ),
        Change(
            "bf16 stream",
            "What passes from layer to layer is bf16, too; norms are taken in fp32.",
            ["bf16", "fp8"],
        ),
    ],
    "infer": [
        *_ANY_MODE,
        Change(
            "fp8",
            "Matmuls of the layers' linear parts are taken in fp8 (e4m3). Each weight and each input has one scale; "
            "those of inputs are found beforehand on 16 other examples, with half as much again to spare. All else is "
            "bf16.",
            ["fp8"],
        ),
    ],
}
"""What each precision changes."""


def pack(batch: Batch) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` [sequences, longest], each sequence from the left, as the tokens that there are.

    `rows` says for each place of the padded form which token stands there, and `back` is the other way round.
    """
    mask = batch["attention_mask"].bool()
    lengths = mask.sum(dim=1)
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    starts[1:] = lengths.cumsum(0)
    column = torch.arange(mask.shape[1])
    rows = starts[:-1, None].long() + torch.minimum(column[None, :], lengths[:, None] - 1)
    return {
        "tokens": batch["input_ids"][mask],
        "places": column.expand_as(mask)[mask],
        "starts": starts,
        "rows": rows,
        "there": mask,
        "back": mask.flatten().nonzero().squeeze(1),
    }


def unpack(packed: torch.Tensor, batch: Batch) -> torch.Tensor:
    """[tokens, width] as [sequences, longest, width] with zeros for padding."""
    return packed[batch["rows"]] * batch["there"].unsqueeze(-1)


class Lean(nn.Module):
    """An optimized implementation that shares its weights with a plain module, or holds several of them in one, row
    after row."""

    origins: dict[str, list[str]]

    def plain_gradients(self) -> dict[str, torch.Tensor]:
        """By the plain module's names and in its shapes."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                names = self.origins[name]
                found.update(zip(names, parameter.grad.chunk(len(names)), strict=True))
        return found


class Origins:
    """Keeps the names of a plain module's weights while its optimized implementation is made."""

    def __init__(self, plain: nn.Module) -> None:
        # The weights are kept as well: what is freed could give its id to another.
        self._known = {id(one): ([name], one) for name, one in plain.named_parameters()}

    def join(self, parts: Sequence[nn.Parameter]) -> nn.Parameter:
        """One weight with the rows of all."""
        joined = nn.Parameter(torch.cat([one.detach() for one in parts]))
        self._known[id(joined)] = ([name for one in parts for name in self._known[id(one)][0]], joined)
        return joined

    def trace(self, lean: Lean) -> None:
        """Weights that are not the plain module's own (of inference, where nothing is trained) have no origin."""
        named = ((name, self._known.get(id(one))) for name, one in lean.named_parameters())
        lean.origins = {name: known[0] for name, known in named if known is not None}


varlen_attn: Callable[..., object] | None = None
if torch.version.cuda is not None:  # it takes a second to load, and is for CUDA only
    with suppress(ImportError):  # Torch has it from 2.10 on.
        from torch.nn.attention.varlen import varlen_attn


def stream_dtype(mode: Mode, precision: Precision) -> torch.dtype | None:
    """Dtype of what passes from layer to layer; None: as it comes. Autocast would leave it in fp32 after every norm."""
    return torch.bfloat16 if mode == "train" and precision in ("bf16", "fp8") else None


def as_stream(hidden: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return hidden if dtype is None else hidden.to(dtype)


def drop(hidden: torch.Tensor, rate: float, training: bool) -> torch.Tensor:
    return functional.dropout(hidden, rate) if training and rate else hidden


class LeanEmbeddings(nn.Module):
    """Sum of word, position and type, normed. Of unpadded sequences: positions and single types need no look-up."""

    def __init__(self, plain: Any, *, first_position: int, stream: torch.dtype | None) -> None:
        super().__init__()
        self.words = plain.word_embeddings
        self.positions = plain.position_embeddings
        self.types = plain.token_type_embeddings
        self.norm = plain.LayerNorm
        self.drop_rate = plain.dropout.p
        self.first_position = first_position
        self.stream = stream

    def forward(
        self, ids: torch.Tensor, *, types: torch.Tensor | None = None, places: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`places` in their sequences are given for packed tokens; otherwise ids are [sequences, tokens]."""
        hidden = self.words(ids) + self._type_part(types)
        hidden = hidden + self._position_part(ids, places)
        return as_stream(drop(self.norm(hidden), self.drop_rate, self.training), self.stream)

    def _type_part(self, types: torch.Tensor | None) -> torch.Tensor:
        weight: torch.Tensor = self.types.weight
        if types is None:
            return weight[0]
        # The gradient of a choice is two masked sums; that of a look-up adds every token onto the same two rows.
        return torch.where(types.unsqueeze(-1) == 1, weight[1], weight[0])

    def _position_part(self, ids: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
        if places is not None:
            found: torch.Tensor = self.positions(places + self.first_position)
            return found
        weight: torch.Tensor = self.positions.weight
        return weight[self.first_position : self.first_position + ids.shape[1]]


class LeanLayer(nn.Module):
    """One layer: query, key and value in one matmul, fused attention, norms after the sums."""

    entrances = ("first_token",)
    """Methods beside `forward` that are called from outside."""

    def __init__(
        self, plain: Any, *, origins: Origins, stream: torch.dtype | None, narrow: Callable[..., nn.Module]
    ) -> None:
        """`narrow`: what makes linear layers those that are run."""
        super().__init__()
        attention, mixed = plain.attention.self, plain.attention.output
        parts = (attention.query, attention.key, attention.value)
        self.heads = attention.num_attention_heads
        self.width = attention.query.in_features
        self.scale = (self.width // self.heads) ** -0.5
        weight, bias = origins.join([one.weight for one in parts]), origins.join([one.bias for one in parts])
        self.projection = narrow(_hold(weight, bias), reads_as=attention.query)
        self.mix = narrow(mixed.dense)
        self.mix_norm = mixed.LayerNorm
        self.widen = narrow(plain.intermediate.dense)
        self.narrow = narrow(plain.output.dense)
        self.out_norm = plain.output.LayerNorm
        self.drop_rate = mixed.dropout.p
        self.attention_drop_rate = attention.dropout.p
        self.stream = stream

    def forward(self, hidden: torch.Tensor, packed: Batch | None = None) -> torch.Tensor:
        """[sequences, tokens, width]; with `packed` (see packing.pack) [tokens, width]."""
        query, key, value = self._split(self.projection(hidden), 3)
        if packed is None:
            attended = self._attend(query, key, value)
        else:
            attended = attend_packed(query, key, value, packed, scale=self.scale)
        return self._finish(attended.flatten(-2), hidden)

    def first_token(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the layer gives for the first token of each sequence, [sequences, 1, width], and nothing else."""
        weight, bias = self.projection.get_parameter("weight"), self.projection.get_parameter("bias")
        first = hidden[:, :1]
        (query,) = self._split(functional.linear(first, weight[: self.width], bias[: self.width]), 1)
        others = functional.linear(hidden, weight[self.width :], bias[self.width :])
        key, value = self._split(others, 2)
        attended = self._attend(query, key, value)
        return self._finish(attended.flatten(-2), first)

    def _split(self, projected: torch.Tensor, parts: int) -> tuple[torch.Tensor, ...]:
        """The parts of rows that hold them next to each other: each [..., heads, width]."""
        return projected.view(*projected.shape[:-1], parts, self.heads, -1).unbind(-3)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """All [sequences, tokens, heads, width]."""
        rate = self.attention_drop_rate if self.training else 0.0
        attended = functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), dropout_p=rate, scale=self.scale
        )
        return attended.transpose(1, 2)

    def _finish(self, attended: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        mixed = drop(self.mix(attended), self.drop_rate, self.training)
        hidden = as_stream(self.mix_norm(mixed + hidden), self.stream)
        narrow = drop(self.narrow(functional.gelu(self.widen(hidden))), self.drop_rate, self.training)
        return as_stream(self.out_norm(narrow + hidden), self.stream)


def attend_packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: Batch, *, scale: float
) -> torch.Tensor:
    """Each sequence to itself; all [tokens, heads, width]."""
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and varlen_attn is not None:
        # Its own scale is the usual one, by the width of a head, which is the only one that comes here.
        starts, longest = packed["starts"], packed["rows"].shape[1]
        attended = varlen_attn(query, key, value, starts, starts, longest, longest)
        assert isinstance(attended, torch.Tensor)
        return attended
    rows, there = packed["rows"], packed["there"]
    query, key, value = (one[rows].transpose(1, 2) for one in (query, key, value))
    attended = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=there[:, None, None, :], scale=scale
    )
    return attended.transpose(1, 2).flatten(0, 1)[packed["back"]]


def choose_linear(mode: Mode, precision: Precision, ranges: Ranges | None) -> Callable[..., nn.Module]:
    """How linear layers take their matmuls. `reads_as`: the plain layer with the same input, where it is another."""

    def narrow(linear: nn.Linear, *, reads_as: nn.Linear | None = None) -> nn.Module:
        if precision != "fp8":
            return linear
        if mode == "train":
            return Fp8TrainedLinear(linear)
        assert ranges is not None
        return Fp8Linear(linear.weight, linear.bias, largest_input=ranges[reads_as or linear])

    return narrow


def _hold(weight: nn.Parameter, bias: nn.Parameter) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0])
    linear.weight, linear.bias = weight, bias
    return linear


class LeanText(Lean):
    """The embeddings and layers of a text encoder, and what the model has beside them."""

    def __init__(
        self,
        plain: Any,
        body: Any,
        *,
        mode: Mode,
        precision: Precision,
        ranges: Ranges | None = None,
        first_position: int = 0,
    ) -> None:
        """`body`: the part of the plain module with embeddings and layers."""
        super().__init__()
        origins, self.stream = Origins(plain), stream_dtype(mode, precision)
        self.embeddings = LeanEmbeddings(body.embeddings, first_position=first_position, stream=self.stream)
        narrow = choose_linear(mode, precision, ranges)
        self.layers = nn.ModuleList(
            LeanLayer(one, origins=origins, stream=self.stream, narrow=narrow) for one in body.encoder.layer
        )
        self.take_head(plain)
        origins.trace(self)
        self.train(plain.training)

    def take_head(self, plain: Any) -> None:
        """Keeps the plain module's other parts."""

    def encode(self, hidden: torch.Tensor, packed: Batch | None = None) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden, packed)
        return hidden

    def encode_first(self, hidden: torch.Tensor) -> torch.Tensor:
        """The last layer is only computed where it is read: at the first token. [sequences, width]."""
        *before, last = self.layers
        for layer in before:
            hidden = layer(hidden)
        assert isinstance(last, LeanLayer)
        return last.first_token(hidden).squeeze(1)


class FastEncoder(Optimized):
    """Made of a `Lean` module, which knows whose weights it has: compiled layer by layer, a step is one graph."""

    repeated: tuple[str, ...] = ("LeanLayer",)

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return cast("AdamWTask", self.plain).make_optimizer(module, fused=True)

    def gradients(self, module: nn.Module) -> dict[str, torch.Tensor]:
        return cast("Lean", module).plain_gradients()

    def engine(self, mode: Mode) -> Engine:
        return Engine(compile="default", graph=True, dynamic=False)

    def list_changes(self, mode: Mode) -> list[Change]:
        return [COMPILED, WHOLE_GRAPH, *ROUNDINGS[mode], *([FUSED_ADAMW] if mode == "train" else [])]
