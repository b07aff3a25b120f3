"""Steering: what a run's owner changes while it is trained (learning rates, H, the codec), for all in the same round.

The owner's record `note/steering` in the run's state has the values that shall differ from the run's file, all of them,
and the first round in which they may hold. It comes in force by the roster of a round, which carries it for the next:

    sync.write(KEY, {"from": 12, "set": {"inner.lr": 0.0003}})             the owner
    round 11: Ready(steering) -> RoundRoster(steering) -> Position(12, steering)

So whoever applies a roster goes on by the same values. Who has not heard the record reads it in the roster; who joins,
in the place of a member; who comes back, in its checkpoint. A leader that has not heard it is told in the Ready of one
that has; where nobody has, it comes in force in a later round. Members refuse a roster with anything but the record in
force or a later one of the owner's that is due and no week old: nobody else can change a value, and nobody the past.

Only methods with such a roster can be steered: not `open`, where auditors repeat the steps of rounds that are over.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
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

REFUSED = Metric("swarmnode_steering_refused_total", COUNTER, "words on the run's values that do not count", "why")
REASONS = ("stranger", "forged", "invalid", "untimely")


def value_of(spec: RunSpec, key: str) -> Any:
    table, _, name = key.partition(".")
    return getattr(getattr(spec, table), name)


def steered(spec: RunSpec, values: Mapping[str, Any]) -> RunSpec:
    """The run with other values, by TABLE.KEY of STEERABLE; numbers may be texts. Raises SettingError."""
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
        tables[table][name] = value
    return parse_runspec(tables, source="steering")


@dataclass(frozen=True)
class Steering:
    """One word of the owner's; or that of nobody, which says what stands in the run's file."""

    raw: bytes  # the sealed record; empty in the word of nobody
    rank: bytes  # a later word has a greater one
    expiry: int  # ms since 1970, from which on it can come in force no more
    since: int  # first round in which it may hold
    values: Mapping[str, Any]  # by TABLE.KEY
    spec: RunSpec  # with them

    def __str__(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.values.items()) or "the values of the run's file"

    def told(self) -> dict[str, Any] | None:
        """For the control API."""
        return {"from_round": self.since, "values": dict(self.values)} if self.raw else None


class SteeringWatch:
    """Keeps up with what the owner of one run says, and with what of it is in force at this node's place."""

    def __init__(self, parts: Context) -> None:
        self._parts = parts
        self._none = Steering(b"", b"", 0, 0, {}, parts.spec)
        self.now = self._none  # in force
        self.heard = self._none  # the newest that is here; the same object where that is in force
        self.refused: Counter[str] = Counter(dict.fromkeys(REASONS, 0))

    async def say(self, changes: Mapping[str, Any], since: int) -> None:
        """As the owner: change these values from a round on, beside what was said before; None takes the file's value.

        Raises SettingError, StateError.
        """
        wanted = {key: value for key, value in {**self.heard.values, **changes}.items() if value is not None}
        spec = steered(self._parts.spec, wanted)
        values = {key: value_of(spec, key) for key in wanted}
        record = await self._parts.sync.write(KEY, {"from": since, "set": values})
        self.heard = self.read(record.sealed) or self.heard

    async def watch(self) -> None:
        """Hear what the owner says, until cancelled."""
        state, owner = self._parts.state, self._parts.spec.owner
        if not owner:
            return
        with state.watch(KEY) as changes:
            while True:
                try:
                    said = await state.get(owner, KEY)
                except StateError as error:
                    logger.warning("what the run's owner changes cannot be read now: %s", error)
                    await trio.sleep(READ_AGAIN)
                    continue
                self.heard = (self.read(said.sealed) if said is not None and not said.tombstone else None) or self.now
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
                    case {"from": int() as since, "set": dict() as values}:
                        return Steering(raw, record.rank, record.expiry, since, values, steered(spec, values))
        except (InvalidRecord, SettingError) as error:
            told = str(error)
        self._refuse(why, told)
        return None

    def _refuse(self, why: str, told: str) -> None:
        self.refused[why] += 1
        if self.refused[why] == 1:
            logger.warning("a word that would change the run's values does not count: %s", told)

    def told(self) -> dict[str, Any]:
        """For the control API: what is in force, and what is to come."""
        coming = self.heard.told() if self.heard.rank > self.now.rank else None
        return {"now": self.now.told(), "coming": coming, "refused": self.refused.total()}

    def due(self, round: int) -> bytes:
        """The newest word that is here, where it is to come in force in `round`; else empty."""
        return self.heard.raw if self._may_follow(self.heard, round) else b""

    def newest(self, told: Iterable[bytes], round: int) -> Steering:
        """What is to be in force in `round`, by what members told: the newest that is due, or what is in force now."""
        found = [said for raw in set(told) if (said := self.read(raw)) is not None and self._may_follow(said, round)]
        return max(found, key=lambda said: said.rank, default=self.now)

    def allows(self, raw: bytes, round: int) -> bool:
        """Whether a roster may name this for `round`."""
        said = self.read(raw)
        if said is None or said is self.now or self._may_follow(said, round):
            return said is not None
        self._refuse("untimely", "it is not due, older than the one in force, or a week old")
        return False

    def _may_follow(self, said: Steering, round: int) -> bool:
        return said.rank > self.now.rank and said.since <= round and said.expiry > self._parts.now()

    def take(self, raw: bytes, round: int) -> None:
        """Put in force what the place of this node names, from `round` on; what is no word of the owner's is not."""
        said = self.read(raw)
        if said is not None and said is not self.now:
            self.now = said
            if self.heard.rank < said.rank:
                self.heard = said
            logger.info("from round %d on: %s (by the run's owner, %s)", round, said, self._parts.spec.owner)
