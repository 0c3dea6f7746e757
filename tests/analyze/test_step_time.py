"""The step time against loops whose period is known: the host up to many steps ahead, or the device always waiting."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_samples import TRACES, Sketch, read_public

from stepscope.analyze.answers.compose import answer
from stepscope.analyze.critical.model import build_graph
from stepscope.analyze.critical.path import describe_path
from stepscope.analyze.critical.what_if import find_limits
from stepscope.analyze.job import explain_job
from stepscope.analyze.step.breakdown import break_down
from stepscope.analyze.step.report import explain_step
from stepscope.analyze.step.variation import compare_steps
from stepscope.analyze.step.view import view
from stepscope.formats.timeline import Timeline
from stepscope.traces.read import read_traces

LATENCY = 5_000
CALL = 4_000
WARM = 60
"""Steps before the trace begins, so that the loop is in steady state."""


class Loop(NamedTuple):
    """A training loop. Times in nanoseconds."""

    kernels: int
    host_ns: int
    """Of the host, for each kernel."""
    device_ns: int
    """Of each kernel."""
    streams: int
    ahead: int
    """Before it launches a step, the host waits for the one so many steps before; 0: at the end of each step for that
    step itself."""

    @property
    def host_s(self) -> float:
        return self.kernels * self.host_ns / 1e9


class Launch(NamedTuple):
    call: int
    start: int
    end: int
    stream: int


class Step(NamedTuple):
    start: int
    end: int
    launches: list[Launch]
    wait: tuple[int, int] | None

    @property
    def done(self) -> int:
        return max(launch.end for launch in self.launches)


def simulate(loop: Loop, steps: int) -> list[Step]:
    time, free, done = 0, [0] * loop.streams, []
    for number in range(steps):
        start, launches, wait = time, [], None
        if loop.ahead and number >= loop.ahead and done[number - loop.ahead].done > time:
            wait = (time, done[number - loop.ahead].done + 1_000)
            time = wait[1]
        for kernel in range(loop.kernels):
            stream = kernel % loop.streams
            time += loop.host_ns
            begin = max(time - CALL + LATENCY, free[stream])
            free[stream] = begin + loop.device_ns
            launches.append(Launch(time - CALL, begin, free[stream], 7 + stream))
        if not loop.ahead:
            wait = (time, max(time, *free) + 1_000)
            time = wait[1]
        done.append(Step(start, time, launches, wait))
    return done


def draw_trace(steps: list[Step], marks: str, *, earlier: list[Step] = ()) -> Timeline:  # type: ignore[assignment]
    """`earlier`: steps before the trace, of whose device work the calls were not recorded."""
    sketch = Sketch()
    for number, step in enumerate(steps):
        if marks == "profiler":
            sketch.step(number, step.start, step.end)
        else:
            sketch.annotation("Optimizer.step#SGD.step", step.end - 100, step.end)
        if step.wait is not None:
            sketch.call("cudaStreamSynchronize", *step.wait)
        for launch in step.launches:
            sketch.operator("aten::mm", launch.call - 1_000, launch.call + CALL)
            span = (launch.call, launch.call + CALL)
            sketch.kernel("gemm", launch.start, launch.end, call=span, stream=launch.stream)
    for step in earlier:
        for launch in step.launches:
            if launch.end > steps[0].start:
                sketch.kernel("gemm", launch.start, launch.end, stream=launch.stream)
    return sketch.build()


LOOPS = st.builds(
    Loop,
    kernels=st.integers(3, 12),
    host_ns=st.integers(6_000, 60_000),
    device_ns=st.integers(1_000, 90_000),
    streams=st.integers(1, 3),
    ahead=st.sampled_from([0, 1, 2, 3, 10]),
)


@settings(deadline=None, max_examples=80)
@given(LOOPS, st.integers(3, 8), st.sampled_from(["profiler", "optimizer"]), st.booleans())
def test_the_step_time_is_the_period_of_the_loop(loop: Loop, count: int, marks: str, has_earlier: bool) -> None:
    steps = simulate(loop, WARM + count)
    period_s = (steps[-1].done - steps[WARM // 2].done) / (len(steps) - 1 - WARM // 2) / 1e9
    earlier = steps[WARM - 12 : WARM] if has_earlier else []
    timeline = draw_trace(steps[WARM:], marks, earlier=earlier)
    report = explain_step(timeline)
    step_s = report.breakdown.step_s
    assert step_s == pytest.approx(period_s, rel=0.02)
    assert report.variation.median_s == pytest.approx(step_s, rel=0.02)
    assert sum(report.breakdown.breakdown_ns.values()) == pytest.approx(step_s * 1e9)
    assert report.breakdown.launch_to_completion_s >= step_s
    assert report.idle.idle_s <= step_s
    graph = build_graph(timeline, report.step)
    path = describe_path(graph)
    assert path.length_s == pytest.approx(step_s)
    for name in path.by_name:
        assert name.kind != "compute" or name.time_s <= loop.kernels * loop.device_ns / 1e9 * 1.0001
    for limit in find_limits(graph):
        assert limit.step_s <= step_s
        if limit.name == "host-bound" and loop.ahead > 1:
            assert limit.step_s == pytest.approx(min(loop.host_s, step_s), rel=0.05, abs=3 * LATENCY / 1e9)


@pytest.mark.parametrize("ahead", [2, 3, 10])
def test_launch_to_completion_is_told_apart(ahead: int) -> None:
    loop = Loop(kernels=10, host_ns=10_000, device_ns=40_000, streams=1, ahead=ahead)
    found = break_down(draw_trace(simulate(loop, WARM + 6)[WARM:], "profiler"), 3)
    assert found.step_s == pytest.approx(400e-6, rel=0.01)
    assert found.launch_to_completion_s == pytest.approx((ahead + 0.75) * 400e-6, rel=0.01)
    assert found.note is not None
    assert "launch to completion" in found.note


@pytest.mark.parametrize("operators", [0, 1, 30])
def test_an_empty_step_is_not_the_one_explained(operators: int) -> None:
    """A step that was cut off by the end of the profiler is shorter than any, and would be the lower of two."""
    loop = Loop(kernels=20, host_ns=10_000, device_ns=400_000, streams=1, ahead=0)
    for counted in (1, 2, 3, 4, 6):
        steps = simulate(loop, counted)
        end = steps[-1].end
        sketch = Sketch()
        for number, step in enumerate(steps):
            sketch.step(number, step.start, step.end)
            for launch in step.launches:
                sketch.kernel("gemm", launch.start, launch.end, call=(launch.call, launch.call + CALL))
        sketch.step(counted, end, end + 49_000)
        for place in range(operators):
            sketch.operator("aten::zeros", end + 1_000 * place, end + 1_000 * place + 500)
        timeline = sketch.build()
        assert view(timeline).empty_steps == {counted}
        report = explain_step(timeline)
        assert report.breakdown.kernels == 20
        assert counted not in compare_steps(timeline).slow_steps


@pytest.mark.parametrize("streams", [1, 2])
def test_work_that_never_ends_holds_no_step_up(streams: int) -> None:
    """A kernel that runs beside all steps, launched in the first of them."""
    loop = Loop(kernels=10, host_ns=10_000, device_ns=40_000, streams=streams, ahead=2)
    steps = simulate(loop, 8)
    end = steps[-1].done
    persistent = Launch(steps[0].start + 100, steps[0].start + 5_000, end + 1_000_000, 99)
    timeline = draw_trace([steps[0]._replace(launches=[*steps[0].launches, persistent]), *steps[1:]], "profiler")
    assert explain_step(timeline).breakdown.step_s == pytest.approx(400e-6 / streams, rel=0.01)


def test_time_between_marked_steps_is_said() -> None:
    sketch = Sketch()
    for number in range(6):
        sketch.step(number, 100_000 * number, 100_000 * number + 60_000)
        sketch.operator("aten::mm", 100_000 * number + 1_000, 100_000 * number + 59_000)
    report = explain_step(sketch.build())
    assert report.breakdown.step_s == pytest.approx(60e-6)
    expected = "one step ends every 100.0 µs, and takes 60.00 µs: the rest lies between the marked steps"
    assert expected in report.notes


def test_uneven_steps_that_follow_each_other_leave_nothing_between_them() -> None:
    """The median of three step times is not that of the two periods."""
    sketch, start = Sketch(), 0
    for number, length in enumerate((91_000, 115_000, 103_000)):
        sketch.step(number, start, start + length)
        sketch.operator("aten::mm", start + 1_000, start + length)
        start += length
    assert not any("between the marked steps" in note for note in explain_step(sketch.build()).notes)


def test_a_recorded_loop_whose_host_runs_ahead() -> None:
    """Launch to completion takes 94.6 ms; a step takes 66.9 ms without the profiler, on average 88.1 ms with it."""
    folder = TRACES / "h200_runahead" / "convnext_tiny_b64"
    if not folder.exists():
        pytest.skip("the recording is kept outside the project")
    job = explain_job(read_traces(folder, cache=False))
    found = answer(job, limits=job.limits)
    assert found.sentence.startswith("Without the profiler a step takes 66.86 ms. Profiled step 12 takes 80.71 ms: ")
    assert job.detail.breakdown.launch_to_completion_s == pytest.approx(94.64e-3, rel=1e-3)
    assert sum(step.step_s for step in job.steps) / len(job.steps) == pytest.approx(88.1e-3, rel=1e-3)
    device_bound = next(limit for limit in job.limits if limit.name == "device-bound")
    assert device_bound.step_s == pytest.approx(66.9e-3, rel=0.01)
    assert found.caution == "The profiled step is 1.207× as long as one without the profiler."


@pytest.mark.parametrize("name", ["public/param/resnet_kineto.json.gz", "public/param/linear_kineto.json.gz"])
def test_public_loops_agree_with_themselves(name: str) -> None:
    timeline = read_public(name)
    report = explain_step(timeline)
    step_s, variation = report.breakdown.step_s, report.variation
    assert variation.median_s == pytest.approx(step_s, rel=0.05)
    spans = timeline.steps
    whole_s = (spans[-1].end_ns - spans[0].end_ns) / 1e9
    assert sum(one.step_s for one in variation.steps[1:]) == pytest.approx(whole_s, rel=0.02)
    path = describe_path(build_graph(timeline, report.step))
    assert path.length_s == pytest.approx(step_s)
    totals = {row.name: row.total_s for row in report.kernels.by_name.rows}
    for one in path.by_name:
        assert one.kind != "compute" or one.time_s <= totals[one.name] * 1.0001
