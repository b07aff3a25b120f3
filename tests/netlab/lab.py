"""A small internet on one machine: network namespaces joined by a bridge, and NATs of several kinds between them.

    with Lab() as lab:
        relay = lab.public("relay")
        home = lab.nat("home", "cone")
        laptop = lab.private("laptop", home)
        subprocess.run([*laptop.enter, "swarmnode", ...])

Everything lives in namespaces named after the process that made them, so two laboratories do not meet, and one whose
process died is swept up by the next. Leaving the block ends every process inside and removes it all, also after a
failure. Nothing of it reaches the machine's own network. Needs root and Debian's iproute2, nftables, conntrack and
ethtool; `why_not()` says what is missing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

NAMES = Path("/var/run/netns")
PREFIX = "swarmlab"
PROGRAMS = {"ip": "iproute2", "nft": "nftables", "conntrack": "conntrack", "ethtool": "ethtool", "tc": "iproute2"}
LINK = Path(__file__).with_name("wanlink.py")

# Public addresses as UPnP daemons and nodes judge them; those reserved for documentation count as private there.
INTERNET = "45.80.10"
HOME = "192.168"
INTERNET6 = "2a10:4580:10"  # a /48: ::/64 is the internet itself, each other /64 a home's

BRIDGE = "address 02:00:00:00:00:01 type bridge"  # given, it stays; else the lowest of its ports', whoever joins

NAT_KINDS = ("cone", "fullcone", "address-restricted", "symmetric", "sequential")
NAT_KINDS += ("renumbering", "rejecting", "forgetful")
RENUMBERED = range(4001, 4101)  # ports inside that a renumbering NAT maps, 10000 higher
IN_SEQUENCE = range(20000, 28000)  # ports that a sequential NAT gives, one after another
FORGETS_AFTER = 30  # s without a packet, after which a forgetful NAT drops a mapping


def why_not(*more: str) -> str | None:
    """What keeps a laboratory from being built here, with `more` programs beside the usual; None where nothing does."""
    if not sys.platform.startswith("linux"):
        return "network namespaces exist on Linux only"
    missing = sorted({PROGRAMS.get(name, name) for name in (*PROGRAMS, *more) if shutil.which(name) is None})
    if missing:
        return f"not installed: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"{PREFIX}-{os.getpid()}-probe"
    for command in (("ip", "netns", "add", probe), ("ip", "netns", "exec", probe, "nft", "list", "ruleset")):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            subprocess.run(("ip", "netns", "del", probe), capture_output=True)
            return f"`{' '.join(command)}`: {(done.stderr or done.stdout).strip()}"
    subprocess.run(("ip", "netns", "del", probe), capture_output=True)
    return None


@dataclass(frozen=True)
class Link:
    """What a way to the internet is like, in each direction."""

    delay: float = 0.0  # s, one way
    jitter: float = 0.0  # s, at most this much more or less
    loss: float = 0.0  # probability, per frame
    rate: float = 0.0  # Mbit/s; 0 is as fast as the machine

    @property
    def in_user_space(self) -> bool:
        """Kernels without netem have no other way to delay or lose."""
        return bool(self.delay or self.jitter or self.loss)


@dataclass
class Host:
    """A machine of the laboratory."""

    name: str
    namespace: str
    address: str
    address6: str = ""  # none: without IPv6

    @property
    def enter(self) -> tuple[str, ...]:
        """Put before a command, runs it on this machine."""
        return ("ip", "netns", "exec", self.namespace)

    def bytes_through(self, interface: str = "eth0") -> tuple[int, int]:
        """Bytes received and sent at an interface since it exists, headers included."""
        folder = f"/sys/class/net/{interface}/statistics"
        told = _run(*self.enter, "cat", f"{folder}/rx_bytes", f"{folder}/tx_bytes").split()
        return int(told[0]), int(told[1])


@dataclass
class Nat(Host):
    """A router that translates IPv4 addresses. `address` is the one towards the internet.

    One that has IPv6 routes it, and lets in only answers (RFC 6092), or what was agreed on by UPnP or PCP.
    """

    kind: str = "cone"
    network: str = ""  # first three numbers of the addresses behind it
    inside: list[Host] = field(default_factory=list)

    @property
    def gateway(self) -> str:
        return f"{self.network}.1"

    @property
    def network6(self) -> str:
        return f"{INTERNET6}:{self.network.rpartition('.')[2]}:"


class Lab:
    """Builds as it is asked; everything is gone at the end of its `with` block. A name that is taken gets a plus."""

    _instances = itertools.count()

    def __init__(self) -> None:
        self.prefix = f"{PREFIX}-{os.getpid()}-{next(self._instances)}"
        self._hosts: dict[str, Host] = {}
        self._links: list[subprocess.Popen[bytes]] = []
        self._folder = tempfile.TemporaryDirectory(prefix=f"{PREFIX}-")
        self._public = itertools.count(10)
        self._networks = itertools.count(1)
        self._wires = itertools.count()

    def __enter__(self) -> Lab:
        sweep()
        internet = self._hosts["internet"] = self._namespace("internet", "", f"{INTERNET6}::1")
        _batch(internet.namespace, f"link add br0 {BRIDGE}", "link set br0 up")
        _batch(internet.namespace, f"addr add {internet.address6}/64 dev br0 nodad")
        _run(*internet.enter, "sysctl", "-qw", "net.ipv6.conf.all.forwarding=1")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        remove(f"{self.prefix}-")
        for link in self._links:
            link.wait()
        self._folder.cleanup()

    def machines(self) -> tuple[str, ...]:
        """The names in use."""
        return tuple(self._hosts)

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def take_down(self, *names: str) -> None:
        """Remove machines, with what runs on them. Names and addresses may be used again for others."""
        remove(*(self._at(name) for name in names))
        for name in names:
            del self._hosts[name]

    # --- building ---------------------------------------------------------------------------------------------------

    def public(self, name: str, link: Link = Link(), *, ipv6: bool = False) -> Host:
        """A machine with an address on the internet."""
        number = next(self._public)
        host = self._namespace(name, f"{INTERNET}.{number}", f"{INTERNET6}::{number}" if ipv6 else "")
        self._attach(host, "eth0", link)
        return host

    def nat(
        self, name: str, kind: str = "cone", *, behind: Nat | None = None, link: Link = Link(), ipv6: bool = False
    ) -> Nat:
        """A NAT on the internet, or behind another one; `kind` as in `Lab.become`. `ipv6`: with a /64 behind it."""
        network, number = f"{HOME}.{next(self._networks)}", next(self._public)
        outside = f"{behind.network}.{len(behind.inside) + 2}" if behind else f"{INTERNET}.{number}"
        plain = self._namespace(name, outside, f"{INTERNET6}::{number}" if ipv6 else "")
        nat = Nat(plain.name, plain.namespace, outside, plain.address6, network=network)
        self._hosts[plain.name] = nat
        if behind is None:
            self._attach(nat, "wan", link)
        else:
            self._plug(nat, "wan", behind)
        _batch(
            nat.namespace,
            f"link add lan {BRIDGE}",
            f"addr add {nat.gateway}/24 dev lan",
            "link set lan up",
        )
        _run(*nat.enter, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        if ipv6:
            _batch(nat.namespace, f"addr add {nat.network6}:1/64 dev lan nodad")
            _run(*nat.enter, "sysctl", "-qw", "net.ipv6.conf.all.forwarding=1")
            _batch(self._at("internet"), f"route add {nat.network6}:/64 via {nat.address6}")
        self.become(nat, kind)
        return nat

    def private(self, name: str, behind: Nat) -> Host:
        """A machine behind a NAT."""
        number = len(behind.inside) + 2
        host = self._namespace(
            name, f"{behind.network}.{number}", f"{behind.network6}:{number}" if behind.address6 else ""
        )
        self._plug(host, "eth0", behind)
        return host

    def become(self, nat: Nat, kind: str) -> None:
        """Behave as another kind from now on, with all mappings forgotten, as after the router's restart.

        cone         endpoint-independent, keeps the port; lets in only who was written to (port-restricted)
        fullcone     cone that passes everything to the first machine behind it
        address-restricted   cone that passes to the first machine what comes from addresses that were written to
        symmetric    a new random port for every destination
        sequential   symmetric with the next port for every destination
        renumbering  cone whose ports outside are other ones than inside
        rejecting    cone that answers the uninvited with RST, so that simultaneous opens meet one
        forgetful    cone that forgets a mapping after `FORGETS_AFTER` seconds of silence
        """
        if kind not in NAT_KINDS:
            raise ValueError(f"a NAT is one of {', '.join(NAT_KINDS)}, not {kind!r}")
        nat.kind = kind
        _run(*nat.enter, "nft", "-f", "-", feed=_rules(nat))
        timeout = FORGETS_AFTER if kind == "forgetful" else 7200
        _run(
            *nat.enter,
            "sysctl",
            "-qw",
            f"net.netfilter.nf_conntrack_tcp_timeout_established={timeout}",
            f"net.netfilter.nf_conntrack_udp_timeout={min(timeout, 30)}",
            f"net.netfilter.nf_conntrack_udp_timeout_stream={min(timeout, 120)}",
            f"net.netfilter.nf_conntrack_tcp_loose={int(kind != 'forgetful')}",  # nor picks up what it forgot
        )
        self.forget(nat)

    def forget(self, nat: Nat) -> None:
        """Drop all mappings."""
        subprocess.run([*nat.enter, "conntrack", "-F"], capture_output=True, check=False)
        _run(*nat.enter, "nft", "flush", "set", "ip", "nat", "written")

    def mappings(self, nat: Nat) -> list[str]:
        """What the NAT remembers, a line each as conntrack prints it."""
        return _run(*nat.enter, "conntrack", "-L").splitlines()

    def cut(self, host: Host, *, off: bool = True) -> None:
        """Take a machine's cable out in silence, or put it back."""
        interface = "wan" if isinstance(host, Nat) else "eth0"
        _batch(host.namespace, f"link set {interface} {'down' if off else 'up'}")
        if not off:
            gateway = next((n.gateway for n in self._hosts.values() if isinstance(n, Nat) and host in n.inside), None)
            if gateway is not None:
                _batch(host.namespace, f"route replace default via {gateway}")

    def upnp(self, nat: Nat) -> None:
        """Let machines behind `nat` open ports by UPnP, NAT-PMP and PCP (miniupnpd, Debian's miniupnpd-nftables)."""
        folder = Path(self._folder.name)
        settings = folder / f"{nat.name}.conf"
        settings.write_text(
            f"ext_ifname=wan\nlistening_ip=lan\nport=5555\nenable_upnp=yes\nenable_natpmp=yes\nsecure_mode=yes\n"
            f"min_lifetime=30\nmax_lifetime=86400\nlease_file={folder / nat.name}.leases\nsystem_uptime=yes\n"
            "uuid=6e0b6f0a-0000-4000-8000-000000000001\nupnp_table_name=upnp\nupnp_nat_table_name=upnp\n"
            "upnp_forward_chain=agreed\nupnp_nat_chain=prerouting\nupnp_nat_postrouting_chain=postrouting\n"
            f"allow 1024-65535 {nat.network}.0/24 1024-65535\ndeny 0-65535 0.0.0.0/0 0-65535\n"
        )
        pid = folder / f"{nat.name}.pid"
        with (folder / f"{nat.name}.log").open("wb") as log:
            subprocess.Popen(
                [*nat.enter, "miniupnpd", "-d", "-f", settings, "-P", pid],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        give_up = time.monotonic() + 10
        while not pid.exists():
            if time.monotonic() > give_up:
                raise RuntimeError(f"miniupnpd did not start: {(folder / f'{nat.name}.log').read_text()}")
            time.sleep(0.05)

    def restart(self, nat: Nat) -> None:
        """The router restarts: it forgets every mapping and connection, and its provider gives it another address.

        `upnp` starts what opened ports again.
        """
        folder = Path(self._folder.name)
        pid = folder / f"{nat.name}.pid"
        if pid.exists():
            os.kill(int(pid.read_text()), signal.SIGKILL)
            pid.unlink()
            (folder / f"{nat.name}.leases").unlink(missing_ok=True)
        before, nat.address = nat.address, f"{INTERNET}.{next(self._public)}"
        _batch(nat.namespace, f"addr del {before}/24 dev wan", f"addr add {nat.address}/24 dev wan")
        self.become(nat, nat.kind)

    # --- wires ------------------------------------------------------------------------------------------------------

    def _at(self, name: str) -> str:
        return f"{self.prefix}-{name}"

    def _namespace(self, name: str, address: str, address6: str = "") -> Host:
        while name in self._hosts:
            name += "+"
        namespace = self._at(name)
        _run("ip", "netns", "add", namespace)
        _batch(namespace, "link set lo up")
        host = Host(name, namespace, address, address6)
        settings = (f"disable_ipv6={int(not address6)}", "accept_ra=0", "accept_dad=0")
        scopes = ("all", "default")
        _run(*host.enter, "sysctl", "-qw", *(f"net.ipv6.conf.{scope}.{each}" for scope in scopes for each in settings))
        self._hosts[name] = host
        return host

    def _attach(self, host: Host, interface: str, link: Link) -> None:
        """Connect to the internet's bridge, through a worse link where asked."""
        here, internet = f"v{next(self._wires)}", self._at("internet")
        _batch(
            internet,
            f"link add {here} type veth peer name {interface} netns {host.namespace}",
            f"link set {here} up",
        )
        _batch(host.namespace, f"addr add {host.address}/24 dev {interface}", f"link set {interface} up")
        if host.address6:
            self._give_ipv6(host, interface, f"{INTERNET6}::1")
        port = here
        if link.in_user_space:
            port, other = f"{here}p", f"{here}q"
            _batch(
                internet,
                f"link add {port} type veth peer name {other}",
                f"link set {port} up",
                f"link set {other} up",
            )
            for name in (here, port, other):
                _plain(internet, name)
            options = ["--delay", link.delay, "--jitter", link.jitter, "--loss", link.loss]
            command = ["ip", "netns", "exec", internet, sys.executable, LINK, here, other, *options]
            carrier = subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL, start_new_session=True)
            self._links.append(carrier)
        _batch(internet, f"link set {port} master br0")
        if link.rate:
            shape = f"root tbf rate {link.rate}mbit burst 64k latency 200ms"
            _run("tc", "-n", internet, "qdisc", "add", "dev", port, *shape.split())
            _run("tc", "-n", host.namespace, "qdisc", "add", "dev", interface, *shape.split())
        _plain(host.namespace, interface)

    def _plug(self, host: Host, interface: str, nat: Nat) -> None:
        """Connect to a NAT's local network."""
        there = f"p{len(nat.inside)}"
        _batch(
            nat.namespace,
            f"link add {there} type veth peer name {interface} netns {host.namespace}",
            f"link set {there} master lan",
            f"link set {there} up",
        )
        _batch(
            host.namespace,
            f"addr add {host.address}/24 dev {interface}",
            f"link set {interface} up",
            f"route add default via {nat.gateway}",
        )
        if host.address6:
            self._give_ipv6(host, interface, f"{nat.network6}:1")
        _plain(nat.namespace, there)
        _plain(host.namespace, interface)
        nat.inside.append(host)

    def _give_ipv6(self, host: Host, interface: str, gateway: str) -> None:
        route = f"route replace default via {gateway}"
        _batch(host.namespace, f"addr add {host.address6}/64 dev {interface} nodad", route)


