"""What peers did wrong, and what it leads to: a peer is slowed, refused, disconnected for a while, and let back.

Each protocol notes violations in a `Violations` of its own. The first of each kind is logged with the peer, the rest
only add up: a peer chooses how often it offends, so neither the log nor the memory may grow with it.

`PeerScoring` weighs those of all protocols. Each violation adds points by its kind, and points halve every `half_life`.
Where they pass a threshold, the peer's standing falls by a rung; it rises by itself. Overload (`Kind.LOAD`) counts once
in `load_every`, however many requests were too many: so a burst of calls slows an honest peer at the worst, and only
who goes on for minutes loses more.

What follows from a standing: docs/wire.md, "Limits".

In a run, the same violations count in the ledger (`PeerScoring.remember`), but for overload, which the honest cause as
well. Points say whether to serve a peer in the next minutes, the ledger whether its work can be relied on in the next
rounds. An identity costs nothing, so all this stops only who wants to keep one.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

import trio

from swarmnode.protocols.limits import Recent
from swarmnode.protocols.metrics import COUNTER, GAUGE, Metric, Metrics
from swarmnode.protocols.network import NetworkError, PeerId
from swarmnode.protocols.wire import WireError

log = logging.getLogger(__name__)

MAX_PEERS = 4096  # of whom a protocol counts violations; who offended longest ago is forgotten first

VIOLATIONS = Metric("swarmnode_offences_total", COUNTER, "what peers did wrong, by protocol and kind", "what")
PEERS_BY_STANDING = Metric("swarmnode_peers_standing", GAUGE, "peers below good standing, by standing", "standing")
FALLS = Metric("swarmnode_standing_falls_total", COUNTER, "times that a peer fell to a standing", "standing")


class Kind(Enum):
    """How bad a violation is."""

    LOAD = "load"  # more than this node gives one peer at once: honest peers do it on a bad day
    BREACH = "breach"  # what no working implementation sends
    LIE = "lie"  # bytes or records that are proved false


class Violations:
    def __init__(self, protocol: str, *, in_ledger: bool = True) -> None:
        """`in_ledger`: False for what the ledger itself found, which it must not count again."""
        self.protocol = protocol
        self._in_ledger = in_ledger
        self._counts = Recent[PeerId, Counter[Kind]](MAX_PEERS)
        self.totals: Counter[Kind] = Counter()
        self.scoring: PeerScoring | None = None  # set by `PeerScoring.watch`

    def note(self, peer: PeerId, what: str, kind: Kind = Kind.BREACH) -> None:
        """Count one violation, and have it weighed; log it where it is the peer's first of its kind."""
        counts = self._counts[peer] = self._counts.get(peer, Counter())
        counts[kind] += 1
        self.totals[kind] += 1
        if counts[kind] == 1:
            did = {Kind.LOAD: "asks too much of", Kind.BREACH: "broke the rules of", Kind.LIE: "lied in"}[kind]
            log.warning("peer %s %s %s: %s (further ones are only counted)", peer, did, self.protocol, what)
        if self.scoring is not None:
            self.scoring.offended(peer, what, kind)
            if self._in_ledger:
                self.scoring.remember(peer, kind)

    @contextmanager
    def serving(self, peer: PeerId, scope: trio.CancelScope) -> Iterator[None]:
        """Where `peer` breaks the rules in the block, which is noted, or the network fails, `scope` ends."""
        try:
            yield
        except WireError as error:
            self.note(peer, str(error))
            scope.cancel()
        except NetworkError as error:
            log.debug("serving %s to %s ended: %s", self.protocol, peer, error)
            scope.cancel()

    def count(self, peer: PeerId) -> int:
        return self._counts[peer].total() if peer in self._counts else 0

    def of(self, peer: PeerId) -> Counter[Kind]:
        """Violations by `peer`, by their kind."""
        return Counter(self._counts.get(peer))

    def refuses(self, peer: PeerId) -> str | None:
        """Why the peer gets nothing now; None where it is served."""
        return self.scoring.refusal(peer) if self.scoring is not None else None

    def measure(self, metrics: Metrics) -> None:
        metrics.show(VIOLATIONS, lambda: {f"{self.protocol} {kind.value}": self.totals[kind] for kind in Kind})


