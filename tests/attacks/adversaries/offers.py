"""What a node can offer through the real protocol of the open round that is no honest contribution.

The node is a real one of which a part was replaced. Each is LIAR, one of the validators.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from typing import Any, ClassVar

import trio
from harness import Adversary
from openswarm import Scene
from undefended import (
    BELIEVED_AUTHOR,
    NO_DEADLINES,
    ONE_JUDGES_WORD,
    REVEALED_AT_ONCE,
    UNBOUND,
    UNCHECKED_BYTES,
    Lacking,
)

from swarmnode.protocols.chain.statements import SALT, Commit, Reveal, binding_of
from swarmnode.protocols.methods.open.store import Contribution, id_of

LIAR = "c"
ROUNDS = 7


class OfferAdversary(Adversary):
    """Misbehaves for `ROUNDS` rounds as one node."""

    copied = ""  # name of the node whose work it copies
    lacks: ClassVar[Lacking]  # what the undefended nodes beside it have not

    def undefended(self) -> OfferAdversary:
        """What does the same to nodes that lack this."""
        return self

    async def attack(self, target: Scene) -> None:
        target.bad.add(LIAR)
        self.change(target)
        await target.done(self.times(ROUNDS, 3))

    def change(self, target: Scene) -> None:
        """Replace what the liar does otherwise than an honest node."""
        raise NotImplementedError


class Malformed(OfferAdversary):
    """In every round bytes of another kind that no encoder makes, under a commit and a reveal that are in order."""

    name = "NaN, infinity, wrong shape, wrong dtype, indices out of range, oversize, a decompression bomb"
    lacks = UNCHECKED_BYTES
    hides = True  # to itself the bytes are malformed as well

    def undefended(self) -> OfferAdversary:
        open_minded = Malformed()
        open_minded.hides = False
        return open_minded

    def change(self, target: Scene) -> None:
        method, made = target.method(LIAR), [0]
        contributions, size = method.contributions, method.contributions.size
        honest = method.local.contribute

        async def contribute(parent: bytes, round: int) -> bytes | None:
            encoded = await honest(parent, round)
            made[0] += 1
            return None if encoded is None else bad(encoded, size, made[0] % 7)

        async def keep(raw: bytes, round: int) -> bytes:
            if self.hides:
                contributions._malformed[id_of(raw)] = None
            else:
                contributions._held[id_of(raw)] = Contribution(raw, 1.0, round)
            contributions.offer(id_of(raw), raw)
            return id_of(raw)

        method.local.contribute = contribute  # type: ignore[method-assign]
        contributions.keep = keep  # type: ignore[method-assign]


def bad(encoded: bytes, size: int, kind: int) -> bytes:
    """Bytes of one kind that no encoder of `topk` makes."""
    return (
        struct.pack("<HH", 0x7FC0, 0x7FC0) + encoded[4:],  # levels are NaN
        struct.pack("<HH", 0x3F80, 0x7F80) + encoded[4:],  # the greater level is infinite
        encoded[:-1],  # of a smaller vector
        struct.pack("<f", 1.0) * (1 + size // 4),  # float32
        encoded[:4] + b"\xff" * (size - 4),  # every place is beyond the vector
        bytes(64 << 20),
        zlib.compress(bytes(8 << 20)),
    )[kind]


class CopiedCommit(OfferAdversary):
    name = "copying another's commit, then its reveal"
    lacks = UNBOUND
    copied = "b"

    def change(self, target: Scene) -> None:
        held = target.method(LIAR).store

        async def say(usual: Any, statement: Any) -> Any:
            theirs = held.log.own_commit(target.peer(self.copied))
            if isinstance(statement, Commit) and theirs is not None:
                statement = replace(statement, binding=theirs.what.binding)
            if isinstance(statement, Reveal) and theirs is not None:
                with trio.move_on_after(2.0):
                    await held.until(lambda: theirs.id in held.log.reveals)
                    opened = held.log.reveals[theirs.id].what
                    statement = replace(statement, salt=opened.salt, root=opened.root)
            return await usual(statement)

        target.change_words(LIAR, say)


class CopiedReveal(OfferAdversary):
    """Commits, when its victim's contribution is revealed, to the same, and reveals it as its own."""

    name = "copying a contribution after it was revealed"
    lacks = REVEALED_AT_ONCE
    copied = "b"

    def change(self, target: Scene) -> None:
        method, victim = target.method(LIAR), target.peer(self.copied)

        async def commit(turn: Any) -> None:
            turn.ready = False
            assert method.sync._nursery is not None
            method.sync._nursery.start_soon(copy, turn)

        async def copy(turn: Any) -> None:
            book = turn.log
            await method.store.until(lambda: any(s.author == victim for s in book.reveals.values()))
            theirs = book.own_commit(victim)
            root, salt, chain = book.reveals[theirs.id].what.root, bytes(SALT), turn.chain
            binding = binding_of(chain.run_id, chain.round, target.peer(LIAR), chain.tip, salt, root)
            said = await method.signer.publish(Commit(chain.round, chain.tip, binding, method.signer.beacon.anchor))
            if said is not None:
                await method.signer.publish(Reveal(chain.round, chain.tip, said.id, salt, root))

        method.rounds.commit = commit  # type: ignore[method-assign]


class RevealedToSome(OfferAdversary):
    name = "revealing to one peer only"
    lacks = ONE_JUDGES_WORD

    def change(self, target: Scene) -> None:
        contributions = target.method(LIAR).contributions
        chosen = frozenset({target.peer("d")})

        def serve(id: bytes) -> None:
            if id in contributions:
                contributions._bulk.offer(contributions._key(id), contributions[id].raw, to=chosen)

        contributions.serve = serve  # type: ignore[method-assign]


class Withheld(OfferAdversary):
    name = "withholding what was committed and revealed"
    lacks = BELIEVED_AUTHOR

    def change(self, target: Scene) -> None:
        target.method(LIAR).contributions.serve = lambda id: None  # type: ignore[method-assign]


class NeverRevealed(OfferAdversary):
    name = "committing without a reveal"
    lacks = NO_DEADLINES

    def change(self, target: Scene) -> None:
        async def say(usual: Any, statement: Any) -> Any:
            return None if isinstance(statement, Reveal) else await usual(statement)

        target.change_words(LIAR, say)


def everyone() -> list[OfferAdversary]:
    """A new adversary of every kind."""
    return [Malformed(), CopiedCommit(), CopiedReveal(), RevealedToSome(), Withheld(), NeverRevealed()]
