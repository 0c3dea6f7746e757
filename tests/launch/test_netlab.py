"""A cluster in one machine: real namespaces, real links; skipped where they cannot be made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.core.errors import LaunchError, MissingDependencyError, UsageError
from stepscope.launch import NetLab, read_cluster_file, read_hostfile
from stepscope.launch.netlab import parse_rate

needs_lab = pytest.mark.skipif(NetLab.why_not() is not None, reason=f"no lab here: {NetLab.why_not()}")

SERVER = """
import socket
server = socket.create_server(("0.0.0.0", 7777))
print("listening", flush=True)
while True:
    server.accept()[0].close()
"""
CLIENT = "import socket, sys; socket.create_connection((sys.argv[1], 7777), timeout=0.5)"


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@needs_lab
def test_hosts_have_names_addresses_and_one_link_each() -> None:
    with NetLab(3) as lab:
        for number in range(3):
            seen = lab.run(number, ["sh", "-c", "cat /proc/sys/kernel/hostname; ip -4 -o addr show dev eth0"]).stdout
            assert seen.startswith(f"host{number}\n")
            assert f"inet 10.77.0.{number + 1}/24" in seen
        assert "10.77.0.3" in lab.run(0, ["getent", "hosts", "host2"]).stdout
        assert lab.run(1, ["sh", "-c", "exit 7"]).returncode == 7
        assert lab.run(1, ["printenv", "LAB_WORD"], {"LAB_WORD": "a b"}).stdout == "a b\n"
        nested = lab.run(0, [*lab.command(2, ["cat", "/proc/sys/kernel/hostname"])])
        assert nested.stdout == "host2\n", "one host enters another"
    assert "host2" not in Path("/etc/hosts").read_text(), "the machine's own names are not touched"


@needs_lab
def test_the_files_it_writes_are_what_the_launchers_read() -> None:
    with NetLab(2, slots=2) as lab:
        cluster = read_cluster_file(lab.cluster_file)
        assert cluster == lab.cluster
        assert [(host.name, host.address, host.slots) for host in cluster.hosts] == [
            ("host0", "10.77.0.1", 2),
            ("host1", "10.77.0.2", 2),
        ]
        assert cluster.interface == "eth0"
        assert [(host.name, host.slots) for host in read_hostfile(lab.hostfile).hosts] == [("host0", 2), ("host1", 2)]
        folder = lab.folder
    assert not folder.exists()


@needs_lab
def test_a_pulled_cable_stops_the_traffic_and_a_plugged_one_lets_it_through() -> None:
    with NetLab(2) as lab:
        server = subprocess.Popen(lab.command(1, [sys.executable, "-c", SERVER]), stdout=subprocess.PIPE)
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"listening\n"
            client = [sys.executable, "-c", CLIENT, "host1"]
            assert lab.run(0, client).returncode == 0
            lab.set_link(1, up=False)
            assert lab.run(0, client).returncode != 0
            lab.set_link(1, up=True)
            assert lab.run(0, client).returncode == 0
        finally:
            server.kill()
            server.communicate()


@needs_lab
def test_rates_are_set_on_both_ends_and_can_change() -> None:
    with NetLab(2, rate="1gbit", slow={1: "100mbit"}) as lab:

        def limits(host: int) -> list[str]:
            near = lab.run(host, ["tc", "qdisc", "show", "dev", "eth0"]).stdout
            switch = lab.namespace(0).replace("host0", "switch")
            far = subprocess.run(
                ["ip", "netns", "exec", switch, "tc", "qdisc", "show", "dev", f"port{host}"],
                capture_output=True, text=True, check=True,
            ).stdout  # fmt: skip
            return [near, far]

        assert all("rate 1Gbit" in limit for limit in limits(0))
        assert all("rate 100Mbit" in limit for limit in limits(1))
        lab.set_rate(1, None)
        assert not any("tbf" in limit for limit in limits(1))
        lab.set_rate(1, None)
        lab.set_rate(1, "2.5gbit")
        assert all("rate 2500Mbit" in limit for limit in limits(1))


@needs_lab
def test_two_labs_do_not_see_each_other_and_both_go_away() -> None:
    with NetLab(1) as one, NetLab(1) as other:
        assert one.namespace(0) != other.namespace(0)
        one.set_link(0, up=False)
        assert "state UP" in other.run(0, ["ip", "link", "show", "eth0"]).stdout
        names = [one.namespace(0), other.namespace(0)]
        assert all(name in namespaces() for name in names)
    assert not any(name in namespaces() for name in names)


@needs_lab
def test_nothing_is_left_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = NetLab(2)
    with pytest.raises(ZeroDivisionError), lab:
        1 / 0  # noqa: B018
    assert lab.namespace(0) not in namespaces()

    broken = NetLab(2, rate="1gbit")
    monkeypatch.setattr("stepscope.launch.netlab._limit", lambda rate: ["root", "nonsense"])
    with pytest.raises(LaunchError, match="could not be set up") as caught, broken:
        pass
    assert "nonsense" in (caught.value.where or "")
    assert broken.namespace(0) not in namespaces()
    assert not broken.folder.exists()


@needs_lab
def test_a_killed_process_leaves_a_lab_that_the_next_one_clears_away() -> None:
    code = (
        "import os, signal; from stepscope.launch import NetLab\n"
        "with NetLab(1) as lab:\n"
        "    print(lab.namespace(0), lab.folder, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    name, folder = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    ).stdout.split()
    assert name in namespaces()
    with NetLab(1):
        assert name not in namespaces()
        assert not Path(folder).exists()


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    reason = NetLab.why_not()
    assert reason is not None
    with pytest.raises(MissingDependencyError, match="no cluster can be made"), NetLab(2):
        pass


def test_without_the_tools_it_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.launch.netlab._PATH", "/nowhere")
    assert "ip, tc" in (NetLab.why_not() or "")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"hosts": 0}, "1 to 200 hosts"),
        ({"hosts": 201}, "1 to 200 hosts"),
        ({"hosts": 2, "slow": {2: "1gbit"}}, "no host 2 of 2"),
        ({"hosts": 2, "rate": "fast"}, "not the rate of a link"),
        ({"hosts": 2, "slow": {1: "10 miles"}}, "not the rate of a link"),
    ],
)
def test_labs_that_cannot_be(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        NetLab(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "bits_per_s"), [("1gbit", 1e9), ("100Mbit", 1e8), ("2.5 gbit", 2.5e9), ("64kbit", 64e3), ("5000bit", 5e3)]
)
def test_rates(text: str, bits_per_s: float) -> None:
    assert parse_rate(text) == pytest.approx(bits_per_s)


@given(st.text(max_size=12))
def test_any_text_is_a_rate_or_is_refused(text: str) -> None:
    try:
        assert parse_rate(text) >= 1000
    except UsageError:
        return