class Standing(IntEnum):
    """From best to worst."""

    GOOD = 0
    SLOWED = 1
    REFUSED = 2
    BANNED = 3

    @property
    def word(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class ScoringLimits:
    """How much a peer may offend."""

    load: float = 1.0  # points for too much at once
    load_every: float = 1.0  # seconds in which overload counts once: 16 s of it slow, 45 s refuse, 3 min ban a peer
    breach: float = 10.0  # points: two of them may be a bug that a release has, eight are a purpose
    lie: float = 20.0  # points: proved, but a bad disk or bad memory lies as well
    half_life: float = 60.0  # seconds; a peer that overloads for ever comes to 87 points
    slowed: float = 15.0  # points from which on a peer is served slowly
    refused: float = 35.0  # points from which on it gets no new streams and no calls
    banned: float = 75.0  # points at which it is disconnected
    first_ban: float = 60.0  # seconds; each further one is twice as long
    longest_ban: float = 3600.0  # seconds
    forgiven: float = 6 * 3600.0  # seconds after a ban in which the next one counts as further
    peers: int = 4096  # remembered; who offended longest ago is forgotten first: 1 MiB


@dataclass
class _Record:
    points: float = 0.0
    at: float = 0.0  # when `points` was right
    counted: int = 0  # violations that made points
    load_at: float = -math.inf  # when overload counted last
    bans: int = 0
    until: float = -math.inf  # the end of the last ban
    why: str = ""
    told: Standing = Standing.GOOD  # the worst standing since it was last good


@dataclass(frozen=True)
class KeptOut:
    peer: PeerId
    seconds: float  # from now
    why: str  # its last violation


class PeerScoring:
    """The standing of all peers of one node. Times are trio's."""

    def __init__(self, limits: ScoringLimits) -> None:
        self._limits = limits
        self._records = Recent[PeerId, _Record](limits.peers)
        self.on_ban: Callable[[PeerId], None] = lambda peer: None  # what is done as a peer becomes banned
        self._falls: Counter[str] = Counter()
        self.remember: Callable[[PeerId, Kind], None] = lambda peer, kind: None  # by the run's ledger, if any
        self._watched: list[Violations] = []
        self.blocked: set[PeerId] = set()  # by the owner, until the owner says otherwise

    def watch(self, *violations: Violations) -> None:
        """Judge peers by these violations too, and let the protocols that note them know whom to refuse."""
        self._watched += violations
        for each in violations:
            each.scoring = self

    def offended(self, peer: PeerId, what: str, kind: Kind) -> None:
        limits, now = self._limits, trio.current_time()
        record = self._records[peer] = self._records.get(peer) or _Record(at=now)
        if now < record.until or (kind is Kind.LOAD and now - record.load_at < limits.load_every):
            return
        if kind is Kind.LOAD:
            record.load_at = now
        if record.told and self._standing(record, now) is Standing.GOOD:  # it came back
            record.told, record.counted = Standing.GOOD, 0
        weight = {Kind.LOAD: limits.load, Kind.BREACH: limits.breach, Kind.LIE: limits.lie}[kind]
        record.points, record.at = self._points(record, now) + weight, now
        record.why = what[:200]
        record.counted += 1
        if record.points >= limits.banned:
            self._ban(record, now)
        standing = self._standing(record, now)
        if standing > record.told:
            self._tell(peer, record, standing)
        if standing is Standing.BANNED:
            self.on_ban(peer)

    def block(self, peer: PeerId, blocked: bool = True) -> None:
        """Ban a peer until this is called with False, which ends what bans and points it has besides."""
        if not blocked:
            self.blocked.discard(peer)
            self._records.pop(peer, None)
            return
        self.blocked.add(peer)
        self.on_ban(peer)

    def standing(self, peer: PeerId) -> Standing:
        if peer in self.blocked:
            return Standing.BANNED
        record = self._records.get(peer)
        return Standing.GOOD if record is None else self._standing(record, trio.current_time())

    def refusal(self, peer: PeerId) -> str | None:
        """Why `peer` gets nothing now, None where it does."""
        if self.standing(peer) < Standing.REFUSED:
            return None
        return "this node refuses the peer for a while, because it broke rules or asked for too much"

    def told(self, peer: PeerId) -> dict[str, Any]:
        """Why the peer stands as it does, as JSON: points now and at which it falls, and violations by protocol."""
        record, limits, now = self._records.get(peer, _Record()), self._limits, trio.current_time()
        return {
            "standing": self.standing(peer).word,
            "blocked": peer in self.blocked,
            "banned_for_s": round(max(0.0, record.until - now), 1),
            "points": round(self._points(record, now), 1),
            "falls_at": {"slowed": limits.slowed, "refused": limits.refused, "banned": limits.banned},
            "half_life_s": limits.half_life,
            "last": record.why,
            "violations": {
                each.protocol: {kind.value: count for kind, count in each.of(peer).items()}
                for each in self._watched
                if each.count(peer)
            },
        }

    def kept_out(self) -> tuple[KeptOut, ...]:
        """Banned peers, who comes back first before the others."""
        now = trio.current_time()
        banned = [KeptOut(peer, r.until - now, r.why) for peer, r in self._records.items() if now < r.until]
        return tuple(sorted(banned, key=lambda kept: kept.seconds))

    def below_good(self) -> Iterator[tuple[PeerId, Standing]]:
        now = trio.current_time()
        for peer, record in self._records.items():
            if standing := self._standing(record, now):
                yield peer, standing

    def measure(self, metrics: Metrics) -> None:
        worse = [standing.word for standing in Standing if standing]
        metrics.show(FALLS, lambda: {word: self._falls[word] for word in worse})
        metrics.show(PEERS_BY_STANDING, lambda: dict.fromkeys(worse, 0) | Counter(s.word for _, s in self.below_good()))

    def _points(self, record: _Record, now: float) -> float:
        return record.points * math.exp2((record.at - now) / self._limits.half_life)

    def _standing(self, record: _Record, now: float) -> Standing:
        if now < record.until:
            return Standing.BANNED
        points = self._points(record, now)
        if points >= self._limits.refused:
            return Standing.REFUSED
        return Standing.SLOWED if points >= self._limits.slowed else Standing.GOOD

    def _ban(self, record: _Record, now: float) -> None:
        limits = self._limits
        if now - record.until > limits.forgiven:
            record.bans = 0
        record.until = now + min(limits.longest_ban, math.ldexp(limits.first_ban, min(record.bans, 30)))
        record.bans += 1
        record.points = 0.0  # it comes back with nothing against it but the length of its next ban

    def _tell(self, peer: PeerId, record: _Record, standing: Standing) -> None:
        record.told = standing
        self._falls[standing.word] += 1
        kept_out = f" for {record.until - record.at:.0f} s" if standing is Standing.BANNED else ""
        log.warning(
            "peer %s is %s%s after %d offences, the last: %s", peer, standing.word, kept_out, record.counted, record.why
        )
