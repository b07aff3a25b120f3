"""Steering: what a run's owner changes while it is trained (learning rates, H, the codec), for all in the same round.

The owner's record `note/steering` in the run's state has all that the owner changed and all that it plans, each with
the first round in which it holds. The roster of a round carries the record for the next:

    sync.write(KEY, {"changes": ((12, "inner.lr", 0.0003), (40, "inner.steps", 50))})             the owner
    round 9: Ready(steering) -> RoundRoster(steering) -> Position(10, steering)

Record and round say together what is in force: whoever applies a roster changes in rounds 12 and 40, whatever it heard
and when. Who joins reads the record in the place of a member; who comes back, in its checkpoint. A leader that has not
heard it is told in the Ready of one that has. A record repeats what the one before it planned, but for the values that
it changes itself, so that none that is late or never heard is missed. Members refuse a roster with anything but the
record that they go by or a later one of the owner's that is no week old: nobody else can change a value.

Only methods with such a roster can be steered: not `open`, where auditors repeat the steps of rounds that are over.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import trio

from swarmnode.crdt.record import InvalidRecord, Record, parse
from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.metrics import COUNTER, Metric
from swarmnode.protocols.state.backend import READ_AGAIN, StateError
from swarmnode.training.options import SettingError
from swarmnode.training.runspec import RunSpec, parse_runspec

logger = logging.getLogger(__name__)

KEY = "note/steering"
STEERABLE = ("inner.lr", "inner.muon_lr", "inner.steps", "outer.lr", "exchange.codec")

MOST = 2 * len(STEERABLE)  # changes of a record that count: of each key one that holds and one that is planned

REFUSED = Metric("swarmnode_steering_refused_total", COUNTER, "words on the run's values that do not count", "why")
REASONS = ("stranger", "forged", "invalid", "untimely")


def value_of(spec: RunSpec, key: str) -> Any:
    table, _, name = key.partition(".")
    return getattr(getattr(spec, table), name)


def steered(spec: RunSpec, values: Mapping[str, Any]) -> RunSpec:
    """The run with other values, by TABLE.KEY of STEERABLE; numbers may be texts, None is the file's value.

    Raises SettingError.
    """
    tables = asdict(spec)
    for key, value in values.items():
        if key not in STEERABLE:
            raise SettingError(
                f"{key!r} cannot be changed while a run is trained; these can: {', '.join(STEERABLE)}. Other values "
                "take a run of their own, which begins from this one's state: swarmnode successor publish"
            )
        table, _, name = key.partition(".")
        with suppress(ValueError):  # what is no number is refused below
            value = type(tables[table][name])(value) if isinstance(value, str) else value
        tables[table][name] = value_of(spec, key) if value is None else value
    return parse_runspec(tables, source="steering")


@dataclass(frozen=True)
class Stage:
    """What holds from a round on."""

    since: int
    values: Mapping[str, Any]  # that are not those of the run's file, by TABLE.KEY
    spec: RunSpec  # with them

    def __str__(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.values.items()) or "the values of the run's file"


@dataclass(frozen=True)
class Steering:
    """One word of the owner's; or that of nobody, which says what stands in the run's file."""

    raw: bytes  # the sealed record; empty in the word of nobody
    rank: bytes  # a later word has a greater one
    expiry: int  # ms since 1970, from which on no roster may name it first
    changes: tuple[tuple[int, str, Any], ...]  # by round: from which on a TABLE.KEY has a value, None for the file's
    stages: tuple[Stage, ...]  # that these make, of which the first is the file

    def at(self, round: int) -> Stage:
        """What it says of a round."""
        return next(stage for stage in reversed(self.stages) if stage.since <= round)


def stages(spec: RunSpec, changes: Iterable[tuple[int, str, Any]]) -> tuple[Stage, ...]:
    """What changes in the order of their rounds make of a run. Raises SettingError where one makes no run."""
    made, values = [Stage(0, {}, spec)], dict[str, Any]()
    for since, several in groupby(changes, key=itemgetter(0)):
        values |= {key: value for _, key, value in several}
        then = steered(spec, values)
        differing = {key: value_of(then, key) for key, value in values.items() if value is not None}
        if differing != made[-1].values:
            made.append(Stage(since, differing, then))
    return tuple(made)


class SteeringWatch:
    """Keeps up with what the owner of one run says, and with what of it is in force at this node's place."""

    def __init__(self, parts: Context) -> None:
        self._parts = parts
        self._none = Steering(b"", b"", 0, (), stages(parts.spec, ()))
        self._round = 0  # of this node's place
        self.now = self._none  # by which this node goes
        self.heard = self._none  # the newest that is here
        self.refused: Counter[str] = Counter(dict.fromkeys(REASONS, 0))

    @property
    def stage(self) -> Stage:
        """What is in force in this node's round."""
        return self.now.at(self._round)

    async def say(self, changes: Mapping[str, Any], since: int) -> None:
        """As the owner: change these values from a round on; None takes the file's value.

        What is planned stays, but for changes of the same keys. Raises SettingError, StateError.
        """
        await self._hear()
        every = (*self.heard.changes, *((since, key, value) for key, value in changes.items()))
        # Of each key, the last change that is not planned any more, and the one that is.
        kept = {(key, start > self._round): (start, key, value) for start, key, value in every}
        said = tuple(sorted(kept.values()))
        stages(self._parts.spec, said)
        record = await self._parts.sync.write(KEY, {"changes": said})
        self.heard = self.read(record.sealed) or self.heard

    async def _hear(self) -> None:
        said = await self._parts.state.get(self._parts.spec.owner, KEY)
        heard = self.read(said.sealed) if said is not None and not said.tombstone else None
        self.heard = max(self.now, heard or self.now, key=lambda said: said.rank)

    async def watch(self) -> None:
        """Hear what the owner says, until cancelled."""
        state, owner = self._parts.state, self._parts.spec.owner
        if not owner:
            return
        with state.watch(KEY) as changes:
            while True:
                try:
                    await self._hear()
                except StateError as error:
                    logger.warning("what the run's owner changes cannot be read now: %s", error)
                    await trio.sleep(READ_AGAIN)
                    continue
                while (change := await changes.receive()).element.author != owner and not change.lost:
                    self._refuse("stranger", f"{change.element.author} is not the run's owner")

    def read(self, raw: bytes) -> Steering | None:
        """The owner's word in sealed bytes, empty ones for nobody's; None, which is counted, where they are none."""
        for known in (self._none, self.now, self.heard):
            if raw == known.raw:
                return known
        spec, why, told = self._parts.spec, "forged", "the run's owner did not sign it"
        try:
            record = parse(raw)
            origin = self._parts.run_id, spec.owner, KEY
            is_owners = isinstance(record, Record) and (record.run, record.author, record.key) == origin
            if is_owners and record.is_genuine(self._parts.network.verify):
                why, told = "invalid", "it has not the form of one"
                match record.value:
                    case {"changes": tuple() as every} if {type(since) for since, _, _ in every[:MOST]} <= {int}:
                        said = tuple(sorted(every[:MOST], key=itemgetter(0)))
                        return Steering(raw, record.rank, record.expiry, said, stages(spec, said))
        except (InvalidRecord, SettingError, TypeError, ValueError) as error:
            told = str(error)
        self._refuse(why, told)
        return None

    def _refuse(self, why: str, told: str) -> None:
        self.refused[why] += 1
        if self.refused[why] == 1:
            logger.warning("a word that would change the run's values does not count: %s", told)

    def told(self) -> dict[str, Any]:
        """For the control API: what is in force, and what is planned, by round."""
        now, next = self.stage, self._round + 1
        first = self.heard.at(next)
        planned = [first] * (first.values != now.values) + [each for each in self.heard.stages if each.since > next]
        coming = [{"from_round": max(each.since, next), "values": dict(each.values)} for each in planned]
        told = {"from_round": now.since, "values": dict(now.values)} if now.since else None
        return {"now": told, "coming": coming, "refused": self.refused.total()}

    def newer(self) -> bytes:
        """The newest word that is here, where this node does not go by it yet; else empty."""
        return self.heard.raw if self._may_follow(self.heard) else b""

    def newest(self, told: Iterable[bytes]) -> Steering:
        """By what to go on, of what members told: the newest, or what this node goes by."""
        found = [said for raw in set(told) if (said := self.read(raw)) is not None and self._may_follow(said)]
        return max(found, key=lambda said: said.rank, default=self.now)

    def allows(self, raw: bytes) -> bool:
        """Whether a roster may name this."""
        said = self.read(raw)
        if said is None or said is self.now or self._may_follow(said):
            return said is not None
        self._refuse("untimely", "it is older than the one that this node goes by, or a week old")
        return False

    def _may_follow(self, said: Steering) -> bool:
        return said.rank > self.now.rank and said.expiry > self._parts.now()

    def take(self, raw: bytes, round: int) -> None:
        """Go by what this node's place in `round` names; what is no word of the owner's changes nothing."""
        before, said = self.stage, self.read(raw)
        self._round = round
        if said is not None and said is not self.now:
            self.now = said
            if self.heard.rank < said.rank:
                self.heard = said
            for stage in said.stages:
                if stage.since > round:
                    logger.info("the run's owner plans, from round %d on: %s", stage.since, stage)
        if self.stage.values != before.values:
            logger.info("from round %d on: %s (by the run's owner, %s)", round, self.stage, self._parts.spec.owner)
