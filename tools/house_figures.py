"""Figures of the source tree, room by room: size, imports inside functions, import cycles, modules with one importer.

    python tools/house_figures.py [CHECKOUT …]        # a Markdown table; several checkouts stand side by side

A cycle is looked for at every level: children of a package (modules and packages) import each other in one direction
only, imports inside functions included; tests/house holds the tree to it. Imports for type checkers alone do not count.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

Graph = dict[str, set[str]]


@dataclass
class Figures:
    files: Counter[str] = field(default_factory=Counter)
    lines: Counter[str] = field(default_factory=Counter)
    imports_inside: int = 0
    """Import statements inside functions."""
    function_lines: list[int] = field(default_factory=list)
    cycles: list[list[str]] = field(default_factory=list)
    one_importer: list[str] = field(default_factory=list)
    """Modules of the package that exactly one other module imports."""


def is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def walk_imports(node: ast.AST, *, inside: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Import statements, and whether each is inside a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, inside
        elif not is_for_type_checkers(child):
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from walk_imports(child, inside=inside or function)


def name_module(path: Path, source: Path) -> str:
    parts = path.relative_to(source.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def list_targets(statement: ast.Import | ast.ImportFrom, modules: set[str]) -> Iterator[str]:
    """The modules of the package that a statement names."""
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names if alias.name in modules)
        return
    for alias in statement.names:
        member = f"{statement.module}.{alias.name}"
        if member in modules:
            yield member
        elif statement.module in modules:
            yield statement.module or ""


def read_graph(source: Path) -> Graph:
    """Which module imports which."""
    names = {path: name_module(path, source) for path in source.rglob("*.py")}
    modules = set(names.values())
    graph: Graph = {}
    for path, name in names.items():
        statements = [statement for statement, _ in walk_imports(ast.parse(path.read_text(encoding="utf-8")))]
        graph[name] = {other for statement in statements for other in list_targets(statement, modules)} - {name}
    return graph


def find_cycles(graph: Graph) -> list[list[str]]:
    """Groups of siblings, at any level, that import each other in a circle."""
    levels: dict[str, Graph] = defaultdict(lambda: defaultdict(set))
    for name, others in graph.items():
        for other in others:
            mine, theirs = name.split("."), other.split(".")
            shared = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
            if shared is not None:
                parent = ".".join(mine[:shared])
                levels[parent][mine[shared]].add(theirs[shared])
    return [
        [f"{parent}.{name}" for name in group]
        for parent, siblings in sorted(levels.items())
        for group in find_circles(siblings)
    ]


def find_circles(graph: Graph) -> list[list[str]]:
    """Strongly connected groups of more than one node, by who reaches whom: the graphs are small."""
    reach = {node: reachable(graph, node) for node in graph}
    groups = {
        frozenset({node, *(other for other in reach[node] if node in reach.get(other, ()))})
        for node in graph
        if node in reach[node]
    }
    return sorted(sorted(group) for group in groups if len(group) > 1)


def reachable(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += graph.get(node, ())
    return seen


def measure_tree(source: Path) -> Figures:
    figures = Figures()
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).parts
        room = parts[0].removesuffix(".py") if parts[0] != "bench" or len(parts) < 3 else f"bench/{parts[1]}"
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        figures.files[room] += 1
        figures.lines[room] += len(text.splitlines())
        figures.imports_inside += sum(inside for _, inside in walk_imports(tree))
        figures.function_lines += [
            (node.end_lineno or node.lineno) - node.lineno + 1
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
    graph = read_graph(source)
    figures.cycles = find_cycles(graph)
    importers = Counter(other for name, others in graph.items() for other in others)
    figures.one_importer = sorted(name for name in graph if importers[name] == 1)
    return figures


def format_table(columns: dict[str, Figures]) -> str:
    rooms = sorted({room for one in columns.values() for room in one.files})
    rows = [["room", *(f"{title}: {unit}" for title in columns for unit in ("files", "lines"))]]
    rows.append(["---", *["---:"] * (2 * len(columns))])
    for room in rooms:
        rows.append([room, *(f"{one[room]:,}" for column in columns.values() for one in (column.files, column.lines))])
    totals = [f"{one.total():,}" for column in columns.values() for one in (column.files, column.lines)]
    rows.append(["**all**", *totals])
    text = ["| " + " | ".join(row) + " |" for row in rows]
    text.append("")
    for title, one in columns.items():
        longest = sorted(one.function_lines)
        text.append(
            f"{title}: {one.imports_inside} imports inside functions, {len(one.cycles)} import cycles, "
            f"{len(one.one_importer)} modules with one importer, functions: {len(longest)}, "
            f"90th percentile {longest[int(0.9 * len(longest))]} lines"
        )
        text += [f"  cycle: {', '.join(cycle)}" for cycle in one.cycles]
    return "\n".join(text)


def main() -> None:
    checkouts = [Path(name) for name in sys.argv[1:]] or [Path(__file__).parents[1]]
    print(format_table({path.resolve().name: measure_tree(path / "src" / "stepscope") for path in checkouts}))


if __name__ == "__main__":
    main()
