"""The rooms of the package and how they import each other, read from the source, as a picture."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "stepscope"
ORDER = [
    ["cli"], ["api"], ["report"], ["compare", "predict"], ["analyze", "costs"], ["bench"], ["run"], ["measure"],
    ["traces"], ["formats"], ["launch"], ["metrics"], ["system"], ["store"], ["stats"], ["records"], ["core"],
]  # fmt: skip
"""From the top down, as tests/house/test_layers.py has it from the ground up."""
WIDTH, ROW, BOX = 760, 44, (150, 26)


def count_imports() -> Counter[tuple[str, str]]:
    """How many import statements of one room name another."""
    found: Counter[tuple[str, str]] = Counter()
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            others = {name.split(".")[1] for name in names if name.startswith("stepscope.")}
            found.update((room, other) for other in others if other != room)
    return found


def count_lines() -> dict[str, tuple[int, int]]:
    """Files and lines by room."""
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        files[room] += 1
        lines[room] += len(path.read_text(encoding="utf-8").splitlines())
    return {room: (files[room], lines[room]) for room in files}


def draw_rooms() -> str:
    present = count_lines()
    rows = [[room for room in row if room in present] for row in ORDER]
    rows = [row for row in rows if row]
    places = {
        room: (WIDTH * (number + 1) / (len(row) + 1), ROW * (level + 0.7))
        for level, row in enumerate(rows)
        for number, room in enumerate(row)
    }
    parts = []
    for (room, other), count in sorted(count_imports().items()):
        if room in places and other in places:
            (x1, y1), (x2, y2) = places[room], places[other]
            bend = x1 + (x2 - x1) / 2 + (90 + 26 * abs(y2 - y1) / ROW) * (1 if (len(room) + len(other)) % 2 else -1)
            near = abs(y2 - y1) <= ROW * 1.01
            path = (
                f"M{x1:.0f} {y1:.0f}L{x2:.0f} {y2:.0f}"
                if near
                else (f"M{x1:.0f} {y1:.0f}Q{bend:.0f} {(y1 + y2) / 2:.0f} {x2:.0f} {y2:.0f}")
            )
            width = min(4.0, 0.4 + count**0.5 / 5)
            title = f"<title>{room} imports {other} in {count} places</title>"
            parts.append(f'<path d="{path}" stroke-width="{width:.1f}">{title}</path>')
    boxes = [
        f'<g><rect x="{x - BOX[0] / 2:.0f}" y="{y - BOX[1] / 2:.0f}" width="{BOX[0]}" height="{BOX[1]}" rx="4"/>'
        f'<text x="{x:.0f}" y="{y + 4:.0f}">{room}</text></g>'
        for room, (x, y) in places.items()
    ]
    height = ROW * len(rows) + 20
    style = (
        "path{fill:none;stroke:#8aa4c8;opacity:.45}rect{fill:#f4f7fb;stroke:#3b5b8c}"
        "text{font:13px sans-serif;text-anchor:middle;fill:#1d2b40}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
    label = "<title>Rooms of the package; lines are imports, all of them point down</title>"
    return "\n".join([head, label, f"<style>{style}</style>", *parts, *boxes, "</svg>", ""])
