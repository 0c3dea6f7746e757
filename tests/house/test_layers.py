"""The house plan as a test: imports point down, readers never load torch, help loads nearly nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import house_figures
from builders import make_case, make_folder, make_result, make_samples, make_system
from stepscope.store import RunWriter

SOURCE = Path(__file__).parents[2] / "src" / "stepscope"

FLOORS: list[set[str]] = [
    {"_version"},
    {"core"},
    {"stats"},
    {"records"},
    {"store"},
    {"system"},
    {"metrics"},
    {"launch"},
    {"formats"},
    {"traces"},
    {"measure"},
    {"run"},
    {"bench"},
    {"analyze"},
    {"costs"},
    {"predict"},
    {"compare"},
    {"report"},
    {"api"},
    {"cli"},
    {"__main__", "__init__"},
]
"""From the ground up; rooms on one floor do not know each other."""

PRODUCERS = {"bench", "measure", "run"}
READERS = {"analyze", "costs", "predict", "compare", "report"}
MAY_USE_TORCH = {"launch", "traces", "measure", "run", "bench", "system"}
HEAVY = {
    "torch",
    "numpy",
    "polars",
    "duckdb",
    "numba",
    "sklearn",
    "lightgbm",
    "transformers",
    "jinja2",
    "mpi4py",
    "rich",
    "llvmlite",
    "isal",
    "zstandard",
    "google",
}
LAZY_TORCH = "stepscope.core.lazy_torch"
"""torch itself, loaded when it is first used."""
PLAIN = {"core", "records"}

FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def room_of(path: Path) -> str:
    part = path.relative_to(SOURCE).parts[0]
    return part.removesuffix(".py")


MODULES = sorted(SOURCE.rglob("*.py"))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(tree: ast.AST, *, inside: bool = False) -> Iterator[tuple[str, int, bool]]:
    """Name, line and whether it is inside a function; imports for type checkers alone are left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, inside
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide the room"
            yield node.module or "", node.lineno, inside
        elif not is_type_checking(node):
            deeper = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports(node, inside=deeper)


@cache
def imports_of(path: Path) -> list[tuple[str, int, bool]]:
    return list(imports(ast.parse(path.read_text())))


def every_import() -> Iterator[tuple[Path, str, bool, str]]:
    """Module, what it imports, whether inside a function, and the place as a message names it."""
    for path in MODULES:
        for name, line, inside in imports_of(path):
            yield path, name, inside, f"{path.relative_to(SOURCE)}:{line} imports {name}"


def test_every_module_is_in_a_room_of_the_plan() -> None:
    assert len(MODULES) > 100
    assert not {room_of(path) for path in MODULES} - FLOOR_OF.keys()


def test_producers_do_not_know_each_other() -> None:
    wrong = []
    for path, name, _, place in every_import():
        parts = name.split(".")
        if room_of(path) == "bench" and parts[:2] == ["stepscope", "bench"]:
            own = path.relative_to(SOURCE / "bench").parts[0]
            wrong += [place] if parts[2:] and parts[2] != own else []
    assert not wrong


def test_imports_point_down() -> None:
    upward = []
    for path, name, _, place in every_import():
        if name.startswith("stepscope."):
            room, other = room_of(path), name.split(".")[1]
            if other != room and FLOOR_OF[other] >= FLOOR_OF[room]:
                upward.append(place)
            if room in READERS and other in PRODUCERS:
                upward.append(f"{place}: readers never need producers")
    assert not upward


MODELS = SOURCE / "bench" / "workloads" / "models"
"""Each of its files needs torch, as classes of layers have it as their base; the catalogue loads them by name."""


def is_compiled(path: Path) -> bool:
    """Loops that numba compiles; imported inside functions."""
    return path.parent.name == "native" or path.stem in ("compiled", "json_text")


def test_models_are_loaded_where_they_are_built() -> None:
    at_top = [
        place
        for path, name, inside, place in every_import()
        if not inside and name.startswith("stepscope.bench.workloads.models") and not path.is_relative_to(MODELS)
    ]
    assert not at_top


