"""A user model: a function in a file that builds a step; and files of a user, known by their content."""

from __future__ import annotations

import ast
import ctypes
import hashlib
import inspect
import linecache
import math
import os
import reprlib
import runpy
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from stepscope.bench.workloads.facts import EnergyMeter, PeakMemory
from stepscope.core.errors import BadInputError, StepscopeError, UsageError
from stepscope.measure import Device, Measurement
from stepscope.records import Benchmark, Case, Score, describe_exception
from stepscope.records.kinds import UserModelObserved, UserModelSpec
from stepscope.run.producer import ExtraMeasurements, Prepared, WrongResultError
from stepscope.run.ranks import CaseSkipped
from stepscope.run.recorded import record_steps

_LENGTH = 12


def hash_content(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_LENGTH]


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:_LENGTH]


def require_unchanged(path: Path, known: str) -> None:
    """Results of one run are of one content."""
    if not path.is_file():
        raise BadInputError("the file is gone since the run was planned", hint="put it back", where=str(path))
    if hash_file(path) != known:
        raise BadInputError(
            "the file has changed since the run was planned",
            hint="put the old one back, or start a new run",
            where=str(path),
        )


HINT = "write path/to/file.py:build, where build(device, batch_size) returns a function that makes one step"

_ALONE = ("a user model is measured in one process", "leave it out")
_NO_LOADER = ("only the steps that build makes are timed", "leave it out; to time loading too, load in step()")
REFUSED = {
    "data": ("a user model makes its data itself", "read the file in build"),
    "scale": ("a user model has no tiny scale", "choose its sizes in build, or with --batch-size"),
    "no_check": ("a user model's own check() is part of the result", "return an object without check()"),
    "loader_workers": _NO_LOADER,
    "no_loader": _NO_LOADER,
    "compile_backend": ("a user model compiles itself", "torch.compile(model, backend=…) in build"),
    "accumulate": ("a user model makes its own steps", "accumulate in it"),
    "rate": ("only decoders of the suite answer requests", "leave it out"),
    "requests": ("only decoders of the suite answer requests", "leave it out"),
    "ranks": _ALONE,
    "parallel": _ALONE,
    "group_backend": _ALONE,
}
"""Options of the command that mean nothing to a user model: why, and the next step."""
_OURS = (StepscopeError, CaseSkipped)
"""What Stepscope itself has to say, not the user's file."""


class UserFileError(StepscopeError):
    """A user's file raised something, or ended the process."""

    def __init__(self, kind: str, message: str, *, hint: str, where: str) -> None:
        super().__init__(message, hint=hint, where=where)
        self.kind = kind


class Takes(NamedTuple):
    """What can be given to a function by name."""

    names: frozenset[str]
    every: bool
    """It takes whatever comes."""
    usual_batch: int | None
    """The default of its batch size; None: there is none, or it cannot be told."""


def is_user_model(text: str) -> bool:
    """`path/to/file.py:build`, which no benchmark of the suite looks like."""
    return ".py:" in text or text.endswith(".py")


def make_user_case(
    text: str, *, device: str, batch_size: int | None, precision: str | None, search: str | None = None
) -> Case:
    """Without executing the file: what cannot be told from its text is refused when it runs."""
    file, _, name = text.rpartition(":") if ".py:" in text else (text, "", "build")
    path = Path(file)
    if not path.is_file():
        raise UsageError("there is no such file", hint=HINT, where=file)
    content = path.read_bytes()
    takes = _parse_takes(content, name)
    if takes is not None:
        _refuse_untaken(takes, batch_size, precision, name=name, path=path)
        batch_size = batch_size or takes.usual_batch
    spec = UserModelSpec(
        device=device, file=str(path.resolve()), function=name, sha256=hash_content(content), precision=precision,
        search=search,
    )  # fmt: skip
    benchmark = Benchmark(
        model=_as_part(path.stem),
        implementation="ootb",
        mode="step",
        config=_as_part(name),
        owner="user",
        description=f"{name} of {path.name}",
    )
    return Case(benchmark=benchmark, spec=spec, batch_size=batch_size)


def _as_part(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name).strip("-") or "own"


