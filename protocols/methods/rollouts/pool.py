"""The rollout groups that a node holds: others' to learn from, and its own, kept apart.

    pool.add(signed)                      # "" where it is kept, else the word for why not
    drawn = pool.candidates(16, rng)      # authors take turns, those not used yet
    pool.used(group.id for group in drawn)
    pool.note(author, "gated")            # what a defence refused, counted by reason and author

Bounds: so many groups and bytes in all; of one author at most `share` of what is held (never fewer than `few`), scaled
by its standing; nothing older than `seconds`, or more than `versions` behind its author's newest. An author beyond its
quota displaces its own oldest group, and a full pool lets go of the oldest of whoever has most: so who floods displaces
nobody but himself. A date is the author's claim; one that lies ahead gains nothing, as the time of arrival counts too.

`SharingRules.standing(author)`, 0 to 1, is how far an author is trusted. Authors whose standing is below ESTABLISHED
are on probation: together they have `probation` of what is held, so that no number of identities that one attacker
makes has more than that.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from swarmnode.protocols.limits import Allowance, Recent
from swarmnode.protocols.methods.rollouts.messages import SignedGroup
from swarmnode.protocols.network import PeerId

MAX_SEEN = 8192  # ids remembered, of groups that are gone too: 1 MiB
MAX_AUTHORS = 1024  # whose counts are remembered; first is forgotten of whom nothing was of use
MAX_REASONS = 64  # that are told apart: they come from our own code
AHEAD = 60_000  # ms that a date may lie ahead, as of records
ESTABLISHED = 0.5  # standing from which on an author has a share of its own


class SharingRules(Protocol):
    """What a method decides about sharing: with whom, and which groups are of use; for one who takes none, as here."""

    def peers(self) -> Sequence[PeerId]:
        """Members that are connected now, and with whom groups are shared."""

    def standing(self, author: PeerId) -> float:
        """How far an author is trusted, 0 to 1."""
        return 1.0

    def check(self, group: SignedGroup) -> str:
        """ "" or the word for why a group is of no use, before it is kept or passed on. Runs in a worker thread."""
        return ""

    async def score(self, groups: Sequence[SignedGroup], *, texts: bool = False) -> list[dict[str, Any]]:
        """As `Trainer.score`, for tasks that the daemon cannot check. Raises TrainerDied."""

    def insert_sampled(self, group: SignedGroup) -> str:
        """Take a group that its author wrote for the policy that this node trains; or the word for why not."""
        return "for-another"


@dataclass(frozen=True)
class PoolLimits:
    """What groups may take of this node, and how long they are worth keeping."""

    groups: int = 512  # of others: what 64 nodes send in a round, eight each
    bytes: int = 5 << 20  # of others; of which an author has `share`: room for the largest group
    share: float = 0.25  # of the groups held that one author may have: as the cap on a batch (training/rl/grpo.py)
    few: int = 16  # groups that an author may have anyhow: in a swarm of two the other is all there is
    probation: float = 0.125  # of the groups and bytes held, for all authors on probation together; of `few`, anyhow
    seconds: float = 900.0  # since a group was made and since it came
    versions: int = 64  # that a group may be behind its author's newest, while any of that author's is held
    own_groups: int = 256  # of this node's own, for those who ask later
    own_bytes: int = 8 << 20  # of them


@dataclass(frozen=True)
class Rates:
    """Groups and bytes a second; `burst` may come at once after a pause, and has room for the largest group twice."""

    groups: Allowance
    bytes: Allowance


@dataclass(frozen=True)
class RolloutLimits:
    """How far a group travels, and what others' groups may take of this node.

    A group is handed over `copies` − 1 times in all, so a node gets (groups a node makes in a round) × (copies − 1) of
    them, whatever the size of the swarm. With 8 groups a round of 10 s and 8 copies that is 5.6 a second.
    """

    copies: int = 8  # nodes that hold a group in the end, its author included; 1 keeps groups to oneself
    # groups and bytes that come in: 50 kB/s with all calls
    total: Rates = Rates(groups=Allowance(100, 1000), bytes=Allowance(40_000, 8 << 20))
    # of one author, whoever brings them: those of a fast tiny policy
    author: Rates = Rates(groups=Allowance(8, 256), bytes=Allowance(10_000, 3 << 20))
    # that one peer brings, whoever wrote them
    sender: Rates = Rates(groups=Allowance(32, 512), bytes=Allowance(20_000, 4 << 20))
    pool: PoolLimits = field(default_factory=PoolLimits)  # what is held, with the quotas of authors


@dataclass
class PooledGroup:
    """A group of another node's in the pool."""

    signed: SignedGroup
    came_at: int  # ms, own clock
    used: bool = False