def test_heavy_libraries_are_imported_where_they_are_used() -> None:
    wrong = []
    for path, name, inside, place in every_import():
        library, room = name.split(".")[0], room_of(path)
        if library in HEAVY and not is_compiled(path) and not path.is_relative_to(MODELS):
            if not inside and library != "numpy":
                wrong.append(f"{place} at the top of the module")
            if room in PLAIN:
                wrong.append(f"{place}: records are plain")
        if (library == "torch" or name == LAZY_TORCH) and room not in MAY_USE_TORCH:
            wrong.append(f"{place}: readers never import torch")
    assert not wrong


def loaded_at_the_top(start: set[Path]) -> set[Path]:
    """Modules that importing these loads, packages around them included."""
    seen: set[Path] = set()
    waiting = list(start)
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        around = [folder / "__init__.py" for folder in path.parents if folder.is_relative_to(SOURCE)]
        named = [SOURCE.joinpath(*name.split(".")[1:]) for name, _, inside in top_names_of(path) if not inside]
        waiting += [other for other in around if other.exists()]
        waiting += [other.with_suffix(".py") for other in named if other.with_suffix(".py").is_file()]
        waiting += [other / "__init__.py" for other in named if (other / "__init__.py").is_file()]
    return seen


def top_names_of(path: Path) -> list[tuple[str, int, bool]]:
    """As `imports_of`, of the package alone, with `from package import module` as `package.module` too."""
    tree = ast.parse(path.read_text())
    members = [
        (f"{node.module}.{alias.name}", node.lineno, False)
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    return [one for one in imports_of(path) + members if one[0].startswith("stepscope.")]


def test_numpy_at_the_top_is_for_readers_alone() -> None:
    """`--help` and producers work without numpy: what they import at their top does not import it at its own."""
    light = {path for path in MODULES if room_of(path) in {"cli", "launch", *PRODUCERS}}
    wrong = [
        f"{path.relative_to(SOURCE)} has numpy at its top"
        for path in sorted(loaded_at_the_top(light))
        if not path.is_relative_to(MODELS)
        and any(name == "numpy" and not inside for name, _, inside in imports_of(path))
    ]
    assert not wrong
    assert SOURCE / "traces" / "recording" / "evidence.py" in loaded_at_the_top(light), "the walk finds what is below"


def test_compiled_loops_are_loaded_where_they_run() -> None:
    """They import numpy and numba at their top; so nobody else may import them at theirs."""
    compiled = {
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts) for path in MODULES if is_compiled(path)
    }
    assert len(compiled) > 1
    at_top = [
        place
        for path, name, inside, place in every_import()
        if name in compiled and not inside and not is_compiled(path)
    ]
    assert not at_top


