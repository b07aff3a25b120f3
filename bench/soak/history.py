"""What the nodes said of the rounds: who held which state, whether they agree, and how long nothing moved. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Told:
    """A node's word that it holds a state."""

    node: int
    at: float  # seconds into the soak
    members: int  # of the round that led there; 0 where it was fetched


@dataclass
class History:
    """States by their number: the rounds that are in them."""

    states: dict[int, dict[str, list[Told]]] = field(default_factory=dict)  # number -> hash -> who told it
    newest: dict[int, tuple[int, str, float]] = field(default_factory=dict)  # node -> number, hash, when
    furthest: int = 0  # of those that two nodes or more made
    moved_at: float = 0.0
    longest_stall: float = 0.0  # seconds in which `furthest` stood still
    stalled_at: int = 0
    rounds: int = 0  # events of nodes
    seconds: list[float] = field(default_factory=list)  # of each, as its node measured it
    computing: list[float] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)

    def add(self, node: int, event: Mapping[str, Any], at: float) -> None:
        """Note an event; others than of rounds and of catching up are nothing to it."""
        if event["event"] == "round":
            number, members = event["round"] + 1, event["members"]
            self.rounds += 1
            self.seconds.append(event["seconds"])
            self.computing.append(event["compute_seconds"])
            self.outcomes[event["outcome"]] = self.outcomes.get(event["outcome"], 0) + 1
        elif event["event"] == "caught_up":
            number, members = event["round"], 0
        else:
            if event["event"] == "abandoned":
                self.outcomes["Abandoned"] = self.outcomes.get("Abandoned", 0) + 1
            return
        self.states.setdefault(number, {}).setdefault(event["state_hash"], []).append(Told(node, at, members))
        self.newest[node] = (number, event["state_hash"], at)
        if members > 1 and number > self.furthest:
            self._note_stall(at)
            self.furthest, self.moved_at = number, at

    def end(self, at: float) -> None:
        """No more will come: what stands still now has stood still until `at`."""
        self._note_stall(at)

    def _note_stall(self, at: float) -> None:
        if at - self.moved_at > self.longest_stall:
            self.longest_stall, self.stalled_at = at - self.moved_at, self.furthest

    def shared(self) -> int:
        """States that two nodes or more told."""
        return sum(len({told.node for by in hashes.values() for told in by}) > 1 for hashes in self.states.values())

    def forks(self) -> dict[int, dict[str, list[Told]]]:
        """States of which nodes told different hashes."""
        return {number: hashes for number, hashes in sorted(self.states.items()) if len(hashes) > 1}

    def contradictions(self) -> list[int]:
        """Forks that two companies of nodes made: more than one hash came from a round of several members.

        A node that cannot reach anybody goes on alone, and takes over the others' history when it is back: such a fork
        is no contradiction.
        """
        return [
            number
            for number, hashes in self.forks().items()
            if sum(any(told.members > 1 for told in by) for by in hashes.values()) > 1
        ]

    def in_step(self, nodes: int, since: float) -> int | None:
        """The newest state that each of so many nodes told since then, with one hash; None where there is none."""
        for number in sorted(self.states, reverse=True):
            for by in self.states[number].values():
                if len({told.node for told in by if told.at >= since}) == nodes:
                    return number
        return None