def _parse_takes(content: bytes, name: str) -> Takes | None:
    """None: it is no plain function of the file (imported, decorated, bound twice), and only running it tells."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they come when it is executed
            tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return None
    function = _find_only(tree, name)
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        return None
    named = function.args
    defaults = dict(zip(reversed(named.args), reversed(named.defaults), strict=False))
    defaults |= {one: value for one, value in zip(named.kwonlyargs, named.kw_defaults, strict=True) if value}
    usual = next((value for one, value in defaults.items() if one.arg == "batch_size"), None)
    return Takes(
        names=frozenset(one.arg for one in [*named.args, *named.kwonlyargs]),
        every=named.kwarg is not None,
        usual_batch=_parse_number(tree, usual),
    )


def _find_only(tree: ast.Module, name: str) -> ast.stmt | None:
    """The statement of the file that gives this name its only meaning."""
    bound = [node for node in ast.walk(tree) if _binds(node, name)]
    holders = (one for one in tree.body if bound[0] in (one, *getattr(one, "targets", ())))
    return next(holders, None) if len(bound) == 1 else None


def _binds(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name == name
    if isinstance(node, ast.alias):
        return (node.asname or node.name) == name
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)


def _parse_number(tree: ast.Module, value: ast.expr | None) -> int | None:
    """The value of a number, or of a constant of the file."""
    if isinstance(value, ast.Name):
        constant = _find_only(tree, value.id)
        value = constant.value if isinstance(constant, ast.Assign) else None
    return _as_batch(value.value) if isinstance(value, ast.Constant) else None


def _as_batch(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _inspect_takes(build: Callable[..., Any]) -> Takes:
    takes = inspect.signature(build).parameters
    usual = takes.get("batch_size")
    return Takes(
        names=frozenset(
            name for name, one in takes.items() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        ),
        every=any(one.kind is one.VAR_KEYWORD for one in takes.values()),
        usual_batch=_as_batch(usual.default) if usual is not None else None,
    )


def _refuse_untaken(takes: Takes, batch_size: int | None, precision: object, *, name: str, path: Path) -> None:
    """What a function does not take would be recorded, and counted, without being used."""
    for option, value in (("batch_size", batch_size), ("precision", precision)):
        if value is not None and not takes.every and option not in takes.names:
            raise UsageError(
                f"{name} takes no {option}: {value} would change nothing",
                hint=f"write def {name}(device, {option}) and use it, or leave --{option.replace('_', '-')} out",
                where=str(path),
            )


@contextmanager
def stdout_as_stderr() -> Iterator[None]:
    """What a user's file prints, in Python or below it, goes to stderr: stdout is the answer of the command."""
    library = ctypes.CDLL(None)
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        library.fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


def prepare_user_model(
    case: Case, device: Device, *, beat: Callable[[], object] | None = None, record_in: Path | None = None
) -> Prepared:
    """`beat`: called before each timed region, for a supervisor that limits how long one may take. `record_in`: the
    folder of the run, if a few steps shall be recorded there after the timed ones."""
    spec = case.spec
    assert isinstance(spec, UserModelSpec)
    path, name = Path(spec.file), spec.function
    require_unchanged(path, spec.sha256)
    memory = PeakMemory(device.name)
    with ExitStack() as scope:
        scope.enter_context(stdout_as_stderr())
        with _blaming(path):
            build = _find(path, name)
            takes = _inspect_takes(build)
            _refuse_untaken(takes, case.batch_size, spec.precision, name=name, path=path)
            built = _call(build, takes, spec, case.batch_size, path)
            step, check = _find_parts(built, name, path)
            batch_size = case.batch_size or takes.usual_batch
            examples = _count_examples(built, path) or batch_size
            step()
            device.synchronize()
        close = scope.pop_all().close
    energy, calls = EnergyMeter(device.name), 0
    energy.begin(calls)

    def body() -> None:
        nonlocal calls
        try:  # not `with`: this is timed
            step()
        except _OURS:
            raise
        except (Exception, SystemExit) as error:
            raise _blame(error, path) from error
        calls += 1

    def finish(measurement: Measurement) -> tuple[Measurement, ExtraMeasurements]:
        joules = energy.read_j_per_step(calls)
        observed = UserModelObserved(
            peak_memory_bytes=memory.read_bytes(),
            energy_j_per_example=joules / examples if joules is not None and examples else None,
            trace=record_steps(body, record_in, case) if record_in is not None else None,
        )
        return measurement, ExtraMeasurements(observed=observed)

    return Prepared(
        body=body,
        score=Score(unit="ex/s" if examples else "step/s", work=float(examples or 1)),
        observed=UserModelObserved(batch_size=None if case.batch_size else batch_size, examples=examples),
        before_sample=beat,
        finish=finish,
        check=partial(_run_check, check, path) if check is not None else None,
        close=close,
    )


