"""The one seam between protocols and the replicated state that this node holds.

Two implementations: `node.statestore.StateStore` (SQLite) and `protocols.memorystate.MemoryState` (in memory, for
simulations). Both pass the same conformance suite in `tests/node/storage/test_state_conformance.py`.

An element is a signed record or evidence of equivocation. It is known by its *rank*, 40 bytes: hlc as u64 big-endian,
then its id, so that ranks compare as (hlc, id) do. Ranks are what reconciliation exchanges and what rosters quote.

What `merge` and `write` return is durable: it survives a SIGKILL and, as far as the disk keeps its word, a power cut.
Where the disk takes nothing (full, failing) both raise `Unwritable`, nothing has changed, and the next call tries
again. What `has`, `snapshot` and `state_hash` tell is in memory, at once, and never more than what is durable.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import trio

from swarmnode.crdt.encoding import Value
from swarmnode.crdt.law import Merged
from swarmnode.crdt.ranges import Union
from swarmnode.crdt.record import Element, Record

RANK = 40  # bytes of a rank
Rank = bytes


class StateError(Exception):
    """The state could not do what it was asked; never a reason to end the daemon. The text is fit for a person."""


class Unwritable(StateError):
    """The disk took nothing: nothing has changed, nothing is acknowledged. Try again later."""


class Held(StateError):
    """This node signs nothing at present; see `StateBackend.hold`."""


class Said(StateError):
    """This node has said something else under a write-once key. Saying this as well would convict it."""


class NotAdmitted(StateError):
    """This node is not admitted to the run, so nobody would keep what it writes."""


@dataclass(frozen=True)
class Change:
    """An element that was stored, and how many the reader missed before it because it was too slow."""

    element: Element
    lost: int


@dataclass(frozen=True)
class Stats:
    """What a node holds, for a person."""

    elements: int
    authors: int
    size: int  # bytes of the sealed elements
    kinds: dict[str, int]  # elements by kind
    pooled: int  # records of authors who are not admitted
    disk: int  # bytes of files; 0 in memory
    clock: int  # the greatest stamp made or seen
    warning: str  # what the owner should know, "" for nothing


def rank_of(hlc: int, id: bytes) -> Rank:
    """The rank of an element."""
    return hlc.to_bytes(8, "big") + id


class StateBackend(Protocol):
    """The elements of one run, with the clock of their owner. Methods that are not async do not block."""

    @property
    def run_id(self) -> str: ...

    async def merge(self, elements: Sequence[Element]) -> list[Merged]:
        """Join verified elements into the state; one verdict each, in order. Raises Unwritable.

        Also finds equivocations among what was joined; their evidence is merged and shows up in `watch`. The clock
        advances past everything that was stored.
        """

    async def write(self, key: str, value: Value) -> Record:
        """Sign a record of this node's own and merge it; None deletes the key.

        Its stamp is greater than all that this node ever used, also before a crash: that is durable before the record
        exists. Under a write-once key that was written before, the same value returns the record that stands.
        Raises InvalidRecord, Said, Held, NotAdmitted, Unwritable.
        """

    def hold(self, reason: str) -> None:
        """Sign nothing while `reason` is not empty: `write` raises Held with it."""

    def has(self, rank: Rank) -> bool:
        """Whether the element is in the state; the pool does not count."""

    async def get(self, author: str, key: str) -> Element | None:
        """The greatest element under a key that has not expired, tombstones included; the pool is looked at as well."""

    async def select(self, prefix: str = "", *, author: str | None = None, limit: int) -> list[Element]:
        """Elements whose keys begin with `prefix`, in order of (key, author, rank), tombstones included."""

    async def sealed(self, ranks: Sequence[Rank]) -> list[bytes]:
        """The bytes to send of those elements that are here, in the order asked for."""

    def snapshot(self, cutoff: int) -> Union:
        """The ranks of all that expires after `cutoff` ms. Cheap; stays as it is while the state goes on."""

    def state_hash(self, cutoff: int) -> str:
        """`law.state_hash` of all that expires after `cutoff` ms; quoted together with the cut-off.

        Raises ValueError for a cut-off in the past of this replica, of which it may have forgotten something. It lists
        and hashes every rank, some 20 ms for 100 000.
        """

    def watch(self, prefix: str = "") -> AbstractContextManager[trio.MemoryReceiveChannel[Change]]:
        """A bounded feed of what is stored from now on under keys that begin with `prefix`; tells what it lost."""

    async def stats(self) -> Stats: ...

    async def sweep(self) -> int:
        """Forget what has expired, which `run` does now and then; returns how many elements that were."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write, expire and tidy until cancelled; `merge` and the others work while this runs."""
