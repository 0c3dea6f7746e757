"""Options that several verbs share, declared once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from stepscope.cli.output import choose_json
from stepscope.core.errors import UsageError
from stepscope.core.units import parse_duration, parse_share

if TYPE_CHECKING:
    FloatParameter = click.ParamType[float]
else:  # click before 8.4 has no type argument
    FloatParameter = click.ParamType

F = TypeVar("F", bound=Callable[..., Any])

ANY_PATH = click.Path(path_type=Path)
FILE = click.Path(path_type=Path, dir_okay=False)
EXISTING_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


def apply_options(options: Iterable[Callable[[F], F]]) -> Callable[[F], F]:
    """A decorator that gives a command these options, in their order."""

    def decorate(function: F) -> F:
        for option in reversed(list(options)):
            function = option(function)
        return function

    return decorate


json_option = click.option(
    "--json", is_flag=True, expose_value=False, callback=choose_json,
    help="Machine-readable output on stdout, errors too.",
)  # fmt: skip


def _load_metrics(context: click.Context, _option: click.Parameter, paths: tuple[Path, ...]) -> None:
    from stepscope.metrics import forget_metrics, load_metrics_file

    for path in paths:
        names = [one.name for one in load_metrics_file(path)]
        context.call_on_close(partial(forget_metrics, names))


metrics_option = click.option(
    "--metrics", type=EXISTING_FILE, metavar="FILE", multiple=True, envvar="STEPSCOPE_METRICS", expose_value=False,
    callback=_load_metrics,
    help="Python file that registers metrics, which is executed; repeatable [default: $STEPSCOPE_METRICS].",
)  # fmt: skip
"""Metrics of the files hold for this command."""


def _find_store(_context: click.Context, _option: click.Parameter, value: Path | None) -> Path:
    from stepscope.store import resolve_store

    return resolve_store(value)


store_option = click.option(
    "--store", type=ANY_PATH, metavar="DIR", callback=_find_store,
    help="Folder of stored runs [default: $STEPSCOPE_STORE, else ./stepscope-runs].",
)  # fmt: skip


def resume_option(function: F) -> F:
    from stepscope.run.plan import NEWEST  # with it come records and the store, which other verbs do without

    return click.option(
        "--resume", is_flag=False, flag_value=NEWEST, default=None, metavar="[RUN]",
        help="Continue an interrupted run; without RUN, the newest one with the same cases, or else start a new one.",
    )(function)  # fmt: skip


def _find_device(_context: click.Context, _option: click.Parameter, value: str | None) -> str:
    from stepscope.measure import best_device

    return value or best_device()


device_option = click.option(
    "--device", callback=_find_device,
    help="Device to measure on: cpu, cuda or cuda:N [default: cuda where it works, else cpu].",
)  # fmt: skip


def was_given(name: str) -> bool:
    """On the command line, not by default."""
    source = click.get_current_context().get_parameter_source(name)
    return source not in {None, click.core.ParameterSource.DEFAULT}


class FiniteRange(click.FloatRange):
    """A number between bounds. NaN is between any two, and infinity above any: neither is one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class Duration(FloatParameter):
    name = "duration"

    def __init__(self, *, above_zero: bool = False) -> None:
        self._above_zero = above_zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        where = param.opts[0] if param else None
        seconds = value if isinstance(value, float) else parse_duration(str(value), where=where)
        if self._above_zero and not seconds > 0:
            raise UsageError("no time at all would end every run", hint="write for example 60s", where=where)
        return seconds


class Share(FloatParameter):
    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        return value if isinstance(value, float) else parse_share(str(value), where=param.opts[0] if param else None)


def level_option(function: F) -> F:
    return click.option("--level", type=Share(), default="1%", help="Chance of even one false alarm among all cases.")(
        function
    )


def resolution_option(function: F) -> F:
    return click.option(
        "--resolution",
        type=Share(),
        default="5%",
        help='Smallest change that must be detectable; otherwise the verdict is "not enough data".',
    )(function)


LONGEST_TAG = 60


def require_tag(tag: str | None) -> str | None:
    """Tags stand in tables: one line, and no characters that a terminal would obey."""
    if tag is not None and not (tag.strip() and tag.isprintable() and len(tag) <= LONGEST_TAG):
        raise UsageError(
            f"a tag is one line of 1 to {LONGEST_TAG} printable characters",
            hint="write for example --tag before-upgrade",
            where="--tag",
        )
    return tag


