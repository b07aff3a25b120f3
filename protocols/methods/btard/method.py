"""The exchange method `btard`: known peers who need not be honest (2106.11257). Places and agreement are DiLoCo's.

The method's all-reduce is a butterfly whose members check one another, `BtardReduce`; what they sign and tell one
another in it, and what proves a lie, is in `statements.py`, the arithmetic in `training/btard.py`.

What it promises and what not: docs/btard.md.

Order, for a roster of n seats; each line is one thing that every member tells all others, signed (`statements.py`):

1. commitment   to the bytes of its contribution, part by part, and to a nonce. Then it offers the parts
2. centre       by the owner of a part: CenteredClip of the contributions to it (`training/btard.py`), encoded
3. seen         hashes of each member's commitment and centre: members who hold different ones exchange them
4. opening      the nonces, which together draw directions
5. sums         of each part: what the own contribution, clipped about the centre, is along these directions
6. seen         hashes of openings and sums
7. audit        one member, drawn by the nonces, computes one drawn part again, and tells whether it is wrong

Everybody adds the sums up (`is_suspect`). A part that does not fit, or that the audit calls wrong, is *tried*: all
fetch its contributions, whose hashes are committed, and compute it again, to the bit. That convicts its owner, or who
told false sums, or who accused falsely.

Who may fail when, and what is then true: whoever is silent, or sends what is no statement, is named in PartsMissing;
the attempt changed nothing and the next ballot does without it. Whoever is convicted is named too, and banned: each
member that holds the proof bans by itself, passes on what proves it in two statements, and says so in a record.
Members that end an attempt hold the same bytes of every part: another hash would have shown in line 3.
"""

from __future__ import annotations

import hashlib
import logging
import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import trio

from swarmnode.protocols import wire
from swarmnode.protocols.methods.btard.statements import (
    MAX_STATEMENT,
    NAMES,
    BtardAttempt,
    Bundle,
    Centre,
    Commitment,
    LieEvidence,
    Opening,
    PartAudit,
    S,
    Seen,
    Sent,
    Signed,
    Statement,
    Sums,
    attempt_of,
    auditor,
    compare,
    convicts,
    digest,
    is_banned,
    opened,
    seal,
    seed_of,
)
from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.known.messages import Part, PartsMissing, RoundRoster, cut, owners_of
from swarmnode.protocols.methods.known.method import Diloco
from swarmnode.protocols.methods.known.reduction import Name, Reducer, all_or_missing, blaming, encoded, shares_in
from swarmnode.protocols.methods.trainer import Vector
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.state.backend import StateError
from swarmnode.protocols.wire import Empty
from swarmnode.training.btard import DIRECTIONS, checksum, clipped_centre, is_suspect, residual
from swarmnode.training.codecs import CodecError

logger = logging.getLogger(__name__)

OfPart = TypeVar("OfPart", Sent, Centre)  # what is said about the bytes of a part

AGAIN = 1.0  # seconds before an attempt that leads nowhere is given up, so that ballots are not made in a hurry


class Lies(Exception):
    """Members were convicted; `evidence` is what proves it to others."""

    def __init__(self, convicted: Mapping[PeerId, str], evidence: Iterable[LieEvidence] = ()) -> None:
        super().__init__(", ".join(f"{peer}: {why}" for peer, why in convicted.items()))
        self.convicted, self.evidence = dict(convicted), tuple(evidence)


