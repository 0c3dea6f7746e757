"""Text that is generated: prefill, then one token after another over a cache; its times and its check."""

from __future__ import annotations

import copy
import gc
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from stepscope.bench.workloads.asked import SEED
from stepscope.bench.workloads.check import MOST_DIFFERENCE, build_stirred
from stepscope.bench.workloads.distances import compare_differences, relative_error
from stepscope.bench.workloads.feed import to_device
from stepscope.bench.workloads.findings import TOLERANCES, CheckReport, Finding
from stepscope.bench.workloads.precision import math_of, shape_module
from stepscope.bench.workloads.protocol import EAGER, Engine, Optimized, Precision, Task
from stepscope.bench.workloads.steps import CAPTURE_WARMUPS, capture, compiled
from stepscope.core.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from stepscope.measure.device import Clock

    Batch = Mapping[str, torch.Tensor]

State = Any
"""What a decoder remembers between tokens; only the decoder that reserved it looks inside."""


class Decoder(Task):
    """A task that also generates. `infer` gives the logits after the last token of every prompt."""

    @abstractmethod
    def reserve(self, module: nn.Module, batch: Batch, new_tokens: int) -> State:
        """Room for the prompts of a batch of this shape and so many tokens after them. Not timed: a server keeps it."""

    @abstractmethod
    def begin(self, module: nn.Module, batch: Batch, state: State) -> None:
        """Prefill: takes the prompts in and chooses the first token of each. What the state held before is gone."""

    @abstractmethod
    def advance(self, module: nn.Module, state: State) -> None:
        """One more token for every sequence: the likeliest."""

    @abstractmethod
    def tokens(self, state: State) -> torch.Tensor:
        """Chosen so far: [sequences, tokens]. Waits for the device."""

    @abstractmethod
    def logits(self, state: State) -> torch.Tensor:
        """From which the last token was chosen: [sequences, vocabulary]."""

    @abstractmethod
    def force(self, state: State, tokens: torch.Tensor) -> None:
        """Puts these in the place of the tokens chosen last: the sequences go on from there."""


def generate_plainly(task: Decoder, module: nn.Module, batch: Batch) -> Iterator[str]:
    """All tokens of a batch, as written; says after each part what it was."""
    tokens = int(task.sizes["new_tokens"])
    state = task.reserve(module, batch, tokens)
    yield "reserve"
    task.begin(module, batch, state)
    yield "begin"
    for _ in range(tokens - 1):
        task.advance(module, state)
        yield "advance"


class Generates(Protocol):
    """What can be timed: a real decoder, or a scripted one in tests."""

    def begin(self, batch: Any) -> None: ...

    def advance(self) -> None: ...


class GenerateStep:
    """A decoder with its module, run as its engine says. With graphs, prefill and decode are captured once for each
    shape of batch, and a new batch takes the memory of the one before."""

    def __init__(
        self,
        task: Decoder,
        module: nn.Module,
        *,
        new_tokens: int,
        precision: Precision,
        device: str,
        engine: Engine = EAGER,
        backend: str = "inductor",
    ) -> None:
        self.task = task
        self.state: State = None
        """Of the batch that is being generated."""
        self._module = module
        # Captures run the decode step a few times before it counts: there must be room for those tokens, too.
        self._room = max(new_tokens, CAPTURE_WARMUPS + 2)
        self._precision: Precision = precision
        self._device = device
        self._graph = engine.graph and device.startswith("cuda")
        self._prefill = compiled(lambda pair: task.begin(module, *pair), engine, backend)
        self._decode = compiled(lambda state: task.advance(module, state), engine, backend)
        self._places: dict[tuple[Any, ...], _Place] = {}
        self._next: Callable[[], None] | None = None

    def begin(self, batch: Batch) -> None:
        shape = tuple((name, tuple(one.shape)) for name, one in sorted(batch.items()))
        place = self._places.get(shape)
        if place is None:
            place = self._places[shape] = self._make_place(batch)
        self.state, self._next = place.state, place.advance
        place.begin(batch)

    def advance(self) -> None:
        if self._next is None:
            raise UsageError("no batch was begun", hint="call begin before advance")
        self._next()

    def tokens(self) -> torch.Tensor:
        return self.task.tokens(self.state)

    def _make_place(self, batch: Batch) -> _Place:
        with self._math():
            state = self.task.reserve(self._module, batch, self._room)
        if not self._graph:
            return _Place(state, lambda one: self._run_prefill(one, state), lambda: self._run_decode(state))
        static = {name: one.clone() for name, one in batch.items()}
        replay_begin = capture(lambda: self._run_prefill(static, state))
        replay_begin()  # a state to decode from: the capture itself computes nothing
        replay_advance = capture(lambda: self._run_decode(state))

        def begin(one: Batch) -> None:
            for name, tensor in one.items():
                static[name].copy_(tensor, non_blocking=True)
            replay_begin()

        return _Place(state, begin, replay_advance)

    def _run_prefill(self, batch: Batch, state: State) -> None:
        with self._math():
            self._prefill((batch, state))

    def _run_decode(self, state: State) -> None:
        with self._math():
            self._decode(state)

    def _math(self) -> Any:
        return math_of(self._precision, mode="infer", device=self._device)


class _Place(NamedTuple):
    """Memory for batches of one shape, and what runs in it."""

    state: State
    begin: Callable[[Any], None]
    advance: Callable[[], None]


class GenerationTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One batch from its prompts to the last token."""

    sequences: int
    ttft_s: float
    """Time to first token: prefill and the choice of one token for every sequence."""
    token_s: list[float]
    """Each further token of all sequences; empty when only their sum was taken or there were none."""
    decode_s: float
    """All further tokens together."""
    new_tokens: int
    """Of each sequence, the first one included."""

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None where there was one token only."""
        return self.decode_s / (self.new_tokens - 1) if self.new_tokens > 1 else None

    @property
    def duration_s(self) -> float:
        return self.ttft_s + self.decode_s

    @property
    def tokens_per_s(self) -> float:
        """Of all sequences together, prefill included."""
        return self.sequences * self.new_tokens / self.duration_s


def measure_generation(
    step: Generates,
    batches: Iterable[tuple[Any, int]],
    *,
    new_tokens: int,
    clock: Clock,
    synchronise: Callable[[], None],
    warmups: int = 0,
    stream: bool = True,
) -> list[GenerationTimes]:
    """`batches` are pairs of a batch and its number of sequences; the first `warmups` of them are run and not told.
    With `stream` the host waits for every token, as a server does that sends tokens out or looks for an end mark;
    without, it waits only after the first and the last one."""
    if new_tokens < 1:
        raise UsageError(f"new_tokens is {new_tokens}", hint="generate at least one token")
    times = [
        _time_batch(step, one, count, new_tokens=new_tokens, clock=clock, synchronise=synchronise, stream=stream)
        for one, count in batches
    ]
    return times[warmups:]


def _time_batch(
    step: Generates,
    batch: Any,
    sequences: int,
    *,
    new_tokens: int,
    clock: Clock,
    synchronise: Callable[[], None],
    stream: bool,
) -> GenerationTimes:
    synchronise()
    marks = [clock.now_ns()]
    step.begin(batch)
    synchronise()
    marks.append(clock.now_ns())
    for left in range(new_tokens - 2, -1, -1):
        step.advance()
        if stream or left == 0:
            synchronise()
            marks.append(clock.now_ns())
    token_s = [(after - before) * 1e-9 for before, after in pairwise(marks[1:])]
    return GenerationTimes(
        sequences=sequences,
        ttft_s=(marks[1] - marks[0]) * 1e-9,
        token_s=token_s if stream else [],
        decode_s=(marks[-1] - marks[1]) * 1e-9,
        new_tokens=new_tokens,
    )


def check_generation(
    plain: Decoder,
    fast: Decoder,
    *,
    precision: Precision,
    device: str,
    batch_size: int,
    new_tokens: int,
    backend: str = "inductor",
    seed: int = SEED,
) -> CheckReport:
    """The plain form writes in fp32; the fast form is led along its tokens and must give the same logits at each one.
    So a near-tie that two roundings decide differently is no error, and everything after it is still compared.
    `plain` and `fast` must be made from calm sizes."""
    import torch

    if not isinstance(fast, Optimized):
        raise UsageError(f"{type(fast).__name__} is not a fast form", hint="pass a class derived from Optimized")
    reference = build_stirred(plain, device=device, seed=seed)
    step = GenerateStep(plain, copy.deepcopy(reference).eval(), new_tokens=new_tokens, precision="fp32", device=device)
    expected = _write(step, _prompts(plain, batch_size, seed, "fp32", device), new_tokens)
    chosen = step.tokens()
    del step
    gc.collect()  # steps refer to themselves; a large model's weights must not be there once more
    findings: list[Finding] = []
    for one in dict.fromkeys(("fp32", precision)):
        module = shape_module(fast, copy.deepcopy(reference), mode="infer", precision=one)
        engine = fast.engine("infer")
        led = GenerateStep(
            fast, module, new_tokens=new_tokens, precision=one, device=device, engine=engine, backend=backend
        )
        with torch.inference_mode():
            # Where a graph is captured, it is on another batch than the one that is compared.
            led.begin(_prompts(fast, batch_size, seed + 1, one, device))
            findings += _follow(led, _prompts(fast, batch_size, seed, one, device), expected, chosen, one)
        del module, led
        gc.collect()
    return CheckReport(findings=findings)


def _prompts(task: Task, count: int, seed: int, precision: Precision, device: str) -> dict[str, torch.Tensor]:
    return to_device(task.make_batch(count, seed=seed, mode="infer"), device=device, precision=precision, mode="infer")


def _write(step: GenerateStep, batch: Batch, new_tokens: int) -> list[torch.Tensor]:
    """Logits of each token."""
    step.begin(batch)
    logits = [step.task.logits(step.state).clone()]
    for _ in range(new_tokens - 1):
        step.advance()
        logits.append(step.task.logits(step.state).clone())
    return logits


def _follow(
    step: GenerateStep, batch: Batch, expected: list[torch.Tensor], chosen: torch.Tensor, precision: Precision
) -> list[Finding]:
    errors, apart, slips = [], [], []
    for place, right in enumerate(expected):
        step.begin(batch) if place == 0 else step.advance()
        own = step.task.logits(step.state)
        errors.append(relative_error(own, right))
        apart.append(compare_differences(own, right, len(right)).error)
        picked = step.tokens()[:, place : place + 1]
        slips.append(float((own.amax(1, keepdim=True) - own.gather(1, picked)).max()))
        step.task.force(step.state, chosen[:, place])
    limit = TOLERANCES[precision].outputs
    return [
        _worst("generation", precision, errors, limit),
        _worst("differences of sequences", precision, apart, MOST_DIFFERENCE),
        _worst("greedy choice", precision, slips, 0.0),
    ]


def _worst(what: str, precision: Precision, errors: list[float], limit: float) -> Finding:
    # No number is above infinity only when it is told: NaN compares as neither.
    place = max(range(len(errors)), key=lambda i: (errors[i] != errors[i], errors[i]))
    where = f"token {place + 1} of {len(errors)}"
    return Finding(what=what, precision=precision, error=errors[place], limit=limit, where=where)
