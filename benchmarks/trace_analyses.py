"""How fast a trace is analysed, against Holistic Trace Analysis (PyPI `traceinsight`) in the same run.

    python benchmarks/trace_analyses.py [--trace nccl_data.json.gz] [--copies 4 16] [--peer /path/to/venv/bin/python]

Repeats a real trace with shifted times and ids (`enlarge` of trace_load.py), loads it with both, and times each
analysis of the peer's name after loading: fresh processes, in turns, CPU seconds, medians. Ours is timed twice, as the
first question to a fresh timeline (nothing worked out yet) and as the second one. Both sides have answered every short
question once for a smaller trace before, so no imports and no compiling are in the numbers.

Kernel sequences are asked for a second trace as well, since the peer cannot order the events of the first.

Then an execution trace and its Kineto trace are repeated to about 57 thousand nodes, linked and converted to Chakra.
The peer is a Python that has `traceinsight` installed; Chakra's own tools are not on PyPI and are not run.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from trace_load import enlarge

LONG = ("operators and their kernels", "trace diff with itself", "call graph", "critical path of a step", "overlay")
"""Analyses for which the peer takes seconds: asked once a process, and not on the small trace before."""

QUESTIONS = (
    ("temporal breakdown", "get_temporal_breakdown", "break_down"),
    ("kernel breakdown", "get_gpu_kernel_breakdown", "kernel_times"),
    ("kernel breakdown, all groups", "get_gpu_kernel_breakdown", "list_kernels"),
    ("overlap", "get_comm_comp_overlap", "measure_overlap"),
    ("idle time by cause", "get_idle_time_breakdown", "idle_by_cause"),
    ("idle time, with who was responsible", "get_idle_time_breakdown", "explain_idle"),
    ("launch statistics", "get_cuda_kernel_launch_stats", "launch_statistics"),
    ("queue length, series and summary", "get_queue_length_time_series, …_summary_from_time_series", "queue_depths"),
    ("launches and queue", "both of the above", "study_launches"),
    ("memory bandwidth, series and summary", "get_memory_bw_time_series, get_memory_bw_summary", "list_transfers"),
    ("user annotations", "get_gpu_user_annotation_breakdown", "time_annotations"),
    ("kernels with their annotation", "get_gpu_kernels_with_user_annotations", "list_kernels"),
    ("operators and their kernels", "get_aten_op_kernels_and_delay", "list_kernels, measure_overheads"),
    ("frequent kernel sequences", "get_frequent_cuda_kernel_sequences", "find_sequences"),
    ("call graph", "CallGraph (call_stack)", "finish: parents, steps and classes of all rows"),
    ("trace diff with itself", "TraceDiff.compare_traces", "diff_traces"),
    ("critical path of a step", "critical_path_analysis", "critical_path"),
    ("what-if recompute", "CPGraph.critical_path", "apply_edits"),
    ("what-if, both paths described", "CPGraph.critical_path", "what_if"),
    ("overlay", "overlay_critical_path_analysis", "path_events, write_chrome"),
)

OURS = """
import json, sys, tempfile, time
import numba  # as the compiled reader of a large trace would have loaded it
from pathlib import Path
from stepscope.analyze.step.breakdown import break_down, measure_overlap
from stepscope.analyze.critical.model import build_graph
from stepscope.analyze.critical.path import critical_path, describe_path, path_events
from stepscope.analyze.critical.what_if import apply_edits, parse_what_if, what_if
from stepscope.analyze.diff.compare import diff_traces
from stepscope.analyze.step.idle import explain_idle, idle_by_cause
from stepscope.analyze.step.kernels import kernel_times, list_kernels, list_transfers, time_annotations
from stepscope.analyze.step.launches import launch_statistics, queue_depths, study_launches
from stepscope.analyze.step.overheads import measure_overheads
from stepscope.analyze.step.sequences import find_sequences
from stepscope.traces.finish import finish
from stepscope.traces.read import load_timeline
from stepscope.formats.chrome import write_chrome

folder = Path(tempfile.mkdtemp(dir=sys.argv[3]))

def middle(timeline):
    return timeline.steps[1].number

def write(timeline, given):
    given.mkdir()
    write_chrome([timeline], given / "overlay.json.gz", extra=path_events(describe_path(timeline.asked)))

def prepared(timeline):
    object.__setattr__(timeline, "asked", build_graph(timeline, middle(timeline)))

def all_of(function):
    return lambda timeline, _: function(timeline, None)