class BtardReduce(Reducer):
    """One node's reductions in one run. Parts are of equal size: no rates are measured.

    Nobody pushes what members tell one another: each offers its statement, alone or with the bytes that it is about,
    under the name of its kind, and all others fetch it (`bulk.py`). Whoever has nothing there in time, or what is no
    statement of that kind, by that member, under this attempt, is named in PartsMissing.
    """

    def __init__(self, parts: Context) -> None:
        super().__init__(parts)
        self._verify, self._life = parts.network.verify, secrets.token_bytes(16)
        self.bans = Bans(parts)
        self._round = -1
        self._signed: set[str] = set()  # roster ids of this round in whose attempts something was signed
        self._work = trio.CancelScope()
        self._found: set[PeerId] = set()  # who was convicted while an attempt was under way

    async def reduce(
        self, roster: RoundRoster, values: Vector, *, within: float = math.inf, silence: float | None = None
    ) -> Vector:
        """The clipped centre of all seats' `values`, float32 (P,): bit-identical on every seat that gets it.

        Raises PartsMissing, with those who were silent or were convicted. Until `commit(roster)`, the attempt has left
        no trace but offers to others, and bans. Who is silent has as long as who is slow: a step takes no time to tell.
        """
        self.rollback()
        self._withdraw(old for old in self._offered if old.round >= roster.round)
        if banned := [peer for peer in roster.peers if peer in self.bans]:
            await trio.sleep(AGAIN)
            raise PartsMissing(tuple(banned))
        if roster.round != self._round:
            self._round, self._signed = roster.round, set()
        if roster.roster_id in self._signed:  # a call that was cancelled: saying other things now would be a lie
            await trio.sleep(AGAIN)
            raise PartsMissing(())
        self._pending = roster.roster_id
        self._offered.append(roster)
        shares = shares_in(roster)
        if not shares:
            return np.zeros(self._parameters, np.float32)  # nobody trained: nothing to send, nothing moves
        self._signed.add(roster.roster_id)
        allowed = min(self._parts.spec.exchange.deadline_ceiling, within)
        id, parts = attempt_of(self._parts.run_id, roster.roster_id), cut(owners_of(roster.seats), 0, self._parameters)
        attempt = BtardAttempt(roster, id, parts, shares, allowed, trio.current_time() + allowed)
        self._found = set()
        try:
            with trio.CancelScope() as self._work:
                return await self._run(attempt, values)
        except Lies as lies:
            for peer, why in lies.convicted.items():
                self.bans.convict(peer, why)
            others, rpc = [peer for peer in roster.peers if peer != self._me], self._parts.rpc
            for evidence in lies.evidence:  # who does not answer learns it from records
                proof = Proof(self._parts.run_id, evidence)
                await rpc.call_all(others, "btard.proof", proof, Empty, timeout=PROOF_WITHIN)
            raise PartsMissing(tuple(sorted(lies.convicted))) from lies
        raise PartsMissing(tuple(sorted(self._found)))

    def stop_with(self, peer: PeerId) -> None:
        """Somebody was convicted elsewhere: an attempt with it leads nowhere."""
        if self._pending is not None and any(peer in roster.peers for roster in self._offered):
            self._found.add(peer)
            self._work.cancel()

    async def _run(self, attempt: BtardAttempt, values: Vector) -> Vector:
        """Lines 1 to 7 of the module's text. Raises PartsMissing or Lies."""
        own = await self._parts.runner(partial(self._encode, attempt, values)) if self._me in attempt.shares else []
        nonce = secrets.token_bytes(32)
        hashes = tuple(hashlib.sha256(raw).digest() for raw in own)
        commitment = Commitment(hashes, hashlib.sha256(nonce).digest())
        attempt.commitments = await self.exchange(attempt, commitment, Commitment)
        self._check_lengths(attempt, {peer: (len(told.hashes),) for peer, told in attempt.commitments.items()}, 1)
        for number, (raw, hash) in enumerate(zip(own, hashes, strict=True)):
            self.offer(attempt, ("part", number), self.with_bytes(attempt, Sent(number, hash), raw))
        mean = await self._centres(attempt)
        await self._compare(attempt, 0, "commitment", "centre")
        openings = await self.exchange(attempt, Opening(nonce), Opening)
        self._check_openings(attempt, openings)
        attempt.seed = seed_of({peer: opening.nonce for peer, opening in openings.items()})
        sums = await self._parts.runner(partial(self._sums, attempt, own, mean))
        attempt.sums = await self.exchange(attempt, sums, Sums)
        told = {peer: (len(sums.sums), len(sums.distances)) for peer, sums in attempt.sums.items()}
        self._check_lengths(attempt, told, DIRECTIONS, 1)
        await self._compare(attempt, 1, "opening", "sums")
        suspects = await self._parts.runner(partial(self._suspects, attempt))
        wrong: tuple[int, ...] = ()
        who, which = auditor(attempt.seed, attempt.roster.peers, len(attempt.parts))
        if who == self._me and not await self._is_right(attempt, which):
            wrong = (which,)
        attempt.until += attempt.allowed  # the auditor fetched a part of everybody's
        audits = await self.exchange(attempt, PartAudit(wrong), PartAudit)
        accused = {part for audit in audits.values() for part in audit.wrong if 0 <= part < len(attempt.parts)}
        for part in sorted(accused | set(suspects)):
            await self._try(attempt, part, [peer for peer, audit in audits.items() if part in audit.wrong])
        return mean

    # -- what this node contributes, owns and tells

    def _encode(self, attempt: BtardAttempt, values: Vector) -> list[bytes]:
        own = []
        for part in attempt.parts:
            raw = bytearray(self._codec.encoded_size(part.stop - part.start))
            place = slice(part.start, part.stop)
            if not encoded(self.sent, place, values[place], memoryview(raw)):
                logger.error("round %d: a part cannot be encoded and counts as zeros", attempt.roster.round)
            own.append(bytes(raw))
        return own

    async def _centres(self, attempt: BtardAttempt) -> Vector:
        """Compute the part that this node owns; fetch all; the whole vector, (P,)."""
        mean = np.empty(self._parameters, np.float32)
        attempt.later()
        for number, part in enumerate(attempt.parts):
            if part.owner == self._me:
                await self._fetch_part(attempt, number)
                centre, raw = await self._parts.runner(partial(self._centre, attempt, number))
                self.offer(attempt, ("centre", number), self.with_bytes(attempt, centre, raw))
        attempt.later()

        async def fetch(number: int, part: Part) -> None:
            signed, centre, raw = await self.fetch_with_bytes(attempt, part.owner, "centre", number, Centre)
            with blaming(part.owner):
                self._codec.decode(raw, part.stop - part.start, mean[part.start : part.stop])
            attempt.signed.setdefault("centre", {})[part.owner] = signed
            attempt.centres[number] = (centre, raw)

        async with all_or_missing() as nursery:
            for number, part in enumerate(attempt.parts):
                nursery.start_soon(fetch, number, part)
        return mean

    def _centre(self, attempt: BtardAttempt, number: int) -> tuple[Centre, bytes]:
        part, raws = attempt.parts[number], attempt.fetched[number]
        size, shares = part.stop - part.start, list(attempt.shares.values())
        rows = np.stack([self._codec.decode(raw, size) for raw in raws])  # (n, m)
        centre, radius = clipped_centre(rows, shares)
        try:
            raw = bytes(self._codec.encode(centre))
        except CodecError:  # it overflows: nothing moves
            raw = bytes(self._codec.encode(np.zeros(size, np.float32)))
        rounded = self._codec.decode(raw, size)
        return Centre(number, hashlib.sha256(raw).digest(), radius, residual(rows, shares, rounded, radius)), raw

    def _sums(self, attempt: BtardAttempt, own: list[bytes], mean: Vector) -> Sums:
        centres = [mean[part.start : part.stop] for part in attempt.parts]
        told = [self._checksum(attempt, number, raw, centres[number]) for number, raw in enumerate(own)]
        return Sums(tuple(each for sums, _ in told for each in sums), tuple(distance for _, distance in told))

    def _checksum(
        self, attempt: BtardAttempt, number: int, raw: bytes, centre: Vector
    ) -> tuple[tuple[float, ...], float]:
        row = self._codec.decode(raw, centre.size)
        return checksum(row, centre, attempt.centres[number][0].radius, attempt.seed, number)

    # -- what others say

    def _check_lengths(self, attempt: BtardAttempt, told: Mapping[PeerId, tuple[int, ...]], *each: int) -> None:
        """Raises PartsMissing where lists are not so long: `each` for a part, of who contributes, and else empty."""
        right = {peer: len(attempt.parts) * (peer in attempt.shares) for peer in told}
        if wrong := [peer for peer, found in told.items() if found != tuple(right[peer] * one for one in each)]:
            raise PartsMissing(tuple(sorted(wrong)))

    def _check_openings(self, attempt: BtardAttempt, openings: Mapping[PeerId, Opening]) -> None:
        evidence = [
            LieEvidence(attempt.signed["commitment"][peer], attempt.signed["opening"][peer])
            for peer, opening in openings.items()
            if hashlib.sha256(opening.nonce).digest() != attempt.commitments[peer].nonce
        ]
        self._raise(evidence, "opened another nonce than it had committed to")

    def _suspects(self, attempt: BtardAttempt) -> list[int]:
        shares, found = list(attempt.shares.values()), []
        for number in range(len(attempt.parts)):
            of_part = [attempt.sums[peer].of(number) for peer in attempt.shares]
            sums, distances = [s for s, _ in of_part], [d for _, d in of_part]
            centre = attempt.centres[number][0]
            if is_suspect(sums, distances, shares, radius=centre.radius, residual=centre.residual):
                found.append(number)
        return found

    async def _compare(self, attempt: BtardAttempt, step: int, *kinds: str) -> None:
        """Make sure that all hold the same statements of these kinds. Raises Lies or PartsMissing."""
        held = attempt.said(*kinds)
        mine = Seen(step, tuple(map(digest, held)))
        told = await self.exchange(attempt, mine, Seen)
        if odd := [peer for peer, seen in told.items() if (seen.step, len(seen.hashes)) != (step, len(held))]:
            raise PartsMissing(tuple(sorted(odd)))
        others = [peer for peer, theirs in told.items() if theirs != mine]
        if not others:
            return
        for number, said in enumerate(held):
            self.offer(attempt, ("bundle", step, number), wire.encode(Bundle(said)))
        attempt.later()
        found: list[LieEvidence] = []
        unproved: set[PeerId] = set()

        async def look(peer: PeerId) -> None:
            for number, theirs in enumerate(told[peer].hashes):
                if theirs == mine.hashes[number]:
                    continue
                raw = await self.fetch(attempt, peer, ("bundle", step, number), wire.MAX_BYTES)
                said = self._decoded(Bundle, raw, peer).held
                if digest(said) != theirs:
                    raise PartsMissing((peer,))
                proved, without = compare(held[number], said, self._verify)
                found.extend(proved)
                unproved.update(without or (() if proved else (peer,)))

        async with all_or_missing() as nursery:
            for peer in others:
                nursery.start_soon(look, peer)
        self._raise(found, "told members different things")
        raise PartsMissing(tuple(sorted(unproved)))

    # -- statements

    def sign(self, attempt: BtardAttempt, what: Statement) -> Signed:
        return seal(what, self._me, attempt.id, self._life, self._parts.network.sign)

    async def exchange(self, attempt: BtardAttempt, what: Statement, kind: type[S]) -> dict[PeerId, S]:
        """Tell all seats, and get the same kind of statement from each; by peer. Raises PartsMissing."""
        name = NAMES[kind] + (str(what.step) if isinstance(what, Seen) else "")
        self.offer(attempt, (name,), wire.encode(self.sign(attempt, what)))
        attempt.later()
        found = attempt.signed.setdefault(name, {})

        async def fetch(peer: PeerId) -> None:
            found[peer] = self._decoded(Signed, await self.fetch(attempt, peer, (name,), MAX_STATEMENT), peer)

        async with all_or_missing() as nursery:
            for peer in attempt.roster.peers:
                nursery.start_soon(fetch, peer)
        return {peer: self.opened(attempt, found[peer], kind, peer) for peer in attempt.roster.peers}

    def opened(self, attempt: BtardAttempt, signed: Signed, kind: type[S], author: PeerId) -> S:
        """What a member said under this attempt. Raises PartsMissing."""
        with blaming(author):
            return opened(signed, kind, author, attempt.id, self._verify)

    def with_bytes(self, attempt: BtardAttempt, what: Statement, raw: bytes) -> bytes:
        """A statement of this node's with the bytes that it is about."""
        signed = wire.encode(self.sign(attempt, what))
        return len(signed).to_bytes(4, "big") + signed + raw

    async def fetch_with_bytes(
        self, attempt: BtardAttempt, peer: PeerId, name: str, number: int, kind: type[OfPart]
    ) -> tuple[Signed, OfPart, bytes]:
        """A statement about a part, and the bytes that it is about. Raises PartsMissing."""
        part = attempt.parts[number]
        size = self._codec.encoded_size(part.stop - part.start)
        whole = await self.fetch(attempt, peer, (name, number), 4 + MAX_STATEMENT + size)
        length = int.from_bytes(whole[:4], "big")
        signed, raw = self._decoded(Signed, whole[4 : 4 + length], peer), whole[4 + length :]
        what = self.opened(attempt, signed, kind, peer)
        if (what.part, what.hash, len(raw)) != (number, hashlib.sha256(raw).digest(), size):
            raise PartsMissing((peer,))
        return signed, what, raw

    async def fetch(self, attempt: BtardAttempt, peer: PeerId, name: Name, most: int) -> bytes:
        """What a peer offers under a name, or what this node does. Raises PartsMissing."""
        if peer == self._me:
            return attempt.own[name]
        raw, _ = await self._fetch(attempt.roster, peer, name, attempt.until, max_size=most)
        return bytes(raw)

    def offer(self, attempt: BtardAttempt, name: Name, raw: bytes) -> None:
        """Let the other seats fetch this under a name."""
        attempt.own[name] = raw
        self._offer(attempt.roster, name, raw, attempt.roster.peers)

    def _decoded(self, kind: type[S], raw: bytes, peer: PeerId) -> S:
        """A message of a peer's. Raises PartsMissing where it is none."""
        with blaming(peer):
            return wire.decode(kind, raw)

    # -- trials

    async def _is_right(self, attempt: BtardAttempt, number: int) -> bool:
        """Whether the owner of a part told what its contributions give."""
        await self._fetch_part(attempt, number)
        again, _ = await self._parts.runner(partial(self._centre, attempt, number))
        return again == attempt.centres[number][0]

    async def _try(self, attempt: BtardAttempt, number: int, accusers: Iterable[PeerId]) -> None:
        """Compute a part again, and everybody's sums about it. Raises Lies with whoever told something else."""
        attempt.later()
        part = attempt.parts[number]
        logger.info("round %d: part %d of %s is tried", attempt.roster.round, number, part.owner)
        if not await self._is_right(attempt, number):
            raise Lies({part.owner: "the centre of its part is not what the contributions give"})
        centre = self._codec.decode(attempt.centres[number][1], part.stop - part.start)

        def liars() -> list[PeerId]:
            return [
                peer
                for peer, raw in zip(attempt.shares, attempt.fetched[number], strict=True)
                if self._checksum(attempt, number, raw, centre) != attempt.sums[peer].of(number)
            ]

        if wrong := await self._parts.runner(liars):
            raise Lies(dict.fromkeys(wrong, "its checksum is not that of what it contributed"))
        if wrong := list(accusers):
            raise Lies(dict.fromkeys(wrong, "it accused the owner of a part that is right"))

    async def _fetch_part(self, attempt: BtardAttempt, number: int) -> None:
        """Have all contributions to a part. Raises PartsMissing, or Lies about who sends what it did not commit to."""
        if number in attempt.fetched:
            return
        part, found = attempt.parts[number], dict[PeerId, bytes]()
        evidence: list[LieEvidence] = []

        async def fetch(peer: PeerId) -> None:
            signed, sent, raw = await self.fetch_with_bytes(attempt, peer, "part", number, Sent)
            if sent.hash != attempt.commitments[peer].hashes[number]:
                evidence.append(LieEvidence(attempt.signed["commitment"][peer], signed))
                return
            with blaming(peer):
                self._codec.decode(raw, part.stop - part.start)
            found[peer] = raw

        async with all_or_missing() as nursery:
            for peer in attempt.shares:
                nursery.start_soon(fetch, peer)
        self._raise(evidence, "sent something else than it had committed to")
        attempt.fetched[number] = [found[peer] for peer in attempt.shares]

    def _raise(self, evidence: Iterable[LieEvidence], why: str) -> None:
        """Raise Lies, where what is thought to prove something does; where it does not, PartsMissing."""
        convicted = {peer: why for each in evidence if (peer := convicts(each, self._verify)) is not None}
        doubtful = {each.first.author for each in evidence} - convicted.keys()
        if convicted:
            raise Lies(convicted, [each for each in evidence if each.first.author in convicted])
        if doubtful:
            raise PartsMissing(tuple(sorted(doubtful)))


