"""What `stepscope launch torchrun` runs on each host: torchrun, which ends with the process that started it.

    python -m stepscope.launch.node TORCHRUN-OPTIONS -m stepscope ARGUMENTS

It differs from `torchrun` in four ways. It says when it has started and when it reaches the first host. It gives up
with a reason when it cannot. It ends with the exit code of the rank that failed first, without torchrun's traceback.
When the process that started it ends, it ends its ranks: a remote shell that is killed here leaves its command running
there, but its standard input ends.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

from stepscope.core.errors import ExitCode, LaunchError, MissingDependencyError, StepscopeError, first_line
from stepscope.core.processes import exit_code_of, name_signal

HOLD = b"hold\n"
"""Written first by whoever starts this. Many remote shells give their command no input at all, which must not be
taken for the end of the one who started it."""
STARTED = "stepscope-node: started"
REACHED = "stepscope-node: reached the first host"
REASON = "stepscope-node: "
"""How lines on stderr begin that are meant for whoever started this; those above, else why it failed."""
JOIN_VARIABLE = "STEPSCOPE_JOIN_LIMIT_S"
DEFAULT_JOIN_LIMIT_S = 60.0

STOP_LIMIT_S = 8.0
"""torchrun asks its ranks to end and forces them after a while; this is for a torchrun that does not answer."""
_RETRY_S = 0.1
_CONNECT_LIMIT_S = 2.0


def main(arguments: list[str]) -> int:
    _say(STARTED)
    threading.Thread(target=_watch_starter, daemon=True).start()
    try:
        return _run(arguments)
    except StepscopeError as error:
        _say(f"{REASON}{error.message}")
        return error.exit_code


def _run(arguments: list[str]) -> int:
    try:
        import torch.distributed.run
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    except ImportError as error:
        raise MissingDependencyError(f"starting ranks needs torch on {socket.gethostname()}: {error}") from error
    # Hosts that are done leave one by one, and those that stay longer complain with a traceback that means nothing;
    # which rank failed is said below.
    for module in ("agent.server.api", "multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic.{module}").setLevel(logging.CRITICAL)
    torchrun: Any = torch.distributed.run
    options = torchrun.parse_args(arguments)
    if options.node_rank > 0:
        reach(options.master_addr, options.master_port, float(os.environ.get(JOIN_VARIABLE, DEFAULT_JOIN_LIMIT_S)))
    _say(REACHED)
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        _say(f"{REASON}rank {rank} {describe_code(failure.exitcode)}")
        return exit_code_of(failure.exitcode)
    except SignalException as error:
        return 128 + int(error.sigval)
    except RuntimeError as error:
        # The ranks' own errors are not seen here: this is torchrun failing to bring the hosts together.
        raise LaunchError(f"the hosts did not come together: {first_line(error)}") from error
    return ExitCode.DONE


def reach(address: str, port: int, limit_s: float) -> None:
    """Return when the first host's meeting point can be connected to; raises LaunchError with the last reason."""
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            socket.create_connection((address, port), timeout=_CONNECT_LIMIT_S).close()
            return
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise LaunchError(
                    f"{socket.gethostname()} could not reach the first host at {address}:{port} "
                    f"within {limit_s:.0f} s: {error.strerror or error}"
                ) from error
        time.sleep(_RETRY_S)


def describe_code(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"was ended by {name_signal(-code)}"


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _watch_starter() -> None:
    """Runs beside torchrun until this process ends, or until whoever started it has gone."""
    try:
        with os.fdopen(os.dup(0), "rb", buffering=0) as from_starter:
            if from_starter.read(len(HOLD)) != HOLD:
                return
            while from_starter.read(4096):
                pass
    except OSError:
        return
    _end()


def _end() -> None:
    import psutil

    # torchrun turns the signal into an exception, ends its ranks and comes back.
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_LIMIT_S)
    for process in psutil.Process().children(recursive=True):
        process.kill()
    os._exit(128 + signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
