"""How a node of an open run finds its place: the roster that the others follow, and the state after it.

1. Members say where they stand, and give a chain from a few rounds before (`chain.tip`: TipQuery -> Tip). The rosters
   since then name its digest and the state hash there, so who follows them cannot be given another.
2. The state there is fetched by its hash from all who serve it (`catchup`); the initial one is made here.
3. From there on `ChainSync` replays the rosters, checking each.

A newcomer that trusts no roster yet believes the answer that most members give, and says that it cannot tell. One whose
join string names a roster takes nothing from members whose history was not shown to follow from it (`prove_lineage`).
Where one whom the string names is too far to keep it still, or most of those who answer for a minute are, it goes on
with them, and says that nothing was checked. A creator that finds nobody begins the run; a node with a checkpoint goes
on from it alone, silent in the first round (`method.py`).

**Whether a history goes back to the trusted roster** (`chain/forks.py`) a member shows by two answers:

    chain.path      the ids of the rosters up to where the member stands; the trusted one is among them, or it is not;
                    and the chain that the trusted roster builds on, which must have the digest that the roster names
    chain.records   each roster since, with the cuts, scores, commits and reveals that it rests on

**Members whose history parted from this node's for good: a split** (docs/open.md). Now and then, and before it goes
over to another's state, a node asks members where they stand. Who keeps rosters of the same rounds, all of them
others, has parted from it, or lies; so has who goes on for some rounds, as this node does, without one in common. A
node in whose rosters since then nobody's work counts but its own goes over, once it is called (`ChainStore.gone_on`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, cast

import msgpack
import trio

from swarmnode.crdt.record import InvalidRecord, Record
from swarmnode.protocols.chain.duty import RoundLog
from swarmnode.protocols.chain.forks import DEPTH, TrustedRoster, is_shrunken, leads_to, light_after, trusted_chain
from swarmnode.protocols.chain.rules import InvalidRoster, NotHeld, advance_empty, empty_id
from swarmnode.protocols.chain.state import ChainRules, ChainState, decode, genesis
from swarmnode.protocols.chain.statements import MAX_ROUND, ForkChoiceVote, Id, Roster, Said, read
from swarmnode.protocols.methods.context import Context, admit
from swarmnode.protocols.methods.known.messages import Seconds
from swarmnode.protocols.methods.method import FIRST_WINDOW, Begin
from swarmnode.protocols.methods.open.local import LocalTrainer
from swarmnode.protocols.methods.open.store import Lost
from swarmnode.protocols.methods.open.sync import TIMEOUT, ChainSync
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.transfer.catchup import REST, CatchUpFailed
from swarmnode.protocols.wire import Message, within
from swarmnode.training.outer import OuterState, state_hash

logger = logging.getLogger(__name__)

ASK_EVERY = 0.5  # seconds between two rounds of questions
ASK_AT_ONCE = 16  # members
LISTED = 4  # of those who could not show the trusted roster, to the owner
FIND_MEMBERS_FOR = 30.0  # seconds after which a node that may begin alone does, where others are believed to be there
NOTICE_MEMBERS_FOR = 3.0  # the same, where none are
SHOWS_WITHIN = 120.0  # seconds: 64 of the largest rounds, 19 MB, at the least rate at which full answers come in time
MOST_SHOWN = 24 << 20  # bytes of them, of one member
SHOW_AT_ONCE, SHOW_NEXT = 8, 3.0  # members that show their history; seconds that one has before the next is asked too
DOUBT_FOR = 10.0  # seconds that others have to show a history with the trusted roster, once one could not …
OLD_AFTER = 40.0  # … after 10, 20 and 40 of them, a roster is too old if most say so: others are found by then …
LONGEST_DOUBT = 160.0  # … and twice as long each time, up to so long, after which who could not is asked again
REPLAY_FOR = 30.0  # seconds in which the rosters since the base should be here
BASE = 2  # rounds before its tip of which a node gives the chain
FAR = 3  # rounds behind from which on a state is fetched instead of replaying
LOOK_EVERY = 60.0  # seconds
LOOKED_AT = 3  # members at a time
HEALING = 4  # rounds: of so many a fork may still be on its way to be healed, or a roster to be left

TIP = "chain.tip"


@dataclass(frozen=True)
class TipQuery:
    run_id: str
    joins: bool = True  # the asker is about to take part, and may be waited for


@dataclass(frozen=True)
class Tip(Message):
    """The roster that a node follows, and a state some rounds before it that the node serves."""

    tip: Id
    round: Annotated[int, within(0, MAX_ROUND)]  # rounds done at the tip
    elapsed: Seconds  # since the node came there
    base: bytes  # an encoded ChainState
    base_state: Id  # the state hash there


@dataclass(frozen=True)
class _Found:
    """Where a member says that it stands."""

    peer: PeerId
    tip: Tip
    base: ChainState
    began: float  # trio time at which the round at its tip began there


class Joining:
    def __init__(self, parts: Context, sync: ChainSync, local: LocalTrainer) -> None:
        self._parts, self._sync, self._store, self._local = parts, sync, sync.store, local
        self.splits = Splits(parts, sync)
        ceiling, longest = parts.spec.exchange.deadline_ceiling, self._store.rules.longest_window
        window = min(round(1000 * FIRST_WINDOW * ceiling), longest)
        self._genesis = genesis(parts.run_id, parts.spec.trust.validators or (parts.me,), window=window)
        self._initial: OuterState | None = None
        self._trusted: TrustedRoster | None = None  # while this node stands on nothing that follows from it
        self._named = self._preferred = cast(Container[PeerId], ())  # by the join string; to be followed before others
        self._shown = False  # by the member that was followed, that its history contains the trusted roster
        self._joined_by = ""  # the roster that the join string named when others were followed, also in an earlier life
        self._doubted: dict[PeerId, tuple[str, int]] = {}  # who did not: why; rounds done, of who cannot tell
        self._doubt_for, self._doubt_until = DOUBT_FOR, 0.0  # s; trio time
        self.phase: str | None = None
        parts.rpc.serve(TIP, TipQuery, self._on_tip)

    async def find(self, begin: Begin) -> bool:
        """Stand somewhere, see `Method.find_place`; whether others showed where."""
        self._trusted, self._named = TrustedRoster.parse(begin.roster) if begin.roster else None, begin.named
        saved = self._chain_of(begin)
        begins_from = begin.saved.state if saved is self._genesis and begin.saved is not None else None
        self._initial = begins_from or OuterState.start(self._parts.trainer.parameters())
        if saved is not None and begin.saved is not None:
            await self._stand_on(saved, begin.saved.state)
            if begin.roster == self._joined_by or (self._trusted and self._trusted.round + DEPTH < saved.round):
                self._trusted = None  # this node followed it already, perhaps too long ago to be shown again
        may_begin = saved is not None or begin.creator
        patience = FIND_MEMBERS_FOR if begin.expect_members else NOTICE_MEMBERS_FOR
        if begin.creator and saved is None and not begin.expect_members:
            patience = 0.0
        self.phase = "waiting"
        try:
            began = trio.current_time()
            until = began + (patience if may_begin else float("inf"))
            while not (joined := await self._join_others()):
                if self._doubted:
                    self._weigh_doubts()
                    await trio.sleep(ASK_EVERY)
                    continue
                if trio.current_time() >= until:
                    break
                await self._parts.look_again(began, every=ASK_EVERY)
            self._parts.observer.warn("alone", None)
            if not self._store.stands:
                await self._begin_the_run(begin)
            if joined:
                self._joined_by = begin.roster or self._joined_by
            return joined
        finally:
            self.phase = None

    async def regain(self) -> None:
        """After a pause or a loss: be where the others are, or go on from here."""
        self.phase = "catching-up"
        try:
            await self._join_others()
        finally:
            self.phase = None

    # --- beginning ----------------------------------------------------------------------------------------------------

    async def _begin_the_run(self, begin: Begin) -> None:
        assert self._initial is not None
        await self._stand_on(self._genesis, self._initial)
        until = trio.current_time() + begin.wait_seconds
        while trio.current_time() < until:
            if len(self._parts.membership.members()) >= begin.wait_peers:
                break
            await trio.sleep(0.1)
        self._store.arrived = trio.current_time()

    def _chain_of(self, begin: Begin) -> ChainState | None:
        """The chain of a checkpoint, where it is one of this method's, or what a successor begins from."""
        if begin.saved is None:
            return None
        if not begin.saved.round and not begin.saved.extra:  # the parent run's last state, whatever its method was
            return self._genesis
        if begin.saved.method != "open":
            return None
        try:
            told = begin.saved.extra
            raw, self._joined_by = msgpack.unpackb(told) if told[:1] == b"\x92" else (told, "")  # 0.1.0's
            chain = decode(raw)
        except (ValueError, msgpack.UnpackException) as error:
            logger.warning("the checkpoint does not tell where in the chain it was; looking for members: %s", error)
            return None
        return chain if chain.run_id == self._parts.run_id else None

    def kept(self, chain: ChainState) -> bytes:
        """What a checkpoint has beside the state after `chain`."""
        return bytes(msgpack.packb((chain.encode(), self._joined_by)))

    # --- joining ------------------------------------------------------------------------------------------------------

    async def _join_others(self) -> bool:
        """Be where most members are; False where none answers, or what they have cannot be had now."""
        left = await self._ask_around()
        while (found := await self._next(left)) is not None:
            stands = self._store.stands
            if stands and await self._is_near(found):
                await self._catch_up_by_replay(found)
            elif stands and self._trusted is None and await self._stays(found):
                continue  # nobody told this node to go over to another history
            elif not await self._go_to(found):  # nobody gave the state: with every second it is less likely to be had
                lacking = (found.tip.base, found.tip.base_state)
                left = [one for one in left if (one.tip.base, one.tip.base_state) != lacking]
                continue
            self._trusted, self._preferred = None, ()  # what follows from where it stands is checked in full
            return True
        return False

    async def _stays(self, found: _Found) -> bool:
        """Whether it goes on where it is: both parted for good, or both were alone, and it did more."""
        me, chain = self._parts.me, self._store.block.chain
        mine, theirs = ({one.author for worked in c.history for one in worked} for c in (chain, found.base))
        if mine == {me} and len(theirs) == 1 and (chain.round, me) > (found.tip.round, found.peer):
            return True
        return await self.splits.has_diverged(found.peer, found.tip)

    async def _next(self, left: list[_Found]) -> _Found | None:
        """Whom of those that are `left` to follow next: trusted ones first. Who is slow has others asked beside it."""
        asked, shown = list[_Found](), list[_Found]()

        async def ask(after: float) -> None:
            await trio.sleep(after)
            while left and not shown:
                asked.append(found := left.pop(0))
                if await self._is_trusted(found):
                    shown.append(found)
                asked.remove(found)
            if shown or not asked:
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for turn in range(SHOW_AT_ONCE):
                nursery.start_soon(ask, turn * SHOW_NEXT)
        left[:0] = [*shown[1:], *asked]
        return shown[0] if shown else None

    async def _is_trusted(self, found: _Found) -> bool:
        """Whether a member's history was shown to follow from the trusted roster, or none is trusted."""
        if (trusted := self._trusted) is None:
            return True
        if found.peer in self._doubted and trio.current_time() < self._doubt_until:
            return False
        try:
            since, few = await prove_lineage(self._sync, trusted, peer=found.peer, tip=found.tip, base=found.base)
        except (OtherLineage, CannotTell) as doubt:
            if not self._doubted:
                self._doubt_until = trio.current_time() + self._doubt_for
            self._doubted[found.peer] = str(doubt), found.tip.round if isinstance(doubt, CannotTell) else 0
            return False
        logger.info("%s shows %d rosters since the trusted one", found.peer, since)
        self._warn(None, told_of_few(since, few) if few else None)
        self._shown = True
        self._doubted.clear()
        return True

    def _weigh_doubts(self) -> None:
        """Once others had time, say that nobody shows the trusted roster; go on where most say that it is too old."""
        trusted, now = self._trusted, trio.current_time()
        if trusted is None or now < self._doubt_until:
            return
        far = {peer: at for peer, (_, at) in self._doubted.items() if at > trusted.round + DEPTH}
        most = 2 * len(far) > len(self._doubted) and self._doubt_for >= OLD_AFTER  # a lone stranger may say so
        if most or any(peer in self._named for peer in far):
            self._trusted, self._preferred = None, self._named
            logger.warning(unchecked := told_of_too_old(trusted, max(far.values())))
            self._warn(None, unchecked)
        else:
            self._warn(told_of_nobody(trusted, self._doubted))
        self._doubted.clear()
        self._doubt_for = min(2 * self._doubt_for, LONGEST_DOUBT)

    def _warn(self, lacking: str | None, followed: str | None = None) -> None:
        """Tell the owner that nobody shows the trusted roster, or what to know of the history that is followed."""
        if lacking and self._doubt_for == DOUBT_FOR:  # later, `status` tells who does not
            logger.warning("%s", lacking)
        self._parts.observer.warn("lineage", lacking)
        self._parts.observer.warn("roster", followed)

    async def _is_near(self, found: _Found) -> bool:
        """Whether what a member follows is here, or so near that replaying leads there, and from a state that is."""
        store, at = self._store, found.tip.tip
        if at not in store.tree and found.tip.round - store.block.chain.round <= FAR:
            at = found.base.tip
        if at in store.tree:
            with suppress(Lost):
                await store.state_after(store.tree[at])
                return True
        return False

    async def _ask_around(self) -> list[_Found]:
        """Where members stand: who is preferred, the base that most of them give, then by its round; equals by lot."""
        peers, query, answers = self._parts.nearby(ASK_AT_ONCE), TipQuery(self._parts.run_id), list[_Found]()
        asked = trio.current_time()
        for peer, tip in await self._parts.rpc.call_all(peers, TIP, query, Tip, timeout=TIMEOUT, rest=REST):
            try:
                base = await self._parts.runner(lambda tip=tip: decode(tip.base))  # type: ignore[misc]
            except ValueError as error:
                logger.debug("%s does not say where it stands: %s", peer, error)
                continue
            if base.run_id == self._parts.run_id and base.round <= tip.round and (base.round or base == self._genesis):
                answers.append(_Found(peer, tip, base, asked - tip.elapsed))
        votes, lot = Counter(found.tip.base for found in answers), self._parts.rng.random
        first = self._preferred or self._store.gone_on()
        answers.sort(key=lambda one: (one.peer in first, votes[one.tip.base], one.base.round, lot()), reverse=True)
        return answers

    async def _go_to(self, found: _Found) -> bool:
        """Fetch the state at a member's base, and replay from there. False where that failed for now."""
        self.phase = "catching-up"
        began = trio.current_time()
        try:
            state = await self._state_at(found)
        except CatchUpFailed as error:
            logger.warning("catching up with round %d failed, trying again: %s", found.tip.round, error)
            return False
        if counted := self._store.counted:
            with suppress(Lost):  # what counts in this history as well is not sent again
                path = await self._sync.path_of(found.peer, found.tip.tip)
                self._store.counted = {id: root for id, root in counted.items() if id not in path.ids}
        await self._stand_on(found.base, state)
        self._store.arrived = found.began
        await self._catch_up_by_replay(found)
        here = self._store.block
        self._parts.observer.caught_up(here.chain.round, self._store.hashes[here.id], trio.current_time() - began)
        if not self._shown:
            logger.warning(
                "stands at round %d with those who answered; were all of them one person's, this node could not tell",
                here.chain.round,
            )
        return True

    async def _catch_up_by_replay(self, found: _Found) -> None:
        """Have the rosters up to where a member stands, and go there."""
        store = self._store
        with trio.move_on_after(REPLAY_FOR):
            await self._sync.look_for(found.tip.tip, found.peer)
        if found.tip.tip in store.tree:
            block = store.tree[found.tip.tip]
            if block.chain.round > store.block.chain.round:
                with suppress(Lost):  # it may not lead there from the base that a liar gave
                    await self._local.stand_on(await store.state_after(block))
                    await self._sync.move(block)
                    store.arrived = found.began

    async def _state_at(self, found: _Found) -> OuterState:
        """The state at a member's base. Raises CatchUpFailed."""
        base, wanted = found.base, found.tip.base_state.hex()
        for held in (self._initial if base.round == 0 else None, self._local.base):
            if held is not None and await self._hash(base.round, held) == wanted:
                return held
        peers = [found.peer, *(peer for peer in self._parts.membership.connected() if peer != found.peer)]
        round, _, state = await self._sync.catch_up.fetch(
            tuple(peers[:ASK_AT_ONCE]), state_hash=wanted, observer=self._parts.observer
        )
        if round != base.round:
            raise CatchUpFailed(f"members have a state of round {round}, and {base.round} was announced")
        return state

    async def _hash(self, round: int, state: OuterState) -> str:
        return await self._parts.runner(lambda: state_hash(round, self._parts.trainer.layout, state))

    async def _stand_on(self, chain: ChainState, state: OuterState) -> None:
        await self._local.stand_on(state)
        await self._sync.begin(chain, state)

    # --- answering ----------------------------------------------------------------------------------------------------

    async def _on_tip(self, peer: PeerId, query: TipQuery) -> Tip:
        admit(self._parts, None, query.run_id, stands=self._store.stands)
        if query.joins and self._parts.admits(peer):
            self._store.note_newcomer(peer)
        tree, tip = self._store.tree, self._store.tip
        way = [tree[id] for id in tree.ancestry(tip)[-1 - BASE :]]
        first = way[min(1, len(way) - 1)]  # to undo the roster at the base would take the state before it
        base = first if first.roster is not None and first.roster.revert else way[0]
        elapsed = max(0.0, trio.current_time() - self._store.arrived)
        return Tip(tip, tree[tip].chain.round, elapsed, base.chain.encode(), bytes.fromhex(self._store.hashes[base.id]))


