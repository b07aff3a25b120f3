"""What a node's ledger makes of what it is told, over forks, epochs and restarts."""

from __future__ import annotations

import json

import pytest
from chains import RULES, after_rounds, start

from swarmnode.protocols.chain.statements import FULL_STANDING
from swarmnode.protocols.peers.scoring import Kind
from swarmnode.protocols.reputation.account import MAX_PEERS, NEWCOMER, Judged, RoundWork
from swarmnode.protocols.reputation.attestation import Attestation, Attested, Finding, Saw
from swarmnode.protocols.reputation.ledger import (
    LEAST_ROSTER_STANDING,
    MAX_ATTESTATIONS,
    NEWCOMER_STANDING,
    NEWS,
    OWED,
    Ledger,
)
from swarmnode.protocols.reputation.view import reasons
from swarmnode.training.verify.replay import Audit, Verdict

ME = "ann"
JUDGES = ("ann", "bob", "cat", "dan", "eli")


def ledger() -> Ledger:
    return Ledger(ME, now=lambda: 0)


def id_of(name: object) -> bytes:
    return repr(name).encode().ljust(32, b"\0")


def work(round: int, gains: dict[str, int], roster: bytes = b"") -> RoundWork:
    works = tuple(
        Judged(author, 0 if gain > 0 else 3, True, dict.fromkeys(set(JUDGES) - {author}, gain))
        for author, gain in sorted(gains.items())
    )
    return RoundWork(round, roster or id_of(round), works)


def on_chain(rounds: int, gains: dict[str, int], mine: Ledger | None = None) -> Ledger:
    mine, chain = mine or ledger(), start(JUDGES)
    mine.begin(chain)
    parent = chain.tip
    for round in range(rounds):
        mine.follow(id_of(round), parent, work(round, gains), round=round + 1)
        parent = id_of(round)
    return mine


def test_accounts_follow_the_fork_on_which_the_node_stands() -> None:
    mine = on_chain(5, {"bob": 1000, "cat": 1000})
    mine.follow(id_of("here"), id_of(4), work(5, {"bob": 1000, "cat": -1000}, id_of("here")), round=6)
    assert mine.view()["cat"].account.strikes == 1
    mine.go_to(id_of(4))
    mine.follow(id_of("there"), id_of(4), work(5, {"bob": 1000, "cat": 1000}, id_of("there")), round=6)
    assert mine.view()["cat"].account.strikes == 0
    assert mine.view()["cat"].account.rounds == 6
    mine.go_to(id_of("here"))
    assert mine.view()["cat"].account.strikes == 1


def test_who_joins_begins_with_the_work_that_the_chain_remembers() -> None:
    mine = ledger()
    mine.begin(after_rounds(start(JUDGES), RULES, 12, ("bob", "zoe")))
    assert mine.view()["zoe"].score == 1.0 and not mine.view()["zoe"].probation


def test_a_chain_that_is_begun_again_does_not_wipe_out_what_was_seen() -> None:
    mine = on_chain(6, {"bob": 1000, "eve": -1000})
    mine.begin(start(JUDGES))
    assert mine.view()["eve"].contained


def test_an_empty_roster_changes_nobodys_account() -> None:
    mine = on_chain(6, {"bob": 1000})
    before = mine.accounts()
    mine.follow(id_of("empty"), id_of(5), None, round=7)
    assert mine.accounts() == before and mine.round == 7


def test_a_judge_says_full_standing_of_newcomers_and_little_of_who_goes_on_doing_harm() -> None:
    mine = on_chain(2, {"bob": 1000, "eve": -1000})
    assert mine.roster_standing("eve") == mine.roster_standing("stranger") == FULL_STANDING
    mine = on_chain(4, {"bob": 1000, "eve": -1000})
    assert mine.roster_standing("eve") == LEAST_ROSTER_STANDING
    assert mine.roster_standing("bob") == FULL_STANDING


