from __future__ import annotations

import warnings
from typing import Any

import pytest
from op_checks import count_by_hand, full_shape, run_and_check, traffic_is_that_of_the_tensors

from stepscope.bench.ops import Work
from stepscope.bench.ops.build import build
from stepscope.bench.ops.families.attention import Attention, Rope
from stepscope.bench.ops.inputs import Maker
from stepscope.bench.ops.operator import FLOATS
from stepscope.run.producer import WrongResultError

PLAIN = {"batch": 2, "heads": 4, "kv_heads": 4, "queries": 6, "keys": 10, "head_dim": 8}
GROUPED = {**PLAIN, "kv_heads": 2}
ROPE = {"batch": 2, "heads": 3, "positions": 5, "head_dim": 8}
NARROW = {**PLAIN, "causal": "yes", "queries": 10, "keys": 6}
SQUARE = {**PLAIN, "causal": "yes", "queries": 6, "keys": 6}
WIDE = {**PLAIN, "causal": "yes"}

HAND_COUNTED: list[tuple[Any, dict[str, Any], str, str, Work]] = [
    # two products of 2·8 operations for each of 2·4·6·10 pairs; queries and output 2·4·6·8, keys and values 2·4·10·8
    (Attention, PLAIN, "float32", "forward", Work(4 * 480 * 8, 4 * (2 * 384 + 2 * 640))),
    # four products; upstream, queries, keys and values read, three gradients written
    (Attention, PLAIN, "float32", "backward", Work(8 * 480 * 8, 4 * (384 + 2 * 384 + 4 * 640))),
    # as many products, half the keys and values
    (Attention, GROUPED, "bfloat16", "forward", Work(4 * 480 * 8, 2 * (2 * 384 + 2 * 320))),
    (Attention, GROUPED, "bfloat16", "backward", Work(8 * 480 * 8, 2 * (3 * 384 + 4 * 320))),
    # six queries see 1, 2 … 6 keys: 21 of 36 pairs, (6 + 1)/(2·6) of them
    (Attention, SQUARE, "float32", "forward", Work(4 * (2 * 4 * 21) * 8, 4 * 4 * 384)),
    # counted from the first query and key: the last four keys are never seen
    (Attention, WIDE, "float32", "forward", Work(4 * (2 * 4 * 21) * 8, 4 * (2 * 384 + 2 * 640))),
    # ten queries see 1 … 6 keys, then 6 each
    (Attention, NARROW, "float32", "forward", Work(4 * (2 * 4 * (21 + 4 * 6)) * 8, 4 * (2 * 640 + 2 * 384))),
    (Rope, ROPE, "float32", "forward", Work(3 * 240, 4 * (2 * 240 + 2 * 40))),
    (Rope, ROPE, "float16", "backward", Work(3 * 240, 2 * (2 * 240 + 2 * 40))),
]


@pytest.mark.parametrize(("kind", "shape", "dtype", "direction", "work"), HAND_COUNTED)
def test_work_is_what_a_hand_counts(kind: Any, shape: Any, dtype: str, direction: str, work: Work) -> None:
    count_by_hand(kind, shape, dtype, direction, work)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 9), (9, 1), (7, 7), (5, 8), (8, 5)])
def test_seen_pairs_are_those_that_torch_leaves(queries: int, keys: int) -> None:
    """With values that mark their key, an output is the set of keys that its query sees."""
    import torch

    operator = Attention()
    shape = full_shape(operator, batch=1, heads=1, kv_heads=1, queries=queries, keys=keys, head_dim=keys, causal="yes")
    inputs = operator.make_inputs(shape, Maker("float64", "cpu"))
    inputs["value"] = torch.eye(keys, dtype=torch.float64).view(1, 1, keys, keys)
    assert int((operator.bind(shape, inputs)() != 0).sum()) == operator.seen_pairs(shape)


@pytest.mark.parametrize("kind", [Attention, Rope])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_declared_traffic_is_that_of_the_tensors(kind: Any, dtype: str) -> None:
    traffic_is_that_of_the_tensors(kind, dtype)


