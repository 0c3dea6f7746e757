"""Matrices of pairs: read rightly, quiet on healthy clusters, and right about who is slow."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import make_system
from pair_clusters import LARGE, SMALL, Cluster, make_pair_case
from stepscope.analyze.network.explain import find_usual
from stepscope.analyze.network.pair_matrix import by_host, read_pair_matrices, read_pair_matrix
from stepscope.analyze.network.pairs import PairFinding, find_outliers, pairs_to_dict
from stepscope.analyze.network.pairs import PairFinding as PairsFinding
from stepscope.core.errors import UsageError
from stepscope.records import make_request
from stepscope.store import RunWriter, StoredRun, create_run

# Reading


def test_a_stored_run_becomes_a_matrix(tmp_path: Path) -> None:
    cluster = Cluster(2, 2, nics=2, noise=0.0, missing=[(3, 0)])
    cases = cluster.cases(failed=[(1, 2)])
    planned = [measured.result.case for measured in cases]
    folder = create_run(
        tmp_path, verb="comms", name="pairs", command=["stepscope"], request=make_request("comms", {}), cases=planned
    )
    with RunWriter(folder) as writer:
        writer.write_system(make_system())
        for measured in cases:
            writer.append(measured.result, measured.samples)
        writer.finish()
    matrix = read_pair_matrix(StoredRun(folder).cases())
    assert matrix.benchmark == "pair/micro/nccl/4ranks"
    assert matrix.parameters == {"dtype": "float32", "device": "cuda"}
    assert (matrix.ranks, matrix.hosts) == ([0, 1, 2, 3], ["node0", "node0", "node1", "node1"])
    assert matrix.nics == ["mlx5_0", "mlx5_1", "mlx5_0", "mlx5_1"]
    assert (matrix.small_bytes, matrix.large_bytes) == (SMALL, LARGE)
    assert matrix.latency_s[0][1] == pytest.approx(2e-6)
    assert matrix.latency_s[0][2] == pytest.approx(12e-6)
    assert matrix.bandwidth_bytes_per_s[0][3] == pytest.approx(11e9)
    interval = matrix.bandwidth_interval_bytes_per_s[0][3]
    assert interval is not None
    assert interval.low <= matrix.bandwidth_bytes_per_s[0][3] <= interval.high  # type: ignore[operator]
    for grid in (matrix.latency_s, matrix.bandwidth_bytes_per_s, matrix.latency_interval_s):
        assert [grid[i][i] for i in range(4)] == [None] * 4
        assert grid[3][0] is None
        assert grid[1][2] is None
    assert [(f.source, f.target, f.message) for f in matrix.failures] == [(1, 2, "timeout: no answer within 10 s")]


def test_ranks_that_nobody_names_stand_for_themselves() -> None:
    cases = [make_pair_case(0, 7, SMALL, [1e-6] * 5), make_pair_case(0, 3, SMALL, None)]
    matrix = read_pair_matrix(cases)
    assert matrix.ranks == [0, 3, 7]
    assert matrix.hosts == ["host of rank 0", "host of rank 3", "host of rank 7"]
    assert matrix.nics == [None] * 3
    assert matrix.latency_s[0] == [None, None, pytest.approx(1e-6)]
    assert matrix.large_bytes is None
    assert matrix.bandwidth_bytes_per_s == [[None] * 3] * 3


def test_one_large_size_is_bandwidth() -> None:
    matrix = read_pair_matrix([make_pair_case(0, 1, LARGE, [1e-3] * 5)])
    assert (matrix.small_bytes, matrix.large_bytes) == (None, LARGE)


def test_a_rank_with_two_names_of_a_nic_has_none() -> None:
    cases = [
        make_pair_case(0, 1, SMALL, [1e-6], observed={"source_nic": "a", "target_nic": "b"}),
        make_pair_case(1, 0, SMALL, [1e-6], observed={"source_nic": "c", "target_nic": "a"}),
    ]
    assert read_pair_matrix(cases).nics == ["a", None]


def test_wrong_data_is_a_failure_although_it_has_a_time() -> None:
    matrix = read_pair_matrix([make_pair_case(0, 1, SMALL, [1e-6] * 5, observed={"wrong": 3})])
    assert matrix.failures[0].message == "3 elements arrived wrong"
    assert matrix.latency_s[0][1] is not None


def test_backends_and_devices_have_matrices_of_their_own() -> None:
    cases = [
        make_pair_case(0, 1, SMALL, [1e-6], backend=backend, device=device)
        for backend, device in (("gloo", "cpu"), ("nccl", "cuda"), ("gloo", "cuda"))
    ]
    assert [matrix.benchmark for matrix in read_pair_matrices(cases)] == [
        "pair/micro/gloo/4ranks", "pair/micro/nccl/4ranks", "pair/micro/gloo/4ranks",
    ]  # fmt: skip
    with pytest.raises(UsageError, match="3 matrices"):
        read_pair_matrix(cases)


def test_without_pairs_the_next_step_is_told() -> None:
    with pytest.raises(UsageError) as told:
        read_pair_matrix([])
    assert told.value.hint == "stepscope bench pairs measures them"


def test_what_is_no_pair_has_no_place() -> None:
    odd = [make_pair_case(2, 2, SMALL, [1e-6]), make_pair_case(-1, 2, SMALL, [1e-6])]
    odd.append(make_pair_case(0, 1, SMALL, [0.0, 1e-6]))
    (matrix,) = read_pair_matrices(odd)
    assert matrix.ranks == [0, 1]
    assert matrix.latency_s == [[None, None], [None, None]]
    assert find_outliers(matrix) == []


def test_hosts_are_medians_and_keep_what_is_inside_apart() -> None:
    def slower(source: int, target: int, _: str) -> float:
        return 5.0 if (source, target) == (0, 2) else 3.0 if (source, target) == (0, 1) else 1.0

    hosts = by_host(Cluster(2, 2, noise=0.0, slower=slower).matrix())
    assert hosts.hosts == ["node0", "node1"]
    assert hosts.latency_s == [[None, pytest.approx(12e-6)], [pytest.approx(12e-6), None]]
    assert hosts.bandwidth_bytes_per_s[1][0] == pytest.approx(11e9)
    assert hosts.inside_latency_s == [pytest.approx(4e-6), pytest.approx(2e-6)]
    assert by_host(Cluster(2, 1).matrix()).inside_latency_s == [None, None]


# What is usual


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=60))
def test_the_usual_lies_among_the_values(values: list[float]) -> None:
    usual = find_usual(values)
    assert min(values) <= usual.centre <= max(values)
    assert 0 < usual.spread < math.inf


@given(st.integers(3, 40), st.integers(0, 80), st.floats(1, 5), st.randoms(use_true_random=False))
def test_the_usual_is_found_though_most_are_slow(good: int, slow: int, shift: float, source: random.Random) -> None:
    slow = min(slow, 2 * good)
    values = [source.uniform(-0.05, 0.05) for _ in range(good)]
    values += [shift + source.uniform(-0.05, 0.05) for _ in range(slow)]
    assert abs(find_usual(values).centre) <= 0.05


# Healthy clusters

SHAPES = [(8, 1, 0), (4, 4, 2), (1, 8, 0), (1, 4, 0)]


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize(("hosts", "per_host", "nics"), SHAPES)
def test_noise_is_no_finding(hosts: int, per_host: int, nics: int, heavy: bool) -> None:
    alarms = sum(
        bool(find_outliers(Cluster(hosts, per_host, nics=nics, seed=seed, heavy=heavy).matrix())) for seed in range(300)
    )
    assert alarms < 3


def test_tails_from_pair_to_pair_are_no_finding() -> None:
    """Student's t with five degrees of freedom: now and then a pair is three times further out than a normal one."""

    def matrix(seed: int) -> list[PairFinding]:
        source = random.Random(seed)

        def slower(*_: object) -> float:
            return math.exp(0.05 * source.gauss(0, 1) / math.sqrt(source.gammavariate(2.5, 2) / 5))

        return find_outliers(Cluster(8, seed=seed, noise=0.02, slower=slower).matrix())

    assert sum(bool(matrix(seed)) for seed in range(300)) < 3


