"""What a running daemon answers to its owner: methods, each of the request's params, that return JSON.

Here stand those about the node itself (`swarmnode status` and the others), and what its owner should know now
(`warnings_of`). What concerns other nodes is in `peers_api.py`, its run in `runs_api.py`, what it stores in
`stores_api.py`. They read the parts of the node and change nothing but what the owner asks for. The shapes of results
are documented in docs/cli.md.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import trio

from swarmnode import __version__
from swarmnode.node.assembly import Node
from swarmnode.node.config import caps_told
from swarmnode.node.control import Declined, done_but, number_in
from swarmnode.node.control.peers_api import PeersApi, which_peer
from swarmnode.node.control.runs_api import RunsApi, learning_of
from swarmnode.node.control.server import ControlServer, served
from swarmnode.node.control.stores_api import StoresApi
from swarmnode.node.exitcodes import RUN_UNAVAILABLE, UsageMistake
from swarmnode.node.identity import named
from swarmnode.node.logs import levels, set_level
from swarmnode.node.nat.netcheck import report, trace
from swarmnode.node.process import AS_ROOT, runs_as_root
from swarmnode.node.runfinder import SEARCH, look
from swarmnode.node.session import OWNERS, RunSession
from swarmnode.node.storage.cutting import release_forgotten
from swarmnode.node.storage.datadir import explaining, write_atomic
from swarmnode.node.trainer.child import exposed
from swarmnode.node.trainer.supervisor import TrainerProcess
from swarmnode.protocols.methods.trainer import Trainer, TrainerDied
from swarmnode.protocols.metrics import GAUGE, Metric
from swarmnode.protocols.network import Traffic
from swarmnode.protocols.runner import in_thread
from swarmnode.training.options import number_of
from swarmnode.training.rl.section import hf_model

RATE_OVER = 5.0  # seconds between the samples from which traffic rates are computed
STALLED_FOR, STALLED_TIMES = 300.0, 10.0  # s without a result, and usual rounds, until a node is told to be stuck

# Causes of a run's warnings that keep nobody from work.
NOTICES = ("cut off", "roster", "share")
WARNINGS = Metric("swarmnode_warnings", GAUGE, "warnings in status; problems make health say degraded", "kind")


class Api:
    """The control methods about one node. `run` answers these and those of the others, and samples traffic."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._started = trio.current_time()
        self._samples: deque[tuple[float, Traffic]] = deque(maxlen=4)
        self._most_in = self._most_out = 0.0  # bytes/s, over RATE_OVER

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Answer on the node's control socket until cancelled."""
        self._node.metrics.show(WARNINGS, self._warnings)
        methods = served(self, PeersApi(self._node), StoresApi(self._node), RunsApi(self._node))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._sample_traffic)
            await nursery.start(ControlServer(self._node.socket, methods).run)
            task_status.started()

    def _warnings(self) -> dict[str, float]:
        problems, all_of_them = len(problems_of(self._node)), len(warnings_of(self._node))
        return {"problem": problems, "notice": all_of_them - problems}

    async def _sample_traffic(self) -> None:
        while True:
            self._samples.append((trio.current_time(), self._node.network.traffic()))
            (before, then), (now, total) = self._samples[max(-2, -len(self._samples))], self._samples[-1]
            if now > before:
                self._most_in = max(self._most_in, (total.bytes_in - then.bytes_in) / (now - before))
                self._most_out = max(self._most_out, (total.bytes_out - then.bytes_out) / (now - before))
            await trio.sleep(RATE_OVER)

    # --- looking ----------------------------------------------------------------------------------------------------

    async def status(self, params: Mapping[str, Any]) -> dict[str, Any]:
        node = self._node
        views = node.network.peers()
        relayed = sum(view.path == "relayed" for view in views)
        off = node.state.clocks.off if node.state is not None else None  # ms
        return {
            "version": __version__,
            "peer_id": node.network.me,
            "name": named(node.agent)[1],
            "uptime_s": round(trio.current_time() - self._started, 1),
            "role": node.config.role,
            "ready": node.ready,
            "addresses": list(node.network.addresses),
            "join": node.join_line(),
            "data_dir": str(node.config.directory),
            "dashboard": node.dashboard or None,
            "choosing": node.choice.awaited,
            "doing": node.doing() or None,
            "paused": node.session is not None and node.session.paused and node.session.phase != "stopping",
            "holds": _holds(node.session),
            "reachability": node.nat.how_reached,
            "clock_off_s": None if off is None else off / 1000,  # the peers' median is ahead by these
            "run": self._run_status(),
            "peers": {"connected": len(views), "direct": len(views) - relayed, "relayed": relayed},
            "traffic": self._traffic(),
            "trainer": self._trainer_status(),
            "problems": problems_of(node),
            "warnings": warnings_of(node),
        }

    def _run_status(self) -> dict[str, Any] | None:
        node = self._node
        session, chosen = node.session, node.chosen
        if chosen is None:
            return None
        place = node.place()
        last = session.last if session is not None else None
        usual = session.usual_seconds if session is not None else None
        speed = session.tokens_per_second if session is not None else None
        share = session.compute_share if session is not None else None
        outcome = session.outcome if session is not None else None
        phase = session.phase if session is not None else "waiting"
        goes_on = session is not None and not session.paused and phase not in ("finished", "stopping")
        steering = session.method.steering if session is not None else None
        spec = steering.stage.spec if steering is not None else chosen.spec
        return {
            "run_id": chosen.run_id,
            "name": chosen.spec.run.name,
            "round": place.round if place is not None else None,
            "rounds": node.options.rounds,
            "phase": phase,
            "arriving": list(session.arriving) if session is not None and session.arriving is not None else None,
            "members": len(place.members) if place is not None else 0,
            "parameters": node.parameters(),
            "codec": spec.exchange.codec if spec.needs_data else "rollouts",
            "steering": steering.told() if steering is not None else None,
            "apart": session.method.status().get("apart") if session is not None else None,
            "population": session.method.status().get("population") if session is not None else None,
            "data": node.data.status() if node.data is not None else None,
            "loss": session.losses[-1][1] if session is not None and session.losses else None,
            "loss_unit": chosen.spec.loss_unit,
            "loss_history": [[r, loss] for r, loss in session.losses] if session is not None else [],
            **learning_of(session),
            "reward_by_chance": spec.rollouts.difficulty**-2
            if not spec.needs_data and spec.rollouts.task == "digits"
            else None,
            "tokens_per_second": round(speed, 1) if speed is not None else None,
            "compute_share": round(share, 4) if share is not None else None,
            "state_hash": place.state_hash if place is not None else None,
            "roster": (place.roster or None) if place is not None else None,
            "outcome": outcome,
            "missing": list(last.missing) if last is not None and outcome == "Partial" else [],
            "round_age_s": round(age, 1) if session is not None and (age := session.round_age) is not None else None,
            "round_seconds": round(last.seconds, 2) if last is not None else None,
            "next_round_s": round(max(0.0, usual - place.elapsed), 1) if goes_on and usual and place else None,
        }

    def _trainer_status(self) -> dict[str, Any] | None:
        trainer = self._node.trainer
        if trainer is None:
            return None
        config, spec = self._node.config, self._node.chosen.spec if self._node.chosen is not None else None
        many = spec is not None and (spec.needs_data or hf_model(config.policy or spec.rollouts.policy) is not None)
        threads = config.threads or (os.cpu_count() if many else 1)  # as the trainer does
        return {
            "pid": trainer.pid,
            "device": trainer.device,
            "ranks": trainer.ranks,
            "threads": threads,
            "restarts": trainer.restarts,
            "sandbox": trainer.sandbox,
            "sampling": trainer.sampling,
        }

    def _traffic(self) -> dict[str, float]:
        now, total = trio.current_time(), self._node.network.traffic()
        then, before = self._samples[0] if self._samples else (now, total)
        seconds = max(now - then, 1e-9)
        return {
            "bytes_in": total.bytes_in,
            "bytes_out": total.bytes_out,
            "rate_in": round((total.bytes_in - before.bytes_in) / seconds, 1),
            "rate_out": round((total.bytes_out - before.bytes_out) / seconds, 1),
        }

    async def discover(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return await look(self._node, str(params.get("wanted") or ""), number_in(params, "within", SEARCH) or SEARCH)

    async def netcheck(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """How this node is reached; or, with `peer`, how it reaches that one."""
        if name := params.get("peer"):
            network, peer = self._node.network, which_peer(self._node.network, str(name))
            network.learn(peer, (str(name),) if str(name).startswith("/") else ())
            return await trace(network, self._node.nat, peer)
        node, traffic = self._node, self._traffic()
        clocks = node.state.clocks if node.state is not None else None
        rates = {
            "in": traffic["rate_in"],
            "out": traffic["rate_out"],
            "most_in": round(self._most_in, 1),
            "most_out": round(self._most_out, 1),
        }
        return report(node.network, node.nat, rates, "" if clocks is None else clocks.complaint or clocks.doubt)

    async def metrics(self, params: Mapping[str, Any]) -> dict[str, Any]:
        metrics = self._node.metrics
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

    def logs(self, params: Mapping[str, Any]) -> AsyncIterator[Any]:
        return self._node.logs.stream(number_in(params, "lines", 50), bool(params.get("follow", False)))

    async def log_level(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The levels of the log in force; where `level` is named, `part` has it from now on."""
        part, level = str(params.get("part") or ""), str(params.get("level") or "")
        try:
            if level:
                set_level(part, level)
            return {"levels": levels("" if level else part)}
        except ValueError as error:
            raise UsageMistake(str(error)) from error

    def events(self, params: Mapping[str, Any]) -> AsyncIterator[Any]:
        return self._node.events.stream(0, follow=True)

    # --- asking the model -------------------------------------------------------------------------------------------

    async def sample(self, params: Mapping[str, Any]) -> dict[str, Any]:
        async with self._lent_trainer() as trainer:
            try:
                text = await trainer.sample(
                    str(params.get("prompt", "")).encode(),
                    length=number_in(params, "length", 200),
                    temperature=number_in(params, "temperature", 0.8),
                    seed=number_in(params, "seed", 0),
                )
            except ValueError as error:
                raise Declined(str(error)) from error
        return {"text": text.decode(errors="replace")}

    async def evaluate(self, params: Mapping[str, Any]) -> dict[str, Any]:
        async with self._lent_trainer() as trainer:
            loss = await trainer.evaluate(thorough=True)
        chosen = self._node.chosen
        by_rollouts = chosen is not None and not chosen.spec.needs_data
        return {"reward": 1.0 - loss} if by_rollouts else {"heldout_bits_per_byte": loss}

    @asynccontextmanager
    async def _lent_trainer(self) -> AsyncIterator[Trainer]:
        """The trainer, with the model that this node shows to others (`Method.lent`). Raises Declined."""
        trainer, session = self._node.trainer, self._node.session
        if trainer is None:
            raise Declined("this node has no trainer and so no model to ask; start it with --role train and a run")
        try:
            async with nullcontext(trainer) if session is None else session.method.lent() as lent:
                yield lent
        except TrainerDied as error:
            raise Declined(f"there is no trainer to ask now: {error}; ask again in a moment") from error

    # --- steering ---------------------------------------------------------------------------------------------------

    async def pause(self, params: Mapping[str, Any]) -> dict[str, Any]:
        node = self._node
        if node.chosen is None:
            raise Declined("this node trains nothing, so there is nothing to pause")
        if node.session is not None and node.session.finished.is_set():
            raise Declined("this node has trained its last round and only serves others now; there is nothing to pause")
        with done_but("paused, but not for long: a restart ends it, and a node that is starting does not know of it"):
            async with node.writing:
                if node.session is not None:
                    await node.session.pause()
                await in_thread(lambda: write_atomic(node.pause_mark, b""))
                if node.session is not None:  # it may have begun meanwhile; one that begins later finds the mark
                    await node.session.pause()
        return {}

    async def resume(self, params: Mapping[str, Any]) -> dict[str, Any]:
        node = self._node
        if node.chosen is None:
            raise Declined("this node trains nothing, so there is nothing to resume")
        async with node.writing:
            was_paused = node.pause_mark.exists() or (node.session is not None and node.session.paused)
            if node.session is not None:
                node.session.resume()
            with done_but("going on, but the next start is paused again"), explaining(node.pause_mark):
                await in_thread(lambda: node.pause_mark.unlink(missing_ok=True))
        return {"was_paused": was_paused, "holds": _holds(node.session)}

    async def caps(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """What the node may take of its machine, and when; `params` are changed first, by the keys of the settings."""
        node = self._node
        if params:
            with done_but("changed, but only until this node is started again, as it cannot be written down"):
                await node.change_caps(params)
        return {"caps": caps_told(node.config), "holds": _holds(node.session), "disk_used": node.guest.used}

    async def stop(self, params: Mapping[str, Any]) -> dict[str, Any]:
        self._node.stopping.set()
        return {}

    async def leave(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Forget a run and delete what was kept of it. Leaving the present run stops the node."""
        present = self._node.chosen.run_id if self._node.chosen is not None else None
        run_id = params.get("run_id") or present
        known = self._node.store.known()
        if run_id is None or (run_id not in known and run_id != present):
            listed = ", ".join(r[:12] for r in known) or "none"
            raise Declined(f"this node does not know that run; known: {listed}", exit_code=RUN_UNAVAILABLE)
        folder = self._node.store.folder(run_id)
        if run_id == present:
            self._node.forgetting = True
            self._node.stopping.set()
            await self._node.left.wait()
        with trio.CancelScope(shield=True):  # the node ends meanwhile
            await trio.to_thread.run_sync(lambda: shutil.rmtree(folder, ignore_errors=True))
            await trio.to_thread.run_sync(lambda: release_forgotten(self._node.store, self._node.shard_store))
        return {"run_id": run_id, "deleted": [str(folder)]}


# --- what the owner should know --------------------------------------------------------------------------------------


def warnings_of(node: Node) -> list[str]:
    """All of it, a sentence each: first what keeps the node from its work."""
    told = problems_of(node) + _of_run(node, notices=True)
    told += [node.state.clocks.doubt] if node.state is not None and node.state.clocks.doubt else []
    if node.trainer is not None:
        sampling = node.trainer.sampling
        told += [sampling["why"]] if sampling is not None and sampling["why"] else []
        sandbox = node.trainer.sandbox
        lacking = [f"{missing['part']} ({missing['why']})" for missing in sandbox["missing"]] if sandbox else []
        told += [f"the trainer's sandbox is not whole; it lacks: {'; '.join(lacking)}"] if lacking else []
        within = exposed(node.trainer.rules, node.config.directory)
        if within:
            told.append(f"the trainer may read {within}, which contains this node's key; name a smaller folder")
    told += [AS_ROOT] if runs_as_root() else []
    # Peers that are treated worse than others: their owners may have something to mend, or be strangers.
    worse = Counter(standing.word for _, standing in node.network.scoring.below_good())
    counted = ", ".join(f"{count} {word}" for word, count in sorted(worse.items()))
    return told + ([f"peers that broke rules or ask too much: {counted} (swarmnode peers)"] if counted else [])


def problems_of(node: Node) -> list[str]:
    """What keeps the node from its work, what concerns the run first."""
    told = _of_run(node, notices=False)
    told += [node.defects.warning] if node.defects.warning else []
    told += [node.state.warning] if node.state is not None and node.state.warning else []
    told += [node.successors.warning] if node.successors is not None and node.successors.warning else []
    # Why this node does not write to the state; told once where that keeps it from its lease as well.
    complaint = node.state.clocks.complaint if node.state is not None else ""
    lease = node.membership.complaint if node.membership is not None else ""
    told += [complaint] if complaint else []
    told += [f"this node cannot renew its lease: {lease}"] if lease and lease != complaint else []
    told += _of_standstill(node.session, node.trainer)
    told += node.answering.problems()
    if not node.network.peers():
        told += [f"{why} (join address {address})" for address, why in node.discovery.join_failures.items()]
    return told


def _holds(session: RunSession | None) -> list[dict[str, Any]]:
    """Why training is paused, the owner's own reason first."""
    holds = session.holds.values() if session is not None else ()
    return [asdict(hold) for hold in sorted(holds, key=lambda hold: hold.cause != OWNERS.cause)]


def _of_run(node: Node, *, notices: bool) -> list[str]:
    of_session = node.session.warnings if node.session is not None else {}
    of_data = node.data.warnings if node.data is not None else {}
    return [text for cause, text in (of_session | of_data).items() if (cause in NOTICES) == notices]


def _of_standstill(session: RunSession | None, trainer: TrainerProcess | None) -> list[str]:
    if session is None or session.paused or session.finished.is_set():
        return []
    told = []
    if trainer is not None and trainer.ended:
        times = number_of(trainer.restarts, "time")
        told.append(f"the trainer ended ({trainer.ended}), {times} so far, and is started again")
    if stands_still(session):
        told.append(
            f"no round has brought a result for {(session.idle_for or 0) / 60:.0f} min, and one usually takes "
            f"{session.usual_seconds:,.1f} s: swarmnode peers shows whom this node could wait for, swarmnode logs what "
            "it tries"
        )
    return told


def stands_still(session: RunSession) -> bool:
    """Whether a result is overdue by far, in a session that is to bring some."""
    idle, usual = session.idle_for, session.usual_seconds
    if session.paused or session.finished.is_set() or idle is None or usual is None:
        return False
    return idle > max(STALLED_FOR, STALLED_TIMES * usual)
