"""Where batches come from: ready on the device, or through a loader as in real training; synthetic or a user's own."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from stepscope.bench.workloads.precision import to_device
from stepscope.bench.workloads.protocol import Batch, Batches, Mode, Optimized, Setting, Task
from stepscope.core.errors import BadInputError, first_line
from stepscope.core.lazy_torch import torch

BATCHES = 4
"""Different batches that take turns, so that no step finds the last one's values in a cache."""

LAYOUT_SEEDS, LAYOUT_COUNTS = 16, (2, 3, 4)
"""Batches of one example that are looked at for axes that vary (in large ones the longest example hides it), and sizes
of further ones: some tasks make single examples all alike."""

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


def shapes_of(batch: Batch) -> Shapes:
    return tuple(sorted((name, tuple(one.shape)) for name, one in batch.items()))


def count_round(batches: Batches, *, at_once: int) -> int:
    """Steps of `at_once` batches after which each batch was taken equally often; 1 where all have one shape, as then
    any step stands for all."""
    if len({shapes_of(batch) for batch in batches}) == 1:
        return 1
    return math.lcm(len(batches), at_once) // at_once


class Feed:
    """Where a step takes its batches from: its own take turns, until it is given others for a while."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._own = cycle(batches)
        self._source: Iterator[Batch] = self._own

    def take(self) -> Batch:
        return next(self._source)

    @contextmanager
    def of(self, others: Iterable[Batch]) -> Iterator[None]:
        """Afterwards the others are closed: a loader's processes end there."""
        source = iter(others)
        self._source = source
        try:
            yield
        finally:
            self._source = self._own
            if isinstance(source, Generator):
                source.close()


def make_batches(task: Task, *, batch_size: int, mode: Mode, seed: int) -> list[dict[str, torch.Tensor]]:
    """On the host."""
    return [task.make_batch(batch_size, seed=seed + number, mode=mode) for number in range(BATCHES)]


def read_batches(
    path: Path, task: Task, *, batch_size: int, mode: Mode, any_shape: bool = False
) -> list[dict[str, torch.Tensor]]:
    """A user's batches: a file of torch.save with a list of dicts, laid out as the benchmark's own synthetic ones.
    `any_shape`: an optimized implementation has a graph for each shape, not one for all batches."""
    plain = task.plain if isinstance(task, Optimized) else task
    wanted = find_layout(plain, batch_size=batch_size, mode=mode)
    form = ", ".join(f"{name} {one.dtype}{one.format_shape()}" for name, one in wanted.items())
    free = {axis for one in wanted.values() for axis in one.axes if isinstance(axis, str)}
    may_vary = f"; {', '.join(sorted(free))} may differ from batch to batch" if free else ""
    hint = f"torch.save a list of dicts with {form}{may_vary}"
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch says about a stranger's file
        raise BadInputError(f"cannot be read by torch.load: {first_line(error)}", hint=hint, where=str(path)) from error
    if not isinstance(found, list) or not found:
        raise BadInputError("must hold a list of batches", hint=hint, where=str(path))
    for number, batch in enumerate(found):
        wrong = _find_difference(batch, wanted)
        if wrong:
            raise BadInputError(wrong, hint=hint, where=f"{path}: batch {number}")
    return _collate(found, task, mode, path, any_shape=any_shape) if isinstance(task, Optimized) else found


def _collate(
    found: list[dict[str, torch.Tensor]], task: Optimized, mode: Mode, path: Path, *, any_shape: bool
) -> list[dict[str, torch.Tensor]]:
    """Refuses batches that come out in different shapes where one graph is replayed for all of them."""
    arranged = []
    for number, batch in enumerate(found):
        try:
            arranged.append(task.collate(dict(batch), mode=mode))
        except BadInputError as error:
            raise BadInputError(error.message, hint=error.hint, where=f"{path}: batch {number}") from error
    if task.engine(mode).graph and not any_shape:
        first = {name: one.shape for name, one in arranged[0].items()}
        for number, batch in enumerate(arranged):
            other = next((name for name, one in batch.items() if one.shape != first[name]), None)
            if other is not None:
                raise BadInputError(
                    f"{other} is {list(batch[other].shape)}, in the first batch {list(first[other])}: the optimized "
                    "form replays one graph for all",
                    hint="give batches that are alike in this, or measure ootb",
                    where=f"{path}: batch {number}",
                )
    return arranged


