from __future__ import annotations

from itertools import pairwise

import pytest

from stepscope.bench.ops.catalogue import TINY, ShapeSet, all_sets, find_set, operators, shape_sets
from stepscope.bench.ops.families.embedding import EmbeddingBag
from stepscope.bench.ops.families.gemm import Gemm, Linear, Mlp
from stepscope.bench.ops.operator import DTYPES
from stepscope.core.errors import UsageError

OPERATORS = operators()
SETS = [(operator, name) for operator, sets in all_sets().items() for name in sets]


def expand(operator: str, name: str) -> list[dict[str, object]]:
    return find_set(OPERATORS[operator], name).expand(OPERATORS[operator])


def test_every_operator_named_in_a_file_is_there() -> None:
    assert all_sets().keys() <= OPERATORS.keys()


@pytest.mark.parametrize(("operator", "name"), SETS)
def test_every_set_stands_for_shapes_that_can_be(operator: str, name: str) -> None:
    """Expansion checks names, bounds and the operator's own rules; what a set is meant for must exist."""
    one = find_set(OPERATORS[operator], name)
    assert one.expand(OPERATORS[operator])
    assert len(one.source) > 10
    assert set(one.dtypes) <= set(OPERATORS[operator].dtypes)
    assert set(one.dtypes) <= set(DTYPES)
    assert set(one.passes) <= set(OPERATORS[operator].passes)


@pytest.mark.parametrize("name", list(OPERATORS))
def test_every_operator_has_a_tiny_set(name: str) -> None:
    operator = OPERATORS[name]
    (shape,) = find_set(operator, TINY).expand(operator)
    assert shape.items() >= operator.tiny.items()
    assert set(shape) == {one.name for one in operator.parameters}
    assert next(iter(shape_sets(operator))) == TINY


GEMMS = {
    "A": """4.295 8.590 17.180 34.360 0.268 0.537 1.074 2.147 4.295 8.590 17.180 34.360 0.268 0.537 1.074""",
    "B": """42.916 85.832 171.664 343.329 42.916 85.832 171.664 343.329 0.524 1.049 2.097 4.194
            0.524 1.049 2.097 4.194 42.916 85.832 171.664 343.329""",
    "C": """0.134 0.134 8.590 8.590""",
}
"""GFLOP of PARAM's lists, in their order."""
MEGABYTES = {
    "A": "71.3 75.5 83.9 100.7 5.2 6.3 8.4 12.6 71.3 75.5 83.9 100.7 5.2 6.3 8.4",
    "B": """693.6 716.7 762.8 855.0 693.6 716.7 762.8 855.0 9.7 11.3 14.4 20.6
            9.7 11.3 14.4 20.6 693.6 716.7 762.8 855.0""",
    "C": "4.7 4.7 37.7 37.7",
}


@pytest.mark.parametrize("name", ["A", "B", "C"])
def test_gemm_sets_have_the_work_of_the_published_table(name: str) -> None:
    operator = Gemm()
    work = [operator.work(shape, "float32", "forward") for shape in find_set(operator, name).expand(operator)]
    flops = [float(one) for one in GEMMS[name].split()]
    megabytes = [float(one) for one in MEGABYTES[name].split()]
    assert len(work) == {"A": 15, "B": 20, "C": 4}[name]
    assert [one.flops / 1e9 for one in work] == pytest.approx(flops, abs=5.1e-4)
    assert [one.bytes / 1e6 for one in work] == pytest.approx(megabytes, abs=0.051)


def test_embedding_sets_are_the_published_ones() -> None:
    """Gathered MB = batch · pooling · dim · 4: 7.9 for the first and 1006.6 for the last of A."""
    operator = EmbeddingBag()
    for name, count, first, last in (("A", 16, 7.9, 1006.6), ("B", 6, 15.6, 499.1)):
        shapes = find_set(operator, name).expand(operator)
        gathered = [shape["batch"] * shape["pooling"] * shape["dim"] * 4 / 1e6 for shape in shapes]
        assert len(shapes) == count
        assert (gathered[0], gathered[-1]) == pytest.approx((first, last), abs=0.05)


