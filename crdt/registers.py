"""Replaceable registers: for each author and key, the record with the greatest (hlc, id); a join, so order never
matters.

    join(S) = for each (author, key) the greatest record, then for each (author, kind) the `slots` greatest of these

All records of a kind live equally long, and tombstones as long as values. So whatever a record displaces expires no
later than the record itself: nothing comes back when the winner expires, and a replica that sweeps late agrees with
one that sweeps early about everything that expires after both.

Limits: the bound on authors is a local one that depends on who came first. Beyond it replicas may differ, so whoever
runs this keeps it above the number of identities that it admits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from swarmnode.crdt.hlc import is_ahead
from swarmnode.crdt.kinds import KINDS, Kind
from swarmnode.crdt.law import Merged, judge
from swarmnode.crdt.record import InvalidRecord, Record

MAX_AUTHORS = 4096  # at one slot of 1 KiB each, some 8 MB
LEASES = {"member": KINDS["member"]}
_STATE_TAG = b"swarmnode/registers/1\0"


class Registers:
    """The replaceable records of one run. Records must have been checked (`record.open_record`) before they get here.

    Merging is commutative, associative and idempotent: replicas that merged the same records, in any order and any
    number of times, have equal `live` and equal `state_hash`, up to records that were refused as `AHEAD`, which must
    be offered again, and the bound on authors. Times are in ms.
    """

    def __init__(self, run: str, *, kinds: Mapping[str, Kind] = LEASES, max_authors: int = MAX_AUTHORS) -> None:
        self.run = run
        self._kinds = kinds
        self._max_authors = max_authors
        self._slots: dict[str, dict[str, dict[str, Record]]] = {}  # author -> kind -> key -> record
        self._horizon = 0  # what expires later is all here; steps back with the clock, or a jump would stop everything

    def merge(self, record: Record, now: int) -> Merged:
        """Join one record into the state.

        Raises InvalidRecord for a record of another run or of a kind not held here.
        """
        kind = self._kinds.get(record.kind)
        if record.run != self.run or kind is None:
            raise InvalidRecord(f"{record.key!r} of run {record.run[:12]}… does not belong to these registers")
        if is_ahead(record.hlc, now):
            return Merged.AHEAD
        self._horizon = now
        if record.expiry <= now:
            return Merged.EXPIRED
        if record.author not in self._slots and len(self._slots) >= self._max_authors:
            self.sweep(now)
            if len(self._slots) >= self._max_authors:
                return Merged.QUOTA
        slots = self._slots.get(record.author, {}).get(record.kind, {})
        ruling = judge(kind, slots.values(), record)
        if ruling.verdict is not Merged.STORED:
            return ruling.verdict
        if ruling.gone is not None:
            del slots[ruling.gone.key]
        self._slots.setdefault(record.author, {}).setdefault(record.kind, slots)[record.key] = record
        return Merged.STORED

    def get(self, author: str, key: str, now: int) -> Record | None:
        """The record that stands under a key now; None where there is none, or it was deleted or has expired."""
        record = self._slots.get(author, {}).get(key.partition("/")[0], {}).get(key)
        return record if record is not None and record.expiry > now and not record.tombstone else None

    def live(self, now: int) -> tuple[Record, ...]:
        """All records that stand now, tombstones left out, in order of (author, key)."""
        standing = (r for r in self.held(now) if not r.tombstone)
        return tuple(sorted(standing, key=lambda r: (r.author, r.key)))

    def held(self, cutoff: int) -> tuple[Record, ...]:
        """All records that expire after `cutoff`, tombstones included, in order of (hlc, id): what repair compares."""
        every = (r for kinds in self._slots.values() for slots in kinds.values() for r in slots.values())
        return tuple(sorted((r for r in every if r.expiry > cutoff), key=lambda r: r.order))

    def state_hash(self, cutoff: int) -> str:
        """sha-256 of what expires after `cutoff`, 64 hex digits; quoted together with the cut-off.

        Over: tag "swarmnode/registers/1" and a zero byte ‖ cut-off as u64 little-endian ‖ ids in order of (hlc, id).
        Raises ValueError for a cut-off in the past of this replica, of which it may have forgotten something.
        """
        if cutoff < self._horizon:
            raise ValueError(f"cut-off {cutoff} lies {self._horizon - cutoff} ms before what this replica still knows")
        digest = hashlib.sha256(_STATE_TAG + cutoff.to_bytes(8, "little"))
        for record in self.held(cutoff):
            digest.update(record.id)
        return digest.hexdigest()

    def sweep(self, now: int) -> int:
        """Forget what has expired; returns how many records that were.

        Call it now and then: nothing depends on when.
        """
        self._horizon = now
        forgotten = 0
        for author, kinds in list(self._slots.items()):
            for kind, slots in list(kinds.items()):
                gone = [key for key, record in slots.items() if record.expiry <= now]
                for key in gone:
                    del slots[key]
                forgotten += len(gone)
                if not slots:
                    del kinds[kind]
            if not kinds:
                del self._slots[author]
        return forgotten
