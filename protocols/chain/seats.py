"""Who leaves the electorate between its changes, and who takes the seat. Pure functions of chain and quoted cuts.

The electorate changes with every 16th roster. Where many nodes come and go, electors are gone long before: then rounds
lack a quorum that are short of nobody who is there. So every cut names the judges of the round before of whom its
author holds no cut. An elector whom a quorum names in SILENCE rosters, none of which quotes a cut of its own, leaves at
once.

- A quorum of all judges, not of the quoted: a leader can leave testimony out, and cannot make any up. So a minority of
  liars has nobody removed whom a quorum of honest judges heard, and who is quoted begins at zero again.
- Never below SMALL electors: there nothing is promised against liars, and the quorum shrinks with empty rosters.
- The seats of those who left are filled from those who earned a place, by at most `growth` (rounded up) a roster, so
  that attrition does not use up an electorate: newcomers come no faster than electors leave and seats grow.
- Seats change with the electorate: by `growth` (at least one) more where more have earned a place than there are seats,
  up to what electors may grow to, else as many fewer, down to the electors that there are.

A genesis elector that was away takes a seat again as soon as it works, while it needs no proof of work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from swarmnode.protocols.chain.chainstate import MILLION, ChainRules, ChainState
from swarmnode.protocols.chain.electorate import SMALL, candidates, most_electors, next_electors, quorum
from swarmnode.protocols.chain.statements import MAX_JUDGES, Cut, Said

SILENCE = 2  # rosters in which a quorum missed an elector, after which it is none


def places_of(chain: ChainState, peers: Iterable[str]) -> tuple[int, ...]:
    """Where these are among the electors of a round, ascending: `Cut.absent`; but for those who are none any more."""
    wanted = set(peers)
    return tuple(place for place, elector in enumerate(chain.electors) if elector in wanted)[:MAX_JUDGES]


def next_silent(chain: ChainState, rules: ChainRules, cuts: Iterable[Said[Cut]]) -> dict[str, int]:
    """`ChainState.silent` after a roster that quotes these cuts of judges, one of each."""
    named, quoted = Counter[str](), set[str]()
    for cut in cuts:
        quoted.add(cut.author)
        named.update(chain.electors[place] for place in cut.what.absent if place < len(chain.electors))
    missed = {elector for elector, count in named.items() if count >= quorum(chain, rules)}
    silent = {elector: chain.silent.get(elector, 0) + (elector in missed) for elector in chain.electors}
    return {elector: count for elector, count in silent.items() if count and elector not in quoted}


def reseated(chain: ChainState, rules: ChainRules) -> ChainState:
    """The chain with the electors of its next round, after a roster that is not empty."""
    chain = replace(chain, electors=_without_silent(chain))
    new = candidates(chain, rules)
    if chain.made % rules.earn_window == 0:
        electors, cohort = next_electors(chain, rules), chain.seed
        seats = _next_seats(chain, rules, len(electors), len(set(new).difference(electors)))
    else:
        room = min(chain.seats - len(chain.electors), -(-len(chain.electors) * rules.growth // MILLION))
        electors = tuple(sorted({*chain.electors, *new[: max(0, room)]}))
        cohort, seats = chain.cohort, chain.seats
    silent = {elector: count for elector, count in chain.silent.items() if elector in electors}
    return replace(chain, electors=electors, cohort=cohort, seats=seats, silent=silent)


def _next_seats(chain: ChainState, rules: ChainRules, electors: int, waiting: int) -> int:
    """Seats after a change to so many electors, where so many more have earned a place."""
    share = max(1, chain.seats * rules.growth // MILLION)
    if waiting > chain.seats - electors:
        return max(electors, min(chain.seats + share, most_electors(rules)))
    return max(electors, chain.seats - share)


def _without_silent(chain: ChainState) -> tuple[str, ...]:
    """The electors but for those who have been silent, the longest first, down to SMALL."""
    gone = [elector for elector in chain.electors if chain.silent.get(elector, 0) >= SILENCE]
    gone.sort(key=lambda elector: (-chain.silent[elector], elector))
    left = set(gone[: max(0, len(chain.electors) - SMALL)])
    return tuple(elector for elector in chain.electors if elector not in left)
