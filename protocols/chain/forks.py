"""The tree of valid rosters, and which of them to follow (docs/architecture.md, "The open round").

From the oldest roster that is kept, follow at each fork the child under which the middle one of the heads of the
validator set *at the fork* lies, in the order of attempts: where more than half lie under one, that one. Heads are what
validators signed last, so a node that hears what the others heard goes where the others go. Heads are moved, so a node
waits until all are under one, or most are locked on it (`Tree.is_decided`), as is who sees most under it. Where no head
lies, empty rosters are looked through for heads of who may have become validators after them (`state.successors`).

Whether a history goes back to a roster that a newcomer trusts: it takes the `ChainState` before that from anybody, as
the roster has its digest, and folds what follows (`trusted_chain`, `light_after`), up to a member's base. That checks
all but clip factors and state hashes, which rest on the bytes of contributions (`ChainState.norms` is empty here), and
proves that most validators took part in each round, but for `is_shrunken` ones, as in a forgery of one validator.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from swarmnode.protocols.chain.rules import (
    InvalidRoster,
    Quoted,
    advance,
    advance_empty,
    check_derived,
    check_quotes,
    derive,
    empty_id,
    empty_id_after,
)
from swarmnode.protocols.chain.state import ChainRules, ChainState, decode, majority, quorum
from swarmnode.protocols.chain.statements import ForkChoiceVote, Roster, Said

DEPTH = 64  # rounds kept: a fork that is older is a split, which people decide


@dataclass(frozen=True)
class Block:
    """A valid roster, or an empty one, with the chain after it."""

    id: bytes
    parent: bytes
    chain: ChainState
    roster: Roster | None  # None: empty, or the root


@dataclass(frozen=True)
class TrustedRoster:
    """A roster that a newcomer trusts, as join strings give it: ROUND:ID, the id in hex."""

    round: int  # that it ended, from 0
    id: bytes

    def __str__(self) -> str:
        return f"{self.round}:{self.id.hex()}"

    @classmethod
    def parse(cls, text: str) -> TrustedRoster:
        """Raises ValueError."""
        told = re.fullmatch("([0-9]{1,8}):([0-9A-Fa-f]{64})", text)
        if told is None:
            raise ValueError(f"{text!r} is not ROUND:ID, a number and 64 hex digits, as swarmnode id --join prints it")
        return cls(int(told[1]), bytes.fromhex(told[2]))


def settled(path: list[Block], rounds: int) -> TrustedRoster | None:
    """The newest roster of a node's chain that is not empty and has as many rounds on it; None where there is none."""
    old = [block for block in path[: max(0, len(path) - rounds)] if block.roster is not None]
    return TrustedRoster(old[-1].chain.round - 1, old[-1].id) if old else None


def empty_block(chain: ChainState) -> Block:
    """The empty roster that may end the round after `chain.tip`."""
    after = advance_empty(chain)
    return Block(after.tip, chain.tip, after, None)


