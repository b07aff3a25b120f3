"""Invitations: where a run can be joined, in a word that can be pasted, `swarmnode:2Lx…`.

After the prefix stands base58 (Bitcoin's, without 0, O, I and l) of

    version          1 byte
    holds            1 byte: 1 a run id, 2 a roster
    peer             32 bytes: its Ed25519 public key, of which a peer id consists
    run id           32 bytes, where there is one
    roster           4 bytes of its round and 32 of its id, where there is one
    place            1 byte, see PLACES, and RELAYED if it is a relay's; address; 2 bytes of TCP port; the relay's key
    check            4 bytes: how sha-256 of all before begins

About 105 characters for an IPv4 address and a run. It holds no secret: the run id keeps a stranger from handing over
another run, the peer id from answering in the peer's place.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from dataclasses import dataclass

import base58

from swarmnode.node.exitcodes import USAGE, ExpectedError

PREFIX = "swarmnode:"
VERSION = 1
CHECK = 4  # bytes
RELAYED = 16
PLACES = ("ip4", "ip6", "dns", "dns4", "dns6")
_ADDRESS = re.compile(
    r"/(?P<kind>ip4|ip6|dns|dns4|dns6)/(?P<host>[^/]+)/tcp/(?P<port>\d+)"
    r"(/p2p/(?P<relay>[^/]+)/p2p-circuit)?/p2p/(?P<peer>[^/]+)"
)
_KEY = bytes.fromhex("002408011220")  # how the bytes of a peer id of an Ed25519 key begin
WHERE = "swarmnode id --join prints it on the machine that invites; copy all of it"


class NotAnInvitation(ExpectedError):
    """What was pasted cannot be read; the message says what is wrong with it."""

    exit_code = USAGE


@dataclass(frozen=True)
class Invitation:
    """Where a run can be joined."""

    address: str  # multiaddr with the peer id
    run_id: str = ""  # 64 hex digits
    roster: str = ""  # ROUND:ID

    def encode(self) -> str:
        """As one word. Raises ValueError for an address that has no short form."""
        found = _ADDRESS.fullmatch(self.address)
        if found is None:
            raise ValueError(f"{self.address} has no short form")
        kind, host, relay = found["kind"], found["host"], found["relay"]
        round, _, id = self.roster.partition(":")
        place = ipaddress.ip_address(host).packed if kind.startswith("ip") else bytes([len(host)]) + host.encode()
        content = bytes([VERSION, bool(self.run_id) + 2 * bool(self.roster)]) + _key(found["peer"])
        content += bytes.fromhex(self.run_id)
        content += int(round).to_bytes(4, "big") + bytes.fromhex(id) if self.roster else b""
        content += (
            bytes([PLACES.index(kind) + (RELAYED if relay else 0)]) + place + int(found["port"]).to_bytes(2, "big")
        )
        content += _key(relay) if relay else b""
        return PREFIX + base58.b58encode(content + _check(content)).decode()


def decode(text: str) -> Invitation:
    """The invitation that begins with PREFIX. Raises NotAnInvitation."""
    try:
        raw = base58.b58decode(text.strip().removeprefix(PREFIX))
    except ValueError:
        raise NotAnInvitation(f"the invitation {text[:24]}… has a character in it that none has. {WHERE}") from None
    content = raw[:-CHECK]
    if len(raw) <= CHECK or _check(content) != raw[-CHECK:]:
        raise NotAnInvitation(f"the invitation {text[:24]}… is cut off, or a character of it is wrong. {WHERE}")
    if content[0] != VERSION:
        raise NotAnInvitation("the invitation is of a newer version of swarmnode; upgrade this one")
    try:
        return _read(content)
    except (IndexError, ValueError) as error:
        raise NotAnInvitation(f"the invitation names no place that this version understands: {error}") from error


def _read(content: bytes) -> Invitation:
    at = 2

    def take(size: int) -> bytes:
        nonlocal at
        if at + size > len(content):
            raise ValueError("it ends too early")
        at += size
        return content[at - size : at]

    peer = _peer(take(32))
    run_id = take(32).hex() if content[1] & 1 else ""
    roster = f"{int.from_bytes(take(4), 'big')}:{take(32).hex()}" if content[1] & 2 else ""
    place = take(1)[0]
    kind = PLACES[place % RELAYED]
    if kind.startswith("ip"):
        host = str(ipaddress.ip_address(take(4 if kind == "ip4" else 16)))
    else:
        host = take(take(1)[0]).decode("ascii")
    port = int.from_bytes(take(2), "big")
    relay = f"/p2p/{_peer(take(32))}/p2p-circuit" if place >= RELAYED else ""
    return Invitation(f"/{kind}/{host}/tcp/{port}{relay}/p2p/{peer}", run_id, roster)


def _check(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:CHECK]


def _key(peer: str) -> bytes:
    """The public key in a peer id. Raises ValueError where there is none."""
    raw = base58.b58decode(peer)
    if not raw.startswith(_KEY) or len(raw) != len(_KEY) + 32:
        raise ValueError(f"{peer} is of no Ed25519 key")
    return raw[len(_KEY) :]


def _peer(key: bytes) -> str:
    return base58.b58encode(_KEY + key).decode()
