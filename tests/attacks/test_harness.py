"""The simulated swarm holds what attacks need: honest peers who measure, and adversaries among them."""

from __future__ import annotations

import pytest
import trio
from adversaries.transport import call
from harness import SWARM, Adversary, SimPeer, Swarm, percentile, simulated_swarm
from victim import Blob, Methods

from swarmnode.protocols.calls.rpc import PROTOCOL, RpcLimits
from swarmnode.testing.simnet import run_simulation

FAULTY = 3  # a fifth of the swarm


class SleepingCalls(Adversary):
    """All malicious peers together ask one honest peer for more slow answers than it gives to everybody."""

    name = "calls that sleep"
    calls = RpcLimits().serves_in_all // FAULTY + 1

    async def attack(self, target: Swarm) -> None:
        async with trio.open_nursery() as nursery:
            for attacker in target.malicious:
                nursery.start_soon(self._flood, attacker, target.honest[0])

    async def _flood(self, attacker: SimPeer, victim: SimPeer) -> None:
        stream = await attacker.network.open_stream(victim.network.me, PROTOCOL)
        await stream.send_all(b"".join(call(number, "sleep", Blob()) for number in range(1, self.calls + 1)))
        while await stream.receive_some(1 << 16):
            pass


def test_a_fifth_of_a_simulated_swarm_delays_no_honest_call() -> None:
    async def main() -> list[float]:
        taken: list[float] = []

        async def ask(peer: SimPeer, victim: SimPeer) -> None:
            for _ in range(5):
                began = trio.current_time()
                await peer.rpc.call(victim.network.me, "echo", Blob(b"x"), Blob, timeout=5.0)
                taken.append(trio.current_time() - began)
                await trio.sleep(0.1)

        async with simulated_swarm(FAULTY) as swarm, trio.open_nursery() as attack:
            assert (len(swarm.honest), len(swarm.malicious)) == (SWARM - FAULTY, FAULTY)
            victim, *others = swarm.honest
            methods = Methods()
            for method in (methods.echo, methods.sleep):
                victim.rpc.serve(method.__name__, Blob, method)
            assert all(len(peer.network.peers()) == SWARM - 1 for peer in swarm.peers)
            attack.start_soon(SleepingCalls().attack, swarm)
            await trio.sleep(1.0)
            async with trio.open_nursery() as nursery:
                for peer in others:
                    nursery.start_soon(ask, peer, victim)
            attack.cancel_scope.cancel()
        return taken

    taken = run_simulation(main)
    assert len(taken) == 5 * (SWARM - FAULTY - 1)
    assert percentile(taken, 0.5) == pytest.approx(0.04)
    assert max(taken) == pytest.approx(0.08)  # the first call of each opens its stream
