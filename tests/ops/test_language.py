from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.bench.ops import language
from stepscope.bench.ops.families.gemm import Bmm, Gemm, Mlp
from stepscope.bench.ops.language import expand_shape, parse_condition, write_shape
from stepscope.bench.ops.operator import Operator, Parameter, Shape, Work
from stepscope.core.errors import UsageError

GEMM = Gemm()


class Sample(Operator):
    """One parameter of each kind, and a rule between two of them."""

    name = "sample"
    summary = "a sample"
    parameters = (
        Parameter("wide", "elements", 64, "a size"),
        Parameter("parts", "parts", 2, "a size that divides it"),
        Parameter("padding", "elements", 0, "a size that may be 0", least=0),
        Parameter("p", "", 0.5, "a number"),
        Parameter("kind", "", "soft", "a word", ("soft", "hard", "half/half")),
        Parameter("note", "", "none", "a text"),
    )
    tiny = {"wide": 4}  # noqa: RUF012

    def check_shape(self, shape: Shape) -> None:
        if shape["wide"] % shape["parts"]:
            raise ValueError(f"parts={shape['parts']} must divide wide={shape['wide']}")

    def work(self, shape: Shape, dtype: str, direction: str) -> Work:
        return Work(0, 0)

    def make_inputs(self, shape: Shape, maker: Any) -> dict[str, Any]:
        return {}

    def bind(self, shape: Shape, inputs: Any) -> Any:
        return lambda: None


SAMPLE = Sample()


def expand(text: str, operator: Operator = GEMM, **options: Any) -> list[dict[str, Any]]:
    return expand_shape(text, operator, where="--shape", **options)


def values(text: str, name: str, operator: Operator = GEMM, **options: Any) -> list[Any]:
    return [shape[name] for shape in expand(text, operator, **options)]


def refusal(text: str, operator: Operator = GEMM, **options: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        expand(text, operator, **options)
    assert caught.value.where == "--shape"
    return caught.value


def test_what_is_left_out_takes_its_default() -> None:
    assert expand("") == [{"m": 1024, "n": 1024, "k": 1024, "layout": "nn"}]
    assert expand(" m = 512 , k=4K,") == [{"m": 512, "n": 1024, "k": 4 * 1024, "layout": "nn"}]


def test_every_form_of_a_size() -> None:
    assert values("m=512", "m") == [512]
    assert values("m=1.5K", "m") == [3 * 512]
    assert values("m=64:512:x2", "m") == [64, 128, 256, 512]
    assert values("m=64:256:+64", "m") == [64, 128, 192, 256]
    assert values("m=128/256/512", "m") == [128, 256, 512]
    assert values("m=1/8:32:x2/100", "m") == [1, 8, 16, 32, 100]
    assert values("padding=0/1", "padding", SAMPLE) == [0, 1]


def test_numbers_words_and_texts() -> None:
    assert values("p=0.1/0.25/1e-3", "p", SAMPLE) == [0.1, 0.25, 0.001]
    assert values("p=1", "p", SAMPLE) == [1.0]
    assert isinstance(values("p=1", "p", SAMPLE)[0], float)
    assert values("kind=hard/soft", "kind", SAMPLE) == ["hard", "soft"]
    assert values("kind=half/half", "kind", SAMPLE) == ["half/half"]
    assert values("note=file:/some/where", "note", SAMPLE) == ["file:/some/where"]
    assert values("widths=8-16-4,batch=2/4", "widths", Mlp()) == ["8-16-4", "8-16-4"]


def test_a_grid_is_the_product_in_the_order_of_the_parameters() -> None:
    shapes = expand("k=3/4,m=1/2,n=5")
    assert [(shape["m"], shape["n"], shape["k"]) for shape in shapes] == [(1, 5, 3), (1, 5, 4), (2, 5, 3), (2, 5, 4)]
    assert len(expand("m=1:64:+1,n=1:32:+1,k=1/2/3")) == 64 * 32 * 3


def test_parameters_follow_others() -> None:
    shapes = expand("m=128/256,n=m,k=4*n")
    assert [(shape["m"], shape["n"], shape["k"]) for shape in shapes] == [(128, 128, 512), (256, 256, 1024)]
    assert values("m=n,n=k,k=7", "m") == [7]
    assert values("m=2K*n,n=3", "m") == [2048 * 3]
    # 128 is named by both items of the list where n is 128: that combination stands once
    assert [(s["m"], s["n"]) for s in expand("m=128/n,n=128/256")] == [(128, 128), (128, 256), (256, 256)]


def test_circles_are_refused() -> None:
    for text in ("m=n,n=m", "m=m", "m=2*n,n=k,k=m", "m=8/n,n=m"):
        assert "follow each other" in refusal(text).message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q=3", "has no shape parameter 'q'"),
        ("m", "is not name=value"),
        ("m=1,m=2", "twice"),
        ("m=0", "at least 1"),
        ("m=-4", "not a size"),
        ("m=", "lacks a value"),
        ("m=8//16", "lacks a value"),
        ("m=abc", "neither a size nor another parameter"),
        ("m=1.5", "not a whole number"),
        ("m=9000T", "at most"),
        ("m=1;n=2", "not a size"),
        ("m=64:8:x2", "ends below its start"),
        ("m=8:64", "not a range"),
        ("m=8:64:x1", "never grows"),
        ("m=2:3:x1e308", "too large"),
        ("m=" + "9" * 400, "characters"),
        ("m=8/8", "names 8 twice"),
        ("m=n/n", "names 1*n twice"),
        ("m=8/4:16:x2", "names 8 twice"),
        ("m=layout", "which is no size"),
        ("m=0*n", "0 times"),
        ("m=x*n", "not a size"),
        ("m=64~32", "leaves nothing"),
        ("m=1~2~3~4", "not a draw"),
        ("m=9~15~8", "leaves nothing"),
        ("layout=nm", "has no layout 'nm'"),
        ("layout=nn/nn", "twice"),
        ("m=1:100000:+1,n=1:1000:+1", "200,000 are allowed"),
    ],
)
def test_what_cannot_be_is_refused_with_an_example(text: str, message: str) -> None:
    error = refusal(text, draws=3) if "~" in text else refusal(text)
    assert message in error.message
    assert "m=1024,n=1024,k=1024,layout=nn" in (error.hint or "")


