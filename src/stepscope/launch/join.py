"""How the ranks of a run meet, whether they were started alike, and who is named when one does not come."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope._version import __version__
from stepscope.core.errors import FirstRankMissingError, RankHungError, UsageError
from stepscope.core.files import user_cache, write_file_atomically
from stepscope.records import RankPlace, Request

if TYPE_CHECKING:
    from stepscope.launch.context import RankContext

PEER_DISCONNECTS = (
    "connection closed by peer", "connection reset by peer", "broken pipe", "connection was likely closed",
    "connection refused", "timed out", "socket timeout", "ncclremoteerror", "remote process exited",
)  # fmt: skip
"""What gloo, torch's store and NCCL report on one rank when another one is gone, in lower case."""
GPU_BACKENDS = ("nccl", "xccl")
KNOWN_BACKENDS = ("gloo", "nccl", "ucc", "xccl", "mpi")
POLL_S = 0.05
REST_S = 10.0
"""How much longer than rank 0 the others wait: it knows who is missing and should be the one to say so."""
CONNECT_SHARE = 0.8
"""Fraction of the limit: time to reach rank 0 at all, so that a rank that cannot still has time to say so."""


def require_backend(backend: str) -> None:
    """Raises UsageError where torch.distributed lacks the backend.

    What an installation of torch was built with is remembered: loading it takes a second, and a command that starts
    ranks needs it for nothing else.
    """
    remembered = _place_of_backends()
    if remembered is not None and "torch" not in sys.modules:
        with suppress(OSError, msgspec.DecodeError):
            if backend in msgspec.json.decode(remembered.read_bytes(), type=list[str]):
                return
    import torch.distributed as dist

    built = [name for name in KNOWN_BACKENDS if dist.is_available() and dist.is_backend_available(name)]
    if remembered is not None:
        with suppress(OSError):
            remembered.parent.mkdir(parents=True, exist_ok=True)
            write_file_atomically(remembered, msgspec.json.encode(built))
    if backend not in built and not (dist.is_available() and dist.is_backend_available(backend)):
        raise UsageError(
            f"this torch was built without {backend}",
            hint=f"built here: {', '.join(built)}; MPI goes through mpi4py: bench comms --backend mpi under mpirun",
            where="--backend",
        )


def choose_backend(ranks_here: int, device: str | None = None) -> str:
    """`nccl` where each rank on this machine has a GPU of its own and torch was built with it, else `gloo`."""
    gpus = len([node for node in Path("/dev").glob("nvidia*") if node.name.removeprefix("nvidia").isdigit()])
    if device == "cpu" or gpus < ranks_here:
        return "gloo"
    try:
        require_backend("nccl")
    except (UsageError, ImportError):
        return "gloo"
    return "nccl"


def device_of_backend(backend: str) -> str:
    """Where the buffers lie, unless a device is named."""
    return "cuda" if backend in GPU_BACKENDS else "cpu"


def _place_of_backends() -> Path | None:
    """Where the backends of the installed torch are remembered; another installation or version has another place."""
    with suppress(ValueError, OSError):
        found = find_spec("torch")
        if found is not None and found.origin is not None:
            changed_ns = Path(found.origin).with_name("version.py").stat().st_mtime_ns
            named = hashlib.sha256(f"{found.origin}:{changed_ns}".encode()).hexdigest()[:24]
            return user_cache() / f"backends-{named}.json"
    return None


def is_peer_disconnect(message: str) -> bool:
    """Whether an error only says that another rank is gone or silent: the cause is elsewhere."""
    lower = message.lower()
    return any(sign in lower for sign in PEER_DISCONNECTS)


def describe_request(request: Request, cases: str) -> dict[str, str]:
    """What must be the same on all ranks, in a form that can be compared. Hosts see the cluster in their own way."""
    lines = {
        name: msgspec.json.encode(value, order="sorted").decode()
        for name, value in {**msgspec.structs.asdict(request), "cases": cases}.items()
        if name != "cluster"
    }
    return {"version of stepscope": __version__, **lines}


def find_difference(everybody: Sequence[dict[str, str]]) -> str:
    """Under an outer launcher each rank has a command of its own: all must be the same one. Empty: they are."""
    for rank, other in enumerate(everybody):
        for name in {**everybody[0], **other}:
            first, this = everybody[0].get(name, "nothing"), other.get(name, "nothing")
            if first != this:
                return f"rank {rank} was started differently: {name} is {this} there and {first} on rank 0"
    return ""


