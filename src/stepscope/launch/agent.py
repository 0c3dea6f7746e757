"""A remote shell for Open MPI that goes the cluster file's way to a host.

    python -m stepscope.launch.agent HOST COMMAND …

mpirun calls it in place of ssh, and like ssh it makes one line of the command for a shell on the host to read.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

RSH_VARIABLE = "STEPSCOPE_RSH"
"""The remote shell's template, set for mpirun by `stepscope launch mpirun`."""


def main(arguments: list[str]) -> None:
    from stepscope.launch.remote import shell_words

    template = os.environ.get(RSH_VARIABLE, "")
    if not template or len(arguments) < 2:
        sys.exit(f"{Path(__file__).name} is started by mpirun, with {RSH_VARIABLE} set and a host and a command")
    host, *words = arguments
    command = shell_words(shlex.split(template), host, " ".join(words))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
