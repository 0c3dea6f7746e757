"""Images and clips as a loader hands them over: normalised, smooth in space and time, colours that go together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

COARSE = 8
"""Pixels between the points of the smooth part."""
COARSE_FRAMES = 4
SMOOTH_SHARE = 0.85
"""Of the variance; the rest differs from pixel to pixel."""
GREY_SHARE = 0.8
"""Of the variance: what the three colours have in common."""
DARKEST = (-2.12, -2.04, -1.80)
BRIGHTEST = (2.25, 2.43, 2.64)
"""Black and white after the usual normalisation by the means and spreads of ImageNet."""


def make_pictures(count: int, extent: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """[count, 3, *extent] with mean 0 and spread 1 a colour, inside what black and white normalise to; `extent` is
    height and width, before them frames where there are some."""
    import torch

    coarse = [-(-extent[-2] // COARSE) + 1, -(-extent[-1] // COARSE) + 1]
    if len(extent) == 3:
        coarse.insert(0, -(-extent[0] // COARSE_FRAMES) + 1)
    grey = torch.randn(count, 1, *coarse, generator=generator)
    colour = torch.randn(count, 3, *coarse, generator=generator)
    mixed = GREY_SHARE**0.5 * grey + (1 - GREY_SHARE) ** 0.5 * colour
    how = "bilinear" if len(extent) == 2 else "trilinear"
    smooth = torch.nn.functional.interpolate(mixed, size=tuple(extent), mode=how, align_corners=True)
    # Interpolation averages neighbours; without this the spread would depend on the size.
    smooth /= smooth.std()
    pixels = torch.randn(count, 3, *extent, generator=generator)
    pictures = smooth.mul_(SMOOTH_SHARE**0.5).add_(pixels, alpha=(1 - SMOOTH_SHARE) ** 0.5)
    shape = (1, 3, *(1 for _ in extent))
    return pictures.clamp_(torch.tensor(DARKEST).view(shape), torch.tensor(BRIGHTEST).view(shape))


def draw_labels(count: int, classes: int, generator: torch.Generator, *, skew: float) -> torch.Tensor:
    """`skew`: how many times more often the commonest class comes than the rarest, falling evenly between; 1: alike."""
    import torch

    if skew <= 1:
        return torch.randint(classes, (count,), generator=generator)
    return torch.multinomial(torch.linspace(skew, 1.0, classes), count, replacement=True, generator=generator)
