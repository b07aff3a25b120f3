"""Who is an elector, a judge, a leader or a participant of a round. Pure functions of the `ChainState` before it.

- Electors: who has accepted work in `earn_rounds` of `earn_window` rosters, the last `earn_lag` left out; the genesis
  electors during the first GENESIS_EPOCHS without that. They change with every `earn_window`-th roster. They grow by
  at most `growth` (at least one), by most audited work first, and to no more than ELECTORS_SHARE of the participants;
  at most half of them lapse at a time, those with the least work. So no change gives newcomers a majority.
  Between the changes who is silent leaves, and others take the seats (`seats`).
- Judges: all electors, up to `committee` of them; above, as many drawn by the seed. It also orders the leaders, of whom
  those that were missed lately come last.
- A quorum is a majority of the judges. After PATIENCE empty rosters in a row it is halved, and again with each further
  one, until a roster quotes a majority: a swarm that lost most of its judges for good goes on, and where it was only
  cut off, `forks` heals it.
- Participants: all electors, and of the others a sample that lasts from one change of the electorate to the next, so
  that who is drawn can earn a place (MoDeST draws anew in every round). Its rate follows what the rosters list. Nothing
  is known of that when a run begins: then those who are no electors hold back by the number of members they see.

Empty rosters count for none of this: an outage costs nobody its place. But SUCCESSION of them in a row mean that no
elector is there at all, as one alone could have ended a round by then. Those whose work the remembered rosters accepted
then become electors as well, so that a run outlives everybody who began it. Whoever cuts somebody off can bring this
about where that node is, and nowhere else: the heads of the electors at the fork decide when the cut is over.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

from swarmnode.protocols.chain.chainstate import EVERYBODY, MILLION, ChainRules, ChainState

GENESIS_EPOCHS = 2  # changes of the electorate until genesis electors need accepted work as well
ATTEMPTS = 5  # leaders of a round before it ends empty
PATIENCE = 3  # empty rosters in a row before the quorum shrinks
SUCCESSION = 6  # empty rosters in a row after which others become electors; the quorum of a committee of 33 is 1 then
SUCCESSORS = 16  # of them at most
FALL = 32  # what the participation may be divided by from one round to the next
SETTLING = 2  # rosters after a change of the electorate that do not raise it: who is drawn anew has to catch up first
ROOM_AT_FIRST = 2  # times the contributions aimed at are let in while nothing is known: members seen may be gone
SMALL = 4  # electors; below, nothing is promised against liars
ELECTORS_SHARE = 750_000  # millionths of the participants that electors may grow to


def judges(chain: ChainState, rules: ChainRules) -> tuple[str, ...]:
    """Who judges this round, in order of peer id."""
    if len(chain.electors) <= rules.committee:
        return chain.electors
    return tuple(sorted(_drawn(chain, "judge", chain.electors)[: rules.committee]))


def leaders(chain: ChainState, rules: ChainRules) -> tuple[str, ...]:
    """Who leads: attempt a belongs to the a-th. After the last one the round is empty."""
    order = _drawn(chain, "lead", judges(chain, rules))
    return tuple(sorted(order, key=lambda judge: judge in chain.silent)[:ATTEMPTS])


def majority(chain: ChainState, rules: ChainRules) -> int:
    """More than half of the judges."""
    return len(judges(chain, rules)) // 2 + 1


def quorum(chain: ChainState, rules: ChainRules) -> int:
    """How many judges' cuts, and scores, a roster quotes at least."""
    return max(1, majority(chain, rules) >> max(0, chain.empties - PATIENCE + 1))


def participates(chain: ChainState, peer: str) -> bool:
    """Whether `peer` may contribute to this round: electors, and of the others all or whom the cohort's seed draws."""
    if chain.participation >= EVERYBODY or peer in chain.electors:
        return True
    return _is_below(chain, peer, chain.participation)