def test_a_very_noisy_cluster_is_not_blamed_on_anybody() -> None:
    assert sum(bool(find_outliers(Cluster(8, seed=seed, noise=0.2).matrix())) for seed in range(100)) <= 1


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 1), (1, 2), (2, 2), (1, 1)])
def test_too_few_pairs_say_nothing(hosts: int, per_host: int) -> None:
    cluster = Cluster(hosts, per_host, slower=lambda s, t, q: 5.0 if s == 0 else 1.0)
    assert [finding.kind for finding in find_outliers(cluster.matrix()) if finding.kind == "slow_host"] == []


# Planted faults

Plant = Callable[[Cluster], Callable[[int, int], bool]]


def slow_host(cluster: Cluster) -> Callable[[int, int], bool]:
    ranks = cluster.on_host(1)
    return lambda s, t: (s in ranks) != (t in ranks)


def slow_whole_host(cluster: Cluster) -> Callable[[int, int], bool]:
    ranks = cluster.on_host(1)
    return lambda s, t: s in ranks or t in ranks


def slow_nic(cluster: Cluster) -> Callable[[int, int], bool]:
    ranks = {rank for rank in cluster.on_host(1) if cluster.nics[rank] == "mlx5_1"}
    return lambda s, t: (s in ranks or t in ranks) and cluster.hosts[s] != cluster.hosts[t]