@dataclass
class AuthorStats:
    """What came of one author since this node started, as far as it is remembered."""

    author: PeerId
    groups: int = 0  # held now
    bytes: int = 0
    came: int = 0  # kept, sooner or later
    used: int = 0  # looked at
    learned: int = 0  # of these, how many an update was made of
    version: int = 0  # its newest
    refused: dict[str, int] = field(default_factory=dict)  # by reason


class RolloutPool:
    """Bounded, and fair among authors. Its clock is `now`, in ms; nothing here blocks or waits."""

    def __init__(
        self, me: PeerId, rules: SharingRules, *, now: Callable[[], int], limits: PoolLimits | None = None
    ) -> None:
        self.me, self._rules, self._now = me, rules, now
        self.limits = limits or PoolLimits()
        self._held: OrderedDict[bytes, PooledGroup] = OrderedDict()  # the oldest arrival first
        self.size = 0  # bytes of these
        self._own: OrderedDict[bytes, SignedGroup] = OrderedDict()  # the oldest first
        self.own_size = 0
        self._authors: OrderedDict[PeerId, AuthorStats] = OrderedDict()  # the one active last at the end
        self._seen = Recent[bytes, None](MAX_SEEN)
        self.lacking = 0  # groups that the last who asked for candidates did not get
        self.refused: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()  # by reason: old, stale, no-standing, refused, quota, probation, full

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, id: bytes) -> bool:
        return id in self._held

    def __iter__(self) -> Iterator[PooledGroup]:
        """Others' groups, the oldest arrival first."""
        return iter(tuple(self._held.values()))

    def get(self, id: bytes) -> SignedGroup | None:
        held = self._held.get(id)
        return held.signed if held is not None else self._own.get(id)

    def saw(self, id: bytes) -> bool:
        """Whether a group is or was here, and needs not come again."""
        return id in self._seen

    # -- own

    def keep(self, group: SignedGroup) -> None:
        """Keep a group of this node's own; the oldest ones make room."""
        self.remember(group.id)
        self._own[group.id] = group
        self.own_size += group.size
        limits = self.limits
        while len(self._own) > 1 and (len(self._own) > limits.own_groups or self.own_size > limits.own_bytes):
            self.own_size -= self._own.popitem(last=False)[1].size

    def own(self) -> tuple[SignedGroup, ...]:
        """This node's groups, the oldest first."""
        return tuple(self._own.values())

    # -- others'

    def unfit(self, group: SignedGroup) -> str:
        """Why a group would not be kept: own, ahead, old, stale, no-standing; "" where it would."""
        now, limits = self._now(), self.limits
        if group.author == self.me:
            return "own"
        if group.packed.made_at > now + AHEAD:
            return "ahead"
        if now - group.packed.made_at > 1000 * limits.seconds:
            return "old"
        known = self._authors.get(group.author)
        if known is not None and known.groups and known.version - group.packed.version > limits.versions:
            return "stale"
        return "" if self._rules.standing(group.author) > 0 else "no-standing"

    def add(self, group: SignedGroup) -> str:
        """Keep a group of another's. "" where it is kept; else duplicate, or as `unfit` says, noted with its author."""
        if self.saw(group.id):
            return "duplicate"
        reason = self.unfit(group)
        if not reason and group.size > self._most_of_one:
            reason = "too-large"
        if reason:
            self.note(group.author, reason)
            return reason
        self.remember(group.id)
        author = self._author(group.author)
        author.version = max(author.version if author.groups else 0, group.packed.version)
        author.came += 1
        author.groups += 1
        author.bytes += group.size
        self._held[group.id] = PooledGroup(group, self._now())
        self.size += group.size
        self._make_room(author)
        if self.on_probation(group.author):
            self._make_room_on_probation()
        return ""

    def candidates(self, count: int, rng: random.Random) -> tuple[SignedGroup, ...]:
        """Up to `count` groups of others that `used` has not named.

        Authors take turns; `probation` of all are of authors on probation. `Rollouts` asks others for more.
        """
        chosen = self.drawn(count, rng, used=False)
        self.lacking = count - len(chosen)
        return chosen

    def drawn(self, count: int, rng: random.Random, *, used: bool = True) -> tuple[SignedGroup, ...]:
        """The same, with those `used` as well."""
        self.expire()
        by_author: dict[PeerId, list[SignedGroup]] = {}
        for held in self._held.values():
            if used or not held.used:
                by_author.setdefault(held.signed.author, []).append(held.signed)
        established: list[list[SignedGroup]] = []
        on_probation: list[list[SignedGroup]] = []
        for author, deck in by_author.items():
            rng.shuffle(deck)
            (on_probation if self.on_probation(author) else established).append(deck)
        rng.shuffle(on_probation)
        rng.shuffle(established)
        some = in_turn(on_probation, max(1, int(count * self.limits.probation)))
        chosen = in_turn(established, count - len(some))
        part = self.limits.probation / (1 - self.limits.probation)  # to one of those who are not on probation
        return (*chosen, *some[: max(1, int(part * len(chosen) + 1e-9))])

    def used(self, ids: Iterable[bytes]) -> None:
        """These were learned from, or looked at in vain: they are not drawn again, but still told to others."""
        for id in ids:
            held = self._held.get(id)
            if held is not None and not held.used:
                held.used = True
                self._author(held.signed.author).used += 1

    def learned(self, taken_of: Mapping[PeerId, int]) -> None:
        """An update was made of so many groups of these authors."""
        for author, count in taken_of.items():
            self._author(author).learned += count

    def note(self, author: PeerId, reason: str, count: int = 1) -> None:
        """Count groups of an author that were refused; `reason` is a word of this program's."""
        if reason not in self.refused and len(self.refused) >= MAX_REASONS:
            reason = "other"
        self.refused[reason] += count
        refused = self._author(author).refused
        refused[reason] = refused.get(reason, 0) + count

    def refuse(self, group: SignedGroup, reason: str) -> None:
        """Note a group that is not kept, and remember it, so that it does not come again; it goes if it is here."""
        self.remember(group.id)
        if group.id in self._held:
            self._drop(group.id, "refused")
        self.note(group.author, reason)

    def expire(self) -> None:
        """Let go of what is too old, or too far behind its author's newest."""
        now, limits = self._now(), self.limits
        for id, held in list(self._held.items()):
            signed = held.signed
            if now - min(held.came_at, signed.packed.made_at) > 1000 * limits.seconds:
                self._drop(id, "old")
            elif self._authors[signed.author].version - signed.packed.version > limits.versions:
                self._drop(id, "stale")
            elif self._rules.standing(signed.author) <= 0:
                self._drop(id, "no-standing")
        for author in [author for author in self._authors.values() if author.groups]:
            self._make_room(author)  # a share of less is less
        self._make_room_on_probation()

    # -- statistics

    def stats(self) -> dict[str, Any]:
        """The pool now, and what was refused or let go of since the start, by reason; for the control API."""
        now = self._now()
        counts = [author.groups for author in self._authors.values() if author.groups]
        return {
            "groups": len(self._held),
            "bytes": self.size,
            "own_groups": len(self._own),
            "own_bytes": self.own_size,
            "unused": sum(not held.used for held in self._held.values()),
            "authors": len(counts),
            "greatest_share": max(counts, default=0) / max(1, len(self._held)),  # of the author who has most
            "oldest": max((now - held.came_at for held in self._held.values()), default=0) / 1000,  # s since it came
            "refused": dict(self.refused),
            "dropped": dict(self.dropped),
        }

    def by_author(self) -> tuple[AuthorStats, ...]:
        """Everybody of whom something is remembered, who has most here first."""
        return tuple(sorted(self._authors.values(), key=lambda stats: (-stats.groups, -stats.came, stats.author)))

    # -- room

    def allowed(self, author: PeerId) -> int:
        """How many groups of an author may be here now."""
        return int(max(self.limits.few, self.limits.share * len(self._held)) * self._rules.standing(author))

    @property
    def _most_of_one(self) -> int:
        """Bytes that an author may have here, whatever its standing: no less than the largest group has."""
        return int(self.limits.share * self.limits.bytes)

    def on_probation(self, author: PeerId) -> bool:
        """Whether the author has no share of its own, but a part of one."""
        return self._rules.standing(author) < ESTABLISHED

    def _make_room(self, author: AuthorStats) -> None:
        peer = author.author
        while author.groups > max(1, self.allowed(peer)) or author.bytes > self._most_of_one:
            self._drop_oldest(author, "quota")
        while len(self._held) > self.limits.groups or self.size > self.limits.bytes:
            by_bytes = len(self._held) <= self.limits.groups
            most = max(self._authors.values(), key=lambda each: each.bytes if by_bytes else each.groups)
            self._drop_oldest(most, "full")

    def _make_room_on_probation(self) -> None:
        limits = self.limits
        those = [each for peer, each in self._authors.items() if each.groups and self.on_probation(peer)]
        count, size = sum(each.groups for each in those), sum(each.bytes for each in those)
        while count > 1:  # one at the least, however large it is
            many = count > limits.probation * max(limits.few, len(self._held))
            if not many and size <= limits.probation * limits.bytes:
                break
            size -= self._drop_oldest(max(those, key=lambda each: each.groups if many else each.bytes), "probation")
            count -= 1

    def _drop_oldest(self, author: AuthorStats, reason: str) -> int:
        """Let go of the author's oldest group; its bytes."""
        id = next(id for id, held in self._held.items() if held.signed.author == author.author)
        return self._drop(id, reason)

    def _drop(self, id: bytes, reason: str) -> int:
        signed = self._held.pop(id).signed
        self.size -= signed.size
        author = self._authors[signed.author]
        author.groups -= 1
        author.bytes -= signed.size
        self.dropped[reason] += 1
        return signed.size

    def _author(self, peer: PeerId) -> AuthorStats:
        author = self._authors.setdefault(peer, AuthorStats(peer))
        self._authors.move_to_end(peer)
        if len(self._authors) > MAX_AUTHORS:
            silent = [each for each in self._authors.values() if not each.groups and each is not author]
            if silent:  # of those of no use, the one for longest: a stranger has any number of names
                del self._authors[next((each for each in silent if not each.used), silent[0]).author]
        return author

    def remember(self, id: bytes) -> None:
        """A group that was here, or is kept elsewhere, needs not come again."""
        self._seen[id] = None


def in_turn(decks: Sequence[list[SignedGroup]], count: int) -> list[SignedGroup]:
    """Take up to `count` groups, the last of each deck in turn."""
    chosen: list[SignedGroup] = []
    while len(chosen) < count and any(decks):
        left = [deck for deck in decks if deck]
        chosen += [deck.pop() for deck in left[: count - len(chosen)]]
    return chosen
