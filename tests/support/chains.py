"""Rounds of an open chain by hand: statements with the ids that real records would have, and chains of many rounds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from swarmnode.crdt.kinds import KINDS, kind_of
from swarmnode.crdt.record import Record
from swarmnode.protocols.chain.forks import Block, empty_block
from swarmnode.protocols.chain.rules import Quoted, advance, compose, derive
from swarmnode.protocols.chain.state import (
    ChainRules,
    ChainState,
    HashChain,
    genesis,
    judges,
    leaders,
    places_of,
    quorum,
    rules_of,
)
from swarmnode.protocols.chain.statements import (
    FULL_STANDING,
    JUDGED,
    PREFIX,
    AvailabilityVote,
    Commit,
    Reveal,
    Roster,
    Said,
    Score,
    Scores,
    binding_of,
    nonce_hash,
)
from swarmnode.training.sections import TrustSection

RUN = "ab" * 32
STATE = bytes(32)  # state hash of every round: nothing here has parameters
RULES = rules_of(TrustSection())
WINDOW = 60_000


@cache
def chain_of(author: str) -> HashChain:
    return HashChain(author.encode())


def hashed(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


def record_of(author: str, what: Any, hlc: int = 0) -> Record:
    return Record(1, RUN, author, what.key, hlc, KINDS[kind_of(what.key)].ttl, what.value, bytes(64))


def say(author: str, what: Any, hlc: int = 0) -> Said[Any]:
    return Said(author, record_of(author, what, hlc).id, what)


def start(validators: Iterable[str]) -> ChainState:
    return genesis(RUN, tuple(validators), window=WINDOW)


@dataclass(frozen=True)
class Offer:
    """A contribution with its commit and reveal. Gains in micro-bits per byte, as all judges measure it."""

    commit: Said[Commit]
    reveal: Reveal
    norm: float = 1.0
    gain: int = 1000

    @property
    def id(self) -> bytes:
        return self.commit.id


def offer(
    chain: ChainState,
    author: str,
    *,
    root: bytes | None = None,
    salt: bytes = bytes(16),
    norm: float = 1.0,
    gain: int = 1000,
) -> Offer:
    root = root if root is not None else hashed("root", author, chain.round)
    binding = binding_of(RUN, chain.round, author, chain.tip, salt, root)
    commit = say(author, Commit(chain.round, chain.tip, binding, chain_of(author).anchor))
    return Offer(commit, Reveal(chain.round, chain.tip, commit.id, salt, root), norm, gain)


def nonce_of(chain: ChainState, judge: str) -> bytes:
    return hashed("nonce", judge, chain.tip)


def cut(
    chain: ChainState,
    judge: str,
    commits: Iterable[bytes],
    *,
    window: int = WINDOW,
    absent: Iterable[str] = (),
    disproved: Iterable[str] = (),
) -> Said[AvailabilityVote]:
    """`absent`: judges of the round before whom this one missed; `disproved`: whose scores of it were false."""
    listed, nonce = tuple(sorted(commits)), nonce_hash(nonce_of(chain, judge))
    false = tuple((place, max(0, chain.round - 1)) for place in places_of(chain, disproved))
    return say(judge, AvailabilityVote(chain.round, chain.tip, listed, nonce, window, places_of(chain, absent), false))


def row(id: bytes, gain: int, *, found: int = JUDGED, standing: int = FULL_STANDING) -> Score:
    return Score(id[:PREFIX], found, gain, standing)


def scores(chain: ChainState, judge: str, rows: Iterable[Score], *, undo: int | None = 0) -> Said[Scores]:
    ordered = tuple(sorted(rows, key=lambda one: one.commit))
    return say(judge, Scores(chain.round, chain.tip, nonce_of(chain, judge), bytes(16), undo, ordered))


def quote(cuts: Sequence[Said[AvailabilityVote]], scored: Sequence[Said[Scores]], offers: Iterable[Offer]) -> Quoted:
    offers = tuple(offers)
    return Quoted(
        tuple(cuts),
        tuple(scored),
        {one.id: one.commit for one in offers},
        {one.id: one.reveal for one in offers},
        {one.id: one.norm for one in offers},
    )


def fair(
    chain: ChainState,
    offers: Sequence[Offer],
    *,
    silent: Iterable[str] = (),
    absent: Iterable[str] = (),
    undo: int | None = 0,
    gains: Callable[[str, Offer], int] = lambda judge, one: one.gain,
) -> Quoted:
    """What honest judges make of these offers, but for those who are silent; they missed those who are `absent`."""
    absent = frozenset(absent)
    present = [judge for judge in judges(chain) if judge not in set(silent)]
    return quote(
        [cut(chain, judge, (one.id for one in offers), absent=absent) for judge in present],
        [scores(chain, judge, [row(one.id, gains(judge, one)) for one in offers], undo=undo) for judge in present],
        offers,
    )


def lead(
    chain: ChainState, rules: ChainRules, quoted: Quoted, *, attempt: int = 0, preimage: bytes | None = None
) -> Said[Roster]:
    leader = leaders(chain)[attempt]
    if preimage is None:
        preimage = chain_of(leader).preimage(chain.anchors[leader]) if leader in chain.anchors else b""
    derived = derive(chain, rules, quoted)
    return say(leader, compose(chain, quoted, derived, attempt=attempt, preimage=preimage, state=STATE))


def block(chain: ChainState, rules: ChainRules, quoted: Quoted, *, attempt: int = 0) -> Block:
    roster = lead(chain, rules, quoted, attempt=attempt)
    return Block(roster.id, chain.tip, advance(chain, rules, roster, quoted, derive(chain, rules, quoted)), roster.what)


def after_rounds(
    chain: ChainState,
    rules: ChainRules,
    rounds: int,
    authors: Iterable[str],
    *,
    silent: Iterable[str] = (),
    gains: Mapping[str, int] | None = None,
) -> ChainState:
    """The chain after so many rounds, in which these authors contribute and whoever is silent neither cuts nor scores.

    From the second of them on the others say so. Rounds end empty where too few judges are left.
    """
    authors, silent = tuple(authors), frozenset(silent)
    for number in range(rounds):
        present = [judge for judge in judges(chain) if judge not in silent]
        if len(present) < quorum(chain):
            chain = empty_block(chain).chain
            continue
        offers = [offer(chain, author, gain=(gains or {}).get(author, 1000)) for author in authors]
        attempt = next(a for a, leader in enumerate((*leaders(chain), "")) if leader not in silent)
        if attempt == len(leaders(chain)):
            chain = empty_block(chain).chain
        else:
            quoted = fair(chain, offers, silent=silent, absent=silent if number else ())
            chain = block(chain, rules, quoted, attempt=attempt).chain
    return chain
