"""Hostfiles and cluster files: what they mean, and what is said of those that cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from stepscope.core.errors import BadInputError, StepscopeError, UsageError
from stepscope.launch.hosts import (
    CLUSTER_VARIABLE,
    MAX_SLOTS,
    Cluster,
    LaunchHost,
    check_rsh,
    encode_cluster,
    format_hostfile,
    parse_cluster,
    parse_hostfile,
    read_cluster_file,
    read_cluster_from_environment,
    read_hostfile,
    with_ranks_per_node,
)

NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,8}[a-z0-9](\.[a-z]{1,3})?", fullmatch=True)
HOSTS = st.lists(
    st.builds(
        lambda name, slots, more: LaunchHost(name=name, slots=slots, max_slots=None if more is None else slots + more),
        NAMES,
        st.integers(1, 64),
        st.none() | st.integers(0, 8),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda host: host.name,
)
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


def names_and_slots(text: str) -> list[tuple[str, int]]:
    return [(host.name, host.slots) for host in parse_hostfile(text, "hosts")]


# Hostfiles


def test_both_forms_comments_and_blank_lines() -> None:
    lines = ["# the rack", "", "node1 slots=4 max_slots=8  # new", "  node2:2", "node3"]
    lines += ["10.0.0.4 max-slots=2 slots=2", "[fe80::1]:3", "fe80::2"]
    assert parse_hostfile("\n".join(lines), "hosts") == [
        LaunchHost(name="node1", slots=4, max_slots=8),
        LaunchHost(name="node2", slots=2),
        LaunchHost(name="node3", slots=1),
        LaunchHost(name="10.0.0.4", slots=2, max_slots=2),
        LaunchHost(name="fe80::1", slots=3),
        LaunchHost(name="fe80::2", slots=1),
    ]


def test_a_host_named_again_adds_its_slots_where_it_first_stood() -> None:
    assert names_and_slots("a slots=2\nb\na:3\nb\n") == [("a", 5), ("b", 2)]


@given(HOSTS)
def test_what_is_written_is_read(hosts: list[LaunchHost]) -> None:
    assert parse_hostfile(format_hostfile(hosts), "hosts") == hosts


@given(HOSTS)
def test_the_form_of_a_line_does_not_matter(hosts: list[LaunchHost]) -> None:
    openmpi = "".join(f"{host.name}  slots={host.slots}\n" for host in hosts)
    mpich = "\n\n".join(f"\t{host.name}:{host.slots} # c" for host in hosts)
    single = "".join(f"{host.name}\n" * host.slots for host in hosts)
    assert names_and_slots(openmpi) == names_and_slots(mpich) == names_and_slots(single)


@given(TEXT | st.lists(TEXT).map("\n".join))
def test_any_text_is_read_or_refused_with_its_place(text: str) -> None:
    refusal = None
    try:
        hosts = parse_hostfile(text, "hosts")
    except StepscopeError as error:
        refusal, hosts = error, []
    assert all(1 <= host.slots <= MAX_SLOTS for host in hosts)
    assert len({host.name for host in hosts}) == len(hosts)
    if refusal is not None:
        assert (refusal.where or "").startswith("hosts")
        assert refusal.hint


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("node1 slots=0", "1 to 65536 slots"),
        ("node1:0", "1 to 65536 slots"),
        ("node1 slots=99999999", "1 to 65536 slots"),
        ("node1 slots=two", "no whole number"),
        ("node1 slots=", "no whole number"),
        ("node1:²", "no whole number"),
        ("node1 slots=2 slots=3", "slots twice"),
        ("node1:2 slots=2", "slots twice"),
        ("node1 slots=4 max_slots=2", "more than its max_slots=2"),
        ("node1 slots 4", "'slots' is not understood"),
        ("node1 user=me", "'user=me' is not understood"),
        ("me@node1", "cannot be a host's name"),
        ("-oProxyCommand=x", "cannot be a host's name"),
        ("node1;reboot", "cannot be a host's name"),
        ("node1 max_slots=2\nnode1:2", "add up to 3 slots"),
    ],
)
def test_what_cannot_be_is_named_with_its_line(line: str, says: str) -> None:
    with pytest.raises(BadInputError, match=says) as caught:
        parse_hostfile(f"# first\n{line}\n", "my-hosts")
    assert caught.value.where == f"my-hosts, line {1 + len(line.splitlines())}"


def test_a_file_without_hosts_or_without_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    with pytest.raises(UsageError, match="cannot be read"):
        read_hostfile(file)
    file.write_text("# nobody\n")
    with pytest.raises(BadInputError, match="names no host"):
        read_hostfile(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(BadInputError, match="not UTF-8"):
        read_hostfile(file)
    file.write_text("\ufeffnode1:2\n")
    assert read_hostfile(file).ranks == 2


# Cluster files

WHOLE = """
interface = "eth0"
rsh = "ssh -p 2222 {host}"

