"""Random bit flips over a whole store: every hit is named, and no verb fails for a run that was not hit.

    python benchmarks/store_flips.py --flips 2000 [--seed 1] [--store DIR]

Without --store a small one is made by real commands: operators, two ranks, and a run that was cut off. Each flip
changes one bit of one file of evidence, asks every verb, and puts the bit back. Ends with 1 when a hit was not named
or an answer changed for a run that was not hit.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from stepscope.cli.main import run
from stepscope.store import run_folders

NO_EVIDENCE = ("writer.lock", "begun.json", "ranks/")
SAMPLES = "samples/"
QUICK = ("--quick", "--max-samples", "6")


class Answer(NamedTuple):
    code: int
    content: Any
    told: str

    @property
    def text(self) -> str:
        return f"{self.told} {json.dumps(self.content)}"


class Flip(NamedTuple):
    run: str
    file: str
    bit: int


def ask(*arguments: str) -> Answer:
    """One command with --json, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([*arguments, "--json"])
    return Answer(code, json.loads(out.getvalue()), err.getvalue())


def make_store(store: Path) -> None:
    for shape in ("m=8,n=8,k=8:32:x2", "m=8,n=8,k=8:32:x2", "m=16,n=8,k=8"):
        ask("bench", "ops", "--op", "gemm", "--shape", shape, *QUICK, "--store", str(store))
    ask(
        "bench",
        "comms",
        "--collective",
        "all_reduce",
        "--sizes",
        "1K,4K",
        "--ranks",
        "2",
        *QUICK,
        "--store",
        str(store),
    )
    whole = run_folders(store)[0]
    cut_off = shutil.copytree(whole, store / "20000101-000000-cut-off")
    (cut_off / "run.json").unlink()


def evidence(store: Path) -> list[Path]:
    files = [(folder, path) for folder in run_folders(store) for path in sorted(folder.rglob("*"))]
    return [
        path
        for folder, path in files
        if path.is_file() and path.stat().st_size
        if not path.relative_to(folder).as_posix().startswith(NO_EVIDENCE)
    ]


def draw(chance: random.Random, store: Path, files: list[Path]) -> tuple[Path, Flip]:
    """A file, each as likely as another, and a bit of it: small files are not spared."""
    path = chance.choice(files)
    folder, *parts = path.relative_to(store).parts
    return path, Flip(folder, "/".join(parts), chance.randrange(8 * path.stat().st_size))


def check(flip: Flip, store: Path, before: dict[str, Any]) -> list[str]:
    """What is wrong with the answers after this flip."""
    place, faults = ("--store", str(store)), []
    others = [name for name in before["ids"] if name != flip.run]

    verified = ask("runs", "verify", *place)
    damaged = {row["id"]: row["damage"] for row in verified.content["data"]["runs"] if row["damage"]}
    if verified.code != 1 or list(damaged) != [flip.run]:
        faults.append(f"verify ends with {verified.code} and names {list(damaged)}")

    listed = ask("runs", "list", *place)
    rows = {row["id"]: row for row in listed.content["data"]["runs"]}
    if listed.code or any(rows.get(name) != before["rows"][name] for name in others):
        faults.append("list changed for a run that was not hit")
    is_record = not flip.file.startswith(SAMPLES)
    if is_record and flip.run not in json.dumps(listed.content["data"]["damaged"]):
        faults.append("list does not name it")

    for name, verb in (
        ("sql", ("runs", "sql", "SELECT run, count(*) FROM samples GROUP BY run")),
        ("report", ("report",)),
    ):
        answer = ask(*verb, *place)
        if answer.code or any(other not in json.dumps(answer.content) for other in others):
            faults.append(f"{name} ends with {answer.code}, or lacks a run that was not hit")
        if flip.run not in answer.told:
            faults.append(f"{name} does not name it")

    complete = [name for name in before["ids"] if before["rows"][name]["status"] == "complete"]
    newest = ("check", "--baseline", complete[0] if complete[0] != flip.run else complete[1])
    gates_it = flip.run == [name for name in complete if name != newest[-1]][-1]
    for verb, uses_it in (
        (("compare", others[-1], others[-2]), False),
        (newest, gates_it),
        (("compare", flip.run, others[-1]), True),
        (("check", flip.run, "--baseline", others[-1]), True),
        (("report", flip.run), True),
    ):
        answer = ask(*verb, *place)
        named = answer.code == 2 and flip.run in answer.text and "defect" not in answer.text
        if not (named if uses_it else answer.code in {0, 3, 4}):
            faults.append(f"{verb} ends with {answer.code}: {answer.text[:200]}")
    return faults


def put(path: Path, content: bytes) -> None:
    """With the file's old time, as decay leaves it: the order of runs that began in one second follows it."""
    found = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--store", type=Path, help="copied first; nothing in it is changed")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="stepscope-flips-") as scratch:
        store = Path(scratch) / "runs"
        if options.store:
            shutil.copytree(options.store, store)
        else:
            make_store(store)
        listed = ask("runs", "list", "--store", str(store)).content["data"]
        before = {"ids": [row["id"] for row in listed["runs"]], "rows": {row["id"]: row for row in listed["runs"]}}
        files, missed, hits, began = evidence(store), 0, Counter[str](), time.process_time()
        for number in range(options.flips):
            path, flip = draw(chance, store, files)
            content = path.read_bytes()
            changed = bytearray(content)
            changed[flip.bit // 8] ^= 1 << flip.bit % 8
            put(path, bytes(changed))
            faults = check(flip, store, before)
            put(path, content)
            hits[Path(flip.file).name] += 1
            missed += bool(faults)
            for fault in faults:
                print(f"{number}: {flip.run}/{flip.file}, bit {flip.bit}: {fault}", flush=True)
    print(", ".join(f"{name} {count}" for name, count in hits.most_common()))
    print(f"{options.flips} flips in {len(files)} files of {len(before['ids'])} runs: {missed} missed or harmful "
          f"({time.process_time() - began:.0f} CPU s)")  # fmt: skip
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
