"""Looking for runs: what `swarmnode discover` and `swarmnode join NAME` ask of a daemon, or of a node for the moment.

Where no daemon runs, `look_around` makes a node that lasts as long as the search: with this machine's key, on any free
port, in no run. It finds its first peers as every node does, by `join` and `bootstrap`, the address book and mDNS.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import trio

from swarmnode.node.assembly import Node, RunOptions
from swarmnode.node.config import NodeConfig
from swarmnode.node.identity import load_or_create, read_passphrase
from swarmnode.node.logs import setup_logs
from swarmnode.node.process import reason_of, share_arenas
from swarmnode.node.storage.datadir import DataDir
from swarmnode.protocols.catalogue import FoundRun
from swarmnode.protocols.peers.hello import serve_hello

WITHIN = 20.0  # seconds of a search


async def look(node: Node, wanted: str, within: float) -> dict[str, Any]:
    """The runs that a node finds, how many peers it has then, and why join addresses and seeds did not answer."""
    runs = [*map(_told, await node.catalogue.search(wanted=wanted, within=within))]
    return {"runs": runs, "peers": len(node.network.peers()), "unreached": node.discovery.join_failures()}


def look_around(config: NodeConfig, wanted: str, within: float) -> dict[str, Any]:
    """What a node of this configuration finds. Raises ExpectedError."""
    share_arenas()
    config = replace(config, role="watch", port=0, upnp=False, log_level="error")
    with DataDir(config.directory).open() as datadir:
        identity = load_or_create(datadir.identity, read_passphrase(config.passphrase_file, os.environ))
        logs = setup_logs(datadir.logs, config.log_level, config.log_format)
        options = RunOptions(None, None, None, stay=False, json_events=False)

        async def main() -> dict[str, Any]:
            node = Node(config, datadir, identity, logs, options)
            serve_hello(node.network, node.agent)
            async with trio.open_nursery() as nursery:
                for part in (node.network.run, node.rpc.run, node.discovery.run):
                    await nursery.start(part)
                found = await look(node, wanted, within)
                nursery.cancel_scope.cancel()
            return found

        try:
            return trio.run(main)
        except BaseExceptionGroup as group:
            raise reason_of(group) from group


def _told(found: FoundRun) -> dict[str, Any]:
    """A run that was found, for people and programs."""
    spec, listing = found.spec, found.entry.listing
    return {
        "run_id": spec.run_id,
        "name": spec.run.name,
        "task": spec.task.name,
        "method": spec.exchange.method,
        "trust": spec.run.trust,
        "code_sha256": spec.task.code_sha256 or None,
        "owner": spec.owner or None,
        "by_owner": found.by_owner,
        "signed_by": list(found.witnesses),
        "networks": len(set(found.witnesses.values())),
        "round": found.answer.round,
        "members": found.answer.members,
        "parameters": listing.parameters,
        "memory": listing.memory or None,
        "rate": listing.rate or None,
        "age_s": round(max(0.0, time.time() - found.entry.signed / 1000), 1),
        "addresses": list(found.places),
    }
