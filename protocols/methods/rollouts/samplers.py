"""What a trainer holds of those who only sample for its policy: their groups, checked, and what became of each one's.

    samplers.know(policy_hash, version)              # weights that are out; older ones than `staleness` are forgotten
    samplers.add(signed)                             # "" where it is kept, else the word for why not
    groups = samplers.drawn(32, version=14)          # the newest versions first, authors take turns
    samplers.settle(groups, caught={"12D3…": "other-activations"})

A group counts only if it answers the question that follows from its author, its counter and the weights
(`tasks/work.py`): so nobody picks questions. Nor does anybody by leaving out groups: counters grow by one, and of those
that are missing SKIPS are borne, to which each group that comes adds a quarter. Whether the weights wrote it, the
trainer process audits a share of the groups for; who is caught lying has no standing from then on, and all that he sent
is dropped. Standing is this process's: it ends with it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from swarmnode.protocols.methods.rollouts.signed import SignedGroup
from swarmnode.protocols.network import PeerId
from swarmnode.training.rl.tasks import assigned_task

SKIPS = 64.0  # counters of an author that may be missing: eight batches that were lost
REFUND = 0.25  # of a skip, for each group that comes
MOST = 128  # groups of one author that wait to be learned from; the oldest are let go
WAITING_BYTES = 4 << 20  # of all authors' groups that wait; who has most lets go of his oldest
AUTHORS = 256  # that are remembered; the one silent longest is forgotten first, liars last
LIES = ("cherry-picked", "other-version")  # what nobody sends by mistake


@dataclass(frozen=True)
class Tally:
    """What came of one author."""

    sampler: PeerId = ""
    version: int = 0  # the newest that a group of his was written with
    expected: int = -1  # counter of the next group; -1 where none came
    came: int = 0
    accepted: int = 0
    proved: int = 0  # of these, groups that an audit looked at and found true
    refused: Mapping[str, int] = field(default_factory=dict)
    caught: str = ""  # the lie, where there was one


@dataclass
class _Author:
    waiting: list[SignedGroup] = field(default_factory=list)
    highest: int = -1  # counter
    seen: set[int] = field(default_factory=set)  # counters above highest - SKIPS
    skips: float = SKIPS
    version: int = 0
    came: int = 0
    accepted: int = 0
    proved: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    caught: str = ""


class Samplers:
    """Bounded; nothing here blocks or waits."""

    def __init__(
        self, me: PeerId, *, run_id: str, tasks: Sequence[tuple[str, int]], answers: int, staleness: int
    ) -> None:
        """`tasks`: what the run asks; `answers`: to each question; `staleness`: updates that weights may be behind."""
        self._me, self._run_id, self._tasks = me, run_id, tuple(tasks)
        self._answers, self._staleness = answers, staleness
        self._versions: OrderedDict[str, range] = OrderedDict()  # of weights that are out, by hash: an update may
        # change nothing, so that one hash has several
        self._authors: OrderedDict[PeerId, _Author] = OrderedDict()  # the one heard last at the end

    # -- what comes

    def know(self, policy: str, version: int) -> None:
        """These weights are out: groups that they write may come."""
        known = self._versions.get(policy)
        follows = known is not None and known.stop == version
        self._versions[policy] = range(known.start if known is not None and follows else version, version + 1)
        self._versions.move_to_end(policy)
        while len(self._versions) > self._staleness + 1:
            self._versions.popitem(last=False)

    def add(self, group: SignedGroup) -> str:
        """Keep a group; or why not: for-another, no-standing, stale, …; noted with its author."""
        author = self._author(group.author)
        author.came += 1
        reason = self._unfit(group, author) or _counted(author, group.counter)
        if reason:
            author.refused[reason] += 1
            if reason in LIES:
                self._condemn(author, reason)
            return reason
        author.version = max(author.version, group.version)
        author.waiting.append(group)
        while len(author.waiting) > MOST:
            _let_go(author)
        while sum(map(_bytes, self._authors.values())) > WAITING_BYTES:
            _let_go(max(self._authors.values(), key=_bytes))
        return ""

    def _unfit(self, signed: SignedGroup, author: _Author) -> str:
        group = signed.group
        if signed.signed.header.trainer != self._me:
            return "for-another"
        if author.caught:
            return "no-standing"
        if group.policy not in self._versions:
            return "stale" if group.version <= self._oldest() else "unknown-weights"
        if group.version not in self._versions[group.policy]:
            return "other-version"
        if group.task != assigned_task(
            self._run_id,
            signed.author,
            signed.counter,
            version=group.version,
            policy=group.policy,
            tasks=self._tasks,
        ):
            return "cherry-picked"
        if len(group.answers) != self._answers:
            return "other-size"
        if group.logprobs is None:
            return "no-logprobs"
        return "" if group.proof else "no-proof"

    def _oldest(self) -> int:
        return min((versions.start for versions in self._versions.values()), default=-1)

    # -- what is learned from

    def drawn(self, most: int, *, version: int) -> tuple[SignedGroup, ...]:
        """Take up to `most` groups, at most `staleness` updates behind `version`; those further behind are let go."""
        decks: list[list[SignedGroup]] = []
        for author in self._authors.values():
            fresh = [group for group in author.waiting if self._is_fresh(group, version)]
            if len(fresh) < len(author.waiting):
                author.refused["stale"] += len(author.waiting) - len(fresh)
            author.waiting = sorted(fresh, key=lambda group: group.version)
            decks.append(author.waiting)
        chosen: list[SignedGroup] = []
        while len(chosen) < most and any(decks):
            for deck in [deck for deck in decks if deck][: most - len(chosen)]:
                chosen.append(deck.pop())
        return tuple(chosen)

    def _is_fresh(self, group: SignedGroup, version: int) -> bool:
        versions = self._versions.get(group.policy)
        return versions is not None and 0 <= version - versions[-1] <= self._staleness

    def settle(
        self,
        groups: Sequence[SignedGroup],
        *,
        caught: Mapping[PeerId, str],
        checked: Mapping[PeerId, int] | None = None,
    ) -> None:
        """These were given to the trainer, and it caught those authors lying; `checked`: it looked at so many."""
        for peer, reason in caught.items():
            author = self._author(peer)
            author.refused[reason] += sum(group.author == peer for group in groups)
            self._condemn(author, reason)
        for group in groups:
            if group.author not in caught:
                self._author(group.author).accepted += 1
        for peer, count in (checked or {}).items():
            if peer not in caught:
                self._author(peer).proved += count

    def _condemn(self, author: _Author, reason: str) -> None:
        author.caught = author.caught or reason
        author.refused["no-standing"] += len(author.waiting)
        author.waiting = []

    # -- looking

    def standing(self, peer: PeerId) -> float:
        """1, or 0 for who was caught lying: the pool's seam."""
        author = self._authors.get(peer)
        return 0.0 if author is not None and author.caught else 1.0

    def proved(self, peer: PeerId) -> bool:
        """Whether groups of his passed audits, and none was a lie."""
        author = self._authors.get(peer)
        return author is not None and author.accepted > 0 and not author.caught

    def tally(self, peer: PeerId) -> Tally:
        """How one author stands."""
        author = self._authors.get(peer)
        if author is None:
            return Tally(peer)
        return Tally(
            peer,
            author.version,
            author.highest + 1 if author.highest >= 0 else -1,
            author.came,
            author.accepted,
            author.proved,
            dict(+author.refused),
            author.caught,
        )

    def tallies(self) -> tuple[Tally, ...]:
        """Everybody who is remembered, who gave most first."""
        return tuple(sorted(map(self.tally, self._authors), key=lambda tally: (-tally.accepted, tally.sampler)))

    def _author(self, peer: PeerId) -> _Author:
        author = self._authors.setdefault(peer, _Author())
        self._authors.move_to_end(peer)
        if len(self._authors) > AUTHORS:
            del self._authors[next((old for old, each in self._authors.items() if not each.caught), peer)]
        return author


def _bytes(author: _Author) -> int:
    return sum(group.size for group in author.waiting)


def _let_go(author: _Author) -> None:
    del author.waiting[0]
    author.refused["full"] += 1


def _counted(author: _Author, counter: int) -> str:
    """Note a group's counter; or why it does not count: counter (again, or long ago), skips."""
    missing = counter - author.highest - 1
    if author.highest < 0:
        author.highest = counter
    elif missing >= 0:
        if missing > author.skips:
            return "skips"
        author.highest, author.skips = counter, author.skips - missing
    elif counter in author.seen or counter <= author.highest - SKIPS:
        return "counter"
    else:  # it was late only
        author.skips += 1
    author.skips = min(SKIPS, author.skips + REFUND)
    author.seen = {each for each in author.seen if each > author.highest - SKIPS} | {counter}
    return ""
