from __future__ import annotations

from typing import Any

import pytest
from op_checks import full_shape, kinds_of, run_and_check

from stepscope.bench.ops import Work
from stepscope.bench.ops.build import OperatorCase
from stepscope.bench.ops.families.optimizers import OptimizerStep
from stepscope.bench.ops.inputs import Maker
from stepscope.bench.ops.operator import FLOATS
from stepscope.run.producer import WrongResultError

ALGORITHMS = ("sgd", "momentum", "adam", "adamw")
IMPLEMENTATIONS = ("forloop", "foreach", "fused")

HAND_COUNTED = [
    # parameter read and written, gradient read: 3 passes over 3·70 elements; each state adds two
    ("sgd", "float32", Work(2 * 210, 4 * 3 * 210)),
    ("momentum", "float32", Work(4 * 210, 4 * 5 * 210)),
    ("adam", "float32", Work(13 * 210, 4 * 7 * 210)),
    ("adamw", "bfloat16", Work(14 * 210, 2 * 7 * 210)),
]


@pytest.mark.parametrize(("algorithm", "dtype", "work"), HAND_COUNTED)
def test_work_is_what_a_hand_counts(algorithm: str, dtype: str, work: Work) -> None:
    assert OptimizerStep().work(full_shape(OptimizerStep(), algorithm=algorithm), dtype, "forward") == work


@pytest.mark.parametrize(("algorithm", "copies"), [("sgd", 2), ("momentum", 3), ("adam", 4), ("adamw", 4)])
def test_memory_holds_parameters_gradients_and_states(algorithm: str, copies: int) -> None:
    operator = OptimizerStep()
    shape = full_shape(operator, algorithm=algorithm, implementation="fused")
    assert operator.footprint_bytes(shape, "float16") == 2 * copies * 210
    # The values that parameters and gradients were made of are still there.
    held = OperatorCase(operator, shape, "float16", "forward").memory_bytes(check=False)
    assert held == 2 * (copies + 2) * 210


def test_there_is_no_backward() -> None:
    assert [kind.passes for kind in kinds_of("optimizers")] == [("forward",)]


def fused_sgd_steps(dtype: str) -> bool:
    """Some versions of torch leave 16-bit parameters as they are: https://github.com/pytorch/pytorch/issues/191763."""
    import torch

    parameter = torch.zeros(64, dtype=getattr(torch, dtype), requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=1.0, fused=True).step()
    return bool((parameter != 0).all())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_steps_agree_with_the_formulas(algorithm: str, implementation: str, dtype: str) -> None:
    given: dict[str, Any] = {"algorithm": algorithm, "implementation": implementation}
    if implementation == "fused" and algorithm in ("sgd", "momentum") and not fused_sgd_steps(dtype):
        with pytest.raises(WrongResultError, match=f"optimizer_step {algorithm} in {dtype}"):
            run_and_check(OptimizerStep(), dtype=dtype, **given)
    else:
        run_and_check(OptimizerStep(), dtype=dtype, **given)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_chosen_implementation_runs(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    made: list[torch.optim.Optimizer] = []
    right = torch.optim.Adam.__init__

    def watched(self: torch.optim.Adam, *given: Any, **more: Any) -> None:
        right(self, *given, **more)
        made.append(self)

    monkeypatch.setattr(torch.optim.Adam, "__init__", watched)
    operator = OptimizerStep()
    shape = full_shape(operator, algorithm="adam", implementation=implementation)
    operator.bind(shape, operator.make_inputs(shape, Maker("float32", "cpu")))
    (group,) = made[0].param_groups
    assert bool(group["fused"]) == (implementation == "fused")
    assert bool(group["foreach"]) == (implementation == "foreach")
    assert group["capturable"] is False, "graphs are captured on GPUs alone"


def test_binding_makes_the_state_and_each_call_is_one_step() -> None:
    """Of sgd with gradient g: after binding p − lr·g, after two calls p − 3·lr·g."""
    import torch

    operator = OptimizerStep()
    shape = full_shape(operator, algorithm="sgd", implementation="forloop")
    inputs = operator.make_inputs(shape, Maker("float64", "cpu"))
    before = inputs["parameter1"].clone()
    step = operator.bind(shape, inputs)
    torch.testing.assert_close(inputs["parameter1"], before - 1e-3 * inputs["gradient1"])
    step()
    step()
    torch.testing.assert_close(inputs["parameter1"], before - 3e-3 * inputs["gradient1"])


def test_the_check_leaves_parameters_alone() -> None:
    operator = OptimizerStep()
    shape = full_shape(operator)
    inputs = operator.make_inputs(shape, Maker("float32", "cpu"))
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    operator.check(shape, inputs, "float32", "forward")
    assert all((inputs[name] == before[name]).all() for name in inputs)


def test_parameters_are_not_shared_with_other_inputs() -> None:
    from stepscope.bench.ops.inputs import Arenas

    operator = OptimizerStep()
    shape = full_shape(operator)
    arenas = Arenas()
    first = operator.make_inputs(shape, Maker("float32", "cpu", arenas))
    untouched = first["parameter0"].clone()
    arenas.rewind()
    second = operator.make_inputs(shape, Maker("float32", "cpu", arenas))
    operator.bind(shape, second)()
    assert (first["parameter0"] == untouched).all()
    assert not (second["parameter0"] == untouched).any()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_step_left_out_is_found(algorithm: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even in 16 bits, where a step is smaller than the rounding of an ordinary parameter."""
    right = OptimizerStep.bind
    monkeypatch.setattr(OptimizerStep, "bind", lambda *given: right(*given) and (lambda: None))
    with pytest.raises(WrongResultError):
        run_and_check(OptimizerStep(), dtype=dtype, algorithm=algorithm, implementation="forloop")


def test_a_missing_decay_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(
        torch.optim, "AdamW", lambda tensors, weight_decay, **options: torch.optim.Adam(tensors, **options)
    )
    for dtype in ("float32", "float64"):
        with pytest.raises(WrongResultError):
            run_and_check(OptimizerStep(), dtype=dtype, algorithm="adamw")