def volunteers(chain: ChainState, rules: ChainRules, peer: str, members: int) -> bool:
    """Whether an honest `peer` makes use of its right to contribute. `members`: of the swarm, as far as it sees.

    It does, but for the rounds of a run that no roster has ended yet: there everybody may contribute, and in a large
    swarm so many would that a cut has no room for them. What a liar says of members counts for nothing later on.
    """
    if not participates(chain, peer):
        return False
    if chain.made or peer in chain.electors:
        return True
    return _is_below(chain, peer, EVERYBODY * ROOM_AT_FIRST * rules.participants // max(members, 1))


def _is_below(chain: ChainState, peer: str, millionths: int) -> bool:
    """Whether the ticket of `peer` is among so many millionths of all tickets, the lowest."""
    return int.from_bytes(ticket(chain, peer)[:8], "big") * EVERYBODY < millionths << 64


def ticket(chain: ChainState, peer: str) -> bytes:
    """Orders those who are no electors, where not all may contribute: the lowest first."""
    return _ticket(chain.cohort, "work", peer)


def next_participation(chain: ChainState, rules: ChainRules, strangers: Iterable[str]) -> int:
    """Millionths for the next round: what would have made the aim, at most doubled or divided by FALL.

    Those whom a change of the electorate draws are not there at once: its first rosters say nothing of too few.
    `strangers`: authors of the contributions that this round's roster lists, who are no electors. Where they are too
    many, those stay whose tickets are the lowest, so many as there is room for. Judges cut by the same order: so a
    roster that lists 96 of a thousand tells how many they were by how low their tickets are.
    """
    tickets = sorted({ticket(chain, author) for author in strangers})
    room = max(rules.participants - len(chain.electors), rules.participants // 4, 1)
    if len(tickets) > room:
        wanted = int.from_bytes(tickets[room][:8], "big") * EVERYBODY >> 64
    elif chain.made >= rules.earn_window and chain.made % rules.earn_window < SETTLING:
        wanted = chain.participation
    else:
        wanted = chain.participation * room // max(len(tickets), 1)
    return min(EVERYBODY, max(wanted, chain.participation // FALL, 1), 2 * chain.participation)


def probation_share(chain: ChainState, rules: ChainRules) -> int:
    """Millionths of a roster's weight that all probationers together hold at most."""
    return rules.probation_small if len(chain.electors) < SMALL else rules.probation


def next_electors(chain: ChainState, rules: ChainRules) -> tuple[str, ...]:
    """The electors after `chain.made` rosters, where they change with the last of them; else as before."""
    if chain.made % rules.earn_window:
        return chain.electors
    rosters, work = _earned(chain, rules)
    proven = {author for author, count in rosters.items() if count >= rules.earn_rounds}
    lapsed = sorted(
        set(chain.electors) - proven - _named(chain, rules), key=lambda peer: (rosters[peer], work[peer], peer)
    )
    stay = set(chain.electors).difference(lapsed[: len(chain.electors) // 2])
    new = candidates(chain, rules)
    room = min(
        max(1, len(chain.electors) * rules.growth // MILLION),
        most_electors(rules) - len(stay),
    )
    return tuple(sorted(stay.union(new[: max(0, room)])))


def most_electors(rules: ChainRules) -> int:
    """How many electors there may come to be."""
    return max(1, rules.participants * ELECTORS_SHARE // MILLION)


def candidates(chain: ChainState, rules: ChainRules) -> list[str]:
    """Who has a right to a place and none, and is in the last roster, so is there: most audited work first.

    That are those who earned it and, before all others while they need no proof, the genesis electors.
    """
    rosters, work = _earned(chain, rules)
    there = {one.author for one in chain.history[-1]} if chain.history else set()
    named = _named(chain, rules)
    proven = {author for author in there if author in named or rosters[author] >= rules.earn_rounds}
    return sorted(proven.difference(chain.electors), key=lambda one: (one not in named, -work[one], one))


def _named(chain: ChainState, rules: ChainRules) -> set[str]:
    """The genesis electors, while they need no proof of work."""
    return set(chain.genesis) if chain.made < GENESIS_EPOCHS * rules.earn_window else set()


def _earned(chain: ChainState, rules: ChainRules) -> tuple[Counter[str], Counter[str]]:
    """Rosters with accepted work and units of it, by author, in those of the last rosters that count by now."""
    rosters, work = Counter[str](), Counter[str]()
    for worked in chain.history[: max(0, len(chain.history) - rules.earn_lag)][-rules.earn_window :]:
        for one in worked:
            rosters[one.author] += 1
            work[one.author] += one.units
    return rosters, work


def successors(chain: ChainState) -> tuple[str, ...]:
    """The electors where those of `chain` are silent for good: with them, who did most of the remembered work."""
    rosters, work = Counter[str](), Counter[str]()
    for worked in chain.history:
        for one in worked:
            rosters[one.author] += 1
            work[one.author] += one.units
    others = sorted(set(rosters).difference(chain.electors), key=lambda peer: (-rosters[peer], -work[peer], peer))
    return tuple(sorted({*chain.electors, *others[:SUCCESSORS]}))


def _drawn(chain: ChainState, purpose: str, peers: tuple[str, ...]) -> list[str]:
    return sorted(peers, key=lambda peer: _ticket(chain.seed, purpose, peer))


@lru_cache(1 << 14)  # asked for every peer of a round again and again
def _ticket(seed: bytes, purpose: str, peer: str) -> bytes:
    return hashlib.sha256(seed + purpose.encode() + b"\0" + peer.encode()).digest()
