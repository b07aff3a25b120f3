"""The hash chains from which the seeds of rounds are drawn (DESIGN.md, "Randomness").

An author draws a secret, hashes it LENGTH times and registers the end, its *anchor*, in every commit. Whenever it leads
a round it gives the next preimage. Nobody can predict it, everybody can check it, and the leader's only choice is to
withhold it, by making no roster: one bit.
"""

from __future__ import annotations

import hashlib

LENGTH = 1 << 14  # rosters that one author can lead before it must register anew
_STRIDE = 1 << 7  # every so many values are kept


def step(value: bytes) -> bytes:
    """The value that `value` is the preimage of."""
    return hashlib.sha256(b"swarmnode/beacon/1\0" + value).digest()


class HashChain:
    """One author's chain, derived from 32 secret bytes; making it hashes LENGTH times, some 10 ms."""

    def __init__(self, secret: bytes) -> None:
        value = hashlib.sha256(b"swarmnode/beacon/secret/1\0" + secret).digest()
        self._kept = [value]  # values 0, STRIDE, 2 STRIDE, …
        self._places = {}
        for place in range(1, LENGTH + 1):
            value = step(value)
            if place % _STRIDE == 0:
                self._kept.append(value)
                self._places[value] = place
        self.anchor = value

    def preimage(self, value: bytes) -> bytes:
        """What hashes to `value`, a value of this chain; empty where there is none before it, or it is of another."""
        place = self._place(value)
        if not place:
            return b""
        before = self._kept[(place - 1) // _STRIDE]
        for _ in range((place - 1) % _STRIDE):
            before = step(before)
        return before

    def _place(self, value: bytes) -> int:
        """How many steps `value` is from the secret; 0 where it is not in the chain."""
        at = value
        for ahead in range(_STRIDE):
            if at in self._places:
                return self._places[at] - ahead
            at = step(at)
        return 0
