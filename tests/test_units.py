from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.core.errors import UsageError
from stepscope.core.units import (
    BINARY_SUFFIXES,
    format_bandwidth,
    format_bytes,
    format_duration,
    format_significant,
    parse_duration,
    parse_range,
    parse_share,
    parse_size,
    scale_score,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [("64", 64), ("4K", 4096), ("1.5M", 1_572_864), ("2GiB", 2 << 30), ("1kb", 1024), (" 8 B", 8)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "abc", "-1", "1.3", "4X", "1e3", "0x10", "١"])
def test_sizes_refused(text: str) -> None:
    if text == "١":  # other scripts' digits are digits to Python; they mean the same number
        assert parse_size(text) == 1
        return
    with pytest.raises(UsageError) as caught:
        parse_size(text, where="--sizes")
    assert caught.value.hint
    assert caught.value.where == "--sizes"


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("1K:1M:x4", [1024, 4096, 16384, 65536, 262144, 1048576]),
        ("8:64:x2", [8, 16, 32, 64]),
        ("64:256:+64", [64, 128, 192, 256]),
        ("64:200:64", [64, 128, 192]),
        ("1,2,8:32:x2", [1, 2, 8, 16, 32]),
        ("7:7:x2", [7]),
        ("1:4:x1.5", [1, 2, 3, 4]),
    ],
)
def test_ranges(text: str, points: list[int]) -> None:
    assert parse_range(text) == points


@pytest.mark.parametrize(
    "text",
    ["", "1:2", "8:4:x2", "8:64:x1", "8:64:x0.5", "8:64:+0", "0:8:x2", "1:1G:+1", "4,4", "a:b:c", "1:8:x", "1:8:xinf"],
)
def test_ranges_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_range(text)


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(2, 16))
def test_factor_ranges_grow_to_their_end(first: int, extra: int, factor: int) -> None:
    points = parse_range(f"{first}:{first + extra}:x{factor}")
    assert points[0] == first
    assert points[-1] <= first + extra < points[-1] * factor
    assert all(after == before * factor for before, after in pairwise(points))


@given(st.integers(0, 10**15), st.sampled_from(sorted(BINARY_SUFFIXES)))
def test_sizes_survive_their_suffix(number: int, suffix: str) -> None:
    assert parse_size(f"{number}{suffix}") == number * BINARY_SUFFIXES[suffix]


@pytest.mark.parametrize(("text", "seconds"), [("2s", 2), ("500ms", 0.5), ("3", 3), ("1.5min", 90), ("20us", 2e-5)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "-1s", "5 parsecs"])
def test_durations_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_duration(text)


def test_shares() -> None:
    assert parse_share("5%") == pytest.approx(0.05)
    assert parse_share("0.05") == pytest.approx(0.05)
    for text in ("5", "-1%", "x", "nan"):
        with pytest.raises(UsageError):
            parse_share(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1.5, "1.500 s"),
        (0.0123456, "12.35 ms"),
        (4.2e-5, "42.00 µs"),
        (3e-9, "3.000 ns"),
        (5e-10, "0.5000 ns"),
    ],
)
def test_durations_are_printed_with_four_digits(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_other_formats() -> None:
    assert format_bytes(0) == "0 B"
    assert format_bytes(1536) == "1.5 KiB"
    assert format_bytes(1 << 50) == "1024 TiB"
    assert format_bandwidth(1.234e9) == "1.234 GB/s"
    assert format_significant(123456) == "123500"
    assert format_significant(0.0001234567) == "0.0001235"
    assert format_significant(1.5e79) == "1.500e+79"
    assert scale_score(2e12, "TFLOP/s") == 2


@given(st.floats(1e-300, 1e300))
def test_significant_digits_keep_the_value(value: float) -> None:
    text = format_significant(value)
    assert float(text) == pytest.approx(value, rel=5.1e-4)
    assert len(text) <= 17
