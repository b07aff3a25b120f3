"""Discovery on the local network, as far as it needs none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from hosts import until

from swarmnode.node.discovery import mdns


@pytest.mark.parametrize("failure", [OSError("no multicast in this test"), ValueError("an address of 300 bytes")])
def test_a_node_whose_interfaces_are_all_down_advertises_once_one_is_up(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        network: Any = SimpleNamespace(me="me", own_addresses=(), peers=lambda: ())
        began = trio.Event()
        token = trio.lowlevel.current_trio_token()
        told: dict[str, Any] = {}

        def create(swarm: Any, **given: Any) -> Any:
            told.update(given, swarm=swarm)
            token.run_sync_soon(began.set)
            raise failure

        monkeypatch.setattr(mdns, "LOOK_EVERY", 0.01)
        monkeypatch.setattr(mdns, "create_mdns_discovery", create)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mdns.advertise_and_listen, network, 4)
            await trio.testing.wait_all_tasks_blocked()
            assert not told
            network.own_addresses = ("/ip4/192.0.2.7/tcp/4077/p2p/me",)
            await began.wait()
            nursery.cancel_scope.cancel()
        assert told["port"] == 4077 and told["listen_addrs"] == ["/ip4/192.0.2.7/tcp/4077"]
        assert told["swarm"].get_peer_id() == "me"

    trio.run(main)


async def test_a_node_that_gets_another_address_advertises_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    network: Any = SimpleNamespace(me="me", own_addresses=("/ip4/192.0.2.7/tcp/4077/p2p/me",), peers=lambda: ())
    done: list[tuple[str, str]] = []

    def create(swarm: Any, *, listen_addrs: list[str], **_: Any) -> Any:
        def note(what: str) -> Any:
            return lambda: done.append((what, listen_addrs[0]))

        broadcaster = SimpleNamespace(register=note("came"), unregister=note("went"))
        nothing = SimpleNamespace(stop=lambda: None, close=lambda: None)
        return SimpleNamespace(broadcaster=broadcaster, listener=nothing, zeroconf=nothing)

    monkeypatch.setattr(mdns, "LOOK_EVERY", 0.01)
    monkeypatch.setattr(mdns, "create_mdns_discovery", create)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mdns.advertise_and_listen, network, 4)
        await until(lambda: done)
        network.own_addresses = ("/ip4/192.0.2.8/tcp/4077/p2p/me",)
        await until(lambda: len(done) == 3)
        nursery.cancel_scope.cancel()
    first, second = "/ip4/192.0.2.7/tcp/4077", "/ip4/192.0.2.8/tcp/4077"
    assert done == [("came", first), ("went", first), ("came", second), ("went", second)]


def test_a_flood_of_peers_has_no_more_dialled_at_once_than_there_are_places() -> None:
    async def main() -> None:
        dialled: list[str] = []

        async def connect(peer: str) -> None:
            dialled.append(peer)
            await trio.sleep_forever()

        learn: Any = lambda peer, addresses, hearsay: None  # noqa: E731
        network: Any = SimpleNamespace(
            me="me", peers=lambda: (SimpleNamespace(peer="a"),), learn=learn, connect=connect
        )
        flood, found = trio.open_memory_channel[Any](20)
        for number in range(20):
            flood.send_nowait(SimpleNamespace(peer_id=str(number), addrs=[]))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mdns._connect_to_each, found, network, 4)
            await trio.testing.wait_all_tasks_blocked()
            assert len(dialled) == 3
            nursery.cancel_scope.cancel()

    trio.run(main)
