"""Which hosts a run uses: MPI's hostfiles and Stepscope's own cluster files, read into one form.

Pure data: nothing here looks a name up or connects to a host.
"""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from stepscope.core.errors import BadInputError, UsageError, suggest_name

CLUSTER_VARIABLE = "STEPSCOPE_CLUSTER"
"""Given to every rank by `stepscope launch`: the hosts of the run as JSON, kept with the run."""
CLUSTER_FILE_VARIABLE = "STEPSCOPE_CLUSTER_FILE"
"""Where the launch commands look when no file is named."""
DEFAULT_RSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 {host}"
"""Never asks for a password, which nobody would see, and does not wait minutes for a host that is switched off."""
MAX_SLOTS = 65536
"""A mistyped number must not fill the machine with processes."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*")
"""A host name or an address; a leading dash would be an option of the remote shell."""
_INTERFACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HOSTFILE_HINT = "write one host a line, for example `node1 slots=4` or `node1:4`"
_CLUSTER_HINT = 'write for example [[hosts]] with name = "node1" and slots = 4'


class LaunchHost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One host of a run, in the order in which its ranks are numbered."""

    name: str
    slots: Annotated[int, msgspec.Meta(ge=1, le=MAX_SLOTS)] = 1
    """Ranks to start there."""
    max_slots: Annotated[int, msgspec.Meta(ge=1, le=MAX_SLOTS)] | None = None
    """Never more ranks than this, whatever is asked for."""
    address: str | None = None
    """Where the other hosts reach it; its name when left out."""
    interface: str | None = None
    """The network interface to measure there, where it is not the cluster's."""

    def __post_init__(self) -> None:
        for name in (self.name, self.address):
            if name is not None and not _NAME.fullmatch(name):
                raise ValueError(
                    f"{name[:80]!r} cannot be a host's name or address: letters, digits, '.', '-', '_' and ':' make "
                    "one; put a user into ~/.ssh/config or the remote shell"
                )
        _check_interface(self.interface)
        if self.max_slots is not None and self.slots > self.max_slots:
            raise ValueError(f"{self.name} has slots={self.slots}, more than its max_slots={self.max_slots}")

    @property
    def reached_at(self) -> str:
        return self.address or self.name


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All hosts of a run and what their ranks share."""

    hosts: tuple[LaunchHost, ...]
    interface: str | None = None
    """The network interface of every host that names none of its own."""
    rsh: str | None = None
    """The command that runs something on a host; `{host}` stands for its name."""
    environment: dict[str, str] = {}
    """Variables of every rank."""

    def __post_init__(self) -> None:
        _check_interface(self.interface)

    @property
    def ranks(self) -> int:
        return sum(host.slots for host in self.hosts)

    def interface_of(self, host: LaunchHost) -> str | None:
        return host.interface or self.interface

    def host_of_rank(self, rank: int) -> LaunchHost:
        """Ranks fill the hosts one after the other."""
        return [host for host in self.hosts for _ in range(host.slots)][rank]

    def variables_of(self, host: LaunchHost) -> dict[str, str]:
        """What the ranks of a host find in their environment; what the file sets by name wins.

        UCX is not told the interface: it names devices (mlx5_0:1), and a name of the other kind would keep it from
        using RDMA.
        """
        interface = self.interface_of(host)
        if interface is None:
            return dict(self.environment)
        # Without the sign NCCL takes every interface whose name begins so: eth1 and eth10.
        return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}", **self.environment}


def _check_interface(interface: str | None) -> None:
    if interface is not None and not _INTERFACE.fullmatch(interface):
        raise ValueError(f"{interface[:80]!r} cannot be a network interface: it is one name, as `ip link` shows it")


def with_ranks_per_node(cluster: Cluster, ranks: int | None) -> Cluster:
    """The same number of ranks on every host, instead of its slots."""
    if ranks is None:
        return cluster
    for host in cluster.hosts:
        if host.max_slots is not None and ranks > host.max_slots:
            raise UsageError(
                f"{ranks} ranks per host are more than the max_slots={host.max_slots} of {host.name}",
                hint="ask for fewer, or change the file",
                where="--ranks-per-node",
            )
    hosts = tuple(msgspec.structs.replace(host, slots=ranks) for host in cluster.hosts)
    return msgspec.structs.replace(cluster, hosts=hosts)


# Hostfiles


def read_hostfile(path: Path) -> Cluster:
    return Cluster(hosts=tuple(parse_hostfile(_read_text(path), str(path))))


def parse_hostfile(text: str, where: str) -> list[LaunchHost]:
    """The hosts of a file in Open MPI's form (`node1 slots=4 max_slots=8`) or MPICH's (`node1:4`).

    A host without a count has one slot. A host that stands there again adds its slots to the first mention, which
    decides the order.
    """
    hosts: dict[str, LaunchHost] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        place = f"{where}, line {number}"
        host = _parse_hostfile_line(words, place)
        known = hosts.get(host.name)
        hosts[host.name] = host if known is None else _add_slots(known, host, place)
    if not hosts:
        raise BadInputError("the hostfile names no host", hint=_HOSTFILE_HINT, where=where)
    return list(hosts.values())


def format_hostfile(hosts: Iterable[LaunchHost]) -> str:
    """As Open MPI reads it; `parse_hostfile` gives the names and slots back."""
    return "".join(
        f"{host.name} slots={host.slots}" + (f" max_slots={host.max_slots}" if host.max_slots else "") + "\n"
        for host in hosts
    )


def _parse_hostfile_line(words: list[str], place: str) -> LaunchHost:
    name, count = _split_count(words[0])
    counts: dict[str, Any] = {} if count is None else {"slots": _parse_count(count, words[0], place)}
    for word in words[1:]:
        key, sign, value = word.partition("=")
        key = key.replace("-", "_")
        if not sign or key not in ("slots", "max_slots"):
            raise BadInputError(
                f"{word!r} is not understood after the host {name}",
                hint="slots=N and max_slots=N may follow the name; put users and ports into ~/.ssh/config or --rsh",
                where=place,
            )
        if key in counts:
            raise BadInputError(f"{name} is given {key} twice", hint=_HOSTFILE_HINT, where=place)
        counts[key] = _parse_count(value, word, place)
    try:
        return LaunchHost(name=name, **counts)
    except ValueError as error:
        raise BadInputError(str(error), hint=_HOSTFILE_HINT, where=place) from None


def _split_count(word: str) -> tuple[str, str | None]:
    """`node1:4` has a count; an IPv6 address with its many colons has none unless it stands in brackets."""
    bracketed = re.fullmatch(r"\[([^\[\]]*)\](?::(.*))?", word)
    if bracketed:
        return bracketed[1], bracketed[2]
    name, colon, count = word.partition(":")
    return (name, count) if colon and ":" not in count else (word, None)


def _parse_count(text: str, word: str, place: str) -> int:
    # int() also takes "+1", "1_0" and digits of other scripts, which no MPI reads.
    if not (text.isascii() and text.isdigit()):
        raise BadInputError(f"{word!r} has no whole number of slots", hint=_HOSTFILE_HINT, where=place)
    count = int(text)
    if not 1 <= count <= MAX_SLOTS:
        raise BadInputError(
            f"{word!r}: a host needs 1 to {MAX_SLOTS} slots",
            hint="leave the host out, or comment its line with #, if nothing should run there",
            where=place,
        )
    return count


def _add_slots(known: LaunchHost, again: LaunchHost, place: str) -> LaunchHost:
    slots = known.slots + again.slots
    if slots > MAX_SLOTS:
        raise BadInputError(f"{known.name} gets more than {MAX_SLOTS} slots", hint=_HOSTFILE_HINT, where=place)
    limits = [host.max_slots for host in (known, again) if host.max_slots is not None]
    if limits and slots > max(limits):
        raise BadInputError(
            f"the lines of {known.name} add up to {slots} slots, more than max_slots={max(limits)}",
            hint="raise max_slots, or remove a line",
            where=place,
        )
    return msgspec.structs.replace(known, slots=slots, max_slots=max(limits, default=None))


# Cluster files


def read_cluster_file(path: Path) -> Cluster:
    """A cluster file in TOML (`.toml`) or YAML (`.yaml`, `.yml`)."""
    import yaml

    loaders: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".yaml": yaml.safe_load, ".yml": yaml.safe_load}
    loader = loaders.get(path.suffix.lower())
    if loader is None:
        raise UsageError(
            f"{path.name} is no cluster file",
            hint=f"name it {', '.join(f'*{suffix}' for suffix in loaders)}, or use --hostfile for MPI's form",
            where=str(path),
        )
    text = _read_text(path)
    try:
        content = loader(text)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        message = " ".join(str(error).split())[:300]
        kind = path.suffix.lower().lstrip(".").upper()
        raise BadInputError(f"{path.name} is no {kind}: {message}", hint=_CLUSTER_HINT, where=str(path)) from None
    return parse_cluster(content, str(path))


def parse_cluster(content: object, where: str) -> Cluster:
    """A cluster from the tables of a file, checked: known keys, names that can be names, each host once."""
    table = _read_table(content, where, "a cluster", Cluster.__struct_fields__)
    listed = table.get("hosts")
    if not isinstance(listed, list) or not listed:
        raise BadInputError("the cluster file names no host", hint=_CLUSTER_HINT, where=where)
    for number, entry in enumerate(listed):
        _read_table(entry, f"{where}, hosts[{number}]", "a host", LaunchHost.__struct_fields__)
    environment = _read_environment(table.get("environment", {}), f"{where}, environment")
    try:
        cluster = msgspec.convert({**table, "environment": environment}, Cluster)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at ")
        place = path.strip("`").removeprefix("$").lstrip(".")
        raise BadInputError(message, hint=_CLUSTER_HINT, where=f"{where}, {place}" if place else where) from None
    names = [host.name for host in cluster.hosts]
    for number, name in enumerate(names):
        if (first := names.index(name)) < number:
            raise BadInputError(
                f"{name} is already hosts[{first}]; a host stands once, with all its slots",
                hint=_CLUSTER_HINT,
                where=f"{where}, hosts[{number}]",
            )
    if cluster.rsh is not None:
        check_rsh(cluster.rsh, f"{where}, rsh")
    return cluster


def check_rsh(template: str, where: str) -> None:
    """Raises UsageError unless the template says where the host's name goes."""
    try:
        words = shlex.split(template)
    except ValueError as error:
        raise UsageError(
            f"the remote shell {template!r} cannot be split into words: {error}",
            hint=f"write for example {DEFAULT_RSH!r}",
            where=where,
        ) from None
    if not any("{host}" in word for word in words):
        raise UsageError(
            f"the remote shell {template!r} has no {{host}}: every host would be the same one",
            hint="write for example 'ssh {host}'",
            where=where,
        )


