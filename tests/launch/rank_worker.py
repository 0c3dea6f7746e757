"""A rank for the tests: finds its place, meets the others over gloo, sums the ranks, prints one JSON line."""

from __future__ import annotations

import json
import os
import sys

import msgspec
import torch
import torch.distributed as dist

from stepscope.launch.context import detect_rank_context, export_rendezvous


def main() -> None:
    context = detect_rank_context()
    export_rendezvous(context)
    again = detect_rank_context()
    dist.init_process_group("gloo")
    total = torch.tensor([context.rank + 1])
    dist.all_reduce(total)
    dist.destroy_process_group()
    report = {
        **msgspec.to_builtins(context),
        "sum": int(total.item()),
        "same_again": (again.rank, again.world_size, again.launcher, again.master_port)
        == (context.rank, context.world_size, context.launcher, context.master_port),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "arguments": sys.argv[1:],
    }
    # One write a line: the ranks share the launcher's standard output.
    os.write(1, (json.dumps(report) + "\n").encode())


if __name__ == "__main__":
    main()
