"""The state of one run in memory: the law of `law` applied to elements, with expiry, admission and evidence.

It is what simulations hold by the thousand, and what `node.storage.statestore` must agree with. Elements have been
checked (`record.open_element`) before they get here. Times are in ms.

Merging is commutative, associative and idempotent. Replicas that heard the same elements, in any order and any number
of times, each with its own clock and sweeping whenever it likes, hold the same after any cut-off that none of them has
passed. Except: what was AHEAD must be offered again; and the replicas must admit the same authors, before they hear
them. An admission is not taken back: elements of an author that is no longer admitted stay until they expire.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TypeAlias

from swarmnode.crdt import law
from swarmnode.crdt.kinds import KINDS, ElementKind, kind_of
from swarmnode.crdt.law import EVERYBODY, Judgement, Merged
from swarmnode.crdt.record import Element, InvalidRecord, Record, evidence_of, needed

Outcome: TypeAlias = tuple[Element, Judgement[Element]]


class State:
    """The elements of one run that one replica holds."""

    def __init__(
        self, run: str, *, kinds: Mapping[str, ElementKind] = KINDS, admitted: Container[str] = EVERYBODY
    ) -> None:
        """`admitted` are those whose elements are part of the state."""
        self.run = run
        self._kinds = kinds
        self._admitted = admitted
        self._slots: dict[str, dict[str, dict[bytes, Element]]] = {}  # author -> kind -> id -> element
        self._horizon = 0  # what expired until then may be forgotten
        self._suspects: dict[tuple[str, str], tuple[Record, Record]] = {}  # (author, kind) -> records that contradict

    def merge(self, element: Element, now: int) -> Judgement[Element]:
        """Join one element into the state. Raises InvalidRecord for an element of another run or of an unknown kind."""
        kind = self._kinds.get(element.kind)
        if element.run != self.run or kind is None:
            raise InvalidRecord(f"{element.key!r} of run {element.run[:12]}… does not belong to this state")
        self._horizon = law.advance(self._horizon, now)
        if (verdict := law.untimely(element.hlc, element.expiry, now=now, horizon=self._horizon)) is not None:
            return Judgement(verdict)
        if element.author not in self._admitted:
            return Judgement(Merged.STRANGER)
        slots = self._slots.get(element.author, {}).get(element.kind, {})
        ruling = law.judge(kind, slots.values(), element)
        if isinstance(element, Record) and isinstance(ruling.rival, Record):
            self._suspects[element.author, element.kind] = (element, ruling.rival)
        if ruling.verdict is Merged.STORED:
            if ruling.gone is not None:
                del slots[ruling.gone.id]
            self._slots.setdefault(element.author, {}).setdefault(element.kind, slots)[element.id] = element
        return ruling

    def convict(self, now: int) -> list[Outcome]:
        """Make evidence of the contradictions met since the last call, and merge it; returns what was stored.

        Apart from `merge`, which stays a join: evidence is an element like others, and spreads like them.
        """
        stored: list[Outcome] = []
        for pair in self._suspects.values():
            evidence = evidence_of(*pair)
            standing = self._standing(evidence.author, evidence.key)
            if needed(max((one.hlc for one in standing), default=None), evidence):
                ruling = self.merge(evidence, now)
                if ruling.verdict is Merged.STORED:
                    stored.append((evidence, ruling))
        self._suspects.clear()
        return stored

    def get(self, author: str, key: str, now: int) -> Element | None:
        """The greatest element under a key that has not expired, tombstones included."""
        horizon = law.advance(self._horizon, now)
        found = [one for one in self._standing(author, key) if one.expiry > horizon]
        return max(found, key=lambda one: one.rank, default=None)

    def held(self, cutoff: int) -> tuple[Element, ...]:
        """All of the state that expires after `cutoff`, tombstones included, in order of rank."""
        every = (one for kinds in self._slots.values() for slots in kinds.values() for one in slots.values())
        return tuple(sorted((one for one in every if one.expiry > cutoff), key=lambda one: one.rank))

    def sweep(self, now: int) -> list[Element]:
        """Forget what has expired; returns what that was in the state.

        Call it now and then: nothing depends on when.
        """
        self._horizon = law.advance(self._horizon, now)
        forgotten: list[Element] = []
        for author, kinds in list(self._slots.items()):
            for kind, slots in list(kinds.items()):
                gone = [one for one in slots.values() if one.expiry <= self._horizon]
                for one in gone:
                    del slots[one.id]
                forgotten += gone
                if not slots:
                    del kinds[kind]
            if not kinds:
                del self._slots[author]
        return forgotten

    def _standing(self, author: str, key: str) -> list[Element]:
        return [one for one in self._slots.get(author, {}).get(kind_of(key), {}).values() if one.key == key]
