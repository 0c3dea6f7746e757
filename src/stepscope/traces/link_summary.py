"""How much of a graph and a timeline was joined: recordings keep it, so this module does without numpy."""

from __future__ import annotations

import msgspec


class LinkSummary(msgspec.Struct, frozen=True, kw_only=True):
    """How much of two files was joined."""

    generation: str
    linked_share: float
    """The smaller of the two shares that follow."""
    device_share: float | None
    """Share of device events whose call was found; None where there are no device events."""
    operator_share: float | None
    """Share of the graph's operators whose host event was found; None where there are no operators."""
    device_events: int
    device_events_linked: int
    operators: int
    operators_linked: int
    nodes: int
    """Without the roots, which have no event."""
    nodes_linked: int
    reasons: dict[str, int]
    """Why the rest was not joined, with counts."""
    warnings: list[str]