def test_who_only_harms_the_held_out_loss_loses_weight_and_is_not_cut_off() -> None:
    mine = on_chain(12, {"bob": 1000, "cat": 1000, "odd": -1000})
    assert mine.view()["odd"].weight == 0.0
    assert mine.to_contain() == ()


def test_what_a_judge_says_in_scores_follows_from_the_chain_alone() -> None:
    mine, other = on_chain(6, {"bob": 1000, "cat": 900}), on_chain(6, {"bob": 1000, "cat": 900})
    mine.observe("bob", Saw.PROOF, bad=50)
    mine.offended("bob", Kind.LIE)
    mine.close()
    mine.insert(Attested("cat", b"", 0, Attestation(3, "bob", 0, 0, 100)))
    assert mine.roster_standing("bob") == other.roster_standing("bob") == FULL_STANDING
    assert mine.view()["bob"].score < other.view()["bob"].score


def test_rollouts_that_hold_up_earn_and_those_that_do_not_contain() -> None:
    mine = ledger()
    for epoch in range(5):
        mine.observe("bob", Saw.PROOF, good=8, bad=0, evidence=b"group" * 8)
        mine.observe("eve", Saw.PROOF, good=4, bad=4)
        mine.close(epoch)
    assert mine.standing("bob") > 0.9
    assert mine.standing("eve") == 0.0
    assert mine.to_contain() == ("eve",)
    assert mine.standing("stranger") == NEWCOMER_STANDING


def test_ten_authors_who_share_one_authors_rollouts_weigh_as_much_as_it() -> None:
    mine = ledger()
    names = [f"eve{n}" for n in range(10)]
    for epoch in range(12):
        for peer in ("bob", "cat", "dan"):
            mine.observe(peer, Saw.PROOF, good=20)
        for name in names:
            mine.observe(name, Saw.PROOF, good=2)
        mine.close(epoch)
    assert sum(mine.view()[name].weight for name in names) <= 1.05 * mine.view()["bob"].weight


def test_while_nobodys_work_was_verified_everybody_has_all_of_its_share() -> None:
    mine = ledger()
    assert mine.standing("bob") == 1.0
    mine.offended("eve", Kind.BREACH)
    mine.close(0)
    assert mine.standing("bob") == 1.0


def test_overload_is_no_offence_here_and_breaches_lower_a_score() -> None:
    mine = ledger()
    for epoch in range(6):
        mine.observe("bob", Saw.PROOF, good=8)
        mine.close(epoch)
    before = mine.view()["bob"].score
    mine.offended("bob", Kind.LOAD)
    mine.close(6)
    assert mine.view()["bob"].score == before
    mine.offended("bob", Kind.LIE)
    mine.close(7)
    assert mine.view()["bob"].score < 0.7 * before


def test_what_is_attested_is_what_was_seen_here_and_only_what_is_news() -> None:
    mine = on_chain(6, {"bob": 1000, "eve": -1000})
    mine.insert(Attested("bob", b"", 0, Attestation(3, "zoe", 1000, 1000, 100)))
    said = {one.subject: one for one in mine.to_attest(members=5)}
    assert set(said) == {"bob", "eve"}
    assert said["bob"].found[0] == Finding(Saw.GAIN, 6, 0, id_of(5)[:16])
    assert (said["eve"].score, said["eve"].found[0].bad) == (0, 6)
    for one in said.values():
        mine.published(one)
    assert mine.to_attest(members=5) == ()
    mine.follow(id_of(6), id_of(5), work(6, {"bob": 1000}), round=7)
    assert [one.subject for one in mine.to_attest(members=5)] == ["bob"]


def test_kept_promises_move_neither_score_nor_standing() -> None:
    mine, other = ledger(), ledger()
    for epoch in range(5):
        for each in (mine, other):
            each.observe("bob", Saw.PROOF, good=8)
            each.observe("eve", Saw.PROOF, good=1, bad=2)
        for peer in ("bob", "eve", "dan"):
            mine.observe(peer, Saw.KEPT, good=1000)
        mine.close(epoch)
        other.close(epoch)
    assert mine.accounts() == other.accounts() | {"dan": NEWCOMER}
    assert mine.view()["dan"].weight == 0.0
    assert all(mine.standing(peer) == other.standing(peer) for peer in ("bob", "eve", "dan"))


