"""Audits on the wire: an auditor asks an author for the record of its work and for states that the record names.

    audit.show    ShowQuery -> Showing      which of these things the author will give; from then on they can be fetched
    bulk          ("audit", run, auditor, roster, id)    each of them, by this auditor only, for SHOWN_FOR seconds

The author answers whom the round's draw names as its auditor, and says so itself: `may_ask`. Nobody else costs it
anything but a call. What is fetched is checked by its id, so an author can show what it signed or nothing.

Who may fail when, and what is then true: an author that answers nothing, shows nothing or is too slow has not lied, it
has *not shown*; what it shows and what contradicts it is a lie; what the auditor itself lacks (a shared state, text,
a trainer) says nothing of the author.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
import trio

from swarmnode.protocols.calls.rpc import CallError, Refuse, Rpc
from swarmnode.protocols.network import NetworkError, PeerId
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.transfer.bulk import Bulk, Key
from swarmnode.protocols.wire import WireError
from swarmnode.training.verify.trace import MAX_TRACE, Trace, Vector, root_of, vector_id

logger = logging.getLogger(__name__)

SHOW = "audit.show"
TIMEOUT = 20.0  # seconds for an answer: the author's trainer gives what it keeps between two of its steps
FETCH_WITHIN = 120.0  # seconds for one thing
SHOWN_FOR = 300.0  # seconds in which what was asked for can be fetched
MAX_ASKED = 32  # ids in one question, and of one auditor in one round: an audit takes a dozen
AT_ONCE = 16  # auditors whom something is shown: one a round in the mean


class Verdict(Enum):
    """What came of an audit."""

    HELD = "held up"
    LIED = "does not hold up"
    NOT_SHOWN = "not shown"


@dataclass(frozen=True)
class Audit:
    """One audit with its evidence: whoever is shown the same states can repeat it."""

    round: int
    author: PeerId
    verdict: Verdict
    why: str
    commit: bytes  # id of the record that binds the author
    trace: bytes = b""  # root of the record of its work
    seed: bytes = b""  # of the chain, which drew author and stretch
    stretch: tuple[int, int, int] = (0, 0, 0)  # round, first step, steps
    start: bytes = b""  # id of the parameters before
    end: bytes = b""  # and of those after
    distance: float = 0.0  # relative, the greatest of parameters and moments
    tolerance: float = 0.0


class NotShown(Exception):
    """The author does not show what it should. The message says what."""


@dataclass(frozen=True)
class ShowQuery:
    run_id: str
    roster: bytes  # that lists the work, and whose seed drew the auditor
    trace: bytes
    ids: tuple[bytes, ...]  # of vectors, and of records

    def __post_init__(self) -> None:
        if len(self.ids) > MAX_ASKED or any(len(id) != 32 for id in (self.roster, self.trace, *self.ids)):
            raise WireError(f"at most {MAX_ASKED} ids of 32 bytes are asked for")


@dataclass(frozen=True)
class Showing:
    """For each id, whether it can be fetched."""

    found: tuple[bool, ...]


class Desk:
    """Shows this node's own work to who may ask for it, and asks others for theirs."""

    def __init__(
        self,
        *,
        run_id: str,
        rpc: Rpc,
        bulk: Bulk,
        runner: Runner,
        may_ask: Callable[[PeerId, ShowQuery], bool],
        find: Callable[[bytes], Awaitable[bytes | None]],
    ) -> None:
        """`find` gives the bytes of what an id names, where it is kept."""
        self._run_id, self._rpc, self._bulk, self._runner = run_id, rpc, bulk, runner
        self._may_ask, self._find = may_ask, find
        self._until: OrderedDict[tuple[PeerId, bytes], float] = OrderedDict()  # auditor, roster: until when it is shown
        self._asked: Counter[tuple[PeerId, bytes]] = Counter()  # ids
        self.shown_bytes = 0
        rpc.serve(SHOW, ShowQuery, self._on_show)

    # --- as an author -------------------------------------------------------------------------------------------------

    async def _on_show(self, peer: PeerId, query: ShowQuery) -> Showing:
        now, whose = trio.current_time(), (peer, query.roster)
        if query.run_id != self._run_id or not self._may_ask(peer, query):
            raise Refuse("not-drawn", "no draw names you as the auditor of this work")
        self._until[whose] = now + SHOWN_FOR
        self._until.move_to_end(whose)
        self.tidy(now)
        self._asked[whose] += len(query.ids)
        if self._asked[whose] > MAX_ASKED:
            raise Refuse("enough", f"{MAX_ASKED} things of this round were shown to you")
        found = []
        for id in query.ids:
            content = await self._find(id)
            found.append(content is not None)
            if content is not None:
                self._bulk.offer((*self._prefix(*whose), id.hex()), content, to=frozenset({peer}))
                self.shown_bytes += len(content)
        return Showing(tuple(found))

    def tidy(self, now: float) -> None:
        """Let go of what was shown for long enough, and of the oldest beyond AT_ONCE."""
        while self._until and (len(self._until) > AT_ONCE or next(iter(self._until.values())) <= now):
            whose, _ = self._until.popitem(last=False)
            del self._asked[whose]
            self._bulk.withdraw(self._prefix(*whose))

    def _prefix(self, auditor: PeerId, roster: bytes) -> Key:
        return ("audit", self._run_id, auditor, roster.hex())

    # --- as an auditor ------------------------------------------------------------------------------------------------

    async def record(self, author: PeerId, query: ShowQuery, root: bytes) -> Trace:
        """The record with this root. Raises NotShown, and BadTrace where the author signed what is none."""
        (raw,) = (await self._fetch(author, query, (root,), MAX_TRACE)).values()
        if root_of(raw) != root:
            raise NotShown("it sent another record than the one that it signed")
        return Trace.decode(raw)

    async def vectors(self, author: PeerId, query: ShowQuery, ids: set[bytes], most: int) -> dict[bytes, Vector]:
        """Vectors of at most so many elements by their ids. Raises NotShown."""
        found = {}
        for id, raw in (await self._fetch(author, query, tuple(sorted(ids)), 4 * most)).items():
            vector = np.frombuffer(raw, "<f4") if len(raw) % 4 == 0 else np.zeros(0, np.float32)
            if await self._runner(lambda vector=vector: vector_id(vector)) != id:  # type: ignore[misc]
                raise NotShown("it sent another state than the one that it signed")
            found[id] = vector
        return found

    async def _fetch(self, author: PeerId, query: ShowQuery, ids: tuple[bytes, ...], most: int) -> dict[bytes, bytes]:
        asked = ShowQuery(query.run_id, query.roster, query.trace, ids)
        try:
            showing = await self._rpc.call(author, SHOW, asked, Showing, timeout=TIMEOUT)
        except CallError as error:
            raise NotShown(f"it does not answer: {error}") from error
        if len(showing.found) != len(ids) or not all(showing.found):
            raise NotShown("it has what it signed no more")
        found = {}
        prefix = self._prefix(self._bulk.me, query.roster)
        for id in ids:
            raw: bytes | memoryview | None = None
            with trio.move_on_after(FETCH_WITHIN):
                try:
                    raw = await self._bulk.fetch(author, (*prefix, id.hex()), max_size=max(1, most))
                except NetworkError as error:
                    raise NotShown(f"it does not send what it shows: {error}") from error
            if raw is None:
                raise NotShown(f"it took more than {FETCH_WITHIN:.0f} s for one thing")
            found[id] = bytes(raw)
        return found
