"""A real process that is stopped and goes on (a laptop that slept, a container that was paused) is back at once.

Health limits are shortened for the test; what takes 14 s in a node takes a second or two here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial

import hosts
import pytest
import trio
from hosts import until

from swarmnode.node.discovery import finder
from swarmnode.node.discovery.finder import AddressBook, Discovery
from swarmnode.node.host.patches import yamux_session

KEEPALIVE, SILENCE, BRIEF = 0.45, 0.75, 0.3  # seconds; a busy machine stands still for some tenths
LISTEN = ("/ip4/127.0.0.1/tcp/0",)

OTHER = f"""
import sys, trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from swarmnode.node.discovery import finder
from swarmnode.node.host.network import HostSettings, Libp2pNetwork
from swarmnode.node.identity import Identity
from swarmnode.node.host.patches import yamux_session

yamux_session.KEEPALIVE, yamux_session.SILENCE, finder.BRIEF = {KEEPALIVE}, {SILENCE}, {BRIEF}
node = Libp2pNetwork(Identity(Ed25519PrivateKey.generate()), HostSettings(listen={LISTEN!r}))

async def main():
    async with trio.open_nursery() as nursery:
        await nursery.start(node.run)
        await nursery.start(finder.Discovery(node, finder.AddressBook(None), join=(sys.argv[1],)).run)

trio.run(main)
"""


@pytest.mark.slow
def test_process_that_was_frozen_is_connected_again_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yamux_session, "KEEPALIVE", KEEPALIVE)
    monkeypatch.setattr(yamux_session, "SILENCE", SILENCE)
    monkeypatch.setattr(finder, "BRIEF", BRIEF)
    node = hosts.network()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(node.run)
            await nursery.start(Discovery(node, AddressBook(None)).run)
            command = [sys.executable, "-c", OTHER, node.addresses[0]]
            start = partial(trio.run_process, command, check=False, stdout=subprocess.DEVNULL)
            other = await nursery.start(start)
            try:
                await until(lambda: bool(node.peers()), within=30)
                await trio.sleep(2 * BRIEF)
                os.kill(other.pid, signal.SIGSTOP)
                await until(lambda: not node.peers(), within=15)
                await trio.sleep(0.3)  # this side is dialling a process that does not answer
                os.kill(other.pid, signal.SIGCONT)
                await until(lambda: bool(node.peers()), within=10)
                await trio.sleep(2 * SILENCE)
                assert node.peers(), "the new connection does not last"
            finally:
                other.kill()
            nursery.cancel_scope.cancel()

    trio.run(main)
