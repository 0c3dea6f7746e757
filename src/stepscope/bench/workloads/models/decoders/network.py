"""One fast network for all decoders: fused projections, packed prompts, a cache of fixed size. Imports torch: load it
inside functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

Tensor = torch.Tensor

VOCABULARY_MULTIPLE = 64
"""Rows of the head are filled up to this: matrix units want aligned rows, and 50,257 is odd."""
CHUNK_TOKENS = 4096
"""Tokens whose logits exist at one time in training."""


class HeadShape(NamedTuple):
    """Heads of one attention layer."""

    heads: int
    key_value_heads: int
    width: int
    scale: float

    @property
    def group(self) -> int:
        """Queries that share a key."""
        return self.heads // self.key_value_heads


class Rotary(nn.Module):
    """Tables of turns by position. They stay in float32 whatever the network is cast to."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, frequencies: Tensor, positions: int, scale: float) -> None:
        super().__init__()
        place = torch.arange(positions, device=frequencies.device, dtype=torch.float32)
        angle = place[:, None] * frequencies.float()
        self.register_buffer("cosine", angle.cos() * scale, persistent=False)
        self.register_buffer("sine", angle.sin() * scale, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        exact = self.cosine, self.sine
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.cosine, self.sine = (one.to(self.cosine.device) for one in exact)
        return self

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """For heads that follow the positions: [..., 1, width / 2]."""
        return self.cosine[positions].unsqueeze(-2), self.sine[positions].unsqueeze(-2)


def turn(heads: Tensor, turns: tuple[Tensor, Tensor] | None) -> Tensor:
    """[..., heads, width], turned by its position; the halves of a head are the two coordinates."""
    if turns is None:
        return heads
    cosine, sine = turns
    left, right = heads.float().chunk(2, dim=-1)
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], dim=-1).to(heads.dtype)


