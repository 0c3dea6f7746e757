"""The first convolution on blocks of pixels: three colours are too few for matrix units, a block's values are not.

A convolution with stride s over [3, H, W] is the same as one with stride 1 over [3·s·s, H/s, W/s], if each block of s×s
pixels is laid out as channels and the weights are moved along. Channels are filled up with zeros to a multiple of 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

CHANNEL_STEP = 8
"""Halves of 16 bytes: the least that the matrix units' loads take at once."""


class Stem(NamedTuple):
    """Of the first convolution, along height and width; a time axis is left as it is."""

    kernel: int
    stride: int
    padding: int

    @property
    def _first(self) -> int:
        """Block in which the window of output 0 begins: 0 or before the picture."""
        return -self.padding // self.stride

    @property
    def block_kernel(self) -> int:
        return (self.kernel - 1 - self.padding) // self.stride - self._first + 1

    @property
    def lead(self) -> int:
        """Pixels of a block before the window's first."""
        return -self.padding % self.stride

    def channels(self, colours: int) -> int:
        return -(-colours * self.stride**2 // CHANNEL_STEP) * CHANNEL_STEP

    def margins(self, side: int) -> tuple[int, int]:
        """Zeros before and after a side, so that the convolution over blocks needs no padding of its own."""
        outputs = (side + 2 * self.padding - self.kernel) // self.stride + 1
        before = -self._first * self.stride
        return before, (outputs - 1 + self.block_kernel) * self.stride - before - side

    def lay_out(self, pictures: torch.Tensor) -> torch.Tensor:
        """[N, 3, (T,) H, W] as padded blocks, [N, channels, (T,) rows, columns], stored channels last."""
        from torch.nn.functional import pad

        top, bottom = self.margins(pictures.shape[-2])
        left, right = self.margins(pictures.shape[-1])
        padded = pad(pictures, (left, right, top, bottom))
        count, colours, *frames, height, width = padded.shape
        s = self.stride
        rows, columns = height // s, width // s
        blocks = padded.reshape(count, colours, -1, rows, s, columns, s)
        laid = padded.new_zeros(count, blocks.shape[2], rows, columns, self.channels(colours))
        # In the order of the weights' channels: row in the block, column in the block, colour.
        used = laid[..., : s * s * colours].view(*laid.shape[:-1], s, s, colours)
        used.copy_(blocks.permute(0, 2, 3, 5, 4, 6, 1))
        return laid.view(count, *frames, rows, columns, -1).movedim(-1, 1)

    def move_weights(self, weight: torch.Tensor) -> torch.Tensor:
        """[O, 3, (T,) k, k] as weights over blocks. Gradients flow through."""
        from torch.nn.functional import pad

        s, side = self.stride, self.block_kernel
        colours = weight.shape[1]
        after = s * side - self.kernel - self.lead
        padded = pad(weight, (self.lead, after, self.lead, after))
        blocks = padded.reshape(*padded.shape[:-2], side, s, side, s)
        moved = blocks.movedim((-3, -1), (1, 2)).flatten(1, 3)
        spare = self.channels(colours) - s * s * colours
        return pad(moved, (*[0, 0] * (moved.dim() - 2), 0, spare))
