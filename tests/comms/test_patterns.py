"""Patterns of jobs as data: sizes by hand, and what every sequence must keep whatever its parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.bench.comms.kernels import plan_matmuls
from stepscope.bench.comms.patterns import PATTERNS, Action, Step, find_pattern, make_program, require_sound
from stepscope.bench.comms.patterns.data_parallel import MODELS, fill_buckets, find_sizes, transformer_block
from stepscope.bench.comms.patterns.dlrm import DlrmOptions, split_tables
from stepscope.bench.comms.patterns.model_parallel import ExpertOptions, order_work, plan_stage, route
from stepscope.bench.comms.patterns.registry import make_case, read_case, read_options, read_settings
from stepscope.bench.comms.patterns.sequence import busiest_rank_bytes, collective, compute, message
from stepscope.core.errors import UsageError


def build(name: str, world_size: int, **parameters: Any) -> list[Step]:
    pattern = find_pattern(name)
    return pattern.make_steps(read_options(pattern, parameters), world_size)


def by_name(steps: Sequence[Step]) -> dict[str, Step]:
    return {step.name: step for step in steps}


def names(steps: Sequence[Step]) -> list[str]:
    return [step.name for step in steps]


# A world of ranks that follow their programs: a communication is over when all its members have begun it, and those of
# one group are carried out in the order in which each member began them, as on a stream. Nothing is buffered.


class Ranks:
    def __init__(self, programs: Sequence[Sequence[Action]]) -> None:
        self.programs, world_size = programs, len(programs)
        self.position = [0] * world_size
        self.queues: dict[tuple[tuple[int, ...], int], list[str]] = defaultdict(list)
        self.begun: dict[tuple[str, tuple[int, ...]], set[int]] = defaultdict(set)
        self.over: set[tuple[str, tuple[int, ...]]] = set()
        self.done: list[set[str]] = [set() for _ in range(world_size)]

    def run(self) -> list[str]:
        """What ranks still stand before when nothing moves any more; empty: all is done."""
        while any(self.advance(rank) for rank in range(len(self.programs))) or self.finish():
            pass
        return [
            f"rank {rank}: {program[place].kind} {program[place].step.name}"
            for rank, (program, place) in enumerate(zip(self.programs, self.position, strict=True))
            if place < len(program)
        ]

    def advance(self, rank: int) -> bool:
        program, moved = self.programs[rank], False
        while self.position[rank] < len(program) and self.act(rank, program[self.position[rank]]):
            self.position[rank] += 1
            moved = True
        return moved

    def act(self, rank: int, action: Action) -> bool:
        step, group = action.step, action.step.group_of(rank)
        assert group is not None
        if action.kind == "wait":
            if (step.name, group) not in self.over:
                return False
            self.done[rank].add(step.name)
            return True
        known = {one.step.name for one in self.programs[rank]}
        assert {name for name in step.after if name in known} <= self.done[rank], f"{step.name} began too early"
        if action.kind == "start":
            self.begun[step.name, group].add(rank)
            self.queues[group, rank].append(step.name)
        else:
            self.done[rank].add(step.name)
        return True

    def finish(self) -> bool:
        """One communication that all members have at the head of their queues."""
        for (group, rank), queue in list(self.queues.items()):
            if rank == group[0] and queue and all(self.queues[group, one][:1] == queue[:1] for one in group):
                name = queue[0]
                for one in group:
                    self.queues[group, one].pop(0)
                self.over.add((name, group))
                return True
        return False


def check_that_ranks_get_through(steps: Sequence[Step], world_size: int) -> None:
    for overlap in (True, False):
        ranks = Ranks([make_program(steps, rank, overlap=overlap) for rank in range(world_size)])
        assert ranks.run() == [], f"overlap={overlap}"
        for rank, program in enumerate(ranks.programs):
            mine = [step for step in steps if step.group_of(rank) is not None]
            began = [action.step.name for action in program if action.kind != "wait"]
            waited = [action.step.name for action in program if action.kind == "wait"]
            assert sorted(began) == sorted(names(mine)), "every step once"
            assert sorted(waited) == sorted(step.name for step in mine if step.communicates)
            assert ranks.done[rank] == set(names(mine))


def check_that_members_agree(steps: Sequence[Step]) -> None:
    """What i sends to j is what j gets from i, and results are made of what members really have."""
    for step in (step for step in steps if step.communicates):
        traffic = step.plan()
        members = range(len(step.groups[0]))
        assert len(traffic.inputs) == len(traffic.outputs) == len(members)
        for me in members:
            segments = traffic.sources[me]
            assert sum(segment.elements for segment in segments) == traffic.outputs[me]
            for segment in segments:
                given = traffic.inputs[segment.member or 0]
                assert segment.start + segment.elements <= given
        if traffic.pieces:
            for sender in members:
                assert sum(traffic.pieces[sender]) == traffic.inputs[sender]
                for receiver in members:
                    got = [segment for segment in traffic.sources[receiver] if segment.member == sender]
                    assert sum(segment.elements for segment in got) == traffic.pieces[sender][receiver]
        for me, (to, source) in enumerate(traffic.partners):
            assert to is None or traffic.partners[to][1] == me
            assert source is None or traffic.partners[source][0] == me


SMALL = st.integers(1, 5)
PARAMETERS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "dlrm": st.fixed_dictionaries(
        {"batch": SMALL, "tables": st.integers(1, 12), "embedding": SMALL, "lookups": SMALL,
         "random_lookups": st.booleans(), "bucket_mib": st.sampled_from([0.0, 1e-5, 25.0]),
         "interaction": st.sampled_from(["dot", "dot_self", "cat", "projected"]),
         "top": st.lists(SMALL, min_size=1, max_size=4), "bottom": st.lists(SMALL, min_size=1, max_size=4)},
    ),
    "ddp": st.fixed_dictionaries(
        {"model": st.sampled_from(sorted(MODELS)), "scale": st.floats(1e-6, 1.0), "bucket_mib": st.floats(1, 100),
         "first_bucket_mib": st.floats(0, 100)}
    ),
    "fsdp": st.fixed_dictionaries({"layers": SMALL, "hidden": SMALL, "prefetch": st.integers(0, 6)}),
    "tp": st.fixed_dictionaries({"layers": SMALL, "hidden": SMALL, "sequence": SMALL}),
    "sp": st.fixed_dictionaries(
        {"layers": SMALL, "hidden": SMALL, "sequence": st.just(840), "regather": st.booleans()}
    ),
    "pp": st.fixed_dictionaries({"micro_batches": st.integers(1, 12), "hidden": SMALL}),
    "ep": st.fixed_dictionaries(
        {"layers": SMALL, "tokens": SMALL, "hidden": SMALL, "experts_per_rank": SMALL, "skew": st.floats(0, 5),
         "seed": st.integers(0, 99), "backward": st.booleans(), "top_k": st.just(1)}
    ),
    "ps": st.fixed_dictionaries(
        {"servers": st.integers(1, 3), "shards": st.integers(1, 9), "scale": st.floats(1e-6, 1.0)}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PATTERNS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_every_sequence_is_sound_complete_and_free_of_deadlocks(name: str, data: st.DataObject) -> None:
    parameters = data.draw(PARAMETERS[name])
    least = {"pp": 2, "ps": parameters.get("servers", 0) + 1}.get(name, 1)
    world_size = data.draw(st.integers(least, least + 7))
    steps = build(name, world_size, **parameters)
    require_sound(steps, world_size)
    check_that_members_agree(steps)
    check_that_ranks_get_through(steps, world_size)
    pattern = find_pattern(name)
    options = read_options(pattern, parameters)
    case = make_case(pattern, options, overlap=True, backend="gloo", world_size=world_size, device="cpu")
    assert read_case(case) == (pattern, options, True)


@pytest.mark.parametrize("name", PATTERNS)
def test_the_usual_parameters_on_many_ranks(name: str) -> None:
    for world_size in (4, 16):
        check_that_ranks_get_through(build(name, world_size), world_size)


def test_the_simulator_finds_a_deadlock() -> None:
    """Blocking messages that cross: each waits until the other has begun to receive."""
    there, back = message("there", 0, 1, 8), message("back", 1, 0, 8)

    def blocking(*steps: Step) -> list[Action]:
        return [action for step in steps for action in (Action("start", step), Action("wait", step))]

    assert Ranks([blocking(there, back), blocking(there, back)]).run() == []
    assert Ranks([blocking(there, back), blocking(back, there)]).run() == ["rank 0: wait there", "rank 1: wait back"]
    left, right = (collective(name, "all_reduce", ((0, 1),), 8) for name in ("left", "right"))
    started = [[Action("start", step) for step in order] for order in ((left, right), (right, left))]
    waits = [Action("wait", left), Action("wait", right)]
    assert Ranks([actions + waits for actions in started]).run() != [], "one group, two orders"


# Soundness and order


def test_what_a_sequence_must_not_be() -> None:
    world = ((0, 1),)
    good = collective("one", "all_reduce", world, 4)
    for wrong, rule in (
        ([good, good], "twice"),
        ([good._replace(after=("nobody",))], "'nobody', which is not there"),
        ([good._replace(after=("two",)), good._replace(name="two", after=("one",))], "wait for each other"),
        ([good._replace(after=("one",))], "wait for each other"),
        ([good._replace(groups=((0, 2),))], "not among the 2"),
        ([good._replace(groups=((0, 1), (1, 0)))], "in two of its groups"),
        ([good._replace(groups=())], "nobody"),
        ([good._replace(groups=((0,), (1,)))], "groups of 2"),
        ([good._replace(shape=None)], "neither a shape nor pieces"),
        ([good._replace(name="One Two")], "names are words"),
        ([compute("alone", [0]), compute("other", [1], after=["alone"])], "no rank is in both"),
    ):
        with pytest.raises(UsageError, match=rule):
            require_sound(wrong, 2)


def describe(program: Sequence[Action]) -> list[str]:
    return [f"{action.kind} {action.step.name}" for action in program]


def test_a_step_starts_when_what_it_needs_is_done_and_is_waited_for_when_it_is_needed() -> None:
    world = ((0, 1),)
    steps = [
        collective("gather", "all_gather", world, 4),
        compute("use", [0, 1], after=["gather"]),
        compute("other", [0, 1]),
        collective("reduce", "all_reduce", world, 4, after=["other"]),
    ]
    assert describe(make_program(steps, 0)) == [
        "start gather", "compute other", "start reduce", "wait gather", "compute use", "wait reduce",
    ]  # fmt: skip
    assert describe(make_program(steps, 0, overlap=False)) == [
        "start gather", "wait gather", "compute use", "compute other", "start reduce", "wait reduce",
    ]  # fmt: skip


def test_a_rank_does_only_what_it_is_in() -> None:
    steps = [
        compute("make", [0]),
        message("hand", 0, 1, 8, after=["make"]),
        compute("take", [1], after=["hand"]),
    ]
    assert describe(make_program(steps, 0)) == ["compute make", "start hand", "wait hand"]
    assert describe(make_program(steps, 1)) == ["start hand", "wait hand", "compute take"]
    assert make_program(steps, 2) == []


def test_the_busiest_rank_counts() -> None:
    shard = 4 * -(-25_557 // 4)
    one, two = (build("ps", 4, scale=1e-3, shards=4, servers=servers) for servers in (1, 2))
    assert busiest_rank_bytes(one, 4) == 4 * (3 + 1) * shard, "the server: three push, and it answers"
    assert busiest_rank_bytes(two, 4) == 4 * (1 + 1) * shard, "a worker: it pushes and pulls every shard"
    reduces = build("tp", 4, degree=2)
    assert busiest_rank_bytes(reduces, 4) == sum(step.bus_bytes for step in reduces)
    pipeline = build("pp", 4, micro_batches=3, hidden=2, sequence=1, dtype="float32")
    assert busiest_rank_bytes(pipeline, 4) == 2 * 2 * 3 * 2 * 4, "an inner stage has two neighbours"


# dlrm


def test_the_worked_example_of_sixteen_ranks() -> None:
    steps = by_name(build("dlrm", 16, batch=32, tables=16, embedding=64, lookups=10, bottom="1024-256", top="4-2-1"))
    lengths, indices = steps["lengths"].plan(), steps["indices"].plan()
    assert set(lengths.outputs) == {512}
    assert (steps["lengths"].dtype, steps["lengths"].size_bytes) == ("int64", 4096)
    assert set(indices.inputs) == {5120}
    forward, backward = steps["forward_exchange"].plan(), steps["backward_exchange"].plan()
    assert {piece * 4 for row in forward.pieces for piece in row} == {8192}
    assert {sent * 4 for sent in forward.inputs} == {131_072}
    assert backward.pieces == tuple(zip(*forward.pieces, strict=True))
    assert [steps[f"top_reduce.{i}"].size_bytes for i in (2, 1, 0)] == [6272, 32, 8]
    assert steps["bottom_reduce.0"].size_bytes == 1_048_576
    assert steps["top_backward.0"].after == ("top_forward",)
    assert steps["backward_exchange"].after == ("top_backward.2",)
    assert steps["bottom_backward.0"].after == ("top_backward.2",), "beside the exchange, not behind it"


def test_tables_are_split_evenly_or_as_asked() -> None:
    assert split_tables(DlrmOptions(tables=10), 4) == [3, 3, 2, 2]
    assert split_tables(DlrmOptions(tables=2), 4) == [1, 1, 0, 0]
    uneven = build("dlrm", 3, batch=2, embedding=4, shards="5,0,1", lookups=3)
    steps = by_name(uneven)
    assert steps["lengths"].pieces == ((10, 0, 2),) * 3
    assert steps["indices"].pieces == ((30, 0, 6),) * 3
    assert steps["forward_exchange"].pieces == ((40, 40, 40), (0, 0, 0), (8, 8, 8))
    assert steps["backward_exchange"].pieces == ((40, 0, 8),) * 3
    with pytest.raises(UsageError, match="3 ranks"):
        build("dlrm", 4, shards="5,0,1")


def test_random_lookups_are_the_same_for_a_seed_and_within_bounds() -> None:
    steps, again, other = (
        by_name(build("dlrm", 2, tables=4, batch=8, lookups=5, random_lookups=True, seed=seed)) for seed in (1, 1, 2)
    )
    pieces = steps["indices"].pieces
    assert pieces == again["indices"].pieces != other["indices"].pieces
    assert pieces is not None
    assert all(16 <= piece <= 80 for row in pieces for piece in row)


@pytest.mark.parametrize(
    ("interaction", "width"), [("dot", 3 + 8), ("dot_self", 6 + 8), ("cat", 3 * 8), ("projected", 3 * 5 + 8)]
)
def test_the_interaction_sets_the_first_top_layer(interaction: str, width: int) -> None:
    steps = build("dlrm", 2, tables=2, bottom="4-8", top="2", interaction=interaction, projection=5)
    assert by_name(steps)["top_reduce.0"].size_bytes == width * 2 * 4


def test_dense_gradients_of_dlrm_in_buckets() -> None:
    steps = build("dlrm", 2, bucket_mib=25)
    reduces = [step.name for step in steps if step.operation == "all_reduce"]
    assert reduces == ["top_reduce.0", "bottom_reduce.0"]


# ddp


@pytest.mark.parametrize(
    ("model", "parameters", "tensors"),
    [("resnet50", 25_557_032, 161), ("vgg16", 138_357_544, 32), ("bert-base", 110_106_428, 206),
     ("bert-large", 336_226_108, 398), ("gpt2", 124_439_808, 148)],
)  # fmt: skip
def test_models_have_as_many_parameters_as_published(model: str, parameters: int, tensors: int) -> None:
    assert (sum(find_sizes(model)), len(find_sizes(model))) == (parameters, tensors)


def test_a_transformer_block_is_one_of_gpt2() -> None:
    sizes = find_sizes("gpt2")
    assert transformer_block(768) == sum(sizes[2:14]) == 7_087_872


def test_buckets_fill_up_to_their_limits() -> None:
    buckets = fill_buckets([3, 3, 10, 1, 1], element_bytes=4, first_bytes=8, rest_bytes=24)
    assert buckets == [[3], [3, 10], [1, 1]]
    assert fill_buckets([], element_bytes=4, first_bytes=8, rest_bytes=24) == []


@pytest.mark.parametrize("model", sorted(MODELS))
def test_buckets_are_those_of_torch(model: str) -> None:
    import torch
    from torch._C._distributed_c10d import _compute_bucket_assignment_by_size

    sizes = find_sizes(model)[::-1]
    tensors = [torch.empty(size, device="meta") for size in sizes]
    indices, _ = _compute_bucket_assignment_by_size(tensors, [1 << 20, 25 << 20])
    ours = fill_buckets(sizes, element_bytes=4, first_bytes=1 << 20, rest_bytes=25 << 20)
    assert ours == [[sizes[i] for i in bucket] for bucket in indices]


def test_ddp_reduces_each_bucket_when_its_gradients_are_ready() -> None:
    steps = by_name(build("ddp", 4))
    # 2,049,000 of the last layer fill the first bucket; the next 25 MiB follow.
    assert steps["reduce.0"].size_bytes == (1000 + 2048 * 1000) * 4
    assert sum(step.size_bytes for step in steps.values()) == 25_557_032 * 4
    assert steps["reduce.1"].after == ("backward.1",)
    assert steps["backward.1"].after == ("backward.0",)
    program = describe(make_program(list(steps.values()), 0))
    assert program[:4] == ["compute backward.0", "start reduce.0", "compute backward.1", "start reduce.1"]
    count = len(steps) // 2
    assert program[-count:] == [f"wait reduce.{i}" for i in range(count)]


def test_a_scale_shrinks_buckets_and_keeps_their_number() -> None:
    whole, small = build("ddp", 2), build("ddp", 2, scale=0.01)
    assert len(whole) == len(small)
    assert by_name(small)["reduce.0"].size_bytes == 20_490 * 4
    with pytest.raises(UsageError, match="model"):
        build("ddp", 2, model="resnet51")


# fsdp, tp, sp


def test_fsdp_gathers_twice_and_scatters_once() -> None:
    steps = by_name(build("fsdp", 4, layers=3, hidden=64))
    assert transformer_block(64) == 49_984
    assert steps["gather_forward.0"].size_bytes == 49_984 * 2
    assert steps["scatter.2"].size_bytes == 49_984 * 4
    assert steps["gather_forward.1"].after == ()
    assert steps["gather_forward.2"].after == ("forward.0",)
    assert steps["gather_backward.0"].after == ("backward.2",)
    assert describe(make_program(list(steps.values()), 0)) == [
        "start gather_forward.0", "start gather_forward.1", "wait gather_forward.0", "compute forward.0",
        "start gather_forward.2", "wait gather_forward.1", "compute forward.1", "wait gather_forward.2",
        "compute forward.2", "start gather_backward.2", "start gather_backward.1", "wait gather_backward.2",
        "compute backward.2", "start gather_backward.0", "start scatter.2", "wait gather_backward.1",
        "compute backward.1", "start scatter.1", "wait gather_backward.0", "compute backward.0", "start scatter.0",
        "wait scatter.2", "wait scatter.1", "wait scatter.0",
    ]  # fmt: skip


def test_fsdp_pads_what_does_not_divide() -> None:
    assert by_name(build("fsdp", 3, hidden=1))["gather_forward.0"].plan().inputs == (9, 9, 9), "25 parameters"


def test_without_prefetch_a_gather_waits_for_the_layer_before() -> None:
    steps = by_name(build("fsdp", 2, layers=2, prefetch=0))
    assert steps["gather_forward.1"].after == ("forward.0",)
    assert steps["gather_backward.0"].after == ("backward.1",)


def test_tensor_parallel_layers_reduce_activations() -> None:
    steps = build("tp", 4, layers=2, hidden=8, sequence=16, batch=3)
    reduces = [step for step in steps if step.communicates]
    assert len(reduces) == 2 * 4
    assert {step.size_bytes for step in reduces} == {3 * 16 * 8 * 2}
    assert {step.groups for step in reduces} == {((0, 1, 2, 3),)}
    program = describe(make_program(steps, 0))
    hidden = program.index("compute mlp_weight_gradient.1")
    assert program[hidden - 1 : hidden + 2] == [
        "start mlp_gradient_reduce.1", "compute mlp_weight_gradient.1", "wait mlp_gradient_reduce.1",
    ]  # fmt: skip
    pairs = build("tp", 4, degree=2)
    assert {step.groups for step in pairs if step.communicates} == {((0, 1), (2, 3))}
    with pytest.raises(UsageError, match="groups of 3"):
        build("tp", 4, degree=3)


def test_sequence_parallel_layers_gather_and_scatter() -> None:
    steps = build("sp", 4, layers=2, hidden=8, sequence=16, batch=3)
    operations = [step.operation for step in steps if step.communicates]
    assert (operations.count("all_gather"), operations.count("reduce_scatter")) == (2 * 6, 2 * 4)
    assert {step.size_bytes for step in steps if step.communicates} == {3 * 16 * 8 * 2}
    plain = build("sp", 4, layers=2, hidden=8, sequence=16, batch=3, regather=False)
    assert [step.operation for step in plain].count("all_gather") == 2 * 4
    reduced = sum(step.bus_bytes for step in build("tp", 4, layers=2, hidden=8, sequence=16, batch=3))
    assert sum(step.bus_bytes for step in plain) == reduced, "a pair moves what an all_reduce moves"
    with pytest.raises(UsageError, match="do not divide"):
        build("sp", 3, sequence=16, batch=1)


# pp


def test_stages_warm_up_alternate_and_cool_down() -> None:
    def short(stage: int, micro_batches: int) -> str:
        return " ".join(f"{work.way[0]}{work.micro_batch}" for work in plan_stage(stage, 4, micro_batches))

    assert short(0, 5) == "f0 f1 f2 f3 b0 f4 b1 b2 b3 b4"
    assert short(3, 3) == "f0 b0 f1 b1 f2 b2"
    assert short(0, 2) == "f0 f1 b0 b1", "fewer micro-batches than stages"
    assert len(order_work([plan_stage(stage, 4, 5) for stage in range(4)])) == 4 * 10


def test_messages_of_a_pipeline() -> None:
    steps = build("pp", 4, micro_batches=5, batch=2, sequence=16, hidden=8)
    messages = [step for step in steps if step.communicates]
    assert len(messages) == 2 * 3 * 5
    assert {step.size_bytes for step in messages} == {2 * 16 * 8 * 2}
    assert by_name(steps)["activation.1.4"].groups == ((1, 2),)
    assert by_name(steps)["gradient.3.0"].groups == ((3, 2),)
    order = [action.step.name for action in make_program(steps, 0) if action.kind == "compute"]
    assert order == [
        "forward.0.0", "forward.0.1", "forward.0.2", "forward.0.3", "backward.0.0", "forward.0.4", "backward.0.1",
        "backward.0.2", "backward.0.3", "backward.0.4",
    ]  # fmt: skip
    assert describe(make_program(steps, 3))[:6] == [
        "start activation.2.0", "wait activation.2.0", "compute forward.3.0", "start activation.2.1",
        "compute backward.3.0", "start gradient.3.0",
    ], "the next activation is awaited while backward computes"  # fmt: skip
    with pytest.raises(UsageError, match="2 ranks or more"):
        build("pp", 1)


# ep, ps


def test_routing_keeps_every_copy_and_follows_the_seed() -> None:
    options = ExpertOptions(tokens=100, experts_per_rank=2, top_k=3)
    routed = route(options, 4, 0)
    assert [sum(row) for row in routed] == [300] * 4
    assert routed == route(options, 4, 0)
    assert routed != route(options, 4, 1)
    assert routed != route(ExpertOptions(tokens=100, experts_per_rank=2, top_k=3, seed=1), 4, 0)
    received = [sum(row[rank] for row in route(ExpertOptions(tokens=1000, skew=3.0), 4, 0)) for rank in range(4)]
    assert max(received) > 2 * min(received), "a skew makes some ranks busy"
    everywhere = route(ExpertOptions(tokens=5, experts_per_rank=2, top_k=8), 4, 0)
    assert everywhere == ((10,) * 4,) * 4
    with pytest.raises(UsageError, match="9 of 8 experts"):
        build("ep", 4, top_k=9)


def test_experts_dispatch_and_combine() -> None:
    steps = by_name(build("ep", 4, layers=1, tokens=10, hidden=4))
    counts, dispatch, combine = (steps[f"{part}.0"] for part in ("counts", "dispatch", "combine"))
    assert (counts.size_bytes, counts.dtype) == (4 * 2 * 8, "int64")
    assert dispatch.plan().inputs == (10 * 2 * 4,) * 4
    assert combine.plan().outputs == (10 * 2 * 4,) * 4, "every token comes back"
    assert combine.pieces == tuple(zip(*(dispatch.pieces or ()), strict=True))
    assert steps["combine_gradient.0"].pieces == dispatch.pieces
    assert steps["dispatch_gradient.0"].pieces == combine.pieces
    assert steps["dispatch.0"].after == ("counts.0",)
    assert "combine_gradient.0" not in by_name(build("ep", 4, layers=1, backward=False))


def test_servers_are_pushed_to_and_answer() -> None:
    steps = by_name(build("ps", 5, servers=2, shards=3, scale=1.0))
    shard = -(-25_557_032 // 3)
    push, pull = steps["push.1"].plan(), steps["pull.1"].plan()
    assert steps["push.1"].groups == ((4, 0, 1, 2),)
    assert steps["pull.1"].groups == ((0, 1, 2, 4),)
    assert push.inputs == (0, shard, shard, shard)
    assert push.outputs == (3 * shard, 0, 0, 0)
    assert pull.inputs == (0, 0, 0, shard)
    assert pull.outputs == (shard, shard, shard, 0)
    assert steps["update.1"].groups == ((4,),)
    assert steps["pull.1"].after == ("push.1", "update.1")
    with pytest.raises(UsageError, match="3 ranks or more"):
        build("ps", 2, servers=2)


# Parameters


def test_settings_reach_the_patterns_that_have_them() -> None:
    chosen = read_settings(["ddp", "ps", "tp"], ["scale=0.1", "ps.shards=2", "layers=3"])
    assert chosen == {"ddp": {"scale": "0.1"}, "ps": {"scale": "0.1", "shards": "2"}, "tp": {"layers": "3"}}
    for setting, rule in (("scael=1", "no parameter"), ("sp.layers=1", "not among"), ("scale", "sets nothing")):
        with pytest.raises(UsageError, match=rule):
            read_settings(["ddp", "tp"], [setting])


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("ddp", {"scale": "2"}), ("fsdp", {"layers": "0"}), ("dlrm", {"top": "4-x"}), ("tp", {"dtype": "float7"}),
     ("dlrm", {"interaction": "sum"})],
)  # fmt: skip
def test_parameters_that_cannot_be_are_refused(name: str, parameters: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        build(name, 2, **parameters)


def test_a_case_says_what_is_unusual() -> None:
    pattern = find_pattern("dlrm")
    options = read_options(pattern, {"top": "4-2-1", "batch": "128"})
    case = make_case(pattern, options, overlap=False, backend="nccl", world_size=8, device="cuda")
    assert case.parameters == {"top": [4, 2, 1], "overlap": False, "device": "cuda"}
    assert case.benchmark.id == "pattern_dlrm/micro/nccl/8ranks"
    assert read_case(case) == (pattern, options, False)
    with pytest.raises(UsageError, match="pattern"):
        find_pattern("dllm")


@given(st.floats(1, 1e12))
def test_matmuls_have_about_as_many_operations_as_asked(flops: float) -> None:
    for device in ("cpu", "cuda:0"):
        edge, repeats = plan_matmuls(flops, device)
        assert edge >= 1
        assert 2 * edge**3 * repeats == pytest.approx(flops, rel=0.5) or flops < 32
