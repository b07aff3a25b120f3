"""One node, put together: its parts, those of the run that it takes part in, and the settings that each gets.

    network → calls, bulk, shards → trust → discovery; run → data, state → sync → membership, trainer → session

Here alone the run's keys and the owner's options become the settings of parts. Nothing is started: `daemon.py` runs
what is built here, and `control/` shows it to the owner.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import trio

from swarmnode import __version__
from swarmnode.crdt.hlc import PeerClocks
from swarmnode.node.choice import Choice, Wanted
from swarmnode.node.config import CAPS_FILE, GIGABYTE, MEGABIT, NodeConfig, changed_caps
from swarmnode.node.discovery.finder import AddressBook, Discovery, rendezvous_of
from swarmnode.node.exitcodes import CONFIG, ExpectedError
from swarmnode.node.guest import LOOK_EVERY, Guest
from swarmnode.node.host.addresses import listening
from swarmnode.node.host.answering import Answering
from swarmnode.node.host.libp2p_host import HostSettings
from swarmnode.node.host.limits import ConnectionLimits, Limits
from swarmnode.node.host.network import Libp2pNetwork
from swarmnode.node.identity import Identity, agent, load_or_create, read_passphrase
from swarmnode.node.invite import invite
from swarmnode.node.logs import Line, Ring, setup_logs, strict_json, tell_with_each_line
from swarmnode.node.nat.traversal import NatTraversal
from swarmnode.node.process import Run, harden, metrics_of, reason_of, share_arenas, unhurried
from swarmnode.node.reputation import PeerTrust
from swarmnode.node.session import OWNERS, RunSession
from swarmnode.node.storage.checkpoints import Checkpoints
from swarmnode.node.storage.cutting import drop_unfinished
from swarmnode.node.storage.datadir import ChosenRun, DataDir, RunStore, caps_with, weigh, write_atomic
from swarmnode.node.storage.datasets import DataSet, pace
from swarmnode.node.storage.history import HISTORY, History
from swarmnode.node.storage.shardstore import ShardStore
from swarmnode.node.storage.statestore import StateStore
from swarmnode.node.succession import SuccessorWatch, Unfit
from swarmnode.node.trainer.child import SCRATCH, TrainerSettings, gpus
from swarmnode.node.trainer.supervisor import TrainerProcess
from swarmnode.protocols.calls.rpc import PROTOCOL as RPC
from swarmnode.protocols.calls.rpc import Rpc
from swarmnode.protocols.catalogue import MAX_PLACES, Catalogue, ListedRun
from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.method import Begin, Place
from swarmnode.protocols.methods.open.checks.texts import NO_TEXTS
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.peers.liveness import Liveness
from swarmnode.protocols.runner import in_thread
from swarmnode.protocols.state.membership import Membership, RunListing, admitted, work_of
from swarmnode.protocols.state.sync import StateSync
from swarmnode.protocols.transfer.bulk import PROTOCOL as BULK
from swarmnode.protocols.transfer.bulk import Bulk
from swarmnode.protocols.transfer.shard_wire import PROTOCOL as SHARDS
from swarmnode.protocols.transfer.shards import Shards
from swarmnode.training.memory import Keeping
from swarmnode.training.rl.section import hf_folder
from swarmnode.training.runspec import RunSpec

logger = logging.getLogger(__name__)

TAKES_PART = ("train", "rollout")  # roles that have a run and a trainer
LIST_EVERY = 2.0  # seconds
EVENTS = 256  # kept for a slow reader, who then misses the oldest
STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # goes on while the machine sleeps, and nobody sets it


@dataclass(frozen=True)
class RunOptions:
    """What `swarmnode run` was asked for beside the node's configuration."""

    runspec: Path | RunSpec | None  # run file
    run_id: str | None  # whole, or the first half that a link has
    rounds: int | None  # stop training after this many rounds
    stay: bool  # serve on after the last round
    json_events: bool  # one JSON object a line on standard output
    roster: str = ""  # of the run's history that is to be joined, ROUND:ID
    choose: bool = False  # the owner chooses the run on the node's page


