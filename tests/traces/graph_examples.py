"""Small execution traces in the forms that torch has written, and the traces of real runs where they are at hand."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from stepscope.core.errors import BadInputError
from stepscope.formats.execution_trace import read_execution_trace
from stepscope.formats.graph import Graph
from stepscope.formats.timeline import Timeline
from stepscope.traces.read import read_timeline

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "traces"

ADD = "aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"
ADD_IN_PLACE = "aten::add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)"
VIEW = "aten::view(Tensor(a) self, SymInt[] size) -> Tensor(a)"
TO = "aten::to.dtype(Tensor(a) self, ScalarType dtype, bool copy=False) -> Tensor(a)"


def shared(name: str) -> Path:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"the trace {name} is not at hand")
    return path


def pairs() -> list[tuple[str, str]]:
    """Execution trace and timeline of the same run."""
    h200 = [
        (f"h200/{model}/et.json.gz", f"h200/{model}/kineto.json.gz")
        for model in (
            "bert_base_b16_s128",
            "dlrm_26t_b2048",
            "dlrm_8t_pool32_b4096",
            "gpt2_bf16_b8_s1024",
            "resnet50_b64",
            "vit_b_16_b32",
        )
    ]
    public = "public/param/dlrm8"
    dlrm = [(f"{public}_et/dlrm_eg_{rank}.json.gz", f"{public}_kineto/worker{rank}") for rank in range(8)]
    return h200 + dlrm


@cache
def shared_graph(name: str) -> Graph:
    return read_execution_trace(shared(name))


@cache
def shared_timeline(name: str) -> Timeline:
    """By the beginning of its name: some names hold the time of recording."""
    path = SHARED / name
    found = [path] if path.exists() else sorted(path.parent.glob(path.name + "*")) if path.parent.exists() else []
    if not found:
        pytest.skip(f"the trace {name} is not at hand")
    return read_timeline(found[0])


def tensor(number: int, storage: int, elements: int = 4, offset: int = 0) -> list[Any]:
    return [number, storage, offset, elements, 4, "cuda:0"]


def nested(
    number: int,
    name: str,
    parent: int,
    *,
    inputs: tuple[list[Any], list[Any], list[str]] = ([], [], []),
    outputs: tuple[list[Any], list[Any], list[str]] = ([], [], []),
    **attributes: Any,
) -> dict[str, Any]:
    """A node as written since 1.0.2."""
    said = {"rf_id": number + 100, "fw_parent": 0, "seq_id": -1, "scope": 0, "tid": 1, "fw_tid": 0, "op_schema": ""}
    said.update(attributes)
    kinds = {int: "uint64", str: "string"}
    return {
        "id": number,
        "name": name,
        "ctrl_deps": parent,
        "inputs": dict(zip(("values", "shapes", "types"), inputs, strict=True)),
        "outputs": dict(zip(("values", "shapes", "types"), outputs, strict=True)),
        "attrs": [{"name": key, "type": kinds.get(type(value), "any"), "value": value} for key, value in said.items()],
    }


def flat(node: dict[str, Any]) -> dict[str, Any]:
    """The same node as 1.0.1 wrote it."""
    said = {attribute["name"]: attribute["value"] for attribute in node["attrs"]}
    made = {"name": node["name"], "id": node["id"], "parent": node["ctrl_deps"], **said}
    for side in ("input", "output"):
        made[f"{side}s"] = node[f"{side}s"]["values"]
        made[f"{side}_shapes"] = node[f"{side}s"]["shapes"]
        made[f"{side}_types"] = node[f"{side}s"]["types"]
    return made


def roots() -> list[dict[str, Any]]:
    thread = "[pytorch|profiler|execution_trace|thread]"
    process = "[pytorch|profiler|execution_trace|process]"
    return [nested(2, thread, 1, rf_id=0, scope=7), nested(1, process, 1, rf_id=0, scope=7, tid=0)]


def operator(
    number: int, name: str, parent: int, schema: str, *, given: list[Any], got: list[Any], **attributes: Any
) -> dict[str, Any]:
    """A call that takes and gives tensors of 4 floats or as long as they say."""

    def side(tensors: list[Any]) -> tuple[list[Any], list[Any], list[str]]:
        return tensors, [[one[3]] for one in tensors], ["Tensor(float)"] * len(tensors)

    return nested(number, name, parent, inputs=side(given), outputs=side(got), op_schema=schema, **attributes)


def small_nodes() -> list[dict[str, Any]]:
    """One step: x + y, a view of it, and an in-place addition to the view; inner calls stand before outer ones."""
    x, y, z, view = tensor(20, 30), tensor(21, 31), tensor(22, 32), tensor(23, 32)
    return [
        operator(5, "aten::add", 4, ADD, given=[x, y], got=[z], seq_id=7),
        nested(4, "## forward ##", 3, scope=7),
        operator(7, "aten::view", 6, VIEW, given=[z], got=[view]),
        operator(8, "aten::add_", 6, ADD_IN_PLACE, given=[view, x], got=[view]),
        operator(6, "aten::outer", 3, ADD, given=[z, x], got=[view]),
        nested(3, "ProfilerStep#4", 2, scope=7),
        *roots(),
    ]


def check_refusal(error: BadInputError, where: str) -> None:
    """An error for people: it names the file and the next step."""
    assert where in (error.where or "")
    assert error.hint


def document(nodes: list[dict[str, Any]], schema: str = "1.1.1-chakra.0.0.4", **more: Any) -> bytes:
    head = {"schema": schema, "pid": 77, "time": "2026-11-15 10:00:00", "start_ts": 1, "nodes": nodes, "finish_ts": 9}
    return json.dumps({**head, **more}, indent=1).encode()
