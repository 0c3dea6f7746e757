from __future__ import annotations

from typing import Any

import pytest
from op_checks import count_by_hand, full_shape, kinds_of, moved_by_hand, run_and_check, traffic_is_that_of_the_tensors

from stepscope.bench.ops import Work
from stepscope.bench.ops.families.recurrent import Gru, GruCell, Lstm, LstmCell
from stepscope.bench.ops.inputs import Maker
from stepscope.bench.ops.operator import FLOATS
from stepscope.run.producer import WrongResultError

CELL = {"batch": 3, "in": 5, "hidden": 4}
LAYER = {**CELL, "steps": 6}
DEEP = {**LAYER, "layers": 2}

LSTM_STEP = 2 * 3 * (4 * 4) * (5 + 4) + 21 * 3 * 4
"""Four gates of 4 elements from 5 + 4 inputs for 3 sequences, and 21 operations an element."""
GRU_STEP = 2 * 3 * (3 * 4) * (5 + 4) + 17 * 3 * 4
LSTM_SECOND = 2 * 3 * (4 * 4) * (4 + 4) + 21 * 3 * 4
"""The second layer's input is the first one's hidden state."""

HAND_COUNTED: list[tuple[Any, dict[str, Any], str, str, Work]] = [
    # input 15, two states of 12, weights 16·9, biases 2·16; two states out
    (LstmCell, CELL, "float32", "forward", Work(LSTM_STEP, 4 * (15 + 24 + 144 + 32 + 24))),
    # upstream of both states, input, states and weights read and their gradients written, biases', 4 kept gates
    (LstmCell, CELL, "float32", "backward", Work(2 * LSTM_STEP, 4 * (24 + 2 * (15 + 24 + 144) + 32 + 4 * 12))),
    (GruCell, CELL, "float16", "forward", Work(GRU_STEP, 2 * (15 + 12 + 108 + 24 + 12))),
    (GruCell, CELL, "float16", "backward", Work(2 * GRU_STEP, 2 * (12 + 2 * (15 + 12 + 108) + 24 + 4 * 12))),
    # six steps: input 90, output 72, states in and out; the weights are counted once
    (Lstm, LAYER, "float32", "forward", Work(6 * LSTM_STEP, 4 * (90 + 24 + 144 + 32 + 72 + 24))),
    (Lstm, LAYER, "float32", "backward",
     Work(12 * LSTM_STEP, 4 * (72 + 24 + 2 * (90 + 24 + 144) + 32 + 6 * 4 * 12))),
    (Gru, LAYER, "float32", "forward", Work(6 * GRU_STEP, 4 * (90 + 12 + 108 + 24 + 72 + 12))),
    (Gru, LAYER, "float32", "backward",
     Work(12 * GRU_STEP, 4 * (72 + 12 + 2 * (90 + 12 + 108) + 24 + 6 * 4 * 12))),
    # the second layer: weights 16·8, its own biases and states; what passes between the layers is not counted
    (Lstm, DEEP, "float32", "forward",
     Work(6 * (LSTM_STEP + LSTM_SECOND), 4 * (90 + 48 + 144 + 128 + 64 + 72 + 48))),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "shape", "dtype", "direction", "work"), HAND_COUNTED)
def test_work_is_what_a_hand_counts(kind: Any, shape: Any, dtype: str, direction: str, work: Work) -> None:
    count_by_hand(kind, shape, dtype, direction, work)


@pytest.mark.parametrize("kind", kinds_of("recurrent"))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_declared_traffic_is_that_of_the_tensors(kind: Any, dtype: str) -> None:
    traffic_is_that_of_the_tensors(kind, dtype)


@pytest.mark.parametrize("kind", [Lstm, Gru])
def test_declared_traffic_of_several_layers(kind: Any) -> None:
    work = kind().work(full_shape(kind(), layers=3), "float64", "forward")
    assert moved_by_hand(kind(), "float64", layers=3) == work.bytes


@pytest.mark.parametrize("kind", kinds_of("recurrent"))
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_agrees_with_the_formulas(kind: Any, direction: str, dtype: str) -> None:
    run_and_check(kind(), direction, dtype)


@pytest.mark.parametrize("kind", [Lstm, Gru])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_several_layers(kind: Any, direction: str, dtype: str) -> None:
    run_and_check(kind(), direction, dtype, layers=3, steps=5)


@pytest.mark.parametrize("kind", kinds_of("recurrent"))
def test_every_input_has_a_gradient(kind: Any) -> None:
    operator = kind()
    for layers in (1, 2) if kind in (Lstm, Gru) else (1,):
        changes = {"layers": layers} if kind in (Lstm, Gru) else {}
        shape = full_shape(operator, **changes)
        inputs = operator.make_inputs(shape, Maker("float32", "cpu"))
        assert sorted(operator.gradient_names(shape)) == sorted(inputs)


def test_inputs_are_the_same_every_time() -> None:
    """The module that lays out the weights draws its own numbers; they must all be overwritten."""
    import torch

    operator = Lstm()
    shape = full_shape(operator, layers=2)
    first, second = (operator.make_inputs(shape, Maker("float32", "cpu")) for _ in range(2))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name])
        assert not tensor.requires_grad


@pytest.mark.parametrize(
    ("kind", "function"), [(LstmCell, "lstm_cell"), (GruCell, "gru_cell"), (Lstm, "lstm"), (Gru, "gru")]
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_spoiled_result_is_found(kind: Any, function: str, direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    right = getattr(torch, function)

    def spoiled(tensor: torch.Tensor, states: Any, *rest: Any) -> Any:
        return right(tensor * 1.0001, states, *rest)

    monkeypatch.setattr(torch, function, spoiled)
    with pytest.raises(WrongResultError):
        run_and_check(kind(), direction)
