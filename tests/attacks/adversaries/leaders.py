"""What the leader of a round can do: be silent, sign two rosters, leave work out, or say what the quotes do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import trio
from openswarm import Scene
from roundadversary import AFTER, RoundAdversary
from undefended import ANY_QUORUM, BELIEVED_LEADER, FIRST_SEEN, NO_DEADLINES, ONE_REVERTS

from swarmnode.protocols.chain.duty import WriteRoster
from swarmnode.protocols.chain.rules import Quoted, compose, derive
from swarmnode.protocols.chain.statements import MAX_GAIN, MISSING, PREFIX, Roster

MORE = 8  # rounds in which a minority goes on to ask for reverts


class Leader(RoundAdversary):
    """Does its worst in the first round that it leads, of whichever node that is; `again`: in all that this leads."""

    again = False
    leader = ""

    async def attack(self, target: Scene) -> None:
        self._done = trio.Event()
        self.first = target.round + 2
        for name in target.names:
            self._replace(target, name)
        with trio.fail_after(300):
            await self._done.wait()
        await target.done(AFTER)

    def _replace(self, target: Scene, name: str) -> None:
        duties = target.method(name).rounds
        usual = duties.lead

        async def lead(turn: Any, action: WriteRoster) -> None:
            over = self._done.is_set() and not (self.again and name == self.leader)
            if turn.chain.round < self.first or over or action.attempt:
                await usual(turn, action)
                return
            turn.own.led |= {action.attempt}
            if not self._done.is_set():
                self.first, self.leader = turn.chain.round, name
            target.bad.add(name)
            await self.lead(target, name, turn, action)
            self._done.set()

        duties.lead = lead  # type: ignore[method-assign]

    def made(self, target: Scene, name: str, turn: Any, quoted: Quoted, attempt: int) -> Roster:
        """The roster that an honest leader makes of these quotes."""
        method, chain = target.method(name), turn.chain
        anchor = chain.anchors.get(target.peer(name))
        preimage = method.signer.beacon.preimage(anchor) if anchor is not None else b""
        state = bytes.fromhex(method.store.hashes[chain.tip])
        derived = derive(chain, method.store.rules, quoted)
        return compose(chain, quoted, derived, attempt=attempt, preimage=preimage, state=state)

    async def lead(self, target: Scene, name: str, turn: Any, action: WriteRoster) -> None:
        raise NotImplementedError


class Silent(Leader):
    name = "a silent leader"
    lacks = NO_DEADLINES

    async def lead(self, target: Scene, name: str, turn: Any, action: WriteRoster) -> None:
        return

    async def broken(self, target: Scene) -> list[str]:
        taken = target.attempts(self.first)[0]
        return [] if taken == 1 else [f"the round ended with attempt {taken}"]

    async def achieved(self, target: Scene) -> str:
        return "another led at once" if target.attempts(self.first) else ""


class TwoRosters(Leader):
    """Both are valid: one quotes all scores, the other leaves one out. Each goes to half of the others."""

    healing = 3
    slower = 1.5  # its calls are refused from then on, so nobody waits for it
    name = "a leader signs two valid rosters"
    lacks = FIRST_SEEN

    async def lead(self, target: Scene, name: str, turn: Any, action: WriteRoster) -> None:
        fewer = replace(action.quoted, scores=action.quoted.scores[:-1])
        others = [other for other in target.names if other != name]
        for quoted, half in ((action.quoted, others[::2]), (fewer, others[1::2])):
            roster = self.made(target, name, turn, quoted, action.attempt)
            record = target.signs(name, roster.key, roster.value)
            await target.tell(name, record, *half)

    async def broken(self, target: Scene) -> list[str]:
        await trio.sleep(60.0)  # repair brings it to all
        held = await self._proved(target)
        return [] if held == len(target.honest) else [f"{held} of {len(target.honest)} hold the evidence"]

    async def _proved(self, target: Scene) -> int:
        return len([name for name in target.honest if await target.evidence(name)])

    async def achieved(self, target: Scene) -> str:
        return f"proved to {await self._proved(target)} of {len(target.honest)}"


class Omission(Leader):
    """Quotes a bare quorum, its victim and itself in it, and calls the victim's work missing: that lacks one voice."""

    name = "a leader leaves an honest peer's work out"
    lacks = ANY_QUORUM

    async def achieved(self, target: Scene) -> str:
        told = target.verdicts(self.victim, self.first)
        return f"its work counted in {told.count('accepted')} of {len(told)} rounds"

    async def lead(self, target: Scene, name: str, turn: Any, action: WriteRoster) -> None:
        me = target.peer(name)
        keep = next(score for score in action.quoted.scores if score.author == me)
        self.victim = next(other for other in target.names if other != name)
        chosen = {me, target.peer(self.victim)}
        others = [score.author for score in action.quoted.scores if score.author not in chosen]
        chosen.update(others[: len(target.names) // 2 + 1 - len(chosen)])
        scores = tuple(score for score in action.quoted.scores if score.author in chosen)
        cuts = tuple(cut for cut in action.quoted.cuts if cut.author in chosen)
        assert keep in scores
        await target.method(name).signer.publish(
            self.made(target, name, turn, replace(action.quoted, cuts=cuts, scores=scores), action.attempt)
        )

    def _replace(self, target: Scene, name: str) -> None:
        super()._replace(target, name)
        duties = target.method(name).rounds
        usual = duties.seal

        async def seal(turn: Any, scores: Any) -> None:
            over = self._done.is_set() and not (self.again and name == self.leader)
            if turn.chain.round >= self.first and not over and target.leader(name) == name:
                victim = next(other for other in target.names if other != name)
                theirs = turn.log.own_commit(target.peer(victim))
                prefix = theirs.id[:PREFIX] if theirs is not None else b""
                scores = tuple(replace(s, found=MISSING, gain=0) if s.commit == prefix else s for s in scores)
            await usual(turn, scores)

        duties.seal = seal  # type: ignore[method-assign]

    async def broken(self, target: Scene) -> list[str]:
        told = target.verdicts(self.victim, self.first)
        return [] if told[0] == "accepted" else [f"its work did not count in the round: {told}"]


class Forged(Leader):
    """Says of the round what the quotes do not: the others must pass over it, and the next leader take over."""

    lacks = BELIEVED_LEADER

    def forged(self, roster: Roster) -> Roster:
        raise NotImplementedError

    async def lead(self, target: Scene, name: str, turn: Any, action: WriteRoster) -> None:
        roster = self.made(target, name, turn, action.quoted, action.attempt)
        await target.method(name).signer.publish(self.forged(roster))

    async def broken(self, target: Scene) -> list[str]:
        taken = target.attempts(self.first)[0]
        return [] if taken == 1 else [f"the round ended with attempt {taken}"]

    async def achieved(self, target: Scene) -> str:
        taken = next(roster for roster in target.followed(self.first) if roster.round == self.first)
        return "not followed" if taken.attempt else "followed"


class WrongWeights(Forged):
    name = "a roster with a claimed weight of 1e9"

    async def achieved(self, target: Scene) -> str:
        shares = [entry.weight / one.total for one in target.followed(self.first) for entry in one.accepted]
        return f"greatest share of a step {max(shares):.1%}"

    def forged(self, roster: Roster) -> Roster:
        first = replace(roster.entries[0], verdict=0, weight=10**9, clip=1 << 20)
        return replace(roster, entries=(first, *roster.entries[1:]), total=roster.total + 10**9)


class WrongClip(Forged):
    name = "a roster with other clip factors"

    def forged(self, roster: Roster) -> Roster:
        return replace(roster, entries=tuple(replace(entry, clip=entry.clip // 2) for entry in roster.entries))


class RevertAlways(Forged):
    """A minority of the judges asks for every roster to be undone, and a leader says that it is.

    An honest judge may measure harm of an honest round; then there is a majority. What may not be is a round undone
    that no honest judge found harmful.
    """

    name = "reverting every round"
    lacks = ONE_REVERTS

    def __init__(self) -> None:
        self._harmful: set[int] = set()  # rounds in which an honest judge measured that the last one did harm

    async def attack(self, target: Scene) -> None:
        await super().attack(target)
        await target.done(MORE)

    async def achieved(self, target: Scene) -> str:
        followed = target.followed(self.first)
        undone = [roster.round for roster in followed if roster.revert]
        unfounded = len(set(undone) - self._harmful)
        return f"{len(undone)} of {len(followed)} rosters go back, {unfounded} of them without an honest judge"

    async def broken(self, target: Scene) -> list[str]:
        unfounded = {one.round for one in target.followed(self.first) if one.revert} - self._harmful
        return [f"{len(unfounded)} rounds were undone that no honest judge found harmful"] if unfounded else []

    def forged(self, roster: Roster) -> Roster:
        return replace(roster, entries=(), total=0, revert=True)

    def _replace(self, target: Scene, name: str) -> None:
        super()._replace(target, name)
        method = target.method(name)
        usual, lies = method.rounds.seal, name in target.minority

        async def seal(turn: Any, scores: Any) -> None:
            if lies:
                turn.evaluator.undo = MAX_GAIN
            elif (turn.evaluator.undo or 0) > method.store.rules.revert_above:
                self._harmful.add(turn.chain.round)
            await usual(turn, scores)

        method.rounds.seal = seal  # type: ignore[method-assign]


def everyone() -> list[RoundAdversary]:
    """A new adversary of every kind."""
    return [TwoRosters(), Omission(), Silent(), WrongWeights(), WrongClip(), RevertAlways()]