def describe_place(context: RankContext, device: str) -> RankPlace:
    name = None
    if device.startswith("cuda"):
        import torch

        name = torch.cuda.get_device_name(device)
    return RankPlace(
        rank=context.rank, host=socket.gethostname(), pid=os.getpid(), device=device, name=name,
        local_rank=context.local_rank,
    )  # fmt: skip


def open_store(context: RankContext, limit_s: float, on_wait: Callable[[], object] = lambda: None) -> Any:
    """The key-value store all ranks meet in; returns when all have come, and calls `on_wait` until then.

    Raises RankHungError with the missing ranks' numbers after `limit_s`.
    """
    from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

    if context.world_size == 1:
        return HashStore()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"stepscope/{attempt}", _reach_rank_0(context, limit_s * CONNECT_SHARE))
    store.set(f"joined/{context.rank}", socket.gethostname())
    if context.rank == 0:
        wait_for_all(store, context.world_size, limit_s, on_wait)
        store.set("complete", "1")
    else:
        _wait_for_word(store, context, limit_s + REST_S, on_wait)
    return PrefixStore("group", store)


def _reach_rank_0(context: RankContext, limit_s: float) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    agent_hosts_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        return TCPStore(
            context.master_addr,
            context.master_port,
            None,
            context.rank == 0 and not agent_hosts_it,
            timeout=timedelta(seconds=limit_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        kind = FirstRankMissingError if context.rank == 1 else RankHungError
        address = f"{context.master_addr}:{context.master_port}"
        raise never_joined(
            [0], limit_s, kind=kind,
            hint=f"rank {context.rank} could not reach it at {address}: does it run, and does a firewall or a wrong "
            f"MASTER_ADDR stand between? ({str(error).splitlines()[0]})",
        ) from error  # fmt: skip


def wait_until(is_done: Callable[[], bool], limit_s: float, on_wait: Callable[[], object]) -> bool:
    """Asks some times a second, and calls `on_wait` in between. False: the time was up first."""
    deadline_s = time.monotonic() + limit_s
    while not is_done():
        if time.monotonic() > deadline_s:
            return False
        on_wait()
        time.sleep(POLL_S)
    return True


def wait_for_all(store: Any, world_size: int, limit_s: float, on_wait: Callable[[], object] = lambda: None) -> None:
    everybody = [f"joined/{rank}" for rank in range(world_size)]
    if not wait_until(lambda: store.check(everybody), limit_s, on_wait):
        hint = "was every rank started, with the same command, and can each reach rank 0?"
        raise never_joined(_find_missing(store, world_size), limit_s, hint=hint)


def _wait_for_word(store: Any, context: RankContext, limit_s: float, on_wait: Callable[[], object]) -> None:
    try:
        if not wait_until(lambda: store.check(["complete"]), limit_s, on_wait):
            missing = _find_missing(store, context.world_size)
            first_there = min(set(range(context.world_size)) - set(missing))
            kind = FirstRankMissingError if 0 in missing and context.rank == first_there else RankHungError
            raise never_joined(missing, limit_s, hint="was every rank started, and does each still run?", kind=kind)
    except RuntimeError as error:  # the store is gone, and rank 0 with it
        raise RankHungError(
            f"rank {context.rank} lost rank 0 while it waited for the others to join",
            hint="rank 0's message says why",
            where="joining",
        ) from error


def _find_missing(store: Any, world_size: int) -> list[int]:
    return [rank for rank in range(world_size) if not store.check([f"joined/{rank}"])]


def never_joined(
    ranks: Sequence[int], limit_s: float, *, hint: str, kind: type[RankHungError] = RankHungError
) -> RankHungError:
    """The error for ranks that are missing, worded like the supervisor's."""
    names, they = describe_ranks(ranks)
    return kind(
        f"{names} sent no heartbeat for {limit_s:.0f} s ({they} never joined)",
        hint=f"look at what {names} printed: {hint}", where=names, rank=ranks[0],
    )  # fmt: skip


def describe_ranks(ranks: Sequence[int | str]) -> tuple[str, str]:
    """`rank 1` and `it`, or `ranks 1, 3` and `they`."""
    return (f"rank {ranks[0]}", "it") if len(ranks) == 1 else (f"ranks {', '.join(map(str, ranks))}", "they")
