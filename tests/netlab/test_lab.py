"""The laboratory is what it says: NATs translate, drop and forget as theirs do, links delay, and it cleans up."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Sequence

import pytest
from lab import PREFIX, Host, Lab, Link, Nat, namespaces, sweep, why_not

pytestmark = pytest.mark.slow

TELLS = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("", 9))
print("ready", flush=True)
while True:
    _, whence = s.recvfrom(100)
    s.sendto(f"{whence[0]}:{whence[1]}".encode(), whence)
"""
ASKS = """
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(2)
s.bind(("", 4001))
for host in sys.argv[1:]:
    began = time.monotonic()
    s.sendto(b"?", (host, 9))
    print(s.recv(100).decode(), time.monotonic() - began)
"""
LISTENS = """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("", 4001))
s.settimeout(1)
print("ready", flush=True)
try:
    print(s.recv(100))
except TimeoutError:
    print("nothing")
"""
SENDS = """
import socket, sys
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"!", (sys.argv[1], 4001))
"""
OPENS = """
import socket, sys
s = socket.socket()
s.settimeout(0.5)
try:
    s.connect((sys.argv[1], 4001))
except OSError as error:
    print(type(error).__name__)
"""
MAPS = """
import socket, struct, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(5)
s.sendto(struct.pack("!BBHHHI", 0, 1, 0, 4001, 4001, 60), (sys.argv[1], 5351))  # NAT-PMP, RFC 6886, section 3.3
print(struct.unpack("!BBHIHHI", s.recv(100))[2])
"""


