"""What the leader of a ballot concludes from the messages that it holds. Pure.

The rules that keep one round from having two results stand here:
- `result_to_adopt`: a result that a majority of the voters may have accepted is the only one that may be proposed;
- `is_safe`: a result is decided when a majority of the voters holds it, or all that can be reached where these are no
  majority;
and the one that keeps a round from failing for ever: `without_broken_links`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median

from swarmnode.protocols.methods.known.messages import Accepted, Ready
from swarmnode.protocols.methods.known.roster import Seat, capped_weights, majority, shares_by_rate
from swarmnode.protocols.network import PeerId

WINDOW_SLACK = 2.0  # members may train this multiple of the median member's time in the next round
LONGEST_WINDOW = 24 * 3600.0  # seconds; no leader can make a node train longer in one round

Link = tuple[PeerId, PeerId]  # who missed something, and from whom


def result_to_adopt(
    readies: Mapping[PeerId, Ready], voters: Sequence[PeerId], *, distrusted: Collection[PeerId] = ()
) -> tuple[Accepted, tuple[PeerId, ...]] | None:
    """The result of an earlier ballot that may have been decided, and who holds it; None where there is none.

    A result may have been decided when the voters that say they accepted it last, and those that say nothing, make up
    a majority. Of several, the one of the latest ballot counts, as in Paxos. `distrusted` peers could not give the
    state that they claimed; theirs do not count.
    """
    claims = {p: r.accepted for p, r in readies.items() if r.accepted is not None and p not in distrusted}
    silent = sum(p not in readies for p in voters)
    found: tuple[Accepted, tuple[PeerId, ...]] | None = None
    for hash in dict.fromkeys(accepted.state_hash for accepted in claims.values()):
        holders = tuple(p for p, accepted in claims.items() if accepted.state_hash == hash)
        latest = max((claims[p] for p in holders), key=lambda accepted: accepted.ballot)
        possible = sum(p in voters for p in holders) + silent >= majority(voters)
        if possible and (found is None or latest.ballot > found[0].ballot):
            found = latest, holders
    return found


def is_safe(holders: Collection[PeerId], voters: Sequence[PeerId], reachable: Collection[PeerId]) -> bool:
    """Whether no later leader can decide otherwise: a majority of the voters holds the result.

    Where the `reachable` voters are no majority, all of them must hold it; a partition may then have two histories.
    """
    if sum(p in holders for p in voters) >= majority(voters):
        return True
    return len(reachable) < majority(voters) and all(p in holders for p in reachable)


def without_broken_links(members: Iterable[PeerId], broken: Iterable[Link]) -> tuple[PeerId, ...]:
    """`members`, in their order, less the few without whom no broken link remains.

    Whoever is at the end of most of them goes first, then whoever was missed rather than missing others: one that
    reports everybody as missing is the one to go.
    """
    remaining = tuple(members)
    links = set(broken)
    while links := {(a, b) for a, b in links if a in remaining and b in remaining and a != b}:
        ends = Counter(end for link in links for end in link)
        missed = Counter(b for _, b in links)
        out = max(ends, key=lambda p: (ends[p], missed[p], p))
        remaining = tuple(p for p in remaining if p != out)
    return remaining


def seats_of(members: Sequence[PeerId], readies: Mapping[PeerId, Ready], *, weight_cap: float) -> tuple[Seat, ...]:
    """Seats for `members`, in their order: weights by work done, parts by the rates that others measured.

    Relayed members own no part: they fetch and offer as clients of those who do. Where all are relayed, all own parts.
    """
    present = {p: readies[p] for p in members}
    weights = capped_weights({p: r.samples for p, r in present.items()}, weight_cap)
    clients = relayed_members(present)
    owners = [p for p in members if p not in clients] or members
    shares = shares_by_rate({p: _median_rate(p, present) for p in owners})
    return tuple(Seat(p, weights[p], shares.get(p, 0)) for p in members)


def relayed_members(readies: Mapping[PeerId, Ready]) -> frozenset[PeerId]:
    """Whom to leave without a part so that no two of the others reach each other through a relay.

    Whoever has the most relayed pairs goes first, equals together: behind a symmetric NAT that is every other private
    node, behind a better one only those. A pair is relayed where both say so: nobody can take another's part away by a
    claim.
    """
    pairs = {
        (a, b)
        for a, ready in readies.items()
        for b in ready.relayed
        if a < b and b in readies and a in readies[b].relayed
    }
    out: set[PeerId] = set()
    while pairs:
        count = Counter(end for pair in pairs for end in pair)
        most = max(count.values())
        out |= {peer for peer, n in count.items() if n == most}
        pairs = {(a, b) for a, b in pairs if a not in out and b not in out}
    return frozenset(out)


def next_window(readies: Iterable[Ready], *, floor: float, present: float, elapsed: float) -> float:
    """Seconds for the next round's training, from how long this one's took the median member.

    Nobody trained longer than the round has lasted (`elapsed`), whatever it says; where nobody did, the `present`
    window stays.
    """
    worked = [min(r.train_seconds, elapsed) for r in readies if r.samples > 0]
    if not worked:
        return present
    return min(max(WINDOW_SLACK * median(worked), floor), LONGEST_WINDOW)


def _median_rate(peer: PeerId, readies: Mapping[PeerId, Ready]) -> float | None:
    """What the others measured when they fetched from `peer`; what it says of itself does not count."""
    measured = [r.rates[peer] for p, r in readies.items() if p != peer and r.rates.get(peer, 0.0) > 0]
    return median(measured) if measured else None