def test_in_a_large_swarm_each_node_attests_little() -> None:
    mine = ledger()
    for number in range(40):
        mine.observe(f"peer{number:02}", Saw.KEPT, good=1)
    mine.close(0)
    assert len(mine.to_attest(members=4)) == 16
    assert len(mine.to_attest(members=NEWS)) == len(mine.to_attest(members=100 * NEWS)) == 1


def test_words_of_many_authors_do_not_fill_the_memory() -> None:
    mine = ledger()
    for number in range(MAX_ATTESTATIONS + 10):
        mine.insert(Attested(f"a{number}", b"", 0, Attestation(0, "bob", 0, 0, 0)))
        assert len(mine._attestations) <= MAX_ATTESTATIONS
    assert ("a0", "bob") not in mine._attestations, "the oldest of equals go"


def test_strangers_push_out_no_word_of_who_has_verified_work_however_many_they_are() -> None:
    mine = trusted()
    mine.insert(Attested("bob", b"", 0, Attestation(3, "zoe", 1000, 1000, 100)))
    for number in range(MAX_ATTESTATIONS + 10):
        mine.insert(Attested(f"a{number}", b"", 0, Attestation(0, "zoe", 0, 0, 0)))
    assert len(mine._attestations) <= MAX_ATTESTATIONS
    assert mine.view()["zoe"].score > 0


def test_who_has_verified_work_and_says_much_pushes_out_its_own_words() -> None:
    mine = trusted()
    mine.insert(Attested("cat", b"", 0, Attestation(3, "zoe", 1000, 1000, 100)))
    for number in range(MAX_ATTESTATIONS + 10):
        mine.insert(Attested("bob", b"", 0, Attestation(0, f"s{number}", 0, 0, 0)))
        assert len(mine._attestations) <= MAX_ATTESTATIONS
    assert ("cat", "zoe") in mine._attestations


def test_subjects_that_were_attested_do_not_fill_the_memory() -> None:
    mine = ledger()
    for number in range(MAX_PEERS + 10):
        mine.published(Attestation(1, f"peer {number}", 0, 0, 0))
    assert len(mine._attested) == MAX_PEERS


def test_what_is_known_survives_a_restart() -> None:
    mine = on_chain(6, {"bob": 1000, "eve": -1000})
    mine.observe("dan", Saw.PROOF, good=4)
    mine.close()
    kept = json.loads(json.dumps(mine.export()))
    again = ledger()
    again.restore(kept)
    assert again.export() == kept, "killed before it stands on a chain, it keeps what it knew"
    assert again.accounts() == mine.accounts()
    assert again.roster_standing("eve") == mine.roster_standing("eve") < again.roster_standing("bob")
    again.begin(start(JUDGES))
    assert again.accounts() == mine.accounts()


def test_rounds_that_counted_before_a_restart_do_not_count_again() -> None:
    mine = on_chain(6, {"bob": 1000})
    for _ in range(2):  # restarts, the second before it stood on the chain again
        again = ledger()
        again.restore(json.loads(json.dumps(mine.export())))
        again.close(7)
        mine = again
    on_chain(7, {"bob": 1000}, again)
    assert again.view()["bob"].account.rounds == 7


@pytest.mark.parametrize("kept", [{}, {"version": 2}, [], {"version": 1, "round": 9, "chain": {"a": {}}, "seen": {}}])
def test_a_ledger_refuses_what_it_did_not_export(kept: object) -> None:
    mine = ledger()
    with pytest.raises(ValueError, match=r"reputation|version"):
        mine.restore(kept)  # type: ignore[arg-type]
    assert mine.round == ledger().round


