"""Two daemons with one key find each other, and the younger stops.

They cannot meet: to the network they are one peer. But each reads the leases that the other signs in their common name.
A lease carries the number that its daemon drew when it started and since when it runs; whoever reads a lease of its own
name and another number answers with a lease that names that number as its rival. A lease that names *this* daemon as
its rival was signed after this one started, so the other is alive: no clock and no message of a dead life can feign it.
The older goes on, the younger raises KeyInUse; what it signed until then may have been replaced.
"""

from __future__ import annotations

from swarmnode.crdt.encoding import Value

MAX_RIVALS = 16  # earlier lives whose leases are answered once


class KeyInUse(Exception):
    """Another daemon with this node's key is alive and older. The text is fit for a person."""


class Twins:
    """One daemon among those with its key. `instance` is a random number, `since` the ms at which it started."""

    def __init__(self, instance: int, since: int) -> None:
        self._instance = instance
        self._since = since
        self._rival: int | None = None
        self._answered: set[int] = set()

    @property
    def mark(self) -> dict[str, int]:
        """What a lease of this daemon says about it."""
        return {"instance": self._instance, "since": self._since, **({"rival": self._rival} if self._rival else {})}

    def saw(self, lease: Value) -> bool:
        """Look at a lease in this node's name; whether it is to be answered by another. Raises KeyInUse."""
        match lease:
            case None:
                return True  # another life gave up the lease, and this one goes on
            case {"instance": int() as other, "since": int() as since, **rest} if other != self._instance:
                named = rest.get("rival") == self._instance
            case _:
                return False
        self._rival = other
        if not named:
            first = other not in self._answered and len(self._answered) < MAX_RIVALS
            if first:
                self._answered.add(other)
            return first
        if (since, other) < (self._since, self._instance):
            seconds = (self._since - since) // 1000
            raise KeyInUse(
                f"another daemon runs with this node's key, since {seconds} s before this one. Two with one key are "
                "taken for one that lies. Stop the other first, or give this one a key of its own (another --data-dir)"
            )
        return True