# --- lineage ----------------------------------------------------------------------------------------------------------


class OtherLineage(Exception):
    """A member's history does not contain the trusted roster, or does not follow from it. Says why."""


class CannotTell(Exception):
    """A member keeps too few rounds to show whether its history contains the trusted roster, or does not answer."""


async def prove_lineage(
    sync: ChainSync, trusted: TrustedRoster, *, peer: PeerId, tip: Tip, base: ChainState
) -> tuple[int, int]:
    """The rosters by which `base`, which leads to a member's tip, follows from the trusted one; and how many of them
    fewer than half of the judges decided. Raises OtherLineage or CannotTell.
    """
    rules = sync.store.rules
    try:
        path = await sync.path_of(peer, tip.tip, since=trusted.id)
        if trusted.id not in path.ids:
            oldest = tip.round - len(path.ids)  # the round that the first of these rosters ended
            if trusted.round < oldest:
                raise CannotTell(f"it keeps the rounds since {oldest}")
            if trusted.round >= tip.round:
                raise CannotTell(f"it has done {tip.round} rounds")
            raise OtherLineage(f"round {trusted.round} ended with another roster there")
        steps = list(zip(path.ids, path.empty, strict=True))[path.ids.index(trusted.id) :]
        told = await _ask(sync, peer, [id for id, is_empty in steps if not is_empty])
        roster = _roster_in(told, trusted.id)
        if not path.before:
            raise Lost("it does not have the chain before that roster")
        chain = trusted_chain(trusted, roster, path.before)
        rosters = shrunken = 0
        for id, is_empty in steps:
            if leads_to(chain, base):
                if not is_empty and _roster_in(told, id).what.chain != base.digest:
                    raise InvalidRoster("other norms than the next roster has the digest of")
                break
            shrunken += is_shrunken(chain) and not is_empty
            rosters += 1
            chain = _step(rules, chain, told, id, is_empty)
    except Lost as error:
        raise CannotTell(str(error)) from None
    except (InvalidRoster, InvalidRecord, NotHeld) as error:
        raise OtherLineage(f"what it shows since round {trusted.round} breaks a rule: {error}") from None
    if not leads_to(chain, base):
        raise OtherLineage("where it says that it stands does not follow from the rosters that it shows")
    return rosters, shrunken


