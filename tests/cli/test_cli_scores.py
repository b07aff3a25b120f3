"""`swarmnode scores` against a ledger: what a person sees of whom the node trusts, and why."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from typer.testing import CliRunner

from swarmnode.cli.scores import scores as command
from swarmnode.cli.terminal import group
from swarmnode.node.control.client import ControlError
from swarmnode.node.control.runs_api import RunsApi
from swarmnode.node.control.server import ControlServer, served
from swarmnode.node.storage.datadir import DataDir
from swarmnode.protocols.methods.known.method import Diloco
from swarmnode.protocols.methods.method import Method
from swarmnode.protocols.methods.rollouts.sapo import Sapo
from swarmnode.protocols.reputation.attestation import Attestation, Attested, Finding, Saw
from swarmnode.protocols.reputation.ledger import Ledger
from swarmnode.training.verify.replay import Audit, Verdict

ME, BOB, CAT, EVE, ZOE = ("12D3KooW" + letter * 44 for letter in "ABCEZ")
Ask = Callable[..., Any]


def seen() -> Ledger:
    ledger = Ledger(ME, now=lambda: 0)
    for epoch in range(6):
        for peer in (BOB, CAT):
            ledger.observe(peer, Saw.PROOF, good=8, evidence=b"\xab" * 32)
        ledger.observe(EVE, Saw.PROOF, bad=8)
        ledger.close(epoch)
    found = (b"\xc0" * 32, b"\x7a" * 32, b"\x5e" * 32, (7, 20, 10), b"\x01" * 32, b"\x02" * 32, 0.31, 0.02)
    ledger.audited(Audit(7, CAT, Verdict.LIED, "its steps lead elsewhere", *found), False)
    ledger.insert(Attested(BOB, b"\x01", 0, Attestation(4, ZOE, 900, 800, 30, (Finding(Saw.KEPT, 3, 1),))))
    return ledger


@pytest.fixture
def ask(tmp_path: Path, in_a_thread: Any) -> Iterator[Ask]:
    """Answers of `swarmnode scores`, as text, or read from JSON with --json."""
    daemon = SimpleNamespace(
        trust=SimpleNamespace(reputation=SimpleNamespace(ledger=seen())),
        session=SimpleNamespace(method=object.__new__(Sapo)),
    )

    async def start(nursery: trio.Nursery) -> None:
        server = ControlServer(DataDir(tmp_path).prepare_socket(), served(RunsApi(daemon)))  # type: ignore[arg-type]
        await nursery.start(server.run)

    app = group("")
    app.command()(command)

    def call(*arguments: str, method: type[Method] = Sapo) -> Any:
        daemon.session.method = object.__new__(method)
        result = CliRunner().invoke(app, [*arguments, "--data-dir", str(tmp_path)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return json.loads(result.output) if "--json" in arguments else result.output

    with in_a_thread(start):
        yield call


def test_where_nobody_judges_the_list_says_so(ask: Ask) -> None:
    assert "scores decide nothing" in ask(method=Diloco) and "decide" not in ask()
    assert ask("--json", method=Diloco)["judged"] is False


def test_the_list_shows_score_range_weight_and_who_is_contained(ask: Ask) -> None:
    lines = {line.split()[0]: line for line in ask().splitlines()[1:]}
    eve = next(line for name, line in lines.items() if name.endswith("E" * 6))
    bob = next(line for name, line in lines.items() if name.endswith("B" * 6))
    assert "contained" in eve and "0.00" in eve
    assert "6 of 6" in bob and "1.00" in bob


def test_why_shows_reasons_findings_and_words_with_their_voices(ask: Ask) -> None:
    text = ask(f"{ZOE[:8]}…{ZOE[-6:]}", "--why")  # as it is listed
    assert "no work of it was looked at here yet" in text
    assert "1 peer with verified work spoke for or against it" in text
    assert "kept 3/1" in text
    text = ask(BOB, "--why")
    assert "helped in 6" in text and "proof" in text and "abababab" in text


def test_as_json_everything_is_there_for_a_program(ask: Ask) -> None:
    answer = ask("--json", "--why")
    by_peer = {each["peer_id"]: each for each in answer["peers"]}
    assert by_peer[EVE]["contained"] and by_peer[EVE]["standing"] == 0.0
    assert by_peer[ZOE]["words"][0]["attester"] == BOB
    assert by_peer[BOB]["found"] == [{"saw": "proof", "good": 48, "bad": 0, "evidence": "ab" * 16}]
    assert "reasons" not in ask("--json")["peers"][0]


def test_a_peer_of_whom_nothing_is_known_is_told_so(ask: Ask) -> None:
    with pytest.raises(ControlError, match="nothing is known of a peer called nobody"):
        ask("nobody")


def test_why_shows_an_audit_with_what_is_needed_to_repeat_it(ask: Ask) -> None:
    (cat,) = ask(CAT, "--why", "--json")["peers"]
    (audit,) = cat["audits"]
    assert (audit["verdict"], audit["distance"], audit["tolerance"]) == ("does not hold up", 0.31, 0.02)
    assert audit["stretch"] == {"round": 7, "step": 20, "steps": 10}
    assert (audit["commit"], audit["seed"]) == ("c0" * 32, "5e" * 32)
    text = ask(CAT, "--why")
    assert "20 to 30 of round 7" in text and "3.1e-01" in text and "lead elsewhere" in text
