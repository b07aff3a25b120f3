"""In a run that asks for work, a node with a free identity gets nothing that costs others, whatever it claims."""

from __future__ import annotations

from simswarm import SimSwarm, simulate

from swarmnode.protocols.state.membership import work_of
from swarmnode.testing.simnet import SimWorld

BITS = 3


def named(world: SimWorld, *, worthy: bool) -> str:
    """A name whose identity in this world has the work, or lacks it."""
    names = (f"n{number}" for number in range(200))
    return next(name for name in names if (work_of(world.node(name).me) >= BITS) == worthy)


def test_a_free_identity_has_no_lease_and_no_commit_while_one_that_cost_work_contributes() -> None:
    world = SimWorld(latency=0.05)
    worthy, cheap = named(world, worthy=True), named(world, worthy=False)

    async def body(swarm: SimSwarm) -> None:
        swarm.trusting.add(cheap)  # it runs a program without the rule
        await swarm.begin(("a", "b", "c", worthy, cheap))
        await swarm.round_done(5, "a", "b", "c", worthy)
        for name in ("a", "b", "c", worthy):
            method = swarm.nodes[name].open
            held, members = method.store, swarm.nodes[name].session._context.membership.members()
            authors = {said.author for book in held.logs.values() for said in book.commits.values()}
            assert swarm.peer(cheap) not in {*members, *authors, *held.last_heads}
            worked = {worked.author for roster in held.block.chain.history for worked in roster}
            assert swarm.peer(worthy) in worked and swarm.peer(cheap) not in worked

    simulate(body, world=world, method="open", validators=("a", "b", "c"), identity_bits=BITS)
