"""A cluster in one machine: one network namespace a host, joined by a switch whose links have a rate.

Everything is made in namespaces of its own; the machine's own interfaces and routes are not touched. The hosts share
the machine's cores, memory and files, so only the network between them is like that of a real cluster.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import msgspec

from stepscope.core.errors import LaunchError, MissingDependencyError, UsageError
from stepscope.core.processes import last_line, run_program
from stepscope.launch.hosts import Cluster, LaunchHost, format_hostfile

INTERFACE = "eth0"
"""What every host calls its one link."""
MOST_HOSTS = 200
"""The last number of an address, with room to spare."""

_PREFIX = "stepscope-lab"
_TOOLS = ("ip", "tc", "unshare", "mount")
# root's PATH in a container often lacks the folders of system tools
_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
_COMMAND_LIMIT_S = 30
_NO_REASON = "it gave no reason"
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)bit", re.IGNORECASE)
_RATE_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BURST_S = 0.0021
_LEAST_BURST_BYTES = 64 * 1024
_QUEUE_S = 0.02


class NetLab:
    """Hosts `host0`, `host1` … for the time of a `with` block; cleaned up whatever happens inside.

        with NetLab(hosts=3, rate="1gbit", slow={2: "100mbit"}) as lab:
            lab.run(0, ["ip", "addr"])

    `rate` is that of every link, in both directions; None leaves them as fast as the machine. Needs root: ask
    `NetLab.why_not()` first.
    """

    def __init__(
        self, hosts: int = 2, *, rate: str | None = None, slow: Mapping[int, str] | None = None, slots: int = 1
    ) -> None:
        if not 1 <= hosts <= MOST_HOSTS:
            raise UsageError(f"a lab has 1 to {MOST_HOSTS} hosts, not {hosts}", where="--hosts")
        for number in slow or {}:
            if not 0 <= number < hosts:
                raise UsageError(
                    f"there is no host {number} of {hosts}", hint="hosts are numbered from 0", where="--slow"
                )
        self._rates: list[str | None] = [(slow or {}).get(number, rate) for number in range(hosts)]
        for one in filter(None, self._rates):
            parse_rate(one)
        # Two labs of one process need two names; the process id lets a later lab clean up after a killed one.
        self._tag = f"{_PREFIX}-{os.getpid()}-{os.urandom(2).hex()}"
        self._slots = slots
        self._folder: Path | None = None

    @staticmethod
    def why_not() -> str | None:
        """The reason why no lab can be made here, or None. Asks the kernel; takes some milliseconds."""
        if sys.platform != "linux":
            return "network namespaces need Linux"
        missing = [tool for tool in _TOOLS if shutil.which(tool, path=_PATH) is None]
        if missing:
            return f"{', '.join(missing)} not found (iproute2 and util-linux have them)"
        if os.geteuid() != 0:
            return "making network namespaces needs root"
        tried = _call(["unshare", "--net", "--uts", "--mount", "true"], check=False)
        reason = last_line(tried.stderr, _NO_REASON)
        return None if tried.returncode == 0 else f"the kernel refuses new namespaces: {reason}"

    def __enter__(self) -> Self:
        reason = self.why_not()
        if reason is not None:
            raise MissingDependencyError(f"no cluster can be made in this machine: {reason}", hint="run it as root")
        _remove_leftovers()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Take everything down; safe to call twice. Programs still running there only lose their network."""
        for name in _namespaces(self._tag):
            _call(["ip", "netns", "delete", name], check=False)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # What is in it

    @property
    def hosts(self) -> list[LaunchHost]:
        return [
            LaunchHost(name=f"host{number}", slots=self._slots, address=_address(number), interface=None)
            for number in range(len(self._rates))
        ]

    @property
    def cluster(self) -> Cluster:
        """For the launchers: names, addresses, the interface, and the command that enters a host."""
        return Cluster(
            hosts=tuple(self.hosts),
            interface=INTERFACE,
            rsh=f"{shlex.quote(str(self.enter_script))} {{host}}",
            # torch looks up the name of every address that connects, and complains where there is no name server.
            environment={"TORCH_CPP_LOG_LEVEL": "ERROR"},
        )

    @property
    def folder(self) -> Path:
        if self._folder is None:
            raise RuntimeError("the lab is not built yet: use it in a with block")
        return self._folder

    @property
    def cluster_file(self) -> Path:
        return self.folder / "cluster.yaml"

    @property
    def hostfile(self) -> Path:
        return self.folder / "hostfile"

    @property
    def enter_script(self) -> Path:
        """`enter host1 COMMAND …` runs a command there, as a remote shell would, but keeps its words as they are."""
        return self.folder / "enter"

    def namespace(self, host: int) -> str:
        return f"{self._tag}-host{host}"

    # What can be done with it

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """The words that run `argv` on a host."""
        return [str(self.enter_script), f"host{host}", *argv]

    def run(
        self, host: int, argv: Sequence[str], env: Mapping[str, str] | None = None, *, timeout_s: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end, its output captured; `env` is added to this process's variables."""
        return run_program(self.command(host, argv), limit_s=timeout_s, env={**os.environ, **(env or {})})

    def set_link(self, host: int, *, up: bool) -> None:
        """Pull a host's cable, or plug it in again: what it sends and what is sent to it is lost."""
        _ip_in(self._switch, "link", "set", _port(host), "up" if up else "down")

    def set_rate(self, host: int, rate: str | None) -> None:
        """Make a host's link this fast, in both directions; None takes the limit away."""
        for namespace, device in ((self.namespace(host), INTERFACE), (self._switch, _port(host))):
            if rate is None:
                # There is nothing to delete where no limit was set.
                _call(["ip", "netns", "exec", namespace, "tc", "qdisc", "del", "dev", device, "root"], check=False)
            else:
                _call(["ip", "netns", "exec", namespace, "tc", "qdisc", "replace", "dev", device, *_limit(rate)])
        self._rates[host] = rate

    # How it is made

    @property
    def _switch(self) -> str:
        return f"{self._tag}-switch"

    def _build(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=f"{self._tag}-"))
        self._write_files()
        _call(["ip", "netns", "add", self._switch])
        _ip_in(self._switch, "link", "add", "br0", "type", "bridge")
        _ip_in(self._switch, "link", "set", "br0", "up")
        for number, rate in enumerate(self._rates):
            self._add_host(number)
            if rate is not None:
                self.set_rate(number, rate)

    def _add_host(self, number: int) -> None:
        namespace, port = self.namespace(number), _port(number)
        _call(["ip", "netns", "add", namespace])
        _ip_in(namespace, "link", "set", "lo", "up")
        _ip_in(self._switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", namespace)
        _ip_in(self._switch, "link", "set", port, "master", "br0", "up")
        _ip_in(namespace, "addr", "add", f"{_address(number)}/24", "dev", INTERFACE)
        _ip_in(namespace, "link", "set", INTERFACE, "up")

    def _write_files(self) -> None:
        names = "".join(f"{host.address} {host.name}\n" for host in self.hosts)
        names_file = self.folder / "hosts"
        names_file.write_text("127.0.0.1 localhost\n::1 localhost\n" + names)
        self.enter_script.write_text(_format_enter(self._tag, names_file))
        self.enter_script.chmod(0o755)
        self.cluster_file.write_bytes(msgspec.yaml.encode(self.cluster))
        self.hostfile.write_text(format_hostfile(self.hosts))


def parse_rate(text: str, *, where: str | None = None) -> float:
    """Bits a second: `1gbit`, `100mbit`, `2.5gbit`, `64kbit`; powers of 1000, as `tc` counts them."""
    match = _RATE.fullmatch(text.strip())
    rate = float(match[1]) * _RATE_UNITS[match[2].lower()] if match else 0.0
    if rate < 1000:
        raise UsageError(
            f"{text!r} is not the rate of a link", hint="write for example 1gbit, 100mbit or 500kbit", where=where
        )
    return rate


def _limit(rate: str) -> list[str]:
    """A token bucket. It must hold what passes between two looks of the kernel, else the rate is not reached; a
    message that fits into it is not slowed at all, so it is kept small."""
    bits_per_s = parse_rate(rate)
    burst_bytes = max(_LEAST_BURST_BYTES, round(bits_per_s / 8 * _BURST_S))
    return [
        "root", "tbf", "rate", f"{bits_per_s:.0f}bit", "burst", f"{burst_bytes}b", "latency", f"{_QUEUE_S * 1e3:.0f}ms",
    ]  # fmt: skip


def _format_enter(tag: str, names_file: Path) -> str:
    """`ip netns exec` gives the command mounts of its own, so that /etc/hosts changes for it alone."""
    inside = (
        f'echo "$0" > /proc/sys/kernel/hostname && mount --bind {shlex.quote(str(names_file))} /etc/hosts && exec "$@"'
    )
    return (
        "#!/bin/sh\n"
        "# enter HOST COMMAND ...: run a command on a host of this lab.\n"
        "PATH=$PATH:/usr/sbin:/sbin\n"
        "host=$1\n"
        "shift\n"
        f'exec ip netns exec "{tag}-$host" unshare --uts sh -c {shlex.quote(inside)} "$host" "$@"\n'
    )


def _remove_leftovers() -> None:
    """What a killed process left behind: its id is in the name, and nobody has that id any more."""

    def is_left_over(name: str) -> bool:
        owner = name.removeprefix(f"{_PREFIX}-").partition("-")[0]
        return owner.isdigit() and not Path(f"/proc/{owner}").exists()

    for name in filter(is_left_over, _namespaces(_PREFIX)):
        _call(["ip", "netns", "delete", name], check=False)
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}-*"):
        if is_left_over(folder.name):
            shutil.rmtree(folder, ignore_errors=True)


def _namespaces(prefix: str) -> list[str]:
    listed = _call(["ip", "netns", "list"], check=False).stdout
    # "name" or "name (id: 3)"
    return [words[0] for line in listed.splitlines() if (words := line.split()) and words[0].startswith(f"{prefix}-")]


def _address(number: int) -> str:
    """Every lab uses the same addresses: no lab can see another one."""
    return f"10.77.0.{number + 1}"


def _port(number: int) -> str:
    return f"port{number}"


def _ip_in(namespace: str, *words: str) -> None:
    _call(["ip", "-n", namespace, *words])


def _call(command: Sequence[str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
    shown = shlex.join(command)
    try:
        done = run_program(command, limit_s=_COMMAND_LIMIT_S, env={**os.environ, "PATH": _PATH})
    except subprocess.TimeoutExpired:
        raise LaunchError(f"`{shown}` did not end within {_COMMAND_LIMIT_S} s") from None
    if check and done.returncode != 0:
        raise LaunchError(
            f"the lab's network could not be set up: {last_line(done.stderr, _NO_REASON)}",
            hint="the kernel may lack a module (veth, bridge, sch_tbf); try the command by hand",
            where=shown,
        )
    return done
