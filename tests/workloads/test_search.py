"""The search for a batch size, on scripted devices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.bench.workloads.search import DEFAULT_RESOLUTION, BatchTrial, _fibonacci, best_trial, next_batch

EXACT = 1e-9
Scripted = Callable[[int], BatchTrial]


def most_tries(largest: int, first: int = 1, resolution: float = DEFAULT_RESOLUTION) -> int:
    """No search takes more."""
    doublings, size = 1, first
    while size < largest:
        size, doublings = min(2 * size, largest), doublings + 1
    candidates = max(1, min(round(1.5 / resolution), 2 * largest) if resolution else 2 * largest)
    return doublings + len(_fibonacci(candidates + 1))


def search(device: Scripted, largest: int, *, resolution: float = EXACT) -> list[BatchTrial]:
    tried: list[BatchTrial] = []
    while (size := next_batch(tried, largest=largest, resolution=resolution)) is not None:
        assert 1 <= size <= largest
        assert size not in {one.batch_size for one in tried}
        tried.append(device(size))
    return tried


def scripted(*, peak: int, memory: int, slowest: int) -> Scripted:
    """Throughput rises up to `peak` and then falls; above `memory` nothing fits, above `slowest` it is too late."""

    def measure(size: int) -> BatchTrial:
        throughput = float(size if size <= peak else peak * peak / size)
        return BatchTrial(size, throughput if size <= memory else None, size <= slowest)

    return measure


@settings(max_examples=300, deadline=None)
@given(
    largest=st.integers(1, 5000), peak=st.integers(1, 9000), memory=st.integers(1, 9000), slowest=st.integers(1, 9000)
)
def test_the_search_ends_at_the_true_best(largest: int, peak: int, memory: int, slowest: int) -> None:
    tried = search(scripted(peak=peak, memory=memory, slowest=slowest), largest)
    best = best_trial(tried)
    assert best is not None
    assert best.batch_size == min(largest, peak, memory, slowest)
    assert len(tried) <= most_tries(largest, resolution=EXACT)


@settings(max_examples=100, deadline=None)
@given(least=st.integers(1, 64), peak=st.integers(65, 4000))
def test_sizes_that_fail_before_any_works_do_not_end_it(least: int, peak: int) -> None:
    """Norms over a single example fail, whatever the device."""
    device = scripted(peak=peak, memory=9000, slowest=9000)
    tried = search(lambda size: device(size) if size >= least else BatchTrial(size, None, failed=True), 5000)
    best = best_trial(tried)
    assert best is not None
    assert best.batch_size == peak
    assert len(tried) <= most_tries(5000, resolution=EXACT)


def test_a_search_in_which_everything_fails_ends() -> None:
    tried = search(lambda size: BatchTrial(size, None, failed=True), 100)
    assert [one.batch_size for one in tried] == [1, 2, 4, 8, 16, 32, 64, 100]
    assert best_trial(tried) is None


@settings(max_examples=100, deadline=None)
@given(largest=st.integers(1, 5000), peak=st.integers(1, 9000))
def test_a_coarser_search_ends_close_by_in_fewer_tries(largest: int, peak: int) -> None:
    device = scripted(peak=peak, memory=9000, slowest=9000)
    tried = search(device, largest, resolution=1 / 16)
    best = best_trial(tried)
    assert best is not None
    assert best.worth >= (1 - 1 / 8) * device(min(largest, peak)).worth
    assert len(tried) <= most_tries(largest)


def test_the_tries_are_the_stated_ones() -> None:
    """Doubling to 1,024, where it has fallen twice; then between 128 and 512."""
    device = scripted(peak=300, memory=10_000, slowest=10_000)
    assert [one.batch_size for one in search(device, 4096)][:11] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert most_tries(4096) == 21
    assert len(search(device, 4096, resolution=1 / 16)) <= 21


@settings(max_examples=200, deadline=None)
@given(largest=st.integers(1, 4096), peak=st.integers(1, 4096), disliked=st.integers(0, 11))
def test_one_size_that_the_device_dislikes_does_not_end_the_doubling(largest: int, peak: int, disliked: int) -> None:
    right = scripted(peak=peak, memory=9000, slowest=9000)

    def measure(size: int) -> BatchTrial:
        trial = right(size)
        return trial._replace(throughput=0.3 * (trial.throughput or 0.0)) if size == 2**disliked else trial

    tried = search(measure, largest)
    best = best_trial(tried)
    assert best is not None
    powers = [2**i for i in range(13) if 2**i <= largest] + [largest]
    assert best.worth >= max(measure(size).worth for size in powers)


def test_nothing_in_time_is_no_result() -> None:
    tried = search(lambda size: BatchTrial(size, 10.0, in_time=False), 64)
    assert [one.batch_size for one in tried] == [1]
    assert best_trial(tried) is None
    assert best_trial([]) is None


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_a_plateau_does_not_end_the_doubling(noise: float) -> None:
    """Less than two hundredths is noise."""
    tried = search(lambda size: BatchTrial(size, 100.0 * (1 - noise * (size % 3)) if size <= 64 else 100.0), 256)
    assert max(one.batch_size for one in tried) == 256


def test_a_search_goes_on_where_it_was_interrupted() -> None:
    device = scripted(peak=77, memory=200, slowest=150)
    whole = search(device, 1000)
    for cut in range(len(whole)):
        assert next_batch(whole[:cut], largest=1000, resolution=EXACT) == whole[cut].batch_size
