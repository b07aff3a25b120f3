"""What one node has seen of its peers in one run, and what it says of them.

    ledger = Ledger(me, now=now)
    ledger.begin(chain); ledger.follow(id, parent, work, round=8)  # the open chain: what rosters prove
    ledger.observe(peer, Saw.PROOF, good=6, bad=1, evidence=group) # all else, counted until …
    ledger.close(round)                                            # … an epoch ends
    ledger.insert(attested)                                        # others' attestations
    ledger.view()[peer], ledger.standing(peer)

Accounts along the chain belong to a roster each, as states do: who switches to another fork has the accounts of that
fork. What rosters prove is the same for everybody who measured nothing itself; all else is this node's own. Nothing in
the ledger waits, blocks or fails. Memory is bounded by MAX_PEERS accounts, KEPT rosters and MAX_ATTESTATIONS words.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from swarmnode.protocols.chain.state import ChainState
from swarmnode.protocols.chain.statements import FULL_STANDING, Refusal
from swarmnode.protocols.limits import Recent
from swarmnode.protocols.peers.scoring import Kind
from swarmnode.protocols.reputation.account import (
    CONTAINED_AFTER,
    MAX_PEERS,
    MEASURED,
    NEW,
    NEWCOMER,
    VIOLATIONS,
    Account,
    Rating,
    RoundWork,
    after_roster,
    after_violations,
    after_work,
    at_joining,
    behaviour,
    contained,
    score,
    weighted_median,
)
from swarmnode.protocols.reputation.attestation import (
    CHANCE,
    EVIDENCE,
    FULL,
    MAX_COUNT,
    MAX_FINDINGS,
    Attestation,
    Attested,
    Finding,
    Saw,
    disproved,
)
from swarmnode.protocols.reputation.view import LATELY, PeerScore, of_own_data, standings
from swarmnode.training.verify.replay import Audit, Verdict

KEPT = 80  # rosters whose accounts and proofs are kept: the 64 down to which a node may switch, and a quarter more
MAX_ATTESTATIONS = 16_384  # words of others: 4 MiB
FORGOTTEN = 256  # of them at a time
HARSH = 4.0  # rollouts that hold up which one that does not outweighs
WHOSE_NEWS = 16  # subjects of attestations in one epoch, at most …
NEWS = 512  # … and in all swarm of that size together, however many attest
NEWCOMER_STANDING = 0.25  # of who is on probation: below ESTABLISHED of the pool, so they share one part of a batch
LEAST_ROSTER_STANDING = FULL_STANDING // 4  # of who does nothing but harm: what it offers is refused anyway
ASIDE = CHANCE | {Saw.PROOF, Saw.AUDIT}  # findings that are about work; the others are about behaviour
OWED = 3  # audits that must hold up after one that did not: as many as a newcomer's rounds with a full score (SURE)
AUDITS_KEPT = 8  # of a peer, the newest
EXPORT = 2  # version of what `Ledger.export` gives


@dataclass(frozen=True)
class _Stand:
    """Where a roster leads: everybody's account there, and what it proved itself."""

    parent: bytes
    round: int  # rounds done
    accounts: Mapping[str, Account]
    work: RoundWork | None


@dataclass
class _Seen:
    """What was seen of one peer beside the chain."""

    account: Account = NEWCOMER
    pending: Counter[tuple[Saw, bool]] = field(default_factory=Counter)  # (kind, whether good), since the last epoch
    totals: Counter[tuple[Saw, bool]] = field(default_factory=Counter)
    evidence: dict[Saw, bytes] = field(default_factory=dict)
    news: int = 0  # observations since it was attested last
    audits: deque[Audit] = field(default_factory=lambda: deque(maxlen=AUDITS_KEPT))