@pytest.mark.parametrize("backend", ["auto", "math", "flash"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_attention_agrees_with_float64(backend: str, direction: str, dtype: str) -> None:
    for causal in ("yes", "no"):
        run_and_check(Attention(), direction, dtype, backend=backend, causal=causal)
    run_and_check(Attention(), direction, dtype, backend=backend, kv_heads=4)


@pytest.mark.parametrize("causal", ["yes", "no"])
@pytest.mark.parametrize("changes", [{"queries": 5}, {"keys": 5}, {"queries": 1}, {"heads": 4, "kv_heads": 1}])
def test_attention_of_uneven_sides(changes: dict[str, int], causal: str) -> None:
    for direction in ("forward", "backward"):
        run_and_check(Attention(), direction, causal=causal, **changes)


@pytest.mark.parametrize("causal", ["yes", "no"])
def test_the_reference_by_blocks_is_that_in_one(causal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.bench.ops.families.attention.REFERENCE_BLOCK", 5)
    for changes in ({}, {"queries": 9, "keys": 7}):
        run_and_check(Attention(), "backward", "float64", causal=causal, **changes)


@pytest.mark.parametrize("backend", ["efficient", "cudnn"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_backend_that_is_not_there_is_refused(backend: str, direction: str) -> None:
    """Neither of the two has CPU kernels."""
    operator = Attention()
    with pytest.raises(NotImplementedError, match=f"No available kernel: torch's {backend} attention"):
        build(operator, full_shape(operator, backend=backend), dtype="float32", device="cpu", direction=direction)
    run_and_check(operator)


def test_reasons_stand_in_the_error_and_other_errors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def refuse(*given: Any, **more: Any) -> None:
        warnings.warn("head_dim is too large. (Triggered internally at x.cpp:1)", stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
    with pytest.raises(NotImplementedError, match=r"does not serve this case \(head_dim is too large\.\)$"):
        run_and_check(Attention(), backend="math")

    def fail(*given: Any, **more: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fail)
    with pytest.raises(RuntimeError, match=r"^out of memory$"):
        run_and_check(Attention(), backend="math")


@pytest.mark.parametrize("backend", ["math", "flash"])
def test_a_named_backend_is_on_alone_and_only_for_the_call(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch.backends import cuda

    def switched_on() -> set[str]:
        asked = {
            "math": cuda.math_sdp_enabled,
            "flash": cuda.flash_sdp_enabled,
            "efficient": cuda.mem_efficient_sdp_enabled,
            "cudnn": cuda.cudnn_sdp_enabled,
        }
        return {name for name, enabled in asked.items() if enabled()}

    right, seen = torch.nn.functional.scaled_dot_product_attention, []

    def watched(*given: Any, **more: Any) -> torch.Tensor:
        seen.append(switched_on())
        if len(seen) == 3:
            raise RuntimeError("stopped here")
        return right(*given, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    before = switched_on()
    operator = Attention()
    shape = full_shape(operator, backend=backend)
    call = operator.bind(shape, operator.make_inputs(shape, Maker("float32", "cpu")))
    call()
    assert switched_on() == before
    with pytest.raises(RuntimeError, match="stopped here"):
        call()
    assert switched_on() == before
    assert seen == [{backend}] * 3


def test_what_can_be_compiled() -> None:
    """The compiler sees one graph, with the backend that was named."""
    import torch

    operator = Attention()
    shape = full_shape(operator, backend="math")
    inputs = operator.make_inputs(shape, Maker("float32", "cpu"))
    call = operator.bind(shape, inputs)
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(), call())


def test_scores_are_counted_where_they_are_written() -> None:
    operator = Attention()
    for backend, dtype, written in (
        ("auto", "float16", 0),
        ("auto", "float32", 0),
        ("auto", "float64", 8 * (2 * 4 * 6 * 10)),
        ("math", "float16", 2 * (2 * 4 * 6 * 10)),
        ("flash", "float64", 0),
        ("cudnn", "float16", 0),
    ):
        shape = full_shape(operator, **PLAIN, backend=backend)
        assert operator.scratch_bytes(shape, dtype, "forward") == written


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_spoiled_attention_is_found(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    right = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda q, k, v, is_causal, enable_gqa: right(q, k, v, is_causal=False, enable_gqa=enable_gqa),
    )
    with pytest.raises(WrongResultError):
        run_and_check(Attention(), direction, causal="yes")


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_rope_agrees_with_complex_numbers(direction: str, dtype: str) -> None:
    run_and_check(Rope(), direction, dtype)


def test_rope_turns_by_the_distance() -> None:
    """What attention gets from it: the product of two turned vectors depends on how far apart they stand."""
    import torch

    operator = Rope()
    shape = full_shape(operator, batch=1, heads=2, positions=9)
    inputs = operator.make_inputs(shape, Maker("float64", "cpu"))
    inputs["input"] = inputs["input"][:, :, :1].expand(1, 2, 9, 8)
    left, right = operator.bind(shape, inputs)()[0]
    products = left @ right.T
    torch.testing.assert_close(products[2, 5], products[4, 7])
    torch.testing.assert_close(left[0], inputs["input"][0, 0, 0])
    assert abs(float(products[2, 5] - products[2, 6])) > 1e-3


def test_shapes_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="kv_heads=3 must divide heads=4"):
        Attention().check_shape(full_shape(Attention(), kv_heads=3))
    with pytest.raises(ValueError, match="must divide"):
        Attention().check_shape(full_shape(Attention(), kv_heads=8))
    with pytest.raises(ValueError, match="must be even"):
        Rope().check_shape(full_shape(Rope(), head_dim=7))
