"""What the records of an open round prove, from records as a round makes them."""

from __future__ import annotations

from chains import RULES, after_rounds, fair, lead, offer, start

from swarmnode.protocols.chain.state import ChainState
from swarmnode.protocols.reputation.account import (
    Judged,
    RoundWork,
    after_roster,
    at_joining,
    proved,
    relative_gains,
    score,
    work,
)

JUDGES = ("ann", "bob", "cat", "dan", "eli", "fay", "gus")


def round_of(chain: ChainState, gains: dict[str, int], **lies: dict[str, int]) -> RoundWork:
    """A round in which judges measure these gains by author, but for those whose lies by author are given."""
    offers = [offer(chain, author, gain=gain) for author, gain in gains.items()]

    def said(judge: str, one: object) -> int:
        return lies.get(judge, {}).get(one.commit.author, one.gain)  # type: ignore[attr-defined]

    quoted = fair(chain, offers, gains=said)
    roster = lead(chain, RULES, quoted)
    return proved(chain, roster.id, roster.what, quoted)


def test_a_roster_proves_what_its_judges_measured_of_everybody_but_themselves() -> None:
    work = round_of(start(JUDGES), {"ann": 1000, "zoe": -400})
    by_author = {one.author: one for one in work.works}
    assert by_author["ann"].gains == dict.fromkeys(JUDGES[1:], 1000)
    assert by_author["zoe"].gains == dict.fromkeys(JUDGES, -400)
    assert (by_author["ann"].validator, by_author["zoe"].validator) == (True, False)


def test_gains_are_relative_to_the_median_of_what_helped() -> None:
    work = round_of(start(JUDGES), {"ann": 1000, "bob": 1000, "cat": 500, "zoe": -250})
    assert relative_gains(work, {}) == {"ann": 1.0, "bob": 1.0, "cat": 0.5, "zoe": -0.25}


def test_a_round_in_which_nothing_helped_tells_nothing_of_anybody() -> None:
    assert relative_gains(round_of(start(JUDGES), {"ann": -1000, "zoe": -250}), {}) == {}


def test_two_of_seven_judges_who_lie_turn_nobodys_gain() -> None:
    honest = dict.fromkeys(("ann", "bob", "cat", "zoe"), 1000)
    lies = {judge: dict.fromkeys(honest, -9000) for judge in ("dan", "eli")}
    assert relative_gains(round_of(start(JUDGES), honest, **lies), {})["zoe"] == 1.0


def test_a_judges_voice_follows_its_own_verified_work() -> None:
    work = RoundWork(9, bytes(32), (Judged("zoe", 0, True, {"ann": 1000, "bob": -800, "cat": -900}),))
    others = (Judged("ann", 0, True, {"bob": 1000, "cat": 1000, "dan": 1000}),)
    everybody = RoundWork(9, bytes(32), work.works + others)
    assert relative_gains(everybody, {})["zoe"] < 0
    assert relative_gains(everybody, {"ann": 1.0, "dan": 1.0})["zoe"] > 0


def test_what_lies_within_the_judges_noise_is_no_work() -> None:
    wide = {f"j{n}": gain for n, gain in enumerate((-900, -500, -100, 120, 500, 900))}
    clear = {f"j{n}": 1000 + 10 * n for n in range(6)}
    work = RoundWork(
        9,
        bytes(32),
        (Judged("idle", 0, False, wide), *(Judged(f"p{n}", 0, True, clear) for n in range(2))),
    )
    noisy = RoundWork(9, bytes(32), tuple(Judged(f"n{n}", 0, True, wide) for n in range(3)))
    assert relative_gains(work, {})["idle"] == 0.0 or abs(relative_gains(work, {})["idle"]) < 0.02
    assert relative_gains(noisy, {}) == {}


def test_malformed_and_double_contributions_are_offences_and_lateness_is_none() -> None:
    gains = {"ann": 1000}
    works = tuple(Judged(author, verdict, False, {}) for author, verdict in (("eve", 2), ("max", 4), ("tim", 10)))
    after = after_roster({}, RoundWork(3, bytes(32), (*works, Judged("bob", 0, True, gains))))
    assert after["eve"].violations == 1.0
    assert after["max"].violations == 2.0
    assert "tim" not in after


def test_who_comes_to_a_chain_knows_from_its_state_who_did_accepted_work() -> None:
    chain = after_rounds(start(JUDGES), RULES, 5, ("ann", "bob", "cat", "zoe"))
    chain = after_rounds(chain, RULES, 15, ("ann", "cat", "zoe"))
    accounts = at_joining(chain)
    assert set(accounts) == {"ann", "bob", "cat", "zoe"}
    assert score(accounts["zoe"]) == 1.0
    assert work(accounts["bob"], chain.round) < 0.7 * work(accounts["ann"], chain.round)