questions = {
    "temporal breakdown": all_of(break_down),
    "kernel breakdown": all_of(kernel_times),
    "kernel breakdown, all groups": all_of(list_kernels),
    "overlap": all_of(measure_overlap),
    "idle time by cause": all_of(idle_by_cause),
    "idle time, with who was responsible": all_of(explain_idle),
    "launch statistics": all_of(launch_statistics),
    "queue length, series and summary": all_of(queue_depths),
    "launches and queue": all_of(study_launches),
    "memory bandwidth, series and summary": all_of(list_transfers),
    "user annotations": all_of(time_annotations),
    "kernels with their annotation": all_of(list_kernels),
    "operators and their kernels": lambda t, _: (list_kernels(t, None), measure_overheads(t, None)),
    "frequent kernel sequences": all_of(find_sequences),
    "call graph": lambda t, _: finish(t),
    "trace diff with itself": lambda t, _: diff_traces(t, t),
    "critical path of a step": lambda t, _: critical_path(t, middle(t)),
    "what-if recompute": lambda t, _: apply_edits(t.asked, parse_what_if("kernels=0.5")),
    "what-if, both paths described": lambda t, _: what_if(t.asked, "kernels=0.5"),
    "overlay": write,
}
found = {}
for path, counts in ((sys.argv[2], False), (sys.argv[1], True)):
    for number, (name, ask) in enumerate(questions.items()):
        timeline = load_timeline(path)
        if name.startswith("what-if") or name == "overlay":
            prepared(timeline)
        spent = []
        for turn in range(2):
            cpu = time.process_time()
            ask(timeline, folder / f"{counts}-{number}-{turn}")
            spent.append(time.process_time() - cpu)
        if counts:
            found[name] = spent
print(json.dumps({"rows": len(timeline), "steps": len(timeline.steps), "spent": found}))
"""

PEER = """
import json, logging, sys, tempfile, time, warnings
logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")
from hta.common.call_stack import CallGraph
from hta.trace_analysis import TraceAnalysis
from hta.trace_diff import TraceDiff

folder = tempfile.mkdtemp(dir=sys.argv[3])
long, with_long = sys.argv[4].split("|"), sys.argv[5] == "long"

def questions(analysis):
    kept = {}
    def path():
        kept["graph"] = analysis.critical_path_analysis(0, "ProfilerStep", 1)[0]
    def queue():
        analysis.get_queue_length_summary_from_time_series(analysis.get_queue_length_time_series())
    def bandwidth():
        analysis.get_memory_bw_time_series()
        analysis.get_memory_bw_summary()
    launches = lambda: analysis.get_cuda_kernel_launch_stats(visualize=False)
    return {
        "temporal breakdown": lambda: analysis.get_temporal_breakdown(visualize=False),
        "kernel breakdown": lambda: analysis.get_gpu_kernel_breakdown(visualize=False),
        "overlap": lambda: analysis.get_comm_comp_overlap(visualize=False),
        "idle time by cause": lambda: analysis.get_idle_time_breakdown(ranks=[0], visualize=False),
        "launch statistics": launches,
        "queue length, series and summary": queue,
        "launches and queue": lambda: (launches(), queue()),
        "memory bandwidth, series and summary": bandwidth,
        "user annotations": lambda: analysis.get_gpu_user_annotation_breakdown(visualize=False),
        "kernels with their annotation": lambda: analysis.get_gpu_kernels_with_user_annotations(0),
        "frequent kernel sequences": lambda: analysis.get_frequent_cuda_kernel_sequences(
            "aten::batch_norm", folder, min_pattern_len=2, top_k=20),
        "call graph": lambda: CallGraph(analysis.t),
        "critical path of a step": path,
        "what-if recompute": lambda: kept["graph"].critical_path(),
        "overlay": lambda: analysis.overlay_critical_path_analysis(
            0, kept["graph"], folder, only_show_critical_events=False),
        "trace diff with itself": lambda: TraceDiff.compare_traces(analysis.t, analysis.t),
        "operators and their kernels": lambda: analysis.get_aten_op_kernels_and_delay(),
    }

found = {}
for path, counts in ((sys.argv[2], False), (sys.argv[1], True)):
    analysis = TraceAnalysis(trace_files={0: path}, trace_dir=folder)
    for name, ask in questions(analysis).items():
        late = name in long or name == "what-if recompute"
        if late and not (counts and with_long):
            continue
        spent = []
        for turn in range(1 if late else 2):
            cpu = time.process_time()
            try:
                ask()
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"[:120]
                break
            spent.append(time.process_time() - cpu)
        else:
            if counts:
                found[name] = spent
