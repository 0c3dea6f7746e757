"""The queue in fake time, with numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.bench.workloads.serving import DecoderServer, ServingResult, make_arrivals, serve
from stepscope.core.errors import UsageError
from stepscope.measure import FakeClock
from stepscope.records import LatencyTarget

PREFILL_S, TOKEN_S = 0.1, 0.02
CHAT = LatencyTarget(limit_s=2.0, percentile=99)


class Scripted:
    """Prefill takes 100 ms, each further token 20 ms, whatever the batch."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.seen: list[list[int]] = []

    def begin(self, requests: Sequence[int]) -> None:
        self.seen.append(list(requests))
        self.clock.advance(PREFILL_S)

    def advance(self) -> None:
        self.clock.advance(TOKEN_S)


def serve_scripted(arrivals: Sequence[float], *, new_tokens: int = 6, max_batch: int = 2) -> ServingResult:
    clock = FakeClock()
    clock.advance(123.4)  # the zero of a clock means nothing
    server = Scripted(clock)
    result = serve(
        arrivals,
        server,
        new_tokens=new_tokens,
        max_batch=max_batch,
        clock=clock,
        synchronise=lambda: None,
        wait=clock.advance,
    )
    assert [number for batch in server.seen for number in batch] == list(range(len(arrivals)))
    return result


def test_a_lone_request_waits_for_nobody() -> None:
    [one] = serve_scripted([1.0]).requests
    assert (one.arrival_s, one.start_s, one.wait_s) == (1.0, 1.0, 0.0)
    assert one.ttft_s == pytest.approx(0.1)
    assert one.tpot_s == pytest.approx(0.02)
    assert one.latency_s == pytest.approx(0.2)


def test_who_comes_while_the_server_is_busy_waits_for_the_batch_to_end() -> None:
    """A batch takes 200 ms. At 1.0 the first starts alone; three come meanwhile; two of them fit the next batch."""
    result = serve_scripted([1.0, 1.05, 1.1, 1.15])
    assert [one.start_s for one in result.requests] == pytest.approx([1.0, 1.2, 1.2, 1.4])
    assert [one.ttft_s for one in result.requests] == pytest.approx([0.1, 0.25, 0.2, 0.35])
    assert [one.latency_s for one in result.requests] == pytest.approx([0.2, 0.35, 0.3, 0.45])
    assert [(one.requests, one.left_waiting) for one in result.batches] == [(1, 0), (2, 1), (1, 0)]
    assert result.longest_queue == 3
    assert result.offered_per_s == pytest.approx(20)
    assert result.achieved_per_s == pytest.approx(3 / 0.6)
    assert result.capacity_per_s == pytest.approx(10)
    assert result.busy_share == pytest.approx(1.0)
    assert result.percentiles()["latency_p50_s"] == pytest.approx(0.325)
    assert result.percentiles()["ttft_p50_s"] == pytest.approx(0.225)
    assert result.percentiles()["tpot_p99_s"] == pytest.approx(0.02)


@given(
    st.lists(st.floats(0, 50), min_size=1, max_size=30),
    st.integers(1, 4),
    st.integers(1, 5),
)
def test_no_server_answers_faster_than_it_is_asked(gaps: list[float], max_batch: int, new_tokens: int) -> None:
    result = serve_scripted(list(accumulate(gaps)), max_batch=max_batch, new_tokens=new_tokens)
    offered, achieved = result.offered_per_s, result.achieved_per_s
    assert (offered is None) == (achieved is None)
    assert offered is None or achieved is None or achieved <= offered


def test_one_token_answers_have_no_time_per_token() -> None:
    result = serve_scripted([1.0, 2.0], new_tokens=1)
    assert {name.partition("_")[0] for name in result.percentiles()} == {"ttft", "latency"}
    assert not result.misses(CHAT)


def test_more_than_the_server_can_do_is_said() -> None:
    """Full batches of 2 in 200 ms: 10 requests a second at most."""
    result = serve_scripted([0.05 * (i + 1) for i in range(200)])
    assert result.capacity_per_s == pytest.approx(10)
    assert result.achieved_per_s == pytest.approx(10, rel=0.02)
    assert result.above_capacity
    assert result.queue_grew
    assert result.notice == (
        "20.00 requests/s were offered, full batches do 10.00: the queue grew to the end; "
        "latencies depend on how long the test ran"
    )
    assert result.misses(CHAT)
    # Above capacity is never within limits, even where a short test did not show it.
    short = serve_scripted([1.0, 1.0, 1.01, 1.02])
    assert max(one.ttft_s for one in short.requests) < CHAT.limit_s
    assert short.above_capacity
    assert short.misses(CHAT)
    assert short.notice is not None
    assert "too short" in short.notice


