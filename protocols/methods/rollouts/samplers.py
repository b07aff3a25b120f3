"""What a trainer holds of those who only sample for its policy: their groups, and what came of each author.

Groups are checked by the trainer:

    samplers.know(policy_hash, version)              # weights that are out; older ones than `staleness` are forgotten
    samplers.insert(signed)                          # "" where it is kept, else the word for why not
    groups = samplers.drawn(32, version=14)          # the newest versions first, authors take turns
    samplers.settle(groups, caught={"12D3…": "not-drawn"}, checked={})

A group counts only if it answers the question that follows from its author, its counter and the weights
(`training.rl.tasks.assigned_task`): so nobody picks questions. Nor does anybody by leaving out groups: counters grow by
one, and of those that are missing SKIPS are borne, to which each group that comes adds a quarter. Whether the weights
wrote it, the trainer process audits a share of the groups for; who is caught lying has no standing from then on, and
all that he sent is dropped. Standing is this process's: it ends with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from swarmnode.protocols.limits import Recent
from swarmnode.protocols.methods.rollouts.messages import SignedGroup
from swarmnode.protocols.methods.rollouts.pool import in_turn
from swarmnode.protocols.network import PeerId
from swarmnode.training.rl.section import RolloutsSection
from swarmnode.training.rl.tasks import TaskRef, assigned_task, tasks_of_run

SKIPS = 64.0  # counters of an author that may be missing: eight batches that were lost
REFUND = 0.25  # of a skip, for each group that comes
MOST = 128  # groups of one author that wait to be learned from; the oldest are let go
WAITING_BYTES = 4 << 20  # of all authors' groups that wait; who has most lets go of his oldest
AUTHORS = 256  # that are remembered; first is forgotten of whom nothing is of use, and liars last, up to half of them
LIES = ("cherry-picked",)  # what nobody sends by mistake, as versions after their trainer went back to a checkpoint


@dataclass
class SamplerTally:
    sampler: PeerId = ""
    version: int = 0  # the newest that a group of his was written with
    expected: int = -1  # counter of the next group; -1 where none came
    came: int = 0
    accepted: int = 0
    proved: int = 0  # of these, groups that an audit looked at and found true
    refused: dict[str, int] = field(default_factory=dict)
    caught: str = ""  # the lie, where there was one

    def refuse(self, reason: str, count: int = 1) -> None:
        if count:
            self.refused[reason] = self.refused.get(reason, 0) + count


@dataclass
class _Author:
    tally: SamplerTally
    waiting: list[SignedGroup] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)  # counters above the expected one - SKIPS
    skips: float = SKIPS

    @property
    def size(self) -> int:
        return sum(group.size for group in self.waiting)

    @property
    def worth(self) -> tuple[bool, bool, bool]:
        """Who has less of it is forgotten before others."""
        return bool(self.tally.caught), self.tally.accepted > 0, bool(self.waiting)

    def let_go(self) -> None:
        """Of the oldest group that waits."""
        del self.waiting[0]
        self.tally.refuse("full")

    def condemn(self, reason: str) -> None:
        self.tally.caught = self.tally.caught or reason
        self.tally.refuse("no-standing", len(self.waiting))
        self.waiting = []

    def count(self, counter: int) -> str:
        """Note a group's counter; or why it does not count: counter (again, or long ago), skips."""
        tally = self.tally
        missing = counter - tally.expected
        if tally.expected < 0:
            tally.expected = counter + 1
        elif missing >= 0:
            if missing > self.skips:
                return "skips"
            tally.expected, self.skips = counter + 1, self.skips - missing
        elif counter in self.seen or counter < tally.expected - SKIPS:
            return "counter"
        else:  # it was late only
            self.skips += 1
        self.skips = min(SKIPS, self.skips + REFUND)
        self.seen = {each for each in self.seen if each >= tally.expected - SKIPS} | {counter}
        return ""


