"""Swarms of strangers on simnet whose nodes keep ledgers: what they come to think of one another."""

from __future__ import annotations

import pytest
import trio
from ledgers import LEDGERS, keep_ledgers
from simswarm import SimSwarm

from swarmnode.protocols.chain.statements import FULL_STANDING
from swarmnode.protocols.reputation.attestation import Saw
from swarmnode.testing.simnet import SimWorld, run_with_nursery
from swarmnode.testing.toy import ToyModel

NAMES = ("a", "b", "c", "d", "e")
ROUNDS = 8


def test_nodes_see_what_everybodys_work_was_worth_also_those_who_judge_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_ledgers(monkeypatch)

    async def main(nursery: trio.Nursery) -> None:
        swarm = SimSwarm(
            nursery, world=SimWorld(latency=0.05), method="open", validators=NAMES[:4],
            exchange={"codec": "int8"},  # topk sends one or two of so few elements, some of which overshoot
            model=lambda name, peer: ToyModel(dimension=64, peer_id=peer, batch=16, noise=0.1),
        )  # fmt: skip
        await swarm.begin(NAMES)
        await swarm.round_done(ROUNDS, *NAMES)
        peers = {swarm.peer(name) for name in NAMES}
        for name in NAMES:
            ledger = LEDGERS[swarm.peer(name)]
            view = ledger.view()
            assert set(view) == peers
            assert min(view[peer].account.rounds for peer in peers) >= ROUNDS - 2
            assert {view[peer].score for peer in peers} == {1.0}
            assert {ledger.roster_standing(peer) for peer in peers} == {FULL_STANDING}
            measured = [f for peer in peers for f in ledger.found(peer) if f.saw is Saw.GAIN and f.good]
            assert bool(measured) == (name in NAMES[:4])
            ledger.close()
            synced = [f for peer in peers for f in ledger.found(peer) if f.saw is Saw.SYNC]
            assert synced and not any(f.bad for f in synced)

    run_with_nursery(main, seed=2)
