"""A small swarm of the method `open` on simnet, some of whose nodes run another program: real rounds, virtual time.

All nodes are validators. Tests take five: what a round does does not depend on how many take part, and a round of
sixteen costs ten times as much of the machine. A changed node is a real one of which the adversary replaced a part.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import pairwise
from statistics import median
from string import ascii_lowercase
from typing import Any, TypeVar

from simnodes import RUN, now
from simswarm import SimSwarm, simulate

from swarmnode.crdt.encoding import Value
from swarmnode.crdt.hlc import stamp_at
from swarmnode.crdt.record import Record
from swarmnode.crdt.record import write as write_record
from swarmnode.protocols.calls.rpc import CallError
from swarmnode.protocols.chain.forks import Block
from swarmnode.protocols.chain.state import leaders
from swarmnode.protocols.chain.statements import VERDICTS, Roster
from swarmnode.protocols.methods.open.method import Open
from swarmnode.protocols.state.wire import Push, Pushed
from swarmnode.testing.simnet import SimWorld

NODES = 5  # of a test; `python tests/attacks --nodes 16` takes more
SECONDS_PER_STEP = 2.0  # of five: what the network takes is little beside it, as in real rounds
WARM = 3  # rounds before an attack, in which waits adapt
PATIENCE = 900.0  # virtual seconds in which some rounds must end
UNDEFENDED_PATIENCE = 300.0  # the same, of nodes without a defence: 25 usual rounds

Found = TypeVar("Found")
Say = Callable[[Any], Awaitable[Any]]


class Scene:
    """A running swarm and what its honest nodes came to."""

    def __init__(self, swarm: SimSwarm, names: tuple[str, ...]) -> None:
        self.swarm, self.names = swarm, names
        self.bad: set[str] = set()  # names of nodes that run another program, or are gone
        self.patience = PATIENCE

    @property
    def minority(self) -> tuple[str, ...]:
        """As many nodes as can be wrong without being a majority, the last ones: two of five, seven of sixteen."""
        return self.names[len(self.names) // 2 + 1 :]

    @property
    def honest(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name not in self.bad)

    @property
    def round(self) -> int:
        """The last round that an honest node told the end of."""
        return max(max(self.swarm.nodes[name].rounds, default=-1) for name in self.honest)

    def method(self, name: str) -> Open:
        return self.swarm.nodes[name].open

    def peer(self, name: str) -> str:
        return self.swarm.peer(name)

    def leader(self, name: str, attempt: int = 0) -> str:
        """Who leads an attempt of the round that a node takes part in."""
        held = self.method(name).store
        peer = leaders(held.block.chain)[attempt]
        return next(other for other in self.names if self.peer(other) == peer)

    async def done(self, rounds: int) -> None:
        """Until all honest nodes told so many more rounds."""
        await self.swarm.round_done(self.round + rounds, *self.honest, within=self.patience)

    def usual(self) -> float:
        """Seconds of a round before the attack."""
        return median(self.swarm.nodes[self.honest[0]].rounds[number]["seconds"] for number in range(1, WARM))

    def slowest(self, first: int) -> float:
        """Seconds of the slowest round from `first` on, at any honest node."""
        return max(
            (
                event["seconds"]
                for name in self.honest
                for number, event in self.swarm.nodes[name].rounds.items()
                if number >= first
            ),
            default=float("nan"),
        )

    def split(self, first: int = 0) -> list[int]:
        """Rounds from `first` on of which honest nodes told different states."""
        told: dict[int, set[str]] = {}
        for name in self.honest:
            for number, event in self.swarm.nodes[name].rounds.items():
                told.setdefault(number, set()).add(event["state_hash"])
        return sorted(number for number, hashes in told.items() if len(hashes) > 1 and number >= first)

    def moved(self, first: int) -> tuple[int, int]:
        """Rounds from `first` on in which the parameters of the first honest node moved, and all of them."""
        bits = [
            event["bits"] for name, event in self.swarm.told if name == self.honest[0] and event["round"] >= first - 1
        ]
        return sum(before != after for before, after in pairwise(bits)), max(0, len(bits) - 1)

    def blocks(self, first: int) -> list[Block]:
        """The chain of the first honest node, from round `first` on."""
        held = self.method(self.honest[0]).store
        return [block for block in held.tree.path(held.tip) if block.chain.round > first]

    def verdicts(self, author: str, first: int) -> list[str]:
        """What rosters from round `first` on say of the commits of a node, in order."""
        held, found = self.method(self.honest[0]).store, []
        for block in self.blocks(first):
            book = held.logs.get(block.parent)
            if block.roster is None or book is None:
                continue
            mine = [entry for entry in block.roster.entries if book.commits[entry.commit].author == self.peer(author)]
            found.append(VERDICTS[mine[0].verdict] if mine else "not listed")
        return found

    def weight(self, author: str, first: int) -> float:
        """The share of all weight that the contributions of a node have in the rosters from round `first` on."""
        held, mine, all_of_it = self.method(self.honest[0]).store, 0.0, 0
        for block in self.blocks(first):
            log = held.logs.get(block.parent)
            if block.roster is None or log is None or not block.roster.accepted:
                continue
            all_of_it += 1
            mine += sum(
                entry.weight / block.roster.total
                for entry in block.roster.accepted
                if log.commits[entry.commit].author == self.peer(author)
            )
        return mine / max(1, all_of_it)

    def followed(self, first: int) -> list[Roster]:
        """The rosters from round `first` on that the first honest node follows."""
        return [block.roster for block in self.blocks(first) if block.roster is not None]

    def attempts(self, first: int) -> list[int | None]:
        """Attempts of the rosters from round `first` on; None for empty ones."""
        return [block.roster.attempt if block.roster else None for block in self.blocks(first)]

    async def evidence(self, name: str) -> int:
        """Records of equivocation that a node holds."""
        return len(await self.method(name).sync._state.select("evidence", limit=64))

    # --- what an adversary uses -------------------------------------------------------------------------------------

    def change_words(self, name: str, say: Callable[[Say, Any], Awaitable[Any]]) -> None:
        """Let `say` decide what becomes of each statement of a node, given the usual way to make it."""
        signer = self.method(name).signer
        usual = signer.publish
        signer.publish = lambda statement: say(usual, statement)  # type: ignore[method-assign, assignment]

    def signs(self, name: str, key: str, value: Value) -> Record:
        """A record of a node's that it has told nobody, dated now."""
        network = self.swarm.nodes[name].network
        hlc = stamp_at(now(), len(repr(value)) % 65536)
        return write_record(RUN, network.me, key, value, hlc=hlc, sign=network.sign)

    async def tell(self, name: str, record: Record, *others: str) -> None:
        """Push a record to some nodes, past what the node's own state allows."""
        rpc = self.method(name).sync._rpc
        for other in others:
            try:
                await rpc.call(self.peer(other), "state.push", Push(RUN, (record.sealed,)), Pushed, timeout=5)
            except CallError:
                continue


def in_swarm(body: Callable[[Scene], Awaitable[Found]], *, nodes: int = NODES) -> Found:
    """What `body` returns of a swarm whose nodes, called a, b, c …, did WARM rounds."""
    names = tuple(ascii_lowercase[:nodes])
    found: list[Found] = []

    async def warmed(swarm: SimSwarm) -> None:
        await swarm.round_done(WARM - 1, *names)
        found.append(await body(Scene(swarm, names)))

    world = SimWorld(latency=0.02)
    simulate(warmed, *names, world=world, method="open", validators=names, seconds_per_step=SECONDS_PER_STEP)
    return found[0]
