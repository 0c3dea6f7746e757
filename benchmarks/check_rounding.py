"""How often would the check of an optimized implementation refuse a right one, because rounding took it for a fault?

    python benchmarks/check_rounding.py [BENCHMARK [EXAMPLES]]      # default: ResNeXt3D's training, 8 clips; 4 minutes

Computes the gradients of the ootb implementation ten times with weights that differ in their last bit, and twice with
other kernels. All of them are right. Each is then held against several of the others by two rules: every parameter has
a limit of its own, or the worst parameter's limit holds for all. Prints the share of right forms that each rule
refuses, and how far the ootb implementation is from itself in fp64."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Sequence

import torch

from stepscope.bench.workloads import find_workload
from stepscope.bench.workloads.check import NOISE, _Perturbed, build_perturbed
from stepscope.bench.workloads.findings import TOLERANCES, gradients_of, named_errors
from stepscope.bench.workloads.protocol import Task

SEEDS = (727, 11)
PERTURBED = 10
DRAWS = 500
LIMIT = TOLERANCES["fp32"].gradients

Errors = dict[str, float]


def compute_gradients(task: Task, module: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    task.loss(module.train(), batch).backward()  # type: ignore[no-untyped-call]
    return gradients_of(module)


def refuses_each(run: Errors, others: Sequence[Errors]) -> bool:
    return any(error > max(LIMIT, NOISE * max(one[name] for one in others)) for name, error in run.items())


def refuses_worst(run: Errors, others: Sequence[Errors]) -> bool:
    return max(run.values()) > max(LIMIT, NOISE * max(max(one.values()) for one in others))


def measure(task: Task, examples: int, seed: int) -> tuple[list[Errors], list[Errors], Errors]:
    """Errors of perturbed runs, of runs with other kernels, and of the ootb implementation against fp64."""
    plain = build_perturbed(task, device="cpu", seed=seed)
    batch = task.make_batch(examples, seed=seed, mode="train")
    expected = compute_gradients(task, copy.deepcopy(plain), batch)

    def find_errors(module: torch.nn.Module) -> Errors:
        return named_errors(compute_gradients(task, module, batch), expected)

    perturbed = [
        find_errors(_Perturbed(task, number).convert(copy.deepcopy(plain), mode="train", precision="fp32"))
        for number in range(PERTURBED)
    ]
    volumes = any(parameter.dim() == 5 for parameter in plain.parameters())
    last = torch.channels_last_3d if volumes else torch.channels_last
    others = [find_errors(copy.deepcopy(plain).to(memory_format=last))]
    with torch.backends.mkldnn.flags(enabled=False):
        others.append(find_errors(copy.deepcopy(plain)))
    wide = {name: one.double() if one.is_floating_point() else one for name, one in batch.items()}
    exact = compute_gradients(task, copy.deepcopy(plain).double(), wide)
    return perturbed, others, named_errors(expected, exact)


def main() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else "resnext3d/ootb/train/1dev-fp32"
    examples = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    task = find_workload(name).make_deterministic("full")[0]
    for seed in SEEDS:
        perturbed, others, exact = measure(task, examples, seed)
        worst = sorted(max(one.values()) for one in perturbed)
        print(f"{name}, {examples} examples, seed {seed}: worst parameter off by {worst[0]:.2g} to {worst[-1]:.2g},")
        print(f"  with other kernels {', '.join(f'{max(one.values()):.2g}' for one in others)};", end=" ")
        print(f"the ootb implementation is {max(exact.values()):.2g} from itself in fp64")
        for count in (4, 8):
            draw = random.Random(1)
            refused = {refuses_each: 0, refuses_worst: 0}
            for _ in range(DRAWS):
                chosen = draw.sample(range(PERTURBED), count)
                rest = [one for number, one in enumerate(perturbed) if number not in chosen] + others
                run = draw.choice(rest)
                for rule in refused:
                    refused[rule] += rule(run, [perturbed[number] for number in chosen])
            each, all_alike = (share / DRAWS for share in refused.values())
            print(f"  against {count}: refused {each:.1%} with a limit for each parameter, {all_alike:.1%} with one")
    return 0


if __name__ == "__main__":
    sys.exit(main())
