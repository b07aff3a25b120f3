"""What quoted cuts and scores make of a round: it depends on what is quoted alone, and liars move it within bounds."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
from chains import RULES, WINDOW, Offer, cut, fair, hashed, offer, quote, row, scores, start
from hypothesis import assume, given
from hypothesis import strategies as st

from swarmnode.protocols.chain.rules import (
    LEAST_UNITS,
    PROBATION,
    PROBATION_SMALL,
    REVERT_EVERY,
    UNITS,
    Derived,
    NotHeld,
    Quoted,
    derive,
    listed_commits,
)
from swarmnode.protocols.chain.state import MILLION, ChainState, Worked, quorum
from swarmnode.protocols.chain.statements import (
    ACCEPTED,
    FULL_STANDING,
    JUDGED,
    MALFORMED,
    MAX_COMMITS,
    MAX_GAIN,
    MISSING,
    ONE,
    Entry,
    Refusal,
    Score,
)
from swarmnode.training.open_step import CLIP_AT

STRANGERS = "STUVWXYZ"


@dataclass(frozen=True)
class Scene:
    """A round with its offers, and the quotes that a leader chose."""

    chain: ChainState
    offers: tuple[Offer, ...]
    quoted: Quoted

    def author_of(self, entry: Entry) -> str:
        return self.quoted.commits[entry.commit].author


@st.composite
def scenes(draw: st.DrawFn, validators: int | None = None, alike: bool = True) -> Scene:
    """Whatever judges may say of whatever authors offered, and any of it quoted that is enough.

    `alike`: some may reveal the same bytes.
    """
    n = validators if validators is not None else draw(st.integers(1, 7))
    judges = "ABCDEFG"[:n]
    chain = start(judges)
    authors = draw(st.lists(st.sampled_from(judges + STRANGERS), unique=True, max_size=8))
    offers = tuple(
        offer(
            chain,
            author,
            root=hashed(draw(st.integers(0, 9))) if alike else None,
            norm=draw(st.sampled_from([0.5, 1.0, 3.0, 1e9])),
        )
        for author in authors
    )
    quoting = draw(st.lists(st.sampled_from(judges), unique=True, min_size=quorum(chain)))
    ids = [one.id for one in offers]
    cuts, scored = [], []
    for judge in quoting:
        cuts.append(cut(chain, judge, draw(st.sets(st.sampled_from(ids))) if ids else (), window=draw(windows)))
        rows = []
        for id in ids:
            found = draw(st.sampled_from([JUDGED, JUDGED, JUDGED, MISSING, MALFORMED]))
            gain = draw(gains) if found == JUDGED else 0
            standing = draw(st.sampled_from([0, 1, 500, FULL_STANDING]))
            rows.append(row(id, gain, found=found, standing=standing))
        scored.append(scores(chain, judge, rows, undo=draw(st.none() | gains)))
    return Scene(chain, offers, quote(cuts, scored, offers))


gains = st.sampled_from([-1000, 0, 1, 7, 1000, 1001, 100_000, 1 << 40])
windows = st.sampled_from([0, WINDOW // 4, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])


@given(scenes(), st.randoms(use_true_random=False))
def test_the_order_in_which_things_were_heard_does_not_matter(scene: Scene, rng: random.Random) -> None:
    def shuffled(things: Any) -> Any:
        again = list(things.items() if isinstance(things, dict) else things)
        rng.shuffle(again)
        return type(things)(again)

    quoted = scene.quoted
    other = Quoted(
        shuffled(quoted.cuts),
        shuffled(quoted.scores),
        shuffled(dict(quoted.commits)),
        shuffled(dict(quoted.reveals)),
        shuffled(dict(quoted.norms)),
    )
    assert derive(scene.chain, RULES, other) == derive(scene.chain, RULES, quoted)


@given(scenes())
def test_what_is_held_beside_the_quoted_does_not_matter(scene: Scene) -> None:
    """A commit that no quoted cut lists, and a contribution that is not accepted, may be here or not."""
    derived = derive(scene.chain, RULES, scene.quoted)
    listed = {entry.commit for entry in derived.entries}
    accepted = {entry.commit for entry in derived.entries if entry.verdict in (ACCEPTED, Refusal.DUPLICATE)}
    spare = Quoted(
        scene.quoted.cuts,
        scene.quoted.scores,
        {id: one for id, one in scene.quoted.commits.items() if id in listed},
        {id: one for id, one in scene.quoted.reveals.items() if id in accepted},
        {id: one for id, one in scene.quoted.norms.items() if id in accepted},
    )
    assert derive(scene.chain, RULES, spare) == derived


@given(scenes())
def test_every_commit_that_enough_cuts_list_is_answered_once(scene: Scene) -> None:
    derived = derive(scene.chain, RULES, scene.quoted)
    cuts = scene.quoted.cuts
    enough = {one.id for one in scene.offers if 3 * sum(one.id in c.what.commits for c in cuts) > len(cuts)}
    assert [entry.commit for entry in derived.entries] == sorted(enough)
    for entry in derived.entries:
        assert entry.verdict == ACCEPTED or entry.weight == entry.clip == 0


@given(scenes())
def test_strangers_together_hold_at_most_their_share(scene: Scene) -> None:
    derived = derive(scene.chain, RULES, scene.quoted)
    strangers = sum(one.weight for one in derived.entries if scene.author_of(one) not in scene.chain.validators)
    share = PROBATION_SMALL if len(scene.chain.validators) < 4 else PROBATION
    assert strangers * MILLION <= derived.total * share
    assert sum(one.weight for one in derived.entries) <= derived.total


@given(scenes())
def test_validators_whose_work_is_not_seen_to_harm_weigh_alike_and_others_a_tenth_at_least(scene: Scene) -> None:
    full = [
        replace(said, what=replace(said.what, scores=tuple(replace(one, standing=1000) for one in said.what.scores)))
        for said in scene.quoted.scores
    ]
    derived = derive(scene.chain, RULES, replace(scene.quoted, scores=tuple(full)))
    weights = {
        scene.author_of(entry): entry.weight
        for entry in derived.entries
        if entry.verdict == ACCEPTED and scene.author_of(entry) in scene.chain.validators
    }
    units = {one.author: one.units for one in derived.worked if one.author in weights}
    full = {weights[author] for author in units if units[author] == UNITS}
    assert len(full) <= 1 and all(weight <= most for weight in weights.values() for most in full)
    assert all(10 * weight >= other for weight in weights.values() for other in weights.values())


@given(scenes(validators=5, alike=False), st.integers(0, 3))
def test_many_strangers_move_neither_the_weights_nor_the_clipping_of_validators(scene: Scene, keep: int) -> None:
    """Whoever makes identities gains no say in what the median gain or norm is, while a validator's work counts."""
    derived = derive(scene.chain, RULES, scene.quoted)
    if not any(work.author in scene.chain.validators for work in derived.worked):
        return
    gone = [one.id for one in scene.offers if one.commit.author not in scene.chain.validators][keep:]
    cuts = [
        cut(scene.chain, said.author, set(said.what.commits).difference(gone), window=said.what.window)
        for said in scene.quoted.cuts
    ]
    fewer = derive(scene.chain, RULES, replace(scene.quoted, cuts=tuple(cuts)))

    def of_validators(what: Derived) -> list[Entry]:
        return [entry for entry in what.entries if scene.author_of(entry) in scene.chain.validators]

    assert of_validators(derived) == of_validators(fewer)


