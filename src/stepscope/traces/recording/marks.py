"""Where the steps of a program end: its own marks, its optimizers, or calls of its outermost module."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stepscope.traces.recording.recorder import Recorder
from stepscope.traces.recording.settings import StepMarker

if TYPE_CHECKING:
    import torch

Ended = Callable[[], None]


class Marks:
    """Passes on the ends of steps from whatever the recording listens to."""

    def __init__(self, wanted: StepMarker, ended: Callable[[str], None]) -> None:
        self._wanted = wanted
        self._ended = ended
        self._has_explicit = False

    def explicit(self) -> None:
        """From the program's own marks on, its optimizers say nothing: one step would count twice."""
        self._has_explicit = True
        if self._wanted in ("auto", "mark"):
            self._ended("mark")

    def optimizer(self) -> None:
        if self._wanted == "optimizer" or (self._wanted == "auto" and not self._has_explicit):
            self._ended("optimizer")

    def forward(self) -> None:
        if self._wanted == "forward":
            self._ended("forward")


class OptimizerCycle:
    """The last of several optimizers in one step ends it."""

    def __init__(self) -> None:
        self._order: list[int] = []

    def ends_step(self, optimizer: object) -> bool:
        """Whether this one is the last of its step, as far as is known: a new one belongs to the step before it."""
        key = id(optimizer)
        if key not in self._order:
            self._order.append(key)
            return len(self._order) == 1
        return key == self._order[-1]


def watch_optimizers(ended: Ended) -> None:
    """Call `ended` after every step that is an optimizer's last. For optimizers that are made from now on.

    torch's own hook would run inside the span that torch draws around the optimizer, and a step that ends there would
    cut that span in two.
    """
    import torch

    original = torch.optim.Optimizer.profile_hook_step
    cycle, depth = OptimizerCycle(), [0]

    def profile_hook_step(function: Callable[..., Any]) -> Callable[..., Any]:
        inner: Callable[..., Any] = original(function)

        @functools.wraps(inner)
        def step(*args: Any, **kwargs: Any) -> Any:
            # A compiler that reads this must find nothing new in it.
            if torch.compiler.is_compiling():
                return inner(*args, **kwargs)
            depth[0] += 1
            try:
                result = inner(*args, **kwargs)
            finally:
                depth[0] -= 1
            # An optimizer may be built from others: the outermost counts.
            if not depth[0] and cycle.ends_step(args[0]):
                ended()
            return result

        return step

    torch.optim.Optimizer.profile_hook_step = staticmethod(profile_hook_step)  # type: ignore[assignment, method-assign]


def watch_outermost_module(ended: Ended) -> None:
    """Call `ended` after every call of the outermost module.

    All modules are watched only until the first call is over: a hook on each of them would slow the program down.
    """
    from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

    stack: list[torch.nn.Module] = []
    handles: list[Any] = []

    def enter(module: torch.nn.Module, _: Any) -> None:
        stack.append(module)

    def leave(module: torch.nn.Module, _: Any, __: Any) -> None:
        # An exception that the program has caught may have left modules behind.
        while stack and stack.pop() is not module:
            pass
        if not stack:
            for handle in handles:
                handle.remove()
            module.register_forward_hook(lambda *_: ended())
            ended()

    handles += [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]


_marks: list[Marks] = []


def install(wanted: StepMarker, ended: Callable[[str], None]) -> None:
    """For the life of the process."""
    marks = Marks(wanted, ended)
    _marks[:] = [marks]
    if wanted in ("auto", "optimizer"):
        watch_optimizers(marks.optimizer)
    if wanted == "forward":
        watch_outermost_module(marks.forward)


def mark_explicitly(recorder: Recorder) -> None:
    """`stepscope.step()`: through the marks where a program is watched, else straight to the recorder."""
    if _marks:
        _marks[0].explicit()
    else:
        recorder.step()
