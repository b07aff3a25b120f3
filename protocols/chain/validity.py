"""Whether a roster is one that its leader may have made, and the chain after it.

A roster is valid for a chain or it is not, whatever the clock says and whoever asks: `check` needs only what the roster
quotes. That all nodes which hold the same things agree about it is what the open round rests on.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from swarmnode.protocols.chain.beacon import step
from swarmnode.protocols.chain.chainstate import ChainRules, ChainState, Worked
from swarmnode.protocols.chain.derive import Derived, Quoted, derive, units_of
from swarmnode.protocols.chain.electorate import HISTORY, judges, leaders, next_electors, next_participation, quorum
from swarmnode.protocols.chain.statements import Roster, Said, nonce_hash


class InvalidRoster(ValueError):
    """A roster that breaks a rule of the chain. The message says which."""


def empty_id(chain: ChainState) -> bytes:
    """The id of the empty roster of this round, which everyone derives alike."""
    return hashlib.sha256(b"swarmnode/empty/1\0" + chain.round.to_bytes(8, "big") + chain.tip).digest()


def compose(
    chain: ChainState, rules: ChainRules, quoted: Quoted, *, attempt: int, preimage: bytes, state: bytes
) -> Roster:
    """The roster that the leader of `attempt` makes of these cuts and scores. Raises NotHeld."""
    derived = derive(chain, rules, quoted)
    return Roster(
        chain.round,
        chain.tip,
        attempt,
        preimage,
        tuple(sorted(cut.id for cut in quoted.cuts)),
        tuple(sorted(scores.id for scores in quoted.scores)),
        derived.entries,
        derived.total,
        derived.revert,
        derived.window,
        state,
        chain.digest,
    )


def check(chain: ChainState, rules: ChainRules, roster: Said[Roster], quoted: Quoted, *, state: bytes) -> None:
    """Raises InvalidRoster where a rule is broken, or NotHeld where that cannot be told.

    `quoted` has exactly the cuts and scores that the roster quotes; `state` is the state hash at its parent.
    """
    made = roster.what
    if (made.round, made.parent) != (chain.round, chain.tip):
        raise InvalidRoster("it does not build on this chain")
    if made.state != state or made.chain != chain.digest:
        raise InvalidRoster("its leader derived another state from the same chain")
    order = leaders(chain)
    if made.attempt >= len(order) or order[made.attempt] != roster.author:
        raise InvalidRoster(f"attempt {made.attempt} belongs to another leader")
    if made.preimage != expected_preimage(chain, roster.author, made.preimage):
        raise InvalidRoster("its preimage is not the next one of the leader's hash chain")
    _check_quotes(chain, made, quoted)
    derived = derive(chain, rules, quoted)
    if derived != Derived(made.entries, made.total, made.revert, made.window):
        raise InvalidRoster("its entries are not what the quoted cuts and scores make of the round")


def expected_preimage(chain: ChainState, leader: str, offered: bytes) -> bytes:
    """`offered` where it is the next preimage of this leader; empty where it registered none, or has used up all."""
    anchor = chain.anchors.get(leader)
    return offered if anchor is not None and offered and step(offered) == anchor else b""


def advance(chain: ChainState, rules: ChainRules, id: bytes, roster: Roster, quoted: Quoted) -> ChainState:
    """The chain after a valid roster with this id."""
    authors = {entry.commit: quoted.commits[entry.commit].author for entry in roster.entries}
    worked = tuple(Worked(authors[entry.commit], units_of(entry.weight)) for entry in roster.accepted)
    history = (*chain.history, tuple(sorted(worked, key=lambda one: one.author)))[-HISTORY:]
    leader = leaders(chain)[roster.attempt]
    anchors = dict(chain.anchors)
    if roster.preimage:
        anchors[leader] = roster.preimage
    for entry in roster.entries:
        anchors.setdefault(authors[entry.commit], quoted.commits[entry.commit].what.anchor)
    after = replace(
        chain,
        round=chain.round + 1,
        tip=id,
        seed=_next_seed(chain, roster.preimage),
        history=history,
        participation=next_participation(chain, len(roster.entries), rules.participants),
        empties=0,
        reverted=chain.round if roster.revert else chain.reverted,
        undoable=bool(roster.accepted),
        window=roster.window,
    )
    after = replace(after, electors=next_electors(after))
    known = {one.author for worked in after.history for one in worked}.union(after.electors)
    return replace(after, anchors={author: anchors[author] for author in sorted(known) if author in anchors})


def advance_empty(chain: ChainState) -> ChainState:
    """The chain after a round that ended empty: nobody's place, work or window changes."""
    after = replace(
        chain,
        round=chain.round + 1,
        tip=empty_id(chain),
        seed=_next_seed(chain, b""),
        participation=min(1_000_000, 2 * chain.participation),
        empties=chain.empties + 1,
        undoable=False,
    )
    return replace(after, electors=next_electors(after))


def _next_seed(chain: ChainState, preimage: bytes) -> bytes:
    return hashlib.sha256(b"swarmnode/seed/1\0" + chain.seed + preimage).digest()


def _check_quotes(chain: ChainState, made: Roster, quoted: Quoted) -> None:
    needed, may_judge = quorum(chain), set(judges(chain))
    for name, ids, said in (("cuts", made.cuts, quoted.cuts), ("scores", made.scores, quoted.scores)):
        if tuple(sorted(one.id for one in said)) != ids:
            raise InvalidRoster(f"other {name} are here than it quotes")
        authors = {one.author for one in said}
        if len(authors) != len(said) or not authors <= may_judge:
            raise InvalidRoster(f"its {name} are not by different judges of the round")
        if len(said) < needed:
            raise InvalidRoster(f"it quotes {len(said)} {name}; at least {needed} are needed")
        if any((one.what.round, one.what.parent) != (chain.round, chain.tip) for one in said):
            raise InvalidRoster(f"its {name} are of another round")
    nonces = {cut.author: cut.what.nonce_hash for cut in quoted.cuts}
    for scores in quoted.scores:
        if nonces.get(scores.author) != nonce_hash(scores.what.nonce):
            raise InvalidRoster(f"{scores.author} scored without a quoted cut, or with another nonce than it said")
