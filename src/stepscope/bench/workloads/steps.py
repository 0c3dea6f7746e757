"""One step of a model as it is timed: forward, loss, backward and optimizer, or one batch through the model."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from stepscope.bench.workloads.feed import Feed
from stepscope.bench.workloads.precision import math_of, matmul_rounding
from stepscope.bench.workloads.protocol import EAGER, Batch, Batches, Engine, Optimized, Outputs, Setting, Task
from stepscope.core.lazy_torch import torch
from stepscope.measure import give_back_memory
from stepscope.run.producer import WrongResultError

MOST_SHAPES = 64
"""Different shapes of layers, or of batches that are served, each compiled for itself; torch's own limit is 8."""
SAMPLED = 256
"""Values of each weight that are looked at again after training."""
BENCHMARK_LIMIT = 10
"""Torch's own."""
_BACKENDS_USED: set[str] = set()
"""Backends that torch.compile was called with since it was reset."""
CAPTURE_WARMUPS = 3
"""Steps on another stream before a capture: libraries make their workspaces in the first ones."""


class _FedStep(ABC):
    """Takes batches one after the other, and is replayed as a graph where its engine says so."""

    def __init__(self, batches: Iterable[Batch], setting: Setting, *, at_once: int = 1) -> None:
        self._setting = setting
        self.at_once = at_once
        """Batches of one step."""
        self.feed = Feed(batches)
        self._replay: Callable[[Batches], None] | None = None

    @abstractmethod
    def _step(self, batches: Batches) -> None: ...

    def __call__(self) -> None:
        (self._replay or self._step)(self._take())

    def _take(self) -> list[Batch]:
        return [self.feed.take() for _ in range(self.at_once)]

    def _capture_if(self, engine: Engine) -> None:
        if engine.graph and self._setting.device.startswith("cuda"):
            self._replay = capture_fed(self._step, self._take())


