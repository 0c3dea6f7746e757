"""Which steps of several ranks are the same one, though the ranks may count them differently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from stepscope.analyze.ranks.digest import RankDigest, calls_of

PAIRED_BY_ORDER = (
    "the ranks number their steps differently and have no number in common: the n-th step of each rank was taken for "
    "the same one"
)
MOST_LISTED = 12


def common_numbers(by_rank: Sequence[Sequence[int]]) -> list[int]:
    """Numbers of the steps that every rank has, in the first rank's order."""
    if not by_rank:
        return []
    shared = set.intersection(*(set(numbers) for numbers in by_rank))
    return [number for number in dict.fromkeys(by_rank[0]) if number in shared]


def pair_numbers(by_rank: Sequence[Sequence[int]]) -> list[dict[int, int]] | None:
    """For each rank its own number → that of the first rank, by order. None: they count alike, or one has no steps."""
    if len(by_rank) < 2 or not all(by_rank) or common_numbers(by_rank):
        return None
    return [dict(zip(numbers, by_rank[0], strict=False)) for numbers in by_rank]


def pair_steps(digests: Sequence[RankDigest]) -> tuple[list[RankDigest], bool]:
    """Digests that all count steps as the first one does, and whether any had to be changed for that."""
    pairs = pair_numbers([[entry.number for entry in item.steps] for item in digests])
    if pairs is None:
        return list(digests), False
    return [_renumber(item, mapping) for item, mapping in zip(digests, pairs, strict=True)], True


def _renumber(item: RankDigest, mapping: Mapping[int, int]) -> RankDigest:
    """Steps without a partner are left out; their calls lie outside of all steps then."""
    calls = calls_of(item).copy()
    calls["step"] = [mapping.get(number, -1) for number in calls["step"].tolist()]
    steps = [
        msgspec.structs.replace(entry, number=mapping[entry.number]) for entry in item.steps if entry.number in mapping
    ]
    return msgspec.structs.replace(item, steps=steps, calls=calls.tobytes())


def list_numbers(numbers: Sequence[int]) -> str:
    """For a hint: `3, 4, 5`, shortened where there are many."""
    return ", ".join(map(str, numbers[:MOST_LISTED])) + (" …" if len(numbers) > MOST_LISTED else "") or "none"