@given(scenes(), st.data())
def test_a_judge_s_word_about_its_own_contribution_has_no_effect(scene: Scene, data: st.DataObject) -> None:
    assume(len(scene.chain.validators) > 1)
    own = {one.commit.author: one.id for one in scene.offers}
    said_other = []
    for said in scene.quoted.scores:
        rows = [one for one in said.what.scores if own.get(said.author, b"")[:16] != one.commit]
        if said.author in own and data.draw(st.booleans()):
            rows.append(row(own[said.author], data.draw(gains), standing=data.draw(st.sampled_from([0, 1000]))))
        said_other.append(scores(scene.chain, said.author, rows, undo=said.what.undo))
    other = derive(scene.chain, RULES, replace(scene.quoted, scores=tuple(said_other)))
    derived = derive(scene.chain, RULES, scene.quoted)
    accepted = [entry for entry in derived.entries if entry.verdict == ACCEPTED]
    assert [entry for entry in other.entries if entry.verdict == ACCEPTED] == accepted
    assert (other.total, other.revert, other.worked) == (derived.total, derived.revert, derived.worked)


@given(scenes(), st.data())
def test_a_minority_of_liars_undoes_nothing_and_moves_no_window_beyond_honest_proposals(
    scene: Scene, data: st.DataObject
) -> None:
    """Whichever quorum a lying leader quotes."""
    validators = scene.chain.validators
    liars = data.draw(st.sets(st.sampled_from(validators), max_size=(len(validators) - 1) // 2))
    derived = derive(replace(scene.chain, undoable=True), RULES, scene.quoted)
    if derived.revert:
        assert any(
            (said.what.undo or 0) > RULES.revert_above for said in scene.quoted.scores if said.author not in liars
        )
    proposals = [WINDOW, *(said.what.window for said in scene.quoted.cuts if said.author not in liars)]
    assert min(proposals) // 2 <= derived.window <= 2 * max(proposals)
    assert max(WINDOW // 2, min(proposals)) <= derived.window <= min(2 * WINDOW, max(proposals))


@given(st.integers(4, 9), st.data())
def test_where_honest_judges_agree_a_minority_of_liars_changes_nothing(n: int, data: st.DataObject) -> None:
    chain = start("ABCDEFGHI"[:n])
    liars = data.draw(st.sets(st.sampled_from(chain.validators), max_size=(n - 2) // 2))
    offers = [offer(chain, author, gain=data.draw(gains)) for author in chain.validators + tuple(STRANGERS)]
    words = st.sampled_from([(JUDGED, MAX_GAIN), (JUDGED, -MAX_GAIN), (JUDGED, 3), (MISSING, 0), (MALFORMED, 0)])

    def rows(judge: str) -> list[Score]:
        if judge not in liars:
            return [row(one.id, one.gain) for one in offers]
        said = [(one, *data.draw(words), data.draw(st.sampled_from([0, 1000]))) for one in offers]
        return [row(one.id, gain, found=found, standing=standing) for one, found, gain, standing in said]

    cuts = [cut(chain, judge, [one.id for one in offers]) for judge in chain.validators]
    with_liars = quote(cuts, [scores(chain, judge, rows(judge)) for judge in chain.validators], offers)
    found, honest = derive(chain, RULES, with_liars), derive(chain, RULES, fair(chain, offers))
    assert (found.entries, found.total) == (honest.entries, honest.total)


# --- what is harm, and what is noise ---------------------------------------------------------------------------------


def units_by_author(chain: ChainState, measured: Mapping[str, Callable[[int], int]]) -> dict[str, int]:
    """Work of each author, 0 where it is refused; `measured[author](i)` is what the i-th judge finds of it."""
    offers = {author: offer(chain, author) for author in measured}
    quoted = quote(
        [cut(chain, judge, [one.id for one in offers.values()]) for judge in chain.validators],
        [
            scores(chain, judge, [row(one.id, measured[author](place)) for author, one in offers.items()])
            for place, judge in enumerate(chain.validators)
        ],
        offers.values(),
    )
    return dict.fromkeys(measured, 0) | {one.author: one.units for one in derive(chain, RULES, quoted).worked}


def around(middle: int, place: int, *, spread: int = 1000) -> int:
    """What the judge of this place measures: medians are `middle`, and half of the judges are `spread` off or less."""
    return middle + spread * (place % 5 - 2)


SIXTEEN = "ABCDEFGHIJKLMNOP"


def test_nothing_is_refused_or_weighs_less_that_differs_by_noise_alone() -> None:
    """Every other contribution does a little harm, less than what the error of a median of sixteen explains."""
    chain = start(SIXTEEN)
    measured = {author: partial(around, 300 if place % 2 else -300) for place, author in enumerate(SIXTEEN)}
    assert set(units_by_author(chain, measured).values()) == {UNITS}


def test_likely_harm_weighs_less_and_certain_harm_of_an_outlier_is_refused() -> None:
    chain = start(SIXTEEN)
    good = {author: partial(around, 2000) for author in SIXTEEN}
    weights = [units_by_author(chain, good | {"P": partial(around, -harm)})["P"] for harm in (0, 800, 1200, 100_000)]
    assert weights[0] == UNITS and UNITS > weights[1] > weights[2] >= LEAST_UNITS and weights[3] == 0


def test_the_only_one_that_does_harm_is_refused_however_far_apart_those_that_help_are() -> None:
    """As five daemons measured a flipped sign, of members who had taken steps for longer and shorter times."""
    helping = {
        "A": (24_000, 29_000, 37_000, 12_000, 19_000),
        "B": (100_000, 75_000, 88_000, 83_000, 85_000),
        "C": (200_000, 167_000, 170_000, 163_000, 187_000),
        "D": (258_000, 226_000, 217_000, 241_000, 231_000),
    }
    harming = (-165_000, -137_000, -151_000, -156_000, -147_000)

    def found(**more: tuple[int, ...]) -> dict[str, int]:
        return units_by_author(
            start("ABCDE"), {author: values.__getitem__ for author, values in (helping | more).items()}
        )

    assert found(E=harming) == {**dict.fromkeys("ABCD", UNITS), "E": 0}
    of_two = found(A=harming, E=harming)  # where others do harm as well, it is told by how far all lie apart
    assert of_two["A"] == of_two["E"] == LEAST_UNITS


def test_harm_that_all_do_alike_is_not_refused() -> None:
    """At the bottom a step too long harms whosever it is; then a tenth of each is as good as the whole of each."""
    chain = start(SIXTEEN)
    found = units_by_author(
        chain, {author: partial(around, -100_000 - 10 * place) for place, author in enumerate(SIXTEEN)}
    )
    assert set(found.values()) == {LEAST_UNITS}


@given(st.lists(st.tuples(st.sampled_from("ABCDE" + STRANGERS), st.floats(1e-30, 1e30)), unique_by=lambda one: one[0]))
def test_clipped_norms_are_at_most_a_quarter_above_the_median(
    norms: list[tuple[str, float]],
) -> None:
    chain = start("ABCDE")
    offers = [offer(chain, author, norm=norm) for author, norm in norms]
    derived = derive(chain, RULES, fair(chain, offers))
    among = sorted(norm for author, norm in norms if author in "ABCDE") or sorted(norm for _, norm in norms)
    by_id = {one.id: one.norm for one in offers}
    assert len(derived.entries) == len(norms)
    for entry in derived.entries:
        most, norm = Fraction(CLIP_AT * among[(len(among) - 1) // 2]), Fraction(by_id[entry.commit])
        clipped = norm * entry.clip / ONE
        assert clipped <= most or entry.clip == 0
        assert entry.clip == ONE or most - norm / ONE < clipped


# --- what becomes of a commit ----------------------------------------------------------------------------------------


def verdict_of(derived: Derived, one: Offer) -> int:
    return next(entry.verdict for entry in derived.entries if entry.commit == one.id)


def judged_by(chain: ChainState, one: Offer, rows: list[Score | None]) -> int:
    """The verdict where judge i gives rows[i], or opens no scores where that is None, and all cuts list the commit."""
    cuts = [cut(chain, judge, [one.id]) for judge in chain.validators]
    scored = [scores(chain, judge, [given]) for judge, given in zip(chain.validators, rows, strict=True) if given]
    return verdict_of(derive(chain, RULES, quote(cuts, scored, [one])), one)


def test_a_contribution_is_refused_with_what_most_judges_found() -> None:
    chain = start("ABCDE")
    one = offer(chain, "X")
    good, bad, none = row(one.id, 5), row(one.id, 0, found=MALFORMED), row(one.id, 0, found=MISSING)
    worse, unknown = row(one.id, -5), row(one.id, 5, standing=0)
    assert judged_by(chain, one, [good, good, good, none, none]) == ACCEPTED
    assert judged_by(chain, one, [good, good, none, none, bad]) == Refusal.MISSING
    assert judged_by(chain, one, [good, good, bad, none, bad]) == Refusal.MALFORMED
    assert judged_by(chain, one, [good, good, worse, worse, worse]) == Refusal.HARMFUL
    assert judged_by(chain, one, [good, good, unknown, unknown, unknown]) == Refusal.NO_STANDING


def test_what_too_few_judges_retrieved_is_missing_whatever_they_say_of_it() -> None:
    chain = start("ABCDE")
    one = offer(chain, "X")
    good = row(one.id, 5)
    assert judged_by(chain, one, [good, good, None, None, None]) == Refusal.MISSING
    assert judged_by(chain, one, [good, good, good, None, None]) == ACCEPTED


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_a_judge_s_word_for_its_own_contribution_counts_only_where_it_is_the_one_judge(n: int) -> None:
    chain = start("ABCDEF"[:n])
    one = offer(chain, "A")
    assert judged_by(chain, one, [row(one.id, 1 << 40)] + [row(one.id, -5)] * (n - 1)) == Refusal.HARMFUL
    assert judged_by(chain, one, [row(one.id, -(1 << 40))] + [row(one.id, 5)] * (n - 1)) == ACCEPTED
    alone = start("A")
    one = offer(alone, "A")
    assert judged_by(alone, one, [row(one.id, -5)]) == Refusal.HARMFUL


def test_who_commits_twice_is_refused_for_both() -> None:
    chain = start("ABC")
    one, other, honest = offer(chain, "X"), offer(chain, "X", salt=bytes([1] * 16)), offer(chain, "Y")
    derived = derive(chain, RULES, fair(chain, [one, other, honest]))
    assert verdict_of(derived, one) == verdict_of(derived, other) == Refusal.EQUIVOCATED
    assert verdict_of(derived, honest) == ACCEPTED


def test_of_two_who_reveal_the_same_the_one_in_most_cuts_counts_however_ids_were_ground() -> None:
    """A copier sees what to copy when a majority has cut; then it can find a lower id, and not more cuts."""
    chain = start("ABCDE")
    victim = offer(chain, "X", root=hashed("same"))
    copies = [offer(chain, "Y", root=hashed("same"), salt=bytes([i] * 16)) for i in range(32)]
    copy = min(copies, key=lambda one: one.id)
    assert copy.id < victim.id
    cuts = [cut(chain, judge, [victim.id, *([copy.id] if judge in "CDE" else [])]) for judge in chain.validators]
    scored = [scores(chain, judge, [row(victim.id, 9), row(copy.id, 9)]) for judge in chain.validators]
    derived = derive(chain, RULES, quote(cuts, scored, [victim, copy]))
    assert verdict_of(derived, victim) == ACCEPTED
    assert verdict_of(derived, copy) == Refusal.DUPLICATE


def test_a_copy_that_liars_cut_late_never_takes_the_place_of_its_victim() -> None:
    """Five liars of sixteen judges, one of whom leads and quotes all their cuts with as few honest ones as it may."""
    chain = start("ABCDEFGHIJKLMNOP")
    victim, copy = (offer(chain, author, root=hashed("same")) for author in "XY")
    liars, honest = chain.validators[:5], chain.validators[5:9]
    cuts = [*(cut(chain, judge, [copy.id]) for judge in liars), *(cut(chain, judge, [victim.id]) for judge in honest)]
    scored = [scores(chain, judge, [row(victim.id, 9), row(copy.id, 9)]) for judge in (*liars, *honest)]
    derived = derive(chain, RULES, quote(cuts, scored, [victim, copy]))
    assert verdict_of(derived, copy) == Refusal.LATE, "one honest judge at least cut before anything was revealed"


def test_a_commit_to_another_round_or_history_does_not_count() -> None:
    chain = start("ABC")
    old, elsewhere = replace(chain, round=5), replace(chain, tip=hashed("other"))
    for one in (offer(old, "X"), offer(elsewhere, "X")):
        derived = derive(chain, RULES, fair(chain, [one]))
        assert verdict_of(derived, one) == Refusal.FOREIGN


def test_who_was_not_drawn_is_refused_and_validators_are_always_drawn() -> None:
    chain = replace(start("ABC"), participation=1)
    one, validator = offer(chain, "X"), offer(chain, "A")
    derived = derive(chain, RULES, fair(chain, [one, validator]))
    assert verdict_of(derived, one) == Refusal.UNINVITED
    assert verdict_of(derived, validator) == ACCEPTED


def test_a_roster_that_did_harm_is_undone_and_nothing_added() -> None:
    chain = replace(start("ABC"), undoable=True)
    one = offer(chain, "X")
    derived = derive(chain, RULES, fair(chain, [one], undo=RULES.revert_above + 1))
    assert derived.revert and verdict_of(derived, one) == Refusal.REVERTED and derived.total == 0
    assert not derive(chain, RULES, fair(chain, [one], undo=RULES.revert_above)).revert


@pytest.mark.parametrize("since", range(1, 2 * REVERT_EVERY))
def test_rounds_are_undone_at_most_once_in_revert_every(since: int) -> None:
    chain = replace(start("ABC"), undoable=True, round=100, reverted=100 - since)
    derived = derive(chain, RULES, fair(chain, [], undo=1 << 30))
    assert derived.revert == (since >= REVERT_EVERY)


def test_what_moved_nothing_is_not_undone() -> None:
    """So a revert is never undone itself, nor an empty round."""
    derived = derive(start("ABC"), RULES, fair(start("ABC"), [], undo=1 << 30))
    assert not derived.revert


def test_a_roster_lists_no_more_than_it_has_room_for_and_those_in_most_cuts() -> None:
    chain = start("ABC")
    many = [offer(chain, "X", salt=i.to_bytes(16, "big")) for i in range(MAX_COMMITS + 40)]
    ids = [one.id for one in many]
    cuts = [cut(chain, "A", ids[:MAX_COMMITS]), cut(chain, "B", ids[40:]), cut(chain, "C", ids[40:])]
    listed = listed_commits(cuts)
    assert len(listed) == MAX_COMMITS and set(listed) == set(ids[40:])


def test_work_is_counted_before_standing_and_probation() -> None:
    chain = start("ABCDE")
    offers = [offer(chain, "A", gain=1000), offer(chain, "X", gain=1), offer(chain, "Y", gain=5000)]
    quoted = fair(chain, offers)
    low = [
        replace(said, what=replace(said.what, scores=tuple(replace(one, standing=10) for one in said.what.scores)))
        for said in quoted.scores
    ]
    derived = derive(chain, RULES, replace(quoted, scores=tuple(low)))
    assert derived.worked == (Worked("A", UNITS), Worked("X", UNITS), Worked("Y", UNITS))


@pytest.mark.parametrize("lacking", ["commits", "reveals", "norms", "opening"])
def test_what_cannot_be_told_is_not_guessed(lacking: str) -> None:
    chain = start("ABC")
    one = offer(chain, "X")
    quoted = fair(chain, [one])
    if lacking == "opening":
        without = replace(quoted, reveals={one.id: replace(one.reveal, root=hashed("other"))})
    else:
        without = replace(quoted, **{lacking: {}})
    with pytest.raises(NotHeld) as raised:
        derive(chain, RULES, without)
    assert raised.value.commit == one.id


def test_after_long_silence_of_all_others_one_judge_goes_on_alone() -> None:
    chain = replace(start("AB"), empties=3)
    one = offer(chain, "A")
    derived = derive(chain, RULES, fair(chain, [one], silent="B"))
    assert verdict_of(derived, one) == ACCEPTED