def start(host: Host, program: str, *arguments: str) -> subprocess.Popen[str]:
    command = [*host.enter, sys.executable, "-c", textwrap.dedent(program), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def said(host: Host, program: str, *arguments: str) -> list[str]:
    out, _ = start(host, program, *arguments).communicate(timeout=20)
    return out.splitlines()


def ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None and process.stdout.readline() == "ready\n"


@pytest.fixture(scope="module")
def servers(lab: Lab) -> tuple[Host, Host]:
    """Two machines on the internet that tell everybody where they see him."""
    hosts = lab.public("first"), lab.public("second")
    for host in hosts:
        ready(start(host, TELLS))
    return hosts


@pytest.fixture(scope="module")
def home(lab: Lab) -> tuple[Nat, Host]:
    nat = lab.nat("home")
    return nat, lab.private("inside", nat)


def seen(inside: Host, servers: Sequence[Host]) -> list[tuple[str, int]]:
    """Address and port of one socket, as each server sees it."""
    told = said(inside, ASKS, *(server.address for server in servers))
    return [(place.split(":")[0], int(place.split(":")[1])) for place in (line.split()[0] for line in told)]


def gets_in(lab: Lab, home: tuple[Nat, Host], servers: tuple[Host, Host]) -> bool:
    """Whether a datagram that nobody asked for reaches the machine inside."""
    nat, inside = home
    lab.forget(nat)
    listener = start(inside, LISTENS)
    ready(listener)
    said(servers[0], SENDS, nat.address)
    return "nothing" not in listener.communicate(timeout=20)[0]


@pytest.mark.parametrize("kind", ["cone", "rejecting", "forgetful", "fullcone", "address-restricted"])
def test_cones_show_one_socket_at_one_place(
    lab: Lab, home: tuple[Nat, Host], servers: tuple[Host, Host], kind: str
) -> None:
    nat, inside = home
    lab.become(nat, kind)
    assert seen(inside, servers) == [(nat.address, 4001)] * 2
    assert gets_in(lab, home, servers) == (kind == "fullcone")


@pytest.mark.parametrize(("kind", "lets_in"), [("address-restricted", True), ("cone", False)])
def test_address_restricted_nat_lets_in_whom_something_was_sent_from_any_port(
    lab: Lab, home: tuple[Nat, Host], servers: tuple[Host, Host], kind: str, lets_in: bool
) -> None:
    nat, inside = home
    lab.become(nat, kind)
    seen(inside, servers[:1])
    for server, reaches in ((servers[0], lets_in), (servers[1], False)):
        listener = start(inside, LISTENS)
        ready(listener)
        said(server, SENDS, nat.address)
        assert ("nothing" not in listener.communicate(timeout=20)[0]) == reaches, server


def test_sequential_nat_takes_the_next_port_for_each_destination(
    lab: Lab, home: tuple[Nat, Host], servers: tuple[Host, Host]
) -> None:
    lab.become(home[0], "sequential")
    (_, first), (_, second) = seen(home[1], servers)
    assert second == first + 1 and not gets_in(lab, home, servers)


def test_renumbering_cone_shows_another_port_and_the_same_to_all(
    lab: Lab, home: tuple[Nat, Host], servers: tuple[Host, Host]
) -> None:
    lab.become(home[0], "renumbering")
    assert seen(home[1], servers) == [(home[0].address, 14001)] * 2
    assert not gets_in(lab, home, servers)


def test_symmetric_nat_shows_one_socket_at_different_places(
    lab: Lab, home: tuple[Nat, Host], servers: tuple[Host, Host]
) -> None:
    lab.become(home[0], "symmetric")
    (_, first), (_, second) = seen(home[1], servers)
    assert first != second and 4001 not in (first, second)
    assert not gets_in(lab, home, servers)


def test_only_a_rejecting_nat_answers_the_uninvited(
    lab: Lab, home: tuple[Nat, Host], servers: tuple[Host, Host]
) -> None:
    for kind, answer in (("cone", "TimeoutError"), ("rejecting", "ConnectionRefusedError")):
        lab.become(home[0], kind)
        assert said(servers[0], OPENS, home[0].address) == [answer]


def test_forgetful_nat_forgets_after_thirty_seconds(lab: Lab, home: tuple[Nat, Host]) -> None:
    nat, _ = home
    for kind, longest in (("forgetful", 30), ("cone", 7200)):
        lab.become(nat, kind)
        command = ["sysctl", "-n", "net.netfilter.nf_conntrack_tcp_timeout_established"]
        told = subprocess.run([*nat.enter, *command], capture_output=True, text=True)
        assert int(told.stdout) == longest


def test_machine_behind_two_nats_is_seen_at_the_outer_one(lab: Lab, servers: tuple[Host, Host]) -> None:
    carrier = lab.nat("carrier")
    inner = lab.nat("inner", behind=carrier)
    assert seen(lab.private("deep", inner), servers) == [(carrier.address, 4001)] * 2


def test_links_delay_both_ways(lab: Lab, servers: tuple[Host, Host]) -> None:
    nat = lab.nat("far", link=Link(delay=0.05))
    trips = [float(line.split()[1]) for line in said(lab.private("away", nat), ASKS, *[servers[0].address] * 3)]
    assert min(trips) >= 0.1


def test_links_lose(lab: Lab, servers: tuple[Host, Host]) -> None:
    nat = lab.nat("bad", link=Link(loss=1.0))
    assert said(lab.private("lost", nat), ASKS, servers[0].address) == []


def test_upnp_gateway_opens_a_port(lab: Lab, servers: tuple[Host, Host]) -> None:
    if (reason := why_not("miniupnpd")) is not None:
        pytest.skip(reason)
    nat = lab.nat("gateway")
    inside = lab.private("asker", nat)
    lab.upnp(nat)
    assert said(inside, MAPS, nat.gateway) == ["0"]
    listener = start(inside, LISTENS)
    ready(listener)
    said(servers[0], SENDS, nat.address)
    assert "nothing" not in listener.communicate(timeout=20)[0]


def test_two_laboratories_do_not_meet_and_leave_nothing(lab: Lab) -> None:
    with pytest.raises(ZeroDivisionError), Lab() as other:
        host = other.public("first")
        sleeper = start(host, "import time; print('ready', flush=True); time.sleep(1000)")
        ready(sleeper)  # it is inside
        assert {name for name in namespaces() if name.startswith(other.prefix)}
        raise ZeroDivisionError
    assert sleeper.wait(5) < 0
    assert not {name for name in namespaces() if name.startswith(other.prefix)}
    assert {name for name in namespaces() if name.startswith(lab.prefix)}


def test_laboratory_of_a_dead_process_is_swept_up(lab: Lab) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = f"{PREFIX}-{dead.pid}-0-home"
    subprocess.run(["ip", "netns", "add", left], check=True)
    sweep()
    assert left not in namespaces() and any(name.startswith(lab.prefix) for name in namespaces())
