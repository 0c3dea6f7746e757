"""Batch norms taken into the convolutions before them: with fixed statistics a norm is a scale and a shift."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn


def fold_norms(module: nn.Module) -> None:
    """In place; right for inference only."""
    import torch
    from torch import nn

    from stepscope.bench.workloads.models.convnets.network import ConvNorm

    for layer in module.modules():
        if isinstance(layer, ConvNorm):
            assert isinstance(layer.conv, nn.Conv2d | nn.Conv3d)
            assert isinstance(layer.norm, nn.BatchNorm2d | nn.BatchNorm3d)
            weight, bias = fold_one(layer.conv, layer.norm)
            layer.conv.weight = nn.Parameter(weight)
            layer.conv.bias = nn.Parameter(bias)
            layer.norm = nn.Identity()
    torch.nn.Module.eval(module)


def fold_one(conv: nn.Conv2d | nn.Conv3d, norm: nn.BatchNorm2d | nn.BatchNorm3d) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias of the convolution that gives what both give, computed in float64."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    kind = conv.weight.dtype
    scale = norm.weight.detach().double() / (norm.running_var.double() + norm.eps).sqrt()
    weight = conv.weight.detach().double() * scale.view(-1, *[1] * (conv.weight.dim() - 1))
    bias = norm.bias.detach().double() - norm.running_mean.double() * scale
    return weight.to(kind), bias.to(kind)
