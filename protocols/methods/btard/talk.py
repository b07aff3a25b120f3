"""What members tell one another in an attempt of `btard`: signed statements, alone or with the bytes they are about.

Nobody pushes: each offers its statement under the name of its kind, and all others fetch it (`bulk.py`). Whoever has
nothing there in time, or what is no statement of that kind, by that member, under this attempt, is named in
PartsMissing.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import trio

from swarmnode.protocols import wire
from swarmnode.protocols.methods.btard.rules import (
    MAX_STATEMENT,
    Centre,
    Seen,
    Signed,
    Statement,
    opened,
    seal,
)
from swarmnode.protocols.methods.known.flow import all_or_missing
from swarmnode.protocols.methods.known.roster import Part, Roster
from swarmnode.protocols.methods.outcomes import PartsMissing
from swarmnode.protocols.network import NetworkError, PeerId
from swarmnode.protocols.peers.liveness import Liveness, PeerGoneSilent
from swarmnode.protocols.transfer.bulk import Bulk, Key

LATER = 0.15  # of the time allowed: a step may end so much after the one before, so that the first complaint is right

S = TypeVar("S")


@dataclass
class Attempt:
    """One reduction under way."""

    roster: Roster
    id: bytes
    parts: tuple[Part, ...]
    shares: dict[PeerId, np.float32]  # of those who contribute, in the roster's order
    allowed: float  # seconds for a step
    until: float  # trio time by which to give up on who is silent in the step at hand
    held: dict[str, dict[PeerId, Signed]] = field(default_factory=dict)  # by kind and author
    centres: dict[int, tuple[Centre, bytes]] = field(default_factory=dict)
    fetched: dict[int, list[bytes]] = field(default_factory=dict)  # contributions to a part, in the order of shares

    def later(self) -> None:
        """The next step has a little longer."""
        self.until += LATER * self.allowed

    def said(self, *kinds: str) -> list[Signed]:
        return [signed for kind in kinds for signed in self.held.get(kind, {}).values()]


class Talk:
    """One node's part in what is told, in one run. Its life is in all that it signs."""

    def __init__(
        self,
        *,
        me: PeerId,
        run_id: str,
        bulk: Bulk,
        liveness: Liveness,
        sign: Callable[[bytes], bytes],
        verify: Callable[[PeerId, bytes, bytes], bool],
    ) -> None:
        self._me, self._run_id, self._bulk, self._liveness = me, run_id, bulk, liveness
        self._sign, self._verify = sign, verify
        self._life = secrets.token_bytes(16)
        self.offered: list[Roster] = []  # attempts whose offers stand
        self._own: dict[Key, bytes] = {}  # what this node offers, by name

    def sealed(self, attempt: Attempt, what: Statement) -> Signed:
        """What this node says in an attempt, signed."""
        return seal(what, self._me, attempt.id, self._life, self._sign)

    async def tell(self, attempt: Attempt, what: Statement, kind: type[S]) -> dict[PeerId, S]:
        """Tell all seats, and hear the same kind from each; by peer. Raises PartsMissing."""
        name = kind.__name__.lower() + (str(what.step) if isinstance(what, Seen) else "")
        signed = self.sealed(attempt, what)
        self.offer(attempt, (name,), wire.encode(signed))
        attempt.later()
        held = attempt.held.setdefault(name, {})
        held[self._me] = signed

        async def hear(peer: PeerId) -> None:
            raw = await self.fetch(attempt, peer, (name,), MAX_STATEMENT)
            try:
                held[peer] = wire.decode(Signed, raw, limit=MAX_STATEMENT)
            except wire.WireError as error:
                raise PartsMissing((peer,)) from error

        async with all_or_missing() as start:
            for peer in attempt.roster.peers:
                if peer != self._me:
                    start(partial(hear, peer))
        return {peer: self.opened(attempt, held[peer], kind, peer) for peer in attempt.roster.peers}

    def opened(self, attempt: Attempt, signed: Signed, kind: type[S], author: PeerId) -> S:
        """What a member said under this attempt. Raises PartsMissing."""
        try:
            return opened(signed, kind, author, attempt.id, self._verify)
        except wire.WireError as error:
            raise PartsMissing((author,)) from error

    def with_bytes(self, attempt: Attempt, what: Statement, raw: bytes) -> bytes:
        """A statement of this node's with the bytes that it is about."""
        signed = wire.encode(self.sealed(attempt, what))
        return len(signed).to_bytes(4, "big") + signed + raw

    async def fetch_with_bytes(
        self, attempt: Attempt, peer: PeerId, name: tuple[str | int, ...], size: int
    ) -> tuple[Signed, bytes]:
        """A statement and the `size` bytes that it is about."""
        whole = await self.fetch(attempt, peer, name, 4 + MAX_STATEMENT + size)
        stated = int.from_bytes(whole[:4], "big")
        if len(whole) != 4 + stated + size:
            raise PartsMissing((peer,))
        try:
            return wire.decode(Signed, whole[4 : 4 + stated], limit=MAX_STATEMENT), whole[4 + stated :]
        except wire.WireError as error:
            raise PartsMissing((peer,)) from error

    async def fetch(self, attempt: Attempt, peer: PeerId, name: tuple[str | int, ...], most: int) -> bytes:
        """What a peer offers under a name, or what this node does. Raises PartsMissing."""
        key = self._key(attempt.roster, *name)
        if peer == self._me:
            return self._own[key]
        wait = max(0.0, attempt.until - trio.current_time())

        async def fetch() -> bytes:
            return bytes(await self._bulk.fetch(peer, key, max_size=most, wait=wait, stall=wait))

        raw: bytes | None = None
        failure: Exception | None = None
        with trio.move_on_at(attempt.until):
            try:
                raw = await self._liveness.unless_gone(peer, fetch)
            except (NetworkError, PeerGoneSilent) as error:
                failure = error
        if raw is None:
            raise PartsMissing((peer,)) from failure
        return raw

    def offer(self, attempt: Attempt, name: tuple[str | int, ...], raw: bytes) -> None:
        """Let the other seats fetch this under a name."""
        key = self._key(attempt.roster, *name)
        self._own[key] = raw
        peers = frozenset(attempt.roster.peers) - {self._me}
        if peers:
            self._bulk.offer(key, raw, to=peers)

    def withdraw(self, which: Callable[[Roster], bool]) -> None:
        """Offer nothing more of these attempts."""
        for old in [roster for roster in self.offered if which(roster)]:
            self._bulk.withdraw(self._key(old))
            self._own = {key: raw for key, raw in self._own.items() if key[: len(self._key(old))] != self._key(old)}
            self.offered.remove(old)

    def _key(self, roster: Roster, *name: str | int) -> Key:
        return ("btard", self._run_id, roster.roster_id, *name)
