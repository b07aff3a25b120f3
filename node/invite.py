"""Links: where a run can be joined, in a word that can be pasted, scanned or read aloud, `swarm1…`.

Bech32m (BIP 350) with the prefix `swarm`: lower case letters and digits without 1, b, i and o, six of which check the
others. Capitals, hyphens and spaces change nothing. It holds

    version, holds   4 bits each; holds: 1 a run, 2 a roster, 4 a whole key
    key              first 8 bytes of the peer's public key (Ed25519), all 32 where there is a relay
    run              first 16 bytes of the run id, where there is one
    roster           4 bytes of its round and 32 of its id, where there is one
    places           one or two: 1 byte, see PLACES, and RELAYED if it is a relay's; address; 2 bytes of TCP port;
                     the relay's key

How long it is and what it gives away is in docs/finding.md.
"""

from __future__ import annotations

import base64
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from swarmnode.node.exitcodes import UsageMistake
from swarmnode.node.host.addresses import BEGINS, FINGERPRINT, Endpoint, parse, public_key
from swarmnode.node.identity import peer_id_of

PREFIX = "swarm1"
VERSION = 1
RUN, ROSTER, KEY = 1, 2, 4  # what it holds
RUN_PREFIX = 16  # bytes of a run id: more than anybody can find a second run for
MOST = 2  # places
RELAYED = 16
PLACES = ("ip4", "ip6", "dns", "dns4", "dns6")
CHARACTERS = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"
BASE32 = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"  # RFC 4648
TO_BECH32 = str.maketrans(BASE32, CHARACTERS)
FROM_BECH32 = str.maketrans(CHARACTERS, BASE32)
CHECK = 6  # characters
BECH32M = 0x2BC830A3
GENERATORS = (0x3B6A57B2, 0x26508E6D, 0x1EA119FA, 0x3D4233DD, 0x2A1462B3)
WHERE = "swarmnode id --join prints it on the machine that invites; copy all of it"
RUN_ID = re.compile(r"[0-9a-f]{32}([0-9a-f]{32})?")  # whole, or as a link has it
ROSTER_ID = re.compile(r"[0-9]{1,8}:[0-9a-f]{64}")


def check_named(run_id: str | None, roster: str | None) -> None:
    """Raises UsageMistake where what stands behind --run or --roster is none."""
    if run_id is not None and not RUN_ID.fullmatch(run_id):
        raise UsageMistake(
            f"--run {run_id!r} is not a run id; it has 64 hex digits, as swarmnode id --join --json prints it"
        )
    if roster is not None and not ROSTER_ID.fullmatch(roster):
        raise UsageMistake(
            f"--roster {roster!r} is not ROUND:ID with 64 hex digits, as swarmnode id --join --json prints it"
        )


@dataclass(frozen=True)
class Invitation:
    """Where a run can be joined: `addresses` of one peer, the best first, whole or with how its key begins."""

    addresses: tuple[str, ...]
    run_id: str = ""  # 64 hex digits, of which a link keeps the first 32
    roster: str = ""  # ROUND:ID

    def encode(self) -> str:
        """As one word. Raises ValueError for addresses that have no short form, or are of several peers."""
        ends = [_endpoint(address) for address in self.addresses]
        if not 0 < len(ends) <= MOST or len({end.peer for end in ends}) != 1:
            raise ValueError(f"a link has one or {MOST} addresses of one peer")
        whole = any(end.relay for end in ends)
        content = bytes([VERSION << 4 | RUN * bool(self.run_id) | ROSTER * bool(self.roster) | KEY * whole])
        content += _key(ends[0].peer)[: 32 if whole else FINGERPRINT]
        content += bytes.fromhex(self.run_id)[:RUN_PREFIX]
        if self.roster:
            round, _, id = self.roster.partition(":")
            content += int(round).to_bytes(4, "big") + bytes.fromhex(id)
        for end in ends:
            name = bytes([len(end.host)]) + end.host.encode()
            place = name if end.is_name else ipaddress.ip_address(end.host).packed
            content += bytes([PLACES.index(end.kind) + RELAYED * bool(end.relay)]) + place + end.port.to_bytes(2, "big")
            content += _key(end.relay) if end.relay else b""
        word = _word(content)
        return PREFIX + word + _check(word)