async def _ask(sync: ChainSync, peer: PeerId, rosters: list[bytes]) -> list[Said[Any]]:
    """These rosters and what they rest on, as far as a peer gives them in time and size. Raises InvalidRecord."""
    told, room = list[Said[Any]](), MOST_SHOWN
    with trio.move_on_after(SHOWS_WITHIN):
        while rosters and room > 0:
            records = [one for one in await sync.ask_records(peer, rosters) if isinstance(one, Record)]
            room -= sum(len(one.sealed) for one in records)
            said = [read(one) for one in records]
            got = {one.id for one in said}.intersection(rosters)
            if not got:
                break
            told += [one for one in said if not isinstance(one.what, ForkChoiceVote)]
            rosters = [id for id in rosters if id not in got]
    return told


def _step(rules: ChainRules, chain: ChainState, told: list[Said[Any]], id: bytes, is_empty: bool) -> ChainState:
    """The chain after one more roster. Raises Lost, InvalidRoster or NotHeld."""
    if is_empty:
        if empty_id(chain) != id:
            raise InvalidRoster("an empty roster with another id")
        return advance_empty(chain)
    roster, log = _roster_in(told, id), RoundLog(chain, rules)
    for said in told:
        if said.what.parent == chain.tip:
            log.insert(said, b"", 0.0, namer=said.author)  # a roster asked for all of it
    try:
        quoted = log.quoted(roster.what, {})
    except KeyError:
        raise Lost(f"it does not have what roster {id.hex()[:12]} quotes") from None
    return light_after(chain, rules, roster, quoted)