def test_a_near_name_is_suggested() -> None:
    assert "did you mean layout?" in (refusal("layuot=nn").hint or "")
    assert "did you mean hard?" in (refusal("kind=hardd", SAMPLE).hint or "")


def test_numbers_that_are_none_are_refused() -> None:
    for text in ("p=nan", "p=inf", "p=x", "p=0.5/", "p=wide", "p=" + "9" * 5000):
        refusal(text, SAMPLE)


def test_an_impossible_combination_of_a_grid_is_named() -> None:
    error = refusal("wide=64/65,parts=2", SAMPLE)
    assert "wide=65,parts=2" in error.message
    assert "must divide" in error.message
    assert "at most" in refusal("m=1G,n=1K*m,k=2*n").message


def test_draws_need_their_number() -> None:
    error = refusal("m=32~4096")
    assert "--draws" in (error.hint or "")
    for draws in (0, -1, 200_001):
        assert "draws cannot be" in refusal("m=32~4096", draws=draws).message
    assert "seed" in refusal("m=32~4096", draws=2, seed=-1).message


def test_draws_are_the_same_on_every_machine() -> None:
    """Written down once; a change would make random sweeps of two versions different ones."""
    shapes = expand("m=32~4096,n=8~1024~8,k=64/128/256", draws=4, seed=7)
    assert [(shape["m"], shape["n"], shape["k"]) for shape in shapes] == [
        (154, 16, 128),
        (45, 104, 128),
        (42, 88, 64),
        (262, 8, 64),
    ]


def test_draws_are_log_uniform() -> None:
    """Each octave of 32…4096 holds a seventh of the draws."""
    drawn = values("m=32~4095,n=1:100000:+1", "m", draws=7000, seed=1)
    octaves = Counter(int(math.log2(size)) for size in drawn)
    assert sorted(octaves) == [5, 6, 7, 8, 9, 10, 11]
    for count in octaves.values():
        # 1000 expected, standard deviation sqrt(7000 * 1/7 * 6/7) = 29
        assert abs(count - 1000) < 5 * 29


