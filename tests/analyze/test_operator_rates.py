"""Work and rates of operators from their shapes."""

from __future__ import annotations

import pytest

from stepscope.analyze.step.operator_rates import NO_SHAPES, NO_WORK, find_work, rate_operators
from trace_jobs import TraceDraft, compute_bound, host_bound


@pytest.mark.parametrize(
    ("name", "shapes", "types", "values", "expected"),
    [
        ("aten::mm", "[[4, 8], [8, 2]]", '["float", "float"]', None, (128, 4 * (32 + 16 + 8), "fp32")),
        ("aten::addmm", "[[2], [4, 8], [8, 2], [], []]", '["c10::Half", "c10::Half", "c10::Half", "Scalar", "Scalar"]',
         None, (128, 2 * (2 + 32 + 16 + 8), "fp16")),
        ("aten::bmm", "[[3, 4, 8], [3, 8, 2]]", '["c10::BFloat16", "c10::BFloat16"]', None,
         (384, 2 * (96 + 48 + 24), "bf16")),
        ("aten::cudnn_convolution", "[[1, 3, 8, 8], [4, 3, 3, 3], [], [], []]",
         '["float", "float", "ScalarList", "ScalarList", "ScalarList"]', '["", "", "[1, 1]", "[2, 2]", "[1, 1]"]',
         (2 * 64 * 27, 4 * (192 + 108 + 64), "fp32")),
        ("aten::convolution_backward", "[[1, 4, 4, 4], [1, 3, 8, 8], [4, 3, 3, 3], [], [], [], [], [], [], [], []]",
         '["float", "float", "float", "", "", "", "", "", "", "", ""]',
         '["", "", "", "[0]", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1", "[True, True, False]"]',
         (2 * 2 * 64 * 27, 4 * (64 + 192 + 108 + 192 + 108), "fp32")),
        ("aten::_efficient_attention_forward", "[[2, 16, 4, 8], [2, 16, 4, 8], [2, 16, 4, 8]]",
         '["float", "float", "float"]', None, (4 * 2 * 4 * 16 * 16 * 8, 4 * 4 * 1024, "fp32")),
    ],
    ids=["mm", "addmm", "bmm", "convolution", "convolution backward", "attention, length first"],
)  # fmt: skip
def test_work_follows_from_shapes(
    name: str, shapes: str, types: str, values: str | None, expected: tuple[int, int, str]
) -> None:
    """Flop, bytes and type of one call."""
    assert find_work(name, shapes, types, values) == expected


@pytest.mark.parametrize(
    ("shapes", "types"),
    [("[[4, 8]]", '["float"]'), ("[[4, 8], [9, 2]]", '["float", "float"]'), ("nonsense", "[]"),
     ("[[4], 3]", '["float", 1]'), ("[[4, 8], [8, 2]]", '["c10::quint8", "c10::quint8"]'),
     ("[[0, 8], [8, 2]]", '["float", "float"]')],
)  # fmt: skip
def test_shapes_that_decide_nothing_give_nothing(shapes: str, types: str) -> None:
    assert find_work("aten::mm", shapes, types, None) is None


def test_rates_are_work_over_the_time_of_kernels() -> None:
    found = rate_operators(compute_bound().build(), 1)
    (rate,) = found.rates
    assert (rate.name, rate.calls, rate.dtype) == ("aten::mm", 9, "fp32")
    assert rate.median_s == pytest.approx(108e-6)
    assert rate.flops == 2 * 512**3
    assert rate.flops_per_s == pytest.approx(2 * 512**3 / 108e-6)
    assert rate.intensity == pytest.approx(2 * 512**3 / (3 * 4 * 512**2))
    assert found.share == pytest.approx(1.0)


def test_kernels_say_when_they_round_to_tf32() -> None:
    draft = TraceDraft()
    draft.step(0, 100)
    draft.operator("aten::mm", 1, 9, shapes="[[64, 64], [64, 64]]", types='["float", "float"]')
    draft.work("sm80_xmma_gemm_tf32f32_tf32f32_f32_tn_n_tilesize128x128x32", 10, 20, at=4)
    assert rate_operators(draft.build(), 1).rates[0].dtype == "tf32"


def test_what_is_missing_is_said() -> None:
    assert rate_operators(host_bound(3).build(), 1).note == NO_SHAPES
    draft = TraceDraft()
    draft.step(0, 100)
    draft.operator("aten::add", 1, 9, shapes="[[64], [64]]", types='["float", "float"]')
    assert rate_operators(draft.build(), 1).note == NO_WORK