class Tree:
    """Valid rosters of the last rounds. The root is where this node began to follow the chain, or DEPTH rounds back."""

    def __init__(self, root: ChainState) -> None:
        self.root = root.tip
        self._blocks = {root.tip: Block(root.tip, b"", root, None)}
        self._ways: dict[bytes, tuple[bytes, ...]] = {root.tip: (root.tip,)}  # from the root to each block

    def __contains__(self, id: bytes) -> bool:
        return id in self._blocks

    def __getitem__(self, id: bytes) -> Block:
        return self._blocks[id]

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, block: Block) -> None:
        """Take in a block whose parent is here; again is no harm. Raises KeyError where its parent is not."""
        if block.id not in self._blocks:
            self._ways[block.id] = (*self._ways[block.parent], block.id)
            self._blocks[block.id] = block

    def add_empties(self, head: ForkChoiceVote) -> bool:
        """Whether the roster of a head is here, after adding the empty ones that may lead to it from a block that is.

        A validator that went through several empty rounds names only the last of their rosters.
        """
        if head.roster in self._blocks:
            return True
        for block in tuple(self._blocks.values()):
            id, rounds = block.id, range(block.chain.round, min(head.round, block.chain.round + DEPTH))
            for round in rounds:
                id = empty_id_after(round, id)
            if rounds and id == head.roster:
                for _ in rounds:
                    block = empty_block(block.chain)
                    self.add(block)
                return True
        return False

    def children(self, id: bytes) -> tuple[bytes, ...]:
        """The rosters that build on this one, by attempt, the empty one last."""
        found = [block.id for block in self._blocks.values() if block.parent == id]
        return tuple(sorted(found, key=self._order) if len(found) > 1 else found)

    def best(self, heads: Mapping[str, bytes]) -> bytes:
        """The id of the roster to follow, given what each validator follows; heads that are not here do not count."""
        at = found = self.root
        for level in range(1, len(self._blocks)):  # each has a block
            if votes := self._votes(at, level, heads):
                ordered = [*votes.elements()] if len(votes) == 1 else sorted(votes.elements(), key=self._order)
                at = found = ordered[(len(ordered) - 1) // 2]
            elif (empty := empty_id(self._blocks[at].chain)) in self._blocks:
                at = empty
            else:
                break
        return found

    def support(self, id: bytes, heads: Mapping[str, bytes]) -> int:
        """How many validators of the round that made this block follow it or what builds on it."""
        way = self.ancestry(id)
        return self._votes(way[-2], len(way) - 1, heads)[id] if len(way) > 1 else 0

    def has_most(self, id: bytes, heads: Mapping[str, bytes]) -> bool:
        """Whether more than half of those validators do."""
        way = self.ancestry(id)
        return len(way) > 1 and 2 * self.support(id, heads) > len(self._blocks[way[-2]].chain.validators)

    def held(self, id: bytes, heads: Mapping[str, bytes], locked: Mapping[str, bytes]) -> dict[str, bytes]:
        """Heads on this block whose authors are locked on it, and all heads on what builds on it."""
        return {p: h for p, h in heads.items() if (locked.get(p) == id if h == id else id in self.ancestry(h))}

    def is_decided(self, id: bytes, heads: Mapping[str, bytes], locked: Mapping[str, bytes]) -> bool:
        """Whether most validators of the round that made it are locked on it, or went on from it; or all follow it, and
        none followed another before: then none has a reason to move."""
        validators = self._blocks[self._blocks[id].parent].chain.validators
        unanimous = locked.keys().isdisjoint(validators) and self.support(id, heads) == len(validators)
        return unanimous or self.has_most(id, self.held(id, heads, locked))

    def path(self, id: bytes) -> list[Block]:
        """From the root's child to the block, oldest first. Raises KeyError where it is not here."""
        return [self._blocks[one] for one in self._ways[id][1:]]

    def ancestry(self, id: bytes) -> tuple[bytes, ...]:
        """Ids from the root to this one, both included, oldest first; nothing where it is not here."""
        return self._ways.get(id, ())

    def fork_point(self, one: bytes, other: bytes) -> bytes:
        """The last roster that both build on. Raises KeyError where one is not here."""
        levels = zip(self._ways[one], self._ways[other], strict=False)
        return [mine for mine, theirs in levels if mine == theirs][-1]

    def prune(self, tip: bytes) -> None:
        """Forget what is not needed to decide forks of the last DEPTH rounds of `tip`."""
        way = self._ways[tip]
        gone = len(way) - DEPTH - 1
        if gone <= 0:
            return
        self.root = way[gone]
        self._ways = {id: way[gone:] for id, way in self._ways.items() if self.root in way}
        self._blocks = {id: block for id, block in self._blocks.items() if id in self._ways}

    def _order(self, id: bytes) -> tuple[bool, int, bytes]:
        """That of siblings: by attempt, the empty one last."""
        roster = self._blocks[id].roster
        return roster is None, roster.attempt if roster is not None else 0, id

    def _votes(self, at: bytes, level: int, heads: Mapping[str, bytes]) -> Counter[bytes]:
        """Heads of the validators at `at`, which is `level - 1` blocks above the root, under each of its children."""
        votes: Counter[bytes] = Counter()
        for validator in self._blocks[at].chain.validators:
            way = self._ways.get(heads.get(validator, b""), ())
            if len(way) > level and way[level - 1] == at:
                votes[way[level]] += 1
        return votes


def trusted_chain(trusted: TrustedRoster, said: Said[Roster], state: bytes) -> ChainState:
    """The chain before a trusted roster, from its bytes by anybody. Raises InvalidRoster where it is not that one."""
    if said.id != trusted.id or said.what.round != trusted.round:
        raise InvalidRoster("another roster than the trusted one")
    try:
        chain = decode(state)
    except ValueError as error:
        raise InvalidRoster(str(error)) from None
    if chain.digest != said.what.chain or chain.tip != said.what.parent:
        raise InvalidRoster("another history before the trusted roster than it has the digest of")
    return _light(chain)


def light_after(chain: ChainState, rules: ChainRules, roster: Said[Roster], quoted: Quoted) -> ChainState:
    """The chain after a roster, without its norms. Raises InvalidRoster, or NotHeld."""
    check_quotes(chain, roster, quoted)
    unmeasured = replace(quoted, norms=dict.fromkeys(quoted.commits, 1.0))
    derived = derive(chain, rules, unmeasured)
    told, found = (tuple(replace(entry, clip=0) for entry in one.entries) for one in (roster.what, derived))
    check_derived(replace(roster.what, entries=told), replace(derived, entries=found))
    return _light(advance(chain, rules, roster, unmeasured, derived))


def is_shrunken(chain: ChainState) -> bool:
    """Whether fewer than half of the judges may decide this round, as several rounds before it ended empty."""
    return quorum(chain) < majority(chain)


def leads_to(chain: ChainState, other: ChainState) -> bool:
    """Whether this is the chain of a member, but for the norms, which only bytes of contributions tell."""
    return chain == _light(other)


def _light(chain: ChainState) -> ChainState:
    return replace(chain, norms=())
