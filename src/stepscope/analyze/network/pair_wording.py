"""What is said of a cause: one sentence, and what to look at next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stepscope.analyze.network.suspects import Kind, Scope, Suspect
from stepscope.core.units import format_share, format_significant

MOST_NAMES = 8
"""Named one by one; of more only the first ones."""


class Effect(NamedTuple):
    latency_ratio: float | None
    bandwidth_ratio: float | None
    has_latency: bool
    """Whether it was measured: only then can it be as usual."""
    has_bandwidth: bool


def describe_slow(suspect: Suspect, effect: Effect, pairs: int) -> tuple[str, str]:
    counted = f"{pairs} pair{'s' if pairs > 1 else ''}"
    return f"{_who(suspect)} {_what(suspect)}: {_how_much(effect)} ({counted})", _next_step(suspect)


def describe_failed(suspect: Suspect, pairs: int, message: str) -> tuple[str, str]:
    counted = f"{pairs} pair{'s' if pairs > 1 else ''}"
    if suspect.kind in {"bad_link", "asymmetric_pair"}:
        said = f"{_who(suspect)} gave no good result"
    else:
        way = {"slow_sender": " from", "slow_receiver": " to"}.get(suspect.kind, " to or from")
        said = f"no message{way} {_who(suspect)} gave a good result"
    return f"{said} ({counted}; {message})", _REACH_STEP


_REACH_STEP = (
    "look at the failed cases, then whether the two ends reach each other at all: address, port, firewall, cable"
)


def describe_tiers(groups: Sequence[Sequence[int]], host: Mapping[int, str], effect: Effect) -> tuple[str, str]:
    homes = [{host[rank] for rank in group} for group in groups]
    whole_hosts = sum(map(len, homes)) == len(set().union(*homes))
    names = [
        _list_names(list(dict.fromkeys(host[rank] for rank in group)) if whole_hosts else [f"{rank}" for rank in group])
        for group in groups[:MOST_NAMES]
    ]
    more = f" and {len(groups) - MOST_NAMES} more" if len(groups) > MOST_NAMES else ""
    what = "hosts" if whole_hosts else "ranks"
    sentence = f"{what} form {len(groups)} groups ({'; '.join(names)}{more}), and between them {_how_much(effect)}"
    step = (
        "as it should be where the groups hang on different switches; else look at what connects them"
        if whole_hosts
        else "as it should be where the groups sit on different sockets or PCIe switches (nvidia-smi topo -m)"
    )
    return sentence, step


def _list_names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MOST_NAMES])
    return f"{shown} and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else shown


def _who(suspect: Suspect) -> str:
    ranks = f"rank {suspect.ranks[0]}" if len(suspect.ranks) == 1 else f"ranks {_list_names(_words(suspect.ranks))}"
    if suspect.kind in {"bad_link", "asymmetric_pair"}:
        return _link_name(suspect)
    host = suspect.hosts[0]
    if suspect.nic is not None:
        return f"NIC {suspect.nic} of host {host} ({ranks})"
    return f"host {host} ({ranks})" if _is_host(suspect) else f"{ranks} on host {host}"


def _is_host(suspect: Suspect) -> bool:
    """Whether the whole host is meant: all its ranks, of which there may be one."""
    if suspect.kind == "slow_host":
        return True
    return suspect.kind in {"slow_sender", "slow_receiver"} and len(suspect.ranks) > 1


def _words(ranks: Sequence[int]) -> list[str]:
    return [str(rank) for rank in ranks]


def _link_name(suspect: Suspect) -> str:
    arrow = "→" if suspect.kind == "asymmetric_pair" else "–"
    (first, second), names = suspect.blocks[0], suspect.hosts
    if suspect.scope == "inside":
        return f"ranks {first[0]} {arrow} {second[0]} on host {names[0]}"
    if len(first) == len(second) == 1:
        return f"rank {first[0]} on host {names[0]} {arrow} rank {second[0]} on host {names[1]}"
    return f"hosts {names[0]} {arrow} {names[1]}"


def _what(suspect: Suspect) -> str:
    if suspect.kind == "bad_link":
        return "is a slow link"
    if suspect.kind == "asymmetric_pair":
        return "is slow in this direction only"
    verb = {"slow_sender": "sends slowly", "slow_receiver": "receives slowly"}.get(suspect.kind, "is slow")
    way = {"slow_sender": "to", "slow_receiver": "from"}.get(suspect.kind, "to and from")
    return f"{verb} {way} {_WHOM[suspect.scope]}"


_WHOM: dict[Scope, str] = {
    "outside": "every other host",
    "inside": "the ranks of its own host",
    "everywhere": "everybody",
}


def _how_much(effect: Effect) -> str:
    parts = []
    if effect.latency_ratio is not None:
        parts.append(f"latency is {format_significant(effect.latency_ratio, 3)} times the usual")
    elif effect.has_latency:
        parts.append("latency is as usual")
    if effect.bandwidth_ratio is not None:
        parts.append(f"bandwidth is {format_share(effect.bandwidth_ratio, 0)} of the usual")
    elif effect.has_bandwidth:
        parts.append("bandwidth is as usual")
    # What stands out comes first.
    if effect.latency_ratio is None:
        parts.reverse()
    return ", ".join(parts)


def _next_step(suspect: Suspect) -> str:
    return _STEPS.get((suspect.kind, suspect.scope)) or _STEPS_ANYWHERE[suspect.kind]


_STEPS: dict[tuple[Kind, Scope], str] = {
    ("slow_host", "everywhere"): "look at the host itself: clocks, power limit, other work (stepscope doctor there)",
    (
        "slow_host",
        "inside",
    ): "look inside the host: PCIe and NVLink state, NUMA binding, memory (stepscope doctor there)",
    ("slow_rank", "outside"): "look at this rank's way to the NIC: NUMA binding, PCIe path, which NIC it is given",
    (
        "slow_rank",
        "inside",
    ): "look at the device's links inside the host: nvidia-smi nvlink -s, PCIe width, NUMA binding",
    (
        "bad_link",
        "inside",
    ): "look at what connects the two inside the host: nvidia-smi topo -m, PCIe width, NUMA binding",
    (
        "asymmetric_pair",
        "inside",
    ): "measure this pair again; if it stays, look at PCIe width and NUMA binding of both ends",
}

_STEPS_ANYWHERE: dict[Kind, str] = {
    "slow_host": "compare its NIC, cable and switch port with a good host's: speed, error counters (ethtool, ibstat)",
    "slow_nic": "compare this NIC with the others of the host: link speed, PCIe width, cable, error counters",
    "slow_rank": "look at this rank's cores and device: binding, clocks, other work (stepscope doctor there)",
    "slow_sender": "look at its sending side: retransmissions, pause frames, transmit queues, what else sends there",
    "slow_receiver": "look at its receiving side: dropped packets, interrupts, buffers, what else arrives there",
    "bad_link": "measure this pair again; if it stays, look at the path: cables, switch ports, routing",
    "asymmetric_pair": "measure this pair again; if it stays, compare the routes of the two directions",
}
