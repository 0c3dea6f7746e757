"""Decoders in a run: one batch from its prompts to the last token, and requests that come at their own pace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stepscope.bench.workloads.feed import Feed
from stepscope.bench.workloads.generation import GenerateStep, GenerationTimes, measure_generation
from stepscope.bench.workloads.serving import DecoderServer, ServingResult, Spread, make_arrivals, serve
from stepscope.measure import Device, WallClock, no_garbage_collection
from stepscope.records import LatencyTarget, Notice, Scalar

if TYPE_CHECKING:
    import torch

    Batch = Mapping[str, torch.Tensor]


class WritingStep:
    """Each call generates for the next batch; the times of its tokens are kept."""

    def __init__(
        self, step: GenerateStep, batches: Sequence[Batch], *, sequences: int, new_tokens: int, device: Device
    ) -> None:
        self.generate = step
        self.new_tokens = new_tokens
        self.times: list[GenerationTimes] = []
        self._sequences = sequences
        self._device = device
        self.feed = Feed(batches)

    def __call__(self) -> None:
        self.times += measure_generation(
            self.generate,
            [(self.feed.take(), self._sequences)],
            new_tokens=self.new_tokens,
            clock=WallClock(),
            synchronise=self._device.synchronize,
        )


def serve_requests(
    step: WritingStep,
    batches: Mapping[int, Batch],
    *,
    rate_per_s: float,
    requests: int,
    device: Device,
    seed: int,
    target: LatencyTarget | None,
) -> tuple[dict[str, Scalar], list[Notice]]:
    """An open loop: arrivals do not wait for answers. Every size of batch is tried once before."""
    server = DecoderServer(step.generate, batches)
    for size in batches:
        server.begin(range(size))
        server.advance()
    device.synchronize()
    with no_garbage_collection():
        result = serve(
            make_arrivals(rate_per_s, requests, seed=seed), server, new_tokens=step.new_tokens, max_batch=max(batches),
            clock=WallClock(), synchronise=device.synchronize,
        )  # fmt: skip
    facts = _describe(result)
    if target is not None:
        facts["serving_missed_latency"] = result.misses(target)
    return facts, [Notice(kind="overloaded", message=result.notice)] if result.notice else []


def _describe(result: ServingResult) -> dict[str, Scalar]:
    facts: dict[str, Scalar] = {
        "serving_requests": len(result.requests),
        "serving_achieved_per_s": result.achieved_per_s,
        "serving_busy_share": result.busy_share,
        "serving_longest_queue": result.longest_queue,
        "serving_above_capacity": result.above_capacity,
        **_spread("ttft", result.ttft()),
        **_spread("latency", result.latency()),
    }
    if result.offered_per_s is not None:
        facts["serving_offered_per_s"] = result.offered_per_s
    per_token = result.tpot()
    return facts | (_spread("tpot", per_token) if per_token is not None else {})


def _spread(name: str, spread: Spread) -> dict[str, Scalar]:
    return {f"serving_{name}_{point}_s": getattr(spread, point) for point in ("p50", "p95", "p99")}