def _roster_in(told: list[Said[Any]], id: bytes) -> Said[Roster]:
    """The roster with this id, which is a peer's word: another statement may have it. Raises Lost."""
    for said in told:
        if said.id == id and isinstance(said.what, Roster):
            return said
    raise Lost(f"it does not show roster {id.hex()[:12]}")


# --- what the owner is told -------------------------------------------------------------------------------------------


def told_of_nobody(trusted: TrustedRoster, doubts: Mapping[PeerId, tuple[str, int]]) -> str:
    listed = "; ".join(f"{peer}: {doubt}" for peer, (doubt, _) in [*doubts.items()][:LISTED])
    return (
        f"nobody who answers shows that the run's history contains roster {trusted} of your join line ({listed}). "
        "They may have a history of their own, or have joined later, or the line is from the losing side of a split. "
        "Nothing is taken over from them: this node asks on, and trains once somebody shows it. Ask somebody whom you "
        "trust for a new line (swarmnode id --join prints it); without --roster, a node believes whom it reaches"
    )


def told_of_too_old(trusted: TrustedRoster, furthest: int) -> str:
    return (
        f"roster {trusted} of your join line could not be checked: the run is said to have done {furthest} rounds, and "
        f"members keep the last {DEPTH}. This node goes on with the history that most of those who answer show; were "
        "all of them one person's, it could not tell. A line that is newer (swarmnode id --join prints it) would "
        "be checked"
    )


