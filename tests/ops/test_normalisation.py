from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from op_checks import count_by_hand, full_shape, kinds_of, run_and_check, traffic_is_that_of_the_tensors

from stepscope.bench.ops import Work
from stepscope.bench.ops.families.normalisation import (
    BatchNorm,
    CrossEntropy,
    Dropout,
    GroupNorm,
    LayerNorm,
    RmsNorm,
    Softmax,
)
from stepscope.bench.ops.inputs import Maker
from stepscope.run.producer import WrongResultError

if TYPE_CHECKING:
    import torch

IMAGES = {"batch": 2, "channels": 6, "height": 5, "width": 4}
ROWS = {"rows": 7, "cols": 5}

HAND_COUNTED: list[tuple[Any, dict[str, Any], str, str, Work]] = [
    # 240 elements, 6 channels with a weight and a bias each
    (BatchNorm, IMAGES, "float32", "forward", Work(8 * 240, 4 * (2 * 240 + 2 * 6))),
    (BatchNorm, IMAGES, "float32", "backward", Work(9 * 240, 4 * (3 * 240 + 3 * 6))),
    (GroupNorm, IMAGES, "float16", "forward", Work(8 * 240, 2 * (2 * 240 + 2 * 6))),
    (GroupNorm, IMAGES, "float16", "backward", Work(9 * 240, 2 * (3 * 240 + 3 * 6))),
    (LayerNorm, ROWS, "float32", "forward", Work(8 * 35, 4 * (2 * 35 + 2 * 5))),
    (LayerNorm, ROWS, "float32", "backward", Work(13 * 35, 4 * (3 * 35 + 3 * 5))),
    (RmsNorm, ROWS, "bfloat16", "forward", Work(4 * 35, 2 * (2 * 35 + 5))),
    (RmsNorm, ROWS, "bfloat16", "backward", Work(9 * 35, 2 * (3 * 35 + 2 * 5))),
    (Softmax, ROWS, "float32", "forward", Work(5 * 35, 4 * 2 * 35)),
    (Softmax, ROWS, "float32", "backward", Work(4 * 35, 4 * 3 * 35)),
    # 7 targets of 8 bytes and one loss
    (CrossEntropy, {"rows": 7, "classes": 5}, "float32", "forward", Work(4 * 35 + 3 * 7, 4 * 35 + 8 * 7 + 4)),
    (CrossEntropy, {"rows": 7, "classes": 5}, "float32", "backward", Work(2 * 35 + 7, 4 * 2 * 35 + 8 * 7 + 4)),
    # backward reads a mask of one byte an element
    (Dropout, ROWS, "float32", "forward", Work(2 * 35, 4 * 2 * 35)),
    (Dropout, ROWS, "float32", "backward", Work(2 * 35, 4 * 2 * 35 + 35)),
]


@pytest.mark.parametrize(("kind", "shape", "dtype", "direction", "work"), HAND_COUNTED)
def test_work_is_what_a_hand_counts(kind: Any, shape: Any, dtype: str, direction: str, work: Work) -> None:
    count_by_hand(kind, shape, dtype, direction, work)


@pytest.mark.parametrize("kind", kinds_of("normalisation"))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_declared_traffic_is_that_of_the_tensors(kind: Any, dtype: str) -> None:
    traffic_is_that_of_the_tensors(kind, dtype)


