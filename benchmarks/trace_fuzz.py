"""Damaged Chrome traces: both readers must agree, no command may crash, and CPU time stays in proportion to the file.

    python benchmarks/trace_fuzz.py --seconds 300 [--seed 1] [--trace trace.json.gz]

Every file is made from a sound trace: flipped bits (plain and packed), cut ends, deep nesting, huge names, repeated
keys, brackets too few. Each is read by the tolerant parser and by the compiled scanner, whose rows and counted repairs
must be equal, and every eighth one goes through `stepscope trace summary`, which must end with 0 or 2 and no traceback.
CPU time of either reader must stay below TIMES times what the tolerant parser takes for the sound trace, per byte of
unpacked text, plus ALLOWED_S for start-up. Prints the worst of each kind; ends with 1 where a rule was broken.
"""

from __future__ import annotations

import argparse
import gzip
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from stepscope.core.errors import BadInputError
from stepscope.formats.readers.kineto.scanner import scan_kineto
from stepscope.formats.readers.kineto.tolerant import read_kineto
from stepscope.formats.timeline import COLUMNS, Timeline

TIMES = 20.0
ALLOWED_S = 1.5
SUMMARY_EVERY = 8
TESTS_DATA = Path(__file__).parents[1] / "tests" / "traces" / "data"

Damage = Callable[[bytes, random.Random], bytes]


def flip_bits(text: bytes, dice: random.Random) -> bytes:
    changed = bytearray(text)
    for _ in range(dice.choice((1, 1, 3, 30))):
        changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def cut_end(text: bytes, dice: random.Random) -> bytes:
    return text[: dice.randrange(len(text))]


def remove_brackets(text: bytes, dice: random.Random) -> bytes:
    """Each a record that has no end, or one too many."""
    share = dice.choice((0.0005, 0.01, 0.2))
    return re.sub(rb"[][{}]", lambda found: b"" if dice.random() < share else found[0], text)


def nest_deep(text: bytes, dice: random.Random) -> bytes:
    depth = dice.choice((6, 7, 60, 500, 513, 20_000))
    opening, closing = dice.choice(
        ((b"[", b"]"), (b'{"a":', b"}"), (b'{"ph":', b"}"), (b'{"args":{', b"}}"), (b"\n{", b"}"))
    )
    value = opening * depth + b"1" + closing * dice.choice((depth, depth - 1, 0))
    return insert_argument(text, dice, b'"deep": ' + value + b", ", dice.choice((1, 20)))


def lengthen_names(text: bytes, dice: random.Random) -> bytes:
    filler = dice.choice((b"x", b"(", b"\\\\", b"\\u00e9", b"}, {", b'\\"', "é".encode(), b"\\ud800"))
    return insert_at(text, dice, rb'"name":\s*"', filler * dice.choice((70_000, 400_000)), 1)


def repeat_keys(text: bytes, dice: random.Random) -> bytes:
    key = dice.choice(
        (b'"ts": 7, ', b'"dur": 5, ', b'"name": "again", ', b'"ph": "X", ', b'"pid": 3, ', b'"args": {}, ')
    )
    text = insert_at(text, dice, rb'(?<=[{,])\s*(?="(?:ph|ts|name)":)', key, 40)
    key = dice.choice(
        (b'"correlation": 3, ', b'"device": 1, ', b'"External id": 5, ', b'"grid": [1,1,1], ', b'"stream": -1, ')
    )
    return insert_argument(text, dice, key, 40)


def change_values(text: bytes, dice: random.Random) -> bytes:
    odd = (
        b"null",
        b"9223372036854775807",
        b"18446744073709551616",
        b"1e400",
        b"-1",
        b"NaN",
        b'"x"',
        b"[[]]",
        b"1.5e3",
        b"00",
    )
    share = dice.choice((0.0002, 0.01))
    return re.sub(
        rb"(?<=[: ])\d+(?:\.\d+)?", lambda found: dice.choice(odd) if dice.random() < share else found[0], text
    )


def insert_at(text: bytes, dice: random.Random, pattern: bytes, what: bytes, count: int) -> bytes:
    places = sorted(dice.choice([found.end() for found in re.finditer(pattern, text)]) for _ in range(count))
    parts = [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]
    return what.join(parts)


def insert_argument(text: bytes, dice: random.Random, what: bytes, count: int) -> bytes:
    return insert_at(text, dice, rb'"args":\s*\{', what, count)


