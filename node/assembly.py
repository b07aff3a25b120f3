"""How the parts of one run are built and wired, from its RunSpec and this node's configuration.

    data, state → sync → membership, trainer → exchange method → session

Here alone the run's keys and the owner's options become the settings of parts. Nothing is started: `daemon.py` runs
what is built here. Whatever blocks in a part goes to threads.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from swarmnode.node.config import NodeConfig
from swarmnode.node.exitcodes import CONFIG, ExpectedError
from swarmnode.node.host.limits import Limits
from swarmnode.node.host.network import HostSettings
from swarmnode.node.session import Session, SessionSettings
from swarmnode.node.storage.checkpoints import HISTORY, Checkpoints, History
from swarmnode.node.storage.datasets import DataSet
from swarmnode.node.storage.runs import ChosenRun
from swarmnode.node.storage.shardstore import ShardStore
from swarmnode.node.storage.statestore import StateStore
from swarmnode.node.trainer.confinement import SCRATCH
from swarmnode.node.trainer.supervisor import TrainerProcess, TrainerSettings
from swarmnode.protocols.calls.rpc import Rpc
from swarmnode.protocols.methods.context import Observer, Parts
from swarmnode.protocols.methods.method import Method
from swarmnode.protocols.methods.open.checks.texts import Texts
from swarmnode.protocols.methods.registry import METHODS
from swarmnode.protocols.methods.rollouts import sapo
from swarmnode.protocols.methods.trainer import Trainer
from swarmnode.protocols.network import Network, PeerId, relayed_peers
from swarmnode.protocols.peers.liveness import Liveness
from swarmnode.protocols.reputation.ledger import Ledger
from swarmnode.protocols.runner import in_thread
from swarmnode.protocols.state.membership import Membership, admits, work_of
from swarmnode.protocols.state.sync import StateSync
from swarmnode.protocols.transfer.bulk import Bulk
from swarmnode.protocols.transfer.shards import Shards
from swarmnode.training.runspec import RunSpec, encode


class NoRole(ExpectedError):
    """The role that was asked for has no meaning in the run."""

    exit_code = CONFIG


class WorkMissing(ExpectedError):
    """The run admits only keys that cost work, and this node's did not."""

    exit_code = CONFIG


def host_settings(config: NodeConfig, *, agent: str, limits: Limits) -> HostSettings:
    """Where the host listens and what it may use; `agent` is what it calls itself."""
    return HostSettings(
        listen=(f"/ip{6 if ':' in config.listen else 4}/{config.listen}/tcp/{config.port}",),
        announce=config.announce,
        mdns=config.mdns,
        up=config.up_bytes,
        down=config.down_bytes,
        max_peers=config.max_peers,
        agent=agent,
        limits=limits,
    )


def check_admitted(spec: RunSpec, me: PeerId) -> None:
    """Raises WorkMissing where this node's key lacks the work that the run asks of strangers."""
    if spec.trust.identity_bits and not admits(spec)(me):
        raise WorkMissing(
            f"the run {spec.run.name} admits only keys with {spec.trust.identity_bits} bits of work, and this node's "
            f"has {max(work_of(me), 0)}; nobody would keep what it writes. Make one with swarmnode id --mine "
            f"{spec.trust.identity_bits} --replace: a new key is a new peer id, and standing elsewhere is lost with "
            "the old one; or give this run a data directory of its own (--data-dir)"
        )


def make_data(
    chosen: ChosenRun,
    config: NodeConfig,
    *,
    network: Network,
    rpc: Rpc,
    shards: Shards,
    store: ShardStore,
    emit: Callable[[dict[str, Any]], None],
) -> DataSet | None:
    """The run's data on this node; None where a task of the owner's reads its own, and where a run needs none."""
    if config.task or not chosen.spec.needs_data:
        return None
    return DataSet(
        chosen.spec,
        network=network,
        rpc=rpc,
        shards=shards,
        store=store,
        runner=in_thread,
        corpus=config.corpus,
        own_text=config.data == "local",
        emit=emit,
    )


