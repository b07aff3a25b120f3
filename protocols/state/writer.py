"""How a node signs its own records, whatever holds its state: one at a time, each later than all before."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import trio

from swarmnode.crdt import encoding
from swarmnode.crdt.encoding import EncodingError, Value
from swarmnode.crdt.hlc import time_of
from swarmnode.crdt.kinds import Kind, kind_of
from swarmnode.crdt.law import Merged
from swarmnode.crdt.record import InvalidRecord, Record, Sign, write
from swarmnode.protocols.state.backend import Held, NotAdmitted, Said, StateBackend


class Pen:
    """Writes records of `me` into a backend.

    `tick(now)` is a new stamp, durable as used before it returns; `now` gives real time in ms.
    """

    def __init__(
        self,
        backend: StateBackend,
        *,
        me: str,
        sign: Sign,
        kinds: Mapping[str, Kind],
        now: Callable[[], int],
        tick: Callable[[int], Awaitable[int]],
    ) -> None:
        self._backend = backend
        self._me = me
        self._sign = sign
        self._kinds = kinds
        self._now = now
        self._tick = tick
        self._alone = trio.Lock()
        self.held = ""  # why nothing is signed at present

    async def write(self, key: str, value: Value) -> Record:
        """See `StateBackend.write`."""
        async with self._alone:
            if self.held:
                raise Held(self.held)
            kind = self._kinds.get(kind_of(key))
            if kind is not None and kind.write_once:
                standing = await self._backend.get(self._me, key)
                if isinstance(standing, Record):
                    if _same(standing.value, value):
                        return standing
                    raise Said(f"{key} was written before, with another value, and can be written only once")
            now = self._now()
            stamp = await self._tick(now)
            record = write(self._backend.run_id, self._me, key, value, hlc=stamp, sign=self._sign, kinds=self._kinds)
            (verdict,) = await self._backend.merge([record])
            if verdict is Merged.AHEAD:
                ahead = (time_of(stamp) - now) / 1000
                raise Held(
                    f"this node's clock was set back: its records are dated {ahead:.0f} s ahead of it, which nobody "
                    "believes; set the clock right, or wait as long"
                )
            if verdict is Merged.POOLED:
                raise NotAdmitted("this node is not admitted to the run, so nobody would keep what it writes")
            return record


def _same(one: Value, other: Value) -> bool:
    try:
        return encoding.encode(one) == encoding.encode(other)
    except EncodingError as error:
        raise InvalidRecord(str(error)) from error
