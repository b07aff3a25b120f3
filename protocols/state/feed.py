"""Who follows changes of the state: a bounded feed for each reader, which says how much a slow one missed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import trio

from swarmnode.crdt.record import Element
from swarmnode.protocols.state.backend import Change

WAITING = 256  # changes kept for one reader; some 200 kB of notes


class _Reader:
    def __init__(self, prefix: str, send: trio.MemorySendChannel[Change]) -> None:
        self.prefix = prefix
        self.send = send
        self.lost = 0


class Feeds:
    """The readers of one state."""

    def __init__(self) -> None:
        self._readers: list[_Reader] = []

    @contextmanager
    def watch(self, prefix: str) -> Iterator[trio.MemoryReceiveChannel[Change]]:
        """Changes under keys that begin with `prefix`, from now on."""
        send, receive = trio.open_memory_channel[Change](WAITING)
        reader = _Reader(prefix, send)
        self._readers.append(reader)
        try:
            with send, receive:
                yield receive
        finally:
            self._readers.remove(reader)

    def tell(self, stored: Iterable[Element]) -> None:
        """These elements were stored. Does not block: a reader whose feed is full loses them, and hears how many."""
        for element in stored:
            for reader in self._readers:
                if element.key.startswith(reader.prefix):
                    try:
                        reader.send.send_nowait(Change(element, reader.lost))
                        reader.lost = 0
                    except trio.WouldBlock:
                        reader.lost += 1
