"""The daemon: all parts of a node, started in one order and stopped in the reverse one.

    data directory → identity → host → calls, bulk, shards → control socket → discovery → run → data → trainer → session

Each part runs in a nursery of its own inside the one before, so a part that fails ends the daemon with its reason, and
what depends on a part is gone before the part is. The first SIGINT or SIGTERM leaves the swarm in order: an exchange in
hand may end, local work is saved, the others are told. A second one ends the process at once.

How the parts of a run are built from its RunSpec is in `assembly.py`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import trio

from swarmnode import __version__
from swarmnode.node.assembly import (
    check_admitted,
    host_settings,
    make_data,
    make_membership,
    make_session,
    make_state,
    make_sync,
    make_trainer,
    now_ms,
)
from swarmnode.node.config import NodeConfig
from swarmnode.node.control.api import Api
from swarmnode.node.discovery.finder import AddressBook, Discovery
from swarmnode.node.exitcodes import FORCED, OK
from swarmnode.node.host.limits import Limits
from swarmnode.node.host.network import Libp2pNetwork
from swarmnode.node.identity import Identity, load_or_create, read_passphrase
from swarmnode.node.logs import LogRing, adopt, setup_logs
from swarmnode.node.metrics import metrics_of
from swarmnode.node.nat.traversal import NatTraversal
from swarmnode.node.process import READY, STOPPING, harden, notify, reason_of, rest_what_stays
from swarmnode.node.provenance import SuccessorWatch, parent_state
from swarmnode.node.reputation import feed, make_watching
from swarmnode.node.session import Session
from swarmnode.node.storage.checkpoints import newest_round
from swarmnode.node.storage.datadir import DataDir
from swarmnode.node.storage.datasets import DataSet, publish, release_forgotten
from swarmnode.node.storage.runs import ChosenRun, RunFinder, RunStore
from swarmnode.node.storage.shardstore import ShardStore
from swarmnode.node.storage.statestore import StateStore
from swarmnode.node.trainer.supervisor import TrainerProcess
from swarmnode.protocols.calls.rpc import Rpc
from swarmnode.protocols.methods.method import Place
from swarmnode.protocols.methods.open.checks.texts import NO_TEXTS
from swarmnode.protocols.network import Address, PeerId
from swarmnode.protocols.peers.hello import PROTOCOL as HELLO
from swarmnode.protocols.peers.hello import serve_hello
from swarmnode.protocols.peers.liveness import Liveness
from swarmnode.protocols.reputation.ledger import Reputation
from swarmnode.protocols.reputation.receipts import PromiseChecks, Receipts
from swarmnode.protocols.runner import in_thread
from swarmnode.protocols.state.membership import Membership, RunListing, serve_runs
from swarmnode.protocols.state.sync import StateSync
from swarmnode.protocols.transfer.bulk import Bulk
from swarmnode.protocols.transfer.shards import Shards
from swarmnode.training.golden import check_golden

logger = logging.getLogger(__name__)

MEMBERS_FOR = 1.0  # seconds for which the list of members is good enough to pace peers by
STOP_WITHIN = 20.0  # seconds for an orderly stop, before what is left is cancelled
AGENT = f"swarmnode/{__version__}"
TAKES_PART = ("train", "rollout")  # roles that have a run and a trainer


@dataclass(frozen=True)
class RunOptions:
    """What `swarmnode run` was asked for beside the node's configuration."""

    runspec: Path | None  # run file
    run_id: str | None
    rounds: int | None  # stop training after this many rounds
    stay: bool  # serve on after the last round
    json_events: bool  # one JSON object a line on standard output
    roster: str = ""  # of the run's history that is to be joined, ROUND:ID


def run_daemon(
    config: NodeConfig,
    origins: dict[str, str],
    *,
    runspec: Path | None,
    run_id: str | None,
    rounds: int | None,
    stay: bool,
    json_events: bool,
    roster: str = "",
) -> int:
    """Run a node until it is told to stop; returns the exit code. Raises ExpectedError or SettingError for a person."""
    datadir = DataDir(config.directory).open()
    try:
        identity = load_or_create(datadir.identity, read_passphrase(config.passphrase_file, os.environ))
        logs = setup_logs(datadir.logs, config.log_level)
        adopt("libp2p")
        harden()
        for key, origin in origins.items():
            logger.debug("%s = %r (%s)", key, getattr(config, key, None), origin)
        options = RunOptions(runspec, run_id, rounds, stay, json_events, roster)
        try:
            return trio.run(partial(_main, config, datadir, identity, logs, options))
        except BaseExceptionGroup as group:
            raise reason_of(group) from group
    finally:
        datadir.close()


async def _main(config: NodeConfig, datadir: DataDir, identity: Identity, logs: LogRing, options: RunOptions) -> int:
    return await Daemon(config, datadir, identity, logs, options).run()


