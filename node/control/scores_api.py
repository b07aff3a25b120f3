"""What a running daemon answers to `swarmnode scores …`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from swarmnode.node.control import Declined
from swarmnode.protocols.reputation.attestation import FULL, Finding, check, named
from swarmnode.protocols.reputation.ledger import Ledger
from swarmnode.protocols.reputation.view import PeerScore, Word, reasons
from swarmnode.training.verify.replay import Audit

if TYPE_CHECKING:
    from swarmnode.node.daemon import Daemon

LISTED = 1000  # peers in one answer at the most, those of most weight
WORDS = 64  # attestations of one peer in one answer, the loudest


class ScoresApi:
    """The control methods. Each raises Declined with a text for a person."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def methods(self) -> dict[str, Callable[[Mapping[str, Any]], Any]]:
        """By the names under which the control socket serves them."""
        return {"scores": self.scores}

    async def scores(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Everybody's score, or that of the one peer that is asked for; with the evidence where `why` is true."""
        ledger, name, why = self._ledger(), str(params.get("peer") or ""), bool(params.get("why", False))
        view = ledger.view()
        peers = [_one(name, view)] if name else sorted(view.values(), key=lambda one: (-one.weight, one.peer))
        return {
            "round": ledger.round,
            "more": len(peers) > LISTED,
            "peers": [{**_line(one, ledger), **(_evidence(one, ledger) if why else {})} for one in peers[:LISTED]],
        }

    def _ledger(self) -> Ledger:
        if self._daemon.watching is None:
            raise Declined("this node takes part in no run yet, so it has seen nobody's work")
        return self._daemon.watching.ledger


def _one(name: str, view: Mapping[str, PeerScore]) -> PeerScore:
    fitting = [peer for peer in view if peer.startswith(name) or peer.endswith(name)]
    if not fitting:
        raise Declined(f"nothing is known of a peer called {name}; swarmnode scores lists those of whom something is")
    if len(fitting) > 1:
        raise Declined(f"{name} fits {len(fitting)} peers; give more of the peer id (swarmnode scores)")
    return view[fitting[0]]


def _line(one: PeerScore, ledger: Ledger) -> dict[str, Any]:
    return {
        "peer_id": one.peer,
        "me": one.peer == ledger.me,
        "score": round(one.score, 4),
        "low": round(one.low, 4),
        "high": round(one.high, 4),
        "work": round(one.work, 4),
        "weight": round(one.weight, 4),
        "share": round(one.share, 4),
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
        said = word.said
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
        "reasons": list(reasons(one, unique=ledger.unique(one.peer))),
        "rating": {"mu": round(account.rating.mu, 3), "sigma": round(account.rating.sigma, 3)},
        "offences": round(account.offences, 3),
        "strikes": account.strikes,
        "found": [_plain(each) for each in ledger.found(one.peer)],
        "audits": [_audit(each) for each in reversed(ledger.audits(one.peer))],
        "words": [told(word) for word in one.words[:WORDS]],
    }


def _audit(audit: Audit) -> dict[str, Any]:
    """One audit with all that is needed to repeat it."""
    return {
        "round": audit.round,
        "verdict": audit.verdict.value,
        "why": audit.why,
        "commit": audit.commit.hex(),
        "trace": audit.trace.hex(),
        "seed": audit.seed.hex(),
        "stretch": dict(zip(("round", "step", "steps"), audit.stretch, strict=True)),
        "start": audit.start.hex(),
        "end": audit.end.hex(),
        "distance": audit.distance if math.isfinite(audit.distance) else None,
        "tolerance": audit.tolerance,
    }


def _plain(finding: Finding) -> dict[str, Any]:
    return {"saw": finding.saw.word, "good": finding.good, "bad": finding.bad, "evidence": finding.evidence.hex()}
