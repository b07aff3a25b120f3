"""Whether a roster is one that its leader may have made, and the chain after it.

A roster is valid for a chain or it is not, whatever the clock says and whoever asks: `check` needs only what the roster
quotes. That all nodes which hold the same things agree about it is what the open round rests on.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from swarmnode.protocols.chain.beacon import step
from swarmnode.protocols.chain.chainstate import EVERYBODY, ChainRules, ChainState
from swarmnode.protocols.chain.derive import Quoted, derive
from swarmnode.protocols.chain.electorate import (
    SMALL,
    SUCCESSION,
    judges,
    leaders,
    majority,
    next_participation,
    quorum,
    successors,
)
from swarmnode.protocols.chain.seats import next_silent, reseated
from swarmnode.protocols.chain.statements import Roster, Said, nonce_hash


class InvalidRoster(ValueError):
    """A roster that breaks a rule of the chain. The message says which."""


def empty_id(chain: ChainState) -> bytes:
    """The id of the empty roster of this round, which everyone derives alike."""
    return empty_id_after(chain.round, chain.tip)


def empty_id_after(round: int, parent: bytes) -> bytes:
    """The id of the empty roster that ends `round` after `parent`."""
    return hashlib.sha256(b"swarmnode/empty/1\0" + round.to_bytes(8, "big") + parent).digest()


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
    check_quotes(chain, rules, roster, quoted)
    if made.state != state or made.chain != chain.digest:
        raise InvalidRoster("its leader derived another state from the same chain")
    derived = derive(chain, rules, quoted)
    if (derived.entries, derived.total, derived.revert, derived.window) != (
        made.entries,
        made.total,
        made.revert,
        made.window,
    ):
        raise InvalidRoster("its entries are not what the quoted cuts and scores make of the round")


def check_quotes(chain: ChainState, rules: ChainRules, roster: Said[Roster], quoted: Quoted) -> None:
    """Raises InvalidRoster unless a roster builds on this chain, is its leader's, and quotes enough of the judges."""
    made = roster.what
    if (made.round, made.parent) != (chain.round, chain.tip):
        raise InvalidRoster("it does not build on this chain")
    order = leaders(chain, rules)
    if made.attempt >= len(order) or order[made.attempt] != roster.author:
        raise InvalidRoster(f"attempt {made.attempt} belongs to another leader")
    _check_preimage(chain, roster.author, made.preimage)
    _check_quotes(chain, rules, made, quoted)


def advance(chain: ChainState, rules: ChainRules, id: bytes, roster: Roster, quoted: Quoted) -> ChainState:
    """The chain after a valid roster with this id. Raises NotHeld where `check` would."""
    derived = derive(chain, rules, quoted)
    worked = derived.worked
    before = chain.history[:-1] if roster.revert else chain.history  # what was undone earned nobody anything …
    norms = chain.norms[:-1] if roster.revert else chain.norms  # … and says nothing of how far steps go
    if roster.accepted:
        norms = (*norms, derived.norm)[-rules.norms :]
    anchors = dict(chain.anchors)
    if roster.preimage:
        anchors[leaders(chain, rules)[roster.attempt]] = roster.preimage
    authors = [quoted.commits[entry.commit].author for entry in roster.entries]
    for author, entry in zip(authors, roster.entries, strict=True):
        anchors.setdefault(author, quoted.commits[entry.commit].what.anchor)
    strangers = [author for author in authors if author not in chain.electors]
    after = replace(
        chain,
        round=chain.round + 1,
        tip=id,
        seed=_next_seed(chain, roster.preimage),
        made=chain.made + 1,
        history=(*before, worked)[-rules.remembered :],
        participation=next_participation(chain, rules, strangers),
        empties=0 if len(roster.scores) >= majority(chain, rules) else chain.empties,
        reverted=chain.round if roster.revert else chain.reverted,
        undoable=bool(roster.accepted),
        window=roster.window,
        norms=norms,
    )
    after = reseated(replace(after, silent=next_silent(chain, rules, quoted.cuts)), rules)
    known = {one.author for worked in after.history for one in worked}.union(after.electors)
    return replace(after, anchors={author: anchors[author] for author in sorted(known) if author in anchors})


def advance_empty(chain: ChainState) -> ChainState:
    """The chain after a round that ended empty: nobody loses its place, and work and window stay."""
    forsaken = chain.empties + 1 >= SUCCESSION
    electors = successors(chain) if forsaken else chain.electors
    return replace(
        chain,
        round=chain.round + 1,
        tip=empty_id(chain),
        seed=_next_seed(chain, b""),
        electors=electors,
        seats=max(chain.seats, len(electors)),
        participation=min(EVERYBODY, 2 * chain.participation),
        empties=0 if forsaken else chain.empties + 1,
        undoable=False,
    )


def _next_seed(chain: ChainState, preimage: bytes) -> bytes:
    return hashlib.sha256(b"swarmnode/seed/1\0" + chain.seed + preimage).digest()


def _check_preimage(chain: ChainState, leader: str, offered: bytes) -> None:
    """A leader that registered an anchor gives the next preimage, or another leads: else it chose between two seeds.

    Below SMALL electors it may give none, so that who has used up its chain does not end a run that it leads alone.
    """
    anchor = chain.anchors.get(leader)
    if offered:
        if anchor is None or step(offered) != anchor:
            raise InvalidRoster("its preimage is not the next one of the leader's hash chain")
    elif anchor is not None and len(chain.electors) >= SMALL:
        raise InvalidRoster("its leader withholds the next value of its hash chain")


def _check_quotes(chain: ChainState, rules: ChainRules, made: Roster, quoted: Quoted) -> None:
    needed, may_judge = quorum(chain, rules), set(judges(chain, rules))
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
