"""Attacks on the round itself: peers that stop at any moment, leaders and judges that lie, and a swarm cut in two.

Each acts on running nodes that are all electors (`openswarm.py`). Who misbehaves is chosen by the round: its
leader, where that is who the attack needs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import trio
from harness import Adversary
from openswarm import Scene
from undefended import (
    BELIEVED_LEADER,
    FIRST_SEEN,
    NO_DEADLINES,
    NO_MEMORY,
    ONE_LEADER,
    ONE_REVERTS,
    SEED_OF_COMMITS,
    Lacking,
    seed_of,
)

from swarmnode.protocols.chain.derive import Quoted
from swarmnode.protocols.chain.duty import WriteRoster
from swarmnode.protocols.chain.electorate import leaders
from swarmnode.protocols.chain.statements import (
    MAX_GAIN,
    MISSING,
    PREFIX,
    SALT,
    Commit,
    Cut,
    Head,
    Reveal,
    Roster,
    Scores,
    Seal,
    binding_of,
)
from swarmnode.protocols.chain.validity import compose

AFTER = 3  # rounds that survivors do after the fault, at least
PHASES = (Commit, Cut, Reveal, Seal, Scores, Roster, Head)


class RoundAdversary(Adversary):
    """What happens to a running swarm, and what must be true afterwards beside one state in every round."""

    first = 0  # round in which it happened
    slower = 2.0  # of the usual round, that a round may take
    healing = 0  # rounds from `first` on until all must have one state
    lacks: ClassVar[Lacking]  # what the undefended nodes beside it have not

    async def attack(self, target: Scene) -> None:
        raise NotImplementedError

    async def broken(self, target: Scene) -> list[str]:
        """Promises of this attack's own that were broken."""
        return []

    async def achieved(self, target: Scene) -> str:
        """What it came to beside split and slow rounds, for the table; also where rounds do not end."""
        return ""

    def undefended(self) -> RoundAdversary:
        """What does the same to nodes that lack this."""
        return self


class Stopped(RoundAdversary):
    """A node is killed or frozen just before it says a thing: the leader of the round, or another."""

    lacks = NO_DEADLINES

    def __init__(self, phase: type, how: str, leader: bool) -> None:
        self._phase, self.how, self._leader = phase, how, leader
        self.name = f"{how} of {'the leader' if leader else 'another'} at its {phase.__name__.lower()}"  # type: ignore[misc]

    async def attack(self, target: Scene) -> None:
        fallen = trio.Event()
        rounds = target.round + 2
        self.first = rounds

        def watch(name: str) -> None:
            async def say(usual: Any, statement: Any) -> Any:
                due = isinstance(statement, self._phase) and target.method(name).held.block.chain.round == rounds
                if due and not fallen.is_set() and (target.leader(name) == name) == self._leader:
                    fallen.set()
                    target.bad.add(name)
                    if self.how == "kill":
                        target.swarm.kill(name)
                    else:
                        target.swarm.world.freeze(target.peer(name))
                return await usual(statement)

            target.change_words(name, say)

        for name in target.names:
            watch(name)
        with trio.fail_after(300):
            await fallen.wait()
        await target.done(AFTER)
        if self.how == "freeze":
            await trio.sleep(1.0)

    async def broken(self, target: Scene) -> list[str]:
        idle = [name for name in target.honest if "accepted" not in target.verdicts(name, self.first)]
        return [f"the work of {', '.join(idle)} never counted"] if idle else []


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
        duties = target.method(name).duties
        usual = duties.lead

        async def lead(turn: Any, action: WriteRoster) -> None:
            over = self._done.is_set() and not (self.again and name == self.leader)
            if turn.chain.round < self.first or over or action.attempt:
                await usual(turn, action)
                return
            turn.own = replace(turn.own, led=turn.own.led | {action.attempt})
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
        preimage = method.voice.beacon.preimage(anchor) if anchor is not None else b""
        state = bytes.fromhex(method.held.states.hashes[chain.tip])
        return compose(chain, method.held.rules, quoted, attempt=attempt, preimage=preimage, state=state)

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
    lacks = ONE_LEADER

    def undefended(self) -> RoundAdversary:
        lasting = Omission()
        lasting.again = True
        return lasting

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
        await target.method(name).voice.say(
            self.made(target, name, turn, replace(action.quoted, cuts=cuts, scores=scores), action.attempt)
        )

    def _replace(self, target: Scene, name: str) -> None:
        super()._replace(target, name)
        duties = target.method(name).duties
        usual = duties.seal

        async def seal(turn: Any, scores: Any) -> None:
            over = self._done.is_set() and not (self.again and name == self.leader)
            if turn.chain.round >= self.first and not over and target.leader(name) == name:
                victim = next(other for other in target.names if other != name)
                theirs = turn.book.own_commit(target.peer(victim))
                prefix = theirs.id[:PREFIX] if theirs is not None else b""
                scores = tuple(replace(s, found=MISSING, gain=0) if s.commit == prefix else s for s in scores)
            await usual(turn, scores)

        duties.seal = seal  # type: ignore[method-assign]

    async def broken(self, target: Scene) -> list[str]:
        told = target.verdicts(self.victim, self.first)
        if told[0] == "accepted":
            return [f"the attack had no effect: {told}"]
        return [] if "accepted" in told[1:2] else [f"its work did not count in the next round: {told}"]


