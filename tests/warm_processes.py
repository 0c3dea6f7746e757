"""Rank servers of tests are forks of one process that has loaded torch, so that not every test waits for it.

A command that starts ranks loads torch once for all of them, in a rank server of its own: one second of processor
time per command. In tests that call the command in their own process, that server is a fork of a process which the
test worker started once. From then on it is what it would have been: a child of the caller in a session of its own,
that ends with its parent, forks the ranks, says who ended how, and ends. Its ranks end without tearing down all that
torch has loaded, which takes 0.2 s each. The tests of starting ranks (`tests/launch`), and all commands that are
processes of their own, start and end it as users do.

Fresh processes (`--processes`, `ab`) are forks too where a test asks for it with the fixture `forked_processes`,
because it is about what is done with their results and not about how they differ.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NoReturn

from stepscope.launch.watchdog import die_with_parent, start_child

MAIN_MODULES = {"stepscope.launch.server": "stepscope.launch.server", "stepscope.run": "stepscope.run.__main__"}
"""By what is asked for as `python -m`: the module whose `main` is called."""
_PR_SET_CHILD_SUBREAPER = 36
_READ_ON_LOADING = (
    "PYTHON", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_", "LD_", "TORCH_", "MALLOC_"
)  # fmt: skip
"""Variables that an interpreter or a library reads once: where a command sets others, its server is started anew."""
_SET_LATER = ("PYTHONPATH", "PYTHONFAULTHANDLER", "TORCH_NCCL", "TORCH_FR", "TORCH_DISTRIBUTED")


class ForkedProcess:
    """What is used of `subprocess.Popen`, for a child that was not started by it."""

    def __init__(self, pid: int, stdout: IO[bytes] | None = None) -> None:
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._look(os.WNOHANG)

    def wait(self) -> int | None:
        return self._look(0)

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def _look(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


class WarmStarter:
    """Stands in for `start_child` where ranks or fresh processes are started."""

    def __init__(self) -> None:
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._variables = read_on_loading(os.environ)

    def __call__(
        self, command: Sequence[str], *, env: Mapping[str, str], stdout: Any, stderr: IO[bytes], **options: Any
    ) -> Any:
        module = command[2]
        if module not in MAIN_MODULES or read_on_loading(env) != self._variables or sys.platform != "linux":
            return start_child(command, env=env, stdout=stdout, stderr=stderr, **options)
        request = {
            "module": MAIN_MODULES[module],
            "arguments": command[3:],
            "environ": dict(env),
            "folder": str(Path.cwd()),
            "session": options.get("start_new_session", False),
        }
        encoded = json.dumps(request).encode()
        if stdout != subprocess.PIPE:
            return ForkedProcess(self._fork(encoded, [stdout.fileno(), stderr.fileno()]))
        reading, writing = os.pipe()
        try:
            return ForkedProcess(self._fork(encoded, [writing, stderr.fileno()]), os.fdopen(reading, "rb", buffering=0))
        finally:
            os.close(writing)

    def _fork(self, request: bytes, files: list[int]) -> int:
        channel = self._channel or self._start()
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what has lost its parent becomes a child of this process
        try:
            socket.send_fds(channel, [request], files)
            pid = int(channel.recv(64))
            channel.recv(64)
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, 0)
        return pid

    def _start(self) -> socket.socket:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = start_child(
                [sys.executable, __file__, str(theirs.fileno())],
                env={**os.environ, "PYTHONFAULTHANDLER": "1"}, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                start_new_session=True,
            )  # fmt: skip
        atexit.register(self.stop)
        return self._channel

    def stop(self) -> None:
        if self._channel is not None and self._process is not None:
            self._channel.close()
            self._process.wait()


def read_on_loading(variables: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in variables.items()
        if name.startswith(_READ_ON_LOADING) and not name.startswith(_SET_LATER)
    }


def serve(channel: socket.socket, client: int) -> int:
    """Answer each request with the id of a new process: a child of the client, since its own parent has ended."""
    while True:
        request, files, _, _ = socket.recv_fds(channel, 1 << 20, 2)
        if not request:
            return 0
        parent = os.fork()
        if parent == 0:
            pid = os.fork()
            if pid == 0:
                channel.close()
                become(client, files, **json.loads(request))
            channel.send(str(pid).encode())
            os._exit(0)
        os.waitpid(parent, 0)
        channel.send(b"is a child of the client")
        for file in files:
            os.close(file)


def become(
    client: int,
    files: list[int],
    *,
    module: str,
    arguments: list[str],
    environ: dict[str, str],
    folder: str,
    session: bool,
) -> NoReturn:
    main_module = import_module(module)
    while os.getppid() != client:
        time.sleep(0.001)
    if session:
        os.setsid()
    for file, place in zip(files, (1, 2), strict=True):
        os.dup2(file, place)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:0] = [folder, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = [str(main_module.__file__), *arguments]
    die_with_parent(client)
    code = main_module.main()  # a rank, which is a fork of its server, ends here too
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> int:
    client = os.getppid()
    channel = socket.socket(fileno=int(sys.argv[1]))
    del sys.path[0]
    for library in ("torch.distributed", "torch._dynamo"):  # each rank's first optimizer would load the compiler
        import_module(library)
    execute = import_module("stepscope.run.execute")
    for verb in ("ops", "comms", "workload"):
        execute.load_before_fork(verb)
    gc.collect()
    gc.freeze()
    return serve(channel, client)


if __name__ == "__main__":
    sys.exit(main())
