"""Rank servers of tests are forks of one process that has loaded torch, so that not every test waits for it.

A command that starts ranks loads torch once for all of them, in a rank server of its own: one second of processor
time per command. In tests that call the command in their own process, that server is a fork of a process which the
test worker started once. From then on it is what it would have been: a child of the caller in a session of its own,
that ends with its parent, forks the ranks, says who ended how, and ends. Its ranks end without tearing down all that
torch has loaded, which takes 0.2 s each. The tests of starting ranks (`tests/launch`), and all commands that are
processes of their own, start and end it as users do.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NoReturn

from stepscope.launch.watchdog import die_with_parent, start_child

SERVER = [sys.executable, "-m", "stepscope.launch.server"]
_PR_SET_CHILD_SUBREAPER = 36
_READ_ON_LOADING = (
    "PYTHON", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_", "LD_", "TORCH_", "MALLOC_"
)  # fmt: skip
"""Variables that an interpreter or a library reads once: where a command sets others, its server is started anew."""
_SET_LATER = ("PYTHONPATH", "PYTHONFAULTHANDLER", "TORCH_NCCL", "TORCH_FR", "TORCH_DISTRIBUTED")


class WarmServer:
    """What the supervisor of ranks uses of `subprocess.Popen`, for a child that was not started by it."""

    def __init__(self, pid: int, stdout: IO[bytes]) -> None:
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


class WarmStarter:
    """Stands in for `start_child` where local ranks are started."""

    def __init__(self) -> None:
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._variables = read_on_loading(os.environ)

    def __call__(self, command: Sequence[str], *, env: Mapping[str, str], stderr: IO[bytes], **options: Any) -> Any:
        if list(command[:3]) != SERVER or read_on_loading(env) != self._variables or sys.platform != "linux":
            return start_child(command, env=env, stderr=stderr, **options)
        channel = self._channel or self._start()
        reading, writing = os.pipe()
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            request = json.dumps({"arguments": command[3:], "environ": dict(env), "folder": str(Path.cwd())}).encode()
            socket.send_fds(channel, [request], [writing, stderr.fileno()])
            pid = int(channel.recv(64))
            channel.recv(64)
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, 0)
            os.close(writing)
        return WarmServer(pid, os.fdopen(reading, "rb", buffering=0))

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
    """Answer each request with the process id of a server: a child of the client, since its own parent has ended."""
    while True:
        request, files, _, _ = socket.recv_fds(channel, 1 << 20, 2)
        if not request:
            return 0
        parent = os.fork()
        if parent == 0:
            pid = os.fork()
            if pid == 0:
                channel.close()
                become_server(client, files, **json.loads(request))
            channel.send(str(pid).encode())
            os._exit(0)
        os.waitpid(parent, 0)
        channel.send(b"is a child of the client")
        for file in files:
            os.close(file)


def become_server(
    client: int, files: list[int], *, arguments: list[str], environ: dict[str, str], folder: str
) -> NoReturn:
    from stepscope.launch import server

    while os.getppid() != client:
        time.sleep(0.001)
    os.setsid()
    for file, place in zip(files, (1, 2), strict=True):
        os.dup2(file, place)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:0] = [folder, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = [server.__file__, *arguments]
    die_with_parent(client)
    code = server.main()  # of the server, or of a rank, which is a fork of it
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> int:
    client = os.getppid()
    channel = socket.socket(fileno=int(sys.argv[1]))
    del sys.path[0]
    import_module("torch.distributed")
    execute = import_module("stepscope.run.execute")
    for verb in ("ops", "comms", "workload"):
        execute.load_before_fork(verb)
    gc.collect()
    gc.freeze()
    return serve(channel, client)


if __name__ == "__main__":
    sys.exit(main())
