"""The one seam between protocols and the replicated state that this node holds.

Two implementations: `node.storage.statestore.StateStore` (SQLite) and `testing.memorystate.MemoryState` (in memory, for
simulations). Both pass the same conformance suite in `tests/node/storage/test_state_conformance.py`. What does not
depend on where elements are kept is here: how this node signs its own records, while peers confirm its clock, and the
bounded feeds of who follows changes.

An element is a signed record or evidence of equivocation. It is known by its *rank*, 40 bytes: when it expires, then
its id (see `crdt.record`). Ranks are what reconciliation exchanges.

What `merge` and `write` return is durable: it survives a SIGKILL and, as far as the disk keeps its word, a power cut.
Where the disk takes nothing (full, failing) both raise `Unwritable`, nothing has changed, and the next call tries
again. What `has` and `snapshot` tell is in memory, at once, and never more than what is durable.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from swarmnode.crdt import encoding
from swarmnode.crdt.encoding import EncodingError, Value
from swarmnode.crdt.envelope import Sign
from swarmnode.crdt.hlc import PeerClocks, time_of
from swarmnode.crdt.kinds import KINDS, kind_of
from swarmnode.crdt.law import EVERYBODY, Merged
from swarmnode.crdt.ranges import RankSet
from swarmnode.crdt.record import Element, InvalidRecord, Record, write

logger = logging.getLogger(__name__)

WAITING = 256  # changes kept for one reader; some 200 kB of notes
READ_AGAIN = 5.0  # s after which what could not be read of the state is read again
Rank = bytes


class StateError(Exception):
    """The state could not do what it was asked; never a reason to end the daemon. The text is fit for a person."""


class Unwritable(StateError):
    """The disk took nothing: nothing has changed, nothing is acknowledged. Try again later."""


class AlreadyWritten(StateError):
    """This node has written something else under a write-once key. Writing this as well would convict it."""


@dataclass(frozen=True)
class Change:
    """An element that was stored, and how many the reader missed before it because it was too slow."""

    element: Element
    lost: int


@dataclass(frozen=True)
class Stats:
    elements: int
    authors: int
    size: int  # bytes of the sealed elements
    kinds: dict[str, int]  # elements by kind
    disk: int  # bytes of files; 0 in memory
    clock: int  # the greatest stamp made or seen
    warning: str  # what the owner should know, "" for nothing


@dataclass(eq=False)
class _Reader:
    """Who follows changes under keys that begin with `prefix`."""

    prefix: str
    send: trio.MemorySendChannel[Change]
    lost: int = 0  # changes since the last that it had room for


class StateBackend(ABC):
    """The elements of one run, with the clock of their owner. Methods that are not async do not block."""

    def __init__(
        self, run_id: str, *, me: str, sign: Sign, clocks: PeerClocks, admitted: Container[str] = EVERYBODY
    ) -> None:
        """`admitted` are those whose elements are shared."""
        self.run_id = run_id
        self._me = me
        self._sign = sign
        self.clocks, self.now = clocks, clocks.time
        self.admitted = admitted
        self._signing = trio.Lock()
        self._readers: list[_Reader] = []

    # --- writing ----------------------------------------------------------------------------------------------------

    @abstractmethod
    async def merge(self, elements: Sequence[Element]) -> list[Merged]:
        """Join verified elements into the state; one verdict each, in order.

        Also finds equivocations among what was joined; their evidence is merged and shows up in `watch`. The clock
        advances past everything that was stored. Raises Unwritable. The caller passes none of another run.
        """

    async def write(self, key: str, value: Value) -> Record:
        """Sign a record of this node's own and merge it; None deletes the key.

        Its stamp is greater than all that this node ever used, also before a crash: that is durable before the record
        exists. Under a write-once key that was written before, the same value returns the record that stands.
        Raises InvalidRecord, AlreadyWritten, Unwritable; StateError where this node's clock is far from that of its
        peers or was set back, or where it is not admitted to the run.
        """
        async with self._signing:
            if complaint := self.clocks.complaint:
                raise StateError(complaint)
            kind = KINDS.get(kind_of(key))
            if kind is not None and kind.write_once:
                standing = await self.get(self._me, key)
                if isinstance(standing, Record):
                    if _same(standing.value, value):
                        return standing
                    raise AlreadyWritten(f"{key} was written before, with another value, and can be written only once")
            return await self._write(key, value)

    async def _write(self, key: str, value: Value) -> Record:
        """Sign a record, whatever was signed under this key before."""
        now = self.now()
        stamp = await self._tick(now)
        record = write(self.run_id, self._me, key, value, hlc=stamp, sign=self._sign)
        (verdict,) = await self.merge([record])
        if verdict is Merged.AHEAD:
            ahead = (time_of(stamp) - now) / 1000
            raise StateError(
                f"this node's clock was set back: its records are dated {ahead:.0f} s ahead of it, which nobody "
                "believes; set the clock right, or wait as long"
            )
        if verdict is Merged.STRANGER:
            raise StateError("this node is not admitted to the run, so nobody would keep what it writes")
        return record

    @abstractmethod
    async def _tick(self, now: int) -> int:
        """A stamp greater than all before it, durable as used when this returns; `now` is real time in ms."""

    # --- reading ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def has(self, rank: Rank) -> bool:
        """Whether the element is in the state."""

    @abstractmethod
    async def get(self, author: str, key: str) -> Element | None:
        """The greatest element under a key that has not expired, tombstones included."""

    @abstractmethod
    async def select(self, prefix: str = "", *, author: str | None = None, limit: int) -> list[Element]:
        """Elements whose keys begin with `prefix`, in order of (key, author, rank), tombstones included."""

    @abstractmethod
    async def authors(self, prefix: str) -> frozenset[str]:
        """Whose elements there are with keys that begin with `prefix`: none is parsed, as they may be many."""

    @abstractmethod
    async def newest(self, author: str, limit: int) -> list[Rank]:
        """The ranks of what `author` signed last, the greatest stamp first; what has expired may be among them."""

    async def readable(self, prefix: str, limit: int, what: str, *, author: str | None = None) -> list[Element]:
        """As `select`; nothing, and a warning about `what`, where that cannot be read now."""
        try:
            return await self.select(prefix, author=author, limit=limit)
        except StateError as error:
            logger.warning("%s could not be read: %s", what, error)
            return []

    @abstractmethod
    async def sealed(self, ranks: Sequence[Rank]) -> list[bytes]:
        """The bytes to send of those elements that are here, in the order asked for."""

    @abstractmethod
    def snapshot(self, cutoff: int) -> RankSet:
        """The ranks of all that expires after `cutoff` ms. Cheap; stays as it is while the state goes on."""

    @abstractmethod
    async def stats(self) -> Stats:
        """What is held, for a person."""

    @contextmanager
    def watch(self, prefix: str = "") -> Iterator[trio.MemoryReceiveChannel[Change]]:
        """A bounded feed of what is stored from now on under keys that begin with `prefix`; tells what it lost."""
        send, receive = trio.open_memory_channel[Change](WAITING)
        reader = _Reader(prefix, send)
        self._readers.append(reader)
        try:
            with send, receive:
                yield receive
        finally:
            self._readers.remove(reader)

    def _notify(self, stored: Iterable[Element]) -> None:
        """These elements were stored. Does not block: a reader whose feed is full loses them, and hears how many."""
        for element in stored:
            for reader in self._readers:
                if element.key.startswith(reader.prefix):
                    try:
                        reader.send.send_nowait(Change(element, reader.lost))
                        reader.lost = 0
                    except trio.WouldBlock:
                        reader.lost += 1

    # --- tidying ----------------------------------------------------------------------------------------------------

    @abstractmethod
    async def sweep(self) -> int:
        """Forget what has expired, which `run` does now and then; returns how many elements that were."""

    @abstractmethod
    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write, expire and tidy until cancelled; `merge` and the others work while this runs."""


def _same(one: Value, other: Value) -> bool:
    try:
        return encoding.encode(one) == encoding.encode(other)
    except EncodingError as error:
        raise InvalidRecord(str(error)) from error
