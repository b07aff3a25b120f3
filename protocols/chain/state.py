"""What follows from a chain of rosters, as far as later rounds need it; and who may do what in the next round.

`ChainState` is a fold: `rules.advance` makes the next one. Its `digest` is in every roster that builds on it, so
whoever trusts a roster can take the state from anybody. The rest are pure functions of it.

**Who takes part** (docs/architecture.md has the reasons).

- Validators change with every EARN_WINDOW-th roster: who has accepted work in EARN_ROUNDS of EARN_WINDOW rosters,
  the last EARN_LAG left out, becomes one; who delivered work in as many, accepted or refused as harmful, stays one.
  They grow by at most GROWTH (at least one), by most accepted work first, to no more than VALIDATORS_SHARE of the
  participants; at most half of them lapse at a time, those with the least work. Genesis validators stay during the
  first GENESIS_EPOCHS without work.
- Judges: all validators, up to COMMITTEE of them; above, as many drawn by the seed. It also orders the leaders, of
  whom those that were missed lately come last.
- A quorum is a majority of the judges, halved after PATIENCE empty rosters in a row, and again with each further one,
  until a roster quotes a majority. After SUCCESSION of them those whose work the remembered rosters accepted become
  validators as well.
- Participants: all validators, and of the others a sample that lasts from one change of the validator set to the next.
  Its rate follows what the rosters list. While nothing is known of that, those who are no validators hold back by the
  number of members that they see.

Who leaves the validator set between its changes, and who takes the seat: docs/architecture.md has that too. Every cut
names the judges of the round before of whom its author holds no cut.

**Who loses the place for lies.** A validator whom the cuts of a majority of all judges name for false scores
(`methods/open/recheck.py`) is none any more, and what it earned is forgotten; for EARN_WINDOW rosters it cannot come
back. That majority does not shrink with empty rosters, and nobody is removed of the last SMALL.

**From what seeds are drawn.** An author draws a secret, hashes it LENGTH times and registers the end, its *anchor*, in
every commit. Whenever it leads a round it gives the next preimage. Nobody can predict it, everybody can check it, and
the leader's only choice is to withhold it, by making no roster: one bit.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from swarmnode.crdt import encoding
from swarmnode.crdt.encoding import EncodingError, Value
from swarmnode.crdt.record import MAX_AUTHOR
from swarmnode.protocols.chain.statements import HASH, MAX_JUDGES, MAX_ROUND, MAX_VALIDATORS, AvailabilityVote, Said
from swarmnode.protocols.wire import check_range, plain
from swarmnode.training.sections import TrustSection

MILLION = 1_000_000
EVERYBODY = MILLION  # participation in millionths: all take part
LARGEST = 1 << 53  # of an integer in it
MAX_ENCODED = 1 << 20  # bytes; 22 rounds of 96 authors who all differ take 350 kB


@dataclass(frozen=True)
class ChainRules:
    """What a run's `[trust]` table says of its chain. Gains in micro-bits per byte, times in ms."""

    participants: int  # contributions a round that are aimed at
    revert_above: int  # a roster that worsened the held-out loss by more is undone
    shortest_window: int
    longest_window: int


def rules_of(trust: TrustSection) -> ChainRules:
    """The rules that a RunSpec gives its chain, in integers: they are part of what all nodes compute alike."""
    return ChainRules(
        participants=trust.participants,
        revert_above=round(trust.revert_above * MILLION),
        shortest_window=round(trust.shortest_window * 1000),
        longest_window=round(trust.longest_window * 1000),
    )


@dataclass(frozen=True)
class Worked:
    """Work of one author that one roster judged."""

    author: str
    units: int  # 1000; less where judges saw likely harm; 0 where it was refused for that


