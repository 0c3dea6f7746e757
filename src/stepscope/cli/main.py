"""The entry point: finds the verb without importing the others, and is the border where errors become exit codes."""

from __future__ import annotations

import errno
import importlib
import os
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

import click

from stepscope._version import __version__
from stepscope.cli.output import LAST_WORD_S, answer_stream, narrate, print_error, release_stdout
from stepscope.core.errors import (
    ExitCode,
    FileError,
    FirstRankMissingError,
    InterruptedRunError,
    StepscopeError,
    UsageError,
)

VERBS: dict[str, tuple[str, str]] = {
    "demo": ("stepscope.cli.demo", "Measure, trace and explain a small job on this machine; ends with pages to open."),
    "doctor": ("stepscope.cli.doctor", "Show what this machine is, what can run on it, and sources of noise."),
    "bench": ("stepscope.cli.bench", "Measure operators, collectives and workloads."),
    "runs": ("stepscope.cli.runs", "List, show, import, export, verify, query, resume and remove stored runs."),
    "report": ("stepscope.cli.report", "Show stored runs as text, Markdown, CSV, JSON or one HTML page."),
    "compare": ("stepscope.cli.compare", "Compare two runs case by case: better, worse or no difference found."),
    "check": ("stepscope.cli.check", "Fail if a run is slower than its baseline; for CI."),
    "ab": ("stepscope.cli.ab", "Measure two commands interleaved, in repeated fresh processes, and compare them."),
    "trace": ("stepscope.cli.trace", "Record, read, explain, compare, convert and link traces."),
    "costs": ("stepscope.cli.costs", "Fit cost models to measured runs."),
    "launch": ("stepscope.cli.launch", "Start ranks on several hosts, or on a cluster in one machine."),
}  # fmt: skip
"""Verb → module and what `--help` says of it, so that help imports none of them."""


RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
"""Where launchers tell a process its number: without `launch`, which would be imported for a message."""


FIRST_WORD_S = 1.0

_FILE_HINTS = {
    errno.EACCES: "ls -ld shows who may use it",
    errno.EROFS: "the file system can only be read: choose another place",
    errno.ENOSPC: "make room on the disk",
    errno.ENAMETOOLONG: "use a shorter name",
}
"""By the reason the system gives."""


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(VERBS[cmd_name][0]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in VERBS.items()])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
)
@click.version_option(__version__, prog_name="stepscope")
def app() -> None:
    """How long does a training or inference step take, why, and how long would it take somewhere else?"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run and exit: 0 done, 1 failed, 2 wrong use or bad input, 3 regression, 4 undecided, 130 interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    code = _run(arguments)
    if code and "torch.distributed" in sys.modules:
        from stepscope.launch import leave_group_behind

        leave_group_behind(code, after_s=LAST_WORD_S)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """The same without leaving the process; returns the exit code."""
    try:
        return _run(arguments)
    finally:
        release_stdout()


def _run(arguments: list[str]) -> int:
    try:
        code = app.main(args=arguments, prog_name="stepscope", standalone_mode=False, obj=arguments)
    except BrokenPipeError:
        # The reader of our output went away (`| head`); nothing is wrong and nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), answer_stream().fileno())
        return ExitCode.DONE
    except (Exception, KeyboardInterrupt) as error:
        if os.environ.get("STEPSCOPE_DEBUG"):
            raise
        return _fail(_as_stepscope_error(error), as_json="--json" in arguments)
    return code if isinstance(code, int) else ExitCode.DONE


def _as_stepscope_error(error: BaseException) -> StepscopeError:
    """Whatever reached the border as one message; what nobody foresaw is called a defect."""
    if isinstance(error, StepscopeError):
        return error
    if isinstance(error, click.UsageError):
        verb = error.ctx.command_path if error.ctx else "stepscope"
        return UsageError(error.format_message(), hint=f"{verb} --help")
    if isinstance(error, click.ClickException):
        return UsageError(error.format_message())
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return InterruptedRunError("stopped by the user", hint="finished cases are kept: continue with --resume")
    if isinstance(error, OSError) and error.filename is not None:
        message = f"{error.strerror or type(error).__name__}: {error.filename}"
        return FileError(message, hint=_FILE_HINTS.get(error.errno or 0, "check the path"), where=str(error.filename))
    return StepscopeError(
        f"{type(error).__name__}: {error}",
        hint="this is a defect of Stepscope: set STEPSCOPE_DEBUG=1 for the traceback and report it",
    )


def _fail(error: StepscopeError, *, as_json: bool) -> int:
    """With several ranks only rank 0 prints the error; what happened on another rank alone must not be lost either."""
    rank = next((os.environ[name] for name in RANK_VARIABLES if os.environ.get(name)), "0")
    if rank == "0" or isinstance(error, FirstRankMissingError):
        print_error(error, as_json=as_json)
    else:
        narrate(f"stepscope, rank {rank}: {error.message}")
        time.sleep(FIRST_WORD_S)  # launchers end all ranks with the first that fails: let the first one speak
    return error.exit_code


if __name__ == "__main__":
    main()
