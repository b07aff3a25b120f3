"""What a member can do inside an all-reduce: to the part that it owns, to what it sends, and to what it tells.

A liar is a real node of the method `btard` of which one part was replaced. Each liar of a swarm does the same.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import trio
from undefended import Lacking
from undefended_btard import ANY_NONCE, PATIENT, UNCOMMITTED, UNCOMPARED, UNTRIED, UNWATCHED

from swarmnode.protocols import wire
from swarmnode.protocols.methods.btard.method import Btard
from swarmnode.protocols.methods.btard.statements import (
    MAX_STATEMENT,
    NAMES,
    Centre,
    Commitment,
    Opening,
    PartAudit,
    Sent,
    Signed,
    Sums,
)
from swarmnode.protocols.methods.known.messages import RoundHead, Summon
from swarmnode.protocols.methods.known.method import Diloco
from swarmnode.protocols.transfer.bulk import StreamingBuffer


class ButterflyLie:
    """One way to misbehave. `tell` changes a node before it takes part."""

    name: ClassVar[str]
    proved = True  # whether it leaves a proof
    bites = False  # whether a plain butterfly with the same lie (`undefended`) is spoilt by it
    lacks: ClassVar[Lacking | None] = None  # else: what members have not to whom it is told beside
    pointless: ClassVar[str] = ""  # else: why there is nobody to tell it to

    def tell(self, method: Btard) -> None:
        raise NotImplementedError

    def undefended(self, method: Diloco) -> None:
        """The same lie to members who check nothing, where it has a meaning there."""


class WrongCentre(ButterflyLie):
    """Moves the part that it owns by `far` radii, and tells of it as though it were right."""

    name = "an owner hands out a wrong part"
    far = 30.0
    bites = True

    def tell(self, method: Btard) -> None:
        reduction = method.allreduce
        usual = reduction._centre

        def centre(attempt: Any, number: int) -> tuple[Centre, bytes]:
            told, raw = usual(attempt, number)
            values = reduction._codec.decode(raw, attempt.parts[number].stop - attempt.parts[number].start)
            away = np.random.default_rng(number).standard_normal(values.size, dtype=np.float32)
            length = np.float32(self.far * max(told.radius, 1e-6) / np.linalg.norm(away))
            moved = bytes(reduction._codec.encode(values + away * length))
            return replace(told, hash=_hash(moved)), moved

        def only_own(attempt: Any, number: int) -> tuple[Centre, bytes]:
            owns = attempt.parts[number].owner == reduction._me
            return centre(attempt, number) if owns else usual(attempt, number)

        reduction._centre = only_own  # type: ignore[method-assign]

    def undefended(self, method: Diloco) -> None:
        means = method.allreduce._means  # type: ignore[attr-defined]
        usual = means.sum

        def summed(batch: Any, sources: Any, shares: Any, out: Any, into: Any = None, first: int = 0) -> int:
            lost = usual(batch, sources, shares, out, into, first)
            codec = means.residual.codec
            for chunk in batch:
                place = out.chunks.elements(chunk - first)
                raw = out.raw(chunk - first)
                values = codec.decode(raw, place.stop - place.start)
                away = np.random.default_rng(chunk).standard_normal(values.size, dtype=np.float32)
                length = np.float32(self.far * np.linalg.norm(values) / np.linalg.norm(away))
                codec.encode(values + away * length, raw)
                if into is not None:
                    codec.decode(raw, place.stop - place.start, into[place])
            return lost

        means.sum = summed


class SlightlyWrongCentre(WrongCentre):
    """By so little that the loss does not show it."""

    name = "an owner moves its part by a tenth of the radius"
    far = 0.1
    bites = False
    lacks = UNWATCHED


class BrokenCommitment(ButterflyLie):
    name = "commits to one thing and sends another"
    lacks = UNCOMMITTED

    def tell(self, method: Btard) -> None:
        reduction = method.allreduce
        offer = reduction.offer

        def lying(attempt: Any, name: Any, raw: bytes) -> None:
            if name[0] == "part":
                part = attempt.parts[name[1]]
                other = bytes(reduction._codec.encode(np.ones(part.stop - part.start, np.float32)))
                raw = reduction.with_bytes(attempt, Sent(name[1], _hash(other)), other)
            offer(attempt, name, raw)

        reduction.offer = lying  # type: ignore[method-assign]


class UnequalStatements(ButterflyLie):
    """Tells half of the members one thing and half of them another."""

    kind: ClassVar[type] = Commitment
    lacks = UNCOMPARED

    def other(self, what: Any) -> Any:
        raise NotImplementedError

    def tell(self, method: Btard) -> None:
        reduction, bulk = method.allreduce, method.allreduce._parts.bulk
        offered, offer = bulk.offered, reduction.offer
        twice: dict[Any, bytes] = {}

        def lying(attempt: Any, name: Any, raw: bytes) -> None:
            offer(attempt, name, raw)
            changed = self._changed(reduction, attempt, name, raw)
            if changed is not None:
                twice[reduction._key(attempt.roster, *name)] = changed

        async def unequal(key: Any, peer: str, wait: float) -> Any:
            found = await offered(key, peer, wait)
            if found is not None and key in twice and _half(peer):
                whole = StreamingBuffer(twice[key])
                whole.grow(whole.size)
                return type(found)(whole, found.to)
            return found

        reduction.offer, bulk.offered = lying, unequal  # type: ignore[method-assign]

    def _changed(self, reduction: Any, attempt: Any, name: Any, raw: bytes) -> bytes | None:
        if name[0] != NAMES[self.kind]:
            return None
        signed = wire.decode(Signed, raw)
        what = self.other(wire.decode(self.kind, signed.body))
        return wire.encode(reduction.sign(attempt, what))


class UnequalCommitments(UnequalStatements):
    name = "commits to other things before other members"

    def other(self, what: Commitment) -> Commitment:
        return replace(what, nonce=_hash(what.nonce))


class LongUnequalCommitments(UnequalCommitments):
    """So that what members hold of all liars together is more than one would take from another."""

    name = "commits to other things before other members, at length"

    def tell(self, method: Btard) -> None:
        super().tell(method)
        exchange = method.allreduce.exchange

        async def lying(attempt: Any, what: Any, kind: Any) -> Any:
            if isinstance(what, Commitment):
                what = replace(what, nonce=what.nonce + bytes(MAX_STATEMENT - 1024))
            return await exchange(attempt, what, kind)

        method.allreduce.exchange = lying  # type: ignore[method-assign]

    def other(self, what: Commitment) -> Commitment:
        return replace(what, nonce=_hash(what.nonce) + what.nonce[32:])


class UnequalCentres(UnequalStatements):
    name = "an owner hands out other parts to other members"
    kind = Centre

    def _changed(self, reduction: Any, attempt: Any, name: Any, raw: bytes) -> bytes | None:
        if name[0] != "centre":
            return None
        part = attempt.parts[name[1]]
        other = bytes(reduction._codec.encode(np.ones(part.stop - part.start, np.float32)))
        return bytes(reduction.with_bytes(attempt, Centre(name[1], _hash(other), 1.0, 0.0), other))


class OtherNonce(ButterflyLie):
    name = "opens another nonce than it had committed to"
    lacks = ANY_NONCE

    def tell(self, method: Btard) -> None:
        reduction = method.allreduce
        exchange = reduction.exchange

        async def lying(attempt: Any, what: Any, kind: Any) -> Any:
            if isinstance(what, Opening):
                what = Opening(bytes(32))
            return await exchange(attempt, what, kind)

        reduction.exchange = lying  # type: ignore[method-assign]


class FalseSums(ButterflyLie):
    """So that an honest owner's part seems wrong."""

    name = "tells false checksums"
    lacks = UNTRIED

    def tell(self, method: Btard) -> None:
        reduction = method.allreduce
        usual = reduction._sums

        def lying(attempt: Any, own: Any, mean: Any) -> Sums:
            told = usual(attempt, own, mean)
            return replace(told, sums=tuple(1e3 + s for s in told.sums))

        reduction._sums = lying  # type: ignore[method-assign]


