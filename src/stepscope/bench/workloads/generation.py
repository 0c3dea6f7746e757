"""Text that is generated: prefill, then one token after another over a cache; its times, its check, requests."""

from __future__ import annotations

import copy
import gc
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from stepscope.bench.workloads.check import MOST_DIFFERENCE, build_perturbed
from stepscope.bench.workloads.feed import Feed
from stepscope.bench.workloads.findings import TOLERANCES, CheckReport, Finding, compare_differences, relative_error
from stepscope.bench.workloads.precision import math_of, shape_module, to_device
from stepscope.bench.workloads.protocol import EAGER, Batch, Engine, Optimized, Precision, Setting, Task
from stepscope.bench.workloads.request import SEED
from stepscope.bench.workloads.steps import CAPTURE_WARMUPS, capture, capture_fed, compiled
from stepscope.core.errors import UsageError
from stepscope.core.lazy_torch import torch
from stepscope.measure import Device, WallClock

if TYPE_CHECKING:
    from stepscope.measure.device import Clock


State = Any
"""What a decoder remembers between tokens; only the decoder that reserved it looks inside."""


class Decoder(Task):
    """A task that also generates. `infer` gives the logits after the last token of every prompt."""

    @abstractmethod
    def reserve(self, module: torch.nn.Module, batch: Batch, new_tokens: int) -> State:
        """Room for the prompts of a batch of this shape and so many tokens after them. Not timed: a server keeps it."""

    @abstractmethod
    def begin(self, module: torch.nn.Module, batch: Batch, state: State) -> None:
        """Prefill: takes the prompts in and chooses the first token of each. What the state held before is gone."""

    @abstractmethod
    def advance(self, module: torch.nn.Module, state: State) -> None:
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


def generate_plainly(task: Decoder, module: torch.nn.Module, batch: Batch) -> Iterator[str]:
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


class DecoderRunner:
    """A decoder with its module, run as its engine says. With graphs, prefill and decode are captured once for each
    shape of batch, and a new batch takes the memory of the one before."""

    def __init__(
        self,
        task: Decoder,
        module: torch.nn.Module,
        setting: Setting,
        *,
        new_tokens: int,
        engine: Engine = EAGER,
    ) -> None:
        self.task = task
        self.state: State = None
        """State of the batch that is being generated."""
        self._module = module
        # Captures run the decode step a few times before it counts: there must be room for those tokens, too.
        self._room = max(new_tokens, CAPTURE_WARMUPS + 2)
        self._setting = setting
        self._graph = engine.graph and setting.device.startswith("cuda")
        self._prefill = compiled(lambda pair: task.begin(module, *pair), engine, setting.backend)
        self._decode = compiled(lambda state: task.advance(module, state), engine, setting.backend)
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
        with math_of(self._setting):
            state = self.task.reserve(self._module, batch, self._room)
        if not self._graph:
            return _Place(state, lambda one: self._run_prefill(one, state), lambda: self._run_decode(state))
        begin = capture_fed(lambda batches: self._run_prefill(batches[0], state), [batch])
        begin([batch])  # a state to decode from: the capture itself computes nothing
        return _Place(state, lambda one: begin([one]), capture(lambda: self._run_decode(state)))

    def _run_prefill(self, batch: Batch, state: State) -> None:
        with math_of(self._setting):
            self._prefill((batch, state))

    def _run_decode(self, state: State) -> None:
        with math_of(self._setting):
            self._decode(state)


class _Place(NamedTuple):
    """Memory for batches of one shape, and what runs in it."""

    state: State
    begin: Callable[[Any], None]
    advance: Callable[[], None]


class GenerationTimes(NamedTuple):
    """One batch from its prompts to the last token."""

    ttft_s: float
    """Time to first token: prefill and the choice of one token for every sequence."""
    token_s: list[float]
    """Each further token of all sequences."""
    duration_s: float


def time_generation(
    step: Generates, batch: Any, *, new_tokens: int, clock: Clock, synchronise: Callable[[], None]
) -> GenerationTimes:
    """The host waits for every token, as a server does that sends tokens out or looks for an end mark."""
    synchronise()
    marks = [clock.now_ns()]
    step.begin(batch)
    synchronise()
    marks.append(clock.now_ns())
    for _ in range(new_tokens - 1):
        step.advance()
        synchronise()
        marks.append(clock.now_ns())
    first_s, *token_s = [(after - before) * 1e-9 for before, after in pairwise(marks)]
    return GenerationTimes(first_s, token_s, (marks[-1] - marks[0]) * 1e-9)


def check_generation(
    plain: Decoder, fast: Decoder, setting: Setting, *, batch_size: int, new_tokens: int
) -> CheckReport:
    """The ootb implementation writes in fp32; the optimized implementation is led along its tokens and must give the
    same logits at each one. So a near-tie that two roundings decide differently is no error, and everything after it is
    still compared. `plain` and `fast` must be made from deterministic sizes."""
    if not isinstance(fast, Optimized):
        raise UsageError(
            f"{type(fast).__name__} is not an optimized implementation", hint="pass a class derived from Optimized"
        )
    exact = setting._replace(precision="fp32")
    reference = build_perturbed(plain, device=setting.device, seed=SEED)
    step = DecoderRunner(plain, copy.deepcopy(reference).eval(), exact, new_tokens=new_tokens)
    expected = _write(step, _prompts(plain, batch_size, SEED, exact), new_tokens)
    chosen = step.tokens()
    del step
    gc.collect()  # steps refer to themselves; a large model's weights must not be there once more
    findings: list[Finding] = []
    for one in dict.fromkeys((exact, setting)):
        module = shape_module(fast, copy.deepcopy(reference), one)
        led = DecoderRunner(fast, module, one, new_tokens=new_tokens, engine=fast.engine("infer"))
        with torch.inference_mode():
            # Where a graph is captured, it is on another batch than the one that is compared.
            led.begin(_prompts(fast, batch_size, SEED + 1, one))
            findings += _follow(led, _prompts(fast, batch_size, SEED, one), expected, chosen, one.precision)
        del module, led
        gc.collect()
    return CheckReport(findings=findings)


def _prompts(task: Task, count: int, seed: int, setting: Setting) -> dict[str, torch.Tensor]:
    return to_device(task.make_batch(count, seed=seed, mode="infer"), setting)


def _write(step: DecoderRunner, batch: Batch, new_tokens: int) -> list[torch.Tensor]:
    """Logits of each token."""
    step.begin(batch)
    logits = [step.task.logits(step.state).clone()]
    for _ in range(new_tokens - 1):
        step.advance()
        logits.append(step.task.logits(step.state).clone())
    return logits


def _follow(
    step: DecoderRunner, batch: Batch, expected: list[torch.Tensor], chosen: torch.Tensor, precision: Precision
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


class GenerationStep:
    """Each call generates for the next batch; the times of its tokens are kept."""

    def __init__(self, runner: DecoderRunner, batches: Sequence[Batch], *, new_tokens: int, device: Device) -> None:
        self.runner = runner
        self.new_tokens = new_tokens
        self.times: list[GenerationTimes] = []
        self._device = device
        self.feed = Feed(batches)

    def __call__(self) -> None:
        how: dict[str, Any] = {"clock": WallClock(), "synchronise": self._device.synchronize}
        self.times.append(time_generation(self.runner, self.feed.take(), new_tokens=self.new_tokens, **how))
