from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.bench.ops import case_files
from stepscope.bench.ops.case_files import read_case_file
from stepscope.bench.ops.language import CaseRequest
from stepscope.core.errors import BadInputError, StepscopeError, UsageError

TOML = """
[[cases]]
op = "gemm"
shape = "m=128/256,n=4096,k=n"
dtypes = ["float32", "bfloat16"]
passes = ["forward", "backward"]
caches = "cold"

[[cases]]
op = "linear"
set = "tiny"

[[cases]]
op = "mlp"
shape = { batch = [8, "16:64:x2"], widths = "8-16-4" }
draws = 3
seed = 7
"""

YAML = """
cases:
  - op: gemm
    shape: m=128/256,n=4096,k=n
    dtypes: [float32, bfloat16]
    passes: [forward, backward]
    caches: cold
  - {op: linear, set: tiny}
  - op: mlp
    shape: {batch: [8, "16:64:x2"], widths: 8-16-4}
    draws: 3
    seed: 7
"""

JSON = json.dumps(
    {
        "cases": [
            {
                "op": "gemm",
                "shape": "m=128/256,n=4096,k=n",
                "dtypes": ["float32", "bfloat16"],
                "passes": ["forward", "backward"],
                "caches": ["cold"],
            },
            {"op": "linear", "set": "tiny"},
            {"op": "mlp", "shape": {"batch": [8, "16:64:x2"], "widths": "8-16-4"}, "draws": 3, "seed": 7},
        ]
    }
)