PREFIX = "note/btard/"
LOOK_EVERY = 5.0  # seconds between two looks at what members say of one another
RENEW_EVERY = 86_400.0  # seconds; records of this kind last for a week
PROOF_WITHIN = 5.0  # seconds to give a peer a proof
LISTED = 4096  # records looked at
REASON = 120  # characters of a reason in a record


@dataclass(frozen=True)
class Proof:
    """`btard.proof`, to members: somebody lied. Answered with Empty."""

    run_id: str
    evidence: LieEvidence


class Bans:
    """Who is out of the run for a lie, as this node knows."""

    def __init__(self, parts: Context) -> None:
        self._parts = parts
        self.convicted: dict[PeerId, str] = {}  # of what; by a proof that this node held, or as most `members` say
        self.recorded: set[PeerId] = set()  # as most of who takes part now say
        self._written: dict[PeerId, float] = {}  # trio time

    def __contains__(self, peer: PeerId) -> bool:
        return peer != self._parts.me and (peer in self.convicted or peer in self.recorded)

    def convict(self, peer: PeerId, why: str) -> None:
        """This node holds a proof, or more than half of the run's `members` say that they do."""
        if peer not in self.convicted and peer != self._parts.me:
            logger.warning("%s is banned from the run: %s", peer, why)
            self.convicted[peer] = why

    async def look(self, members: tuple[PeerId, ...]) -> None:
        """Write whom this node bans, and read whom the others do. Raises StateError.

        Where the run lists its members, who believes most of them writes a record of its own, so that a ban outlasts
        those who held the proof. Elsewhere few may take part at times, and what liars among them say must not last.
        """
        for peer, why in list(self.convicted.items()):
            if trio.current_time() - self._written.get(peer, float("-inf")) >= RENEW_EVERY:
                await self._parts.sync.write(PREFIX + peer, why[:REASON])
                self._written[peer] = trio.current_time()
        accusers: dict[PeerId, set[PeerId]] = {}
        for element in await self._parts.state.select(PREFIX, limit=LISTED):
            if element.value is not None:
                peer = element.key.removeprefix(PREFIX)
                accusers.setdefault(peer, set()).add(element.author)
                if element.author == self._parts.me:  # in an earlier life, which held a proof
                    self.convict(peer, str(element.value))
        known = self._parts.spec.run.members or members
        self.recorded = {peer for peer, who in accusers.items() if is_banned(who - {peer}, known)}
        for peer in self.recorded if self._parts.spec.run.members else ():
            self.convict(peer, "more than half of the members hold a proof of a lie")