print(json.dumps({"rows": len(analysis.t.get_trace(0)), "spent": found}))
"""

OUR_SEQUENCES = """
import json, sys, time
from stepscope.analyze.step.sequences import find_sequences
from stepscope.traces.read import load_timeline
find_sequences(load_timeline(sys.argv[1]), None)
timeline = load_timeline(sys.argv[1])
cpu = time.process_time()
found = find_sequences(timeline, None)
print(json.dumps({"rows": len(timeline), "cpu_s": time.process_time() - cpu}))
"""

PEER_SEQUENCES = """
import json, logging, sys, time, warnings
logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir=sys.argv[2])
cpu = time.process_time()
analysis.get_frequent_cuda_kernel_sequences("aten::linear", sys.argv[2], min_pattern_len=2, top_k=20)
print(json.dumps({"rows": len(analysis.t.get_trace(0)), "cpu_s": time.process_time() - cpu}))
"""

LINKING = """
import json, sys, time
from pathlib import Path
from stepscope.traces.chakra_convert import convert
from stepscope.formats.execution_trace import read_execution_trace
from stepscope.traces.link import link
from stepscope.traces.read import read_timeline
spent = {}
for traces in (sys.argv[4:6], sys.argv[1:3]):
    cpu = time.process_time()
    graph, timeline = read_execution_trace(Path(traces[0])), read_timeline(Path(traces[1]))
    spent["read both"], cpu = time.process_time() - cpu, time.process_time()
    joined = link(graph, timeline)
    spent["link"], cpu = time.process_time() - cpu, time.process_time()
    conversion = convert(timeline, link=joined)
    conversion.write(Path(sys.argv[3]))
    spent["convert and write"] = time.process_time() - cpu
print(json.dumps({"nodes": len(graph.nodes), "rows": len(timeline), "chakra": conversion.node_count, "spent": spent}))
"""


def run(python: str, code: str, *arguments: str) -> dict[str, object]:
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, "-c", code, *arguments], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        sys.exit(f"{python} failed:\n{done.stderr[-3000:]}")
    answer: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def middle(answers: list[dict], name: str, turn: int) -> float | str | None:
    """The median over processes of the first or second time a question was asked; a text where it failed."""
    found = [answer["spent"][name] for answer in answers if name in answer["spent"]]
    failed = [one for one in found if isinstance(one, str)]
    if failed or not found:
        return failed[0] if failed else None
    return statistics.median(one[min(turn, len(one) - 1)] for one in found)


PEER_NAME = {
    "kernel breakdown, all groups": "kernel breakdown",
    "idle time, with who was responsible": "idle time by cause",
    "what-if, both paths described": "what-if recompute",
}
"""Where the peer has one analysis for two of ours."""


def show(ours: list[dict], peers: list[dict]) -> None:
    rows = f"{ours[0]['rows']:,} rows and {ours[0]['steps']} steps here"
    rows += f", {peers[0]['rows']:,} rows there" if peers else ""
    print(f"\n{rows}; CPU ms, medians of {len(ours)} processes\n")
    print("| analysis | peer | ours first | ours again | peer / first | peer again / again | asked here |")
    print("|---|---|---|---|---|---|---|")
    for name, _, asked in QUESTIONS:
        first, again = middle(ours, name, 0), middle(ours, name, 1)
        theirs = [middle(peers, PEER_NAME.get(name, name), turn) for turn in range(2)]
        ratios = [
            f"{there / here:.1f}" if isinstance(there, float) else "–"
            for there, here in zip(theirs, (first, again), strict=True)
        ]
        peer = (
            f"{theirs[0] * 1e3:.1f}" if isinstance(theirs[0], float) else f"fails ({theirs[0]})" if theirs[0] else "–"
        )
        print(f"| {name} | {peer} | {first * 1e3:.2f} | {again * 1e3:.2f} | {ratios[0]} | {ratios[1]} | `{asked}` |")
    sys.stdout.flush()


def compare(options: argparse.Namespace, folder: Path) -> None:
    small = folder / "small.json.gz"
    enlarge(options.trace, small, 30, all_steps=True)
    for copies in options.copies:
        large = folder / f"large-{copies}.json.gz"
        if not large.exists():
            made, raw = enlarge(options.trace, large, copies * 10, all_steps=True)
            print(f"{made} copies of {options.trace.name}, {raw / 1e6:.0f} MB raw")
        ours, peers = [], []
        places = [str(large), str(small), str(folder)]
        run(sys.executable, OURS, *places)  # writes the cache and compiles
        for turn in range(options.repeat):
            ours.append(run(sys.executable, OURS, *places))
            if options.peer:
                kind = "long" if turn < options.long_repeat else "short"
                peers.append(run(options.peer, PEER, *places, "|".join(LONG), kind))
        show(ours, peers)


def compare_sequences(options: argparse.Namespace, folder: Path) -> None:
    """The peer's answer is for one operator and includes writing a trace; ours is for all of them."""
    arguments = [str(options.sequences), str(folder)]
    ours = [run(sys.executable, OUR_SEQUENCES, *arguments) for _ in range(options.repeat)]
    here = statistics.median(answer["cpu_s"] for answer in ours)
    asked = f"frequent kernel sequences of {options.sequences.name}, {ours[0]['rows']:,} rows"
    print(f"\n{asked}: ours {here * 1e3:.2f} ms CPU")
    if options.peer:
        there = run(options.peer, PEER_SEQUENCES, *arguments)["cpu_s"]
        print(f"peer {there * 1e3:.0f} ms CPU: {there / here:.0f} times ours")


