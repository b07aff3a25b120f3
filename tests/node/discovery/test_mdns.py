"""Discovery on the local network, as far as it needs none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from swarmnode.node.discovery import mdns


@pytest.mark.parametrize("failure", [OSError("no multicast in this test"), ValueError("an address of 300 bytes")])
def test_a_node_whose_interfaces_are_all_down_advertises_once_one_is_up(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        network: Any = SimpleNamespace(me="me", addresses=(), peers=lambda: ())
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
            network.addresses = ("/ip4/192.0.2.7/tcp/4077/p2p/me",)
            await began.wait()
        assert told["port"] == 4077 and told["listen_addrs"] == ["/ip4/192.0.2.7/tcp/4077"]
        assert told["swarm"].get_peer_id() == "me"

    trio.run(main)


def test_a_flood_of_peers_has_no_more_dialled_at_once_than_there_are_places() -> None:
    async def main() -> None:
        dialled: list[str] = []

        async def connect(peer: str) -> None:
            dialled.append(peer)
            await trio.sleep_forever()

        learn: Any = lambda peer, addresses: None  # noqa: E731
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