def test_both_ends_are_drawn() -> None:
    assert set(values("m=3~6,n=1:1000:+1", "m", draws=300)) == {3, 4, 5, 6}
    assert set(values("m=7~25~8,n=1:1000:+1", "m", draws=300)) == {8, 16, 24}


def test_draws_are_different_and_possible() -> None:
    shapes = expand("wide=1~100,parts=1~100", SAMPLE, draws=200, seed=3)
    assert len({write_shape(shape) for shape in shapes}) == 200
    assert all(shape["wide"] % shape["parts"] == 0 for shape in shapes)
    # a small space can be drawn whole
    assert sorted(values("m=1/2/3,n=5", "m", draws=3)) == [1, 2, 3]
    assert "only 3 different" in refusal("m=1/2/3,n=5", draws=4).message


def test_a_space_that_holds_nothing_is_given_up() -> None:
    assert "turned up" in refusal("wide=7/11/13,parts=2~6", SAMPLE, draws=2).message
    # a draw that follows another may leave the bounds: such a one is drawn again, until none is left
    assert "turned up" in refusal("m=1G~2G,n=1K*m", draws=2).message


def test_more_draws_begin_with_the_fewer() -> None:
    text = "m=32~4096,n=m,k=64/128"
    assert expand(text, draws=20, seed=5)[:10] == expand(text, draws=10, seed=5)
    assert expand(text, draws=10, seed=5) != expand(text, draws=10, seed=6)


def test_tables_of_files() -> None:
    def of(table: dict[str, Any], operator: Operator = SAMPLE) -> list[dict[str, Any]]:
        return expand_shape(table, operator, where="cases[0]")

    assert of({"note": "a, b/c"})[0]["note"] == "a, b/c"
    assert [shape["note"] for shape in of({"note": ["a,b", "c"]})] == ["a,b", "c"]
    assert [shape["wide"] for shape in of({"wide": [2, "4:16:x2", "100"]})] == [2, 4, 8, 16, 100]
    assert [shape["p"] for shape in of({"p": [0, 0.25]})] == [0.0, 0.25]
    assert [shape["n"] for shape in of({"m": 8, "n": "2*m"}, GEMM)] == [16]
    for wrong in (
        {"wide": 2.5}, {"wide": True}, {"wide": None}, {"wide": []}, {"wide": {"a": 1}}, {"wide": [[1]]}, {"p": True},
        {"p": "x"}, {"p": math.inf}, {"kind": 3}, {"note": 3}, {"wide": 1 << 20_000}, {"p": 1 << 20_000}, {"q": 1},
        {"wide": [1, 1]}, {"kind": "sofd"},
    ):  # fmt: skip
        with pytest.raises(UsageError) as caught:
            of(wrong)
        assert caught.value.where == "cases[0]"
        assert "wide=64,parts=2,padding=0,p=0.5,kind=soft,note=none" in (caught.value.hint or "")


def test_conditions_keep_what_they_hold_for() -> None:
    def of(*texts: str) -> list[dict[str, Any]]:
        return expand("m=1:6:+1,n=1:6:+1,k=1", conditions=[parse_condition(text, GEMM, where="set") for text in texts])

    assert [(s["m"], s["n"]) for s in of("m*n==6")] == [(1, 6), (2, 3), (3, 2), (6, 1)]
    assert [(s["m"], s["n"]) for s in of("5<=m*n<=6", "m<n")] == [(1, 5), (1, 6), (2, 3)]
    assert [(s["m"], s["n"]) for s in of("m*m+n*n<5")] == [(1, 1)]
    assert len(of("m!=n", "2*m >= n + k")) == sum(2 * m >= n + 1 for m in range(1, 7) for n in range(1, 7) if m != n)
    assert "no case is left by m>6" in refusal("m=1/2", conditions=[parse_condition("m>6", GEMM, where="set")]).message


@pytest.mark.parametrize("text", ["", "m", "m<", "<m", "q<3", "layout<3", "m<n()", "m**2<3", "m<-1", "m=3", "m<a.b"])
def test_conditions_are_no_code(text: str) -> None:
    with pytest.raises(UsageError):
        parse_condition(text, GEMM, where="set")