[environment]
OMP_NUM_THREADS = 1
NCCL_DEBUG = "WARN"
GLOO_SOCKET_IFNAME = "eth9"

[[hosts]]
name = "node1"
slots = 4
address = "10.0.0.1"

[[hosts]]
name = "node2"
interface = "ib0"
"""


def write(tmp_path: Path, text: str, name: str = "cluster.toml") -> Path:
    file = tmp_path / name
    file.write_text(text)
    return file


def test_a_whole_cluster_file(tmp_path: Path) -> None:
    cluster = read_cluster_file(write(tmp_path, WHOLE))
    assert cluster == Cluster(
        interface="eth0",
        rsh="ssh -p 2222 {host}",
        environment={"OMP_NUM_THREADS": "1", "NCCL_DEBUG": "WARN", "GLOO_SOCKET_IFNAME": "eth9"},
        hosts=(
            LaunchHost(name="node1", slots=4, address="10.0.0.1"),
            LaunchHost(name="node2", interface="ib0"),
        ),
    )
    assert cluster.ranks == 5
    assert [cluster.host_of_rank(rank).name for rank in range(5)] == ["node1"] * 4 + ["node2"]
    with pytest.raises(IndexError):
        cluster.host_of_rank(5)
    node1, node2 = cluster.hosts
    assert (node1.reached_at, node2.reached_at) == ("10.0.0.1", "node2")
    assert cluster.variables_of(node1)["GLOO_SOCKET_IFNAME"] == "eth9", "what the file sets by name wins"
    assert cluster.variables_of(node1)["NCCL_SOCKET_IFNAME"] == "=eth0"
    assert cluster.variables_of(node2)["NCCL_SOCKET_IFNAME"] == "=ib0"


def test_yaml_says_the_same(tmp_path: Path) -> None:
    text = "interface: eth0\nhosts:\n  - {name: node1, slots: 2}\n  - name: node2\nenvironment: {A: 1}\n"
    for name in ("cluster.yaml", "cluster.YML"):
        cluster = read_cluster_file(write(tmp_path, text, name))
        assert [host.slots for host in cluster.hosts] == [2, 1]
        assert cluster.environment == {"A": "1"}


@given(HOSTS, st.dictionaries(st.from_regex(r"[A-Z_][A-Z0-9_]{0,9}", fullmatch=True), TEXT, max_size=4))
def test_a_written_cluster_is_read_back(hosts: list[LaunchHost], environment: dict[str, str]) -> None:
    cluster = Cluster(hosts=tuple(hosts), interface="eth0", rsh="enter '{host}'", environment=environment)
    assert parse_cluster(yaml.safe_load(msgspec.yaml.encode(cluster)), "cluster.yaml") == cluster


HOST = '[[hosts]]\nname = "a"\n'


@pytest.mark.parametrize(
    ("text", "says", "where"),
    [
        ("", "names no host", "cluster.toml"),
        ("hosts = []", "names no host", "cluster.toml"),
        ('hosts = ["a"]', "a host is a table", "hosts[0]"),
        ("[[hosts]\n", "is no TOML", "cluster.toml"),
        (HOST + "slot = 4", "has no 'slot'", "hosts[0]"),
        ("adress = 1\n" + HOST, "a cluster has no 'adress'", "cluster.toml"),
        (HOST + "slots = 0", ">= 1", "hosts[0].slots"),
        (HOST + 'slots = "4"', "Expected `int`", "hosts[0].slots"),
        ("[[hosts]]\nslots = 4", "missing required field `name`", "hosts[0]"),
        (HOST + HOST, "already hosts", "hosts[1]"),
        (HOST + 'address = "a b"', "cannot be a host's name or address", "hosts[0]"),
        (HOST + 'interface = "eth0,eth1"', "cannot be a network interface", "hosts[0]"),
        (HOST + "slots = 4\nmax_slots = 2", "more than its max_slots", "hosts[0]"),
        ('interface = ""\n' + HOST, "cannot be a network interface", "cluster.toml"),
        ('[environment]\n"A B" = "x"\n' + HOST, "cannot be a variable's name", "environment"),
        ("[environment]\nA = true\n" + HOST, "A must be a text", "environment"),
        ("[environment]\nA = 1.5\n" + HOST, "A must be a text", "environment"),
        ("environment = 1\n" + HOST, "environment is a table", "environment"),
        ('rsh = "ssh node1"\n' + HOST, "has no {host}", "rsh"),
        ('rsh = "ssh \'{host}"\n' + HOST, "cannot be split", "rsh"),
    ],
)
def test_what_is_wrong_in_a_cluster_file_is_named(tmp_path: Path, text: str, says: str, where: str) -> None:
    with pytest.raises(StepscopeError) as caught:
        read_cluster_file(write(tmp_path, text))
    assert says in caught.value.message
    assert (caught.value.where or "").endswith(where)
    assert "cluster.toml" in (caught.value.where or "")
    assert caught.value.hint
    assert caught.value.exit_code == 2


def test_a_mistyped_key_gets_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(BadInputError) as caught:
        read_cluster_file(write(tmp_path, HOST + 'adress = "10.0.0.1"'))
    assert caught.value.hint == "did you mean address?"


def test_other_files_are_no_cluster_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no cluster file") as caught:
        read_cluster_file(write(tmp_path, "a:4", "hosts.txt"))
    assert "--hostfile" in (caught.value.hint or "")
    with pytest.raises(BadInputError, match="is no YAML"):
        read_cluster_file(write(tmp_path, "hosts: [", "cluster.yaml"))


def test_ranks_per_node_replace_the_slots_up_to_their_limit() -> None:
    cluster = Cluster(hosts=(LaunchHost(name="a", slots=4), LaunchHost(name="b", max_slots=2)))
    assert [host.slots for host in with_ranks_per_node(cluster, 2).hosts] == [2, 2]
    assert with_ranks_per_node(cluster, None) is cluster
    with pytest.raises(UsageError, match="max_slots=2 of b"):
        with_ranks_per_node(cluster, 3)


@pytest.mark.parametrize("template", ["ssh {host}", "ip netns exec lab-{host}", "sh -c '{command}' {host}"])
def test_remote_shells_that_can_be(template: str) -> None:
    check_rsh(template, "--rsh")


# What travels to the ranks


def test_the_ranks_learn_the_hosts_but_not_the_way_in(tmp_path: Path) -> None:
    cluster = read_cluster_file(write(tmp_path, WHOLE))
    found = read_cluster_from_environment({CLUSTER_VARIABLE: encode_cluster(cluster)})
    assert found is not None
    assert "rsh" not in found
    assert found["hosts"][0] == {"name": "node1", "slots": 4, "address": "10.0.0.1"}
    assert json.loads(json.dumps(found)) == found, "plain enough for a record"


def test_no_launcher_no_cluster() -> None:
    assert read_cluster_from_environment({}) is None
    assert read_cluster_from_environment({CLUSTER_VARIABLE: ""}) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"hosts":[]}', '{"hosts":[{"name":"a","slots":0}]}'])
def test_a_broken_variable_is_named(text: str) -> None:
    with pytest.raises(StepscopeError) as caught:
        read_cluster_from_environment({CLUSTER_VARIABLE: text})
    assert CLUSTER_VARIABLE in (caught.value.where or "")


def test_a_result_that_mpirun_cuts_into_lines_is_put_together_again(capfd: pytest.CaptureFixture[str]) -> None:
    from stepscope.launch.mpi import MpiCommand, run_mpirun

    def run(output: str) -> tuple[str, str]:
        plan = MpiCommand(command=["printf", "%s", output], environment={}, folder="/")
        assert run_mpirun(plan, only_json=True) == (0, True)
        return capfd.readouterr()

    pieces = '{"a": 1,\n"b": [1,\n 2]}\nmpirun says something\n'
    assert run(pieces) == ('{"a": 1,"b": [1, 2]}\n', "mpirun says something\n")
    assert run('{"a": 1').out == '{"a": 1'
