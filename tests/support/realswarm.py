"""What measuring programs share that start several real nodes: sites, a run file, a text, whose node is where.

    with Lab() as lab:
        sites = [Site.on(lab.public("n0")), Site.here()]
        node = node_at(sites[0], folder / "node-0", run, corpus=text).start()

A node at a site keeps its address over restarts, and dies with the program that started it.
"""

from __future__ import annotations

import socket
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab import Host
from realnodes import PROGRAM, Node, swarmnode

from swarmnode.cli.local.swarm import tied_to_parent

PORT = 4077  # of a node that has a machine for itself
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Site:
    """Where a node runs and can be dialled."""

    host: Host | None  # a machine of a laboratory; None is this one, on loopback
    address: str
    port: int

    @classmethod
    def on(cls, host: Host) -> Site:
        return cls(host, host.address, PORT)

    @classmethod
    def here(cls) -> Site:
        """A free port of this machine."""
        with socket.create_server((LOOPBACK, 0)) as probe:
            return cls(None, LOOPBACK, probe.getsockname()[1])

    def multiaddr(self, peer_id: str) -> str:
        return f"/ip4/{self.address}/tcp/{self.port}/p2p/{peer_id}"


def node_at(
    site: Site,
    home: Path,
    *arguments: str | Path,
    corpus: Path | None = None,
    flags: tuple[str, ...] = (),
    wrapper: tuple[str, ...] = (),
) -> Node:
    """A node that is not started yet, by `wrapper`. Without a `corpus` it takes the usual one, or the run's data."""
    enter = site.host.enter if site.host is not None else ()
    always = ("--listen", site.address, "--no-mdns", "--no-upnp", "--threads", "1", *flags)
    program = tied_to_parent([*enter, *wrapper, str(PROGRAM)])
    return Node(home, *arguments, corpus=corpus, port=site.port, program=program, flags=always)


def peer_id_at(home: Path) -> str:
    """The identity of the node with this data directory, which gets one."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    done = swarmnode("id", "--data-dir", home)
    if done.returncode:
        raise SystemExit(f"no identity in {home}: {done.stderr}")
    return done.stdout.strip()


def run_file(path: Path, tables: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write a RunSpec in TOML; values are numbers, texts and lists of texts."""
    lines: list[str] = []
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in table.items()), ""]
    path.write_text("\n".join(lines))
    return path


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def write_text(path: Path, size: int) -> Path:
    """A text of at most `size` bytes to train on: sources of the Python standard library."""
    with path.open("wb") as file:
        for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text = source.read_bytes()
            if file.tell() + len(text) <= size:
                file.write(text)
    return path
