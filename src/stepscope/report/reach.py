"""How much of a system a table of results covers, and what such a table can and cannot tell."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from stepscope.records import Case, CaseResult, Communication
from stepscope.report.labels import MODELS

Scope = Literal["operators only", "one device", "one node", "cluster"]
WIDER: tuple[Scope, ...] = ("operators only", "one device", "one node", "cluster")


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    scope: Scope
    tells: str
    silent: str
    """What it does not tell."""

    def describe(self) -> str:
        return f"{self.scope}; tells {self.tells}, not {self.silent}"


REACHES: dict[Scope, Reach] = {
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


def find_reach(runs: Iterable[tuple[Iterable[CaseResult], Communication | None]]) -> Reach | None:
    """By the widest case of a whole model that was measured, if there is one; None where nothing was."""
    found = [_scope(one.case, carried) for results, carried in runs for one in results if one.status == "ok"]
    return REACHES[max(found, key=WIDER.index)] if found else None


def _scope(case: Case, communication: Communication | None) -> Scope:
    if case.benchmark.implementation not in MODELS:
        return "operators only"
    if case.world_size == 1:
        return "one device"
    hosts = {place.host for place in communication.ranks} if communication is not None else set()
    return "cluster" if len(hosts) > 1 else "one node"
