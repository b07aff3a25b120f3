"""A peer over its limits is slowed, refused, disconnected for a while, and let back: on real loopback sockets."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import trio
import trio.testing
from hosts import echo, network, running, until

from swarmnode.node.host.limits import Limits
from swarmnode.protocols.calls.rpc import PROTOCOL, CallError, Refused, Rpc
from swarmnode.protocols.network import NetworkError, StreamBroken, Unreachable
from swarmnode.protocols.peers.scoring import Kind, ScoringLimits, Standing

ECHO = "/test/echo/1"
BAN = 1.5  # seconds


@dataclass(frozen=True)
class Text:
    text: str = ""


async def repeat(peer: str, request: Text) -> Text:
    return request


class Node:
    def __init__(self, limits: Limits | None = None) -> None:
        self.network = network(limits=limits or Limits())
        self.network.serve(ECHO, echo)
        self.rpc = Rpc(self.network)
        self.rpc.serve("repeat", Text, repeat)
        self.network.scoring.watch(self.rpc.violations)

    @property
    def me(self) -> str:
        return self.network.me

    def sees(self, other: Node) -> bool:
        return any(view.peer == other.me for view in self.network.peers())


async def test_a_peer_that_breaks_rules_is_refused_then_disconnected_and_later_let_back() -> None:
    host, peer, other = Node(Limits(conduct=ScoringLimits(first_ban=BAN))), Node(), Node()
    async with running(host.network, host.rpc, peer.network, peer.rpc, other.network, other.rpc):
        for node in (peer, other):
            await node.network.connect(host.network.addresses[0])
        scoring = host.network.scoring
        offend = lambda: host.rpc.violations.note(peer.me, "nonsense", Kind.LIE)  # noqa: E731

        offend()
        assert scoring.standing(peer.me) is Standing.SLOWED
        assert await peer.rpc.call(host.me, "repeat", Text("slow"), Text, timeout=5) == Text("slow")

        offend()
        with pytest.raises(Refused, match="refuses the peer for a while") as refused:
            await peer.rpc.call(host.me, "repeat", Text("no"), Text, timeout=5)
        assert refused.value.code == "busy"
        stream = await peer.network.open_stream(host.me, ECHO)
        with pytest.raises(StreamBroken):
            await stream.send_all(b"anybody?")
            await stream.receive_some(100)

        offend()
        offend()
        assert scoring.standing(peer.me) is Standing.BANNED
        await until(lambda: not host.sees(peer) and not peer.sees(host))
        with pytest.raises(Unreachable, match="keeps away"):
            await host.network.connect(peer.me)
        while scoring.standing(peer.me) is Standing.BANNED:  # it comes again and is turned away
            with trio.move_on_after(0.2):
                await peer.network.connect(host.network.addresses[0])
                await until(lambda: not host.sees(peer))
            await trio.sleep(0.02)

        assert host.network.connections._turned_away["banned"] >= 1
        assert other.sees(host)
        assert await other.rpc.call(host.me, "repeat", Text("hi"), Text, timeout=5) == Text("hi")
        with trio.fail_after(5):
            answer = Text()
            while answer != Text("again"):
                try:  # the last connection that was turned away may still be ending
                    await peer.network.connect(host.network.addresses[0])
                    answer = await peer.rpc.call(host.me, "repeat", Text("again"), Text, timeout=1)
                except (CallError, NetworkError):
                    await trio.sleep(0.02)


async def test_whom_the_owner_blocked_is_not_called_banned_and_is_told_once_however_often_it_comes() -> None:
    host, peer = Node(), Node()
    async with running(host.network, peer.network):
        await peer.network.connect(host.network.addresses[0])
        await until(lambda: host.sees(peer))
        host.network.scoring.block(peer.me)
        await until(lambda: not host.sees(peer))
        for times in (1, 2):
            with trio.move_on_after(5):
                await peer.network.connect(host.network.addresses[0])
                await until(lambda times=times: host.network.connections._turned_away["blocked"] == times)  # type: ignore[misc]
        assert [each.why for each in host.network.connections.history(peer.me)][2:] == ["turned away: blocked"]
        nameless = peer.network.addresses[0].partition("/p2p/")[0]  # as a link has it: who answers is known afterwards
        with pytest.raises(Unreachable, match="is blocked by this node's owner: swarmnode peers unblock"):
            await host.network.connect(nameless)


async def test_nonsense_on_the_wire_is_what_leads_down_the_ladder() -> None:
    host, peer = Node(), Node()
    async with running(host.network, host.rpc, peer.network, peer.rpc):
        await peer.network.connect(host.network.addresses[0])
        seen = []
        with trio.fail_after(10):
            while host.network.scoring.standing(peer.me) is not Standing.BANNED:
                try:
                    stream = await peer.network.open_stream(host.me, PROTOCOL)
                    await stream.send_all(b"\x05\xc1\xc1\xc1\xc1\xc1")
                    while await stream.receive_some(100):
                        pass
                except NetworkError:
                    await trio.sleep(0.01)
                seen.append(host.network.scoring.standing(peer.me))
                if seen[-1] is Standing.REFUSED:
                    break  # its streams are reset before it can say more
        assert sorted(seen) == seen
        assert set(seen) >= {Standing.SLOWED, Standing.REFUSED}


async def test_a_connection_that_breaks_the_multiplexers_rules_counts_against_its_peer() -> None:
    host, peer = Node(), Node()
    async with running(host.network, peer.network):
        await peer.network.connect(host.network.addresses[0])
        session = peer.network.connections.of(host.me)[0].session
        session.answer(b"\x07" * 12)  # no such version
        await until(lambda: host.network._allowance.violations.count(peer.me) == 1)


async def test_withdrawn_keys_are_provided_no_more() -> None:
    host, peer = Node(), Node()
    key = bytes(range(32))
    async with running(host.network, peer.network):
        await peer.network.connect(host.network.addresses[0])
        await until(lambda: host.network.kademlia.speakers() and peer.network.kademlia.speakers())
        await host.network.provide(key)
        assert await peer.network.find_providers(key) == (host.me,)
        host.network.withdraw(key)
        told = peer.network.kademlia.provider_store
        assert host.network.kademlia.provider_store.get_providers(key) == []
        told.withdraw(key, host.network._host.get_id())  # as if it had run out
        host.network._routing.peer_arrived()  # what makes a node announce everything again
        await trio.testing.wait_all_tasks_blocked(0.2)
        assert await peer.network.find_providers(key) == ()