class Btard(Diloco):
    name = "btard"
    allreduce: BtardReduce
    reducer_class = BtardReduce

    def __init__(self, parts: Context) -> None:
        super().__init__(replace(parts, admits=lambda peer: parts.admits(peer) and peer not in self.bans))
        self.bans = self.allreduce.bans
        parts.rpc.serve("btard.proof", Proof, self._take_proof)

    async def _take_proof(self, peer: PeerId, proof: Proof) -> Empty:
        if proof.run_id == self._parts.run_id and self._parts.admits(peer):
            liar = convicts(proof.evidence, self._parts.network.verify)
            known = {*self._candidates(), *self._parts.membership.members(), *self._parts.spec.run.members}
            if liar in known and liar not in self.bans:
                self.bans.convict(liar, "told contradictory things, as two statements prove")
                self._shut_out(liar)
        return Empty()

    def _candidates(self) -> tuple[PeerId, ...]:
        return self.agreement.acceptor.candidates() if self.rounds.stands else ()

    def _shut_out(self, liar: PeerId) -> None:
        self.allreduce.stop_with(liar)
        self.agreement.acceptor.shut_out(liar)

    async def watch(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(super().watch)
            nursery.start_soon(self._watch_bans)

    async def _watch_bans(self) -> None:
        while True:
            before = self.bans.convicted.keys() | self.bans.recorded
            try:
                await self.bans.look(self._candidates())
            except StateError as error:
                logger.warning("bans are neither written nor read: %s", error)
            for liar in (self.bans.convicted.keys() | self.bans.recorded) - before:
                self._shut_out(liar)
            await trio.sleep(LOOK_EVERY)