def test_below_capacity_the_queue_stays() -> None:
    result = serve_scripted(make_arrivals(5.0, 400, seed=2))
    assert not result.above_capacity
    assert not result.queue_grew
    assert result.notice is None
    assert not result.misses(CHAT)
    assert result.misses(LatencyTarget(limit_s=0.05, percentile=99))
    late_s = result.percentiles()["ttft_p95_s"]
    assert not result.misses(LatencyTarget(limit_s=late_s * 1.001, percentile=95))
    assert result.misses(LatencyTarget(limit_s=late_s * 0.999, percentile=95))


def test_arrivals_come_at_their_rate() -> None:
    drawn = make_arrivals(50.0, 20_000, seed=1)
    assert drawn == make_arrivals(50.0, 20_000, seed=1) != make_arrivals(50.0, 20_000, seed=2)
    gaps = [after - before for before, after in pairwise(drawn)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.02, rel=0.03)
    # Exponential gaps: the standard deviation is the mean.
    assert sum((one - mean) ** 2 for one in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.06)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arrivals": []}, "0 arrivals"),
        ({"new_tokens": 0}, "0 tokens"),
        ({"max_batch": 0}, "batches of 0"),
        ({"arrivals": [2.0, 1.0]}, "not in order"),
    ],
)
def test_wrong_use_is_told(change: dict[str, Any], message: str) -> None:
    use: dict[str, Any] = {"arrivals": [1.0, 2.0], "new_tokens": 2, "max_batch": 2, **change}
    with pytest.raises(UsageError, match=message):
        serve_scripted(use.pop("arrivals"), **use)


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="1 requests at 0"):
        make_arrivals(0.0, 1)


def test_a_decoder_takes_the_next_larger_batch() -> None:
    begun: list[str] = []

    class Step:
        def begin(self, batch: str) -> None:
            begun.append(batch)

        def advance(self) -> None:
            begun.append("token")

    server = DecoderServer(Step(), {4: "four", 1: "one", 2: "two"})
    for count in (1, 2, 3, 4):
        server.begin(range(count))
    server.advance()
    assert begun == ["one", "two", "four", "four", "token"]
    with pytest.raises(UsageError, match="5 requests do not fit a batch of 4"):
        server.begin(range(5))


@given(
    gaps=st.lists(st.floats(0, 0.5), min_size=1, max_size=40),
    tokens=st.integers(1, 8),
    max_batch=st.integers(1, 5),
)
def test_every_queue(gaps: list[float], tokens: int, max_batch: int) -> None:
    """Nobody is lost or overtaken, times are in order, the server does one batch at a time and never idles."""
    arrivals, now = [], 0.0
    for gap in gaps:
        now += gap
        arrivals.append(now)
    result = serve_scripted(arrivals, new_tokens=tokens, max_batch=max_batch)
    assert [one.number for one in result.requests] == list(range(len(arrivals)))
    assert sum(one.requests for one in result.batches) == len(arrivals)
    for one, due in zip(result.requests, arrivals, strict=True):
        assert one.arrival_s == pytest.approx(due, abs=1e-8)
        assert one.arrival_s <= one.start_s <= one.first_token_s <= one.end_s
    for before, after in pairwise(result.requests):
        assert before.start_s <= after.start_s
        assert before.end_s <= after.end_s
    for first, second in pairwise(result.batches):
        assert first.end_s <= second.start_s
        assert first.left_waiting == 0 or second.start_s == first.end_s
    assert all(1 <= one.requests <= max_batch for one in result.batches)


@given(gaps=st.lists(st.floats(0.25, 2), min_size=1, max_size=20), max_batch=st.integers(1, 5))
def test_when_requests_are_rare_latency_is_service(gaps: list[float], max_batch: int) -> None:
    """Gaps are longer than the 200 ms that a request takes."""
    arrivals, now = [], 0.0
    for gap in gaps:
        now += gap
        arrivals.append(now)
    result = serve_scripted(arrivals, max_batch=max_batch)
    assert [one.latency_s for one in result.requests] == pytest.approx([0.2] * len(gaps))
    assert [one.wait_s for one in result.requests] == pytest.approx([0.0] * len(gaps), abs=1e-9)
    assert result.longest_queue == 1
    assert not result.queue_grew
