"""What was said in one round on one roster: commits, cuts, reveals, seals, scores and rosters, bounded and indexed.

A book is opened when the block that the round builds on is known. It takes in what honest nodes may say of that round
and passes over the rest: what is said by who is no judge or leader of it, or uninvited, or too much.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from swarmnode.protocols.chain.rules import Derived, Quoted, listed_commits
from swarmnode.protocols.chain.state import ChainRules, ChainState, judges, leaders, participates, quorum
from swarmnode.protocols.chain.statements import Commit, Cut, Reveal, Roster, Said, Scores, Seal, nonce_hash, opens

MAX_AUTHORS = 2048  # who commit in one round, beside electors; far more than take part, and 1 MiB of memory
PER_AUTHOR = 2  # records under one key that a state keeps: more cannot be quoted


@dataclass
class Book:
    """The round that builds on `chain.tip`, as far as this node heard of it."""

    chain: ChainState
    rules: ChainRules
    commits: dict[bytes, Said[Commit]] = field(default_factory=dict)  # by id
    cuts: dict[bytes, Said[Cut]] = field(default_factory=dict)
    reveals: dict[bytes, Said[Reveal]] = field(default_factory=dict)  # by commit; each opens it
    seals: dict[str, Said[Seal]] = field(default_factory=dict)  # by judge
    scores: dict[bytes, Said[Scores]] = field(default_factory=dict)
    rosters: dict[bytes, Said[Roster]] = field(default_factory=dict)
    arrived: dict[str, float] = field(default_factory=dict)  # author of a commit -> trio time of the first
    sealed: dict[bytes, bytes] = field(default_factory=dict)  # id -> the record's bytes, for peers
    derived: dict[tuple[tuple[bytes, ...], tuple[bytes, ...]], Derived] = field(
        default_factory=dict
    )  # by what is quoted
    _listed: tuple[int, tuple[bytes, ...]] = (0, ())  # `listed` of so many cuts
    _loose: dict[bytes, list[Said[Reveal]]] = field(default_factory=dict)  # by commit, which is not here yet

    def __post_init__(self) -> None:
        self.judges = judges(self.chain, self.rules)
        self.leaders = leaders(self.chain, self.rules)
        self.quorum = quorum(self.chain, self.rules)

    # --- taking in --------------------------------------------------------------------------------------------------

    def take(self, said: Said[Any], sealed: bytes, now: float) -> bool:
        """Take in a statement of this round; whether it is new and belongs here."""
        what = said.what
        if said.id in self.sealed or (what.round, what.parent) != (self.chain.round, self.chain.tip):
            return False
        match what:
            case Commit():
                taken = self._take_commit(said, now)
            case Reveal():
                taken = self._take_reveal(said)
            case Cut():
                taken = said.author in self.judges and _put(self.cuts, said)
            case Seal():
                taken = said.author in self.judges and self.seals.setdefault(said.author, said) is said
            case Scores():
                taken = said.author in self.judges and _put(self.scores, said)
            case Roster():
                its_turn = what.attempt < len(self.leaders) and self.leaders[what.attempt] == said.author
                taken = its_turn and _put(self.rosters, said)
            case _:
                taken = False
        if taken:
            self.sealed[said.id] = sealed
        return taken

    def _take_commit(self, said: Said[Commit], now: float) -> bool:
        known = said.author in self.chain.electors or any(
            said.author == worked.author for roster in self.chain.history[-2:] for worked in roster
        )
        room = known or len(self.commits) < MAX_AUTHORS
        if not room or not participates(self.chain, said.author) or not _put(self.commits, said):
            return False
        self.arrived.setdefault(said.author, now)
        for reveal in self._loose.pop(said.id, ()):
            self._take_reveal(reveal)
        return True

    def _take_reveal(self, said: Said[Reveal]) -> bool:
        commit = self.commits.get(said.what.commit)
        if commit is None:
            loose = self._loose.setdefault(said.what.commit, [])
            if len(loose) >= PER_AUTHOR or len(self._loose) > MAX_AUTHORS:
                return False
            loose.append(said)
            return True
        if said.author != commit.author or not opens(said.what, commit, self.chain.run_id):
            return False
        return self.reveals.setdefault(commit.id, said) is said

    # --- what follows -----------------------------------------------------------------------------------------------

    def cuts_by_judge(self) -> dict[str, Said[Cut]]:
        """One cut of each judge that made one."""
        return {said.author: said for said in self.cuts.values()}

    def scores_by_judge(self) -> dict[str, Said[Scores]]:
        """One list of opened scores of each judge whose cut is here and has the hash of its nonce."""
        cuts = self.cuts_by_judge()
        return {
            said.author: said
            for said in self.scores.values()
            if said.author in cuts and cuts[said.author].what.nonce_hash == nonce_hash(said.what.nonce)
        }

    def listed(self) -> tuple[bytes, ...]:
        """Ids of commits that are in more than a third of the cuts that are here."""
        if self._listed[0] != len(self.cuts):  # it only grows
            self._listed = len(self.cuts), listed_commits(list(self.cuts_by_judge().values()))
        return self._listed[1]

    def own_commit(self, author: str) -> Said[Commit] | None:
        """The first commit of an author."""
        return next((said for said in self.commits.values() if said.author == author), None)

    def quoted(self, cuts: Iterable[bytes], scores: Iterable[bytes], norms: dict[bytes, float]) -> Quoted:
        """What a roster that quotes these is checked against. Raises KeyError where one is not here."""
        return Quoted(
            tuple(self.cuts[id] for id in cuts),
            tuple(self.scores[id] for id in scores),
            self.commits,
            {id: said.what for id, said in self.reveals.items()},
            norms,
        )


def _put(kept: dict[bytes, Any], said: Said[Any]) -> bool:
    """Keep it unless as many of its author's are here."""
    if said.id in kept or sum(said.author == other.author for other in kept.values()) >= PER_AUTHOR:
        return False
    kept[said.id] = said
    return True
