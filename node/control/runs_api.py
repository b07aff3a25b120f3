"""What a running daemon answers about its run: `swarmnode rollouts …`, `scores …`, `steer …` and `successor …`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from swarmnode.node.assembly import Node
from swarmnode.node.choice import wanted_by
from swarmnode.node.control import Declined, number_in
from swarmnode.node.control.peers_api import fitting, which_peer
from swarmnode.node.control.stores_api import absolute_path
from swarmnode.node.exitcodes import UsageMistake
from swarmnode.node.runfinder import kept_runs
from swarmnode.node.session import RunSession
from swarmnode.node.storage.history import HISTORY, figures
from swarmnode.node.succession import KEY, MAX_REASON, Succession, follow, keep_parent, read
from swarmnode.protocols.methods.rollouts.messages import SignedGroup
from swarmnode.protocols.methods.rollouts.sharing import Rollouts
from swarmnode.protocols.methods.steering import STEERABLE, value_of
from swarmnode.protocols.methods.trainer import TrainerDied
from swarmnode.protocols.reputation.attestation import FULL, Finding, check, named
from swarmnode.protocols.reputation.ledger import Ledger
from swarmnode.protocols.reputation.view import PeerScore, Word, reasons
from swarmnode.protocols.runner import in_thread
from swarmnode.protocols.wire import plain
from swarmnode.training.rl.groups import RefusedGroup
from swarmnode.training.runspec import RunSpec, load_runspec
from swarmnode.training.verify.replay import Audit

LISTED = 1000  # peers or groups in one answer at the most, those of most weight or the newest
WORDS = 64  # attestations of one peer in one answer, the loudest


class RunsApi:
    """The control methods about the run. Each raises Declined with a text for a person."""

    def __init__(self, node: Node) -> None:
        self._node = node

    # --- the run itself --------------------------------------------------------------------------------------------

    async def choices(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The runs that this node knows, for an owner who is to choose one, and what became of the last choice."""
        node = self._node
        kept = await in_thread(lambda: kept_runs(node.store, node.store.known()))
        return {"awaited": node.choice.awaited, "refused": node.choice.refused, "runs": kept}

    async def choose(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Begin, join or go on with a run, in a node that waits for its owner's word (`choice.wanted_by`)."""
        self._node.choice.make(wanted_by(params))
        return {}

    # --- scores ----------------------------------------------------------------------------------------------------

    async def scores(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Everybody's score, or that of the one peer that is asked for; with the evidence where `why` is true."""
        reputation, session = self._node.trust.reputation, self._node.session
        if reputation is None:
            raise Declined("this node is in no run, so it has seen nobody's work; swarmnode status says why")
        ledger, name, why = reputation.ledger, str(params.get("peer") or ""), bool(params.get("why", False))
        view = ledger.view()
        found = fitting(name, view, listed="swarmnode scores")
        if name and found is None:
            raise Declined(
                f"nothing is known of a peer called {name}; swarmnode scores lists those of whom something is"
            )
        peers = [view[found]] if found else sorted(view.values(), key=lambda one: (-one.weight, one.peer))
        return {
            "round": ledger.round,
            "judged": session is not None and session.method.judges,
            "more": len(peers) > LISTED,
            "peers": [{**_line(one, ledger), **(_evidence(one, ledger) if why else {})} for one in peers[:LISTED]],
        }

    # --- history ---------------------------------------------------------------------------------------------------

    async def history(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The run's rounds from `since` on, as this node saw them end (node/storage/history.py)."""
        since, chosen = number_in(params, "since", 0), self._node.chosen
        if chosen is None:
            raise Declined("this node is in no run, so there is no history; swarmnode history ID shows another's")
        path, spec = self._node.folder / HISTORY, chosen.spec
        rounds = await in_thread(lambda: figures(path, since))
        return {"run_id": chosen.run_id, "name": spec.run.name, "unit": spec.loss_unit, "rounds": rounds}

    # --- rollouts --------------------------------------------------------------------------------------------------

    async def rollouts_ls(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The groups that are here, own ones and others', the newest first."""
        _, rollouts = self._sharing()
        limit, author = max(1, min(number_in(params, "limit", 20), LISTED)), params.get("author")
        own = [(group, None) for group in rollouts.pool.own()]
        held = [*own, *((each.signed, each.used) for each in rollouts.pool)]
        wanted = rollouts.pool.me if author == "me" else author
        if author not in (None, "me"):
            wanted = which_peer(self._node.network, str(author), (group.author for group, _ in held), itself=True)
        chosen = [(group, used) for group, used in held if wanted in (None, group.author)]
        chosen.sort(key=lambda pair: pair[0].packed.made_at, reverse=True)
        listed = [{**_group(group), "used": used} for group, used in chosen[:limit]]
        return {"groups": listed, "more": len(chosen) > limit}

    async def rollouts_show(self, params: Mapping[str, Any]) -> dict[str, Any]:
        _, rollouts = self._sharing()
        wanted = str(params.get("id", ""))
        held = [*rollouts.pool.own(), *(held.signed for held in rollouts.pool)]
        found = [group for group in held if wanted and group.id.hex().startswith(wanted)]
        if not found:
            raise Declined(
                f"no rollout group here has an id that begins with {wanted!r}; swarmnode rollouts ls shows them"
            )
        if len(found) > 1:
            raise Declined(f"{len(found)} rollout groups here have ids that begin with {wanted!r}; give more digits")
        (signed,) = found
        try:
            told = await rollouts.told(signed)
        except RefusedGroup as refusal:
            raise Declined(f"the group cannot be read here: {refusal}") from refusal
        except TrainerDied as error:
            raise Declined(f"the trainer checks answers to this task, and is not there now: {error}") from error
        return {
            **_group(signed),
            "policy": signed.packed.policy,
            "vocabulary": signed.packed.vocabulary,
            **{name: told[name] for name in ("question", "key", "answers")},
        }

    async def rollouts_pool(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """What is held of whom, and what of each was refused."""
        _, rollouts = self._sharing()
        pool = rollouts.pool
        return {"pool": pool.stats(), "authors": [asdict(author) for author in pool.by_author()]}

    async def rollouts_stats(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """What sharing and learning came to since this node started."""
        session, rollouts = self._sharing()
        by_task = session.rewards_by_task.items()
        return {
            **rollouts.stats(),
            "samplers": [],
            **learning_of(session),
            "reward_by_task": {task: [[r, reward] for r, reward in course] for task, course in by_task},
            **session.method.status(),
        }

    def _sharing(self) -> tuple[RunSession, Rollouts]:
        session = self._node.session
        if session is None:
            raise Declined("this node is in no run; swarmnode run --task digits-rl begins one by rollouts")
        if session.method.rollouts is None:
            raise Declined(
                "the run of this node shares no rollouts; swarmnode run --task digits-rl begins one that does"
            )
        return session, session.method.rollouts

    # --- steering --------------------------------------------------------------------------------------------------

    async def steer(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The values that the run's owner changed; as the owner, change those in `set` first, null for the file's."""
        spec, _ = self._run()
        session, changes, since = self._node.session, params.get("set") or {}, params.get("from_round")
        if session is None or session.place is None:
            raise Declined("this node has not caught up with its run yet; swarmnode status says what it waits for")
        steering, first = session.method.steering, session.place.round + 1
        if steering is None:
            raise Declined(
                f"a run of method {session.method.name!r} keeps the values of its file: only known members (diloco, "
                "streaming, lowrank, demo, async, btard) agree before a round on what holds in it. Other values take a "
                "run of their own, which begins from this one's state: swarmnode successor publish"
            )
        if not isinstance(changes, dict) or (since is not None and (type(since) is not int or since < first)):
            raise UsageMistake(f"from_round: {since!r} is no round to come; the next is {first}")
        if changes:
            self._owned()
            await steering.say(changes, first + 1 if since is None else since)
        in_file = {key: value_of(spec, key) for key in STEERABLE}
        place = {"run_id": spec.run_id, "owner": spec.owner or None, "round": first - 1}
        return {**place, "file": in_file, **steering.told()}

    # --- successor -------------------------------------------------------------------------------------------------

    async def successor_show(self, params: Mapping[str, Any]) -> dict[str, Any]:
        spec, state = self._run()
        said = read(await state.get(spec.owner, KEY), spec) if spec.owner else None
        return {"run_id": spec.run_id, "owner": spec.owner or None, **_told(said)}

    async def successor_publish(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Publish the run in a file as the successor, from the state that this node stands on now."""
        spec, _ = self._owned()
        path, node = await absolute_path(params.get("path")), self._node
        session, trainer = node.session, node.trainer
        if session is None or trainer is None or session.place is None:
            raise Declined("this node has not caught up with its run yet, so there is no state to go on from")
        hash, saved = session.place.state_hash, session.method.saved()
        saved = replace(saved, residual=np.zeros_like(saved.residual))  # what is in no state yet may be changing now
        new = follow(await in_thread(lambda: load_runspec(path)), spec, state_hash=hash, me=node.network.me)
        await in_thread(lambda: keep_parent(node.store, new, trainer.layout, saved))
        return await self._say(new.run_id, saved.round, params)

    async def successor_end(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return await self._say("", self._node.rounds_done(), params)

    async def _say(self, run: str, round: int, params: Mapping[str, Any]) -> dict[str, Any]:
        what = Succession(run, round, str(params.get("reason") or "")[:MAX_REASON])
        spec, state = self._owned()
        await state.write(KEY, plain(what))
        return {"run_id": spec.run_id, "owner": spec.owner, **_told(what)}

    def _owned(self) -> tuple[RunSpec, Any]:
        spec, state = self._run()
        me = self._node.network.me
        if spec.owner != me:
            nobody = "it has no owner ([run] owner, or [trust] validators)"
            whose = f"its owner is {spec.owner}" if spec.owner else nobody
            raise Declined(f"only a run's owner can say how it goes on: {whose}, and this node is {me}")
        return spec, state

    def _run(self) -> tuple[RunSpec, Any]:
        chosen, state = self._node.chosen, self._node.state
        if chosen is None or state is None:
            raise Declined("this node is in no run; swarmnode status says why")
        return chosen.spec, state


def learning_of(session: RunSession | None) -> dict[str, Any]:
    """What the last round learned from and was sampled by, and the rewards of all of them."""
    last = session.last if session is not None else None
    return {
        "learned": asdict(last.learned) if last is not None and last.learned is not None else None,
        "sampled": asdict(last.sampled) if last is not None and last.sampled is not None else None,
        "reward_history": [[r, reward] for r, reward in session.rewards] if session is not None else [],
    }


def _line(one: PeerScore, ledger: Ledger) -> dict[str, Any]:
    return {
        "peer_id": one.peer,
        "me": one.peer == ledger.me,
        **{name: round(getattr(one, name), 4) for name in ("score", "low", "high", "work", "weight")},
        "standing": round(ledger.standing(one.peer), 4),
        "probation": one.probation,
        "contained": one.contained,
        "rounds": one.account.rounds,
        "helped": one.account.helped,
        "attesters": sum(word.counts for word in one.words),
    }


def _evidence(one: PeerScore, ledger: Ledger) -> dict[str, Any]:
    rounds = named(ledger.works())

    def told(word: Word) -> dict[str, Any]:
        said = word.attested
        return {
            "attester": said.attester,
            "voice": round(word.voice, 4),
            "score": said.what.score / FULL,
            "work": said.what.work / FULL,
            "rounds": said.what.rounds,
            "round": said.what.round,
            "at_ms": said.at,
            "record": said.id.hex(),
            "found": [{**_plain(each), "checked": check(said, each, rounds).value} for each in said.what.found],
        }

    account = one.account
    return {
        "reasons": list(reasons(one, unique=ledger.unique(one.peer), owed=ledger.owed(one.peer))),
        "rating": {"mu": round(account.rating.mu, 3), "sigma": round(account.rating.sigma, 3)},
        "offences": round(account.violations, 3),
        "strikes": account.strikes,
        "found": [_plain(each) for each in ledger.found(one.peer)],
        "audits": [_audit(each) for each in reversed(ledger.audits(one.peer))],
        "words": [told(word) for word in one.words[:WORDS]],
    }


def _audit(audit: Audit) -> dict[str, Any]:
    told = {name: value.hex() if isinstance(value, bytes) else value for name, value in vars(audit).items()}
    return told | {
        "verdict": audit.verdict.value,
        "stretch": dict(zip(("round", "step", "steps"), audit.stretch, strict=True)),
        "distance": audit.distance if math.isfinite(audit.distance) else None,
    }


def _plain(finding: Finding) -> dict[str, Any]:
    return {"saw": finding.saw.word, "good": finding.good, "bad": finding.bad, "evidence": finding.evidence.hex()}


def _group(signed: SignedGroup) -> dict[str, Any]:
    group = signed.group
    return {
        "id": signed.id.hex(),
        "author": signed.author,
        "task": group.task.name,
        "difficulty": group.task.difficulty,
        "seed": group.task.seed,
        "answers": len(group.answers),
        "version": group.version,
        "made_at_ms": signed.packed.made_at,
        "bytes": signed.size,
    }


def _told(said: Succession | None) -> dict[str, Any]:
    if said is None:
        return {"successor": None, "ended": False, "round": None, "reason": ""}
    return {"successor": said.run or None, "ended": not said.run, "round": said.round, "reason": said.reason}