def repeat_execution_trace(source: Path, out: Path, copies: int, nodes_only: int) -> None:
    """The nodes again and again, with ids and record function ids of their own; all hang on the one root."""
    document = json.loads(gzip.decompress(source.read_bytes()))
    nodes = document["nodes"]
    root = min(node["id"] for node in nodes)
    largest = max(node["id"] for node in nodes)
    repeated = [node for node in nodes if node["id"] == root]
    for copy in range(copies):
        for node in nodes:
            if node["id"] != root:
                repeated.append(_shifted(node, root, copy * largest, copy * nodes_only))
    document["nodes"] = repeated
    out.write_bytes(gzip.compress(json.dumps(document).encode(), 1))


def _shifted(node: dict, root: int, by: int, record_by: int) -> dict:
    """A node of a later copy; ids in its tensors stay: copies use the same storage, as steps do."""
    shifted = {**node, "id": node["id"] + by}
    if node["ctrl_deps"] > root:
        shifted["ctrl_deps"] = node["ctrl_deps"] + by
    shifted["attrs"] = [
        {**one, "value": one["value"] + record_by} if one["name"] == "rf_id" and one["value"] else one
        for one in node.get("attrs", [])
    ]
    return shifted


def link_and_convert(options: argparse.Namespace, folder: Path) -> None:
    kineto = gzip.decompress((options.pair / "kineto.json.gz").read_bytes())
    nodes = len(json.loads(gzip.decompress((options.pair / "et.json.gz").read_bytes()))["nodes"])
    copies = max(1, round(options.nodes / nodes))
    names = [folder / "et.json.gz", folder / "kineto.json.gz"]
    megabytes = -(-copies * len(kineto) // 1_000_000)
    made, _ = enlarge(options.pair / "kineto.json.gz", names[1], megabytes, all_steps=True)
    repeat_execution_trace(options.pair / "et.json.gz", names[0], made, _shift_of_ids(kineto))
    pair = [str(options.pair / name) for name in ("et.json.gz", "kineto.json.gz")]
    answers = [
        run(sys.executable, LINKING, *map(str, names), str(folder / "chakra.et"), *pair) for _ in range(options.repeat)
    ]
    one = answers[0]
    sizes = f"execution trace of {one['nodes']:,} nodes, Kineto trace of {one['rows']:,} rows"
    print(f"\n{sizes}, {one['chakra']:,} Chakra nodes; medians of {len(answers)} processes")
    for name in one["spent"]:
        print(f"{name:20} {statistics.median(answer['spent'][name] for answer in answers):7.2f} s CPU")
    print("Chakra's own tools, not run here, from an earlier note that was not checked: link 38 s, convert 12 s CPU")


def _shift_of_ids(kineto: bytes) -> int:
    """By what `enlarge` moves ids from copy to copy."""
    from trace_load import NUMBERS

    found = (one for one in NUMBERS.finditer(kineto) if one[1] is not None and one[0][:5] != b'"ts":')
    return max(int(float(one[1])) for one in found) + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    traces = Path(__file__).parents[1].parent / "shared/data/traces"
    parser.add_argument("--trace", type=Path, default=traces / "public/hta/nccl_parser_config/nccl_data.json.gz")
    parser.add_argument("--sequences", type=Path, default=traces / "public/param/linear_kineto.json.gz")
    parser.add_argument("--pair", type=Path, default=traces / "h200/gpt2_bf16_b8_s1024")
    parser.add_argument("--copies", type=int, nargs="*", default=[4, 16])
    parser.add_argument("--nodes", type=int, default=57_000)
    parser.add_argument("--peer", default=os.environ.get("STEPSCOPE_PEER_PYTHON"))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--long-repeat", type=int, default=1, help="how often the peer's slow analyses are asked")
    parser.add_argument("--keep", type=Path, help="make the large traces here and keep them")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="stepscope-trace-analyses-"))
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("STEPSCOPE_TRACE_CACHE", str(folder / "cache"))
    try:
        compare(options, folder)
        if options.copies:
            compare_sequences(options, folder)
        if options.nodes:
            link_and_convert(options, folder)
    finally:
        if options.keep is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