class TrainStep(_FedStep):
    """Each call is a whole step on the next of the batches, which lie on the device."""

    def __init__(
        self,
        task: Task,
        module: torch.nn.Module,
        batches: Batches,
        setting: Setting,
        *,
        engine: Engine = EAGER,
        accumulate: int = 1,
        loss_of: Callable[[Any], Any] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        withhold: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`accumulate`: batches of a step; its one update is that of their mean loss. `loss_of` and
        `optimizer`: where they are made already. `withhold`: entered for all batches of a step but the last, so that
        ranks exchange gradients once."""
        super().__init__(batches, setting, at_once=accumulate)
        make_optimizer = task.make_late_optimizer if accumulate > 1 else task.make_optimizer
        self._optimizer = optimizer or make_optimizer(module)
        self._withhold = withhold
        self._loss_of = loss_of or compile_pass(task, module, setting, engine)
        self.loss: torch.Tensor | None = None
        """Loss of the last batch; stays on the device."""
        self._weights = [one for one in module.parameters() if one.requires_grad]
        self._before = [_sample(one) for one in self._weights]
        self._capture_if(engine)

    def find_fault(self) -> str | None:
        """Why this is no training step, if so: its loss is no number, or its weights stay what they were."""
        if self.loss is None or not bool(torch.isfinite(self.loss).all()):
            return "this does not train: the loss is not finite"
        if all(torch.equal(_sample(one), before) for one, before in zip(self._weights, self._before, strict=True)):
            return "this does not train: the weights do not change"
        return None

    def _step(self, batches: Batches) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        with matmul_rounding(self._setting.precision):
            for number, batch in enumerate(batches, start=1):
                with self._withhold() if number < len(batches) else nullcontext():
                    self._add_gradients(batch, len(batches))
        self._optimizer.step()

    def _add_gradients(self, batch: Batch, count: int) -> None:
        with math_of(self._setting):
            loss = self._loss_of(batch)
        (loss / count if count > 1 else loss).backward()
        self.loss = loss.detach()


class InferStep(_FedStep):
    """Each call takes the next of the batches through the model."""

    def __init__(
        self, task: Task, module: torch.nn.Module, batches: Batches, setting: Setting, *, engine: Engine = EAGER
    ) -> None:
        super().__init__(batches, setting)
        self._outputs_of = compile_pass(task, module, setting, engine)
        self.outputs: Outputs | None = None
        self._capture_if(engine)

    def find_fault(self) -> str | None:
        """Why what it gave is no result, if so."""
        given = self.outputs if isinstance(self.outputs, tuple) else (self.outputs,)
        if all(one is not None and bool(torch.isfinite(one).all()) for one in given):
            return None
        return "outputs are not finite"

    def _step(self, batches: Batches) -> None:
        (batch,) = batches
        with math_of(self._setting):
            self.outputs = self._outputs_of(batch)


def compile_pass(task: Task, module: torch.nn.Module, setting: Setting, engine: Engine) -> Callable[[Any], Any]:
    """The loss of a batch in training, else its outputs, as the engine runs it."""
    forward = task.loss if setting.mode == "train" else task.infer

    def step(batch: Any) -> Any:
        return forward(module, batch)

    repeated = task.repeated if isinstance(task, Optimized) else ()
    parts = [part for part in module.modules() if type(part).__name__ in repeated]
    if engine.compile is None or not parts:
        return compiled(step, engine, setting.backend)
    # Torch looks for gradients on what comes into a layer, and warns itself.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    for part in parts:
        part.compile(**_how(engine, setting.backend))
    return step


def compiled(function: Callable[[Any], Any], engine: Engine, backend: str) -> Callable[[Any], Any]:
    if engine.compile is None:
        return function
    return torch.compile(function, **_how(engine, backend))


def _how(engine: Engine, backend: str) -> dict[str, Any]:
    torch._dynamo.config.recompile_limit = MOST_SHAPES
    _BACKENDS_USED.add(backend)
    how: dict[str, Any] = {"dynamic": engine.dynamic, "fullgraph": engine.fullgraph, "backend": backend}
    if backend == "inductor" and engine.compile != "default":
        how["mode"] = engine.compile
    return how


def clear_up(device: str) -> None:
    """What one model left in the process, the next must not inherit: modes, workspaces, and its own memory."""
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.benchmark_limit = BENCHMARK_LIMIT
    if device.startswith("cuda"):
        # cuBLAS keeps one for each stream that was ever captured on.
        torch._C._cuda_clearCublasWorkspaces()
    give_back_memory(device)


def forget_compiled() -> None:
    """Between benchmarks: torch counts how often one line was compiled, and gives up after many different uses."""
    # Torch loads the whole compiler to reset it, which takes many seconds where nothing was compiled.
    if _BACKENDS_USED:
        torch.compiler.reset()
        _BACKENDS_USED.clear()


def capture(body: Callable[[], object]) -> Callable[[], None]:
    """`body` as one CUDA graph; it must read and write the same memory every time."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(CAPTURE_WARMUPS):
            body()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph.replay


def capture_fed(body: Callable[[Batches], object], batches: Batches) -> Callable[[Batches], None]:
    """`body` as one CUDA graph over copies of these batches, which the batches of each call are put into."""
    static = [{name: one.clone() for name, one in batch.items()} for batch in batches]
    replay = capture(lambda: body(static))

    def run(batches: Batches) -> None:
        for place, batch in zip(static, batches, strict=True):
            for name, one in batch.items():
                place[name].copy_(one, non_blocking=True)
        replay()

    return run


def _sample(weight: torch.Tensor) -> torch.Tensor:
    """Some of its values, copied; of a weight that is spread over ranks, of this rank's part."""
    here = getattr(weight, "to_local", lambda: weight)()
    flat = here.detach().flatten()
    return flat[:: max(1, flat.numel() // SAMPLED)].clone()


def require_sound(step: object) -> None:
    """Raises WrongResultError: what computes nothing has no time worth knowing."""
    fault = step.find_fault() if isinstance(step, TrainStep | InferStep) else None
    if fault:
        raise WrongResultError(fault, hint="another precision, or a smaller batch")