def _read_table(content: object, where: str, what: str, known: Sequence[str] | None = None) -> Mapping[str, Any]:
    """Names and values; `known` are the only ones that there may be."""
    if not isinstance(content, dict):
        raise BadInputError(f"{what} is a table of names and values", hint=_CLUSTER_HINT, where=where)
    for key in content:
        if known is not None and key not in known:
            name = str(key)[:40]
            hint = suggest_name(name, known)
            raise BadInputError(f"{what} has no {name!r}", hint=hint, where=where)
    return content


def _read_environment(content: object, where: str) -> dict[str, str]:
    variables: dict[str, str] = {}
    for name, value in _read_table(content, where, "environment").items():
        if not _VARIABLE.fullmatch(str(name)):
            raise BadInputError(f"{name!r} cannot be a variable's name", hint='write NAME = "value"', where=where)
        # A bare number means its digits; true and 1.50 would not arrive as they were written.
        if isinstance(value, bool) or not isinstance(value, str | int) or "\0" in str(value):
            raise BadInputError(f"{name} must be a text", hint=f'write {name} = "…"', where=where)
        variables[str(name)] = str(value)
    return variables


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint="check the path", where=str(path)) from None
    except UnicodeDecodeError:
        raise BadInputError(f"{path.name} is not UTF-8 text", hint="save it as UTF-8", where=str(path)) from None


# What is kept with the run


def describe_cluster(cluster: Cluster) -> dict[str, Any]:
    """For records. How the hosts are entered is left out: it does not change what is measured there."""
    hosts = [_list_stated(host) for host in cluster.hosts]
    return {"hosts": hosts, "interface": cluster.interface, "environment": dict(cluster.environment)}


def _list_stated(host: LaunchHost) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(host).items() if value is not None}


def encode_cluster(cluster: Cluster) -> str:
    """For CLUSTER_VARIABLE."""
    return msgspec.json.encode(describe_cluster(cluster)).decode()


def read_cluster_from_environment(environ: Mapping[str, str] | None = None) -> dict[str, Any] | None:
    """The hosts that `stepscope launch` started this rank on, for the record; None where it did not."""
    text = (os.environ if environ is None else environ).get(CLUSTER_VARIABLE)
    if not text:
        return None
    try:
        content = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise UsageError(
            f"{CLUSTER_VARIABLE} holds no JSON: {error}",
            hint=f"unset {CLUSTER_VARIABLE}: `stepscope launch` sets it itself",
            where=CLUSTER_VARIABLE,
        ) from None
    return describe_cluster(parse_cluster(content, CLUSTER_VARIABLE))