class Forged(Leader):
    """Says of the round what the quotes do not: the others must pass over it, and the next leader take over."""

    lacks = BELIEVED_LEADER

    def forged(self, roster: Roster) -> Roster:
        raise NotImplementedError

    async def lead(self, target: Scene, name: str, turn: Any, action: WriteRoster) -> None:
        roster = self.made(target, name, turn, action.quoted, action.attempt)
        await target.method(name).voice.say(self.forged(roster))

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
    """A minority of the judges asks for every roster to be undone, and a leader says that it is."""

    name = "reverting every round"
    lacks = ONE_REVERTS

    async def achieved(self, target: Scene) -> str:
        followed = target.followed(self.first)
        return f"{sum(roster.revert for roster in followed)} of {len(followed)} rosters go back"

    def forged(self, roster: Roster) -> Roster:
        return replace(roster, entries=(), total=0, revert=True)

    def _replace(self, target: Scene, name: str) -> None:
        super()._replace(target, name)
        duties = target.method(name).duties
        usual = duties.seal

        async def seal(turn: Any, scores: Any) -> None:
            turn.bench.undo = MAX_GAIN
            await usual(turn, scores)

        if name in target.minority:
            duties.seal = seal  # type: ignore[method-assign]


class WithheldCuts(RoundAdversary):
    name = "two of five judges, or seven of sixteen, withhold their cuts"
    lacks = NO_DEADLINES

    async def attack(self, target: Scene) -> None:
        self.first = target.round + 1
        for name in target.minority:
            target.bad.add(name)

            async def say(usual: Any, statement: Any) -> Any:
                return None if isinstance(statement, Cut) else await usual(statement)

            target.change_words(name, say)
        await target.done(self.times(6, AFTER))


class LastCommitter(RoundAdversary):
    """Commits when all others have, in every round, and so that it would lead the next, were leaders drawn from that.

    Commits hide what they bind, and seeds do not depend on them: as last one it chooses nothing.
    """

    name = "the last committer chooses among what it could commit"
    lacks = SEED_OF_COMMITS
    liar = "c"
    tries = 32

    async def attack(self, target: Scene) -> None:
        self.first = target.round + 1
        target.bad.add(self.liar)
        method, me = target.method(self.liar), target.peer(self.liar)
        salts: dict[bytes, bytes] = {}

        async def say(usual: Any, statement: Any) -> Any:
            chain, offer = method.held.block.chain, method.work.offer
            if isinstance(statement, Commit) and offer is not None:
                with trio.move_on_after(4.0):
                    await method.held.until(lambda: len(method.held.book.commits) >= len(target.names) - 1)
                others = [said.what.binding for said in method.held.book.commits.values()]
                for number in range(self.tries):
                    salt = number.to_bytes(SALT, "big")
                    bound = binding_of(chain.run_id, chain.round, me, chain.tip, salt, offer.root, method.work.trace)
                    seed = seed_of(chain.seed, sorted([*others, bound]))
                    if leaders(replace(chain, seed=seed), method.held.rules)[0] == me:
                        break
                salts[chain.tip] = salt
                statement = replace(statement, binding=bound)
            if isinstance(statement, Reveal):
                statement = replace(statement, salt=salts.get(chain.tip, statement.salt))
            return await usual(statement)

        target.change_words(self.liar, say)
        await target.done(self.times(12, AFTER))

    async def achieved(self, target: Scene) -> str:
        path = [target.method(target.honest[0]).held.tree[block.parent] for block in target.blocks(self.first + 1)]
        rules = target.method(self.liar).held.rules
        led = sum(leaders(block.chain, rules)[0] == target.peer(self.liar) for block in path)
        return f"it leads {led} of {len(path)} rounds"


