"""Who is an elector, a judge, a leader or a participant of a round. Pure functions of the `ChainState` before it.

- Electors: who has accepted work in ENOUGH of WINDOW rosters, the last DELAY left out; the genesis electors during the
  first GENESIS_ROUNDS. They change every WINDOW rounds, and grow by at most one eighth (at least one), by most audited
  work first. Where nobody would be left, they stay.
- Judges: all electors up to ALL_JUDGE of them, else COMMITTEE that the seed draws. The seed also orders the leaders.
- A quorum is a majority of the judges. After PATIENCE empty rosters in a row it is halved with each further one: a
  swarm that lost most of its judges for good goes on, and where it was only cut off, `forks` heals it.

Empty rosters are in no history: an outage costs nobody its place.
"""

from __future__ import annotations

import hashlib
from collections import Counter

from swarmnode.protocols.chain.chainstate import EVERYBODY, ChainState

WINDOW = 16  # rosters looked at, and rounds between two changes of the electorate
ENOUGH = 8  # of them with accepted work
DELAY = 6  # the last rosters, which do not count yet
HISTORY = WINDOW + DELAY  # rosters that a ChainState remembers
GENESIS_ROUNDS = 2 * WINDOW  # genesis electors need no accepted work until then
ALL_JUDGE = 32  # electors up to which all of them judge
COMMITTEE = 33
ATTEMPTS = 5  # leaders of a round before it ends empty
PATIENCE = 3  # empty rosters in a row before the quorum shrinks
PROBATION_SHARE = 8  # all probationers together hold at most one part in so many of a roster's weight …
SMALL_SHARE = 2  # … and one in so many below SMALL electors
SMALL = 4


def judges(chain: ChainState) -> tuple[str, ...]:
    """Who judges this round, in order of peer id."""
    if len(chain.electors) <= ALL_JUDGE:
        return chain.electors
    return tuple(sorted(_drawn(chain, "judge", chain.electors)[:COMMITTEE]))


def leaders(chain: ChainState) -> tuple[str, ...]:
    """Who leads: attempt a belongs to the a-th. After the last one the round is empty."""
    return tuple(_drawn(chain, "lead", judges(chain))[:ATTEMPTS])


def quorum(chain: ChainState) -> int:
    """How many judges' cuts, and scores, a roster quotes at least."""
    majority = len(judges(chain)) // 2 + 1
    return max(1, majority >> max(0, chain.empties - PATIENCE + 1))


def participates(chain: ChainState, peer: str) -> bool:
    """Whether `peer` may contribute to this round: everybody, or whom the seed draws."""
    if chain.participation >= EVERYBODY:
        return True
    return int.from_bytes(_ticket(chain, "work", peer)[:8], "big") * EVERYBODY < chain.participation << 64


def next_participation(chain: ChainState, contributions: int, target: int) -> int:
    """Millionths for the next round: what would have made `target` contributions, at most doubled or halved."""
    wanted = chain.participation * target // max(contributions, 1)
    return min(EVERYBODY, max(wanted, chain.participation // 2, 1), 2 * chain.participation)


def probation_share(chain: ChainState) -> int:
    """All probationers together hold at most one part in so many of a roster's weight."""
    return SMALL_SHARE if len(chain.electors) < SMALL else PROBATION_SHARE


def next_electors(chain: ChainState) -> tuple[str, ...]:
    """The electors of the round that `chain` is about to do, where that is the first of a WINDOW; else as before."""
    if chain.round % WINDOW:
        return chain.electors
    looked_at = chain.history[:-DELAY] if len(chain.history) > DELAY else ()
    rosters, work = Counter[str](), Counter[str]()
    for worked in looked_at[-WINDOW:]:
        for one in worked:
            rosters[one.author] += 1
            work[one.author] += one.units
    proven = {author for author, count in rosters.items() if count >= ENOUGH}
    named = set(chain.genesis) if chain.round < GENESIS_ROUNDS else set()
    stay = {peer for peer in chain.electors if peer in proven or peer in named}
    new = sorted(proven - stay - set(chain.electors), key=lambda author: (-work[author], author))
    room = max(1, len(chain.electors) // 8)
    return tuple(sorted(stay.union(new[:room]))) if stay or new else chain.electors


def _drawn(chain: ChainState, purpose: str, peers: tuple[str, ...]) -> list[str]:
    return sorted(peers, key=lambda peer: _ticket(chain, purpose, peer))


def _ticket(chain: ChainState, purpose: str, peer: str) -> bytes:
    return hashlib.sha256(chain.seed + purpose.encode() + b"\0" + peer.encode()).digest()