class FalseAccusation(ButterflyLie):
    name = "accuses an owner whose part is right"
    lacks = UNTRIED

    def tell(self, method: Btard) -> None:
        reduction = method.allreduce
        exchange = reduction.exchange

        async def lying(attempt: Any, what: Any, kind: Any) -> Any:
            return await exchange(attempt, PartAudit((0,)) if isinstance(what, PartAudit) else what, kind)

        reduction.exchange = lying  # type: ignore[method-assign]


class Garbage(ButterflyLie):
    """Bytes that have not the hash which was signed with them: as good as nothing, and no proof."""

    name = "sends bytes that are not those it signed"
    proved = False
    pointless = "without hashes they are one more contribution, which the clip bounds"

    def tell(self, method: Btard) -> None:
        reduction = method.allreduce
        offer = reduction.offer

        def lying(attempt: Any, name: Any, raw: bytes) -> None:
            offer(attempt, name, raw[:-4] + b"\1\2\3\4" if name[0] == "part" else raw)

        reduction.offer = lying  # type: ignore[method-assign]


class LargeSignFlip(ButterflyLie):
    """A lie about its own work, which nobody can prove: the clip bounds it."""

    name = "sign flip × 1000"
    proved = False
    bites = True

    def tell(self, method: Btard) -> None:
        self.undefended(method)

    def undefended(self, method: Diloco) -> None:
        reduce = method.allreduce.reduce

        async def lying(roster: Any, values: Any, **how: Any) -> Any:
            return await reduce(roster, np.float32(-1000) * values, **how)

        method.allreduce.reduce = lying  # type: ignore[method-assign]


class Summoner(ButterflyLie):
    """Summons the others away from whatever ballot they are in to one of its own, and leads none."""

    name = "summons to its own ballots, and leads none"
    proved = False
    lacks = PATIENT

    def tell(self, method: Btard) -> None:
        agreement, acceptor = method.agreement, method.agreement.acceptor
        agree = agreement.agree

        async def lead(ready: Any, candidates: Any) -> None:
            await trio.sleep_forever()

        async def summon() -> None:
            while True:
                candidates, round = acceptor.candidates(), acceptor.position.round
                ballot = acceptor.ballot + 1
                while acceptor.leader(ballot) != agreement._me:
                    ballot += 1
                others = [peer for peer in candidates if peer != agreement._me]
                message = Summon(agreement._run_id, round, ballot)
                await agreement._rpc.call_all(others, "round.summon", message, RoundHead, timeout=1.0)
                await trio.sleep(1.0)

        async def lying(**what: Any) -> Any:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(summon)
                decision = await agree(**what)
                nursery.cancel_scope.cancel()
            return decision

        agreement._lead, agreement.agree = lead, lying  # type: ignore[method-assign]


def _hash(raw: bytes) -> bytes:
    return hashlib.sha256(raw).digest()


def _half(peer: str) -> bool:
    return _hash(peer.encode())[0] % 2 == 0


def everyone() -> list[ButterflyLie]:
    """A new liar of every kind."""
    return [
        WrongCentre(),
        SlightlyWrongCentre(),
        BrokenCommitment(),
        UnequalCommitments(),
        UnequalCentres(),
        OtherNonce(),
        FalseSums(),
        FalseAccusation(),
        Garbage(),
        LargeSignFlip(),
        Summoner(),
    ]
