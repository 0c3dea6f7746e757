"""Slow ranks found by running one collective over subsets of the ranks: a subset with a slow rank in it is slow.

The subsets of a round share no rank, so that they run at the same time, and have one size, so that their times can be
compared. With up to two slow ranks among n it takes at most log₂ n + 4 rounds; fewer than six ranks are measured in all
pairs instead. At least two ranks must be good: nothing else tells what is usual.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Literal, NamedTuple

import msgspec

from stepscope.bench.comms.cases import make_cases
from stepscope.core.errors import UsageError
from stepscope.core.units import format_significant
from stepscope.records import BisectionRequest, Case, slowest_rank_seconds
from stepscope.stats import median
from stepscope.store import MeasuredCase

DEFAULT_THRESHOLD = 1.4
"""A subset is slow when it takes this many times as long as the fastest of its size, in the same round if it can be."""

_FEWEST = 6
"""With fewer ranks every two of them are measured together: halves would be pairs anyway."""
_PIECES = 4
"""Subsets of the first round: with two slow ranks at least half of the pieces are good, and show what is usual."""

Subset = tuple[int, ...]


class SlowRank(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    ratio: float
    """Time of the last subset in which it was the only suspect, over that of the fastest beside it."""


class BisectionVerdict(msgspec.Struct, frozen=True, kw_only=True):
    slow: list[SlowRank]
    clean: list[int]
    """Ranks that took part in a subset that was not slow."""
    together: list[list[int]]
    """Ranks that are slow together, though no half of them is slow alone: a link between them."""
    rounds: int
    sentence: str
    next_step: str


class _Group(NamedTuple):
    """Ranks to be measured apart from other suspects."""

    ranks: Subset
    aim: Literal["split", "confirm", "together"] = "split"
    """What a slow result means: go on with the halves; the one rank is slow; or they are slow only together."""
    half_of: tuple[Subset, list[bool]] | None = None
    """The slow group that this is half of, and whether each half that was measured so far was slow."""


class Bisection:
    """Step by step: measure what `next_subsets` asks for, hand the times to `record`, until nothing is asked for.

    Whoever can measure disjoint subsets at the same time does so with those of one round.
    """

    def __init__(self, ranks: Sequence[int], *, threshold: float = DEFAULT_THRESHOLD) -> None:
        if len(set(ranks)) != len(ranks) or len(ranks) < 2:
            raise UsageError(f"{len(ranks)} ranks cannot be bisected", hint="name two or more different ranks")
        if not threshold > 1:
            raise UsageError(f"a threshold of {threshold:g} calls everything slow", hint="write for example 1.4")
        self._ranks = tuple(ranks)
        self._threshold = threshold
        self._fastest: dict[int, float] = {}
        """Size of a subset → its least time so far: what is usual. Disturbances only ever add time."""
        self._clean: dict[int, None] = {}
        self._waiting: list[_Group] = []
        self._slow: dict[int, float] = {}
        self._together: list[Subset] = []
        self._rounds = 0
        self._doubted = False
        """Whether the last round was repeated."""
        self._search = self._run()
        self._asked = next(self._search)

    def next_subsets(self) -> list[list[int]]:
        """Disjoint, at least two ranks each, all of one size; empty when there is nothing left to measure."""
        return [list(subset) for subset in self._asked]

    def record(self, results: Sequence[float]) -> None:
        """Seconds of each subset that was asked for, in this order; infinity for one that did not end."""
        if len(results) != len(self._asked):
            raise UsageError(
                f"{len(results)} times for {len(self._asked)} subsets", hint="hand over one time a subset, in order"
            )
        if any(not seconds > 0 for seconds in results):
            raise UsageError("a time is not above zero", hint="hand over seconds, or infinity for what did not end")
        self._rounds += 1
        for subset, seconds in zip(self._asked, results, strict=True):
            self._fastest[len(subset)] = min(seconds, self._fastest.get(len(subset), math.inf))
        self._asked = self._search.send(results)

    def _run(self) -> Generator[list[Subset], Sequence[float], None]:
        """Yields the subsets of each round, and gets their times."""
        yield from self._open()
        while self._waiting:
            groups, subsets = self._plan_round()
            results = yield subsets
            self._judge(groups, len(subsets[0]), results)
        while True:
            yield []

    def _open(self) -> Generator[list[Subset], Sequence[float], None]:
        """Goes on until a good and a slow subset were seen side by side, or the opening is over."""
        all_pairs = len(self._ranks) < _FEWEST
        seen: list[tuple[Subset, float]] = []
        slow: list[Subset] = []
        for subsets in _plan_opening(self._ranks):
            found = list(zip(subsets, (yield subsets), strict=True))
            seen = [*seen, *found] if all_pairs else found
            slow = [
                subset for subset, seconds in seen if _divide(seconds, self._fastest[len(subset)]) >= self._threshold
            ]
            if slow and not all_pairs:
                break
        self._clean = dict.fromkeys(rank for subset, _ in seen if subset not in slow for rank in subset)
        taken = set(self._clean)
        for subset in slow:
            suspects = tuple(rank for rank in subset if rank not in taken)
            if suspects:
                taken |= set(suspects)
                self._split(suspects)
            elif taken.intersection(subset) <= self._clean.keys():
                self._waiting.append(_Group(subset, "together"))
        left = tuple(rank for rank in self._ranks if rank not in taken)
        if left:
            self._waiting.append(_Group(left))

    def _split(self, suspects: Subset) -> None:
        """A slow group goes on as two halves."""
        half, verdicts = (len(suspects) + 1) // 2, list[bool]()
        parts = (suspects[:half], suspects[half:])
        self._waiting += [_Group(part, half_of=(suspects, verdicts)) for part in parts if part]

    def _plan_round(self) -> tuple[list[_Group], list[Subset]]:
        """As many waiting groups as the clean ranks can fill up to one size, beside a control of clean ranks alone."""
        self._waiting.sort(key=lambda group: -len(group.ranks))
        size = max(2, len(self._waiting[0].ranks))
        # Clean ranks that nobody asks for, in another order each round: nobody has the same partner all the time.
        wanted = {rank for group in self._waiting for rank in group.ranks}
        free = [rank for rank in self._clean if rank not in wanted]
        start = self._rounds % max(1, len(free))
        free = free[start:] + free[:start]
        spare = len(free) - (size - len(self._waiting[0].ranks))
        control = size if spare >= size or size not in self._fastest else 0
        groups: list[_Group] = []
        subsets: list[Subset] = []
        for group in list(self._waiting):
            needed = size - len(group.ranks)
            busy = {rank for subset in subsets for rank in subset}
            if needed > len(free) - control or busy.intersection(group.ranks):
                continue
            subsets.append((*group.ranks, *free[:needed]))
            groups.append(group)
            self._waiting.remove(group)
            free = free[needed:]
        while subsets and len(free) >= size and len(subsets) - len(groups) < 2:
            subsets.append(tuple(free[:size]))
            free = free[size:]
        return groups, subsets

    def _judge(self, groups: Sequence[_Group], size: int, results: Sequence[float]) -> None:
        """By the fastest beside a control; without a control, by the fastest so far.

        Where the control was contended, the round is repeated. A control that is slow in the next round too was not
        contended: then everything is slower now than it was.
        """
        usual, controls = self._fastest[size], results[len(groups) :]
        if controls:
            self._doubted = min(controls) >= self._threshold * usual and not self._doubted
            if self._doubted:
                self._waiting += groups
                return
            usual = min(results)
        for group, seconds in zip(groups, results, strict=False):
            ratio = _divide(seconds, usual)
            slow = ratio >= self._threshold
            if not slow:
                self._clean |= dict.fromkeys(group.ranks)
            elif group.aim == "together":
                self._together.append(group.ranks)
            elif group.aim == "confirm":
                self._slow[group.ranks[0]] = ratio
            elif len(group.ranks) > 1:
                self._split(group.ranks)
            else:
                self._waiting.append(_Group(group.ranks, "confirm"))
            if group.half_of is not None:
                whole, verdicts = group.half_of
                verdicts.append(slow)
                if len(verdicts) == 2 and not any(verdicts):  # no half is slow: the whole is measured once more
                    self._waiting.append(_Group(whole, "together"))

    def verdict(self) -> BisectionVerdict:
        """What is known so far; final when `next_subsets` asks for nothing."""
        slow = [SlowRank(rank=rank, ratio=self._slow[rank]) for rank in sorted(self._slow)]
        together = [list(ranks) for ranks in self._together]
        sentence, next_step = self._describe(slow, together)
        return BisectionVerdict(
            slow=slow, clean=sorted(self._clean), together=together, rounds=self._rounds, sentence=sentence,
            next_step=next_step,
        )  # fmt: skip

    def _describe(self, slow: Sequence[SlowRank], together: Sequence[Sequence[int]]) -> tuple[str, str]:
        if slow:
            named = ", ".join(
                f"rank {found.rank} ({format_significant(found.ratio, 3)} times as long)" for found in slow
            )
            return f"slow: {named}", "look at these ranks: clocks, binding, NIC, other work (stepscope doctor there)"
        if together:
            named = "; ".join(", ".join(map(str, group)) for group in together)
            return (
                f"ranks {named} are slow together, but no half of them is slow alone",
                "measure the pairs among them (stepscope bench pairs): a link between two of them is slow",
            )
        if self._rounds and not self._clean:
            return "every subset was slow or did not end", "look at what failed, then measure fewer ranks"
        if len(self._ranks) == 2:
            return "of two ranks nobody can tell which one is slow", "measure with three ranks or more"
        return (
            f"no subset took {format_significant(self._threshold, 2)} times as long as the fastest of its size",
            "if all are slower than they should be, compare with another run: stepscope compare",
        )


def _divide(seconds: float, usual: float) -> float:
    return seconds / usual if math.isfinite(seconds) else math.inf


def _plan_opening(ranks: Subset) -> list[list[Subset]]:
    """Rounds that need no rank known to be good: few ranks in all pairs, many in four pieces and then in pairs."""
    if len(ranks) < _FEWEST:
        return _all_pairs(ranks)
    size = max(2, len(ranks) // _PIECES)
    rounds = [_cut(ranks, size)]
    # Where every piece holds a slow rank, pieces of two show it, unless there is one in each of them as well.
    return rounds if size == 2 else [*rounds, _cut(ranks, 2)]


def _cut(ranks: Subset, size: int) -> list[Subset]:
    """Whole pieces only: those of another size could not be compared. The rest has its turn later."""
    return [ranks[start : start + size] for start in range(0, len(ranks) - size + 1, size)]


def _all_pairs(ranks: Subset) -> list[list[Subset]]:
    """Every two ranks once, in rounds in which no rank occurs twice (the circle method)."""
    rounds: list[list[Subset]] = []
    circle: list[int | None] = [*ranks] if len(ranks) % 2 == 0 else [*ranks, None]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        met = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append([(a, b) for a, b in met if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def next_round(
    request: BisectionRequest, measured: Sequence[MeasuredCase], *, backend: str, device: str, world_size: int
) -> list[Case]:
    """What the search asks for after what was measured: one case, whose groups are the subsets."""
    subsets = replay_search(request, measured, world_size).next_subsets()
    if not subsets:
        return []
    colours = ["-"] * world_size
    for number, subset in enumerate(subsets):
        for rank in subset:
            colours[rank] = str(number)
    return make_cases(
        collective=request.collective, sizes=[request.size_bytes], dtype="float32", backend=backend,
        world_size=world_size, device=device, groups=f"colours:{','.join(colours)}", round=len(measured),
    )  # fmt: skip


def replay_search(request: BisectionRequest, measured: Sequence[MeasuredCase], world_size: int) -> Bisection:
    """The search as it stands: every round is recorded again, so that nothing but the run has to be kept."""
    search = Bisection(range(world_size), threshold=request.threshold)
    for case in measured:
        times = []
        for subset in search.next_subsets():
            of_subset = [samples for samples in case.samples if samples.rank in subset]
            seconds = median(slowest_rank_seconds(of_subset)) if of_subset else None
            times.append(math.inf if seconds is None else seconds)
        search.record(times)
    return search