def slow_rank(_: Cluster) -> Callable[[int, int], bool]:
    return lambda s, t: 2 in {s, t}


def slow_rank_to_others(cluster: Cluster) -> Callable[[int, int], bool]:
    return lambda s, t: 2 in {s, t} and cluster.hosts[s] != cluster.hosts[t]


def slow_sender(_: Cluster) -> Callable[[int, int], bool]:
    return lambda s, _t: s == 2


def slow_receiver(_: Cluster) -> Callable[[int, int], bool]:
    return lambda _s, t: t == 2


def slow_sending_host(cluster: Cluster) -> Callable[[int, int], bool]:
    ranks = cluster.on_host(1)
    return lambda s, t: s in ranks and t not in ranks


def bad_link(_: Cluster) -> Callable[[int, int], bool]:
    return lambda s, t: {s, t} == {0, 3}


def bad_link_of_hosts(cluster: Cluster) -> Callable[[int, int], bool]:
    return lambda s, t: {cluster.hosts[s], cluster.hosts[t]} == {"node0", "node2"}


def asymmetric_pair(_: Cluster) -> Callable[[int, int], bool]:
    return lambda s, t: (s, t) == (3, 0)


NODES, RANKS, LOCAL, FOUR = (8, 1, 0), (4, 4, 2), (1, 8, 0), (1, 4, 0)

FAULTS: list[tuple[tuple[int, int, int], Plant, str, list[int]]] = [
    (NODES, slow_host, "slow_host", [1]),
    (NODES, slow_sender, "slow_sender", [2]),
    (NODES, slow_receiver, "slow_receiver", [2]),
    (NODES, bad_link, "bad_link", [0, 3]),
    (NODES, asymmetric_pair, "asymmetric_pair", [3, 0]),
    ((3, 1, 0), slow_host, "slow_host", [1]),
    ((4, 1, 0), slow_host, "slow_host", [1]),
    (RANKS, slow_host, "slow_host", [4, 5, 6, 7]),
    (RANKS, slow_whole_host, "slow_host", [4, 5, 6, 7]),
    (RANKS, slow_nic, "slow_nic", [6, 7]),
    (RANKS, slow_rank, "slow_rank", [2]),
    (RANKS, slow_rank_to_others, "slow_rank", [2]),
    (RANKS, slow_sender, "slow_sender", [2]),
    (RANKS, slow_sending_host, "slow_sender", [4, 5, 6, 7]),
    (RANKS, bad_link_of_hosts, "bad_link", [0, 1, 2, 3, 8, 9, 10, 11]),
    (LOCAL, slow_rank, "slow_rank", [2]),
    (LOCAL, slow_sender, "slow_sender", [2]),
    (LOCAL, slow_receiver, "slow_receiver", [2]),
    (LOCAL, bad_link, "bad_link", [0, 3]),
    (LOCAL, asymmetric_pair, "asymmetric_pair", [3, 0]),
    (FOUR, slow_rank, "slow_rank", [2]),
    (FOUR, bad_link, "bad_link", [0, 3]),
]


def plant(shape: tuple[int, int, int], fault: Plant, *, factor: float = 2.0, seed: int = 0, **more: object) -> Cluster:
    hosts, per_host, nics = shape
    cluster = Cluster(hosts, per_host, nics=nics, seed=seed, **more)  # type: ignore[arg-type]
    concerns = fault(cluster)
    cluster.slower = lambda s, t, _: factor if concerns(s, t) else 1.0
    return cluster


