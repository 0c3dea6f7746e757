"""Chakra files with times as timelines: both forms, own and others' files, damage."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepscope.core.errors import BadInputError
from stepscope.formats.chakra import (
    COLLECTIVE,
    MEMORY_LOAD,
    SEND,
    ChakraNode,
    ChakraTrace,
    messages,
    read_chakra,
    write_chakra,
)
from stepscope.formats.execution_trace import read_execution_trace
from stepscope.formats.timeline import (
    ANNOTATION,
    COPY,
    DEVICE_KINDS,
    KERNEL,
    OPERATOR,
    RUNTIME,
    Timeline,
    TimelineBuilder,
)
from stepscope.traces.chakra_convert import convert
from stepscope.traces.finish import finish
from stepscope.traces.link import link
from stepscope.traces.read import read_timeline, read_traces

PAIR = Path(__file__).parent / "data" / "h200_dlrm_8t"
EVENTS = (OPERATOR, RUNTIME, ANNOTATION, *DEVICE_KINDS)
FORMS = ("et", "et.gz", "list", "row", "row.gz", "snake")


def write_form(trace: ChakraTrace, folder: Path, form: str) -> Path:
    """The same messages in each of the forms in which Chakra's tools write them."""
    from google.protobuf.json_format import MessageToDict

    path = folder / ("rank7.et" if form.startswith("et") else "rank7.json")
    write_chakra(folder / "plain.et", trace)
    data = (folder / "plain.et").read_bytes()
    if not form.startswith("et"):
        from stepscope.formats.chakra import _frames
        from stepscope.formats.source import Source

        frames = _frames(Source(folder / "plain.et"), [])
        made = [messages().metadata.FromString(next(frames)[1])]
        made += [messages().node.FromString(frame) for _, frame in frames]
        objects = [MessageToDict(one, preserving_proto_field_name=form == "snake") for one in made]
        text = json.dumps(objects) if form != "row" else "".join(json.dumps(one, indent=2) for one in objects)
        data = text.encode()
    (folder / "plain.et").unlink()
    path.write_bytes(gzip.compress(data) if form.endswith(".gz") else data)
    return path


def events(timeline: Timeline) -> list[tuple[Any, ...]]:
    """What must survive: time, kind, name, stream, launch, step; in order of time."""
    core = timeline.core
    rows = np.flatnonzero(np.isin(core["kind"], EVENTS))
    launch = np.where(np.isin(core["kind"], DEVICE_KINDS) & (core["parent"] >= 0), core["start_ns"][core["parent"]], -1)
    columns = ("start_ns", "end_ns", "kind", "device", "stream", "category", "step")
    return sorted(
        (*(int(core[name][row]) for name in columns), timeline.texts[core["name"][row]], int(launch[row]))
        for row in rows.tolist()
    )


@pytest.mark.parametrize(
    ("form", "linked"), [("et", False), ("et", True), ("et.gz", False), ("list", True), ("row.gz", False)]
)
def test_an_own_file_gives_back_its_events(tmp_path: Path, form: str, *, linked: bool) -> None:
    original = read_timeline(PAIR / "kineto.json.gz")
    joined = link(read_execution_trace(PAIR / "et.json.gz"), original) if linked else None
    again = read_timeline(write_form(convert(original, link=joined).trace(), tmp_path, form))
    assert events(again) == events(original)
    assert [tuple(step) for step in again.steps] == [tuple(step) for step in original.steps]
    assert (again.metadata["format"], dict(again.repairs)) == ("chakra", {})
    assert again.metadata["devices"] == original.metadata["devices"]
    if linked:
        shapes = [(timeline.column("shapes") >= 0).sum() for timeline in (original, again)]
        assert shapes[1] >= shapes[0] > 0


def made_by_others() -> ChakraTrace:
    """Nodes as another converter writes them: whole microseconds, launches by dependency, nothing of its own."""
    host = {"is_cpu_op": True, "tid": 4}
    device = {"is_cpu_op": False, "stream": 7}
    moved = {**device, "comm_type": 0, "comm_size": 4096, "pg_name": "dp"}
    return ChakraTrace(
        nodes=[
            ChakraNode(id=1, name="[pytorch|profiler|execution_trace|process]", type=1),
            ChakraNode(id=2, name="ProfilerStep#5", start_us=100, duration_us=900, attributes=host),
            ChakraNode(id=3, name="aten::mm", start_us=110, duration_us=50, attributes=host, ctrl_deps=(2,)),
            ChakraNode(id=4, name="cudaLaunchKernel", start_us=120, duration_us=10, attributes=host, ctrl_deps=(3,)),
            ChakraNode(id=5, name="sm80_gemm", start_us=140, duration_us=300, attributes=device, data_deps=(4,)),
            ChakraNode(id=6, name="weights", type=MEMORY_LOAD, start_us=500, duration_us=20, attributes=device),
            ChakraNode(id=7, name="reduce", type=COLLECTIVE, start_us=600, duration_us=100, attributes=moved),
            ChakraNode(
                id=8, name="out", type=SEND, start_us=800, duration_us=9, attributes={"comm_dst": 3, "comm_size": 8}
            ),
        ]
    )


@pytest.mark.parametrize("form", FORMS)
def test_files_of_other_writers(tmp_path: Path, form: str) -> None:
    found = read_timeline(write_form(made_by_others(), tmp_path, form))
    kinds = found.core["kind"].tolist()
    assert kinds == [ANNOTATION, OPERATOR, RUNTIME, KERNEL, COPY, KERNEL, KERNEL]
    assert found.rank == 7  # from the name
    assert [step.number for step in found.steps] == [5]
    assert found.core["parent"].tolist()[3] == 2
    assert found.repairs == {"nodes without a usable time were left out": 1}
    reduced, sent = 5, 6
    assert (found.text("collective", reduced), found.at("in_elements", reduced)) == ("all_reduce", 4096)
    assert (found.text("group", reduced), found.text("dtype", reduced)) == ("dp", "uint8")
    assert (found.text("collective", sent), found.at("peer", sent)) == ("send", 3)


