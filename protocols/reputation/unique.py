"""What tests of whether a peer works on its own data (`exchange.open_unique`) come to, this node's and others'.

    of_own_data([(7, 1, 1.0), (4, 0, 0.8), (3, 1, 0.9)])      # good, bad, voice -> 1.0
    of_own_data([(4, 4, 1.0), (2, 2, 0.8), (1, 3, 0.9)])      # LEAST: who brings text of its own may be honest

One test says little: who works on its data passes four of five, who does not every other. A node alone tests each of
sixteen peers once in a hundred short rounds, so it also takes the words of those with verified work, each for its voice
and for at most HEARD tests; and the median of them, which liars with less than half of the voices cannot turn.
"""

from __future__ import annotations

from collections.abc import Iterable

from swarmnode.protocols.reputation.opinions import weighted_median

ENOUGH = 12  # tests, of three voices at the least; before that nothing is taken
HEARD = 4  # of one voice
LATELY = 64  # of a peer's that a node remembers
LEAST = 0.5  # of the standing that is left to who passes by chance: some train honestly on text that nobody else has
BY_NONE, BY_ALL = 0.5, 0.65  # share passed by who does none of its work; from the other on nothing is taken


def of_own_data(tests: Iterable[tuple[int, int, float]]) -> float:
    """What share of its standing a peer keeps, from LEAST to all of it: where it works on its data, or little is known.

    `tests`: passed, failed, and the voice of who says so, 0 to 1.
    """
    told = [(good, good + bad, voice) for good, bad, voice in tests if good + bad and voice > 0]
    passed = weighted_median((good / count, voice * min(HEARD, count)) for good, count, voice in told)
    if passed is None or sum(min(HEARD, count) for _, count, _ in told) < ENOUGH:
        return 1.0
    shown = max(0.0, min(1.0, (passed - BY_NONE) / (BY_ALL - BY_NONE)))
    return LEAST + (1.0 - LEAST) * shown