def _rules(nat: Nat) -> str:
    """The NAT as a ruleset. The drop of what is uninvited stands in `input` as well: without it the router itself
    would answer an early SYN with RST, and no simultaneous open would ever meet."""
    first = f"{nat.network}.2"
    both = "meta l4proto { tcp, udp }"
    source = 'oifname "wan" masquerade'
    if nat.kind == "symmetric":
        source += " random,fully-random"
    elif nat.kind == "sequential":
        ports = ", ".join(f"{number} : {port}" for number, port in enumerate(IN_SEQUENCE))
        source = (
            f'oifname "wan" {both} snat ip to {nat.address} : numgen inc mod {len(IN_SEQUENCE)} map {{ {ports} }}\n'
            f"        {source}"
        )
    elif nat.kind == "renumbering":
        for port in RENUMBERED:
            outside = f"{nat.address}:{port + 10000}"
            source = f'oifname "wan" {both} th sport {port} snat ip to {outside}\n        {source}'
    whom = {"fullcone": "", "address-restricted": "ip saddr @written"}.get(nat.kind)
    pass_on = f'iifname "wan" {whom} {both} th dport 1024-65535 dnat ip to {first}' if whom is not None else ""
    uninvited = 'iifname "wan" ct state new drop'
    return f"""flush ruleset
table ip nat {{
    set written {{ type ipv4_addr; flags dynamic; size 65535; }}
    chain prerouting {{ type nat hook prerouting priority dstnat; policy accept; {pass_on}
    }}
    chain postrouting {{ type nat hook postrouting priority srcnat; policy accept;
        oifname "wan" add @written {{ ip daddr }}
        {source}
    }}
}}
table ip filter {{
    chain input {{ type filter hook input priority filter; policy accept;
        {"" if nat.kind == "rejecting" else uninvited}
    }}
    chain forward {{ type filter hook forward priority filter; policy accept;
        ct state established,related accept
        ct state invalid drop
        {'iifname "wan" ct status dnat accept' if nat.kind != "fullcone" else ""}
        {"" if nat.kind == "fullcone" else uninvited}
    }}
}}
table inet upnp {{
    chain agreed {{
    }}
    chain firewall {{ type filter hook forward priority filter; policy accept;
        meta nfproto ipv4 accept
        ct state established,related accept
        iifname "wan" jump agreed
        iifname "wan" meta l4proto {{ tcp, udp }} drop
    }}
    chain router {{ type filter hook input priority filter; policy accept;
        meta nfproto ipv6 iifname "wan" meta l4proto {{ tcp, udp }} ct state new drop
    }}
    chain prerouting {{ type nat hook prerouting priority dstnat - 10; policy accept; }}
    chain postrouting {{ type nat hook postrouting priority srcnat - 10; policy accept; }}
}}
"""


