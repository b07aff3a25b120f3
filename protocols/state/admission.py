"""Who may take part in a run: anybody, those that it lists, or those whose key cost work.

The work is S/Kademlia's static puzzle (Baumgart and Mies 2007, section 4.1): of a public key hashed twice, as many bits
at the front as the run asks for are zero. Whoever wants many identities pays for each, and each bit doubles the price.
It is a function of the peer id alone, so every node decides alike, at once and for ever, and nothing is stored. Records
of authors who are not admitted are in no state that nodes share (`crdt/law.py`), so such an author has
no lease, no commit, no vote, and no part in a pool.

What it is worth stands in docs/identities.md: little against who has a hundred cores. It keeps identities from
being free; that credit follows verified work is what makes many of them useless.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache

import base58

from swarmnode.training.runspec import RunSpec

_ED25519 = bytes.fromhex("002408011220")  # identity multihash of a protobuf Ed25519 public key (libp2p spec, peer-ids)


def admits(spec: RunSpec) -> Callable[[str], bool]:
    """Whether a peer may take part in the run. Those whom the run names need no work: its author vouches for them."""
    members = frozenset(spec.run.members)
    if members:
        return members.__contains__
    bits, named = spec.trust.identity_bits, frozenset((*spec.trust.electors, spec.owner)) - {""}
    if not bits:
        return lambda peer: True
    return lambda peer: peer in named or work_of(peer) >= bits


@lru_cache(maxsize=8192)
def work_of(peer: str) -> int:
    """Bits of work in a peer id; -1 where it is not that of an Ed25519 key."""
    try:
        raw = base58.b58decode(peer)
    except ValueError:
        return -1
    if len(raw) != len(_ED25519) + 32 or not raw.startswith(_ED25519):
        return -1
    return work_of_key(raw[len(_ED25519) :])


def work_of_key(public_key: bytes) -> int:
    """Zero bits at the front of sha-256(sha-256(key)), of a raw public key of 32 bytes; 256 at the most."""
    hashed = hashlib.sha256(hashlib.sha256(public_key).digest()).digest()
    return 256 - int.from_bytes(hashed, "big").bit_length()
