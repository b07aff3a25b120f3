"""The layout of a model in one flat vector: name, shape and offset of each tensor, the same on every node."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import msgpack


@dataclass(frozen=True)
class Slot:
    """One tensor: `vector[offset : offset + size].reshape(shape)`; offset and size in elements."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The table of all tensors, in the model's own order, without gaps."""

    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, shapes: list[tuple[str, tuple[int, ...]]]) -> Layout:
        """Lay tensors of these names and shapes one behind the other."""
        slots, offset = [], 0
        for name, shape in shapes:
            slot = Slot(name, tuple(shape), offset)
            slots.append(slot)
            offset += slot.size
        return cls(tuple(slots))

    @property
    def parameters(self) -> int:
        """Elements of the flat vector."""
        return self.slots[-1].offset + self.slots[-1].size if self.slots else 0

    def encode(self) -> bytes:
        """Canonical bytes, part of every state hash."""
        packed: bytes = msgpack.packb([[s.name, list(s.shape), s.offset] for s in self.slots])
        return packed

    @property
    def digest(self) -> str:
        """sha-256 of `encode()`, 64 hex digits."""
        return hashlib.sha256(self.encode()).hexdigest()
