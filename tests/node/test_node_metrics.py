"""A node's metrics: listed in docs/metrics.md, readable by Prometheus, its own and no other node's."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))

import generate
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from prometheus_client.parser import text_string_to_metric_families

from swarmnode.node.assembly import Node, RunOptions
from swarmnode.node.config import NodeConfig
from swarmnode.node.host.limits import Limits
from swarmnode.node.host.network import HostSettings, Libp2pNetwork
from swarmnode.node.identity import Identity
from swarmnode.node.logs import Ring
from swarmnode.node.process import metrics_of
from swarmnode.node.storage.datadir import DataDir
from swarmnode.protocols.calls.rpc import Rpc
from swarmnode.protocols.metrics import COUNTER, GAUGE
from swarmnode.protocols.peers.scoring import PeerScoring, ScoringLimits
from swarmnode.testing.simnet import SimWorld, run_with_nursery

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def test_names_say_what_kind_they_are_and_every_metric_says_what_it_means() -> None:
    metrics = generate.declared()
    # Prometheus' readers call a counter by its name without the end.
    assert len({metric.name.removesuffix("_total") for metric in metrics}) == len(metrics)
    for metric in metrics:
        assert metric.name.startswith("swarmnode_")
        assert metric.kind in (COUNTER, GAUGE)
        assert metric.name.endswith("_total") == (metric.kind == COUNTER), metric.name
        assert 10 < len(metric.help) < 100 and "\n" not in metric.help
        assert f"| `{metric.name}` |" in PAGE.read_text()


def test_prometheus_reads_what_is_printed() -> None:
    async def text() -> str:
        identity = Identity(Ed25519PrivateKey.generate())
        network = Libp2pNetwork(identity, HostSettings(listen=()))
        return metrics_of(Limits(), network, Rpc(network)).text()

    read = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(trio.run(text))
        for sample in family.samples
    }
    assert read["swarmnode_peers",] == 0
    assert read["swarmnode_resident_bytes",] > 1e6
    assert read["swarmnode_limit", "rpc.serves"] == Limits().rpc.serves
    assert read["swarmnode_limit", "connections.unread"] == Limits().connections.unread


def test_the_limit_on_peers_is_the_owners(tmp_path: Path) -> None:
    async def text() -> str:
        with DataDir(tmp_path) as home:
            config = NodeConfig(data_dir=str(tmp_path), max_peers=7)
            identity, options = Identity(Ed25519PrivateKey.generate()), RunOptions(None, None, None, False, False)
            return Node(config, home, identity, Ring(), options).metrics.text()

    assert 'swarmnode_limit{limit="connections.peers"} 7' in trio.run(text)


def test_simulated_nodes_in_one_process_count_apart() -> None:
    async def main(nursery: trio.Nursery) -> list[str]:
        world = SimWorld(latency=0.01)
        rpcs, texts = [], []
        for number in range(2):
            network = world.node(number)
            await nursery.start(network.run)
            rpcs.append(Rpc(network))
            await nursery.start(rpcs[-1].run)
        await rpcs[0].ping(world.node(1).me, timeout=5)
        for rpc in rpcs:
            scoring = PeerScoring(ScoringLimits())
            scoring.watch(rpc.violations)
            texts.append(metrics_of(Limits(), rpc, scoring).text())
        return texts

    caller, callee = run_with_nursery(main)
    assert 'swarmnode_call_streams{direction="out"} 1\n' in caller
    assert 'swarmnode_call_streams{direction="in"} 0\n' in caller
    assert 'swarmnode_call_streams{direction="in"} 1\n' in callee