def _ask_which_run(listings: list[RunListing]) -> RunListing:
    """Let the person at the terminal choose. Blocking."""
    print("The nodes that answered take part in several runs:")
    for number, listing in enumerate(listings, 1):
        print(f"  {number}  {listing.name}, round {listing.round}, {listing.members} members  {listing.run_id[:12]}…")
    while True:
        answer = input(f"Which one to join (1 to {len(listings)})? ").strip()
        if answer.isdigit() and 1 <= int(answer) <= len(listings):
            return listings[int(answer) - 1]


@asynccontextmanager
async def _running(run: Callable[..., Awaitable[None]]) -> AsyncIterator[None]:
    """A part that runs, in a nursery of its own, for as long as the block does."""
    async with trio.open_nursery() as nursery:
        await nursery.start(run)
        yield
        nursery.cancel_scope.cancel()


class Daemon:
    """One node. `run` is its life; the attributes are its parts, for `api.py`."""

    def __init__(
        self, config: NodeConfig, datadir: DataDir, identity: Identity, logs: LogRing, options: RunOptions
    ) -> None:
        self.config = config
        self.options = options
        self.logs = logs
        self.socket = datadir.prepare_socket()
        self.store = RunStore(datadir)
        self.limits = limits = Limits()
        self.receipts = Receipts()
        self.network = Libp2pNetwork(
            identity,
            host_settings(config, agent=AGENT, limits=limits),
            is_member=self._is_member,
            carried=self.receipts.served,
        )
        self.rpc = Rpc(self.network, limits=limits.rpc)
        self.bulk = Bulk(self.network, runner=in_thread, limits=limits.bulk)
        self.shard_store = ShardStore(datadir.path / "shards", cap=config.shards_cap_bytes)
        self.shards = Shards(
            self.network, self.rpc, self.shard_store, runner=in_thread, limits=limits.shards, gave=self.receipts.gave
        )
        self.network.conduct.watch(self.rpc.offences, self.bulk.offences, self.shards.offences)
        self.liveness = Liveness(self.rpc)
        self.nat = NatTraversal(
            self.network, admits=self._relays_for, standing=self._standing, limits=limits.relay, upnp=config.upnp
        )
        self._book = AddressBook(datadir.address_book)
        self.metrics = metrics_of(limits, self.network, self.rpc, self.bulk, self.shards)
        self._discovery = Discovery(self.network, self._book, join=config.join, runner=in_thread)
        self._api = Api(self)
        self.chosen: ChosenRun | None = None
        self.data: DataSet | None = None
        self.state: StateStore | None = None
        self.successors: SuccessorWatch | None = None
        self.sync: StateSync | None = None
        self.membership: Membership | None = None
        self.watching: Reputation | None = None
        self._members: frozenset[PeerId] = frozenset()  # as seen at `_members_at`
        self._members_at = -math.inf
        self.trainer: TrainerProcess | None = None
        self.session: Session | None = None
        self.left = trio.Event()  # the session is over and saved
        self.forgetting = False  # `leave` deletes what was saved
        self._stopping = trio.Event()
        self._life = trio.CancelScope()  # what a stop ends when there is no session to leave in order
        self._serving = trio.CancelScope()  # after the last round; what was opened for the run is then closed in order

    async def run(self) -> int:
        """Start everything, take part until stopped, stop everything; the exit code."""
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch_signals, signals)
                async with AsyncExitStack() as stack:
                    await self._start_parts(stack)
                    with self._life:
                        await self._take_part()
                    notify(STOPPING)
                    self.left.set()
                nursery.cancel_scope.cancel()
        unsaved = self.session.unsaved if self.session is not None and not self.forgetting else None
        code = OK if unsaved is None else unsaved.exit_code
        self.emit({"event": "stopped", "code": code})
        if not self.options.json_events:
            print("; ".join(["stopped in order", *await in_thread(self._what_is_saved)]), flush=True)
            if unsaved is not None:
                print(f"swarmnode: the newest state could not be saved: {unsaved}", file=sys.stderr, flush=True)
        return code

    def _what_is_saved(self) -> list[str]:
        """What the disk has of this node's run, for people; of all runs, where it got to none. Blocking."""
        if self.forgetting:
            return []
        runs = self.store.known() if self.chosen is None else (self.chosen.run_id,)
        newest = {run_id: newest_round(self.store.folder(run_id) / "checkpoints") for run_id in runs}
        return [
            f"run {run_id[:12]}… has no checkpoint"
            if rounds is None
            else f"the newest checkpoint of run {run_id[:12]}… has {rounds} rounds in it"
            for run_id, rounds in newest.items()
        ]

    async def _start_parts(self, stack: AsyncExitStack) -> None:
        serve_hello(self.network, AGENT)
        serve_runs(self.rpc, self._listings, self.store.encoded)
        for part in (
            self.network.run,
            self.rpc.run,
            self.bulk.run,
            self.liveness.run,
            self.shards.run,
            self.nat.run,
            self._api.run,
            self._api.server().run,
            self._discovery.run,
        ):
            await stack.enter_async_context(_running(part))
        rest_what_stays()

    async def _watch_signals(self, signals: AsyncIterator[int]) -> None:
        async for number in signals:
            if self._stopping.is_set():
                logger.warning("second %s: ending at once", signal.Signals(number).name)
                self.emit({"event": "stopped", "code": FORCED})
                logging.shutdown()
                os._exit(FORCED)  # no part may hold this up; files are replaced whole, and the kernel ends the trainer
            logger.info("%s: leaving the swarm; once more ends at once", signal.Signals(number).name)
            self.stop()

    def stop(self) -> None:
        """Begin an orderly stop."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._serving.cancel()
        if self.session is not None:
            self.session.stop()
            self._life.deadline = trio.current_time() + STOP_WITHIN
        else:
            self._life.cancel()

    # --- taking part ------------------------------------------------------------------------------------------------

    async def _take_part(self) -> None:
        if self.config.role not in TAKES_PART:
            self._ready()
            await trio.sleep_forever()
        check_golden()
        await in_thread(lambda: release_forgotten(self.store, self.shard_store))
        if self.options.run_id is not None:  # its members may be behind relays, and only the DHT knows them
            self._discovery.set_rendezvous(bytes.fromhex(self.options.run_id))
        self.chosen = await RunFinder(
            store=self.store,
            network=self.network,
            rpc=self.rpc,
            runner=in_thread,
            publish=lambda spec: in_thread(lambda: publish(spec, self.config.corpus, self.shard_store)),
        ).choose(
            file=self.options.runspec,
            run_id=self.options.run_id,
            joining=bool(self.config.join),
            failures=self._discovery.join_failures,
            custom_task=bool(self.config.task),
            ask=_ask_which_run if sys.stdin.isatty() and not self.options.json_events else None,
        )
        chosen, folder = self.chosen, self.store.folder(self.chosen.run_id)
        check_admitted(chosen.spec, self.network.me)
        self._discovery.set_rendezvous(bytes.fromhex(chosen.run_id))
        self.data = make_data(
            chosen,
            self.config,
            network=self.network,
            rpc=self.rpc,
            shards=self.shards,
            store=self.shard_store,
            emit=self.emit,
        )
        state = make_state(chosen, folder=folder, network=self.network)
        self.sync = make_sync(state, network=self.network, rpc=self.rpc)
        self.network.conduct.watch(self.sync.offences)
        state.measure(self.metrics)
        self.sync.measure(self.metrics)
        self.membership = make_membership(chosen, network=self.network, state=state, sync=self.sync)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(_running(state.run))
            self.state = state
            stack.callback(self._forget_state)
            await stack.enter_async_context(_running(self.sync.run))
            if self.data is not None:
                await stack.enter_async_context(_running(self.data.run))
            self.trainer = make_trainer(chosen, self.config, me=self.network.me, data=self.data)
            self.trainer.measure(self.metrics)
            await stack.enter_async_context(_running(self.trainer.run))
            if self.data is not None:
                await stack.enter_async_context(_running(partial(self.data.pass_on, self.trainer.feed)))
            await stack.enter_async_context(_running(self.membership.run))
            self.successors = SuccessorWatch(state, chosen.spec)
            await stack.enter_async_context(_running(self.successors.run))
            self.watching = await make_watching(
                folder,
                me=self.network.me,
                now=now_ms,
                runner=in_thread,
                state=state,
                sync=self.sync,
                members=lambda: len(self._members_now()) + 1,
                round=self.rounds_done,
            )
            self.watching.measure(self.metrics)
            self.network.conduct.watch(self.watching.offences)
            await stack.enter_async_context(_running(self.watching.run))
            checks = PromiseChecks(self.shards, self.shard_store.recent, self.receipts)
            await stack.enter_async_context(_running(checks.run))
            layout = self.trainer.layout
            parent = await in_thread(lambda: parent_state(self.store, chosen, layout))
            if parent is not None:
                self.trainer.load(parent.state.parameters)
            self.session = make_session(
                chosen,
                self.config,
                limits=self.limits,
                rounds=self.options.rounds,
                roster=self.options.roster,
                folder=folder,
                network=self.network,
                rpc=self.rpc,
                bulk=self.bulk,
                shards=self.shards,
                liveness=self.liveness,
                state=state,
                sync=self.sync,
                trainer=self.trainer,
                membership=self.membership,
                ledger=self.watching.ledger,
                texts=self.data if self.data is not None else NO_TEXTS,
                emit=self.emit,
            )
            self.session.method.measure(self.metrics)
            self.network.conduct.watch(*self.session.method.violations)
            self._feed_ledger(self.session)
            self._ready()
            await self.session.run(expect_members=bool(self.config.join) or bool(self._book.entries()))
            self.emit({"event": "finished", "rounds": self.rounds_done()})
            self.left.set()
            if self.options.stay:
                with self._serving:
                    await self.session.serve_forever()

    def _feed_ledger(self, session: Session) -> None:
        """Have what is seen of peers in this run count."""
        assert self.watching is not None and self.sync is not None
        self.watching.sources += [self.receipts, *session.method.sources]
        self.shards.server.prefer(self.watching.ledger.standing)
        told = [self.rpc.offences, self.bulk.offences, self.shards.offences, self.sync.offences]
        feed(self.watching.ledger, *told, *session.method.violations)

    def _forget_state(self) -> None:
        """The state closes next: from now on nobody can ask for it."""
        self.state = None

    def _relays_for(self, peer: PeerId) -> bool:
        """A node of a run relays for its members, one that only relays for all of our kind; not if they harm."""
        if self.watching is not None and peer in self.watching.ledger.to_contain():
            return False
        return self._is_member(peer) or (self.config.role == "relay" and self.network.speaks(peer, HELLO))

    def _standing(self, peer: PeerId) -> float:
        """How far this node relies on a peer, 0 to 1; on all alike as long as it takes part in no run."""
        return self.watching.ledger.standing(peer) if self.watching is not None else 1.0

    # --- what others ask --------------------------------------------------------------------------------------------

    def _listings(self) -> tuple[RunListing, ...]:
        if self.chosen is None:
            return ()
        place = self.place()
        round, members = (place.round, len(place.members)) if place is not None else (0, 0)
        return (RunListing(self.chosen.run_id, self.chosen.spec.run.name, round, members),)

    def place(self) -> Place | None:
        """Where this node stands in its run; None until it knows."""
        return self.session.place if self.session is not None else None

    def rounds_done(self) -> int:
        place = self.place()
        return place.round if place is not None else 0

    def parameters(self) -> int | None:
        """Parameters of the model; None until the trainer has told."""
        try:
            return self.trainer.layout.parameters if self.trainer is not None else None
        except RuntimeError:
            return None

    def join_failures(self) -> dict[Address, str]:
        """Why join addresses could not be reached, for those that are not connected now."""
        return self._discovery.join_failures()

    def _is_member(self, peer: PeerId) -> bool:
        """Whether the peer takes part in this node's run, so that its bytes are not held up."""
        return peer in self._members_now()

    def _members_now(self) -> frozenset[PeerId]:
        if self.membership is None:
            return frozenset()
        now = trio.current_time()
        if now - self._members_at > MEMBERS_FOR:
            self._members, self._members_at = frozenset(self.membership.members()), now
        return self._members

    def join_line(self) -> str:
        """A command for another machine."""
        addresses = self.network.addresses
        chosen = f" --run {self.chosen.run_id}" if self.chosen is not None else ""
        place = self.place()
        roster = f" --roster {place.roster}" if place is not None and place.roster else ""
        return f"swarmnode run --join {addresses[0]}{chosen}{roster}" if addresses else ""

    def emit(self, event: dict[str, Any]) -> None:
        """Tell an event to those who follow, and on standard output where that was asked for."""
        self._api.note(event)
        if self.options.json_events:
            print(json.dumps(event, allow_nan=False), flush=True)

    def _ready(self) -> None:
        addresses = self.network.addresses
        self.emit(
            {
                "event": "ready",
                "pid": os.getpid(),
                "trainer_pid": self.trainer.pid if self.trainer is not None else None,
                "peer_id": self.network.me,
                "data_dir": str(self.config.directory),
                "multiaddr": addresses[0] if addresses else None,
                "run_id": self.chosen.run_id if self.chosen is not None else None,
                "parameters": self.parameters(),
                "join": self.join_line(),
            }
        )
        notify(READY, status=f"peer {self.network.me}")
        if self.options.json_events:
            return
        lines = [f"swarmnode {__version__} is ready: peer {self.network.me}, role {self.config.role}"]
        lines += [f"  listening on {address}" for address in addresses]
        if self.chosen is not None:
            lines.append(f"  run {self.chosen.spec.run.name}, {self.parameters():,} parameters")
            lines.append(f"To join this run from another machine:\n  {self.join_line()}")
        lines.append("Look at it with `swarmnode status`; Ctrl-C leaves the swarm in order.")
        print("\n".join(lines), file=sys.stdout, flush=True)