@pytest.mark.parametrize(
    ("shape", "fault", "kind", "ranks"), FAULTS, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_faults_are_named_rightly(shape: tuple[int, int, int], fault: Plant, kind: str, ranks: list[int]) -> None:
    """In clusters with and without heavy tails."""
    times = 20 if shape == RANKS else 50
    for heavy in (False, True):
        right = 0
        for seed in range(heavy, 2 * times, 2):
            findings = find_outliers(plant(shape, fault, seed=seed, heavy=heavy).matrix())
            right += [(finding.kind, finding.ranks) for finding in findings] == [(kind, ranks)]
        assert right >= 0.95 * times, heavy


@pytest.mark.parametrize("quantity", ["latency", "bandwidth"])
def test_one_quantity_alone_can_stand_out(quantity: str) -> None:
    cluster = Cluster(8, slower=lambda s, t, q: 2.0 if 1 in {s, t} and q == quantity else 1.0)
    (finding,) = find_outliers(cluster.matrix())
    assert finding.kind == "slow_host"
    assert (finding.latency_ratio is None) == (quantity == "bandwidth")
    assert (finding.bandwidth_ratio is None) == (quantity == "latency")
    assert f"{'latency' if quantity == 'bandwidth' else 'bandwidth'} is as usual" in finding.sentence


def test_several_faults_are_several_findings() -> None:
    def slower(source: int, target: int, _: str) -> float:
        ends = {source, target}
        return (2.0 if 1 in ends else 1.0) * (3.0 if ends == {4, 6} else 1.0)

    host, link = find_outliers(Cluster(8, slower=slower).matrix())
    assert (host.kind, host.hosts, host.evidence) == ("slow_host", ["node1"], 28)
    assert (link.kind, link.ranks, link.pairs) == ("bad_link", [4, 6], [(4, 6), (6, 4)])
    assert host.latency_ratio == pytest.approx(2.0, rel=0.1)
    assert link.bandwidth_ratio == pytest.approx(1 / 3, rel=0.15)


def test_a_link_inside_a_slow_host_is_found_in_the_residue() -> None:
    def slower(source: int, target: int, _: str) -> float:
        ends = {source, target}
        return (2.0 if 1 in ends else 1.0) * (4.0 if ends == {1, 6} else 1.0)

    kinds = [finding.kind for finding in find_outliers(Cluster(8, slower=slower).matrix())]
    assert kinds == ["slow_host", "bad_link"]


def test_missing_pairs_do_not_hide_a_slow_host() -> None:
    everybody = [(a, b) for a in range(8) for b in range(8)]
    gone = random.Random(1).sample(everybody, 20)
    (finding,) = find_outliers(plant(NODES, slow_host, missing=gone).matrix())
    assert (finding.kind, finding.ranks) == ("slow_host", [1])
    assert not set(finding.pairs) & set(gone)


def test_one_way_of_a_link_without_the_other_is_a_link() -> None:
    cluster = plant(NODES, asymmetric_pair, missing=[(0, 3)])
    (finding,) = find_outliers(cluster.matrix())
    assert (finding.kind, finding.pairs) == ("bad_link", [(3, 0)])


def test_a_pair_that_was_held_up_for_some_samples_is_not_blamed() -> None:
    cases = [case for case in Cluster(8, samples=9).cases() if case.result.case.parameters["source"] != 3]
    times = Cluster(8).times(3, 4, "latency")
    held_up = [value * (3.0 if i < 5 else 1.0) for i, value in enumerate(times)]
    cases.append(make_pair_case(3, 4, SMALL, held_up, world=8))
    assert find_outliers(read_pair_matrix(cases)) == []


# Tiers


@pytest.mark.parametrize(("hosts", "rack", "factor"), [(8, 4, 1.5), (12, 4, 1.8), (8, 2, 2.0), (16, 8, 1.5)])
def test_racks_are_groups_not_faults(hosts: int, rack: int, factor: float) -> None:
    for seed in range(20):
        cluster = Cluster(hosts, seed=seed, slower=lambda s, t, _: factor if s // rack != t // rack else 1.0)
        (finding,) = find_outliers(cluster.matrix())
        assert finding.kind == "tiers"
        assert finding.groups == [list(range(first, first + rack)) for first in range(0, hosts, rack)]
        assert finding.latency_ratio == pytest.approx(factor, rel=0.1)


def test_sockets_are_groups_inside_hosts() -> None:
    cluster = Cluster(4, 4, slower=lambda s, t, _: 1.8 if s // 4 == t // 4 and s // 2 != t // 2 else 1.0)
    (finding,) = find_outliers(cluster.matrix())
    assert finding.groups == [[rank, rank + 1] for rank in range(0, 16, 2)]
    assert finding.sentence.startswith("ranks form 8 groups (0, 1; 2, 3; ")


def test_a_slow_host_is_found_in_a_cluster_with_racks() -> None:
    for seed in range(20):
        cluster = Cluster(
            12, seed=seed, slower=lambda s, t, _: (1.8 if s // 4 != t // 4 else 1.0) * (2.0 if 5 in {s, t} else 1.0)
        )
        host, tiers = find_outliers(cluster.matrix())
        assert (host.kind, host.ranks, tiers.kind) == ("slow_host", [5], "tiers")


# Failures


def test_a_dead_host_is_one_finding() -> None:
    cluster = Cluster(6)
    failed = [(a, b) for a in range(6) for b in range(6) if 2 in {a, b}] + [(0, 4)]
    host, link = find_outliers(read_pair_matrix(cluster.cases(failed=failed)))
    assert (host.kind, host.ranks, host.evidence) == ("failed", [2], 10)
    assert host.sentence.startswith("no message to or from ")
    assert "(10 pairs; timeout: no answer within 10 s)" in host.sentence
    assert (link.kind, link.ranks, link.pairs) == ("failed", [0, 4], [(0, 4)])


def test_nothing_but_failures() -> None:
    everybody = [(a, b) for a in range(3) for b in range(3) if a != b]
    findings = find_outliers(read_pair_matrix(Cluster(3).cases(failed=everybody)))
    assert {finding.kind for finding in findings} == {"failed"}
    assert sorted(pair for finding in findings for pair in finding.pairs) == everybody


# What is said


@pytest.mark.parametrize(
    ("shape", "fault", "sentence", "step"),
    [
        (NODES, slow_host, "host node1 (rank 1) is slow to and from every other host: latency is 2.0", "switch port"),
        (
            RANKS,
            slow_whole_host,
            "host node1 (ranks 4, 5, 6, 7) is slow to and from every other rank: ",
            "the host itself",
        ),
        (RANKS, slow_nic, "NIC mlx5_1 of host node1 (ranks 6, 7) is slow to and from every other host", "this NIC"),
        (RANKS, slow_rank, "rank 2 on host node0 is slow to and from every other rank", "binding, clocks"),
        (RANKS, slow_sender, "rank 2 on host node0 sends slowly to every other rank", "sending side"),
        (RANKS, slow_sending_host, "host node1 (ranks 4, 5, 6, 7) sends slowly to every other host", "sending side"),
        (LOCAL, slow_receiver, "rank 2 on host node0 receives slowly from every other rank", "receiving side"),
        (NODES, bad_link, "rank 0 on host node0 – rank 3 on host node3 is a slow link", "cables, switch ports"),
        (NODES, asymmetric_pair, "rank 3 on host node3 → rank 0 on host node0 is slow in this direction", "routes"),
        (RANKS, bad_link_of_hosts, "hosts node0 – node2 is a slow link", "cables"),
        (LOCAL, bad_link, "ranks 0 – 3 on host node0 is a slow link", "inside the host"),
    ],
)
def test_sentences_name_who_and_what_to_do(shape: tuple[int, int, int], fault: Plant, sentence: str, step: str) -> None:
    (finding,) = find_outliers(plant(shape, fault).matrix())
    assert finding.sentence.startswith(sentence)
    assert "bandwidth is" in finding.sentence
    assert "of the usual (" in finding.sentence
    assert finding.sentence.endswith(" pairs)") or finding.sentence.endswith(" (1 pair)")
    assert step in finding.next_step


def test_everything_goes_into_json() -> None:
    cluster = plant(RANKS, slow_nic)
    matrix = cluster.matrix()
    content = json.loads(json.dumps(pairs_to_dict(matrix, find_outliers(matrix))))
    assert content["findings"][0]["kind"] == "slow_nic"
    assert content["findings"][0]["nic"] == "mlx5_1"
    assert len(content["matrix"]["latency_s"]) == 16
    assert content["by_host"]["hosts"] == ["node0", "node1", "node2", "node3"]
    assert "by_host" not in pairs_to_dict(Cluster(3).matrix(), [])
    assert msgspec.convert(content["findings"], list[PairsFinding])[0] == find_outliers(matrix)[0]


# Anything that can be measured


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.data())
def test_any_matrix_can_be_read(hosts: int, per_host: int, data: st.DataObject) -> None:
    """Whatever the times: nothing is raised, and what is named exists."""
    times = st.floats(1e-9, 1e3) | st.sampled_from([1e-6, 2e-6])
    cases = []
    for source in range(hosts * per_host):
        for target in range(hosts * per_host):
            for size in (SMALL, LARGE):
                if source != target and data.draw(st.booleans() | st.just(True)):
                    seconds = data.draw(st.none() | st.lists(times, min_size=1, max_size=3))
                    ends = {"source_host": f"n{source // per_host}", "target_host": f"n{target // per_host}"}
                    cases.append(make_pair_case(source, target, size, seconds, observed=ends))
    for matrix in read_pair_matrices(cases):
        for finding in find_outliers(matrix):
            assert set(finding.ranks) <= set(matrix.ranks)
            assert set(finding.hosts) <= set(matrix.hosts)
            assert finding.pairs
            assert finding.evidence > 0
            assert finding.sentence
            assert finding.next_step
        json.dumps(pairs_to_dict(matrix, find_outliers(matrix)))
