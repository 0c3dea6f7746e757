"""Slow ranks found by running one collective over subsets of the ranks: a subset with a slow rank in it is slow.

The subsets of a round share no rank, so that they run at the same time, and have one size, so that their times can be
compared. With up to two slow ranks among n it takes at most log₂ n + 4 rounds; fewer than six ranks are measured in all
pairs instead. At least two ranks must be good: nothing else tells what is usual.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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


class _Test(NamedTuple):
    """One subset of the round to come."""

    suspects: Subset
    """Empty: a control, of clean ranks alone."""
    helpers: Subset

    @property
    def subset(self) -> Subset:
        return (*self.suspects, *self.helpers)


class _SlowGroup(NamedTuple):
    ranks: Subset
    parts: list[bool | None]
    """Whether each of its halves was slow; None: not measured yet."""


class _Group(NamedTuple):
    """Ranks to be measured apart from other suspects."""

    ranks: Subset
    part_of: tuple[_SlowGroup, int] | None = None
    """With its place among the halves."""
    aim: Literal["split", "confirm", "together"] = "split"
    """What a slow result means: go on with the halves; the one rank is slow; or they are slow only together."""


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
        self._opening = _plan_opening(self._ranks)
        self._seen: list[tuple[Subset, float]] = []
        """Subsets of the opening with their times."""
        self._asked: list[_Test] = []
        self._running: list[_Group] = []
        """What the first of the tests are about; the others are controls."""
        self._doubted = False
        """Whether the last round was repeated."""

    def next_subsets(self) -> list[list[int]]:
        """Disjoint, at least two ranks each, all of one size; empty when there is nothing left to measure."""
        if not self._asked:
            opening = self._opening[0] if self._opening else ()
            self._asked = [_Test(piece, ()) for piece in opening] or self._plan_groups()
        return [list(test.subset) for test in self._asked]

    def record(self, results: Sequence[float]) -> None:
        """Seconds of each subset that was asked for, in this order; infinity for one that did not end."""
        if len(results) != len(self._asked):
            raise UsageError(
                f"{len(results)} times for {len(self._asked)} subsets", hint="hand over one time a subset, in order"
            )
        if any(not seconds > 0 for seconds in results):
            raise UsageError("a time is not above zero", hint="hand over seconds, or infinity for what did not end")
        asked, self._asked = self._asked, []
        self._rounds += 1
        for test, seconds in zip(asked, results, strict=True):
            size = len(test.subset)
            self._fastest[size] = min(seconds, self._fastest.get(size, math.inf))
        if self._opening:
            self._record_opening(asked, results)
        else:
            self._record_groups(asked, results)

    def _record_opening(self, asked: Sequence[_Test], results: Sequence[float]) -> None:
        """Goes on until a good and a slow subset were seen side by side, or the opening is over."""
        all_pairs = len(self._ranks) < _FEWEST
        seen = [(test.subset, seconds) for test, seconds in zip(asked, results, strict=True)]
        self._seen = [*self._seen, *seen] if all_pairs else seen
        self._opening = self._opening[1:]
        slow = [
            subset for subset, seconds in self._seen if _divide(seconds, self._fastest[len(subset)]) >= self._threshold
        ]
        if self._opening and (not slow or all_pairs):
            return
        self._opening = []
        self._clean = dict.fromkeys(rank for subset, _ in self._seen if subset not in slow for rank in subset)
        taken = set(self._clean)
        for subset in slow:
            suspects = tuple(rank for rank in subset if rank not in taken)
            if suspects:
                taken |= set(suspects)
                self._split(suspects)
            elif taken.intersection(subset) <= self._clean.keys():
                self._waiting.append(_Group(subset, aim="together"))
        left = tuple(rank for rank in self._ranks if rank not in taken)
        if left:
            self._waiting.append(_Group(left))

    def _split(self, suspects: Subset) -> None:
        """A slow group goes on as two halves."""
        half = (len(suspects) + 1) // 2
        parts = [part for part in (suspects[:half], suspects[half:]) if part]
        whole = _SlowGroup(suspects, [None] * len(parts))
        self._waiting += [_Group(part, (whole, number)) for number, part in enumerate(parts)]

    def _plan_groups(self) -> list[_Test]:
        """As many waiting groups as the clean ranks can fill up to one size, beside a control of clean ranks alone."""
        if not self._waiting:
            return []
        self._waiting.sort(key=lambda group: -len(group.ranks))
        size = max(2, len(self._waiting[0].ranks))
        # Clean ranks that nobody asks for, in another order each round: nobody has the same partner all the time.
        wanted = {rank for group in self._waiting for rank in group.ranks}
        free = [rank for rank in self._clean if rank not in wanted]
        start = self._rounds % max(1, len(free))
        free = free[start:] + free[:start]
        spare = len(free) - (size - len(self._waiting[0].ranks))
        control = size if spare >= size or size not in self._fastest else 0
        self._running = []
        tests: list[_Test] = []
        for group in list(self._waiting):
            needed = size - len(group.ranks)
            busy = {rank for test in tests for rank in test.subset}
            if needed > len(free) - control or busy.intersection(group.ranks):
                continue
            tests.append(_Test(group.ranks, tuple(free[:needed])))
            self._running.append(group)
            self._waiting.remove(group)
            free = free[needed:]
        while tests and len(free) >= size and len(tests) - len(self._running) < 2:
            tests.append(_Test((), tuple(free[:size])))
            free = free[size:]
        return tests

    def _record_groups(self, asked: Sequence[_Test], results: Sequence[float]) -> None:
        usual = self._find_usual(asked, results)
        if usual is None:
            self._waiting += self._running
            return
        for group, seconds in zip(self._running, results, strict=False):
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
                self._waiting.append(_Group(group.ranks, aim="confirm"))
            if group.part_of is not None:
                whole, number = group.part_of
                whole.parts[number] = slow
                # Where no half of a slow group is slow, the whole is measured once more.
                if len(whole.ranks) > 1 and all(part is False for part in whole.parts):
                    self._waiting.append(_Group(whole.ranks, aim="together"))

    def _find_usual(self, asked: Sequence[_Test], results: Sequence[float]) -> float | None:
        """The fastest beside a control; without a control, the fastest so far. None: the control was contended.

        A control that is slow in the next round too was not contended: then everything is slower now than it was.
        """
        fastest = self._fastest[len(asked[0].subset)]
        controls = results[len(self._running) :]
        if not controls:
            return fastest
        contended = min(controls) >= self._threshold * fastest and not self._doubted
        self._doubted = contended
        return None if contended else min(results)

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