# --- ending -----------------------------------------------------------------------------------------------------------


def sweep() -> None:
    """Remove the laboratories of processes that are no more."""
    owners = {name.split("-")[1] for name in namespaces() if len(name.split("-")) > 2}
    for pid in owners:
        if not Path(f"/proc/{pid}").exists():
            remove(f"{PREFIX}-{pid}-")


def remove(*prefixes: str) -> None:
    """End what runs in the namespaces whose names start with one of `prefixes`, and delete them."""
    names = [name for name in namespaces() if name.startswith(prefixes)]
    for name in names:
        for pid in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def namespaces() -> list[str]:
    return [path.name for path in NAMES.glob(f"{PREFIX}-*")]


# --- commands ---------------------------------------------------------------------------------------------------------


def _run(*command: str | Path, feed: str | None = None) -> str:
    done = subprocess.run(list(map(str, command)), input=feed, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(map(str, command))}` failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def _batch(namespace: str, *lines: str) -> None:
    """Several `ip` commands at once in a namespace."""
    _run("ip", "-n", namespace, "-batch", "-", feed="\n".join(lines) + "\n")


def _plain(namespace: str, interface: str) -> None:
    """Without offloading: frames are then what a wire carries, with their checksums filled in."""
    offloads = [word for name in ("tso", "gso", "gro", "tx", "rx") for word in (name, "off")]
    subprocess.run(
        ["ip", "netns", "exec", namespace, "ethtool", "-K", interface, *offloads], capture_output=True, check=False
    )
