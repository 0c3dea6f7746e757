"""Metrics of traces: what the analyses of one rank's trace hand out, by the analysis that computes them.

The functions live with the analyses; the names, units and definitions stand here, and the tables of
docs/trace-metrics.md are made from them. Symbols are those of that page.
"""

from __future__ import annotations

from typing import NamedTuple

from stepscope.metrics.registry import Better


class TraceMetric(NamedTuple):
    names: str
    """Fields of the analysis' result; several where one definition holds for all."""
    unit: str
    """Unit of each name, where they differ; empty for what is no number."""
    definition: str
    better: Better = "neither"


TRACE_METRICS: dict[str, tuple[TraceMetric, ...]] = {
    "break_down": (
        TraceMetric("step_s", "s", "∣W∣: step time", "lower"),
        TraceMetric(
            "launch_to_completion_s",
            "s",
            "from the start of the step on the host to the end of W: longer than `step_s` where the host runs ahead",
            "lower",
        ),
        TraceMetric("host_s", "s", "length of the step's marker on the host"),
        TraceMetric("breakdown_s.compute", "s", "∣∪compute∣"),
        TraceMetric("breakdown_s.exposed_comm", "s", "∣∪communication \\ ∪compute∣", "lower"),
        TraceMetric("breakdown_s.exposed_copy", "s", "∣∪copy \\ (∪compute ∪ ∪communication)∣", "lower"),
        TraceMetric("breakdown_s.host_idle", "s", "idle, reason `host_launch`", "lower"),
        TraceMetric("breakdown_s.sync_idle", "s", "idle, reasons `sync`, `event_wait`, `collective_peer`", "lower"),
        TraceMetric("breakdown_s.other_idle", "s", "idle, reasons `stream_order`, `unknown`", "lower"),
        TraceMetric("breakdown_ns", "ns", "the same six in whole nanoseconds"),
        TraceMetric("device_busy_s", "s", "∣∪ all device rows∣"),
        TraceMetric("kernels, copies", "–", "kernels; copies and fills that the step launched on this device"),
        TraceMetric(
            "head_idle_s, between_idle_s, tail_idle_s",
            "s",
            "idle before the first work in W, between, after the last",
        ),
        TraceMetric("combinations_s", "s", "time by what ran at once, for example `compute+communication`"),
        TraceMetric("other_steps_s", "s", "busy time in which only work of other steps ran"),
        TraceMetric("overlap.communication_s", "s", "∣∪communication∣, waiting for peers inside a kernel included"),
        TraceMetric("overlap.communication_sum_s", "s", "sum of durations of communication kernels, clipped to W"),
        TraceMetric("overlap.overlapped_s", "s", "∣∪communication ∩ ∪compute∣"),
        TraceMetric("overlap.exposed_s", "s", "communication_s − overlapped_s", "lower"),
        TraceMetric("overlap.exposed_from_all_s", "s", "∣∪communication \\ (∪compute ∪ ∪copy)∣"),
        TraceMetric(
            "overlap.hidden_share",
            "–",
            "overlapped_s / communication_s; none without communication",
            "higher",
        ),
        TraceMetric("overlap.groups", "", "the same for each process group"),
    ),
    "explain_idle": (
        TraceMetric(
            "idle_s, gaps",
            "s, –",
            "sum and number of gaps; equal to the idle shares of the breakdown",
            "lower",
        ),
        TraceMetric("by_reason_s", "s", "sums of the parts"),
        TraceMetric(
            "by_operator",
            "s",
            "gaps by the host activity responsible: the innermost operator, Python frame or call on the launching"
            " thread that covers more than half of the gap; else the top-level operator that covers most of it, "
            "if more than the time between operators; else `between operators in` the annotation around",
        ),
        TraceMetric("longest", "", "the longest gaps with parts, operator, call and the work that ended them"),
    ),
    "list_kernels": (
        TraceMetric("count", "–", "device rows"),
        TraceMetric("total_s", "s", "sum of durations"),
        TraceMetric("share", "–", "total_s over the sum of all groups"),
        TraceMetric(
            "mean_s, median_s, p95_s, min_s, max_s",
            "s",
            "of the durations; percentiles linear between order statistics",
        ),
        TraceMetric("std_s", "s", "standard deviation of the sample; none for one row"),
        TraceMetric("covering", "–", "fewest groups that make up 80 % of the sum"),
    ),
    "list_kernels: beside the groups": (
        TraceMetric(
            "transfers[].bytes_per_s",
            "bytes/s",
            "Σ bytes / ∣∪ copies of this name∣, by direction and kind of memory",
            "higher",
        ),
        TraceMetric(
            "host_operators[].total_s",
            "s",
            "time inside the operator; an operator inside one of its own name is not counted again",
        ),
        TraceMetric("host_operators[].self_s", "s", "without the operators it calls"),
    ),
    "study_launches": (
        TraceMetric("call", "s", "end − start of the call", "lower"),
        TraceMetric(
            "latency",
            "s",
            "start of the work − start of the call, where everything before on the stream had ended when the call"
            " began",
            "lower",
        ),
        TraceMetric("held", "s", "the same, where a wait for an event stands before the launch", "lower"),
        TraceMetric("queueing", "s", "the same, where the stream was still busy", "lower"),
        TraceMetric("started_early", "–", "rows that start before the call returns"),
        TraceMetric("longer_than_work", "–", "calls that take longer than the sum of the work they launch"),
        TraceMetric("slow_calls, late_starts", "–", "calls above 50 µs; latencies above 100 µs", "lower"),
        TraceMetric(
            "pending",
            "–",
            "launched and not started: a step function of time; mean weighted by time, p95 (not exceeded during "
            "95 % of W), maximum",
        ),
        TraceMetric("outstanding", "–", "launched and not finished"),
        TraceMetric(
            "blocked",
            "–, s",
            "calls that take at least 10 times the median of their name while pending is at 90 % of its maximum "
            "or above and that maximum is at least 64; blocking copies left out",
        ),
    ),
    "measure_overheads": (
        TraceMetric(
            "t1",
            "s",
            "gap between two consecutive top-level operators of a thread, in one step and without a blocking call"
            " between them",
            "lower",
        ),
        TraceMetric("t2", "s", "start of the operator → start of its first launch", "lower"),
        TraceMetric("t3", "s", "end of its last launch → its end", "lower"),
        TraceMetric("t4", "s", "the launch call, by its name", "lower"),
        TraceMetric("t5", "s", "end of one launch → start of the next in the operator", "lower"),
        TraceMetric("t5_without_launch", "s", "the whole operator, where it launches nothing"),
        TraceMetric(
            "trimmed_mean_s",
            "s",
            "mean without values more than 1.5 interquartile ranges outside the quartiles",
        ),
        TraceMetric("events", "–", "operators and calls recorded inside, mean"),
    ),
    "find_sequences": (
        TraceMetric("count", "–", "how often, without overlaps"),
        TraceMetric("kernel_s", "s", "time in the kernels"),
        TraceMetric(
            "gap_s",
            "s",
            "time between the kernels on their streams in which the device was idle, each moment once: the most "
            "that fusion saves on the device",
            "lower",
        ),
        TraceMetric("launches_saved", "–", "count × (length − 1)"),
    ),
    "compare_steps": (
        TraceMetric("median_s, mean_s, std_s, min_s, max_s, p95_s", "s", "of `step_s` over the judged steps"),
        TraceMetric("variation", "–", "std_s / mean_s", "lower"),
        TraceMetric("median_period_s", "s", "median time from the start of a step to the start of the next"),
        TraceMetric("slow_steps", "–", "above 1.05 × median", "lower"),
        TraceMetric("shares[].variance_share", "–", "cov(share, step) / var(step); adds up to 1"),
        TraceMetric(
            "shares[].slow_excess_s",
            "s",
            "mean over slow steps − mean over the others; adds up to the difference of their means",
        ),
        TraceMetric("explained_by", "–", "the share with the largest slow_excess_s"),
    ),
    "trace_memory": (
        TraceMetric(
            "peak_bytes",
            "bytes",
            "largest value of bytes allocated in W; `peak_reserved_bytes`: of bytes the allocator held",
            "lower",
        ),
        TraceMetric(
            "at_peak",
            "bytes",
            "allocations held at the peak by innermost operator on the allocating thread; what is older than the "
            "trace stands apart",
        ),
        TraceMetric("kept", "bytes", "allocated in W and not given back in it"),
        TraceMetric("allocated_bytes, freed_bytes", "bytes", "sums in W"),
        TraceMetric("timeline", "bytes", "at most 2,000 points; each stretch keeps its highest"),
    ),
}
"""In the order of the page; a second table of an analysis says what it is about behind a colon."""