@dataclass(frozen=True)
class ChainState:
    """After `round` rounds, about to do the round of that number."""

    run_id: str
    round: int
    tip: bytes  # id of the last roster; that of the genesis before round 0
    seed: bytes  # of this round: orders leaders, draws judges
    cohort: bytes  # seed of the first round since the validator set last changed: draws participants
    validators: tuple[str, ...]  # ascending
    genesis: tuple[str, ...]  # those of them that the RunSpec names; they stay for GENESIS_EPOCHS without proof of work
    made: int  # rosters up to here that are not empty: the validator set changes with these
    history: tuple[tuple[Worked, ...], ...]  # of the last of them, oldest first
    anchors: dict[str, bytes]  # of each author who may lead: the value whose preimage is next
    participation: int  # millionths of those who are no validators that are drawn for this round
    empties: int  # empty rosters since the last that a majority of its judges scored
    reverted: int  # round of the last revert; -1: none
    undoable: bool  # whether the last roster moved the parameters, so that it can be undone
    window: int  # ms of this round's training
    norms: tuple[float, ...] = ()  # usual ones of the last rosters that accepted something, oldest first
    seats: int = 0  # validators that there may be before the validator set next changes: see `seats`
    silent: dict[str, int] = field(default_factory=dict)  # of validators missed: rosters since they were last quoted
    expelled: dict[str, int] = field(default_factory=dict)  # who was disproved lately: what `made` was then

    def encode(self) -> bytes:
        """Canonical bytes, for `decode`."""
        history = tuple(tuple((one.author, one.units) for one in worked) for worked in self.history)
        value: dict[str, Value] = vars(self) | {"history": history}
        return encoding.encode(value, max_size=MAX_ENCODED)

    @property
    def digest(self) -> bytes:
        """sha-256 over `encode`, 32 bytes."""
        return hashlib.sha256(b"swarmnode/chain/3\0" + self.encode()).digest()


def genesis(run_id: str, validators: tuple[str, ...], *, window: int) -> ChainState:
    """The chain of a run before round 0. `validators`: those of the RunSpec, at least one."""
    if not validators:
        raise ValueError("a run has at least one genesis validator")
    named = tuple(sorted(set(validators)))
    start = hashlib.sha256(b"swarmnode/genesis/1\0" + run_id.encode()).digest()  # the parent of the first roster
    seed = hashlib.sha256(b"swarmnode/genesis/seed/1\0" + start).digest()
    first = ChainState(run_id, 0, start, seed, seed, named, named, 0, (), {}, EVERYBODY, 0, -1, False, window)
    return replace(first, seats=len(named))


