"""JSON Schemas of the records, generated from the types so that they cannot disagree."""

from __future__ import annotations

from typing import Any

import msgspec

from stepscope.records.benchmark import Benchmark, Case
from stepscope.records.communication import Communication
from stepscope.records.failure import Failure
from stepscope.records.result import CaseResult
from stepscope.records.run import Plan, Run
from stepscope.records.sample import RankSamples, Sample
from stepscope.records.system import System

RECORDS: dict[str, type[msgspec.Struct]] = {
    "benchmark": Benchmark,
    "case": Case,
    "sample": Sample,
    "rank_samples": RankSamples,
    "case_result": CaseResult,
    "plan": Plan,
    "run": Run,
    "system": System,
    "communication": Communication,
    "failure": Failure,
}


SEALED = {"case_result", "plan", "run", "system", "communication", "failure"}
"""Records that stand in files of their own, or on lines of their own."""
SEALED_SCHEMA = {
    "description": "Always the last field, without spaces around it: SHA-256 of every byte of this object before it, "
    "behind the seal of the document that this one is bound to.",
    "pattern": "^[0-9a-f]{64}$",
    "type": "string",
}


def make_schema(name: str) -> dict[str, Any]:
    schema = msgspec.json.schema(RECORDS[name])
    if name in SEALED:
        schema["$defs"][RECORDS[name].__name__]["properties"]["seal"] = SEALED_SCHEMA
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": name, **schema}