def told_of_few(rosters: int, shrunken: int) -> str:
    return (
        f"{shrunken} of the {rosters} rounds since the roster of your join line were decided by fewer than "
        "half of their judges, as rounds before had ended empty. So it is after an outage, and so it would be in a "
        "history that one judge made up: ask somebody else in the run whether theirs is the same (swarmnode id --join)"
    )


# --- splits -----------------------------------------------------------------------------------------------------------


class Splits:
    """What one node sees of other histories of its run."""

    def __init__(self, parts: Context, sync: ChainSync) -> None:
        self._parts, self._sync, self._store = parts, sync, sync.store
        self._diverged: dict[PeerId, tuple[int, str]] = {}  # rounds done, and a roster of its history, ROUND:ID
        self._apart: dict[PeerId, tuple[int, int]] = {}  # rounds done, there and here, when first without one in common

    async def run(self) -> None:
        """Look now and then, until cancelled."""
        while True:
            await trio.sleep(LOOK_EVERY * self._parts.rng.uniform(0.8, 1.2))
            if self._store.stands:
                await self._look()

    async def _look(self) -> None:
        members = sorted(self._parts.membership.connected())
        self._apart = {peer: at for peer, at in self._apart.items() if peer in members}
        for peer in self._diverged.keys() - set(members):
            self._note(peer, None)
        asked = self._parts.rng.sample(members, min(LOOKED_AT, len(members)))
        query = TipQuery(self._parts.run_id, joins=False)
        for peer, tip in await self._parts.rpc.call_all(asked, TIP, query, Tip, timeout=TIMEOUT):
            await self.has_diverged(peer, tip)

    async def has_diverged(self, peer: PeerId, tip: Tip) -> bool:
        """Whether a member that stands there is on a history of its own; False where it does not show it."""
        try:
            found = await self._diverged_at(peer, tip)
        except Lost as error:
            logger.debug("%s does not show its history: %s", peer, error)
            return False
        self._note(peer, found)
        return found is not None

    def _note(self, peer: PeerId, found: tuple[int, str] | None) -> None:
        if found is not None:
            self._diverged[peer] = found
        else:
            self._diverged.pop(peer, None)
        self._store.diverged = frozenset(self._diverged)
        self._parts.observer.warn("split", self._told() if self._diverged else None)

    async def _diverged_at(self, peer: PeerId, tip: Tip) -> tuple[int, str] | None:
        """Where a member stands, if what it keeps and what this node keeps have no roster in common. Raises Lost."""
        store, me = self._store, self._parts.me
        path = await self._sync.path_of(peer, tip.tip) if tip.tip not in store.tree else None
        if path is None or any(id in store.tree for id in path.ids):
            self._apart.pop(peer, None)
            return None
        mine, round = store.tree.path(store.tip), store.block.chain.round
        theirs = range(tip.round - len(path.ids), tip.round)  # the rounds that these rosters ended
        was, since = self._apart.setdefault(peer, (tip.round, round))
        if tip.round <= was + HEALING or len(mine) < DEPTH:  # it may be behind, as after a pause, or this node new
            since = round
        parted = [one for one in mine if one.chain.round - 1 in theirs or one.chain.round > since]
        worked = [{each.author for each in one.chain.history[-1]} - {me} for one in parted if one.roster is not None]
        if sum(map(bool, worked)) <= HEALING or max(len(mine), len(path.ids)) < DEPTH:
            return None
        named = max((number for number, empty in enumerate(path.empty[:-HEALING]) if not empty), default=None)
        if named is None:  # it went through empty rounds alone, and will find the others
            return None
        return tip.round, f"{theirs[named]}:{path.ids[named].hex()}"

    def _told(self) -> str:
        furthest, roster = max(self._diverged.values())
        return (
            f"{len(self._diverged)} members follow another history of this run, which parted from this node's more "
            f"than {DEPTH} rounds ago, as happens after a long cut through the swarm; no rule says which is right. "
            f"This node stays with its own, at round {self._store.block.chain.round}. To go over to theirs, at round "
            f"{furthest}, stop it and start it again with --roster {roster}"
        )
