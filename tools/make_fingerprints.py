"""Write the fingerprints of the workloads anew; refuses to where a benchmark changed and its version did not.

python tools/make_fingerprints.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from stepscope.bench.workloads import fingerprint as fingerprints

PLACE = Path(__file__).parents[1] / "src" / "stepscope" / "bench" / "workloads" / fingerprints.FILE
PARTS = ("configuration", "weights", "optimizer", "graph")


def main() -> None:
    before = fingerprints.read_fingerprints() if PLACE.exists() else None
    if before is not None and before.method != fingerprints.METHOD:
        print(f"the stored ones were taken by method {before.method}: nothing is compared")
        before = None
    made_with = fingerprints.name_versions()
    found = {name: fingerprints.take_fingerprint(one) for name, one in fingerprints.benchmarks_to_mark().items()}
    same_tools = before is not None and before.made_with == made_with
    for name, new in found.items():
        old = before.benchmarks.get(name) if before is not None else None
        if old is None or old == new or new.version > old.version:
            continue
        changed = [part for part in PARTS if getattr(old, part) != getattr(new, part)]
        if changed != ["graph"] or same_tools:
            sys.exit(f"{name} computes something else ({', '.join(changed)}): raise its version in the catalogue first")
    stored = fingerprints.StoredFingerprints(method=fingerprints.METHOD, made_with=made_with, benchmarks=found)
    PLACE.write_bytes(msgspec.json.format(msgspec.json.encode(stored, order="sorted"), indent=1) + b"\n")
    print(f"{len(found)} fingerprints in {PLACE}")


if __name__ == "__main__":
    main()