class CutInTwo(RoundAdversary):
    name = "two of five, or seven of sixteen, are cut off for five rounds"
    slower = 4.0  # a majority of the judges goes on; each round waits for who is not there until that is known
    lacks = FIRST_SEEN
    _healed = _agreed = -1

    async def attack(self, target: Scene) -> None:
        self.first, self.healing, self._healed, self._agreed = target.round + 1, 0, -1, -1
        sides = (target.names[: -len(target.minority)], target.minority)
        target.swarm.world.partition([[target.peer(name) for name in side] for side in sides])
        before = target.round
        await target.swarm.round_done(before + 5, *sides[0], within=400)
        target.swarm.world.heal()
        self._healed = max(max(target.swarm.nodes[name].rounds) for name in target.names)
        await target.swarm.until(lambda: target.swarm.all_agree(after=self._healed), within=target.patience)
        self._agreed = target.round
        self.healing = self._agreed - self.first
        await target.done(2)

    async def broken(self, target: Scene) -> list[str]:
        late = self._agreed - self._healed
        idle = [name for name in target.minority if "accepted" not in target.verdicts(name, self._healed)]
        broken = [f"one chain {late} rounds after the cut was healed"] if late > 3 else []
        return broken + ([f"the work of {', '.join(idle)} never counted"] if idle else [])

    async def achieved(self, target: Scene) -> str:
        if self._agreed < 0:
            return f"no common chain {target.round - self._healed} rounds after it was healed"
        return f"one chain {self._agreed - self._healed} rounds after it was healed"


class RestoredBackup(RoundAdversary):
    """A node is killed and comes back three times with nothing but its key, in the middle of rounds."""

    name = "a node comes back from its key alone, three times"
    slower = 4.0
    lacks = NO_MEMORY

    async def attack(self, target: Scene) -> None:
        self.first = target.round + 1
        target.bad.add("c")
        for _ in range(3):
            target.swarm.kill("c")
            await trio.sleep(3.0)
            await target.swarm.start("c", join="b")
            await trio.sleep(13.0)
        await target.done(2)

    async def broken(self, target: Scene) -> list[str]:
        told = await self.achieved(target)
        return [] if told.startswith("0 ") else [told]

    async def achieved(self, target: Scene) -> str:
        held = max([await target.evidence(name) for name in target.honest])
        return f"{held} contradictions of its own are proved"


def stops(short: bool = False) -> list[RoundAdversary]:
    """Kill and freeze at every statement; in short, four of them."""
    everything: list[RoundAdversary] = [
        Stopped(phase, how, leader)
        for phase in PHASES
        for how in ("kill", "freeze")
        for leader in (True, False)
        if leader or phase is not Roster
    ]
    return everything[::9] if short else everything


def everyone() -> list[RoundAdversary]:
    """A new adversary of every other kind."""
    return [
        TwoRosters(),
        Omission(),
        Silent(),
        WrongWeights(),
        WrongClip(),
        RevertAlways(),
        WithheldCuts(),
        LastCommitter(),
        CutInTwo(),
        RestoredBackup(),
    ]