def _find_parts(built: Any, name: str, path: Path) -> tuple[Callable[[], Any], Callable[[], Any] | None]:
    step, check = getattr(built, "step", None) or built, getattr(built, "check", None)
    if not callable(step):
        raise UsageError(f"{name} returned {type(built).__name__}, which has no step", hint=HINT, where=str(path))
    if check is not None and not callable(check):
        raise UsageError(
            f"check is {reprlib.repr(check)}, which cannot be called", hint="write it as check()", where=str(path)
        )
    return step, check


def _count_examples(built: Any, path: Path) -> float | None:
    """Those that the built object says a step has; None: it says nothing."""
    told = _as_plain(getattr(built, "examples", None))
    if told is None:
        return None
    if not isinstance(told, int | float) or isinstance(told, bool) or not 0 < told < math.inf:
        raise UsageError(
            f"examples is {reprlib.repr(told)}, which is no number of examples",
            hint="give it the examples of one step, or leave it out",
            where=str(path),
        )
    return told


def _as_plain(value: Any) -> Any:
    """Numbers and truths of arrays and tensors are of their own kinds; raises for more than one."""
    return value.item() if hasattr(value, "item") else value


def _run_check(check: Callable[[], Any], path: Path) -> None:
    """None and True pass, nothing else does: a pair of False and a reason would be taken for true."""
    try:
        found = check()
        passed = found is None or _as_plain(found) is True
    except (Exception, SystemExit) as error:
        blamed = _blame(error, path)
        raise WrongResultError(f"check() failed: {blamed.message}", hint=blamed.hint, where=blamed.where) from error
    if not passed:
        raise WrongResultError(
            found.strip() if isinstance(found, str) and found.strip() else f"check() returned {reprlib.repr(found)}",
            hint=f"fix the step or the check in {path.name}: it passes with None or True",
            where=str(path),
        )


@contextmanager
def _blaming(path: Path) -> Iterator[None]:
    try:
        yield
    except _OURS:
        raise
    except (Exception, SystemExit) as error:
        raise _blame(error, path) from error


def _blame(error: BaseException, path: Path) -> UserFileError:
    """What a user's file raised, as a failure that names the line."""
    line = _find_line(error, path)
    look = _say_where(error, path, line)
    where = f"{path}:{line}" if line else str(path)
    if isinstance(error, SystemExit):
        hint = f'{look} (code for the command line belongs under if __name__ == "__main__")'
        return UserFileError("exception", f"{path.name} called sys.exit({error.code!r})", hint=hint, where=where)
    failure = describe_exception(error)
    return UserFileError(
        failure.kind, failure.message, hint=f"{failure.hint}; {look}" if failure.hint else look, where=where
    )


def _say_where(error: BaseException, path: Path, line: int | None) -> str:
    if line is None:
        return f"look at {path.name}"
    linecache.checkcache(str(path))
    text = f"look at line {line} of {path.name}: {linecache.getline(str(path), line).strip()}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    if last.filename == str(path) or isinstance(error, SyntaxError | SystemExit):
        return text
    return f"{text} (raised by {last.name}, {last.filename}:{last.lineno})"


def _find_line(error: BaseException, path: Path) -> int | None:
    """The innermost line of the file that led to it."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno
    lines = [place.lineno for place in traceback.extract_tb(error.__traceback__) if place.filename == str(path)]
    return lines[-1] if lines else None


def _find(path: Path, name: str) -> Callable[..., Any]:
    """Executes the file."""
    # As `python file.py` does: what lies beside the file can be imported.
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    found = runpy.run_path(str(path), run_name=path.stem).get(name)
    if not callable(found):
        raise UsageError(f"there is no function {name} in it", hint=HINT, where=str(path))
    return found  # type: ignore[no-any-return]


def _call(build: Callable[..., Any], takes: Takes, spec: UserModelSpec, batch_size: int | None, path: Path) -> Any:
    """With those of `device`, `batch_size` and `precision` that it takes; others keep their defaults."""
    offered = {"device": spec.device, "batch_size": batch_size, "precision": spec.precision}
    given = {
        name: value for name, value in offered.items() if value is not None and (takes.every or name in takes.names)
    }
    lacking = [
        name for name, one in inspect.signature(build).parameters.items()
        if one.default is one.empty and name in takes.names and name not in given
    ]  # fmt: skip
    if lacking:
        options = [f"--{name.replace('_', '-')}" for name in lacking if name in offered]
        option = f" ({', '.join(options)})" if options else ""
        raise UsageError(f"{spec.function} needs {', '.join(lacking)}{option}", hint=HINT, where=str(path))
    return build(**given)