@pytest.mark.parametrize("form", FORMS)
def test_a_file_without_times_is_a_graph(tmp_path: Path, form: str) -> None:
    nodes = [ChakraNode(id=1, name="a"), ChakraNode(id=2, name="b", data_deps=(1,), attributes={"is_cpu_op": False})]
    path = write_form(ChakraTrace(nodes=nodes), tmp_path, form)
    with pytest.raises(BadInputError, match="graph of operators without times"):
        read_timeline(path)


@pytest.mark.parametrize(
    "attributes",
    [
        {"start_ns": "soon", "duration_ns": 2.5},
        {"start_ns": -5},
        {"start_ns": (1 << 63) - 1},
        {"call_duration_ns": -1, "tid": "x", "stream": -9, "device": (1 << 63) - 1},
        {"category": "nonsense", "kind": 7, "comm_type": 99, "correlation": 1.5},
    ],
)
def test_odd_attributes_do_not_stop_it(tmp_path: Path, attributes: dict[str, Any]) -> None:
    for on_host in (True, False):
        odd = {"is_cpu_op": on_host, **attributes}
        nodes = [
            ChakraNode(id=1, name="aten::mm", start_us=5, duration_us=3),
            ChakraNode(id=2, name="odd", type=COLLECTIVE, start_us=6, duration_us=1, attributes=odd),
            ChakraNode(id=3, name="huge", start_us=(1 << 64) - 1, duration_us=(1 << 64) - 1),
        ]
        write_chakra(tmp_path / "odd.et", ChakraTrace(attributes={"process_groups": "{["}, nodes=nodes))
        found = read_timeline(tmp_path / "odd.et")
        assert "aten::mm" in {found.texts[code] for code in found.core["name"]}
        assert found.repairs["nodes without a usable time were left out"] >= 1


@pytest.mark.parametrize("form", FORMS)
def test_cut_and_flipped_files(tmp_path: Path, form: str) -> None:
    """Either a timeline with what was lost told, or one message that names the file."""
    path = write_form(made_by_others(), tmp_path, form)
    whole = path.read_bytes()
    changed = [whole[: len(whole) * part // 16] for part in range(1, 16)]
    generator = np.random.default_rng(3)
    for _ in range(60):
        flipped = bytearray(whole)
        flipped[int(generator.integers(len(whole)))] ^= 1 << int(generator.integers(8))
        changed.append(bytes(flipped))
    kept, refused = 0, []
    for data in changed:
        path.write_bytes(data)
        try:
            kept += len(read_timeline(path)) > 0
        except BadInputError as error:
            refused.append(error.where or "")
    assert kept > 5
    assert all(str(path) in where for where in refused)
    path.write_bytes(whole[: len(whole) * 15 // 16])
    if not form.endswith("gz"):
        assert any("are kept" in what for what in read_timeline(path).repairs)


def test_folders_of_ranks(tmp_path: Path) -> None:
    for rank in range(3):
        builder = TimelineBuilder()
        builder.add(OPERATOR, "aten::mm", 1000 * rank, 5000, thread=(1, 1))
        convert(finish(builder.build(rank=rank))).write(tmp_path / f"rank-{rank}.et")
    found = read_traces(tmp_path, cache=False)
    assert list(found.ranks) == [0, 1, 2]
    assert [int(timeline.core["start_ns"][0]) for timeline in found] == [0, 1000, 2000]
    # Beside other traces they are conversions of them.
    (tmp_path / "trace.json.gz").write_bytes((PAIR / "kineto.json.gz").read_bytes())
    assert [path.name for path in read_traces(tmp_path, cache=False).paths] == ["trace.json.gz"]


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({}, (None, None, None)),
        ({"comm_size": 64}, ("uint8", 64, None)),
        ({"comm_size": 64, "comm_dtype": "float32"}, ("float32", 16, None)),
        ({"comm_size": 64, "comm_out_size": 128, "comm_dtype": "bfloat16"}, ("bfloat16", 32, 64)),
        ({"comm_size": 64, "comm_dtype": "unheard of"}, ("uint8", 64, None)),
    ],
)
def test_sizes_of_collectives(
    tmp_path: Path, attributes: dict[str, Any], expected: tuple[str | None, int | None, int | None]
) -> None:
    said = {"is_cpu_op": False, "comm_type": 2, **attributes}
    node = ChakraNode(id=1, name="gather", type=COLLECTIVE, start_us=1, duration_us=2, attributes=said)
    write_chakra(tmp_path / "x.et", ChakraTrace(nodes=[node]))
    found = read_timeline(tmp_path / "x.et")
    assert found.text("collective", 0) == "all_gather"
    assert (found.text("dtype", 0), found.at("in_elements", 0), found.at("out_elements", 0)) == expected


def test_clocks_before_zero_come_back(tmp_path: Path) -> None:
    builder = TimelineBuilder()
    builder.add(OPERATOR, "aten::mm", -5000, -1000, thread=(1, 1))
    convert(finish(builder.build())).write(tmp_path / "x.et")
    assert read_chakra(tmp_path / "x.et").nodes[1].start_ns == 0
    assert int(read_timeline(tmp_path / "x.et").core["start_ns"][0]) == -5000