class Ledger:
    """One node's, in one run. `now`: ms since the epoch."""

    def __init__(self, me: str, *, now: Callable[[], int]) -> None:
        self.me, self._now = me, now
        self.round = 0
        self._stands = Recent[bytes, _Stand](KEPT)
        self._tip = b""
        self._restored: tuple[int, Mapping[str, Account]] | None = None
        self._seen = Recent[str, _Seen](MAX_PEERS)
        self._owed = Recent[str, int](MAX_PEERS)  # audits that must hold up before a peer's work counts again
        self._attestations: dict[tuple[str, str], Attested] = {}  # by attester and subject; the newest last
        self._equivocators: frozenset[str] = frozenset()
        self._disproved = Recent[str, None](MAX_PEERS)  # attesters whose own evidence said otherwise
        self._attested = Recent[str, int](MAX_PEERS)  # the round before which all of a subject's work was attested
        self._view: dict[str, PeerScore] | None = None
        self._anybody_verified = False  # in that view
        self._stale = True
        self._looked_at = Recent[bytes, None](MAX_ATTESTATIONS)

    # --- what the chain proves --------------------------------------------------------------------------------------

    def begin(self, chain: ChainState) -> None:
        """Stand on a chain without its past: with what is known already, else with what its state remembers."""
        accounts = self._on_chain or at_joining(chain)
        self._stands.clear()
        self._stands[chain.tip] = _Stand(b"", chain.round, accounts, None)
        self.go_to(chain.tip)

    @property
    def _on_chain(self) -> Mapping[str, Account]:
        """Accounts as the chain proves them; till this node stands on one, as it did before a restart."""
        if self._stands:
            return self._stands[self._tip].accounts
        return self._restored[1] if self._restored is not None else {}

    def stands(self, roster: bytes) -> bool:
        return roster in self._stands

    def follow(self, roster: bytes, parent: bytes, work: RoundWork | None, *, round: int) -> None:
        """Go on to a roster after one that `stands`; `work` is None for an empty one. `round`: rounds done there."""
        if roster not in self._stands:
            before = self._stands[parent].accounts
            old = self._restored is not None and work is not None and work.round < self._restored[0]
            after = before if work is None or old else after_roster(before, work, me=self.me)
            self._stands[roster] = _Stand(parent, round, after, work)
        self.go_to(roster)

    def go_to(self, roster: bytes) -> None:
        """Stand on a roster that `stands`, perhaps of another fork."""
        self._tip, self._stale = roster, True
        self._stands.move_to_end(roster)
        self.round = self._stands[roster].round

    def works(self) -> tuple[RoundWork, ...]:
        """What the rosters down from here proved, the newest first."""
        down, at = list[_Stand](), self._tip
        while at in self._stands:
            down.append(self._stands[at])
            at = down[-1].parent
        return tuple(stand.work for stand in down if stand.work is not None)

    # --- what this node saw itself ----------------------------------------------------------------------------------

    def observe(self, peer: str, saw: Saw, *, good: int = 0, bad: int = 0, evidence: bytes = b"") -> None:
        """So many good and bad things of a kind; counts from the end of the epoch on. `evidence`: an id, if any."""
        if peer == self.me or not (good or bad):
            return
        seen = self._seen[peer] = self._seen.get(peer) or _Seen()
        for counts in (seen.pending, seen.totals):
            counts[saw, True] = min(MAX_COUNT, counts[saw, True] + good)
            counts[saw, False] = min(MAX_COUNT, counts[saw, False] + bad)
        if evidence:
            seen.evidence[saw] = evidence[:EVIDENCE]
        seen.news += good + bad

    def observe_once(self, what: bytes, peer: str, saw: Saw, *, good: int, bad: int, evidence: bytes) -> None:
        """The same of one thing, named by its id, that may be looked at again and again."""
        if what not in self._looked_at:
            self._looked_at[what] = None
            self.observe(peer, saw, good=good, bad=bad, evidence=evidence)

    def __contains__(self, peer: str) -> bool:
        return peer in self._seen

    def offended(self, peer: str, kind: Kind) -> None:
        """A peer broke the rules of some protocol. Overload does not count: the honest cause it as well."""
        if kind is not Kind.LOAD:
            self.observe(peer, Saw.FORM, bad=2 if kind is Kind.LIE else 1)

    def audited(self, audit: Audit, broken: bool) -> None:
        """What came of repeating a slice of a peer's work. `broken`: it shows nothing, time after time, which is a lie.

        Who lied has no weight and no credit here, nor did it ever, until OWED audits held up.
        """
        good, bad = int(audit.verdict is Verdict.HELD), int(audit.verdict is Verdict.LIED or broken)
        self.observe(audit.author, Saw.AUDIT, good=good, bad=bad, evidence=audit.commit)
        self._seen.setdefault(audit.author, _Seen()).audits.append(audit)
        if (owed := OWED if bad else self.owed(audit.author) - good) > 0:
            self._owed[audit.author] = owed
        else:
            self._owed.pop(audit.author, None)
        self._stale = True

    def owed(self, peer: str) -> int:
        """How many audits must hold up before a peer that lied counts again."""
        return self._owed.get(peer, 0)

    def audits(self, peer: str) -> tuple[Audit, ...]:
        """The newest audits of a peer's work by this node."""
        return tuple(self._seen[peer].audits) if peer in self._seen else ()

    def drew(self, author: str, passed: bool, commit: bytes) -> None:
        """Whether a contribution was better on its author's own data than on their like."""
        self.observe(author, Saw.ASSIGNED, good=int(passed), bad=int(not passed), evidence=commit)
        seen = self._seen.get(author)
        if seen is not None and seen.totals[Saw.ASSIGNED, True] + seen.totals[Saw.ASSIGNED, False] > LATELY:
            for fine in (True, False):
                seen.totals[Saw.ASSIGNED, fine] //= 2

    def unique(self, peer: str) -> float:
        """What share of its standing a peer keeps, by whether its work comes of its own data: own tests and others'."""
        own = self._seen[peer].totals if peer in self._seen else Counter[tuple[Saw, bool]]()
        tests = [(own[Saw.ASSIGNED, True], own[Saw.ASSIGNED, False], 1.0)]
        one = (self._view or {}).get(peer)
        for word in one.words if one is not None else ():
            tests += [(f.good, f.bad, word.voice) for f in word.attested.what.found if f.saw is Saw.ASSIGNED]
        return of_own_data(tests)

    def close(self, round: int | None = None) -> None:
        """End an epoch: what was observed since the last one counts. `round`: of this node, where there is no chain.

        Full work is what the author of the median piece did: many names that do little each do not lower it, unless
        most of all work is theirs.
        """
        if round is not None and not self._stands and self._restored is None:  # else that of the restored accounts
            self.round = round
        usual = weighted_median((float(good), float(good)) for good, _ in map(self._answers, self._seen.values()))
        for seen in self._seen.values():
            good, bad = self._answers(seen)
            if good or bad:
                worth = (good - HARSH * bad) / (good + bad)
                gain = worth * min(1.0, good / usual) if worth > 0 and usual else worth
                seen.account = after_work(seen.account, gain, round=self.round)
            if wrong := sum(n for (saw, fine), n in seen.pending.items() if not fine and saw not in ASIDE):
                seen.account = after_violations(seen.account, bad=wrong, round=self.round)
            seen.pending.clear()
        self._stale = True
        self.view()

    def _answers(self, seen: _Seen) -> tuple[int, int]:
        """Pieces of work that held up in this epoch, and that did not."""
        return seen.pending[Saw.PROOF, True], seen.pending[Saw.PROOF, False]

    def accounts(self) -> dict[str, Account]:
        """Everybody's account here: work as the chain proves it, or else as it was seen; and all that was offended.

        Nothing that a liar did is left of its work.
        """
        found = dict(self._on_chain)
        for peer, seen in self._seen.items():
            if peer not in found:
                found[peer] = seen.account
            elif seen.account.violations:
                found[peer] = replace(found[peer], violations=found[peer].violations + seen.account.violations)
        for peer in self._owed:
            known = found.get(peer, NEWCOMER)
            found[peer] = replace(known, rating=NEW, earned=min(0.0, known.earned), helped=0, strikes=CONTAINED_AFTER)
        return found

    # --- what others say, and what is said to them ------------------------------------------------------------------

    def insert(self, attested: Attested) -> None:
        """Take in what somebody attests; of each attester and subject the newest word is kept.

        Of too many, some of who has no verified work go: names are free. Where these are few, some of who says most.
        """
        key = (attested.attester, attested.what.subject)
        before = self._attestations.get(key)
        if before is not None and (before.at, before.id) >= (attested.at, attested.id):
            return
        self._attestations.pop(key, None)
        self._attestations[key] = attested
        if len(self._attestations) > MAX_ATTESTATIONS:
            known = self._view or self.view()
            gone = [key for key in self._attestations if key[0] not in known or known[key[0]].probation]
            if len(gone) < FORGOTTEN:
                ((most, _),) = Counter(attester for attester, _ in self._attestations).most_common(1)
                gone = [key for key in self._attestations if key[0] == most]
            for key in gone[:FORGOTTEN]:
                del self._attestations[key]
        self._stale = True

    def mistrust(self, liars: frozenset[str]) -> None:
        """Hear nothing more of who equivocated about attestations."""
        if liars != self._equivocators:
            self._equivocators, self._stale = liars, True

    def found(self, peer: str) -> tuple[Finding, ...]:
        """All that was seen of a peer, by kind, with the newest evidence."""
        counts: Counter[tuple[Saw, bool]] = Counter()
        evidence: dict[Saw, bytes] = {}
        for work in self.works():
            for one in work.works:
                if one.author != peer:
                    continue
                for saw, fine in _findings(one.verdict, one.gains.get(self.me)):
                    counts[saw, fine] += 1
                    evidence.setdefault(saw, work.roster[:EVIDENCE])
        if (seen := self._seen.get(peer)) is not None:
            counts += seen.totals
            evidence = seen.evidence | evidence
        kinds = sorted({saw for (saw, _), count in counts.items() if count}, key=lambda saw: saw.value)
        return tuple(Finding(saw, counts[saw, True], counts[saw, False], evidence.get(saw, b"")) for saw in kinds)

    def to_attest(self, members: int) -> tuple[Attestation, ...]:
        """What this node has to say that it did not say yet, of whom it has most news. `members`: of the swarm.

        What only repeats the chain is said by who measured: others can read it there.
        """
        view, due = self.view(), []
        measured: Counter[str] = Counter()
        for work in self.works():
            for one in work.works:
                measured[one.author] += self.me in one.gains and work.round >= self._attested.get(one.author, 0)
        for peer, standing in view.items():
            seen = self._seen.get(peer)
            news = measured[peer] + (seen.news if seen is not None else 0)
            if news and peer != self.me:
                due.append((news, peer, standing))
        due.sort(key=lambda one: (-one[0], one[1]))
        most = max(1, min(WHOSE_NEWS, NEWS // max(1, members)))  # so that the swarm's attestations stay within NEWS
        return tuple(self._attestation(peer, standing) for _, peer, standing in due[:most])

    def published(self, attestation: Attestation) -> None:
        """This attestation was signed: what it tells is no news any more."""
        self._attested[attestation.subject] = self.round
        if attestation.subject in self._seen:
            self._seen[attestation.subject].news = 0

    def _attestation(self, peer: str, standing: PeerScore) -> Attestation:
        own = standing.account  # what was seen here, not what was heard: nobody is a voice twice
        return Attestation(
            self.round,
            peer,
            round(FULL * score(own)),
            round(FULL * max(0.0, min(1.0, own.earned))),
            min(MAX_COUNT, own.rounds),
            self.found(peer)[:MAX_FINDINGS],
        )

    # --- answers ----------------------------------------------------------------------------------------------------

    def view(self) -> dict[str, PeerScore]:
        """Everybody as this node sees it now; with 16 000 words of a thousand peers some 0.2 s of CPU."""
        if self._view is None or self._stale:
            works = [stand.work for stand in self._stands.values() if stand.work is not None]
            for liar in sorted(disproved(self._attestations.values(), works)):  # by the rosters that are here now
                self._disproved[liar] = None
            self._view = standings(
                self.accounts(),
                self._attestations.values(),
                me=self.me,
                round=self.round,
                now=self._now(),
                liars=self._equivocators.union(self._disproved),
            )
            self._stale = False
            self._anybody_verified = any(not one.probation for one in self._view.values())
        return self._view

    def standing(self, peer: str) -> float:
        """How much of its share a peer may have of what this node alone decides about, 0 to 1: its rollout pool.

        From `pool.ESTABLISHED` on for who did verified work, NEWCOMER_STANDING for others, nothing for who is
        contained or lied. While nobody's work was verified, everybody has all of it. As of the end of the last epoch.
        """
        view = self._view if self._view is not None else self.view()
        one = view.get(peer)
        if self.owed(peer) or (one is not None and one.contained):
            return 0.0
        if not self._anybody_verified:
            return 1.0
        if one is None or one.probation:
            return NEWCOMER_STANDING
        return 0.5 + 0.5 * one.score if one.score > 0 else NEWCOMER_STANDING

    def roster_standing(self, peer: str) -> int:
        """What this node, as a judge, says of an author in its scores, in thousandths: from the chain, and its tests.

        All of it for who is new, as the chain keeps newcomers on probation itself, and nothing for who lied; never less
        than LEAST_ROSTER_STANDING for gains alone, as what judges measure cannot tell sabotage from unusual data.
        """
        if self.owed(peer):
            return 0
        account = self._on_chain.get(peer, NEWCOMER)
        usual = score(account) / behaviour(account) if account.rounds >= CONTAINED_AFTER else 1.0
        return max(LEAST_ROSTER_STANDING, round(FULL_STANDING * usual * self.unique(peer)))

    def to_contain(self) -> tuple[str, ...]:
        """Whom this node should be rid of: what they made did not hold up, epoch after epoch.

        Not who did harm in an open round: sixteen honest peers with classes drawn by Dirichlet(0.3) had two among them
        whose every contribution worsened the held-out loss, as a flipped sign does. That costs weight and no more.
        """
        return tuple(peer for peer, seen in self._seen.items() if contained(seen.account))

    # --- across restarts --------------------------------------------------------------------------------------------

    def export(self) -> dict[str, Any]:
        """What `restore` takes, for JSON."""
        return {
            "version": EXPORT,
            "round": self.round,
            "chain": {peer: asdict(account) for peer, account in self._on_chain.items()},
            "seen": {peer: asdict(seen.account) for peer, seen in self._seen.items() if seen.account != NEWCOMER},
            "owed": dict(self._owed.items()),
        }

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Take up what `export` gave, before anything else. Raises ValueError for what it did not give."""
        try:
            if kept["version"] != EXPORT:
                raise ValueError(f"version {kept['version']}")
            round = int(kept["round"])
            chain = {str(peer): _account(fields) for peer, fields in kept["chain"].items()}
            seen = {str(peer): _Seen(_account(fields)) for peer, fields in kept["seen"].items()}
            owed = {str(peer): int(audits) for peer, audits in kept.get("owed", {}).items()}
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"no exported reputation: {error}") from error
        self.round, self._restored = round, (round, chain) if chain else None
        self._seen.update(seen)
        self._owed.update(owed)
        self._stale = True


def _findings(verdict: int, own_gain: int | None) -> Iterator[tuple[Saw, bool]]:
    """The findings in what became of one commit; gains only where this node measured."""
    if own_gain is not None:
        yield Saw.GAIN, own_gain > 0
    if verdict in MEASURED:
        yield Saw.FORM, True
        yield Saw.TIMELY, True
    elif verdict in VIOLATIONS:
        yield Saw.FORM, False
    elif verdict == Refusal.LATE:
        yield Saw.TIMELY, False


def _account(fields: Mapping[str, Any]) -> Account:
    return Account(**{**fields, "rating": Rating(**fields["rating"])})
