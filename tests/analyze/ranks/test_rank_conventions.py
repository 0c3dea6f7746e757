"""Names, sizes and bus factors of collectives; member lists of process groups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.analyze.ranks.collectives import count_elements, kernel_collective, uneven_bus_elements
from stepscope.analyze.ranks.groups import TracedGroup, find_members, format_members, listed_groups, parse_members
from stepscope.core import collectives as conv
from stepscope.core.dtypes import dtype_bytes, dtype_name


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        ("allreduce", "all_reduce"),
        ("allreduce_coalesced", "all_reduce"),
        ("nccl:all_reduce", "all_reduce"),
        ("c10d::allreduce_", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("allgather_into_tensor_coalesced", "all_gather"),
        ("nccl:_all_gather_base", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("all_to_allv", "all_to_all"),
        ("gloo:all_to_all", "all_to_all"),
        ("alltoall_base", "all_to_all"),
        ("broadcast", "broadcast"),
        ("_broadcast_oop", "broadcast"),
        ("reduce", "reduce"),
        ("gather", "gather"),
        ("scatter", "scatter"),
        ("send", "send"),
        ("recvAnySource", "recv"),
        ("barrier", "barrier"),
        ("something new", "other"),
    ],
)
def test_recorded_names(recorded: str, expected: str) -> None:
    code = conv.canonical_collective(recorded)
    assert code is not None
    assert conv.COLLECTIVES[code] == expected


@pytest.mark.parametrize("recorded", ["wait", "init", "nccl:coalesced"])
def test_bookkeeping_is_no_collective(recorded: str) -> None:
    assert conv.canonical_collective(recorded) is None


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", "all_reduce"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevComm*)", "reduce_scatter"),
        ("ncclKernel_Reduce_RING_LL_Sum_float(ncclDevComm*)", "reduce"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)", "send_recv"),
        ("ncclDevKernel_Generic_1(ncclDevComm*)", "other"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(RankData*)", "all_reduce"),
        ("void multimem_all_reduce_kernel<float>(float*)", "all_reduce"),
        ("void reduce_kernel<512, 1>(float*)", "other"),
    ],
)
def test_kernel_names(kernel: str, expected: str) -> None:
    assert conv.COLLECTIVES[kernel_collective(kernel)] == expected


@pytest.mark.parametrize(
    ("dtype", "name", "width"),
    [
        ("Float", "float32", 4),
        ("BFloat16", "bfloat16", 2),
        ("c10::Half", "float16", 2),
        ("long int", "int64", 8),
        ("unsigned char", "uint8", 1),
        ("Float8_e4m3fn", "float8_e4m3fn", 1),
        ("c10::complex<float>", "complex64", 8),
        ("Long", "int64", 8),
        ("TensorList", "TensorList", None),
    ],
)
def test_element_types(dtype: str, name: str, width: int | None) -> None:
    assert (dtype_name(dtype), dtype_bytes(dtype)) == (name, width)


@pytest.mark.parametrize(
    ("collective", "factor"),
    [
        ("all_reduce", 2 * 7 / 8),
        ("all_gather", 7 / 8),
        ("reduce_scatter", 7 / 8),
        ("all_to_all", 7 / 8),
        ("gather", 7 / 8),
        ("scatter", 7 / 8),
        ("broadcast", 1),
        ("reduce", 1),
        ("send", 1),
        ("recv", 1),
        ("barrier", None),
        ("other", None),
    ],
)
def test_bus_factors_of_eight_members(collective: str, factor: float | None) -> None:
    assert conv.bus_factor(collective, 8) == factor


def test_a_bus_factor_that_depends_on_the_group_needs_its_size() -> None:
    assert conv.bus_factor("all_reduce", 0) is None
    assert conv.bus_factor("broadcast", 0) == 1


@pytest.mark.parametrize(
    ("collective", "put_in", "got", "members", "expected"),
    [
        (conv.ALL_REDUCE, 100, 100, 4, 100),
        (conv.ALL_GATHER, 100, 400, 4, 400),
        (conv.ALL_GATHER, 100, 100, 4, 400),  # one member's piece on both sides
        (conv.ALL_GATHER, 100, -1, 4, 400),
        (conv.ALL_GATHER, 100, -1, 0, None),
        (conv.ALL_GATHER, 100, 100, 1, 100),
        (conv.REDUCE_SCATTER, 400, 100, 4, 400),
        (conv.REDUCE_SCATTER, 400, -1, 0, 400),
        (conv.REDUCE_SCATTER, 100, 100, 4, 400),
        (conv.ALL_TO_ALL, 400, 300, 4, 400),
        (conv.GATHER, 100, 0, 4, 400),
        (conv.SCATTER, 0, 100, 4, 400),
        (conv.SCATTER, 0, 100, 0, None),
        (conv.BROADCAST, 100, 100, 4, 100),
        (conv.RECV, -1, 100, 2, 100),
    ],
)
def test_the_whole_array(collective: int, put_in: int, got: int, members: int, expected: int | None) -> None:
    assert conv.whole_elements(collective, put_in, got, members) == expected


def test_an_uneven_all_to_all_leaves_out_the_own_piece() -> None:
    # Rows of 10 elements; member 1 keeps 2 of the 6 it sends and of the 9 it gets.
    assert uneven_bus_elements(60, 90, "[1, 2, 3]", "[4, 2, 3]", 1) == 70
    assert uneven_bus_elements(60, 90, "[1, 2, 3]", "[]", 1) == 70
    assert uneven_bus_elements(60, 60, "[]", "[]", 1) is None
    assert uneven_bus_elements(60, 60, "[1, 2, ..., 3]", "[1, 2, ..., 3]", 1) is None
    assert uneven_bus_elements(60, 60, "[1, 2, 3]", "[1, 2, 3]", -1) is None


def test_elements_from_shapes() -> None:
    assert count_elements("[[4, 5], []]", '["float", "Scalar"]') == (20, "float")
    assert count_elements("[[4, 5], [6]]", '["float", "float"]') == (26, "float")
    assert count_elements("[[]]", '["long int"]') == (1, "long int")
    assert count_elements("[[4], [6]]", '["float", "int"]') is None
    assert count_elements("[[], []]", '["Scalar", ""]') is None
    assert count_elements("no list", "[]") is None
    assert count_elements('[["a"]]', '["float"]') is None


@given(st.lists(st.integers(0, 5000), max_size=60))
def test_members_survive_writing_and_reading(ranks: list[int]) -> None:
    assert parse_members(format_members(ranks)) == tuple(ranks)


def test_members_are_written_short() -> None:
    assert format_members(range(1000)) == "0-999"
    assert format_members(range(3, 64, 8)) == "3-59:8"
    assert format_members([0, 4]) == "0,4"
    assert format_members([5, 6, 9]) == "5-6,9"
    assert format_members([7]) == "7"


def _shortened(ranks: range) -> str:
    """As the profiler does it: 29 ranks, dots, the last one."""
    return f"[{', '.join(map(str, ranks[:29]))}, ..., {ranks[-1]}]"


def test_a_shortened_list_is_rebuilt() -> None:
    ranks = range(0, 64, 2)
    members, note = find_members(_shortened(ranks), size=32, start=0, stride=2)
    assert members == "0-62:2"
    assert note == "members rebuilt from first rank, stride and size"
    members, note = find_members(_shortened(ranks), size=32, start=None, stride=None)
    assert members == "0-62:2"
    assert note == "members rebuilt from the shortened list and the size"
    # First rank and stride that do not fit what is shown are not believed.
    assert find_members(_shortened(ranks), size=32, start=5, stride=1)[0] == "0-62:2"


def test_a_shortened_list_without_order_stays_unknown_unless_the_header_has_it() -> None:
    ranks = [0, 1, 5, 6, 9, *range(20, 50), 77]
    text = f"[{', '.join(map(str, ranks[:29]))}, ..., 77]"
    assert find_members(text, size=len(ranks), start=0, stride=-1) == (
        None,
        "the list of members is shortened and cannot be rebuilt",
    )
    found, note = find_members(text, size=len(ranks), start=0, stride=-1, listed=ranks)
    assert parse_members(found or "") == tuple(ranks)
    assert note is not None


def test_an_empty_list_means_all_only_where_the_size_says_so() -> None:
    assert find_members("[]", size=8, start=None, stride=None, world_size=8)[0] == "0-7"
    assert find_members("[]", size=4, start=None, stride=None, world_size=8)[0] is None
    assert find_members(None, size=None, start=None, stride=None)[0] is None


def test_groups_in_the_header() -> None:
    header = {"distributed": {"pg_config": [{"pg_name": "0", "ranks": [0, 1]}, {"pg_name": "1", "ranks": []}, 7]}}
    assert listed_groups(header) == {"0": [0, 1]}
    assert listed_groups({}) == {}
    assert listed_groups({"distributed": {"pg_config": "many"}}) == {}


def test_labels() -> None:
    assert TracedGroup(name="3", description="tp").label() == "tp [3]"
    assert TracedGroup(members="0-3").label() == "ranks 0-3"
    assert TracedGroup(stand_in="communication stream 1").label() == "not recorded (communication stream 1)"
