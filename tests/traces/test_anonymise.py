"""Traces to be shared: no original word is left, equal words stay equal, and times and structure are untouched."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from same_timeline import GPT2, NCCL, SAMPLED, assert_same, dlrm_ranks, real_trace, values

from stepscope.core.errors import UsageError
from stepscope.formats.chrome import write_chrome
from stepscope.formats.classify import CATEGORIES, classify_names
from stepscope.formats.timeline import (
    ANNOTATION,
    COUNTER,
    DEVICE_ANNOTATION,
    INSTANT,
    KERNEL,
    MEMORY,
    OPERATOR,
    OTHER,
    OVERHEAD,
    PYTHON,
    RUNTIME,
    Timeline,
    TimelineBuilder,
)
from stepscope.traces.anonymise import _KERNEL_STEMS, Anonymised, anonymise, describe_report
from stepscope.traces.finish import finish
from stepscope.traces.read import read_timeline
from stepscope.traces.table import write_csv

KEY = b"0123456789abcdef"
SECRET = "zebra"
"""In every text that must not survive."""


def full_of_secrets() -> Timeline:
    builder = TimelineBuilder()
    main, queue = ("4711", "4711"), {"device": 0, "stream": 7}
    builder.name_thread("4711", "4711", "thread 4711 (zebra_main)")
    builder.name_thread("4711", "4712", "thread 4712 (pt_autograd_0)")
    t = 1_790_857_026_000_000_000
    builder.add(ANNOTATION, "ProfilerStep#3", t, t + 900, thread=main)
    builder.add(ANNOTATION, "## zebra forward ##", t + 1, t + 800, thread=main)
    builder.add(DEVICE_ANNOTATION, "## zebra forward ##", t + 1, t + 800, **queue)
    builder.add(ANNOTATION, "Optimizer.step#ZebraOptimizer.step", t + 801, t + 850, thread=main)
    builder.add(PYTHON, "/home/zebra/model.py(12): forward", t + 2, t + 700, thread=main, arguments='{"Python id": 3}')
    builder.add(PYTHON, "nn.Module: ZebraBlock_0", t + 3, t + 600, thread=main)
    builder.add(
        OPERATOR, "aten::linear", t + 5, t + 500, thread=main,
        shapes="[[2, 3], []]", types='["float", "ZebraTensor"]', values='["", "zebra", "[0, 1]", "1e-5"]',
        arguments='{"Call stack": "zebra.py;x", "Sequence number": 9, "zebra": 4, "Op count": 2, "deep": {"zebra": 1}}',
    )  # fmt: skip
    builder.add(OPERATOR, "zebra_ops::fused_secret", t + 6, t + 400, thread=main)
    builder.add(
        OPERATOR, "autograd::engine::evaluate_function: ZebraBackward", t + 510, t + 520, thread=("4711", "4712")
    )
    builder.add(RUNTIME, "cudaLaunchKernel", t + 7, t + 8, thread=main, correlation=1)
    builder.add(RUNTIME, "zebraLaunch", t + 9, t + 10, thread=main)
    builder.add(
        KERNEL, "sm90_xmma_gemm", t + 20, t + 90, correlation=1, collective="zebra_reduce", group="zebra_group",
        group_description="zebra tensor parallel", group_ranks="[0, 1]", dtype="Zebra", grid="[1, 2, 3]", **queue,
    )  # fmt: skip
    builder.add(OVERHEAD, "zebra overhead", t + 100, t + 101, thread=main)
    builder.add(INSTANT, "zebra instant", t + 100, t + 100, thread=main)
    builder.add(COUNTER, "zebra counter", t + 100, t + 100, thread=main, value=4.0)
    builder.add(OTHER, "zebra other", t + 100, t + 101, thread=("zebra process", "zebra thread"))
    builder.add(MEMORY, "[memory]", t + 100, t + 100, thread=main, address=0xDEADBEEF, bytes=512)
    metadata = {
        "format": "kineto",
        "source": "/home/zebra/rank0.json",
        "host": "zebra-node-17",
        "devices": [{"id": 0, "name": "NVIDIA H200", "uuid": "zebra", "numSms": 132}],
        "versions": {"schemaVersion": 1, "build": "zebra"},
        "distributed": {
            "backend": "nccl",
            "rank": 0,
            "world_size": 2,
            "master": "zebra-node-1",
            "pg_config": [{"pg_name": "0", "pg_desc": "zebra tp", "pg_size": 2, "ranks": [0, 1], "extra": "zebra"}],
        },
    }
    trace = finish(builder.build(rank=0, world_size=2, metadata=metadata), step_marker="## zebra forward ##")
    return replace(trace, repairs={"zebra was repaired": 1})


def everything_written(hidden: Anonymised, folder: Path) -> str:
    write_chrome(hidden.timelines, folder / "out.json")
    write_csv(hidden.timelines, folder / "out.csv")
    said = [json.dumps(dict(timeline.metadata)) + timeline.step_marker for timeline in hidden.timelines]
    texts = [text for timeline in hidden.timelines for text in timeline.texts]
    parts = [(folder / name).read_text(encoding="utf-8") for name in ("out.json", "out.csv")]
    return "\n".join([*parts, *said, *texts, describe_report(hidden.report)])


def test_no_original_word_survives(tmp_path: Path) -> None:
    trace = full_of_secrets()
    text = everything_written(anonymise(trace), tmp_path)
    assert SECRET not in text.lower()
    for word in ("4711", "deadbeef", str(0xDEADBEEF), "1790857026"):
        assert word not in text, word
    for word in (
        "aten::linear",
        "sm90_xmma_gemm",
        "cudaLaunchKernel",
        "ProfilerStep#3",
        "NVIDIA H200",
        "pt_autograd_0",
    ):
        assert word in text, word
    assert "autograd::engine::evaluate_function: operator_" in text


def test_what_was_done_is_reported_without_naming_it() -> None:
    hidden = anonymise(full_of_secrets())
    report = hidden.report
    assert report.replaced["annotation"] == 2
    assert report.replaced["python"] == 2
    assert report.replaced["operator"] == 2
    assert report.replaced["group description"] == 2
    assert report.kept["kernel"] == 1
    assert report.removed_metadata == ["distributed.master", "host", "repairs", "source"]
    assert hidden.names["## zebra forward ##"].startswith("annotation_")
    said = describe_report(report)
    assert "annotation: 2" in said
    assert "Names of kernels stay" in said
    assert SECRET not in said


def test_times_and_structure_stay() -> None:
    trace = full_of_secrets()
    (hidden,) = anonymise(trace, keep_times=True).timelines
    changed = ("name", "thread", "types", "values", "arguments", "collective", "group", "group_description", "dtype")
    assert_same(replace(trace, step_marker=hidden.step_marker), hidden, but=(*changed, "address"))
    (shifted,) = anonymise(trace).timelines
    assert shifted.core["start_ns"].min() == 0
    assert (np.diff(shifted.core["start_ns"]) == np.diff(trace.core["start_ns"])).all()
    assert shifted.steps[0].start_ns == trace.steps[0].start_ns - int(trace.core["start_ns"].min())
    assert hidden.threads[0].process == hidden.threads[0].thread, "the main thread is still known as such"


def test_host_and_device_annotations_still_belong_together() -> None:
    (hidden,) = anonymise(full_of_secrets()).timelines
    names = values(hidden, "name")
    assert names[1] == names[2]
    assert hidden.step_marker == f"annotation {names[1]}"


def test_one_key_gives_the_same_words_in_every_trace() -> None:
    one = anonymise(full_of_secrets(), key=KEY)
    two = anonymise(real_trace(NCCL), key=KEY)
    again = anonymise([full_of_secrets(), real_trace(NCCL)], key=KEY)
    assert again.names == {**one.names, **two.names}
    assert anonymise(full_of_secrets()).names != one.names, "without a key nobody can guess words and compare"
    with pytest.raises(UsageError, match="can be guessed"):
        anonymise(full_of_secrets(), key=b"short")


def test_more_can_be_replaced(tmp_path: Path) -> None:
    trace = real_trace(GPT2)
    hidden = anonymise(trace, kernels=True, operators=True, shapes=True)
    text = everything_written(hidden, tmp_path)
    kinds = trace.core["kind"]
    for kind in (KERNEL, OPERATOR):
        for code in np.unique(trace.core["name"][kinds == kind]).tolist():
            assert trace.texts[code] not in text
    assert "Input Dims" not in text
    assert hidden.report.notes == []
    back = read_timeline(tmp_path / "out.json")
    assert back.core["category"].tolist() == trace.core["category"].tolist(), "kernels are still known for what they do"


@pytest.mark.parametrize("name", [GPT2, SAMPLED])
def test_real_traces_keep_nothing_that_is_not_public(name: str, tmp_path: Path) -> None:
    trace = real_trace(name)
    hidden = anonymise(trace)
    text = everything_written(hidden, tmp_path)
    written = set(json.loads((tmp_path / "out.json").read_text())["traceEvents"][-1]) | set(text.split('"'))
    assert not written & set(hidden.names)
    assert "torch_package" not in text
    assert "dper3" not in text
    back = read_timeline(tmp_path / "out.json")
    assert back.core["parent"].tolist() == trace.core["parent"].tolist()
    assert [span.number for span in back.steps] == [span.number for span in trace.steps]


def test_ranks_share_one_zero_of_time() -> None:
    ranks = dlrm_ranks(2)
    hidden = anonymise(ranks).timelines
    before = [int(timeline.core["start_ns"].min()) for timeline in ranks]
    after = [int(timeline.core["start_ns"].min()) for timeline in hidden]
    assert min(after) == 0
    assert after[1] - after[0] == before[1] - before[0]


def test_stand_ins_for_kernels_are_classified_alike() -> None:
    stems = list(_KERNEL_STEMS.items())
    found = classify_names([f"{stem}_0123456789abcdef" for _, stem in stems])
    assert [CATEGORIES[category] for category in found] == [category for category, _ in stems]
