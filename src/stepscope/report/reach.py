"""How much of a system a table of results covers, and what such a table can and cannot tell."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from stepscope.records import Case, Communication

Scope = Literal["operators only", "one device", "one node", "cluster"]
MODELS = frozenset({"ootb", "optimized"})


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    scope: Scope
    tells: str
    silent: str
    """What it does not tell."""

    def describe(self) -> str:
        return f"{self.scope}; tells {self.tells}, not {self.silent}"


REACHES = {
    "operators only": Reach(
        scope="operators only",
        tells="early what devices can do at best",
        silent="how much of it a model uses",
    ),
    "one device": Reach(
        scope="one device",
        tells="trends, and inference",
        silent="communication or input from shared storage",
    ),
    "one node": Reach(
        scope="one node",
        tells="inference as it is served, and the node's share of training",
        silent="the network between nodes",
    ),
    "cluster": Reach(scope="cluster", tells="training as it is run", silent="more than one node does about inference"),
}


def find_reach(cases: Iterable[Case], communications: Iterable[Communication | None]) -> Reach | None:
    """By the widest case of a whole model, if there is one; None without cases."""
    listed = list(cases)
    if not listed:
        return None
    ranks = max((case.world_size for case in listed if case.benchmark.implementation in MODELS), default=0)
    hosts = max((len({place.host for place in one.ranks}) for one in communications if one is not None), default=1)
    if ranks == 0:
        return REACHES["operators only"]
    if ranks == 1:
        return REACHES["one device"]
    return REACHES["one node" if hosts <= 1 else "cluster"]
