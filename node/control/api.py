"""What a running daemon answers to its owner: the methods behind `swarmnode status`, `peers`, `ping` and the others.

Reads the parts of the daemon and changes nothing but what the owner asks for. Results are plain JSON values; their
shapes are documented in docs/cli.md.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

import trio

from swarmnode import __version__
from swarmnode.node.assembly import now_ms
from swarmnode.node.control import Declined
from swarmnode.node.control.advice import warnings_of
from swarmnode.node.control.rollouts_api import RolloutsApi
from swarmnode.node.control.scores_api import ScoresApi
from swarmnode.node.control.server import ControlServer
from swarmnode.node.control.shards_api import ShardsApi
from swarmnode.node.control.state_api import StateApi
from swarmnode.node.control.successor_api import SuccessorApi
from swarmnode.node.exitcodes import RUN_UNAVAILABLE
from swarmnode.node.nat.netcheck import report
from swarmnode.node.storage.datasets import release_forgotten
from swarmnode.protocols.calls.rpc import CallError
from swarmnode.protocols.methods.method import Partial
from swarmnode.protocols.methods.trainer import Trainer, TrainerDied
from swarmnode.protocols.network import NetworkError, PeerId, Traffic
from swarmnode.protocols.runner import in_thread

if TYPE_CHECKING:
    from swarmnode.node.daemon import Daemon

logger = logging.getLogger(__name__)

RATE_OVER = 5.0  # seconds between the samples from which traffic rates are computed
PING_TIMEOUT = 5.0  # seconds
GO_DIRECT_WITHIN = 12.0  # seconds for `ping` to have a circuit replaced: three attempts
RECENT = 16  # rounds that averages shown to people go over
EVENTS_WAITING = 256  # events kept for a slow reader of the events stream, who then loses the oldest


class Api:
    """The control methods of one daemon; `run` samples traffic."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._started = trio.current_time()
        self._samples: deque[tuple[float, Traffic]] = deque(maxlen=4)
        self._most_in = self._most_out = 0.0  # bytes/s, over RATE_OVER
        self._listeners: set[trio.MemorySendChannel[dict[str, Any]]] = set()
        self._seconds: deque[tuple[float, float, int]] = deque(maxlen=RECENT)  # round, computing, tokens

    def server(self) -> ControlServer:
        methods = {
            name: getattr(self, name)
            for name in (
                "status",
                "peers",
                "netcheck",
                "metrics",
                "ping",
                "sample",
                "evaluate",
                "pause",
                "resume",
                "stop",
                "leave",
            )
        }
        daemon = self._daemon
        methods |= ShardsApi(daemon.shards, daemon.shard_store, runner=in_thread).methods()
        network = daemon.network
        state = StateApi(lambda: daemon.state, me=network.me, verify=network.verify, now=now_ms, runner=in_thread)
        methods |= state.methods()
        methods |= SuccessorApi(daemon).methods() | RolloutsApi(daemon).methods() | ScoresApi(daemon).methods()
        streams = {"logs": self.logs, "events": self.events, **state.streams()}
        return ControlServer(daemon.socket, methods, streams)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while True:
            self._samples.append((trio.current_time(), self._daemon.network.traffic()))
            (before, then), (now, total) = self._samples[max(-2, -len(self._samples))], self._samples[-1]
            if now > before:
                self._most_in = max(self._most_in, (total.bytes_in - then.bytes_in) / (now - before))
                self._most_out = max(self._most_out, (total.bytes_out - then.bytes_out) / (now - before))
            await trio.sleep(RATE_OVER)

    def note(self, event: dict[str, Any]) -> None:
        """An event happened: remember what status needs, and pass it to those who follow."""
        if event["event"] == "round":
            self._seconds.append((event["seconds"], event["compute_seconds"], event["tokens"]))
        for listener in self._listeners:
            try:
                listener.send_nowait(event)
            except trio.WouldBlock:
                logger.debug("a reader of events is too slow; it misses one")

    # --- looking ----------------------------------------------------------------------------------------------------

    async def status(self, params: Mapping[str, Any]) -> dict[str, Any]:
        daemon = self._daemon
        views = daemon.network.peers()
        relayed = sum(view.path == "relayed" for view in views)
        return {
            "version": __version__,
            "peer_id": daemon.network.me,
            "uptime_s": round(trio.current_time() - self._started, 1),
            "role": daemon.config.role,
            "addresses": list(daemon.network.addresses),
            "join": daemon.join_line(),
            "data_dir": str(daemon.config.directory),
            "paused": daemon.session is not None and daemon.session.paused,
            "reachability": daemon.nat.status().reachability,
            "run": self._run_status(),
            "peers": {"connected": len(views), "direct": len(views) - relayed, "relayed": relayed},
            "traffic": self._traffic(),
            "trainer": self._trainer_status(),
            "warnings": warnings_of(daemon),
        }

    def _run_status(self) -> dict[str, Any] | None:
        daemon = self._daemon
        session, chosen = daemon.session, daemon.chosen
        if chosen is None:
            return None
        place = daemon.place()
        last = session.last if session is not None else None
        elapsed, computed, tokens = (
            (sum(column) for column in zip(*self._seconds, strict=True)) if self._seconds else (0.0, 0.0, 0)
        )
        usual = median(seconds for seconds, _, _ in self._seconds) if self._seconds else None
        outcome = session.outcome if session is not None else None
        return {
            "run_id": chosen.run_id,
            "name": chosen.spec.run.name,
            "round": place.round if place is not None else None,
            "rounds": daemon.options.rounds,
            "phase": session.phase if session is not None else "waiting",
            "arriving": list(session.arriving) if session is not None and session.arriving is not None else None,
            "members": len(place.members) if place is not None else 0,
            "parameters": daemon.parameters(),
            "codec": chosen.spec.exchange.codec if chosen.spec.needs_data else "rollouts",
            "data": daemon.data.status() if daemon.data is not None else None,
            "loss": last.loss if last is not None and math.isfinite(last.loss) else None,
            "loss_history": [[r, loss] for r, loss in session.losses] if session is not None else [],
            "learned": asdict(last.learned) if last is not None and last.learned is not None else None,
            "sampled": asdict(last.sampled) if last is not None and last.sampled is not None else None,
            "reward_history": [[r, reward] for r, reward in session.rewards] if session is not None else [],
            "tokens_per_second": round(tokens / elapsed, 1) if elapsed else None,
            "compute_share": round(computed / elapsed, 4) if elapsed else None,
            "state_hash": place.state_hash if place is not None else None,
            "roster": (place.roster or None) if place is not None else None,
            "outcome": type(outcome).__name__ if outcome is not None else None,
            "missing": list(outcome.missing) if isinstance(outcome, Partial) else [],
            "round_seconds": round(last.seconds, 2) if last is not None else None,
            "next_round_s": round(max(0.0, usual - place.elapsed), 1) if usual and place is not None else None,
        }

    def _trainer_status(self) -> dict[str, Any] | None:
        trainer = self._daemon.trainer
        if trainer is None:
            return None
        threads = self._daemon.config.threads
        return {
            "pid": trainer.pid,
            "device": trainer.device,
            "threads": threads,
            "restarts": trainer.restarts,
            "sandbox": trainer.sandbox,
            "sampling": trainer.sampling,
        }

    def _traffic(self) -> dict[str, float]:
        now, total = trio.current_time(), self._daemon.network.traffic()
        then, before = self._samples[0] if self._samples else (now, total)
        seconds = max(now - then, 1e-9)
        return {
            "bytes_in": total.bytes_in,
            "bytes_out": total.bytes_out,
            "rate_in": round((total.bytes_in - before.bytes_in) / seconds, 1),
            "rate_out": round((total.bytes_out - before.bytes_out) / seconds, 1),
        }

    async def peers(self, params: Mapping[str, Any]) -> dict[str, Any]:
        daemon = self._daemon
        members = set(daemon.membership.members()) if daemon.membership is not None else set()
        place = daemon.place()
        seated = {*place.members, *place.newcomers} if place is not None else set()
        now = trio.current_time()
        conduct = daemon.network.conduct
        return {
            "kept_out": [
                {"peer_id": kept.peer, "for_s": round(kept.seconds, 1), "why": kept.why} for kept in conduct.kept_out()
            ],
            "peers": [
                {
                    "peer_id": view.peer,
                    "address": view.addresses[0] if view.addresses else "",
                    "path": view.path,
                    "relay": daemon.network.relay_of(view.peer),
                    "inbound": view.inbound,
                    "age_s": round(now - view.connected_at, 1),
                    "rtt_ms": round(1000 * rtt, 2) if (rtt := self._rtt(view.peer)) else None,
                    "agent": view.agent,
                    "member": view.peer in members,
                    "standing": conduct.standing(view.peer).word,
                    "round": place.round if place is not None and view.peer in seated else None,
                }
                for view in daemon.network.peers()
            ],
        }

    async def netcheck(self, params: Mapping[str, Any]) -> dict[str, Any]:
        daemon, traffic = self._daemon, self._traffic()
        rates = {
            "in": traffic["rate_in"],
            "out": traffic["rate_out"],
            "most_in": round(self._most_in, 1),
            "most_out": round(self._most_out, 1),
        }
        return report(daemon.network, daemon.nat.status(), upnp=daemon.config.upnp, rates=rates)

    async def metrics(self, params: Mapping[str, Any]) -> dict[str, Any]:
        metrics = self._daemon.metrics
        samples: dict[str, list[dict[str, Any]]] = {}
        for sample in metrics.samples():
            label = {sample.metric.label: sample.of} if sample.metric.label else {}
            samples.setdefault(sample.metric.name, []).append({"labels": label, "value": sample.value})
        return {
            "text": metrics.text(),
            "metrics": [
                {"name": metric.name, "kind": metric.kind, "help": metric.help, "samples": samples.get(metric.name, [])}
                for metric in metrics.declared()
            ],
        }

    async def ping(self, params: Mapping[str, Any]) -> dict[str, Any]:
        peer = await self._resolve(str(params.get("peer", "")))
        count = max(1, min(int(params.get("count", 3)), 100))
        network = self._daemon.network
        rtts: list[float] = []
        relays: list[PeerId | None] = []  # through whom each ping went
        for number in range(count):
            if number == 1 and relays[0] is not None:
                with trio.move_on_after(GO_DIRECT_WITHIN):
                    await self._daemon.nat.go_direct(peer)
            try:
                rtts.append(round(1000 * await self._daemon.rpc.ping(peer, timeout=PING_TIMEOUT), 3))
            except CallError as error:
                raise Declined(f"{peer} does not answer: {error}. It may be off, frozen or cut off.") from error
            relays.append(network.relay_of(peer))
        return {"peer_id": peer, "rtts_ms": rtts, "relays": relays, "path": "relayed" if relays[-1] else "direct"}

    def _rtt(self, peer: PeerId) -> float | None:
        """In seconds: of calls where there were any lately, else of the connection's own pings."""
        return self._daemon.liveness.rtts.get(peer) or self._daemon.network.rtt(peer)

    async def _resolve(self, name: str) -> PeerId:
        """A peer id, the end or beginning of a connected one's, or a multiaddr."""
        if name.startswith("/"):
            try:
                return await self._daemon.network.connect(name, timeout=PING_TIMEOUT)
            except NetworkError as error:
                raise Declined(f"{name} cannot be reached: {error}") from error
        connected = [view.peer for view in self._daemon.network.peers()]
        fitting = [p for p in connected if name and (p.startswith(name) or p.endswith(name))]
        if len(fitting) == 1:
            return fitting[0]
        if len(fitting) > 1:
            raise Declined(f"{name} fits {len(fitting)} connected peers; give more of the peer id (swarmnode peers)")
        if len(name) < 40:
            raise Declined(f"no connected peer is called {name or '(nothing)'}; swarmnode peers lists them")
        return name

    def logs(self, params: Mapping[str, Any]) -> AsyncIterator[Any]:
        return self._daemon.logs.stream(int(params.get("lines", 50)), bool(params.get("follow", False)))

    async def events(self, params: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        send, receive = trio.open_memory_channel[dict[str, Any]](EVENTS_WAITING)
        self._listeners.add(send)
        try:
            while True:
                yield await receive.receive()
        finally:
            self._listeners.discard(send)

    # --- asking the model -------------------------------------------------------------------------------------------

    async def sample(self, params: Mapping[str, Any]) -> dict[str, Any]:
        async with self._lent_trainer() as trainer:
            try:
                text = await trainer.sample(
                    str(params.get("prompt", "")).encode(),
                    length=int(params.get("length", 200)),
                    temperature=float(params.get("temperature", 0.8)),
                    seed=int(params.get("seed", 0)),
                )
            except ValueError as error:
                raise Declined(str(error)) from error
        return {"text": text.decode(errors="replace")}

    async def evaluate(self, params: Mapping[str, Any]) -> dict[str, Any]:
        async with self._lent_trainer() as trainer:
            loss = await trainer.evaluate(thorough=True)
        chosen = self._daemon.chosen
        by_rollouts = chosen is not None and not chosen.spec.needs_data
        return {"reward": 1.0 - loss} if by_rollouts else {"heldout_bits_per_byte": loss}

    @asynccontextmanager
    async def _lent_trainer(self) -> AsyncIterator[Trainer]:
        """The trainer, with the model that this node shows to others (`Method.lent`). Raises Declined."""
        trainer, session = self._daemon.trainer, self._daemon.session
        if trainer is None:
            raise Declined("this node has no trainer and so no model to ask; start it with --role train and a run")
        try:
            async with nullcontext(trainer) if session is None else session.method.lent() as lent:
                yield lent
        except TrainerDied as error:
            raise Declined(f"the trainer died and is being restarted ({error}); ask again in a moment") from error

    # --- steering ---------------------------------------------------------------------------------------------------

    async def pause(self, params: Mapping[str, Any]) -> dict[str, Any]:
        if self._daemon.session is None:
            raise Declined("this node trains nothing, so there is nothing to pause")
        if self._daemon.session.finished.is_set():
            raise Declined("this node has trained its last round and only serves others now; there is nothing to pause")
        await self._daemon.session.pause()
        return {}

    async def resume(self, params: Mapping[str, Any]) -> dict[str, Any]:
        if self._daemon.session is None:
            raise Declined("this node trains nothing, so there is nothing to resume")
        self._daemon.session.resume()
        return {}

    async def stop(self, params: Mapping[str, Any]) -> dict[str, Any]:
        self._daemon.stop()
        return {}

    async def leave(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Forget a run and delete what was kept of it. Leaving the present run stops the daemon."""
        present = self._daemon.chosen.run_id if self._daemon.chosen is not None else None
        run_id = params.get("run_id") or present
        known = self._daemon.store.known()
        if run_id is None or (run_id not in known and run_id != present):
            listed = ", ".join(r[:12] for r in known) or "none"
            raise Declined(f"this node does not know that run; known: {listed}", exit_code=RUN_UNAVAILABLE)
        folder = self._daemon.store.folder(run_id)
        if run_id == present:
            self._daemon.forgetting = True
            self._daemon.stop()
            await self._daemon.left.wait()
        await trio.to_thread.run_sync(lambda: shutil.rmtree(folder, ignore_errors=True))
        await trio.to_thread.run_sync(lambda: release_forgotten(self._daemon.store, self._daemon.shard_store))
        return {"run_id": run_id, "deleted": [str(folder)]}
