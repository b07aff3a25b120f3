"""From weights to shares of a whole: caps for everybody, probation for who was not verified.

    shares({"ann": 1.0, "bob": 0.5}, newcomers=["eve", "mallory"])

The same rules as in a roster (DESIGN.md, "Electorate"), for what a node decides alone: whom it serves first, whose
rollouts it takes. Newcomers hold at most PROBATION together, however many they are; where nobody is verified yet, they
hold everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

PROBATION = 0.125  # of the whole, for all who were not verified together
CAP = 2.0  # times the fair share that one peer may hold …
LEAST_CAP = 0.25  # … but this share of the whole is always permitted


def shares(weights: Mapping[str, float], newcomers: Sequence[str] = ()) -> dict[str, float]:
    """Shares that sum to 1, or to less where caps leave something over; nobody has one where nobody is there.

    `weights` are those of verified peers, 0 or more. A newcomer gets no more than the median verified peer.
    """
    solid = {peer: weight for peer, weight in weights.items() if weight > 0}
    found = dict.fromkeys([*weights, *newcomers], 0.0)
    if not solid:
        return found | dict.fromkeys(newcomers, 1.0 / len(newcomers)) if newcomers else found
    total = sum(solid.values())
    each = 0.0
    if newcomers:
        middle = sorted(solid.values())[(len(solid) - 1) // 2]
        each = min(PROBATION / len(newcomers), middle / (total + middle * len(newcomers)))
    room = 1.0 - each * len(newcomers)
    most = max(LEAST_CAP, CAP / (len(solid) + len(newcomers)))
    found.update({peer: min(most, weight / total * room) for peer, weight in solid.items()})
    found.update(dict.fromkeys(newcomers, each))
    return found
