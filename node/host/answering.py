"""Whether the handlers of the protocols that this node serves still answer, found out through a peer.

`Answering` asks a connected peer to try each protocol, by the call `handlers.probe`:

    this node -> peer   Probe(protocol)
    peer                opens a stream of the protocol on the connection that is there, and finishes sending at once
    peer -> this node   Probed(answered): whether the stream ended within WITHIN, as any handler lets it that reads on

Nothing else has to be known of a protocol: whoever finds the end of the stream where its first byte should be goes. A
protocol of which a peer says that it does not answer, while this node sees such a stream of that peer's wait itself, is
wedged: its handlers are cancelled, which gives back what they hold, and the part that serves it begins its `run` anew
where it has one; then it is tried again. What peers alone say is told to the owner once PEERS at different places say
it, and restarts nothing, so liars cannot have parts of this node restarted.

Who is asked dials nobody: it tries the asker over their connection, only what it serves itself and the asker said in
identify that it serves too, one probe of a peer at a time, `PROBES` of each and `AT_ONCE` of all. So no asker chooses
the names by which this node counts bytes.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import trio

from swarmnode.node.host.network import Libp2pNetwork
from swarmnode.node.process import Run
from swarmnode.protocols.calls.rpc import CallError, Refuse, Refused, Rpc
from swarmnode.protocols.limits import Allowance, Budget
from swarmnode.protocols.metrics import COUNTER, GAUGE, Metric, Metrics
from swarmnode.protocols.network import NetworkError, PeerId, ProtocolUnsupported, StreamBroken

log = logging.getLogger(__name__)

METHOD = "handlers.probe"
EVERY = 120.0  # s between two rounds of probes, of one peer each: some 5 kB
WITHIN = 5.0  # s for a handler to let go of a stream that its peer finished
ASK_WITHIN = WITHIN + 5.0  # s for the peer's answer
RESTART_EVERY = 60.0  # s between two restarts of one protocol
PEERS = 2  # at different places, that have to agree on what this node does not see itself
PROBES = Allowance(rate=0.25, burst=40.0)  # of one peer
AT_ONCE = 8  # probes for all askers together
UNTOLD = "untold"  # why a probe is refused: not both serve the protocol, as far as identify told

WEDGED = Metric("swarmnode_handlers_wedged", GAUGE, "protocols whose handlers do not answer")
RESTARTS = Metric("swarmnode_handler_restarts_total", COUNTER, "times that a wedged handler was restarted", "protocol")


@dataclass(frozen=True)
class Probe:
    """Asks a peer to try a protocol of the asker's."""

    protocol: str


@dataclass(frozen=True)
class Probed:
    answered: bool


@dataclass
class _Silent:
    places: set[str | None] = field(default_factory=set)  # of the peers that say so
    seen: bool = False  # here as well


class Answering:
    """Both sides of the probe; `run()` checks this node's own handlers for as long as it lasts."""

    def __init__(self, network: Libp2pNetwork, rpc: Rpc, parts: Mapping[str, Run]) -> None:
        """`parts`: what begins anew when a protocol is wedged; the network's `defects` keep them."""
        self._network, self._rpc, self._parts = network, rpc, parts
        self._silent: dict[str, _Silent] = {}
        self._restarts: Counter[str] = Counter()
        self._restarted_at: dict[str, float] = {}  # trio time
        self._random = random.Random(network.me)
        self._budget = Budget[PeerId](PROBES)
        self._trying: set[PeerId] = set()
        rpc.serve(METHOD, Probe, self._try)

    def problems(self) -> list[str]:
        """What the owner should know, a sentence each."""
        told = []
        for protocol, silent in self._silent.items():
            if silent.seen:
                count = self._restarts[protocol]
                times = "once" if count == 1 else f"{count} times"
                told.append(
                    f"this node's handler of {protocol} does not answer peers, though it was restarted {times}: "
                    "swarmnode logs says more; restart the node if it stays so"
                )
            elif len(silent.places) >= PEERS:
                told.append(
                    f"{len(silent.places)} peers at different places say that this node does not answer them on "
                    f"{protocol}, and it sees nothing of that itself: restart it if it stays so"
                )
        return told

    def measure(self, metrics: Metrics) -> None:
        metrics.show(WEDGED, lambda: len(self.problems()))
        metrics.show(RESTARTS, lambda: self._restarts)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Have a peer try the handlers, again and again, until cancelled."""
        task_status.started()
        while True:
            await trio.sleep(EVERY)
            peers = [view.peer for view in self._network.peers()]
            for peer in self._random.sample(peers, len(peers)):
                if await self.check(peer):
                    break

    async def check(self, peer: PeerId) -> bool:
        """Have `peer` try each protocol that this node serves; False where it tries none for us."""
        for protocol in self._network.handlers.protocols:
            asked_at = trio.current_time()
            try:
                probed = await self._rpc.call(peer, METHOD, Probe(protocol), Probed, timeout=ASK_WITHIN)
            except Refused as refused:
                if refused.code == UNTOLD:
                    continue
                return False
            except CallError as error:
                log.debug("%s does not try this node's handlers: %s", peer, error)
                return False
            if probed.answered:
                self._silent.pop(protocol, None)
                continue
            silent = self._silent.setdefault(protocol, _Silent())
            silent.places.add(self._network.host_of(peer))
            if self._network.handlers.waits(protocol, peer, asked_at):
                silent.seen = True
                self._restart(protocol)
        return True

    def _restart(self, protocol: str) -> None:
        now = trio.current_time()
        if now - self._restarted_at.get(protocol, -RESTART_EVERY) < RESTART_EVERY:
            return
        self._restarted_at[protocol] = now
        self._restarts[protocol] += 1
        log.error("the handler of %s does not answer: it is restarted, and streams that wait for it end", protocol)
        self._network.handlers.cancel(protocol)
        if protocol in self._parts:
            self._network.defects.begin_anew(self._parts[protocol])

    async def _try(self, asker: PeerId, probe: Probe) -> Probed:
        """For a peer: whether its handler of the protocol answers."""
        network = self._network
        if probe.protocol not in network.handlers.protocols or not network.speaks(asker, probe.protocol):
            raise Refuse(UNTOLD, "not both serve that, as far as identify told")
        if asker in self._trying or len(self._trying) >= AT_ONCE or not self._budget.take(asker, 1.0):
            raise Refuse("busy", "too many probes")
        self._trying.add(asker)
        try:
            if asker not in network.connections:  # it went meanwhile: nobody is dialled for a probe
                raise Refuse("busy", "the asker is not connected")
            with trio.move_on_after(WITHIN) as patience:
                stream = await network.open_stream(asker, probe.protocol, timeout=2 * WITHIN)
                try:
                    await stream.send_eof()
                    while await stream.receive_some(4096):
                        pass
                finally:
                    await stream.aclose()
            return Probed(answered=not patience.cancelled_caught)
        except (StreamBroken, ProtocolUnsupported):  # an answer too
            return Probed(answered=True)
        except NetworkError as error:
            raise Refuse("busy", f"the asker went: {error}") from error
        finally:
            self._trying.discard(asker)
