"""Where peers answered, kept across restarts: a node finds its swarm again without the one that introduced it."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from pathlib import Path

from swarmnode.node.host.addresses import peer_of
from swarmnode.node.storage.datadir import DataDirError, write_atomic
from swarmnode.protocols.network import Address, PeerId
from swarmnode.protocols.peers.diversity import Group, crowd, group_of_addresses

log = logging.getLogger(__name__)

MAX_PEERS = 256
MAX_ADDRESSES = 8  # per peer
CROWD = 8  # part of the book above which a group loses its own peers when there is no room
MAX_FILE = 1 << 20  # bytes


class AddressBook:
    """Peers and their addresses, the one that answered last first.

    The file is a cache: what cannot be read in it is left out with a warning, and failing to write it is logged.
    `path` None keeps the book in memory only.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._peers: OrderedDict[PeerId, tuple[Address, ...]] = OrderedDict()  # newest last
        self._groups: dict[PeerId, Group] = {}  # of those above
        self._saved = self.entries()
        if path is not None and path.exists():
            self._read(path)
            self._saved = self.entries()

    def entries(self) -> tuple[tuple[PeerId, tuple[Address, ...]], ...]:
        return tuple((peer, addresses) for peer, addresses in reversed(self._peers.items()))

    def answered(self, peer: PeerId, addresses: tuple[Address, ...], group: Group = None) -> None:
        """`peer` was connected just now, from `group`, and may be dialled at `addresses`."""
        known = self._peers.pop(peer, ())
        addresses = tuple(dict.fromkeys(addresses + known))[:MAX_ADDRESSES]
        if addresses:
            self._peers[peer] = addresses
            self._groups[peer] = group or group_of_addresses(addresses)
            while len(self._peers) > MAX_PEERS:
                self._forget_one()

    def _forget_one(self) -> None:
        """The one that answered longest ago; of the group that crowds the others, where there is one."""
        crowding = crowd(self._groups.values(), least=MAX_PEERS // CROWD)
        oldest = next(peer for peer in self._peers if crowding is None or self._groups[peer] == crowding)
        del self._peers[oldest], self._groups[oldest]

    def save(self) -> None:
        """Write the file if anything changed, atomically."""
        entries = self.entries()
        if self._path is None or entries == self._saved:
            return
        content = json.dumps({"version": 1, "peers": [list(addresses) for _, addresses in entries]}, indent=1)
        try:
            write_atomic(self._path, content.encode())
            self._saved = entries
        except DataDirError as error:
            log.warning("the address book was not saved: %s", error)

    def _read(self, path: Path) -> None:
        try:
            if path.stat().st_size > MAX_FILE:
                raise ValueError(f"larger than {MAX_FILE} bytes")
            peers = json.loads(path.read_bytes())["peers"]
            for addresses in reversed(peers[:MAX_PEERS]):
                self.answered(peer_of(addresses[0]), tuple(str(address) for address in addresses))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            log.warning("the address book %s is damaged and was read in part: %r", path, error)