def loaded_by(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(' '.join(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_help_loads_neither_torch_nor_readers() -> None:
    loaded = loaded_by("from stepscope.cli.main import run\nrun(['--help'])")
    assert not loaded & HEAVY
    assert not {"psutil", "pynvml", "yaml"} & loaded
    assert not [name for name in loaded if name.startswith("stepscope.") and name.split(".")[1] in PRODUCERS | READERS]


@pytest.mark.parametrize("verb", ["demo", "doctor", "bench", "runs", "report", "compare", "check", "ab", "launch"])
def test_help_of_every_verb_loads_no_torch(verb: str) -> None:
    assert "torch" not in loaded_by(f"from stepscope.cli.main import run\nassert run(['{verb}', '--help']) == 0")


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    """The whole reading side works where torch cannot be imported."""
    code = (
        "sys.modules['torch'] = None\n"
        "from stepscope.cli.main import run\n"
        f"assert run(['runs', 'list', '--store', {str(tmp_path)!r}]) == 0\n"
        f"assert run(['runs', 'sql', 'SELECT 1', '--store', {str(tmp_path)!r}]) == 0\n"
        "import stepscope.compare, stepscope.report, stepscope.metrics.sql\n"
    )
    loaded_by(code)


def test_a_table_of_a_store_loads_little(tmp_path: Path) -> None:
    """What a run says is read in less time than these take to import."""
    case = make_case(m=4)
    with RunWriter(make_folder(tmp_path, [case])) as writer:
        writer.write_system(make_system())
        writer.append(make_result(case), [make_samples(case, [1.0, 1.1, 1.2])])
        writer.finish()
    code = "from stepscope.cli.main import run\n" + "".join(
        f"assert run([{words}, '--store', {str(tmp_path)!r}]) == 0\n"
        for words in ("'runs', 'list'", "'report', 'latest'", "'report', 'latest', '--format', 'csv'")
    )
    unwanted = {"importlib.metadata", "email", "dataclasses", "difflib", "json", "random", "rich", "statistics"}
    assert loaded_by(code) & unwanted == set()


def test_producing_needs_no_reader_library() -> None:
    """On a frozen image without duckdb, jinja2 and numpy a measurement still runs and prints its table."""
    code = (
        "for name in ('duckdb', 'jinja2', 'numpy', 'polars', 'pandas', 'scipy'): sys.modules[name] = None\n"
        "import tempfile\n"
        "from stepscope.cli.main import run\n"
        "store = tempfile.mkdtemp()\n"
        "assert run(['bench', 'ops', '--op', 'gemm', '--shape', 'm=8', '--quick', '--store', store]) == 0\n"
    )
    loaded_by(code)


def test_the_project_speaks_of_itself_alone() -> None:
    root = SOURCE.parents[1]
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a checkout")
    forbidden = ("/work/" + "main", "pypi" + ".org", "debian" + ".org/debian", ".library" + "/")
    for name in listed.stdout.splitlines():
        path = root / name
        if path.suffix in {".py", ".md", ".toml", ".sh", ".yaml", ".txt"} and path.exists():
            text = path.read_text(encoding="utf-8")
            for word in forbidden:
                assert word not in text, f"{name} mentions {word}"


def test_the_python_api_is_what_it_says() -> None:
    import stepscope

    assert dir(stepscope) == sorted(stepscope.__all__)
    for name in stepscope.__all__:
        assert getattr(stepscope, name) is not None
    import stepscope.compare.verdict
    import stepscope.measure.loop
    import stepscope.report.view
    import stepscope.run.rank

    for function in (stepscope.measure, stepscope.run, stepscope.compare, stepscope.report):
        assert callable(function), "it stays a function after its package was imported"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        stepscope.nothing  # noqa: B018
    loaded = loaded_by("import stepscope")
    assert not [name for name in loaded if name.startswith("stepscope.") and name != "stepscope._version"]


def find_cycles(source: Path) -> list[list[str]]:
    return house_figures.find_cycles(house_figures.read_graph(source))


def test_neither_packages_nor_modules_import_in_a_circle() -> None:
    """Imports inside functions count."""
    assert find_cycles(SOURCE) == []


def test_a_circle_would_be_found(tmp_path: Path) -> None:
    for name, text in {"a/__init__.py": "", "a/one.py": "import p.b.two", "b/__init__.py": "", "b/two.py": ""}.items():
        (tmp_path / "p" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "p" / name).write_text(text)
    assert find_cycles(tmp_path / "p") == []
    (tmp_path / "p" / "b" / "two.py").write_text("def late():\n    from p.a import one\n")
    assert find_cycles(tmp_path / "p") == [["p.a", "p.b"]]


COMPUTED_BY_THE_API = {
    "stepscope.run.execute": {"execute"},
    "stepscope.run.processes": {"measure_in_processes"},
    "stepscope.run.plan": {"create", "create_sides", "find_interrupted", "find_interrupted_sides"},
    "stepscope.compare.views": {"compare_runs", "compare_interleaved", "compare_implementations"},
    "stepscope.analyze.job": {"explain_job"},
    "stepscope.analyze.answers.compose": {"answer"},
    "stepscope.report": {"build_report", "read_report_runs", "render_report", "format_collective_table"},
    "stepscope.report.trace_page": {"write_page"},
    "stepscope.store": {"create_run"},
}
"""What the functions of `stepscope` call: a verb that called it itself would do what no program can."""


def test_the_command_line_calls_the_api() -> None:
    found = [
        f"{path.name}: {node.module}.{alias.name}"
        for path in sorted((SOURCE / "cli").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name in COMPUTED_BY_THE_API.get(node.module or "", ())
    ]
    assert not found


def test_a_class_name_has_one_meaning() -> None:
    """Two classes of one name make a reader look twice; names for one module alone begin with an underscore."""
    places: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert not {name: found for name, found in places.items() if len(found) > 1}