@pytest.mark.parametrize("first", ["word", "roster"])
def test_a_lie_is_found_out_whichever_comes_first_the_word_or_the_roster_that_it_names(first: str) -> None:
    mine = on_chain(6, {"bob": 1000, "cat": 1000})
    lie = Attestation(9, "cat", 0, 0, 30, (Finding(Saw.FORM, 0, 9, id_of(6)[:16]),))
    steps = [
        lambda: mine.insert(Attested("bob", b"", 0, lie)),
        lambda: mine.follow(id_of(6), id_of(5), work(6, {"bob": 1000, "cat": 1000}), round=7),
    ]
    for step in steps if first == "word" else reversed(steps):
        mine.insert(Attested("bob", b"", 0, Attestation(8, "zoe", 1000, 1000, 30)))
        step()
    assert [word.voice for word in mine.view()["zoe"].words] == [0.0]


# --- audits ---------------------------------------------------------------------------------------------------------


def audited(mine: Ledger, peer: str, verdict: Verdict, *, broken: bool = False) -> None:
    mine.audited(Audit(1, peer, verdict, "", b"c" * 32), broken)


def trusted() -> Ledger:
    """A ledger in which bob and cat did full work for twelve rounds."""
    mine = on_chain(12, {"bob": 1000, "cat": 1000})
    assert mine.roster_standing("bob") == FULL_STANDING
    assert mine.view()["bob"].weight > 0.8
    return mine


@pytest.mark.parametrize("lie", [(Verdict.LIED, False), (Verdict.NOT_SHOWN, True)], ids=["lied", "shows nothing"])
def test_one_lie_costs_all_weight_and_credit_whatever_was_earned_before(lie: tuple[Verdict, bool]) -> None:
    mine = trusted()
    audited(mine, "bob", lie[0], broken=lie[1])
    assert mine.roster_standing("bob") == 0
    view = mine.view()
    assert mine.standing("bob") == 0.0
    assert view["bob"].weight == 0.0
    assert mine.to_contain() == ()  # it loses weight, and no connection
    assert any("lied about its work" in why for why in reasons(view["bob"], owed=mine.owed("bob")))
    assert mine.roster_standing("cat") == FULL_STANDING
    assert view["cat"].weight > 0.8


def test_nothing_shown_within_the_allowance_costs_nothing() -> None:
    mine = trusted()
    audited(mine, "bob", Verdict.NOT_SHOWN)
    assert mine.roster_standing("bob") == FULL_STANDING


def test_a_liars_word_is_not_heard() -> None:
    mine = trusted()
    mine.insert(Attested("bob", b"", 0, Attestation(3, "zoe", 1000, 1000, 100)))
    assert mine.view()["zoe"].score > 0
    audited(mine, "bob", Verdict.LIED)
    assert mine.view()["zoe"].score == 0


def test_a_liar_counts_again_after_as_many_audits_as_a_newcomer_needs_and_not_one_earlier() -> None:
    mine = trusted()
    audited(mine, "bob", Verdict.LIED)
    for passed in range(OWED):
        assert (mine.owed("bob"), mine.roster_standing("bob")) == (OWED - passed, 0)
        audited(mine, "bob", Verdict.NOT_SHOWN)  # showing nothing repays nothing
        audited(mine, "bob", Verdict.HELD)
    assert mine.roster_standing("bob") == FULL_STANDING
    audited(mine, "bob", Verdict.HELD)
    audited(mine, "bob", Verdict.LIED)
    assert mine.owed("bob") == OWED  # nothing is saved up


def test_who_lied_is_not_forgotten_over_peers_that_offend() -> None:
    mine = trusted()
    audited(mine, "bob", Verdict.LIED)
    for number in range(MAX_PEERS + 10):
        mine.offended(f"stranger {number}", Kind.BREACH)
    assert (mine.owed("bob"), mine.roster_standing("bob")) == (OWED, 0)


def test_a_restart_forgives_no_lie() -> None:
    mine, after = trusted(), ledger()
    audited(mine, "bob", Verdict.LIED)
    audited(mine, "zoe", Verdict.LIED)
    after.restore(json.loads(json.dumps(mine.export())))
    assert [after.roster_standing(peer) for peer in ("bob", "zoe", "cat")] == [0, 0, FULL_STANDING]
