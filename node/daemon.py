"""The daemon: all parts of a node, started in one order and stopped in the reverse one.

    data directory → identity → host → calls, bulk, shards → control socket → discovery → run → data → trainer → session

Each part runs in a nursery of its own inside the one before, so a part that fails ends the daemon with its reason, and
what depends on a part is gone before the part is. The first SIGINT or SIGTERM leaves the swarm in order: an exchange in
hand may end, local work is saved, the others are told. A second one ends the process at once.

What the parts are and which settings they get is in `assembly.py`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

import trio

from swarmnode import __version__
from swarmnode.node import process
from swarmnode.node.assembly import TAKES_PART, Node, at_home, greeting, invitation, rendezvous
from swarmnode.node.assembly import RunOptions as RunOptions  # what a command gives to run_daemon
from swarmnode.node.config import OFF, Loaded
from swarmnode.node.control.api import Api, stands_still
from swarmnode.node.discovery.finder import rendezvous_of
from swarmnode.node.exitcodes import FORCED, OK, ExpectedError
from swarmnode.node.identity import named
from swarmnode.node.logs import show_ahead
from swarmnode.node.process import Defects, Run
from swarmnode.node.runfinder import RunFinder
from swarmnode.node.storage.checkpoints import newest_round
from swarmnode.node.storage.cutting import release_forgotten
from swarmnode.node.succession import first_state
from swarmnode.protocols.peers.hello import serve_hello
from swarmnode.protocols.reputation.observations import PromiseChecks
from swarmnode.protocols.runner import in_thread
from swarmnode.protocols.state.membership import serve_runs
from swarmnode.training import mapped
from swarmnode.training.golden import check_golden
from swarmnode.training.options import number_of
from swarmnode.training.tasks import needs_text

logger = logging.getLogger(__name__)

STOP_WITHIN = 20.0  # seconds for an orderly stop, before what is left is cancelled
LAST_WORD = 0.5  # seconds for what a node says that ends at once, or is stopped while it is in no run
LOOK_AGAIN = 5.0  # seconds between two looks whether others can dial this node
SHOW_EVERY = 1.0  # seconds between two looks at what goes on, for a terminal
SAY_EVERY = 10.0  # seconds between two lines about a wait that goes on, elsewhere


def run_daemon(loaded: Loaded, options: RunOptions) -> int:
    """Run a node until it is told to stop; returns the exit code. Raises ExpectedError or SettingError for a person."""
    config = loaded.config
    needs_text("", config.task)  # a mistake in it is said before anything starts
    with at_home(config) as (datadir, identity, logs):
        mapped.keep_in(datadir.path)
        for key, origin in loaded.origins.items():
            logger.debug("%s = %r (%s)", key, getattr(config, key, None), origin)

        async def main() -> int:
            node = Node(config, datadir, identity, logs, options)
            node.uncapped = loaded.uncapped
            return await Daemon(node).run()

        return trio.run(main)


@asynccontextmanager
async def _running(run: Run, defects: Defects | None = None) -> AsyncIterator[None]:
    """A part that runs, in a nursery of its own, for as long as the block does; anew after each of its `defects`."""
    async with trio.open_nursery() as nursery:
        await nursery.start(run if defects is None else partial(defects.keep, run))
        yield
        nursery.cancel_scope.cancel()


class Daemon:
    """One node's life, which `run` is the whole of."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._life = trio.CancelScope()  # what a stop ends when there is no session to leave in order
        self._invited_to: str | None = None  # the address in the invitation that was printed; "" for none
        self._serving = trio.CancelScope()  # after the last round; what was opened for the run is then closed in order

    async def run(self) -> int:
        """Start everything, take part until stopped, stop everything; the exit code."""
        node = self._node
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch_signals, signals)
                nursery.start_soon(self._stop_when_told)
                nursery.start_soon(self._tell_watchdog)
                nursery.start_soon(node.defects.keep, self._invite_again)
                nursery.start_soon(node.defects.keep, self._show_progress)
                async with AsyncExitStack() as stack:
                    await self._start_parts(stack)
                    with self._life:
                        await self._take_part()
                    node.left.set()
                nursery.cancel_scope.cancel()
        unsaved = node.session.unsaved if node.session is not None and not node.forgetting else None
        code = OK if unsaved is None else unsaved.exit_code
        node.emit({"event": "stopped", "code": code})
        if not node.options.json_events:
            self._say("; ".join(["stopped in order", *await in_thread(self._what_is_saved)]))
            if unsaved is not None:
                print(f"swarmnode: the newest state could not be saved: {unsaved}", file=sys.stderr)
        return code

    def _what_is_saved(self) -> list[str]:
        """What the disk has of this node's run, for people; of all runs, where it got to none. Blocking."""
        node = self._node
        if node.forgetting:
            return []
        runs = node.store.known() if node.chosen is None else (node.chosen.run_id,)
        newest = {run_id: newest_round(node.store.folder(run_id) / "checkpoints") for run_id in runs}
        return [
            f"the newest checkpoint of run {run_id[:12]}… has {number_of(rounds, 'round')} in it"
            if rounds
            else f"run {run_id[:12]}… has no checkpoint{'' if rounds is None else ' of a finished round yet'}"
            for run_id, rounds in newest.items()
        ]

    async def _start_parts(self, stack: AsyncExitStack) -> None:
        node = self._node
        serve_hello(node.network, node.agent)
        serve_runs(node.rpc, node.listings, node.store.encoded)
        carriers = (node.rpc.run, node.bulk.run, node.liveness.run, node.shards.run, node.answering.run)
        await stack.enter_async_context(_running(node.network.run))  # which cannot begin anew
        for part in (*carriers, node.nat.run, node.discovery.run, node.be_listed, node.catalogue.run):
            await stack.enter_async_context(_running(part, node.defects))
        await stack.enter_async_context(_running(Api(node).run))
        for page in self._dashboard():
            await stack.enter_async_context(_running(page))
        process.rest_what_stays()

    def _dashboard(self) -> list[Run]:
        """What serves the owner's page, where one is wanted and its address can be had."""
        node, home = self._node, self._node.config.directory
        if node.config.dashboard == OFF:
            return []
        from swarmnode.node.dashboard.server import Dashboard, listen, token_in

        try:
            served = Dashboard([("", home)], token_in(home), listen(node.config.dashboard))
        except (OSError, ExpectedError) as error:
            logger.warning("there is no dashboard: %s cannot be served: %s", node.config.dashboard, error)
            return []
        node.dashboard = served.address
        return [served.run]

    async def _watch_signals(self, signals: AsyncIterator[int]) -> None:
        told = False
        async for number in signals:
            if told:
                logger.warning("second %s: ending at once", signal.Signals(number).name)
                self._node.emit({"event": "stopped", "code": FORCED})
                with trio.CancelScope(shield=True):
                    await trio.sleep(LAST_WORD)
                os._exit(FORCED)  # no part may hold this up; files are replaced whole, and the kernel ends the trainer
            told = True
            logger.info("%s: leaving the swarm; once more ends at once", signal.Signals(number).name)
            self._node.stopping.set()

    async def _stop_when_told(self) -> None:
        await self._node.stopping.wait()
        process.notify(process.STOPPING)
        self._serving.cancel()
        if self._node.session is not None:
            self._node.session.stop()
        self._life.deadline = trio.current_time() + (LAST_WORD if self._node.session is None else STOP_WITHIN)

    async def _tell_watchdog(self) -> None:
        """Where systemd watches, tell it that the loop turns, and before the node is ready that the start goes on.

        A node that stands still tells nothing, and systemd starts it anew: once, as a fresh one has no usual pace yet.
        """
        node, patience = self._node, process.watched_every()
        while patience is not None:
            if not node.ready:
                process.notify(process.STARTING.format(patience * 1e6), status="starting")
            elif node.session is None or not stands_still(node.session):
                process.notify(process.WATCHDOG, status=f"peer {node.network.me}, {node.rounds_done()} rounds")
            await trio.sleep(patience / 3)

    async def _show_progress(self, *, task_status: trio.TaskStatus[None]) -> None:
        """On a terminal what goes on, each second; elsewhere a line now and then until the first round is over."""
        task_status.started()
        node, said_at, before, since = self._node, trio.current_time(), "", 0.0
        while not node.stopping.is_set():
            now, text = trio.current_time(), node.doing()
            if node.session is None and text:  # how long it will take nobody knows
                before, since = (before, since) if before == text else (text, now)
                text += f" ({now - since:.0f} s so far)" if now - since > SHOW_EVERY else ""
            if text and not show_ahead(text) and now - said_at >= SAY_EVERY:
                said_at = now
                if node.session is None or node.session.last is None:
                    logger.info("%s", text)
            await trio.sleep(SHOW_EVERY)

    # --- taking part ------------------------------------------------------------------------------------------------

    async def _take_part(self) -> None:
        node = self._node
        if node.config.role not in TAKES_PART:
            self._ready()
            await trio.sleep_forever()
        check_golden()
        await in_thread(lambda: release_forgotten(node.store, node.shard_store))
        if node.options.run_id is not None:  # its members may be behind relays, and only the DHT knows them
            node.discovery.set_rendezvous(rendezvous_of(node.options.run_id))
        if node.options.choose and node.dashboard:
            node.emit({"event": "choosing", "page": node.dashboard})
            self._greet(f"No run yet. Choose one on the node's page: {node.dashboard} (swarmnode open)")
        chosen = await RunFinder(node).choose()
        state = node.join_run(chosen)
        assert node.sync is not None and node.membership is not None and node.successors is not None
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(_running(state.run, node.defects))
            node.state = state
            stack.callback(setattr, node, "state", None)  # it closes next: from now on nobody can ask for it
            await stack.enter_async_context(_running(node.sync.run, node.defects))
            if node.data is not None:
                await stack.enter_async_context(_running(node.data.run, node.defects))
            trainer = node.make_trainer()
            logger.info("starting the trainer, which loads torch and builds the model: some seconds")
            await stack.enter_async_context(_running(trainer.run))
            if trainer.needs is not None:
                node.emit({"event": "memory", **trainer.needs.told()})
            if node.data is not None:
                await stack.enter_async_context(_running(partial(node.data.pass_on, trainer), node.defects))
            await stack.enter_async_context(_running(node.membership.run, node.defects))
            await stack.enter_async_context(_running(node.successors.run, node.defects))
            reputation = await node.trust.join(node.folder, state=state, sync=node.sync, membership=node.membership)
            reputation.measure(node.metrics)
            await stack.enter_async_context(_running(reputation.run, node.defects))
            checks = PromiseChecks(node.shards, node.shard_store, node.trust.promises)
            await stack.enter_async_context(_running(checks.run, node.defects))
            first = await in_thread(lambda: first_state(node.store, chosen, trainer.layout, node.config.weights))
            if first is not None:
                trainer.load(first.state.parameters)
            session = node.take_part()
            stack.push_async_callback(session.keep)
            if node.pause_mark.exists():
                logger.warning("training is paused, as it was or was asked for: go on with swarmnode resume")
                await session.pause()
            await stack.enter_async_context(_running(node.be_guest, node.defects))
            self._ready()
            await session.run()
            node.emit({"event": "finished", "rounds": node.rounds_done()})
            if node.options.stay:
                with self._serving:
                    await session.serve_forever()

    def _ready(self) -> None:
        node = self._node
        addresses = node.network.addresses
        node.emit(
            {
                "event": "ready",
                "pid": os.getpid(),
                "trainer_pid": node.trainer.pid if node.trainer is not None else None,
                "peer_id": node.network.me,
                "data_dir": str(node.config.directory),
                "multiaddr": addresses[0] if addresses else None,
                "run_id": node.chosen.run_id if node.chosen is not None else None,
                "parameters": node.parameters(),
                "loss_unit": node.chosen.spec.loss_unit if node.chosen is not None else None,
                "join": node.join_line(),
            }
        )
        node.ready = True
        process.notify(process.READY, status=f"peer {node.network.me}")
        self._invited_to = "".join(addresses[:1])
        if node.options.json_events:
            return
        run = f"run {node.chosen.spec.run.name}, {node.parameters():,} parameters" if node.chosen is not None else ""
        called = " ".join(filter(None, (named(node.agent)[1], node.network.me)))
        lines = [f"swarmnode {__version__} is ready: {called}, {run or f'role {node.config.role}'}"]
        page = f"its page: {node.dashboard} (swarmnode open); " if node.dashboard else ""
        lines += [f"Look at it: swarmnode status, swarmnode top; {page}Ctrl-C leaves the swarm in order."]
        if node.chosen is not None:
            lines.append(invitation(node.join_line(), addresses))
        elif node.config.role == "relay":
            lines.append(rendezvous(addresses))
        self._greet(*lines)

    def _greet(self, first: str, *lines: str) -> None:
        """Tell people, at the first start of this node with what they should know once."""
        node = self._node
        if node.options.json_events:
            return
        told = [] if node.greeted.exists() else greeting(node)
        with suppress(OSError):  # a disk that takes nothing: it is told again at the next start
            node.greeted.touch()
        self._say("\n".join([first, *told, *lines]))

    async def _invite_again(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Say the invitation once more when others can dial this node, where they could not when it was ready."""
        task_status.started()
        node = self._node
        while True:
            await trio.sleep(LOOK_AGAIN)
            first = "".join(node.network.addresses[:1])
            if node.nat.how_reached in ("public", "relayed") and self._invited_to not in (None, first) and first:
                break
        if node.chosen is not None and not node.options.json_events:
            self._say(f"Others can dial this node now. {invitation(node.join_line(), node.network.addresses)}")

    def _say(self, text: str) -> None:
        """Tell people on standard output; where a program collects lines, as one of the log."""
        if self._node.config.log_format == "json":
            logger.info("%s", text)
        else:
            show_ahead("")
            print(text)