class InputLayout(NamedTuple):
    """What an input must be like."""

    dtype: torch.dtype
    axes: tuple[int | str, ...]
    """A size, or the name of one that varies from batch to batch: in one batch the same name is the same size."""

    def format_shape(self) -> str:
        return f"[{', '.join(map(str, self.axes))}]"

    def bind(self, shape: Sequence[int], sizes: dict[str, int]) -> bool:
        """Whether a shape fits; takes the sizes of named axes into `sizes`."""
        if len(shape) != len(self.axes):
            return False
        return all(
            given == axis if isinstance(axis, int) else given > 0 and sizes.setdefault(axis, given) == given
            for given, axis in zip(shape, self.axes, strict=True)
        )


def find_layout(task: Task, *, batch_size: int, mode: Mode) -> dict[str, InputLayout]:
    """Layout of the synthetic batches. Axes that vary, and always together, have one name; those that grow with the
    examples do not vary."""
    whole = task.make_batch(batch_size, seed=0, mode=mode)
    counts = [*[1] * LAYOUT_SEEDS, *LAYOUT_COUNTS]
    batches = [task.make_batch(count, seed=seed, mode=mode) for seed, count in enumerate(counts)]
    names: dict[tuple[int, ...], str] = {}

    def describe(name: str, axis: int, size: int) -> int | str:
        sizes = tuple(batch[name].shape[axis] for batch in batches)
        each = sizes[LAYOUT_SEEDS] - sizes[0]
        if all(found == sizes[0] + (count - 1) * each for found, count in zip(sizes, counts, strict=True)):
            return size
        return names.setdefault(sizes, f"n{len(names) + 1}" if names else "n")

    return {
        name: InputLayout(one.dtype, tuple(describe(name, axis, size) for axis, size in enumerate(one.shape)))
        for name, one in whole.items()
    }


def _find_difference(batch: Any, wanted: Mapping[str, InputLayout]) -> str | None:
    """What keeps a batch from standing in for a synthetic one."""
    if not isinstance(batch, dict) or set(batch) != set(wanted):
        return f"must hold the inputs {', '.join(sorted(wanted))}"
    sizes: dict[str, int] = {}
    for name, like in wanted.items():
        given = batch[name]
        bound = dict(sizes)
        if not isinstance(given, torch.Tensor) or given.dtype != like.dtype or not like.bind(given.shape, sizes):
            known = "".join(f", {axis} = {bound[axis]} as in the inputs before" for axis in like.axes if axis in bound)
            return f"{name} must be {like.dtype} of shape {like.format_shape()}{known}"
    return None


class Loader:
    """Batches copied by worker processes, pinned, and sent to the device while the last step runs; never ends."""

    def __init__(self, batches: Batches, setting: Setting, *, workers: int) -> None:
        self._batches, self._setting, self._workers = batches, setting, workers
        self._side: Any = None
        if setting.device.startswith("cuda"):
            self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        from torch.utils.data import DataLoader

        on_gpu = self._side is not None
        how: dict[str, Any] = {"prefetch_factor": 2, "persistent_workers": True} if self._workers else {}
        if self._workers and on_gpu:
            # A process that holds a GPU and the compiler's threads cannot be forked safely.
            how["multiprocessing_context"] = make_clean_context()
        copies: Any = _Copies(self._batches)
        loader: DataLoader[Any] = DataLoader(
            copies, batch_size=None, num_workers=self._workers, pin_memory=on_gpu, **how
        )
        ahead: dict[str, torch.Tensor] | None = None
        for batch in loader:
            # First received, then sent: what is received waits for all that was sent before.
            ready = self._receive(ahead) if ahead is not None else None
            ahead = self._send(batch)
            if ready is not None:
                yield ready

    def _send(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """On a GPU beside the work of the step before."""
        if self._side is None:
            return to_device(batch, self._setting)
        with torch.cuda.stream(self._side):
            return to_device(batch, self._setting)

    def _receive(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self._side is not None:
            here = torch.cuda.current_stream()
            here.wait_stream(self._side)
            for one in batch.values():
                one.record_stream(here)
        return batch


def make_clean_context() -> Any:
    """Processes that come from one which did nothing but load torch."""
    import multiprocessing

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    return context


class _Copies:
    """What a worker does for every batch: read it, and put it together anew."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {name: one.clone() for name, one in self._batches[number % len(self._batches)].items()}