def decode(raw: bytes) -> ChainState:
    """The state in bytes from a peer, to be compared with a digest that is trusted. Raises ValueError."""
    try:
        value: Any = encoding.decode(raw, max_size=MAX_ENCODED // 2)  # it grows from round to round
        history = tuple(tuple(Worked(author, units) for author, units in worked) for worked in value["history"])
        state = ChainState(**{**value, "history": history})
        plain(state)  # raises WireError for a value of another type
        if state.encode() != raw or not state.validators:
            raise ValueError("it holds more, or no validators")
        for name in ("round", "made", "participation", "empties", "window", "seats"):
            check_range(name, getattr(state, name), 0, MAX_ROUND if name == "round" else LARGEST)
        bounded = [(n, LARGEST) for n in (state.reverted + 1, *state.silent.values(), *state.expelled.values())]
        bounded += [(one.units, MILLION) for worked in history for one in worked]
        for number, most in (*bounded, *((norm, 1e50) for norm in state.norms)):
            check_range("a number", number, 0, most)
        for them in (state.validators, state.genesis):
            if list(them) != sorted(set(them)) or len(them) > MAX_VALIDATORS:
                raise ValueError("its validators are in another order, or too many")
        hashes = (state.tip, state.seed, state.cohort, *state.anchors.values())
        if {*map(len, hashes)} != {HASH} or max(map(len, state.validators)) > MAX_AUTHOR:
            raise ValueError("it has a hash or a peer id of another length")
        return state
    except (EncodingError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"these bytes are no chain state: {error}") from error


# --- who takes part ---------------------------------------------------------------------------------------------------

GENESIS_EPOCHS = 2  # changes of the validator set until genesis validators need accepted work as well
ATTEMPTS = 5  # leaders of a round before it ends empty
PATIENCE = 3  # empty rosters in a row before the quorum shrinks
SUCCESSION = 6  # empty rosters in a row after which others become validators; the quorum of a committee of 33 is 1 then
SUCCESSORS = 16  # of them at most
FALL = 32  # what the participation may be divided by from one round to the next
SETTLING = 2  # rosters after a change of the validator set that do not raise it: who is drawn anew catches up first
ROOM_AT_FIRST = 2  # times the contributions aimed at are let in while nothing is known: members seen may be gone
SMALL = 4  # validators; below, nothing is promised against liars
VALIDATORS_SHARE = 750_000  # millionths of the participants that validators may grow to
EARN_ROUNDS = 8  # of EARN_WINDOW rosters with accepted work make a validator
EARN_WINDOW = 16  # rosters looked at, and from one change of the validator set to the next
EARN_LAG = 6  # the last rosters, which do not count yet
REMEMBERED = EARN_WINDOW + EARN_LAG  # rosters that a ChainState remembers
GROWTH = 125_000  # millionths by which the validators may grow at a change; one may always come
COMMITTEE = 33  # judges of a round, where there are more validators


def judges(chain: ChainState) -> tuple[str, ...]:
    if len(chain.validators) <= COMMITTEE:
        return chain.validators
    return tuple(sorted(_drawn(chain.seed, "judge", chain.validators)[:COMMITTEE]))


def leaders(chain: ChainState) -> tuple[str, ...]:
    """Who leads: attempt a belongs to the a-th. After the last one the round is empty."""
    order = _drawn(chain.seed, "lead", judges(chain))
    return tuple(sorted(order, key=chain.silent.__contains__)[:ATTEMPTS])


def majority(chain: ChainState) -> int:
    return min(len(chain.validators), COMMITTEE) // 2 + 1


def quorum(chain: ChainState) -> int:
    """How many judges' cuts, and scores, a roster quotes at least."""
    return max(1, majority(chain) >> max(0, chain.empties - PATIENCE + 1))


def participates(chain: ChainState, peer: str) -> bool:
    """Whether `peer` may contribute to this round: validators, and of the others all or whom the cohort draws."""
    if chain.participation >= EVERYBODY or peer in chain.validators:
        return True
    return _is_below(chain, peer, chain.participation)


def volunteers(chain: ChainState, rules: ChainRules, peer: str, members: int) -> bool:
    """Whether an honest `peer` makes use of its right to contribute. `members`: of the swarm, as far as it sees.

    It does, but for the rounds of a run that no roster has ended yet: there everybody may contribute, and in a large
    swarm so many would that a cut has no room for them. What a liar says of members counts for nothing later on.
    """
    if not participates(chain, peer):
        return False
    if chain.made or peer in chain.validators:
        return True
    return _is_below(chain, peer, EVERYBODY * ROOM_AT_FIRST * rules.participants // max(members, 1))


def _is_below(chain: ChainState, peer: str, millionths: int) -> bool:
    """Whether the ticket of `peer` is among so many millionths of all tickets, the lowest."""
    return int.from_bytes(ticket(chain, peer)[:8], "big") * EVERYBODY < millionths << 64


def ticket(chain: ChainState, peer: str) -> bytes:
    """Orders those who are no validators, where not all may contribute: the lowest first."""
    return _ticket(chain.cohort, "work", peer)


def next_participation(chain: ChainState, rules: ChainRules, strangers: Iterable[str]) -> int:
    """Millionths for the next round: what would have made the aim, at most doubled or divided by FALL.

    Those whom a change of the validator set draws are not there at once: its first rosters say nothing of too few.
    `strangers`: authors of the contributions that this round's roster lists, who are no validators. Where they are too
    many, those stay whose tickets are the lowest, so many as there is room for. Judges cut by the same order: so a
    roster that lists 96 of a thousand tells how many they were by how low their tickets are.
    """
    tickets = sorted({ticket(chain, author) for author in strangers})
    room = max(rules.participants - len(chain.validators), rules.participants // 4, 1)
    if len(tickets) > room:
        wanted = int.from_bytes(tickets[room][:8], "big") * EVERYBODY >> 64
    elif chain.made >= EARN_WINDOW and chain.made % EARN_WINDOW < SETTLING:
        wanted = chain.participation
    else:
        wanted = chain.participation * room // max(len(tickets), 1)
    return min(EVERYBODY, max(wanted, chain.participation // FALL, 1), 2 * chain.participation)


def next_validators(chain: ChainState, rules: ChainRules) -> tuple[str, ...]:
    """The validators after `chain.made` rosters, with the last of which they change."""
    delivered, _, work = _earned(chain)
    proven = {author for author, count in delivered.items() if count >= EARN_ROUNDS}
    lapsed = sorted(
        set(chain.validators) - proven - _named(chain), key=lambda peer: (delivered[peer], work[peer], peer)
    )
    stay = set(chain.validators).difference(lapsed[: len(chain.validators) // 2])
    new = candidates(chain)
    room = min(max(1, len(chain.validators) * GROWTH // MILLION), most_validators(rules) - len(stay))
    return tuple(sorted(stay.union(new[: max(0, room)])))


def most_validators(rules: ChainRules) -> int:
    return max(1, rules.participants * VALIDATORS_SHARE // MILLION)


def candidates(chain: ChainState) -> list[str]:
    """Who has a right to a place and none, and is in the last roster, so is there: most audited work first.

    That are those who earned it and, before all others while they need no proof, the genesis validators.
    """
    _, rosters, work = _earned(chain)
    there = {one.author for one in chain.history[-1]} if chain.history else set()
    named = _named(chain)
    proven = {author for author in there if author in named or rosters[author] >= EARN_ROUNDS}
    new = proven.difference(chain.validators, chain.expelled)
    return sorted(new, key=lambda one: (one not in named, -work[one], one))


def _named(chain: ChainState) -> set[str]:
    """The genesis validators, while they need no proof of work."""
    return set(chain.genesis) if chain.made < GENESIS_EPOCHS * EARN_WINDOW else set()


def _earned(chain: ChainState) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """As `_tally`, of those of the last rosters that count by now."""
    return _tally(chain.history[: max(0, len(chain.history) - EARN_LAG)][-EARN_WINDOW:])


def _tally(history: Iterable[tuple[Worked, ...]]) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Rosters that judged work, that accepted it, and units of it, by author."""
    delivered, accepted, work = Counter[str](), Counter[str](), Counter[str]()
    for worked in history:
        for one in worked:
            delivered[one.author] += 1
            accepted[one.author] += one.units > 0
            work[one.author] += one.units
    return delivered, accepted, work


def successors(chain: ChainState) -> tuple[str, ...]:
    """The validators where those of `chain` are silent for good: with them, who did most of the remembered work."""
    _, rosters, work = _tally(chain.history)
    others = sorted(
        set(+rosters).difference(chain.validators, chain.expelled), key=lambda peer: (-rosters[peer], -work[peer], peer)
    )
    return tuple(sorted({*chain.validators, *others[:SUCCESSORS]}))


@lru_cache(256)  # asked for many times in each round
def _drawn(seed: bytes, purpose: str, peers: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(peers, key=lambda peer: _ticket(seed, purpose, peer)))


@lru_cache(1 << 14)  # asked for every peer of a round again and again
def _ticket(seed: bytes, purpose: str, peer: str) -> bytes:
    return hashlib.sha256(seed + purpose.encode() + b"\0" + peer.encode()).digest()


# --- seats ------------------------------------------------------------------------------------------------------------

SILENCE = 2  # rosters in which a quorum missed a validator, after which it is none


def places_of(chain: ChainState, peers: Iterable[str]) -> tuple[int, ...]:
    """Where these are among the validators of a round, ascending, but for those who are none any more.

    As in `AvailabilityVote.absent`.
    """
    wanted = set(peers)
    return tuple(place for place, validator in enumerate(chain.validators) if validator in wanted)[:MAX_JUDGES]


def next_silent(chain: ChainState, cuts: Iterable[Said[AvailabilityVote]]) -> dict[str, int]:
    """`ChainState.silent` after a roster that quotes these cuts of judges, one of each."""
    named, quoted = Counter[str](), set[str]()
    for cut in cuts:
        quoted.add(cut.author)
        named.update(chain.validators[place] for place in cut.what.absent if place < len(chain.validators))
    missed = {validator for validator, count in named.items() if count >= quorum(chain)}
    silent = {validator: chain.silent.get(validator, 0) + (validator in missed) for validator in chain.validators}
    return {validator: count for validator, count in silent.items() if count and validator not in quoted}


def disproved(chain: ChainState, cuts: Iterable[Said[AvailabilityVote]]) -> set[str]:
    """Validators whose figures a majority of all judges found false, by these cuts of judges, one of each."""
    named = Counter(place for cut in cuts for place in {place for place, _ in cut.what.disproved})
    return {
        chain.validators[place] for place in named if named[place] >= majority(chain) and place < len(chain.validators)
    }


def without(chain: ChainState, liars: Iterable[str]) -> ChainState:
    """The chain without these validators, down to SMALL, and without what they earned, after a roster."""
    gone = sorted(liars)[: max(0, len(chain.validators) - SMALL)]
    lately = {peer: made for peer, made in chain.expelled.items() if chain.made - made < EARN_WINDOW}
    return replace(
        chain,
        validators=tuple(validator for validator in chain.validators if validator not in gone),
        history=tuple(tuple(one for one in worked if one.author not in gone) for worked in chain.history),
        expelled=lately | dict.fromkeys(gone, chain.made),
    )


def reseated(chain: ChainState, rules: ChainRules) -> ChainState:
    """The chain with the validators of its next round, after a roster that is not empty."""
    chain = replace(chain, validators=_without_silent(chain))
    new = candidates(chain)
    if chain.made % EARN_WINDOW == 0:
        validators, cohort = next_validators(chain, rules), chain.seed
        seats = _next_seats(chain, rules, len(validators), len(set(new).difference(validators)))
    else:
        room = min(chain.seats - len(chain.validators), -(-len(chain.validators) * GROWTH // MILLION))
        validators = tuple(sorted({*chain.validators, *new[: max(0, room)]}))
        cohort, seats = chain.cohort, chain.seats
    silent = {validator: count for validator, count in chain.silent.items() if validator in validators}
    return replace(chain, validators=validators, cohort=cohort, seats=seats, silent=silent)


def _next_seats(chain: ChainState, rules: ChainRules, validators: int, waiting: int) -> int:
    """Seats after a change to so many validators, where so many more have earned a place."""
    share = max(1, chain.seats * GROWTH // MILLION)
    if waiting > chain.seats - validators:
        return max(validators, min(chain.seats + share, most_validators(rules)))
    return max(validators, chain.seats - share)


def _without_silent(chain: ChainState) -> tuple[str, ...]:
    """The validators but for those who have been silent, the longest first, down to SMALL."""
    gone = [validator for validator in chain.validators if chain.silent.get(validator, 0) >= SILENCE]
    gone.sort(key=lambda validator: (-chain.silent[validator], validator))
    left = set(gone[: max(0, len(chain.validators) - SMALL)])
    return tuple(validator for validator in chain.validators if validator not in left)


# --- seeds ------------------------------------------------------------------------------------------------------------

LENGTH = 1 << 18  # rosters that one author can lead in a run: four do a million rounds, of 16 s in half a year


def step(value: bytes) -> bytes:
    """The value that `value` is the preimage of."""
    return hashlib.sha256(b"swarmnode/beacon/1\0" + value).digest()


class HashChain:
    """One author's chain, derived from 32 secret bytes: 8 MiB; making it hashes LENGTH times, some 0.2 s."""

    def __init__(self, secret: bytes) -> None:
        values = [hashlib.sha256(b"swarmnode/beacon/secret/1\0" + secret).digest()]
        for _ in range(LENGTH):
            values.append(step(values[-1]))
        self.anchor = values[-1]
        self._values = b"".join(values)

    def preimage(self, value: bytes) -> bytes:
        """What hashes to `value`, a value of this chain; empty where there is none before it, or it is of another."""
        place = self._values.find(value)
        return self._values[place - HASH : place] if place >= HASH else b""
