"""The pool: what authors wrote who are not admitted. Small, of this node alone, outside every hash and repair.

A stranger's records are readable here until they expire. Whoever makes many identities fills the pool and nothing else:
each author has few slots, all together a bound in bytes, and the authors that wrote longest ago make room.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from swarmnode.crdt.elements import Element
from swarmnode.crdt.kinds import Kind
from swarmnode.crdt.law import Merged, judge

POOL_BYTES = 1 << 20  # of sealed elements; some 3000 strangers with a lease each
POOL_SLOTS = 4  # of each kind, at most


class Pool:
    """Elements by author, the author that wrote last at the end."""

    def __init__(self, kinds: Mapping[str, Kind], *, max_bytes: int = POOL_BYTES) -> None:
        self._kinds = {name: replace(kind, slots=min(kind.slots, POOL_SLOTS)) for name, kind in kinds.items()}
        self._max_bytes = max_bytes
        self._bytes = 0
        self._authors: dict[str, dict[bytes, Element]] = {}  # author -> id -> element

    def __len__(self) -> int:
        return sum(map(len, self._authors.values()))

    def __iter__(self) -> Iterator[Element]:
        for elements in self._authors.values():
            yield from elements.values()

    def of(self, author: str) -> tuple[Element, ...]:
        return tuple(self._authors.get(author, {}).values())

    def merge(self, element: Element) -> Merged:
        """Keep `element` for a while: POOLED. Other verdicts are the law's on this author's few slots."""
        elements = self._authors.get(element.author, {})
        same_kind = [one for one in elements.values() if one.kind == element.kind]
        ruling = judge(self._kinds[element.kind], same_kind, element)
        if ruling.verdict is not Merged.STORED:
            return ruling.verdict
        if ruling.gone is not None:
            self._drop(elements, ruling.gone)
        elements[element.id] = element
        self._bytes += len(element.sealed)
        self._authors.pop(element.author, None)
        self._authors[element.author] = elements
        while self._bytes > self._max_bytes:
            self._forget(next(iter(self._authors)))
        return Merged.POOLED

    def sweep(self, horizon: int) -> None:
        """Forget what has expired."""
        for author, elements in list(self._authors.items()):
            for element in [one for one in elements.values() if one.expiry <= horizon]:
                self._drop(elements, element)
            if not elements:
                del self._authors[author]

    def _forget(self, author: str) -> None:
        """All that `author` wrote leaves the pool."""
        elements = self._authors.pop(author)
        for element in list(elements.values()):
            self._drop(elements, element)

    def _drop(self, elements: dict[bytes, Element], element: Element) -> None:
        del elements[element.id]
        self._bytes -= len(element.sealed)