def invite(addresses: Sequence[str], run_id: str, roster: str) -> str:
    """The link for a node's addresses, the best of which comes first. Raises ValueError where it has no short form."""
    first = _endpoint(addresses[0])
    others = (end for end in map(parse, addresses[1:]) if end is not None and not end.relay and end.host != first.host)
    second = next((f"{end.place}/p2p/{end.peer}" for end in others if not _is_local(end)), None)
    chosen = (addresses[0],) if second is None or _is_local(first) else (addresses[0], second)
    return Invitation(chosen, run_id, roster).encode()


def is_link(text: str) -> bool:
    return text.strip().lower().startswith(PREFIX)


def decode(text: str) -> Invitation:
    """The invitation that begins with PREFIX. Raises UsageMistake."""
    word = re.sub(r"[\s-]", "", text).lower().removeprefix(PREFIX)
    shown = f"{PREFIX}{word[:18]}…"
    if wrong := sorted(set(word) - set(CHARACTERS)):
        raise UsageMistake(f"the link {shown} has {wrong[0]!r} in it, which none has. {WHERE}")
    word, check = word[:-CHECK], word[-CHECK:]
    if not word or _check(word) != check:
        raise UsageMistake(f"the link {shown} is cut off, or a character of it is wrong. {WHERE}")
    try:
        whole = len(word) % 8 not in (1, 3, 6)  # else its last character begins a byte
        content = base64.b32decode(word.translate(FROM_BECH32) + "=" * (-len(word) % 8)) if whole else b""
        if _word(content) != word:
            raise ValueError("it ends in the middle")
        if content[0] >> 4 != VERSION:
            raise UsageMistake("the link is of a newer version of swarmnode; upgrade this one")
        return _read(content)
    except (IndexError, ValueError) as error:
        raise UsageMistake(f"the link names no place that this version understands: {error}") from error


def _read(content: bytes) -> Invitation:
    at = 1

    def take(size: int) -> bytes:
        nonlocal at
        if at + size > len(content):
            raise ValueError("it ends too early")
        at += size
        return content[at - size : at]

    end = f"p2p/{peer_id_of(take(32))}" if content[0] & KEY else f"{BEGINS}/{take(FINGERPRINT).hex()}"
    run_id = take(RUN_PREFIX).hex() if content[0] & RUN else ""
    roster = f"{int.from_bytes(take(4), 'big')}:{take(32).hex()}" if content[0] & ROSTER else ""
    addresses: list[str] = []
    while at < len(content) and len(addresses) < MOST:
        place = take(1)[0]
        kind = PLACES[place % RELAYED]
        if kind.startswith("ip"):
            host = str(ipaddress.ip_address(take(4 if kind == "ip4" else 16)))
        else:
            host = take(take(1)[0]).decode("ascii")
        port = int.from_bytes(take(2), "big")
        relay = f"/p2p/{peer_id_of(take(32))}/p2p-circuit" if place >= RELAYED else ""
        addresses.append(f"/{kind}/{host}/tcp/{port}{relay}/{end}")
        _endpoint(addresses[-1])
    if not addresses or at < len(content):
        raise ValueError("it has no address, or more than it says")
    return Invitation(tuple(addresses), run_id, roster)


def _endpoint(address: str) -> Endpoint:
    end = parse(address)
    if end is None or end.kind not in PLACES:
        raise ValueError(f"{address} has no short form")
    return end


def _is_local(end: Endpoint) -> bool:
    return not end.is_name and ipaddress.ip_address(end.host).is_loopback


def _word(content: bytes) -> str:
    """Five bits a character, filled up with zeros."""
    return base64.b32encode(content).decode().rstrip("=").translate(TO_BECH32)


def _check(word: str) -> str:
    """The checksum of BIP 350 over the prefix and `word`."""
    name = PREFIX[:-1].encode()
    state = 1
    for value in (*(c >> 5 for c in name), 0, *(c & 31 for c in name), *map(CHARACTERS.index, word), *[0] * CHECK):
        top = state >> 25
        state = (state & 0x1FFFFFF) << 5 ^ value
        for bit, generator in enumerate(GENERATORS):
            state ^= generator if top >> bit & 1 else 0
    state ^= BECH32M
    return "".join(CHARACTERS[state >> 5 * (CHECK - 1 - at) & 31] for at in range(CHECK))


def _key(peer: str | None) -> bytes:
    """The public key in a peer id. Raises ValueError where there is none."""
    return public_key(peer or "").public_bytes_raw()