class Samplers:
    """Bounded; nothing here blocks or waits."""

    def __init__(self, me: PeerId, *, run_id: str, settings: RolloutsSection) -> None:
        """`settings`: of the run, which say what is asked, and how many updates weights may be behind."""
        self._me, self._run_id, self._settings = me, run_id, settings
        self._tasks = tasks_of_run(settings)
        self._versions = Recent[str, range](settings.staleness + 1)  # of weights that are out, by hash: an update may
        # change nothing, and a checkpoint bring weights back, so that one hash has several
        self._authors: OrderedDict[PeerId, _Author] = OrderedDict()  # the one heard last at the end

    # -- what comes

    def know(self, policy: str, version: int) -> None:
        """These weights are out: groups that they write may come."""
        known = self._versions.get(policy, range(version, version))
        self._versions[policy] = range(min(known.start, version), version + 1)

    def insert(self, group: SignedGroup) -> str:
        """Keep a group; or why not: for-another, no-standing, stale, …; noted with its author."""
        author = self._author(group.author)
        tally = author.tally
        tally.came += 1
        reason = self._unfit(group, tally) or author.count(group.packed.counter)
        if reason:
            tally.refuse(reason)
            if reason in LIES:
                author.condemn(reason)
            return reason
        tally.version = max(tally.version, group.packed.version)
        author.waiting.append(group)
        while len(author.waiting) > MOST:
            author.let_go()
        while sum(each.size for each in self._authors.values()) > WAITING_BYTES:
            max(self._authors.values(), key=lambda each: each.size).let_go()
        return ""

    def _unfit(self, signed: SignedGroup, tally: SamplerTally) -> str:
        group = signed.packed
        if group.trainer != self._me:
            return "for-another"
        if tally.caught:
            return "no-standing"
        if group.policy not in self._versions:
            oldest = min((versions.start for versions in self._versions.values()), default=-1)
            return "stale" if group.version <= oldest else "unknown-weights"
        if group.version not in self._versions[group.policy]:
            return "other-version"
        asked = assigned_task(
            self._run_id, group.author, group.counter, version=group.version, policy=group.policy, tasks=self._tasks
        )
        if TaskRef(*group.task) != asked:
            return "cherry-picked"
        if len(group.lengths) != self._settings.answers:
            return "other-size"
        return "" if group.logprobs else "no-logprobs"

    # -- what is learned from

    def drawn(self, most: int, *, version: int) -> tuple[SignedGroup, ...]:
        """Take up to `most` groups, at most `staleness` updates behind `version`; those further behind are let go."""
        for author in self._authors.values():
            fresh = [group for group in author.waiting if self._is_fresh(group, version)]
            author.tally.refuse("stale", len(author.waiting) - len(fresh))
            author.waiting = sorted(fresh, key=lambda group: group.packed.version)
        return tuple(in_turn([author.waiting for author in self._authors.values()], most))

    def put_back(self, groups: Sequence[SignedGroup]) -> None:
        """Keep these, which were taken and not looked at; of who was caught lying meanwhile none."""
        for group in groups:
            if not self.tally(group.author).caught:
                self._author(group.author).waiting.append(group)

    def _is_fresh(self, group: SignedGroup, version: int) -> bool:
        versions = self._versions.get(group.packed.policy)
        return versions is not None and 0 <= version - versions[-1] <= self._settings.staleness

    def settle(
        self, groups: Sequence[SignedGroup], *, caught: Mapping[PeerId, str], checked: Mapping[PeerId, int]
    ) -> None:
        """These were given to the trainer, and it caught those authors lying; `checked`: it looked at so many."""
        for peer, reason in caught.items():
            author = self._author(peer)
            author.tally.refuse(reason, sum(group.author == peer for group in groups))
            author.condemn(reason)
        for group in groups:
            self._author(group.author).tally.accepted += group.author not in caught
        for peer, count in checked.items():
            if peer not in caught:
                self._author(peer).tally.proved += count

    # -- looking

    def standing(self, peer: PeerId) -> float:
        """1, or 0 for who was caught lying: the pool's seam."""
        return 0.0 if self.tally(peer).caught else 1.0

    def proved(self, peer: PeerId) -> bool:
        """Whether groups of his passed audits, and none was a lie."""
        tally = self.tally(peer)
        return tally.proved > 0 and not tally.caught

    def tally(self, peer: PeerId) -> SamplerTally:
        author = self._authors.get(peer)
        return author.tally if author is not None else SamplerTally(peer)

    def tallies(self) -> tuple[SamplerTally, ...]:
        """Everybody who is remembered, who gave most first."""
        return tuple(sorted(map(self.tally, self._authors), key=lambda tally: (-tally.accepted, tally.sampler)))

    def _author(self, peer: PeerId) -> _Author:
        author = self._authors.setdefault(peer, _Author(SamplerTally(peer)))
        self._authors.move_to_end(peer)
        if len(self._authors) > AUTHORS:  # the longest silent of these: a stranger has any number of names
            others = [old for old in self._authors if old != peer]
            liars = [old for old in others if self._authors[old].tally.caught]
            least = min(others, key=lambda old: self._authors[old].worth)
            del self._authors[liars[0] if len(liars) > AUTHORS // 2 else least]
        return author
