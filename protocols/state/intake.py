"""How elements from peers get into the state: asked for once, within the peer's budget, and verified.

    offered → asked for → budget → parse → not known, of this run, of this time → signatures, in threads → merge

Several neighbours offer the same element within a moment. The first is asked; the others are remembered, and one of
them is asked where the element has not come in `ASKED_FOR` seconds, as who was asked may be gone, or its push lost.

What a peer can make this node do is bounded at each step. An honest node verifies before it passes anything on, so
whoever sends a false element made it or does not look; nor does it sign much more than its slots hold, or pass on what
strangers signed.

An element dated more than 60 s ahead is dropped here: neither stored nor passed on, and its stamp does not touch the
clock. Its sender is blamed only where peers confirm this node's own clock (`PeerClocks`) and the date is hours off.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import trio

from swarmnode.crdt.envelope import Verify
from swarmnode.crdt.hlc import MAX_AHEAD, is_ahead, time_of
from swarmnode.crdt.law import Merged
from swarmnode.crdt.record import Element, InvalidRecord, parse
from swarmnode.protocols.calls.rpc import Refuse
from swarmnode.protocols.limits import Allowance, Budget, Recent, counted
from swarmnode.protocols.metrics import COUNTER, Metric, Metrics
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.peers.scoring import Kind, Violations
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.state.backend import Rank, StateBackend, StateError

PROTOCOL = "/swarmnode/state/2"
CHUNK = 64  # elements verified in one go: 5 ms of a core
ELEMENTS = Allowance(rate=2_000, burst=8_000)  # sent or offered by one peer: a fifth of what a core verifies
BYTES = Allowance(rate=1 << 20, burst=8 << 20)  # from one peer, pushed
OWN = Allowance(rate=20, burst=2_048)  # new elements of a peer's own, from itself: a burst is more than all its slots
STRANGERS = Allowance(rate=10, burst=512)  # elements from one peer whose authors are not admitted here
MAX_WAIT = 4.0  # seconds that a batch may wait for its peer's budget; above, it is refused as "busy"
AT_ONCE = 4  # batches of one peer that are looked at or wait; an honest one sends one, and another while it repairs
SEEN = 8192  # ranks of elements remembered that were judged and are not here: 2 MiB
ASKED_FOR = 1.0  # seconds in which an element that was asked for is expected
MOST_ASKED = 8192  # elements that are remembered as asked for
OTHERS = 3  # peers remembered for each
FAR_AHEAD = 3_600_000  # ms; no clock that is merely badly set is an hour ahead of confirmed time

VERIFIED = Metric("swarmnode_state_verified_total", COUNTER, "elements of the state whose signatures were verified")
REFUSED = Metric("swarmnode_state_refused_total", COUNTER, "elements from peers that were not stored", "why")
NOT_STORED = tuple(verdict.value for verdict in Merged if verdict is not Merged.STORED)


@dataclass
class _Asked:
    at: float  # trio time
    others: list[PeerId] = field(default_factory=list)  # who offers it as well, and was not asked


@dataclass(frozen=True)
class Inserted:
    new: tuple[Element, ...] = ()  # stored
    false: bool = False  # it held an element that no correct node sends; what came after that was not looked at


class StateIntake:
    """The door to one state."""

    def __init__(self, backend: StateBackend, *, verify: Verify, runner: Runner, violations: Violations) -> None:
        self._backend = backend
        self._verify = verify
        self._runner = runner
        self._violations = violations
        self._elements = Budget[PeerId](ELEMENTS)
        self._bytes = Budget[PeerId](BYTES)
        self._own = Budget[PeerId](OWN)
        self._strangers = Budget[PeerId](STRANGERS)
        self._waiting = Counter[PeerId]()
        self._seen = Recent[Rank, float](SEEN)  # until when they are not asked for, ms of this node's time
        self._asked = Recent[Rank, _Asked](MOST_ASKED)  # what has not come, asked for longest ago first
        self._examining: dict[bytes, trio.Event] = {}  # sealed elements that a batch has in hand, and its end
        self.verified = 0  # elements whose signatures were looked at
        self._refused = Counter[str]()

    def measure(self, metrics: Metrics) -> None:
        metrics.show(VERIFIED, lambda: self.verified)
        metrics.show(REFUSED, lambda: {why: self._refused[why] for why in (*NOT_STORED, "false", "busy")})

    def lacks(self, rank: Rank) -> bool:
        """Whether the element of that rank is worth asking for."""
        until = self._seen.get(rank)
        again = until is None or (until < math.inf and until <= self._backend.now())
        return again and not self._backend.has(rank)

    def asks(self, peer: PeerId, rank: Rank) -> bool:
        """Whether to ask `peer`, who offers an element: where it is lacking, and nobody was asked just now."""
        if not self.lacks(rank):
            return False
        now = trio.current_time()
        asked = self._asked.get(rank)
        if asked is not None and now < asked.at + ASKED_FOR:
            if len(asked.others) < OTHERS and peer not in asked.others:
                asked.others.append(peer)
            return False
        self._asked[rank] = _Asked(now)
        return True

    def overdue(self) -> dict[PeerId, list[Rank]]:
        """Elements that were asked for and did not come, by who is to be asked now."""
        now = trio.current_time()
        found: dict[PeerId, list[Rank]] = {}
        while self._asked and next(iter(self._asked.values())).at + ASKED_FOR <= now:
            rank, asked = self._asked.popitem(last=False)
            if asked.others and self.lacks(rank):
                peer, *others = asked.others
                found.setdefault(peer, []).append(rank)
                self._asked[rank] = _Asked(now, others)
        return found

    async def insert_pushed(self, peer: PeerId, sealed: Sequence[bytes], *, offered: int) -> Inserted:
        """Insert what a peer sent unasked; waits where that and what it offered is a lot. Raises Refuse, Unwritable."""
        if not sealed and not offered:
            return Inserted()
        if self._waiting[peer] >= AT_ONCE:
            self._violations.note(peer, f"more than {AT_ONCE} pushes at once", Kind.LOAD)
            self._refused["busy"] += len(sealed)
            raise Refuse("busy", "this node still looks at what the peer sent before")
        with counted(self._waiting, peer):
            wait = max(
                self._elements.overdraw(peer, len(sealed) + offered), self._bytes.overdraw(peer, sum(map(len, sealed)))
            )
            if wait > MAX_WAIT:
                self._violations.note(peer, "pushes more than its share", Kind.LOAD)
                self._refused["busy"] += len(sealed)
                raise Refuse("busy", "the peer sends more than its share")
            if wait:
                await trio.sleep(wait)
            return await self.insert(peer, sealed)

    async def insert(self, peer: PeerId, sealed: Sequence[bytes]) -> Inserted:
        """Insert what a peer answered, and this node asked for. Raises Unwritable."""
        for ended in {self._examining[raw] for raw in sealed if raw in self._examining}:
            await ended.wait()  # then it is known; or looked at here, where that batch came to an end before it
        mine, end = list(dict.fromkeys(sealed)), trio.Event()
        in_hand = [raw for raw in mine if raw not in self._examining]
        self._examining.update(dict.fromkeys(in_hand, end))
        try:
            fresh, false = self._sift(peer, mine)
            self._refused["false"] += false
            own = sum(element.author == peer for element in fresh)
            if not self._own.take(peer, own):
                self._refused["busy"] += len(fresh)
                self._violations.note(peer, "signs more than its slots hold, again and again", Kind.BREACH)
                return Inserted()
            genuine = await self._genuine(fresh)
            if len(genuine) < len(fresh):
                self._violations.note(peer, "sent an element that its author did not sign", Kind.LIE)
                self._refused["false"] += 1
                false = True
            verdicts = await self._backend.merge(genuine) if genuine else []
        except StateError:
            self._own.overdraw(peer, -own)  # nothing is kept, and it will be told again
            raise
        finally:
            for raw in in_hand:
                del self._examining[raw]
            end.set()
        new = []
        for element, verdict in zip(genuine, verdicts, strict=True):
            if verdict is Merged.STORED:
                new.append(element)
                continue
            self._refused[verdict.value] += 1
            if verdict is not Merged.AHEAD:  # which may be welcome later
                self._seen[element.rank] = math.inf
        return Inserted(tuple(new), false)

    def _sift(self, peer: PeerId, sealed: Sequence[bytes]) -> tuple[list[Element], bool]:
        """Elements that are worth verifying; and whether one was malformed, at which the search ended."""
        fresh: list[Element] = []
        now, strangers = self._backend.now(), 0
        for raw in sealed:
            try:
                element = parse(raw)
                if element.run != self._backend.run_id:
                    raise InvalidRecord("it belongs to another run")
            except InvalidRecord as error:
                self._violations.note(peer, f"sent an element that is not valid: {error}", Kind.BREACH)
                return fresh, True
            if is_ahead(element.hlc, now):
                self._refused[Merged.AHEAD.value] += 1
                self._seen[element.rank] = time_of(element.hlc) - MAX_AHEAD  # by a clock that may be set before
                if time_of(element.hlc) > now + FAR_AHEAD and self._backend.clocks.confirmed:
                    self._violations.note(peer, "sent an element dated more than an hour ahead", Kind.BREACH)
            elif element.author not in self._backend.admitted:
                strangers += 1
                self._refused[Merged.STRANGER.value] += 1
            elif self.lacks(element.rank):
                fresh.append(element)
            else:
                self._refused[Merged.KNOWN.value] += 1
        if strangers and not self._strangers.take(peer, strangers):
            self._violations.note(peer, "sends what many strangers signed", Kind.BREACH)
        return fresh, False

    async def _genuine(self, elements: Sequence[Element]) -> list[Element]:
        """Those at the beginning whose signatures are right: what follows a wrong one is not believed either."""
        genuine: list[Element] = []
        for at in range(0, len(elements), CHUNK):
            chunk = elements[at : at + CHUNK]
            right = await self._runner(lambda chunk=chunk: self._right(chunk))  # type: ignore[misc]
            self.verified += len(chunk)
            genuine += right
            if len(right) < len(chunk):
                break
        return genuine

    def _right(self, chunk: Sequence[Element]) -> list[Element]:
        return list(takewhile(lambda element: element.is_genuine(self._verify), chunk))