def make_trainer(chosen: ChosenRun, config: NodeConfig, *, me: PeerId, data: DataSet | None) -> TrainerProcess:
    """The trainer's supervisor, with the text that is here by now."""
    settings = TrainerSettings(
        threads=config.threads,
        nice=config.nice,
        device=config.device,
        corpus=config.corpus,
        heldout=data.heldout if data is not None else "",
        texts=data.take() if data is not None else (),
        room=data.room if data is not None else 0,
        task=config.task,
        policy=config.policy,
        sampling=config.sampling,
        sandbox=config.sandbox,
        scratch=str(config.directory / SCRATCH),
        readable=(str(config.directory / "shards"), *config.sandbox_read),
        memory=config.memory_bytes,
    )
    spec = chosen.spec
    if config.role == "rollout" and spec.exchange.method == "sapo":
        # Its weights are another node's, so that it has nothing to warm up.
        spec = replace(spec, rollouts=replace(spec.rollouts, warm_up=0))
    return TrainerProcess(spec, run_id=chosen.run_id, peer_id=me, settings=settings)


def now_ms() -> int:
    """Real time in ms since the epoch."""
    return time.time_ns() // 1_000_000


def make_state(chosen: ChosenRun, *, folder: Path, network: Network) -> StateStore:
    """What the run knows together, as this node holds it; `folder` is the run's."""
    return StateStore(
        folder / "state.db",
        chosen.run_id,
        me=network.me,
        sign=network.sign,
        now=now_ms,
        admitted=admits(chosen.spec),
    )


def make_sync(state: StateStore, *, network: Network, rpc: Rpc) -> StateSync:
    """What keeps the state in step with that of other nodes; from now on it answers `state.*` calls."""
    return StateSync(state, network=network, rpc=rpc, runner=in_thread, now=now_ms)


def make_membership(chosen: ChosenRun, *, network: Network, state: StateStore, sync: StateSync) -> Membership:
    """This node's view of who takes part, on the clock of this machine."""
    return Membership(network=network, state=state, sync=sync, now=now_ms, admits=admits(chosen.spec))


def make_session(
    chosen: ChosenRun,
    config: NodeConfig,
    *,
    limits: Limits,
    rounds: int | None,
    roster: str,
    folder: Path,
    network: Network,
    rpc: Rpc,
    bulk: Bulk,
    shards: Shards,
    liveness: Liveness,
    state: StateStore,
    sync: StateSync,
    trainer: Trainer,
    membership: Membership,
    ledger: Ledger,
    texts: Texts,
    emit: Callable[[dict[str, Any]], None],
) -> Session:
    """This node's life in the run, for so many `rounds`, in the history with this roster. The trainer told its layout.

    Checkpoints lie below `folder`, the run's; `emit` is told what happens. From now on the run's exchange method
    answers its peers.
    """

    samples = config.role == "rollout"
    if samples and chosen.spec.exchange.method != "sapo":
        raise NoRole(
            f"the run {chosen.spec.run.name} shares no rollouts, so nobody can only sample for it; leave out "
            "--role rollout, or name a run such as --task digits-rl"
        )

    def build(observer: Observer) -> Method:
        return (sapo.build_sampler if samples else METHODS[chosen.spec.exchange.method])(
            Parts(
                me=network.me,
                run_id=chosen.run_id,
                spec=chosen.spec,
                network=network,
                rpc=rpc,
                bulk=bulk,
                liveness=liveness,
                runner=in_thread,
                trainer=trainer,
                membership=membership,
                state=state,
                sync=sync,
                shards=shards,
                admits=admits(chosen.spec),
                relayed=partial(relayed_peers, network),
                observer=observer,
                now=now_ms,
                sign=network.sign,
                rng=random.Random(),
                ledger=ledger,
                policy=config.policy,
                rollouts=limits.rollouts,
                texts=texts,
            )
        )

    return Session(
        network=network,
        membership=membership,
        build=build,
        checkpoints=None
        if samples  # what it has is its trainer's
        else Checkpoints(
            folder / "checkpoints",
            run_id=chosen.run_id,
            layout=trainer.layout,
            keep=config.checkpoint_keep,
            hours=config.checkpoint_hours,
            spec=encode(chosen.spec),
        ),
        runner=in_thread,
        settings=SessionSettings(
            rounds=rounds,
            creator=chosen.creator,
            wait_peers=config.wait_peers,
            wait_seconds=config.wait_seconds,
            checkpoint_every=config.checkpoint_every,
            roster=roster,
        ),
        emit=emit,
        history=None if samples else History(folder / HISTORY),
    )