def write(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(("name", "text"), [("a.toml", TOML), ("a.yaml", YAML), ("a.yml", YAML), ("a.JSON", JSON)])
def test_the_same_cases_in_every_format(tmp_path: Path, name: str, text: str) -> None:
    path = write(tmp_path, name, text)
    assert read_case_file(path) == [
        CaseRequest(
            op="gemm",
            shape="m=128/256,n=4096,k=n",
            dtypes=("float32", "bfloat16"),
            passes=("forward", "backward"),
            caches=("cold",),
            where=f"{path}: cases[0]",
        ),
        CaseRequest(op="linear", set="tiny", where=f"{path}: cases[1]"),
        CaseRequest(
            op="mlp",
            shape={"batch": [8, "16:64:x2"], "widths": "8-16-4"},
            draws=3,
            seed=7,
            where=f"{path}: cases[2]",
        ),
    ]


def test_params_files_are_known_by_their_form(tmp_path: Path) -> None:
    tensor = {"type": "tensor", "dtype": "float", "shape": [2, 2]}
    content = {"torch.relu": {"config": [{"input": [{"args": [tensor]}]}]}}
    (request,) = read_case_file(write(tmp_path, "a.json", json.dumps(content)))
    assert (request.op, request.config) == ("call", "param")
    drawn = {"torch.add": {"config": [{"input": [{"args": [tensor, {"type": "int", "value_range": [0, 10**9]}]}]}]}}
    path = write(tmp_path, "b.json", json.dumps(drawn))
    assert read_case_file(path, seed=1) == read_case_file(path, seed=1) != read_case_file(path, seed=2)


@pytest.mark.parametrize(
    ("name", "text", "place", "message"),
    [
        ("a.toml", "cases = [", "", "is no TOML"),
        ("a.yaml", "cases: [", "", "is no YAML"),
        ("a.yaml", "cases: !!python/object/apply:os.getpid []", "", "is no YAML"),
        ("a.json", "{", "", "is no JSON"),
        ("a.json", '{"cases": NaN}', "", "is no number"),
        ("a.json", '{"cases": [], "cases": []}', "", "'cases' stands twice"),
        ("a.yaml", "cases: []\ncases: []", "", "'cases' stands twice, at line 2"),
        ("a.yaml", "a: 1\n---\nb: 2", "", "is no YAML"),
        ("a.json", "[" * 100_000, "", "nested too deeply"),
        ("a.yaml", "[" * 5_000, "", "nested too deeply|is no YAML"),
        ("a.toml", b"\xff\xfe", "", "not UTF-8"),
        ("a.toml", "", "", "holds one list"),
        ("a.toml", "case = []", "", "holds one list"),
        ("a.toml", "cases = []\nmore = 1", "", "holds one list"),
        ("a.json", "[]", "", "holds one list"),
        ("a.yaml", "", "", "holds one list"),
        ("a.toml", "cases = []", "cases", "at least one"),
        ("a.toml", "cases = 3", "cases", "at least one"),
        ("a.toml", "cases = [3]", "cases[0]", "is a table"),
        ("a.toml", "cases = [{op='gemm'}, {shape='m=1'}]", "cases[1]", "op is missing"),
        ("a.toml", "cases = [{op='gemm', shap='m=1'}]", "cases[0]", "has no 'shap'"),
        ("a.yaml", "cases: [{op: gemm, 3: 4}]", "cases[0]", "has no '3'"),
        ("a.toml", "cases = [{op=3}]", "cases[0].op", "is a text"),
        ("a.toml", "cases = [{op='gemm', shape=3}]", "cases[0].shape", "is a text of the case language or a table"),
        ("a.toml", "cases = [{op='gemm', shape={m=[[1]]}}]", "cases[0].shape.m", "a number, a text, or a list"),
        ("a.toml", "cases = [{op='gemm', shape={m=2020-01-01}}]", "cases[0].shape.m", "a number, a text, or a list"),
        ("a.yaml", "cases: [{op: gemm, shape: {m: &a [*a]}}]", "cases[0].shape.m", "a number, a text, or a list"),
        ("a.toml", "cases = [{op='gemm', set=['A']}]", "cases[0].set", "is a text"),
        ("a.toml", "cases = [{op='gemm', set='A', shape='m=1'}]", "cases[0].set", "not both"),
        ("a.toml", "cases = [{op='gemm', dtypes=[]}]", "cases[0].dtypes", "list of texts"),
        ("a.toml", "cases = [{op='gemm', dtypes=[1]}]", "cases[0].dtypes", "list of texts"),
        ("a.toml", "cases = [{op='gemm', passes=3}]", "cases[0].passes", "list of texts"),
        ("a.toml", "cases = [{op='gemm', draws=1.5}]", "cases[0].draws", "whole number"),
        ("a.toml", "cases = [{op='gemm', draws=true}]", "cases[0].draws", "whole number"),
        ("a.toml", "cases = [{op='gemm', seed=-1}]", "cases[0].seed", "whole number"),
    ],
)
def test_bad_files_are_refused_with_place_and_next_step(
    tmp_path: Path, name: str, text: str | bytes, place: str, message: str
) -> None:
    path = write(tmp_path, name, text)
    with pytest.raises(BadInputError, match=message) as caught:
        read_case_file(path)
    assert caught.value.where == (f"{path}: {place}" if place else str(path))
    assert caught.value.hint


def test_near_keys_are_suggested(tmp_path: Path) -> None:
    with pytest.raises(BadInputError) as caught:
        read_case_file(write(tmp_path, "a.toml", "cases = [{op='gemm', dtype=['float32']}]"))
    assert caught.value.hint == "did you mean dtypes?"


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, message in (
        (tmp_path / "none.toml", "cannot be read"),
        (write(tmp_path, "a.ini", ""), "no case file"),
        (tmp_path, "no case file"),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            read_case_file(path)
        assert caught.value.where == str(path)
        assert caught.value.hint
    monkeypatch.setattr(case_files, "MAX_FILE_BYTES", 10)
    with pytest.raises(BadInputError, match="10 are allowed"):
        read_case_file(write(tmp_path, "a.toml", "# too long a file"))


def test_aliases_that_grow_without_end_cost_nothing(tmp_path: Path) -> None:
    """Nine aliases of nine aliases …: the file is refused by its types, never written out."""
    layers = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30))
    with pytest.raises(BadInputError):
        read_case_file(write(tmp_path, "a.yaml", f"a0: &a0 [1]\n{layers}\ncases: *a29"))
    with pytest.raises(BadInputError):
        read_case_file(write(tmp_path, "b.yaml", "cases:\n- op: gemm\n  shape:\n    m: &a [1, &b [*a, *b]]"))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["a.toml", "a.yaml", "a.json"]),
    content=st.one_of(st.text(max_size=40), st.binary(max_size=30)),
)
def test_any_content_is_read_or_refused(tmp_path: Path, name: str, content: Any) -> None:
    try:
        assert isinstance(read_case_file(write(tmp_path, name, content)), list)
    except StepscopeError as error:
        assert error.where  # noqa: PT017 (nearly all of what is drawn is refused)