class Node:
    """The parts of one node. Those of its run are None until it has one: `join_run`, then `take_part`."""

    def __init__(
        self, config: NodeConfig, datadir: DataDir, identity: Identity, logs: Ring[Line], options: RunOptions
    ) -> None:
        self.config = self.uncapped = config  # the second: as it would be without what swarmnode caps keeps
        self.options = options
        self.logs = logs
        self.socket = datadir.prepare_socket()
        self.store = RunStore(datadir)
        self.limits = limits = Limits(connections=ConnectionLimits(peers=config.max_peers))
        self.trust = trust = PeerTrust(relays_for_all=config.role == "relay")
        self.agent = agent(__version__, datadir.name)
        self._blocked = datadir.blocked
        self.greeted = datadir.path / "greeted"  # there after the first run
        self.network = Libp2pNetwork(identity, host_settings(config, limits=limits, agent=self.agent), trust)
        self.defects = self.network.defects
        if self._blocked.exists():
            self.network.scoring.blocked.update(self._blocked.read_text(encoding="ascii", errors="replace").split())
        self.rpc = Rpc(self.network, limits=limits.rpc)
        self.bulk = Bulk(self.network, limits=limits.bulk)
        self.shard_store = ShardStore(datadir.path / "shards", cap=int(config.shards_cap * GIGABYTE))
        drop_unfinished(self.shard_store, {spec.data.index for spec in self.store.specs()})
        self.shards = Shards(
            self.network,
            self.rpc,
            self.shard_store,
            runner=in_thread,
            limits=limits.shards,
            promises=trust.promises,
            standings=trust,
        )
        self.liveness = Liveness(self.rpc)
        served: dict[str, Run] = {RPC: self.rpc.run, BULK: self.bulk.run, SHARDS: self.shards.run}
        self.answering = Answering(self.network, self.rpc, served)
        self.nat = NatTraversal(self.network, limits=limits.relay, upnp=config.upnp)
        trust.wire(self.network, self.rpc, self.bulk, self.shards)
        self.book = AddressBook(datadir.address_book)
        self.discovery = Discovery(self.network, self.book, join=config.join, seeds=config.seeds, runner=in_thread)
        self.catalogue = Catalogue(self.network, self.rpc, keeps=config.role in ("relay", "watch"))
        parts = (self.network, self.nat.udp, self.rpc, self.bulk, self.shards, self.answering)
        self.metrics = metrics_of(limits, datadir, self.defects, *parts)
        self.dashboard = ""  # address of the page; empty where none is served
        self.ready = False  # it takes part, or has a role without a run
        self.choice = Choice()
        self.asks = False  # somebody at the terminal, which nothing else may be written to
        self.stopping = trio.Event()  # an orderly stop has begun
        self.left = trio.Event()  # the session is over and saved, and all files of the run are closed
        self.forgetting = False  # `leave` deletes what was saved
        self.events: Ring[dict[str, Any]] = Ring(EVENTS)
        self.text_event: dict[str, Any] = {}  # the last one about the run's text, which is read, cut or fetched
        self.chosen: ChosenRun | None = None
        self.data: DataSet | None = None
        self.state: StateStore | None = None  # None again once it closes: from then on nobody can ask for it
        self.sync: StateSync | None = None
        self.membership: Membership | None = None
        self.successors: SuccessorWatch | None = None
        self.trainer: TrainerProcess | None = None
        self.session: RunSession | None = None
        self.checkpoints: Checkpoints | None = None
        self.guest = Guest(config.directory)
        self._caps_changed = trio.Event()  # since the guest began to look last
        self.writing = trio.Lock()  # of what its owner changes: the file says what was changed last
        self._began = 0.0  # trio time

    @property
    def folder(self) -> Path:
        """What is kept of the run lies below it."""
        assert self.chosen is not None
        return self.store.folder(self.chosen.run_id)

    @property
    def pause_mark(self) -> Path:
        """A file that is there while the owner has training paused, over restarts."""
        return self.folder / "paused"

    def want(self, wanted: Wanted) -> None:
        """Go by what the owner chose, as if the command had said so."""
        self.options = replace(self.options, runspec=wanted.spec, run_id=wanted.run_id, roster=wanted.roster)
        self.config = replace(self.config, join=wanted.join)
        self.discovery.set_join(wanted.join)

    def join_run(self, chosen: ChosenRun) -> StateStore:
        """Build what the run needs before its trainer; its state, which is not open yet. Raises ExpectedError."""
        self.chosen, config = chosen, self.config
        tell_with_each_line(run=chosen.run_id)
        self.discovery.set_rendezvous(rendezvous_of(chosen.run_id))
        if chosen.spec.data.index:  # else the task brings its data along
            self.data = DataSet(
                chosen.spec,
                shards=self.shards,
                store=self.shard_store,
                runner=in_thread,
                corpus=config.corpus,
                own_text=config.data == "local",
                emit=self.emit,
            )
        state = StateStore(
            self.folder / "state.db",
            chosen.run_id,
            me=self.network.me,
            sign=self.network.sign,
            clocks=PeerClocks(now_ms, partial(time.clock_gettime, STEADY)),
            admitted=admitted(chosen.spec),
        )
        self.sync = StateSync(state, network=self.network, rpc=self.rpc, runner=in_thread)
        self.membership = Membership(network=self.network, state=state, sync=self.sync)
        self.successors = SuccessorWatch(state, chosen.spec)
        state.measure(self.metrics)
        self.sync.measure(self.metrics)
        return state

    def make_trainer(self) -> TrainerProcess:
        assert self.chosen is not None
        self.trainer = make_trainer(self.chosen, self.config, me=self.network.me, data=self.data)
        self.trainer.cap_cpu(cores_of(self.config))
        self.trainer.measure(self.metrics)
        return self.trainer

    def take_part(self) -> RunSession:
        """Build this node's life in the run, once the trainer told its layout and the run's parts run.

        From now on the run's exchange method answers its peers. Raises ExpectedError.
        """
        chosen, config, trainer = self.chosen, self.config, self.trainer
        assert chosen is not None and trainer is not None and self.membership is not None
        assert self.state is not None and self.sync is not None and self.trust.reputation is not None
        samples = config.role == "rollout"
        if not samples:  # what a sampler has is its trainer's
            self.checkpoints = Checkpoints(
                self.folder / "checkpoints",
                run_id=chosen.run_id,
                layout=trainer.layout,
                keep=config.checkpoint_keep,
                hours=config.checkpoint_hours,
            )
        context = Context(
            run_id=chosen.run_id,
            spec=chosen.spec,
            network=self.network,
            rpc=self.rpc,
            bulk=self.bulk,
            liveness=self.liveness,
            runner=in_thread,
            trainer=trainer,
            membership=self.membership,
            state=self.state,
            sync=self.sync,
            shards=self.shards,
            admits=admitted(chosen.spec).__contains__,
            now=self.state.now,
            rng=random.Random(),
            ledger=self.trust.reputation.ledger,
            policy=config.policy,
            rollouts=self.limits.rollouts,
            texts=self.data if self.data is not None else NO_TEXTS,
        )
        self.session = RunSession(
            context,
            Begin(
                creator=chosen.creator,
                expect_members=bool(config.join) or bool(self.book.entries()),
                wait_peers=config.wait_peers,
                wait_seconds=config.wait_seconds,
                last_round=self.options.rounds,
                roster=self.options.roster,
                named=self.discovery,
            ),
            emit=self.emit,
            samples=samples,
            checkpoint_every=config.checkpoint_every,
            checkpoints=self.checkpoints,
            history=None if samples else History(self.folder / HISTORY),
        )
        self.session.defects = self.defects
        self.session.measure(self.metrics)
        self.trust.take_part(self.session.method)
        return self.session

    async def be_guest(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Pause training while the owner's caps and times ask for it; give shards what they leave of the disk."""
        session, trainer, guest = self.session, self.trainer, self.guest
        assert session is not None and trainer is not None
        while True:
            self._caps_changed = trio.Event()
            own = trainer.cpu_seconds + time.process_time()
            held = await in_thread(lambda: guest.look(self.config, time.time(), own=own))  # noqa: B023 (awaited here)
            await in_thread(self._make_room)
            for hold in held:
                await session.pause(hold)
            for cause in session.holds.keys() - {hold.cause for hold in held} - {OWNERS.cause}:
                session.resume(cause)
            task_status.started()
            task_status = trio.TASK_STATUS_IGNORED
            with trio.move_on_after(LOOK_EVERY):
                await self._caps_changed.wait()

    def _make_room(self) -> None:
        store, config, left = self.shard_store, self.config, math.inf
        if config.disk:
            left = config.disk * GIGABYTE - self.guest.used
        store.cap = max(0, int(min(config.shards_cap * GIGABYTE, left + store.used)))
        if self.checkpoints is not None:
            self.checkpoints.room = left + weigh(self.checkpoints.folder) if config.disk else math.inf
        if store.used > store.cap:
            with suppress(OSError):  # what cannot be deleted now is looked at again
                store.collect()

    async def change_caps(self, changes: Mapping[str, Any]) -> None:
        """Change what the node may take, and when, at once and for its next starts.

        Raises SettingError, with nothing changed, and DataDirError, with nothing kept for the next start.
        """
        path = self.config.directory / CAPS_FILE
        async with self.writing:
            config, changed = changed_caps(self.config, changes, self.uncapped)
            written = await in_thread(lambda: caps_with(path, changed))
            if self.trainer is not None:
                self.trainer.change(**of_trainer(config))
                self.trainer.cap_cpu(cores_of(config))
            self.config = config
            self.network.cap_rates(up=config.up * MEGABIT, down=config.down * MEGABIT)
            self._caps_changed.set()
            await in_thread(lambda: write_atomic(path, written))

    async def block(self, peer: PeerId, blocked: bool) -> None:
        """Keep a peer out from now on, also after a restart, or no longer.

        Raises DataDirError, with nothing kept for the next start.
        """
        scoring = self.network.scoring
        scoring.block(peer, blocked)
        async with self.writing:
            listed = "".join(f"{each}\n" for each in sorted(scoring.blocked))
            await in_thread(lambda: write_atomic(self._blocked, listed.encode()))

    def emit(self, event: dict[str, Any]) -> None:
        """Tell an event to those who follow, and on standard output where that was asked for."""
        event = strict_json(event)  # what diverged is NaN
        if "round" in event:
            tell_with_each_line(round=event["round"])
        if event["event"] in ("corpus", "data"):
            self.text_event = event
        self.events.put(event)
        if self.options.json_events:
            print(json.dumps(event, allow_nan=False), flush=True)

    def doing(self) -> str:
        """What it does now and how long it will take, for people; empty where it waits for nothing."""
        told = self.text_event
        if self.session is not None:
            return self.session.doing()
        if self.config.role not in TAKES_PART or self.asks or self.choice.awaited:
            return ""
        if self.trainer is not None:
            return "starting the trainer, which loads torch and builds the model"
        if not told:
            if self.chosen is not None:
                return "looking for the run's text"
            return "looking for somebody of the run" if self.config.join else "reading the run and its text"
        how = pace(told["bytes"], told["of"], told["rate"])
        if told["event"] == "corpus":
            return f"the run's text: {told['step']}, {how}"
        return f"the run's text: {told['shards']} of {told['wanted']} shards are here, {how}"

    # --- what others ask --------------------------------------------------------------------------------------------

    def listings(self) -> tuple[RunListing, ...]:
        """The run that this node takes part in, for peers who ask what they could join."""
        if self.chosen is None:
            return ()
        place = self.place()
        round, members = (place.round, len(place.members)) if place is not None else (0, 0)
        return (RunListing(self.chosen.run_id, self.chosen.spec.run.name, round, members),)

    def listing(self) -> ListedRun | None:
        """What this node's run is in the catalogue; None where it is in none, ended, or is not to be listed."""
        chosen, session = self.chosen, self.session
        if chosen is None or session is None or session.place is None or session.finished.is_set():
            return None
        ended = self.successors is not None and self.successors.said is not None
        if ended or self.config.unlisted or chosen.spec.run.unlisted:
            return None
        traffic = self.network.traffic()
        needs = self.trainer.needs if self.trainer is not None else None
        return ListedRun(
            run_id=bytes.fromhex(chosen.run_id),
            parameters=self.parameters() or 0,
            memory=needs.memory if needs is not None else 0,
            rate=int(max(traffic.bytes_in, traffic.bytes_out) / max(1.0, trio.current_time() - self._began)),
            addresses=tuple(place for place in self.network.addresses if len(place) < 256)[:MAX_PLACES],
        )

    async def be_listed(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep what the catalogue says of this node's run up to date."""
        self._began = trio.current_time()
        task_status.started()
        while True:
            before, listing = self.catalogue.listing, self.listing()
            self.catalogue.listing = listing
            if before is None and listing is not None and self.chosen and self.chosen.spec.run.owner == self.network.me:
                logger.info(
                    "anybody can find this run with `swarmnode discover` and become a member%s; unlisted = true under "
                    "[run], as a run is created, keeps it out of the catalogue",
                    ", and one who lies can spoil its model" if self.chosen.spec.run.trust == "known" else "",
                )
            await trio.sleep(LIST_EVERY)

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

    def join_line(self) -> str:
        """A command for another machine, with a link where there is a run to join; empty while there is no address."""
        addresses, place = self.network.addresses, self.place()
        if not addresses or self.config.role not in TAKES_PART:
            return f"swarmnode discover --bootstrap {addresses[0]}" if addresses else ""
        run_id = self.chosen.run_id if self.chosen is not None else ""
        roster = place.roster if place is not None else ""
        try:
            return f"swarmnode join {invite(addresses, run_id, roster)}"
        except ValueError:  # a place of an unusual kind
            options = [f" --run {run_id}"] * bool(run_id) + [f" --roster {roster}"] * bool(roster)
            return f"swarmnode join {addresses[0]}{''.join(options)}"


def greeting(node: Node) -> list[str]:
    """What a person should know at the first run: who this is, what others see, what is kept, how to refuse."""
    config = node.config
    who = [
        "  you         this node's key is its peer id; swarmnode id --name NAME gives it a name that its peers see",
        *(f"  address     {address}" for address in node.network.addresses[:2]),
    ]
    if config.role not in TAKES_PART:
        return [
            *who,
            "  others see  your IP address, peer id, name and version",
            f"  is kept     in {config.directory}: key, logs and addresses of other nodes; nothing of any run",
            "  is shared   where other nodes are; a seed also relays for nodes that nobody can dial",
            "  say no      swarmnode stop; --up, --down and --max-peers cap what it takes",
        ]
    if config.data == "local" or (node.chosen is not None and node.data is None):
        text = "none of its text leaves this machine"
    else:
        text = f"shards of the run's text, at most {config.shards_cap:g} GB (--shards-cap), are kept and sent on"
    what, more = "how far your copy of the model moves,", "from which something of the text may be worked out"
    if node.chosen is not None and not node.chosen.spec.needs_data:
        what, more = "what your policy answers,", "signed and handed on by others; who samples for it has its weights"
    return [
        *who,
        f"  others see  your IP address, peer id, name and version; in a run also {what}",
        f"              {more}",
        f"  is kept     in {config.directory}: key, logs, the run's state and checkpoints",
        f"  is shared   {text};",
        "              where this node is public, it relays for members of its run who are not",
        "  say no      swarmnode pause, resume, stop; --threads, --memory, --up, --down and more cap what it takes",
    ]


def invitation(line: str, addresses: Sequence[str]) -> str:
    """How others join by the join line, for the person who started the node; it is empty without an address."""
    if not addresses:
        return (
            "No other machine can dial this node yet; it looks for a relay. `swarmnode id --join` prints the line for "
            "another machine as soon as there is one, and `swarmnode netcheck` says what is in the way."
        )
    if addresses[0].startswith(("/ip4/127.", "/ip6/::1/")):
        return f"To join this run from this machine (others cannot dial it: it listens here only):\n  {line}"
    return f"To join this run from another machine:\n  {line}"


def rendezvous(addresses: Sequence[str]) -> str:
    """How others find the swarm through a node that is in no run, for the person who started it."""
    if not addresses:
        return "No other machine can dial this node yet; swarmnode netcheck says what is in the way."
    return (
        "Next: give others this option of swarmnode run, join and discover; with it they find one another:\n"
        f"  --bootstrap {addresses[0]}\n"
        f'For good, in their config.toml:\n  bootstrap = ["{addresses[0]}"]\n'
        f"Or have this TXT record in a domain NAME of yours, and give them --bootstrap /dnsaddr/NAME:\n"
        f'  _dnsaddr.NAME  TXT  "dnsaddr={addresses[0]}"'
    )


@contextmanager
def at_home(config: NodeConfig) -> Iterator[tuple[DataDir, Identity, Ring[Line]]]:
    """The node's data directory, with its key and its logs, in a hardened process. Of a group the cause is raised."""
    share_arenas()
    with unhurried(), DataDir(config.directory) as datadir:
        identity = load_or_create(datadir.identity, read_passphrase(config.passphrase_file, os.environ))
        logs = setup_logs(datadir.logs, config.log_level, config.log_format)
        harden()
        try:
            yield datadir, identity, logs
        except BaseExceptionGroup as group:
            reason = reason_of(group)
            if isinstance(reason, Unfit):
                shutil.rmtree(reason.folder, ignore_errors=True)  # of a run that never began
            raise reason from group


def host_settings(config: NodeConfig, *, limits: Limits, agent: str) -> HostSettings:
    return HostSettings(
        listen=listening(config.listen, config.port),
        announce=config.announce,
        mdns=config.mdns,
        quic=config.quic,
        up=config.up * MEGABIT,
        down=config.down * MEGABIT,
        agent=agent,
        limits=limits,
    )


def check_admitted(spec: RunSpec, me: PeerId) -> None:
    """Raises ExpectedError where this node's key lacks the work that the run asks of strangers."""
    if spec.trust.identity_bits and me not in admitted(spec):
        raise ExpectedError(
            f"the run {spec.run.name} admits only keys with {spec.trust.identity_bits} bits of work, and this node's "
            f"has {max(work_of(me), 0)}; nobody would keep what it writes. Make one with swarmnode id --mine "
            f"{spec.trust.identity_bits} --replace: a new key is a new peer id, and standing elsewhere is lost with "
            "the old one; or give this run a data directory of its own (--data-dir)",
            exit_code=CONFIG,
        )


def make_trainer(chosen: ChosenRun, config: NodeConfig, *, me: PeerId, data: DataSet | None) -> TrainerProcess:
    """The trainer's supervisor, with the text that is here by now."""
    own = chosen.spec.rollouts.policy if chosen.creator else ""  # a stranger's run names no folder to be read here
    settings = TrainerSettings(
        micro_batch=config.micro_batch,
        device=config.device,
        ranks=config.ranks or (gpus() if config.device != "cpu" and chosen.spec.needs_data else 1),
        sharded=config.sharded,
        heldout=data.heldout if data is not None else "",
        tokenizer=data.tokenizer if data is not None else "",
        shared=data is None or not data.own_text,
        texts=data.take() if data is not None else (),
        task=config.task,
        base=config.base,
        policy=config.policy or (own if hf_folder(own) else ""),
        sampling=config.sampling,
        sandbox=config.sandbox,
        scratch=str(config.directory / SCRATCH),
        readable=(str(config.directory / "shards"), *config.sandbox_read),
        disk=int(config.disk * GIGABYTE),
        **of_trainer(config),
    )
    spec = chosen.spec
    if config.role == "rollout" and spec.exchange.method == "sapo":
        # Its weights are another node's, so that it has nothing to warm up.
        spec = spec.updated(rollouts={"warm_up": 0})
    keeping = Keeping(config.checkpoint_keep, config.checkpoint_hours)
    return TrainerProcess(spec, run_id=chosen.run_id, peer_id=me, settings=settings, keeping=keeping)


def of_trainer(config: NodeConfig) -> dict[str, Any]:
    """What the owner may change while the node runs, and the trainer is started again for."""
    memory, device_memory = int(config.memory * GIGABYTE), int(config.device_memory * GIGABYTE)
    return {"threads": config.threads, "nice": config.nice, "memory": memory, "device_memory": device_memory}


def cores_of(config: NodeConfig) -> float:
    """CPU seconds a second that the node may take; 0: no cap."""
    return config.cpu / 100 * len(os.sched_getaffinity(0)) if config.cpu < 100 else 0.0


def now_ms() -> int:
    return time.time_ns() // 1_000_000