def test_mlp_set_has_19_matrices_of_one_width() -> None:
    """6·batch·19·width²: 15.30 GFLOP for the first step, 7,834 for the last."""
    operator = Mlp()
    shapes = find_set(operator, "A").expand(operator)
    widths = [operator.widths(shape) for shape in shapes]
    steps = [
        6 * shape["batch"] * sum(a * b for a, b in pairwise(wide)) for shape, wide in zip(shapes, widths, strict=True)
    ]
    assert {len(list(pairwise(wide))) for wide in widths} == {19}
    assert len(shapes) == 12
    assert sorted(steps)[0] / 1e9 == pytest.approx(15.30, abs=5e-3)
    assert sorted(steps)[-1] / 1e9 == pytest.approx(7834.0, abs=0.05)
    assert expand("mlp_train", "A") == shapes


def test_cvt_convolutions_have_their_published_work() -> None:
    """V1 to V4, V7 to V11; V5 and V6 are V3 and V4 again. GFLOP = 2·batch·out·height·width·kernel²·in/groups."""
    found = []
    for shape in expand("conv2d", "cvt"):
        out = (shape["height"] + 2 * shape["padding"] - shape["kernel"]) // shape["stride"] + 1
        taps = shape["kernel"] ** 2 * shape["in"] // shape["groups"]
        found.append(2 * shape["batch"] * shape["out"] * out * out * taps / 1e9)
    published = [0.116, 0.029, 0.087, 0.022, 0.043, 0.011, 1.888, 5.549, 8.324]
    assert found == pytest.approx(published, abs=6e-4)


@pytest.mark.parametrize(
    ("operator", "count"),
    [
        ("embedding_bags", 3600 + 3600),
        ("gemm", 5000),
        ("linear", 5000),
        ("bmm", 5000),
        ("conv2d", 40_632 + 20_316),
        ("conv1d", 3388),
        # the sizes of 552 tensors are powers of two: 4·64·64 bytes to 32 GiB
        ("memcpy", 22),
        ("transpose", 2136),
        ("tril_index", 576),
        ("batch_norm", 470),
        # 6 batches · 20 rows are 41 products, 5 batches · 20 are 38
        ("layer_norm", 41 * 20),
        ("dropout", 38 * 20 * 5),
    ],
)
def test_sweeps_have_as_many_rows_as_their_source(operator: str, count: int) -> None:
    assert len(expand(operator, "ml_perf_model")) == count


def test_concat_has_the_equal_parts_of_its_source() -> None:
    columns = {m * k for m in (64, 198, 256, 512) for k in (15, 64, 197, 256, 512, 1024, 1281, 2048, 3482, 4096, 32768)}
    shapes = expand("concat", "ml_perf_model")
    assert {shape["columns"] for shape in shapes} <= columns
    assert len(shapes) == sum(
        16 * batch * one < 40_536_000_000 for batch in (1, 128, 256, 512, 1024, 2048, 4096) for one in columns
    )


def test_convolution_sweep_keeps_its_conditions() -> None:
    for shape in expand("conv2d", "ml_perf_model"):
        if shape["in"] != 3:
            assert 1500 <= shape["in"] * shape["height"] <= 15000
            assert 1 / 8 < shape["in"] / shape["out"] < 8
        else:
            assert shape["height"] in (224, 299)


def test_model_sets_multiply_what_the_models_multiply() -> None:
    """Weights of one Llama 3 8B layer and its vocabulary: 218,103,808 + 525,336,576."""
    shapes = [shape for shape in expand("gemm", "llama3-8b") if shape["m"] == 1]
    weights = [shape["n"] * shape["k"] for shape in shapes]
    qkv, output, gate, down, vocabulary = weights
    assert qkv == 4096 * (32 + 8 + 8) * 128
    assert qkv + output + 2 * gate + down == 218_103_808
    assert vocabulary == 128_256 * 4096


def test_parameters_of_optimizer_sets() -> None:
    """Rounded to equal tensors, so within one element a tensor."""
    published = {"gpt2": 124_439_808, "gpt2-xl": 1_557_611_200, "bert-base": 109_482_240, "bert-large": 335_141_888}
    for name, count in published.items():
        shape = expand("optimizer_step", name)[0]
        assert abs(shape["tensors"] * shape["elements"] - count) <= shape["tensors"]


def test_an_unknown_set_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UsageError) as caught:
        find_set(Gemm(), "llama3-8")
    assert "llama3-8b" in (caught.value.hint or "")
    with pytest.raises(UsageError):
        find_set(Linear(), "C")


def test_draws_of_a_set_are_repeated() -> None:
    operator = Gemm()
    drawn = ShapeSet(name="x", source="here", shapes=["m=32~4096,n=m"], draws=10, seed=4)
    assert drawn.expand(operator) == drawn.expand(operator)
    assert len(drawn.expand(operator)) == 10
