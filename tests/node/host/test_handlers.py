"""A node learns through a peer that a handler of its own is wedged, restarts it, and lets no liar have it do so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from hosts import network, running, until

from swarmnode.node.host import answering
from swarmnode.node.host.answering import METHOD, PEERS, PROBES, Answering, Probe, Probed
from swarmnode.node.host.limits import Limits
from swarmnode.node.nat.traversal import NatTraversal
from swarmnode.protocols.calls.rpc import PROTOCOL as RPC
from swarmnode.protocols.calls.rpc import Refused, Rpc
from swarmnode.protocols.network import Stream
from swarmnode.protocols.peers.hello import PROTOCOL as HELLO
from swarmnode.protocols.peers.hello import greet, serve_hello
from swarmnode.protocols.transfer.bulk import PROTOCOL as BULK
from swarmnode.protocols.transfer.bulk import Bulk

WEDGE = "/test/wedge/1"
WORK = "/test/work/1"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "WITHIN", 0.3)


class Side:
    """A node as far as streams and calls go, with a protocol that can be wedged."""

    def __init__(self) -> None:
        limits = Limits()
        self.network = network(limits=limits)
        self.rpc = Rpc(self.network, limits=limits.rpc)
        self.bulk = Bulk(self.network, limits=limits.bulk)
        self.nat = NatTraversal(self.network, limits=limits.relay, upnp=False)
        serve_hello(self.network, "test")
        served = {RPC: self.rpc.run, BULK: self.bulk.run}
        self.parts = [SimpleNamespace(run=partial(self.network.defects.keep, run)) for run in served.values()]
        self.answering = Answering(self.network, self.rpc, served)
        self.lock = trio.Lock()
        self.wedged = False
        self.network.serve(WEDGE, self.serve)

    async def serve(self, stream: Stream) -> None:
        """Deadlocks once it is wedged: whoever has the lock waits for ever, and all others wait for the lock."""
        async with self.lock:
            if self.wedged:
                await trio.sleep_forever()
            while await stream.receive_some(100):
                pass


@asynccontextmanager
async def two() -> AsyncIterator[tuple[Side, Side]]:
    """Two connected nodes, each of which knows what the other serves."""
    a, b = Side(), Side()
    async with running(*(part for side in (a, b) for part in (side.network, *side.parts))):
        await a.network.connect(b.network.addresses[0])
        await until(lambda: a.network.speaks(b.network.me, WEDGE) and b.network.speaks(a.network.me, WEDGE))
        yield a, b


async def test_every_protocol_of_a_node_lets_go_of_a_stream_on_which_nothing_comes() -> None:
    async with two() as (a, b):
        served = a.network.handlers.protocols
        assert {RPC, BULK, HELLO, WEDGE, "/ipfs/kad/1.0.0", "/libp2p/autonat/1.0.0", "/libp2p/dcutr"} <= set(served)
        assert await a.answering.check(b.network.me)
        assert not a.answering.problems() and not a.answering._silent and not a.answering._restarts
        assert a.rpc.violations.count(b.network.me) == 0, "a probe is no offence"


async def test_a_wedged_handler_is_told_restarted_and_answers_again() -> None:
    async with two() as (a, b):
        a.wedged = True
        victim = await b.network.open_stream(a.network.me, WEDGE)  # takes the lock, for ever
        await trio.testing.wait_all_tasks_blocked(0.02)
        a.wedged = False  # what is wedged stays so by itself
        assert await a.answering.check(b.network.me)
        assert [text for text in a.answering.problems() if WEDGE in text and "restarted once" in text]
        assert a.answering._restarts == {WEDGE: 1}, "all others went on"
        await victim.aclose()
        assert await a.answering.check(b.network.me)
        assert not a.answering.problems() and not a.lock.locked()


async def test_one_that_stays_wedged_is_restarted_once_a_while_and_stays_a_problem() -> None:
    async with two() as (a, b):
        a.wedged = True
        for _ in range(2):
            assert await a.answering.check(b.network.me)
        assert a.answering._restarts == {WEDGE: 1}
        assert [text for text in a.answering.problems() if WEDGE in text]


async def test_a_part_begins_anew_and_serves_as_before() -> None:
    async with two() as (a, b):
        assert await b.rpc.ping(a.network.me, timeout=2) > 0
        a.answering._restart(RPC)
        with trio.fail_after(5):
            while True:
                try:
                    await b.rpc.ping(a.network.me, timeout=2)
                    break
                except Exception:  # the old stream ends, and the next call opens another
                    await trio.sleep(0.02)
        assert (await greet(b.network, a.network.me, timeout=2)).agent == "test"


async def test_liars_have_nothing_restarted_and_one_place_is_not_believed() -> None:
    async with two() as (a, b):

        async def lie(peer: str, probe: Probe) -> Probed:
            return Probed(answered=False)

        b.rpc._server.methods.pop(METHOD)
        b.rpc.serve(METHOD, Probe, lie)
        assert await a.answering.check(b.network.me)
        assert not a.answering._restarts and not a.answering.problems()
        a.answering._silent[HELLO].places |= {f"192.0.2.{number}" for number in range(PEERS)}
        assert ["peers at different places say" in text for text in a.answering.problems()] == [True]


async def test_a_liar_has_nothing_restarted_by_a_request_that_takes_long() -> None:
    async with two() as (a, b):

        async def work(stream: Stream) -> None:
            while await stream.receive_some(100):
                pass
            await trio.sleep_forever()

        a.network.serve(WORK, work)
        asked = []

        async def lie(peer: str, probe: Probe) -> Probed:
            if probe.protocol == WORK:
                stream = await b.network.open_stream(a.network.me, WORK)
                asked.append(stream)
                await stream.send_all(b"work on this")
                await stream.send_eof()
                await until(lambda: any(each.stream.finished for each in a.network.handlers._running[WORK]))
            return Probed(answered=probe.protocol != WORK)

        b.rpc._server.methods.pop(METHOD)
        b.rpc.serve(METHOD, Probe, lie)
        assert await a.answering.check(b.network.me)
        assert asked and not a.answering._restarts and not a.answering.problems()


@pytest.mark.parametrize("protocol", ["/test/never-told/1", "/ipfs/nothing"])
async def test_who_is_asked_tries_only_what_the_asker_serves_and_not_without_end(protocol: str) -> None:
    async with two() as (a, b):
        ask: Any = lambda name: a.rpc.call(b.network.me, METHOD, Probe(name), Probed, timeout=5)  # noqa: E731
        with pytest.raises(Refused) as refused:
            await ask(protocol)
        assert refused.value.code == "untold"
        with pytest.raises(Refused, match="too many"):
            for _ in range(int(PROBES.burst) + 10):
                assert (await ask(HELLO)).answered


async def test_no_asker_chooses_the_names_by_which_bytes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two() as (a, b):
        a.network.serve(WORK, a.serve)
        monkeypatch.setattr(b.network, "speaks", lambda *_: True)
        with pytest.raises(Refused) as refused:
            await a.rpc.call(b.network.me, METHOD, Probe(WORK), Probed, timeout=5)
        assert refused.value.code == "untold"
        assert WORK not in b.network.traffic_of(None)[1]