def test_conditions_hold_for_draws_too() -> None:
    few = [parse_condition("m*n<=100", GEMM, where="set")]
    assert all(s["m"] * s["n"] <= 100 for s in expand("m=1~1000,n=1~1000", draws=50, conditions=few))


def test_many_combinations_are_looked_at_where_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [parse_condition("m==n", GEMM, where="set"), parse_condition("m<=2", GEMM, where="set")]
    monkeypatch.setattr(language, "MAX_CASES", 99)
    assert len(expand("m=1:10:+1,n=1:10:+1,k=1", conditions=few)) == 2
    refusal("m=1:10:+1,n=1:10:+1,k=1")
    refusal("m=1:10:+1,n=1:10:+1,k=1", conditions=[parse_condition("m<=10", GEMM, where="set")])


SIZES = st.integers(1, 2**40)


@given(m=SIZES, n=SIZES, k=SIZES, layout=st.sampled_from(["nn", "nt", "tn", "tt"]))
def test_a_shape_written_is_the_shape_read(m: int, n: int, k: int, layout: str) -> None:
    shape = {"m": m, "n": n, "k": k, "layout": layout}
    assert expand(write_shape(shape)) == [shape]
    assert expand_shape(shape, GEMM, where="x") == [shape]


@given(p=st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_written_is_the_number_read(p: float) -> None:
    assert values(f"p={p}", "p", SAMPLE) == [p]


@given(first=st.integers(1, 10**6), steps=st.integers(0, 50), step=st.integers(1, 10**6))
def test_ranges_by_steps(first: int, steps: int, step: int) -> None:
    last = first + steps * step
    assert values(f"m={first}:{last}:+{step}", "m") == list(range(first, last + 1, step))


@given(first=st.integers(1, 1000), doublings=st.integers(0, 20))
def test_ranges_by_factors(first: int, doublings: int) -> None:
    assert values(f"m={first}:{first << doublings}:x2", "m") == [first << i for i in range(doublings + 1)]


@settings(deadline=None)
@given(
    low=st.integers(1, 10**9), width=st.integers(0, 10**9), step=st.integers(1, 64), seed=st.integers(0, 2**64),
    draws=st.integers(1, 20),
)  # fmt: skip
def test_draws_stay_inside_and_are_repeated(low: int, width: int, step: int, seed: int, draws: int) -> None:
    high = (low + width + step) // step * step
    text = f"m={low}~{high}~{step},n=1:1000:+1"
    drawn = expand(text, draws=draws, seed=seed)
    assert all(low <= shape["m"] <= high and shape["m"] % step == 0 for shape in drawn)
    assert len({write_shape(shape) for shape in drawn}) == draws
    assert expand(text, draws=draws, seed=seed) == drawn


ALPHABET = st.sampled_from(list("mnkbatchlyou=,/:*~+x0123456789KMG. -;<\"'()[]{}\n\0µ٣"))


@settings(max_examples=400, deadline=None)
@given(
    text=st.one_of(
        st.text(ALPHABET, max_size=30), st.text(max_size=30), st.builds("m={}".format, st.text(max_size=12))
    ),
    draws=st.sampled_from([None, 2]),
)
def test_bad_texts_are_refused_and_nothing_else(text: str, draws: int | None) -> None:
    for operator in (GEMM, Bmm(), SAMPLE):
        try:
            shapes = expand(text, operator, draws=draws)
        except UsageError:
            continue
        assert 1 <= len(shapes) <= language.MAX_CASES
        assert all(set(shape) == {one.name for one in operator.parameters} for shape in shapes)


@given(text=st.text(ALPHABET, max_size=20))
def test_bad_conditions_are_refused_and_nothing_else(text: str) -> None:
    try:
        condition = parse_condition(text, GEMM, where="set")
    except UsageError:
        return
    assert condition.holds({"m": 1, "n": 2, "k": 3}) in (True, False)


def test_the_power_by_roots_is_the_power() -> None:
    """`_draw_size` is low·(high + 1)/low to the random number, without exp and log."""
    draw = language.Draw(32, 4096, 1)
    for seed in range(200):
        expected = 32 * (4097 / 32) ** random.Random(seed).random()
        assert language._draw_size(draw, random.Random(seed)) == min(4096, int(expected))