DAMAGES: dict[str, Damage] = {
    "flipped bits": flip_bits,
    "flipped bits, packed": flip_bits,
    "cut": cut_end,
    "cut, packed": cut_end,
    "brackets removed": remove_brackets,
    "deep nesting": nest_deep,
    "huge names": lengthen_names,
    "repeated keys": repeat_keys,
    "other values": change_values,
}


def damage(name: str, sound: bytes, dice: random.Random) -> bytes:
    """A variant of a sound trace, packed where the name says so."""
    packed = name.endswith("packed")
    return DAMAGES[name](gzip.compress(sound, 1) if packed else sound, dice)


def read(reader: Callable[[Path], Timeline], path: Path) -> tuple[list[object] | str, float]:
    """Everything in it as plain values, or the message of a refusal; and CPU seconds."""
    begun = time.process_time()
    try:
        timeline = reader(path)
    except BadInputError as error:
        return error.message, time.process_time() - begun
    spent = time.process_time() - begun
    texts = [*timeline.texts, None]
    threads = [*timeline.threads, None]
    found: list[object] = [sorted(timeline.repairs.items())]
    for spec in COLUMNS:
        cells = timeline.column(spec.name).tolist()
        words = texts if spec.form == "text" else threads if spec.name == "thread" else None
        found.append(repr([words[code] for code in cells] if words is not None else cells))
    return found, spent


def judge(path: Path, size: int, usual_s_per_byte: float) -> tuple[list[str], float]:
    """Rules that this file broke, and its CPU time as a multiple of what is usual."""
    results, spent = zip(*(read(reader, path) for reader in (read_kineto, scan_kineto)), strict=True)
    broken = [] if results[0] == results[1] else ["the readers differ"]
    usual_s = usual_s_per_byte * size
    slow = [f"{max(spent):.1f} CPU s"] if max(spent) > TIMES * usual_s + ALLOWED_S else []
    return broken + slow, max(spent) / usual_s


def summarise(path: Path) -> list[str]:
    command = [sys.executable, "-m", "stepscope", "trace", "summary", "--no-cache", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    crashed = done.returncode not in (0, 2) or "Traceback" in done.stderr or "defect of" in done.stderr
    return [f"summary ends with {done.returncode}: {done.stderr[-300:]}"] if crashed else []


def fuzz(
    sound: bytes, *, seconds: float, seed: int, folder: Path, rounds: int | None = None
) -> tuple[dict[str, float], list[str]]:
    """For so long, or so many files of each kind: the worst multiple of each kind, and every broken rule."""
    plain = folder / "sound.json"
    plain.write_bytes(sound)
    for reader in (scan_kineto, read_kineto):  # the first loads what is compiled
        _, usual_s = read(reader, plain)
    worst = dict.fromkeys(DAMAGES, 0.0)
    failures: list[str] = []
    until = time.monotonic() + seconds
    number = 0
    while number < rounds * len(DAMAGES) if rounds is not None else time.monotonic() < until:
        name = list(DAMAGES)[number % len(DAMAGES)]
        text = damage(name, sound, random.Random(f"{seed} {number}"))
        path = folder / f"{number}.json"
        path.write_bytes(text)
        broken, times = judge(path, max(len(text), len(sound)), usual_s / len(sound))
        if rounds is None and number % SUMMARY_EVERY == 0:
            broken += summarise(path)
        worst[name] = max(worst[name], times)
        failures += [f"{path.name} ({name}, seed {seed}): {what}" for what in broken]
        if not broken:
            path.unlink()
        number += 1
    worst["files"] = float(number)
    return worst, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trace", type=Path, default=TESTS_DATA / "event_sync_multi_stream.json.gz")
    parser.add_argument("--copies", type=int, default=20, help="how often the events of the trace are repeated")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="stepscope-trace-fuzz-"))
    text = gzip.decompress(options.trace.read_bytes())
    begin, end = text.index(b"[", text.index(b'"traceEvents"')) + 1, text.rindex(b"}\n  ]") + 1
    sound = text[:begin] + b",".join([text[begin:end]] * options.copies) + text[end:]
    worst, failures = fuzz(sound, seconds=options.seconds, seed=options.seed, folder=folder)
    print(f"{worst.pop('files'):.0f} files of about {len(sound) / 1e6:.1f} MB; most CPU time over that of a sound one:")
    for name, times in worst.items():
        print(f"  {name:24} {times:6.2f}")
    print("\n".join(failures) or "no rule was broken")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
