"""Decoders in a run: one batch from its prompts to the last token, and requests that come at their own pace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stepscope.bench.workloads.feed import Feed
from stepscope.bench.workloads.generation import GenerateStep, GenerationTimes, measure_generation
from stepscope.bench.workloads.serving import DecoderServer, ServingResult, make_arrivals, serve
from stepscope.measure import Device, WallClock, no_garbage_collection
from stepscope.records import LatencyTarget, Notice
from stepscope.records.kinds import Serving

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
) -> tuple[Serving, list[Notice]]:
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
    return _describe(result, target), [Notice(kind="overloaded", message=result.notice)] if result.notice else []


def _describe(result: ServingResult, target: LatencyTarget | None) -> Serving:
    percentiles = {"ttft": result.ttft(), "latency": result.latency(), "tpot": result.tpot()}
    return Serving(
        requests=len(result.requests),
        achieved_per_s=result.achieved_per_s,
        busy_share=result.busy_share,
        longest_queue=result.longest_queue,
        above_capacity=result.above_capacity,
        offered_per_s=result.offered_per_s,
        missed_latency=result.misses(target) if target is not None else None,
        **{
            f"{name}_{point}_s": getattr(times, point)
            for name, times in percentiles.items()
            if times is not None
            for point in ("p50", "p95", "p99")
        },
    )
