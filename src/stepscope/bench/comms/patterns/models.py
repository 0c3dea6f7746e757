"""Sizes of the parameters of named models, tensor by tensor in the order in which the models register them.

Computed from the architectures; the totals are those that torchvision and Hugging Face publish. Weights that are used
twice (an embedding that is also the output layer) count once, as gradients do.
"""

from __future__ import annotations

from collections.abc import Callable

from stepscope.core.errors import unknown_name


def _linear(inputs: int, outputs: int) -> list[int]:
    return [inputs * outputs, outputs]


def _norm(width: int) -> list[int]:
    return [width, width]


def resnet50() -> list[int]:
    sizes = [64 * 3 * 7 * 7, *_norm(64)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            outputs = 4 * width
            sizes += [inputs * width, *_norm(width)]
            sizes += [width * width * 9, *_norm(width)]
            sizes += [width * outputs, *_norm(outputs)]
            if block == 0:
                sizes += [inputs * outputs, *_norm(outputs)]
            inputs = outputs
    return sizes + _linear(2048, 1000)


def vgg16() -> list[int]:
    sizes: list[int] = []
    inputs = 3
    for outputs in (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512):
        sizes += [inputs * outputs * 9, outputs]
        inputs = outputs
    return sizes + _linear(512 * 7 * 7, 4096) + _linear(4096, 4096) + _linear(4096, 1000)


def bert(layers: int, hidden: int, vocabulary: int = 30_522) -> list[int]:
    """BertForPreTraining: both heads."""
    sizes = [vocabulary * hidden, 512 * hidden, 2 * hidden, *_norm(hidden)]
    for _ in range(layers):
        sizes += 4 * _linear(hidden, hidden) + _norm(hidden)
        sizes += _linear(hidden, 4 * hidden) + _linear(4 * hidden, hidden) + _norm(hidden)
    pooler, heads = _linear(hidden, hidden), [vocabulary, *_linear(hidden, hidden), *_norm(hidden)]
    return sizes + pooler + heads + _linear(hidden, 2)


def gpt2(layers: int = 12, hidden: int = 768) -> list[int]:
    sizes = [50_257 * hidden, 1024 * hidden]
    for _ in range(layers):
        sizes += _norm(hidden) + _linear(hidden, 3 * hidden) + _linear(hidden, hidden)
        sizes += _norm(hidden) + _linear(hidden, 4 * hidden) + _linear(4 * hidden, hidden)
    return sizes + _norm(hidden)


MODELS: dict[str, Callable[[], list[int]]] = {
    "resnet50": resnet50,
    "vgg16": vgg16,
    "bert-base": lambda: bert(12, 768),
    "bert-large": lambda: bert(24, 1024),
    "gpt2": gpt2,
}


def find_sizes(model: str) -> list[int]:
    if model not in MODELS:
        raise unknown_name("model", model, MODELS, where="--set model=…")
    return MODELS[model]()


def transformer_block(hidden: int) -> int:
    """Parameters of one layer: attention, a feed-forward part four times as wide, biases, two normalisations."""
    return 12 * hidden * hidden + 13 * hidden