class DecoderAttention(nn.Module):
    def __init__(self, shape: HeadShape, projection: nn.Linear, out: nn.Linear, dropout: float) -> None:
        super().__init__()
        self.shape = shape
        self.projection = projection
        """Queries, keys and values by one matmul."""
        self.out = out
        self.dropout = dropout

    def split(self, hidden: Tensor, turns: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """[..., heads, width] each."""
        shape = self.shape
        every: Tensor = self.projection(hidden)
        every = every.view(*hidden.shape[:-1], shape.heads + 2 * shape.key_value_heads, shape.width)
        queries, keys, values = torch.split(every, [shape.heads, shape.key_value_heads, shape.key_value_heads], -2)
        return turn(queries, turns), turn(keys, turns), values

    def causal(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[sequences, places, heads, width]; every place sees itself and those before it."""
        mixed = functional.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            is_causal=True,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.shape.scale,
            enable_gqa=self.shape.group > 1,
        )
        return mixed.transpose(1, 2)

    def one(self, queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        """One query a sequence, [sequences, heads, width], over the whole cache. Queries that share a key take the
        place of the sequence axis: no key is copied or read twice."""
        shape = self.shape
        grouped = queries.reshape(-1, shape.key_value_heads, shape.group, shape.width)
        mixed = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=bias, scale=shape.scale)
        return mixed.flatten(1)


class FeedForward(nn.Module):
    """Two layers with a GELU (tanh form) between."""

    def __init__(self, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.up = up
        self.down = down

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(hidden), approximate="tanh"))  # type: ignore[no-any-return]


class GatedFeedForward(nn.Module):
    """SwiGLU; gate and up by one matmul."""

    def __init__(self, gate_up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)  # type: ignore[no-any-return]


class DecoderBlock(nn.Module):
    def __init__(
        self, before: nn.Module, attention: DecoderAttention, between: nn.Module, feed: nn.Module, dropout: float
    ) -> None:
        super().__init__()
        self.before = before
        self.attention = attention
        self.between = between
        self.feed = feed
        self.dropout = dropout

    def forward(self, hidden: Tensor, turns: tuple[Tensor, Tensor] | None) -> Tensor:
        """Attention over whole sequences, [sequences, places, width], without a cache."""
        mixed = self.attention.causal(*self.attention.split(self.before(hidden), turns))
        return self.add(hidden, mixed.flatten(-2))

    def drop(self, hidden: Tensor) -> Tensor:
        return functional.dropout(hidden, self.dropout, self.training) if self.dropout else hidden

    def add(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """What attention gave, then the feed-forward part, onto the residual stream."""
        hidden = hidden + self.drop(self.attention.out(mixed))
        return hidden + self.drop(self.feed(self.between(hidden)))


class Cache(NamedTuple):
    """Keys and values of all layers, [sequences, heads, places, width] each, in memory that never moves."""

    keys: list[Tensor]
    values: list[Tensor]

    @property
    def places(self) -> int:
        return self.keys[0].shape[2]


def write_prompts(cache: Tensor, fresh: Tensor) -> None:
    """`fresh`: [sequences, places, heads, width]. What lies in the padding is never seen: see `visible`."""
    cache[:, :, : fresh.shape[1]] = fresh.transpose(1, 2)


def write_one(cache: Tensor, fresh: Tensor, positions: Tensor) -> None:
    """`fresh`: [sequences, heads, width], each at its own position."""
    sequences = torch.arange(cache.shape[0], device=cache.device)[:, None]
    heads = torch.arange(cache.shape[1], device=cache.device)[None, :]
    cache.index_put_((sequences, heads, positions[:, None]), fresh)


def visible(positions: Tensor, places: int, dtype: torch.dtype) -> Tensor:
    """[sequences, 1, 1, places]: 0 up to the position of each sequence, which has just been written; then -inf."""
    seen = torch.arange(places, device=positions.device) <= positions[:, None]
    nothing = torch.zeros((), dtype=dtype, device=positions.device)
    return torch.where(seen, nothing, float("-inf"))[:, None, None, :]


class FastDecoder(nn.Module):
    def __init__(
        self,
        *,
        embedding: nn.Parameter,
        positions: nn.Parameter | None = None,
        rotary: Rotary | None = None,
        blocks: Sequence[DecoderBlock],
        norm: nn.Module,
        head: nn.Parameter | None = None,
        vocabulary: int,
        dropout: float = 0.0,
        loss_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.positions = positions
        self.rotary = rotary
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.head = head
        """None: the embedding, transposed."""
        self.vocabulary = vocabulary
        self.dropout = dropout
        self.loss_dtype = loss_dtype
        """In which the matmuls of the head are taken in training."""

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        place = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self._embed(tokens, place)
        if self.dropout:
            hidden = functional.dropout(hidden, self.dropout, self.training)
        turns = self._turns(place)
        for block in self._blocks():
            hidden = block(hidden, turns)
        hidden = self.norm(hidden).flatten(0, 1)
        loss: Tensor = HeadLoss.apply(  # type: ignore[no-untyped-call]
            hidden, self._head(), labels.flatten(), self.vocabulary, self.loss_dtype
        )
        return loss

    def prefill(self, batch: Mapping[str, Tensor], cache: Cache | None) -> Tensor:
        """Logits after the last token of each prompt. Matmuls run over packed tokens; attention, a small part, over
        the padded batch: padding lies behind each prompt, where causal attention never looks."""
        spread, places = batch["spread"], batch["places"]
        hidden = self._embed(batch["tokens"], places)
        turns = self._turns(places)
        for i, block in enumerate(self._blocks()):
            queries, keys, values = block.attention.split(block.before(hidden), turns)
            keys, values = keys[spread], values[spread]
            if cache is not None:
                write_prompts(cache.keys[i], keys)
                write_prompts(cache.values[i], values)
            mixed = block.attention.causal(queries[spread], keys, values).flatten(-2)
            hidden = block.add(hidden, mixed.flatten(0, 1)[batch["home"]])
        return self._logits(hidden[batch["last"]])

    def decode(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Logits after one more token a sequence, which goes into the cache at its position."""
        hidden = self._embed(tokens, positions)
        turns = self._turns(positions)
        bias = visible(positions, cache.places, hidden.dtype)
        for i, block in enumerate(self._blocks()):
            queries, keys, values = block.attention.split(block.before(hidden), turns)
            write_one(cache.keys[i], keys, positions)
            write_one(cache.values[i], values, positions)
            hidden = block.add(hidden, block.attention.one(queries, cache.keys[i], cache.values[i], bias))
        return self._logits(hidden)

    def make_cache(self, sequences: int, places: int) -> Cache:
        """Zeros: what was never written may be multiplied by nothing, and nothing times garbage could be no number."""
        shapes = [block.attention.shape for block in self._blocks()]
        full = [(sequences, one.key_value_heads, places, one.width) for one in shapes]
        return Cache([self.embedding.new_zeros(one) for one in full], [self.embedding.new_zeros(one) for one in full])

    def _blocks(self) -> list[DecoderBlock]:
        return list(self.blocks)  # type: ignore[arg-type]

    def _embed(self, tokens: Tensor, places: Tensor) -> Tensor:
        hidden = functional.embedding(tokens, self.embedding)
        return hidden if self.positions is None else hidden + functional.embedding(places, self.positions)

    def _turns(self, places: Tensor) -> tuple[Tensor, Tensor] | None:
        return None if self.rotary is None else self.rotary.at(places)

    def _head(self) -> Tensor:
        return self.embedding if self.head is None else self.head

    def _logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(self.norm(hidden), self._head())[:, : self.vocabulary]


class HeadLoss(torch.autograd.Function):
    """Cross-entropy of the next token, the head included. Gradients are taken in the forward pass, chunk by chunk, so
    that logits of all tokens never exist together; the backward pass scales them."""

    @staticmethod
    def forward(  # noqa: PLR0917 - torch passes them by place
        ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, vocabulary: int, dtype: torch.dtype
    ) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            loss, by_hidden, by_head = _head_loss(hidden, head, labels, vocabulary, dtype)
        ctx.save_for_backward(by_hidden, by_head)
        return loss

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        by_hidden, by_head = ctx.saved_tensors
        return by_hidden * outer, by_head * outer, None, None, None


def _head_loss(
    hidden: Tensor, head: Tensor, labels: Tensor, vocabulary: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    weight = head.to(dtype)
    share = 1.0 / hidden.shape[0]
    column = torch.arange(vocabulary, device=hidden.device)
    loss = hidden.new_zeros((), dtype=torch.float32)
    by_head = torch.zeros_like(head)
    by_hidden = []
    for part, right in zip(torch.split(hidden.to(dtype), CHUNK_TOKENS), torch.split(labels, CHUNK_TOKENS), strict=True):
        logits = (part @ weight.t())[:, :vocabulary].float()
        whole = logits.logsumexp(1, keepdim=True)
        loss = loss + (whole - logits.gather(1, right[:, None])).sum() * share
        slope = (logits - whole).exp() - (column == right[:, None]).float()
        slope = functional.pad((slope * share).to(dtype), (0, head.shape[0] - vocabulary))
        by_hidden.append((slope @ weight).to(hidden.dtype))
        by_head = by_head + (slope.t() @ part).to(head.dtype)
    return loss, torch.cat(by_hidden), by_head


def padded_rows(weight: Tensor) -> nn.Parameter:
    """Filled up with rows of zeros, which get no gradient and stay zero."""
    missing = -weight.shape[0] % VOCABULARY_MULTIPLE
    return nn.Parameter(functional.pad(weight.detach(), (0, 0, 0, missing)) if missing else weight.detach())


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Over these very weights."""
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight.detach())
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach())
    return layer