measure_options = apply_options(
    (
        click.option("--processes", type=click.IntRange(1), default=1,
                     help="Measure each case in this many fresh processes, so that noise between processes shows."),
        click.option("--until-decided", metavar="BASELINE",
                     help="Measure in as many fresh processes as a comparison with this baseline run needs."),
        click.option("--resolution", type=Share(), default="5%",
                     help="Smallest change that --until-decided must be able to detect."),
        click.option("--max-processes", type=click.IntRange(2), default=30,
                     help="Maximum number of fresh processes that --until-decided starts."),
        click.option("--quick", is_flag=True,
                     help="Measure each case for a fraction of a second; intervals are wider."),
        click.option("--target-width", type=Share(),
                     help="Stop once the interval is within ± this fraction [default: 1%]."),
        click.option("--min-time", type=Duration(), help="Sample each case for at least this long [default: 250ms]."),
        click.option("--max-time", type=Duration(), help="Sample each case for at most this long [default: 3s]."),
        click.option("--min-samples", type=click.IntRange(1),
                     help="Minimum number of samples per case [default: 20]."),
        click.option("--max-samples", type=click.IntRange(1),
                     help="Maximum number of samples per case [default: 20000]."),
        click.option("--warmup-max-time", type=Duration(),
                     help="Warm up each case for at most this long [default: 2s]."),
        click.option("--iterations", type=click.IntRange(1),
                     help="Time exactly this many iterations per case, one sample each, in place of the stop rule."),
        click.option("--warmup", type=click.IntRange(0),
                     help="Warm up for exactly this many iterations, not until times are stable."),
        click.option("--tag", metavar="TEXT", callback=lambda _context, _option, value: require_tag(value),
                     help="Label stored with the run; `stepscope runs list --tag` selects by it."),
    )
)  # fmt: skip


def run_options(function: F) -> F:
    """What every command has that measures into a run: how, which run goes on, and where it is kept."""
    return apply_options((measure_options, resume_option, store_option, json_option))(function)


PROCESS_OPTIONS = ("processes", "until_decided", "resolution", "max_processes", "tag")
"""Those of the options above that are no limits of the loop: they stand in the request itself."""
FIRST_PROCESSES = 3
"""With `--until-decided`: enough to see the noise that the rest is planned by."""


def request_processes(chosen: dict[str, Any]) -> dict[str, Any]:
    """The part of a request that says in how many fresh processes its cases are measured, and how it is tagged."""
    processes, baseline, resolution, most, tag = (chosen[name] for name in PROCESS_OPTIONS)
    if baseline is None:
        return {"processes": processes, "tag": tag}
    if not 0 < resolution < math.inf:
        raise UsageError("--resolution must be above 0 %", hint="write for example 5%", where="--resolution")
    from stepscope.records import UntilDecided

    until = UntilDecided(baseline=baseline, resolution=resolution, max_processes=max(processes, most))
    return {"processes": max(processes, FIRST_PROCESSES), "until_decided": until, "tag": tag}


def make_settings(choices: dict[str, Any]) -> Any:
    """MeasureSettings from the options of a command; raises UsageError for what cannot be."""
    from stepscope.measure import QUICK, MeasureSettings

    chosen = {name: choices[name] for name in (*STOP_RULE, "warmup_max_time", "iterations", "warmup")}
    base = QUICK if choices["quick"] else MeasureSettings()
    exact = _exact_counts(chosen)
    names = {"min_time": "min_time_s", "max_time": "max_time_s", "warmup_max_time": "warmup_max_time_s"}
    changes = {names.get(name, name): value for name, value in chosen.items() if value is not None}
    if "max_time_s" in changes:
        changes.setdefault("min_time_s", min(base.min_time_s, changes["max_time_s"]))
    if "max_samples" in changes:
        changes.setdefault("min_samples", min(base.min_samples, changes["max_samples"]))
    if "min_samples" in changes:
        changes.setdefault("few_samples", min(base.few_samples, changes["min_samples"]))
    try:
        return msgspec.convert({**msgspec.structs.asdict(base), **changes, **exact}, MeasureSettings)
    except (ValueError, msgspec.ValidationError) as error:
        raise UsageError(str(error), hint="stepscope bench ops --help lists the limits") from error


STOP_RULE = ("target_width", "min_time", "max_time", "min_samples", "max_samples")


def _exact_counts(chosen: dict[str, Any]) -> dict[str, Any]:
    """Settings of --iterations and --warmup, taken out of `chosen`; beside what they replace they are refused."""
    iterations, warmup = chosen.pop("iterations", None), chosen.pop("warmup", None)
    for count, option, replaced in (
        (iterations, "--iterations", STOP_RULE),
        (warmup, "--warmup", ("warmup_max_time",)),
    ):
        given = [name for name in replaced if chosen.get(name) is not None]
        if count is not None and given:
            other = f"--{given[0].replace('_', '-')}"
            raise UsageError(f"{option} fixes what {other} limits", hint="give one of them", where=option)
    counts: dict[str, Any] = {} if warmup is None else {"warmup_samples": warmup}
    if iterations is not None:
        counts |= dict.fromkeys(("few_samples", "min_samples", "max_samples"), iterations)
        counts |= {"iterations": 1}
    return counts
