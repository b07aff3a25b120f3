"""What a node believes of its peers, by the scenarios of ATTACKS.md, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from reputationscenarios import ME, MISSED, SCENARIOS, settled
from reputationworld import Peer, honest

from swarmnode.protocols.reputation.attestation import FULL, Attestation, Attested, Finding, Saw
from swarmnode.protocols.reputation.view import HALF_LIFE, reasons, standings

NOISE = 0.3
SEEDS = {"on-off": 1, "sybils-idle": 1}


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in MISSED])
def test_reputation_holds_its_bound(name: str) -> None:
    for seed in range(SEEDS.get(name, 2)):
        outcome = SCENARIOS[name](seed, NOISE)
        assert outcome.passes, f"seed {seed}: {outcome.metric} {outcome.defended} is not {outcome.bound}"


MISSES = {"sybils-below-cap": 3.0, "sybils-above-cap": 2.0, "slander-of-one": 0.35}  # no worse than this today


@pytest.mark.parametrize("name", sorted(MISSED))
def test_what_is_known_to_be_missed_gets_no_worse(name: str) -> None:
    for seed in range(SEEDS.get(name, 2)):
        outcome = SCENARIOS[name](seed, NOISE)
        assert not outcome.passes and outcome.defended < min(MISSES[name], outcome.undefended)


UNDEFENDED = ("whitewash", "sybils-below-cap", "sybils-above-cap", "slander", "collusion-ring")


@pytest.mark.parametrize("name", UNDEFENDED)
def test_the_attack_is_real_where_nothing_is_defended(name: str) -> None:
    outcome = SCENARIOS[name](0, NOISE)
    assert outcome.undefended > outcome.limit


def said(attester: str, subject: str, score: int, *found: Finding, at: int = 0) -> Attested:
    return Attested(attester, attester.encode(), at, Attestation(40, subject, score, score, 30, found))


def test_the_reasons_tell_what_was_seen_and_who_attests() -> None:
    world = settled(1, NOISE, honest(5) | {"eve": Peer(gain=-1.0, judge=False)})
    view = world.view(ME, [said("honest01", "zoe", 900), said("nobody", "zoe", 0), said("honest02", "zoe", 900)])
    assert "helped in 40" in reasons(view["honest01"])[0]
    assert any("contained" in why for why in reasons(view["eve"]))
    assert any("2 peers with verified work spoke" in why for why in reasons(view["zoe"]))
    assert any("1 attestation not heard" in why for why in reasons(view["zoe"]))
    assert view["zoe"].score == pytest.approx(0.9)


def test_who_tells_of_kept_promises_without_having_looked_at_any_work_lowers_nobodys_score() -> None:
    world = settled(1, NOISE, honest(5))
    truth = said("honest01", "zoe", 900)
    found = (Finding(Saw.KEPT, 3, 0),)
    kept = [Attested(f"honest0{n}", b"", 0, Attestation(40, "zoe", 0, 0, 0, found)) for n in (2, 3)]
    alone, beside = world.view(ME, [truth])["zoe"], world.view(ME, [truth, *kept])["zoe"]
    assert (beside.score, beside.work, beside.probation) == (alone.score, alone.work, False)
    assert any("1 peer with verified work spoke" in why for why in reasons(beside)) and not beside.unheard
    broken = [Attested(one.attester, b"", 0, replace(one.what, found=(Finding(Saw.KEPT, 0, 3),))) for one in kept]
    assert world.view(ME, [truth, *broken])["zoe"].score < alone.score


def test_words_fade_with_time() -> None:
    world = settled(1, NOISE, honest(5))
    words = [said(f"honest0{n}", "zoe", 900) for n in (1, 2)]
    fresh = standings(world.accounts[ME], words, me=ME, round=40, now=0)
    old = standings(world.accounts[ME], words, me=ME, round=40, now=4 * HALF_LIFE)
    assert fresh["zoe"].score == pytest.approx(0.9)
    assert old["zoe"].score == 0.0


def test_who_attests_against_its_own_evidence_is_not_heard_any_more() -> None:
    world = settled(1, NOISE, honest(5))
    roster = world.works[ME][-1].roster[:16]
    truth = [said(f"honest0{n}", "zoe", 900) for n in (1, 2, 3)]
    lie = said("honest04", "honest03", 0, Finding(Saw.FORM, 0, 9, roster))
    view = world.view(ME, [*truth, said("honest04", "zoe", 0), lie])
    assert [word.voice > 0 for word in view["zoe"].words] == [True, True, True, False]
    assert view["zoe"].words[-1].attested.attester == "honest04"


def test_an_equivocator_is_not_heard() -> None:
    world = settled(1, NOISE, honest(5))
    words = [said("honest01", "zoe", FULL), said("honest02", "zoe", FULL)]
    view = standings(world.accounts[ME], words, me=ME, round=40, liars=frozenset({"honest01", "honest02"}))
    assert view["zoe"].score == 0.0 and view["zoe"].probation