@pytest.mark.parametrize("kind", kinds_of("normalisation"))
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_agrees_with_float64(kind: Any, direction: str, dtype: str) -> None:
    run_and_check(kind(), direction, dtype)


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        (BatchNorm, "batch_norm"),
        (GroupNorm, "group_norm"),
        (LayerNorm, "layer_norm"),
        (RmsNorm, "rms_norm"),
        (CrossEntropy, "cross_entropy"),
    ],
)
def test_a_spoiled_result_is_found(kind: Any, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    right = getattr(torch.nn.functional, function)
    monkeypatch.setattr(torch.nn.functional, function, lambda *given, **more: right(*given, **more) * 1.0001)
    for direction in ("forward", "backward"):
        with pytest.raises(WrongResultError):
            run_and_check(kind(), direction)


def test_no_running_statistics_are_kept() -> None:
    operator = BatchNorm()
    inputs = operator.make_inputs(full_shape(operator), Maker("float32", "cpu"))
    assert set(inputs) == {"input", "weight", "bias"}


def test_groups_are_normalised_apart() -> None:
    """With the weight 1 and the bias 0, each group of a sample has mean 0 and variance 1."""
    import torch

    operator = GroupNorm()
    shape = full_shape(operator)
    inputs = operator.make_inputs(shape, Maker("float64", "cpu"))
    inputs |= {"weight": torch.ones(6, dtype=torch.float64), "bias": torch.zeros(6, dtype=torch.float64)}
    groups = operator.bind(shape, inputs)().view(2, 3, 2 * 4 * 5)
    assert groups.mean(2).abs().max() < 1e-12
    assert groups.var(2, correction=0).sub(1).abs().max() < 1e-4


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_dropout_with_any_share(p: float, direction: str) -> None:
    run_and_check(Dropout(), direction, p=p)


def _dropped(tensor: torch.Tensor, p: float, scale: float) -> torch.Tensor:
    import torch

    return tensor * (torch.rand_like(tensor) > p) * scale


def _with_one_wrong(tensor: torch.Tensor) -> torch.Tensor:
    """The first element that was kept is a hundredth off: far less than the whole's tolerance in 16 bits."""
    factors = tensor.new_ones(tensor.numel())
    factors[int((tensor.detach().flatten() != 0).int().argmax())] = 1.01
    return tensor * factors.view(tensor.shape)


WRONG_DROPOUTS: dict[str, tuple[Callable[[torch.Tensor, float], torch.Tensor], str]] = {
    "keeps too many": (lambda tensor, p: _dropped(tensor, p / 2, 1 / (1 - p)), "keeps .* of"),
    "keeps all": (lambda tensor, p: tensor / (1 - p), "keeps .* of"),
    "keeps none": (lambda tensor, p: tensor * 0, "keeps 0 of"),
    "does not scale": (lambda tensor, p: _dropped(tensor, p, 1.0), "are not what p=0.5 makes"),
    "one wrong": (lambda tensor, p: _with_one_wrong(_dropped(tensor, p, 1 / (1 - p))), "1 of 768 elements"),
    "not a number": (lambda tensor, p: _dropped(tensor, p, 1 / (1 - p)) + tensor * float("nan"), "."),
}


@pytest.mark.parametrize("name", WRONG_DROPOUTS)
def test_spoiled_dropout_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    wrong, said = WRONG_DROPOUTS[name]
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda tensor, p, training: wrong(tensor, p))
    with pytest.raises(WrongResultError, match=said):
        run_and_check(Dropout(), p=0.5)


def test_a_gradient_that_forgets_the_mask_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    right = torch.nn.functional.dropout

    def straight_through(tensor: torch.Tensor, p: float, training: bool) -> torch.Tensor:
        scaled = tensor / (1 - p)
        return scaled + (right(tensor, p, training) - scaled).detach()

    monkeypatch.setattr(torch.nn.functional, "dropout", straight_through)
    run_and_check(Dropout(), "forward", p=0.5)
    with pytest.raises(WrongResultError, match="dropout backward"):
        run_and_check(Dropout(), "backward", p=0.5)


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, float("nan")])
def test_probabilities_that_cannot_be(p: float) -> None:
    with pytest.raises(ValueError, match="at least 0 and below 1"):
        Dropout().check_shape(full_shape(Dropout(), p=p))


def test_shapes_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="at least 2 values a channel"):
        BatchNorm().check_shape(full_shape(BatchNorm(), batch=1, height=1, width=1))
    BatchNorm().check_shape(full_shape(BatchNorm(), batch=2, height=1, width=1))
    with pytest.raises(ValueError, match="must divide channels"):
        GroupNorm().check_shape(full_shape(GroupNorm(), channels=6, groups=4))
    with pytest.raises(ValueError, match="at least 2 values a group"):
        GroupNorm().check_shape(full_shape(GroupNorm(), channels=6, groups=6, height=1, width=1))
