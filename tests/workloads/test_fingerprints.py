"""What a benchmark computes may not change without its version."""

from __future__ import annotations

import msgspec
import pytest

from stepscope.workloads.fingerprint import benchmarks_to_mark, name_versions, read_fingerprints, take_fingerprint
from stepscope.workloads.registry import Workload

RULE = "it computes something else: raise its version in the catalogue, then run tools/make_fingerprints.py"


def test_every_benchmark_has_a_fingerprint() -> None:
    assert set(read_fingerprints().benchmarks) == set(benchmarks_to_mark())


@pytest.mark.parametrize("name", sorted(benchmarks_to_mark()))
def test_nothing_changes_without_its_version(name: str) -> None:
    stored = read_fingerprints()
    before, now = stored.benchmarks[name], take_fingerprint(benchmarks_to_mark()[name])
    if name_versions() != stored.made_with:
        # Another torch may write the same step with other operators.
        before, now = (msgspec.structs.replace(one, graph="") for one in (before, now))
    assert now == before, RULE


def test_changes_are_seen() -> None:
    one = benchmarks_to_mark()["resnet50/train/1dev-fp32"]
    before = take_fingerprint(one)
    sizes = dict(one.declared.tiny.sizes)
    declared = msgspec.structs.replace(one.declared, sizes={**one.declared.sizes, "classes": 7})
    tiny = msgspec.structs.replace(one.declared.tiny, sizes={**sizes, "classes": 7})
    for other in (declared, msgspec.structs.replace(one.declared, tiny=tiny)):
        after = take_fingerprint(Workload(one.model, other, "ootb"))
        assert after.configuration != before.configuration
        assert after.weights != before.weights or after.graph != before.graph
